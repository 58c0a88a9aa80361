//! Borrowing parts of two regions: what is granted is right, and granted exactly where nothing
//! written overlaps.

use std::ops::Range;

use ort_alloc::{OverlapError, Slices, split_disjoint};
use proptest::prelude::*;

type Part = (usize, Range<usize>);

fn parts(count: usize) -> impl Strategy<Value = Vec<Part>> {
    let part = (0..2usize, 0..130usize, 0..20usize);
    prop::collection::vec(part.prop_map(|(region, start, len)| (region, start..start + len)), 0..count)
}

fn overlap(a: &Part, b: &Part) -> bool {
    a.0 == b.0 && !a.1.is_empty() && !b.1.is_empty() && a.1.start < b.1.end && b.1.start < a.1.end
}

proptest! {
    #[test]
    fn granted_exactly_where_nothing_written_overlaps(reads in parts(6), writes in parts(5)) {
        let mut regions: [Vec<u8>; 2] = [(0..140).collect(), (20..150).collect()];
        let before = regions.clone();
        let inside = reads.iter().chain(&writes).all(|(region, range)| range.end <= before[*region].len());
        let apart = writes.iter().enumerate().all(|(index, write)| {
            !writes[..index].iter().chain(&reads).any(|other| overlap(write, other))
        });
        let borrowed = regions.iter_mut().map(Vec::as_mut_slice);
        let granted = match split_disjoint(borrowed, &reads, &writes, Slices::default()) {
            Ok(mut slices) => {
                for slice in &mut slices.writes {
                    slice.fill(200);
                }
                for (slice, (region, range)) in slices.reads.iter().zip(&reads) {
                    prop_assert_eq!(*slice, &before[*region][range.clone()]);
                }
                prop_assert_eq!((slices.reads.len(), slices.writes.len()), (reads.len(), writes.len()));
                true
            }
            Err(_) => false,
        };
        prop_assert_eq!(granted, inside && apart);
        for (region, bytes) in regions.iter().enumerate() {
            for (index, byte) in bytes.iter().enumerate() {
                let is_in = |part: &Part| part.0 == region && part.1.contains(&index);
                let written = granted && writes.iter().any(is_in);
                prop_assert_eq!(*byte, if written { 200 } else { before[region][index] });
            }
        }
    }
}

#[test]
fn errors_name_the_ranges() {
    let mut slab = [0u8; 16];
    let mut problem = |reads: &[Part], writes: &[Part]| {
        split_disjoint([&mut slab[..]], reads, writes, Slices::default()).err()
    };
    let overlap = OverlapError::Overlap { write: 4..8, other: 7..9 };
    assert_eq!(problem(&[(0, 0..1), (0, 7..9)], &[(0, 2..3), (0, 4..8)]), Some(overlap));
    let beyond = OverlapError::OutOfBounds { range: 8..17, len: 16 };
    assert_eq!(problem(&[(0, 0..8), (0, 8..17)], &[]), Some(beyond));
    let missing = OverlapError::OutOfBounds { range: 0..1, len: 0 };
    assert_eq!(problem(&[(1, 0..1)], &[]), Some(missing));
    let backwards = Range { start: 5, end: 3 };
    let refused = OverlapError::OutOfBounds { range: backwards.clone(), len: 16 };
    assert_eq!(problem(&[], &[(0, backwards)]), Some(refused));
}

#[test]
fn empty_ranges_overlap_nothing() -> Result<(), OverlapError> {
    let mut slab = [1u8; 4];
    let parts = (&[(0, 2..2), (0, 4..4), (7, 0..0)], &[(0, 0..4), (0, 1..1)]);
    let Slices { reads, writes } = split_disjoint([&mut slab[..]], parts.0, parts.1, Slices::default())?;
    assert_eq!((reads.len(), writes.len(), writes[0].len(), writes[1].len()), (3, 2, 4, 0));
    Ok(())
}
