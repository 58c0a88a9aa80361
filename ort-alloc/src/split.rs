//! Borrowing several parts of one slab at once: many to read, some to write, checked to be
//! disjoint.

use std::ops::Range;

use smallvec::SmallVec;
use thiserror::Error;

/// A part of some regions of memory: the index of its region, and its bytes there.
pub type Part = (usize, Range<usize>);

/// The slices that [`split_disjoint`] borrows. Their lists can be reused.
///
/// ```
/// let mut slab = [0u8; 8];
/// let slices = ort_alloc::split_disjoint([&mut slab[..]], &[(0, 0..4)], &[], Default::default())?;
/// // Nothing is borrowed any more, but the next step allocates no lists.
/// let reused: ort_alloc::Slices<'static> = slices.emptied();
/// assert!(reused.reads.is_empty() && reused.reads.capacity() > 0);
/// # Ok::<(), ort_alloc::OverlapError>(())
/// ```
#[derive(Debug, Default)]
pub struct Slices<'memory> {
    /// The parts to read, in the order of the call.
    pub reads: Vec<&'memory [u8]>,
    /// The parts to write, in the order of the call.
    pub writes: Vec<&'memory mut [u8]>,
}

impl Slices<'_> {
    /// Ends the borrows, and keeps the memory of the lists.
    pub fn emptied<'memory>(self) -> Slices<'memory> {
        Slices { reads: emptied(self.reads), writes: emptied(self.writes) }
    }
}

/// Drops the elements of a list and returns its memory as a list of another type. Nothing is
/// allocated if elements of both types have the same size and alignment, as they do if only a
/// lifetime differs.
///
/// ```
/// let text = String::from("borrowed");
/// let borrowed: Vec<&str> = vec![&text];
/// let capacity = borrowed.capacity();
/// let list: Vec<&'static str> = ort_alloc::emptied(borrowed);
/// assert!(list.is_empty() && list.capacity() == capacity);
/// ```
pub fn emptied<From, To>(mut list: Vec<From>) -> Vec<To> {
    list.clear();
    // The standard library collects in place. There is no element for which the closure could fail.
    list.into_iter().filter_map(|_| None).collect()
}

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

/// Borrows parts of some regions together: `reads` to read and `writes` to write, each in the given
/// order. The lists of `slices` are reused.
///
/// Parts to read may overlap each other. A part to write must not overlap any other; an in-place
/// operation passes its part once, as a write. Empty parts overlap nothing.
///
/// ```
/// let mut slab = [1u8, 2, 3, 4];
/// let parts = (&[(0, 0..2), (0, 1..3)], &[(0, 3..4)]);
/// let mut slices = ort_alloc::split_disjoint([&mut slab[..]], parts.0, parts.1, Default::default())?;
/// slices.writes[0][0] = slices.reads[0][1] + slices.reads[1][1];
/// assert_eq!(slab, [1, 2, 3, 5]);
/// assert!(ort_alloc::split_disjoint([&mut slab[..]], &[(0, 0..2)], &[(0, 1..4)], Default::default()).is_err());
/// # Ok::<(), ort_alloc::OverlapError>(())
/// ```
///
/// # Errors
///
/// [`OverlapError`] with the offending ranges. A region that does not exist has no bytes.
pub fn split_disjoint<'memory>(
    regions: impl IntoIterator<Item = &'memory mut [u8]>,
    reads: &[Part],
    writes: &[Part],
    slices: Slices<'_>,
) -> Result<Slices<'memory>, OverlapError> {
    let mut slices: Slices<'memory> = slices.emptied();
    let regions: SmallVec<[&'memory mut [u8]; 4]> = regions.into_iter().collect();
    check(&regions, reads, writes)?;
    let bases: SmallVec<[*mut u8; 4]> = regions.into_iter().map(<[u8]>::as_mut_ptr).collect();
    // An empty part may be of a region that does not exist.
    let base = |region: usize| bases.get(region).copied().unwrap_or(std::ptr::dangling_mut());
    for (region, range) in reads {
        // SAFETY: `check` verified that the range is inside its region and disjoint from every part
        // to write. The regions are separate, and borrowed exclusively while the slices live.
        let slice = unsafe { std::slice::from_raw_parts(base(*region).add(range.start), range.len()) };
        slices.reads.push(slice);
    }
    for (region, range) in writes {
        // SAFETY: as above; `check` also verified that the writes are disjoint from each other.
        let slice = unsafe { std::slice::from_raw_parts_mut(base(*region).add(range.start), range.len()) };
        slices.writes.push(slice);
    }
    Ok(slices)
}

fn check(regions: &[&mut [u8]], reads: &[Part], writes: &[Part]) -> Result<(), OverlapError> {
    for (region, range) in reads.iter().chain(writes) {
        let len = regions.get(*region).map_or(0, |region| region.len());
        if range.start > range.end || range.end > len {
            return Err(OverlapError::OutOfBounds { range: range.clone(), len });
        }
    }
    let overlap = |write: &Part, other: &Part| {
        Err(OverlapError::Overlap { write: write.1.clone(), other: other.1.clone() })
    };
    // Most steps write one part, and so need no order.
    if let [write] = writes {
        let overlaps = |other: &&Part| {
            let (start, end) = (other.1.start.max(write.1.start), other.1.end.min(write.1.end));
            other.0 == write.0 && start < end
        };
        return reads.iter().find(overlaps).map_or(Ok(()), |other| overlap(write, other));
    }
    let mut sorted: SmallVec<[&Part; 8]> = writes.iter().filter(|part| !part.1.is_empty()).collect();
    sorted.sort_unstable_by_key(|(region, range)| (*region, range.start));
    for (write, next) in sorted.iter().zip(sorted.iter().skip(1)) {
        if write.0 == next.0 && write.1.end > next.1.start {
            return overlap(write, next);
        }
    }
    for read in reads.iter().filter(|part| !part.1.is_empty()) {
        // The writes are sorted and disjoint, so the first one that ends after the read's start
        // decides.
        let index = sorted.partition_point(|write| (write.0, write.1.end) <= (read.0, read.1.start));
        if let Some(write) = sorted.get(index).filter(|write| write.0 == read.0 && write.1.start < read.1.end)
        {
            return overlap(write, read);
        }
    }
    Ok(())
}
