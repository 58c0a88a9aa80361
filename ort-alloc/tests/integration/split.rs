//! Borrowing parts of a slab: what is granted is right, and granted exactly where nothing written
//! overlaps.

use std::ops::Range;

use ort_alloc::{OverlapError, split_disjoint};
use proptest::prelude::*;

fn ranges(count: usize) -> impl Strategy<Value = Vec<Range<usize>>> {
    prop::collection::vec((0..130usize, 0..20usize).prop_map(|(start, len)| start..start + len), 0..count)
}

fn overlap(a: &Range<usize>, b: &Range<usize>) -> bool {
    !a.is_empty() && !b.is_empty() && a.start < b.end && b.start < a.end
}

proptest! {
    #[test]
    fn granted_exactly_where_nothing_written_overlaps(reads in ranges(6), writes in ranges(5)) {
        let mut slab: Vec<u8> = (0..140).collect();
        let before = slab.clone();
        let inside = reads.iter().chain(&writes).all(|range| range.end <= slab.len());
        let apart = writes.iter().enumerate().all(|(index, write)| {
            !writes[..index].iter().chain(&reads).any(|other| overlap(write, other))
        });
        let granted = match split_disjoint(&mut slab, &reads, &writes) {
            Ok((read_slices, mut write_slices)) => {
                for slice in &mut write_slices {
                    slice.fill(200);
                }
                for (slice, range) in read_slices.iter().zip(&reads) {
                    prop_assert_eq!(*slice, &before[range.clone()]);
                }
                prop_assert_eq!((read_slices.len(), write_slices.len()), (reads.len(), writes.len()));
                true
            }
            Err(_) => false,
        };
        prop_assert_eq!(granted, inside && apart);
        for (index, byte) in slab.iter().enumerate() {
            let written = granted && writes.iter().any(|range| range.contains(&index));
            prop_assert_eq!(*byte, if written { 200 } else { before[index] });
        }
    }
}

#[test]
fn errors_name_the_ranges() {
    let mut slab = [0u8; 16];
    let overlap = OverlapError::Overlap { write: 4..8, other: 7..9 };
    assert_eq!(split_disjoint(&mut slab, &[0..1, 7..9], &[2..3, 4..8]).err(), Some(overlap));
    let beyond = OverlapError::OutOfBounds { range: 8..17, len: 16 };
    assert_eq!(split_disjoint(&mut slab, &[0..8, 8..17], &[]).err(), Some(beyond));
    let backwards = Range { start: 5, end: 3 };
    let refused = OverlapError::OutOfBounds { range: backwards.clone(), len: 16 };
    assert_eq!(split_disjoint(&mut slab, &[], &[backwards]).err(), Some(refused));
}

#[test]
fn empty_ranges_overlap_nothing() -> Result<(), OverlapError> {
    let mut slab = [1u8; 4];
    let (reads, writes) = split_disjoint(&mut slab, &[2..2, 4..4], &[0..4, 1..1])?;
    assert_eq!((reads.len(), writes.len(), writes[0].len(), writes[1].len()), (2, 2, 4, 0));
    Ok(())
}
