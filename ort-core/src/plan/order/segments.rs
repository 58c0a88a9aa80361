//! Two orders of the same steps, cut where both have run the same ones.
//!
//! At a cut the same values are alive in both, so the part between two cuts can be taken from
//! either.

#![allow(
    clippy::indexing_slicing,
    reason = "orders are permutations of the steps, and the ranges lie between two cuts of them"
)]

use std::ops::Range;

use super::footprint::Footprint;

/// `base` with those parts of `other` whose peak is lower: higher at none of the sizes, lower at
/// some.
pub(super) fn join(base: &[usize], other: &[usize], footprint: &[Footprint]) -> Vec<usize> {
    choose(base, other, footprint, |ours, theirs, _| {
        let pairs = || ours.iter().zip(theirs);
        pairs().all(|(ours, theirs)| theirs <= ours) && pairs().any(|(ours, theirs)| theirs < ours)
    })
}

/// `base` with those parts of `given` that do not raise the peak of the whole.
pub(super) fn restore(base: &[usize], given: &[usize], footprint: &[Footprint]) -> Vec<usize> {
    choose(base, given, footprint, |_, theirs, whole| {
        theirs.iter().zip(whole).all(|(theirs, whole)| theirs <= whole)
    })
}

/// Takes each part from `other` where `takes` says so, of the peaks of the part in both and the
/// peak of `base`.
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

fn peaks(simulated: &[Vec<u64>], part: Range<usize>) -> Vec<u64> {
    simulated.iter().map(|alive| alive[part.clone()].iter().copied().max().unwrap_or(0)).collect()
}

/// The smallest parts that hold the same steps in both orders, of those that differ.
fn parts(base: &[usize], other: &[usize]) -> Vec<Range<usize>> {
    let mut place = vec![0; base.len()];
    for (index, &step) in base.iter().enumerate() {
        place[step] = index;
    }
    let mut parts = Vec::new();
    let (mut start, mut furthest) = (0, 0);
    for (index, &step) in other.iter().enumerate() {
        furthest = furthest.max(place[step]);
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
