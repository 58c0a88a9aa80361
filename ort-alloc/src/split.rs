//! Borrowing several parts of one slab at once: many to read, some to write, checked to be
//! disjoint.

use std::ops::Range;

use smallvec::SmallVec;
use thiserror::Error;

/// Parts of a slab that are read.
pub type ReadSlices<'slab> = SmallVec<[&'slab [u8]; 16]>;
/// Parts of a slab that are written.
pub type WriteSlices<'slab> = SmallVec<[&'slab mut [u8]; 4]>;

/// The reason why ranges of a slab cannot be borrowed together.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum OverlapError {
    /// A range exceeds the slab, or ends before its start.
    #[error("bytes {} to {} are out of range for a slab of {len} bytes", range.start, range.end)]
    OutOfBounds {
        /// The range.
        range: Range<usize>,
        /// The length of the slab in bytes.
        len: usize,
    },
    /// A range to write overlaps another range.
    #[error(
        "bytes {} to {} are to be written, but overlap bytes {} to {}",
        write.start, write.end, other.start, other.end
    )]
    Overlap {
        /// The range to write.
        write: Range<usize>,
        /// The other range, to read or to write.
        other: Range<usize>,
    },
}

/// Borrows `reads` and `writes` of `slab` together and returns the slices in the given order.
///
/// Ranges to read may overlap each other. A range to write must not overlap any other; an in-place
/// operation passes its range once, as a write. Empty ranges overlap nothing.
///
/// ```
/// let mut slab = [1u8, 2, 3, 4];
/// {
///     let (reads, mut writes) = ort_alloc::split_disjoint(&mut slab, &[0..2, 1..3], &[3..4])?;
///     writes[0][0] = reads[0][1] + reads[1][1];
/// }
/// assert_eq!(slab, [1, 2, 3, 5]);
/// assert!(ort_alloc::split_disjoint(&mut slab, &[0..2], &[1..4]).is_err());
/// # Ok::<(), ort_alloc::OverlapError>(())
/// ```
///
/// # Errors
///
/// [`OverlapError`] with the offending ranges.
pub fn split_disjoint<'slab>(
    slab: &'slab mut [u8],
    reads: &[Range<usize>],
    writes: &[Range<usize>],
) -> Result<(ReadSlices<'slab>, WriteSlices<'slab>), OverlapError> {
    check(slab.len(), reads, writes)?;
    let base = slab.as_mut_ptr();
    let reads = reads
        .iter()
        // SAFETY: `check` verified that the range is inside the slab and disjoint from every range
        // to write. `slab` is borrowed exclusively while the slices live.
        .map(|range| unsafe { std::slice::from_raw_parts(base.add(range.start), range.len()) })
        .collect();
    let writes = writes
        .iter()
        // SAFETY: as above; `check` also verified that the writes are disjoint from each other.
        .map(|range| unsafe { std::slice::from_raw_parts_mut(base.add(range.start), range.len()) })
        .collect();
    Ok((reads, writes))
}

fn check(len: usize, reads: &[Range<usize>], writes: &[Range<usize>]) -> Result<(), OverlapError> {
    for range in reads.iter().chain(writes) {
        if range.start > range.end || range.end > len {
            return Err(OverlapError::OutOfBounds { range: range.clone(), len });
        }
    }
    let mut sorted: SmallVec<[&Range<usize>; 8]> = writes.iter().filter(|range| !range.is_empty()).collect();
    sorted.sort_unstable_by_key(|range| range.start);
    for (write, next) in sorted.iter().zip(sorted.iter().skip(1)) {
        if write.end > next.start {
            return Err(OverlapError::Overlap { write: Range::clone(write), other: Range::clone(next) });
        }
    }
    for read in reads.iter().filter(|range| !range.is_empty()) {
        // The writes are sorted and disjoint, so the first one that ends after the read's start
        // decides.
        let index = sorted.partition_point(|write| write.end <= read.start);
        if let Some(write) = sorted.get(index).filter(|write| write.start < read.end) {
            return Err(OverlapError::Overlap { write: Range::clone(write), other: read.clone() });
        }
    }
    Ok(())
}
