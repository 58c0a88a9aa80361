//! SparseGPT: removal of elements with compensation by the elements that come after them.
//!
//! Columns are visited in order, in blocks of 128. Within a block, the elements of least
//! `w² / U_jj²` are removed, where `U` is the upper Cholesky factor of the inverse of the Hessian;
//! an N:M pattern chooses within each group when the sweep reaches it. A removed element is an
//! error that later elements of its row make up for, as in GPTQ.
//!
//! See "SparseGPT: Massive Language Models Can Be Accurately Pruned in One-Shot", arXiv:2301.00774.

#![allow(clippy::indexing_slicing, reason = "columns are below `k`, and lanes below `TILE`")]

use std::ops::Range;

use super::scores::{each_least, removed};
use super::{PruneScope, Sparsity};
use crate::feedback::Feedback;
use crate::parallel;
use crate::tile::{Lanes, TILE, subtract};

/// The columns whose errors are handed on to the columns after them together.
const BLOCK: usize = 128;

/// Columns of up to [`TILE`] rows. Lanes after the last row are zero.
struct RowTile {
    columns: Vec<Lanes>,
    rows: usize,
}

/// The columns of a block, and which of their elements are removed.
struct Block {
    columns: Range<usize>,
    /// By row, then by column; empty for a pattern.
    is_removed: Vec<bool>,
}

/// Prunes the rows of a matrix that have the same inputs. `before` is the number of elements of the
/// layer that were pruned already, so that the share of all of them is exact; it grows.
pub(crate) fn prune_with_update(
    matrix: &mut [f32],
    feedback: &Feedback,
    sparsity: Sparsity,
    before: &mut usize,
) {
    let k = feedback.order().len();
    if k == 0 {
        return;
    }
    let mut tiles: Vec<RowTile> = matrix.chunks(TILE * k).map(|rows| RowTile::load(rows, k)).collect();
    let width = match sparsity {
        // A group is inside of a block.
        Sparsity::Pattern { of, .. } => (BLOCK / of.max(1) * of).max(of).max(1),
        Sparsity::Share { .. } => BLOCK,
    };
    for start in (0..k).step_by(width) {
        let columns = start..k.min(start + width);
        let is_removed = match sparsity {
            Sparsity::Share { share, scope } => choose(&tiles, feedback, (share, scope), &columns, *before),
            Sparsity::Pattern { .. } => Vec::new(),
        };
        *before += matrix.len() / k * columns.len();
        let block = Block { columns, is_removed };
        let threads = parallel::threads_for(matrix.len()).min(tiles.len());
        let share = tiles.len().div_ceil(threads.max(1)).max(1);
        let jobs: Vec<(usize, &mut [RowTile])> = tiles.chunks_mut(share).enumerate().collect();
        parallel::for_each(jobs, |(index, tiles)| {
            for (place, tile) in tiles.iter_mut().enumerate() {
                tile.sweep(feedback, sparsity, &block, (index * share + place) * TILE);
            }
        });
    }
    for (tile, rows) in tiles.iter().zip(matrix.chunks_mut(TILE * k)) {
        tile.store(rows, k);
    }
}

/// What it costs to remove an element. One whose channel no sample uses costs nothing.
fn cost(feedback: &Feedback, column: usize, value: f32) -> f32 {
    if feedback.importance()[column] == 0.0 {
        return 0.0;
    }
    let error = value / feedback.pivot(column);
    error * error
}

/// Chooses the elements of a block that are removed.
fn choose(
    tiles: &[RowTile],
    feedback: &Feedback,
    (share, scope): (f64, PruneScope),
    columns: &Range<usize>,
    before: usize,
) -> Vec<bool> {
    let mut costs = Vec::new();
    for tile in tiles {
        for row in 0..tile.rows {
            costs.extend(columns.clone().map(|column| cost(feedback, column, tile.columns[column][row])));
        }
    }
    let mut is_removed = vec![false; costs.len()];
    match scope {
        PruneScope::Layer => {
            let count = removed(share, before + costs.len()) - removed(share, before);
            each_least(&costs, count, |place| is_removed[place] = true);
        }
        PruneScope::Row => {
            let count = removed(share, columns.end) - removed(share, columns.start);
            let width = columns.len();
            for (costs, is_removed) in costs.chunks(width).zip(is_removed.chunks_mut(width)) {
                each_least(costs, count, |place| is_removed[place] = true);
            }
        }
    }
    is_removed
}

impl RowTile {
    fn load(rows: &[f32], k: usize) -> RowTile {
        let mut columns = vec![[0.0; TILE]; k];
        for (lane, row) in rows.chunks(k).enumerate() {
            columns.iter_mut().zip(row).for_each(|(lanes, value)| lanes[lane] = *value);
        }
        RowTile { columns, rows: rows.len() / k }
    }

    fn store(&self, rows: &mut [f32], k: usize) {
        for (lane, row) in rows.chunks_mut(k).enumerate() {
            row.iter_mut().zip(&self.columns).for_each(|(value, lanes)| *value = lanes[lane]);
        }
    }

    /// Removes the elements of a block, and changes those after them. `first` is the tile's first
    /// row.
    fn sweep(&mut self, feedback: &Feedback, sparsity: Sparsity, block: &Block, first: usize) {
        let Block { columns, is_removed } = block;
        let width = columns.len();
        let mut group = vec![[false; TILE]; 0];
        let mut errors: Vec<Lanes> = Vec::with_capacity(width);
        for column in columns.clone() {
            if let Sparsity::Pattern { kept, of } = sparsity
                && (column - columns.start).is_multiple_of(of)
            {
                group = self.choose_group(feedback, column..columns.end.min(column + of), kept);
            }
            let mut error = [0.0; TILE];
            for lane in 0..self.rows {
                let is_error = match sparsity {
                    Sparsity::Pattern { of, .. } => group[(column - columns.start) % of][lane],
                    Sparsity::Share { .. } => is_removed[(first + lane) * width + column - columns.start],
                };
                if is_error {
                    error[lane] = std::mem::take(&mut self.columns[column][lane]);
                }
            }
            for later in column + 1..columns.end {
                subtract(&mut self.columns[later], feedback.share(column, later), &error);
            }
            errors.push(error);
        }
        for later in columns.end..self.columns.len() {
            for (column, error) in columns.clone().zip(&errors) {
                subtract(&mut self.columns[later], feedback.share(column, later), error);
            }
        }
    }

    /// Which elements of a group are removed, by column.
    fn choose_group(&self, feedback: &Feedback, columns: Range<usize>, kept: usize) -> Vec<[bool; TILE]> {
        let mut is_removed = vec![[false; TILE]; columns.len()];
        for lane in 0..self.rows {
            let costs = columns.clone().map(|column| cost(feedback, column, self.columns[column][lane]));
            let costs: Vec<f32> = costs.collect();
            let count = costs.len().saturating_sub(kept);
            each_least(&costs, count, |place| is_removed[place][lane] = true);
        }
        is_removed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::feedback::GptqOptions;
    use crate::hessian::Hessian;

    /// A weighted sum of neighbours.
    fn inputs(rows: usize, columns: usize) -> Vec<f32> {
        let unit = |step: usize| ((step as u32).wrapping_mul(0x9e37_79b1) >> 8) as f32 / 16_777_216.0 - 0.5;
        let mut values: Vec<f32> = (0..rows * columns).map(unit).collect();
        for place in 1..values.len() {
            values[place] += 0.75 * values[place - 1];
        }
        values
    }

    fn hessian(values: &[f32], columns: usize) -> Hessian {
        let mut hessian = Hessian::new(columns);
        hessian.observe(values, columns);
        hessian
    }

    /// Solves `matrix x = right` by Gaussian elimination.
    fn solved(mut matrix: Vec<Vec<f64>>, mut right: Vec<f64>) -> Vec<f64> {
        for step in 0..right.len() {
            for row in step + 1..right.len() {
                let factor = matrix[row][step] / matrix[step][step];
                for column in step..right.len() {
                    matrix[row][column] -= factor * matrix[step][column];
                }
                right[row] -= factor * right[step];
            }
        }
        for step in (0..right.len()).rev() {
            for row in 0..step {
                right[row] -= matrix[row][step] / matrix[step][step] * right[step];
                matrix[row][step] = 0.0;
            }
            right[step] /= matrix[step][step];
        }
        right
    }

    /// If the first element of a row is removed, all others come after it: they are the
    /// least-squares solution for the outputs of the row.
    #[test]
    fn elements_after_the_first_solve_the_least_squares_problem() {
        let columns = 9;
        let hessian = hessian(&inputs(40, columns), columns);
        let damping = 1e-9;
        let feedback = Feedback::of(&hessian, GptqOptions { damping, ..GptqOptions::default() }).unwrap();
        // The least element by far is the first.
        let weights: Vec<f32> = (0..columns as u8).map(|place| if place == 0 { 0.1 } else { 9.0 }).collect();
        let mut row = weights.clone();
        let sparsity = Sparsity::Share { share: 1.0 / columns as f64, scope: PruneScope::Layer };
        prune_with_update(&mut row, &feedback, sparsity, &mut 0);
        // H restricted to the others times x is the whole H times the weights.
        let others = 1..columns;
        let matrix: Vec<Vec<f64>> =
            others.clone().map(|one| others.clone().map(|other| hessian.get(one, other)).collect()).collect();
        let product = |one: usize| {
            (0..columns).map(|other| hessian.get(one, other) * f64::from(weights[other])).sum::<f64>()
        };
        let expected = solved(matrix, others.map(product).collect());
        assert_eq!(row[0], 0.0);
        for (found, expected) in row[1..].iter().zip(expected) {
            assert!((f64::from(*found) - expected).abs() < 1e-4, "{found} {expected}");
        }
    }

    /// The same bits whatever number of threads works on the rows: many of them are pruned as each
    /// by itself.
    #[test]
    fn rows_do_not_depend_on_each_other() {
        let (rows, columns) = (1300, 140);
        let feedback =
            Feedback::of(&hessian(&inputs(300, columns), columns), GptqOptions::default()).unwrap();
        let weights = inputs(rows, columns);
        for sparsity in
            [Sparsity::Share { share: 0.5, scope: PruneScope::Row }, Sparsity::Pattern { kept: 2, of: 4 }]
        {
            let mut all = weights.clone();
            prune_with_update(&mut all, &feedback, sparsity, &mut 0);
            for (row, found) in all.chunks(columns).enumerate().step_by(31) {
                let mut alone = weights[row * columns..(row + 1) * columns].to_vec();
                prune_with_update(&mut alone, &feedback, sparsity, &mut 0);
                assert_eq!(found, alone, "{sparsity:?} {row}");
                assert_eq!(found.iter().filter(|value| **value == 0.0).count(), columns / 2);
            }
        }
    }

    /// The share is that of all groups together, which end in the middle of an element.
    #[test]
    fn the_share_of_a_layer_is_exact() {
        let columns = 131;
        let feedback =
            Feedback::of(&hessian(&inputs(300, columns), columns), GptqOptions::default()).unwrap();
        for share in [0.1, 0.5, 0.777, 1.0] {
            let (mut before, mut zeros) = (0, 0);
            for rows in [3, 1, 7] {
                let mut matrix = inputs(rows, columns);
                let sparsity = Sparsity::Share { share, scope: PruneScope::Layer };
                prune_with_update(&mut matrix, &feedback, sparsity, &mut before);
                zeros += matrix.iter().filter(|value| **value == 0.0).count();
            }
            assert_eq!((before, zeros), (11 * columns, removed(share, 11 * columns)), "{share}");
        }
    }

    /// Their elements cost nothing, so that they are the first to go.
    #[test]
    fn channels_that_no_sample_uses_are_removed_first() {
        let columns = 8;
        let mut values = inputs(30, columns);
        values.iter_mut().skip(5).step_by(columns).for_each(|value| *value = 0.0);
        let feedback = Feedback::of(&hessian(&values, columns), GptqOptions::default()).unwrap();
        let mut matrix = vec![1.0; columns];
        matrix[5] = 100.0;
        let sparsity = Sparsity::Share { share: 0.125, scope: PruneScope::Row };
        prune_with_update(&mut matrix, &feedback, sparsity, &mut 0);
        let expected: Vec<f32> = (0..8_u8).map(|place| if place == 5 { 0.0 } else { 1.0 }).collect();
        assert_eq!(matrix, expected);
    }
}
