//! Removal of the elements of least score, in exact numbers.
//!
//! Of equal scores the first elements are removed: in the order of the file if all of a weight is
//! compared, and in the order of the columns within a row. So the result depends on nothing but
//! the weight.

use super::matrix::MatrixView;
use super::{PruneScope, Sparsity};
use crate::parallel;

/// The zeros of a weight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Zeros {
    /// Those of the original.
    pub before: u64,
    /// Those after the pruning.
    pub after: u64,
    /// The elements.
    pub elements: u64,
}

impl Zeros {
    /// Adds an element, and what it became.
    pub(crate) fn add(&mut self, value: f32, became: f32) {
        self.elements += 1;
        self.before += u64::from(value == 0.0);
        self.after += u64::from(became == 0.0);
    }
}

/// How many of these elements a share removes.
pub(crate) fn removed(share: f64, elements: usize) -> usize {
    (share * elements as f64).round_ties_even() as usize
}

/// Calls a function with the places of the least scores, this many of them.
pub(crate) fn each_least(scores: &[f32], count: usize, mut found: impl FnMut(usize)) {
    if count == 0 || scores.is_empty() {
        return;
    }
    let threshold = {
        let mut sorted = scores.to_vec();
        let last = count.min(scores.len()) - 1;
        *sorted.select_nth_unstable_by(last, f32::total_cmp).1
    };
    let below = scores.iter().filter(|score| score.total_cmp(&threshold).is_lt()).count();
    let mut ties = count.saturating_sub(below);
    for (place, score) in scores.iter().enumerate() {
        let order = score.total_cmp(&threshold);
        if order.is_lt() {
            found(place);
        } else if order.is_eq() && ties > 0 {
            ties -= 1;
            found(place);
        }
    }
}

/// Sets an element to zero.
fn clear(values: &mut [f32], place: usize) {
    if let Some(value) = values.get_mut(place) {
        *value = 0.0;
    }
}

/// The rows that a thread prunes together.
const ROWS: usize = 64;

/// Sets the elements of least score to zero. The score is the magnitude times the factor of the
/// column; `factors` has those of each part of the rows, and nothing for magnitudes alone.
pub(crate) fn prune_by_score(
    elements: &mut [f32],
    view: &MatrixView,
    sparsity: Sparsity,
    factors: &[Vec<f32>],
) {
    if let Sparsity::Share { share, scope: PruneScope::Layer } = sparsity {
        let scores = scores_in_file_order(elements, view, factors);
        let count = removed(share, scores.len());
        each_least(&scores, count, |place| clear(elements, place));
        return;
    }
    let (rows, columns) = (view.row_count(), view.column_count());
    let threads = parallel::threads_for(elements.len());
    // A few chunks a thread, of which each is small beside the weight.
    let chunk = ROWS * threads;
    for first in (0..rows).step_by(chunk) {
        let count = chunk.min(rows - first);
        let mut matrix = view.gather(elements, first, count);
        let jobs: Vec<(usize, &mut [f32])> = matrix
            .chunks_mut(ROWS.saturating_mul(columns).max(1))
            .enumerate()
            .map(|(index, part)| (first + index * ROWS, part))
            .collect();
        parallel::for_each(jobs, |(first, part)| {
            for (row, values) in part.chunks_mut(columns.max(1)).enumerate() {
                prune_row(values, sparsity, factors_of(factors, first + row, rows));
            }
        });
        view.scatter(&matrix, first, elements);
    }
}

/// The factors of the part that a row is in.
fn factors_of(factors: &[Vec<f32>], row: usize, rows: usize) -> &[f32] {
    let part = row * factors.len() / rows.max(1);
    factors.get(part).map(Vec::as_slice).unwrap_or_default()
}

fn scores_of(values: &[f32], factors: &[f32]) -> Vec<f32> {
    let factors = factors.iter().copied().chain(std::iter::repeat(1.0));
    values.iter().zip(factors).map(|(value, factor)| value.abs() * factor).collect()
}

fn scores_in_file_order(elements: &[f32], view: &MatrixView, factors: &[Vec<f32>]) -> Vec<f32> {
    if factors.is_empty() {
        return elements.iter().map(|element| element.abs()).collect();
    }
    let rows = view.row_count();
    let mut scores = vec![0.0; elements.len()];
    for first in (0..rows).step_by(ROWS) {
        let count = ROWS.min(rows - first);
        let mut matrix = view.gather(elements, first, count);
        for (row, values) in matrix.chunks_mut(view.column_count().max(1)).enumerate() {
            let found = scores_of(values, factors_of(factors, first + row, rows));
            values.copy_from_slice(&found);
        }
        view.scatter(&matrix, first, &mut scores);
    }
    scores
}

/// Prunes the elements of one output.
fn prune_row(values: &mut [f32], sparsity: Sparsity, factors: &[f32]) {
    let scores = scores_of(values, factors);
    match sparsity {
        Sparsity::Share { share, .. } => {
            let count = removed(share, values.len());
            each_least(&scores, count, |place| clear(values, place));
        }
        Sparsity::Pattern { kept, of } => {
            for (values, scores) in values.chunks_mut(of.max(1)).zip(scores.chunks(of.max(1))) {
                each_least(scores, scores.len().saturating_sub(kept), |place| clear(values, place));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_are_found_and_of_ties_the_first() {
        for (scores, count, expected) in [
            (&[3.0, 1.0, 2.0][..], 0, &[][..]),
            (&[3.0, 1.0, 2.0], 2, &[1, 2]),
            (&[1.0, 0.0, 1.0, 1.0, 0.0], 3, &[0, 1, 4]),
            (&[2.0; 4], 2, &[0, 1]),
            (&[2.0; 4], 9, &[0, 1, 2, 3]),
            (&[f32::INFINITY, 1.0, f32::INFINITY], 2, &[0, 1]),
            (&[], 3, &[]),
        ] {
            let mut found = Vec::new();
            each_least(scores, count, |place| found.push(place));
            assert_eq!(found, expected, "{scores:?} {count}");
        }
    }

    /// As Python's `round`, which torch.nn.utils.prune takes.
    #[test]
    fn shares_are_rounded_to_even() {
        for (share, elements, expected) in
            [(0.5, 5, 2), (0.5, 7, 4), (0.5, 6, 3), (0.0, 9, 0), (1.0, 9, 9), (0.3, 10, 3), (0.9, 11, 10)]
        {
            assert_eq!(removed(share, elements), expected, "{share} {elements}");
        }
    }

    #[test]
    fn factors_of_parts_apply_to_their_rows() {
        let share = |scope| Sparsity::Share { share: 0.5, scope };
        // Two rows a part: in the first part the second column counts, in the other the first.
        let factors = [vec![0.5, 4.0], vec![4.0, 0.5]];
        let view = MatrixView::rows_first(4, 2);
        for scope in [PruneScope::Row, PruneScope::Layer] {
            let mut values = [1.0, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0, -2.0];
            prune_by_score(&mut values, &view, share(scope), &factors);
            assert_eq!(values, [0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0], "{scope:?}");
        }
    }

    /// Many rows, which several threads prune.
    #[test]
    fn each_row_and_each_group_keeps_its_number() {
        let (rows, columns) = (700, 300);
        let hash = |step: usize| (step as u32).wrapping_mul(0x9e37_79b1) >> 8;
        let weights: Vec<f32> = (0..rows * columns).map(|step| hash(step) as f32 / 1e6 - 8.0).collect();
        let view = MatrixView::columns_first(1, columns, rows);
        let mut values = weights.clone();
        let share = Sparsity::Share { share: 0.3, scope: PruneScope::Row };
        prune_by_score(&mut values, &view, share, &[]);
        for row in view.gather(&values, 0, rows).chunks(columns) {
            assert_eq!(row.iter().filter(|value| **value == 0.0).count(), 90);
        }
        for (kept, of) in [(2, 4), (1, 4), (4, 10), (3, 5)] {
            let mut values = weights.clone();
            prune_by_score(&mut values, &view, Sparsity::Pattern { kept, of }, &[]);
            let (found, given) = (view.gather(&values, 0, rows), view.gather(&weights, 0, rows));
            for (found, given) in found.chunks(of).zip(given.chunks(of)) {
                let least = found.iter().filter(|value| **value != 0.0).map(|value| value.abs());
                let least = least.fold(f32::INFINITY, f32::min);
                assert_eq!(found.iter().filter(|value| **value != 0.0).count(), kept);
                for (found, given) in found.iter().zip(given) {
                    assert!(found == given || *found == 0.0 && given.abs() <= least, "{found} {given}");
                }
            }
        }
    }
}
