//! Segments of two schedules, cut at each point where both have run the same steps.
//!
//! At a cut the same values are live in both schedules. So the segment between two cuts can come
//! from either one.

#![allow(
    clippy::indexing_slicing,
    reason = "orders are permutations of the steps, and the ranges lie between two cuts of them"
)]

use std::ops::Range;

use super::footprint::Footprint;

/// Replaces segments of `base` with those of `other` if their peak is lower at some of the sizes
/// and higher at none.
pub(super) fn join(base: &[usize], other: &[usize], footprint: &[Footprint]) -> Vec<usize> {
    choose(base, other, footprint, |ours, theirs, _| {
        let pairs = || ours.iter().zip(theirs);
        pairs().all(|(ours, theirs)| theirs <= ours) && pairs().any(|(ours, theirs)| theirs < ours)
    })
}

/// Replaces segments of `base` with those of `given` if that does not raise the peak of the whole.
pub(super) fn restore(base: &[usize], given: &[usize], footprint: &[Footprint]) -> Vec<usize> {
    choose(base, given, footprint, |_, theirs, whole| {
        theirs.iter().zip(whole).all(|(theirs, whole)| theirs <= whole)
    })
}

/// Takes each segment from `other` if `takes` returns true for three peaks: the segment's peak in
/// `base`, its peak in `other`, and the peak of the whole `base`. Each peak has a value for every
/// size.
fn choose(
    base: &[usize],
    other: &[usize],
    footprint: &[Footprint],
    takes: impl Fn(&[u64], &[u64], &[u64]) -> bool,
) -> Vec<usize> {
    let simulated = |order: &[usize]| -> Vec<Vec<u64>> {
        footprint.iter().map(|footprint| footprint.simulate(order)).collect()
    };
    let (ours, theirs) = (simulated(base), simulated(other));
    let whole = peaks(&ours, 0..base.len());
    let mut result = base.to_vec();
    for part in parts(base, other) {
        if takes(&peaks(&ours, part.clone()), &peaks(&theirs, part.clone()), &whole) {
            result[part.clone()].copy_from_slice(&other[part]);
        }
    }
    result
}

/// Returns the peak of a segment at each of the sizes.
fn peaks(simulated: &[Vec<u64>], part: Range<usize>) -> Vec<u64> {
    simulated.iter().map(|alive| alive[part.clone()].iter().copied().max().unwrap_or(0)).collect()
}

/// Returns the smallest segments with the same steps in both orders, of those that differ.
fn parts(base: &[usize], other: &[usize]) -> Vec<Range<usize>> {
    let mut place = vec![0; base.len()];
    for (index, &step) in base.iter().enumerate() {
        place[step] = index;
    }
    let mut parts = Vec::new();
    let (mut start, mut furthest) = (0, 0);
    for (index, &step) in other.iter().enumerate() {
        furthest = furthest.max(place[step]);
        // The first `index + 1` steps of `other` are those of `base`, so both orders can be cut
        // here.
        if furthest == index {
            if index > start {
                parts.push(start..index + 1);
            }
            start = index + 1;
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_hold_the_same_steps() {
        assert_eq!(parts(&[0, 1, 2, 3, 4, 5], &[0, 2, 1, 3, 5, 4]), [1..3, 4..6]);
        assert_eq!(parts(&[0, 1, 2, 3, 4], &[2, 1, 0, 4, 3]), [0..3, 3..5]);
        assert_eq!(parts(&[1, 0, 2], &[1, 0, 2]), []);
    }
}
