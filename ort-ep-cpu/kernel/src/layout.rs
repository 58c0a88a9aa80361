//! Axes and shapes, as kernels iterate over them.

#![allow(
    clippy::indexing_slicing,
    reason = "places are counted over shapes that inference checked and that views are as long as"
)]

use ort_core::tensor::Shape;
use ort_core::{Result, error};
use smallvec::SmallVec;

/// Returns the axis as an index below `rank`.
pub fn normalize_axis(axis: i64, rank: usize) -> Result<usize> {
    let from_front = if axis < 0 { axis.saturating_add(rank as i64) } else { axis };
    usize::try_from(from_front)
        .ok()
        .filter(|&axis| axis < rank)
        .ok_or_else(|| error!(Fail, "axis {axis} is out of range for rank {rank}"))
}

/// Splits a shape around one axis: the product of the sizes before it, its own size, and the
/// product of the sizes after it.
pub fn around_axis(shape: &[usize], axis: i64) -> Result<[usize; 3]> {
    if shape.is_empty() {
        normalize_axis(axis, 1)?;
        return Ok([1, 1, 1]);
    }
    let axis = normalize_axis(axis, shape.len())?;
    Ok([shape[..axis].iter().product(), shape[axis], shape[axis + 1..].iter().product()])
}

/// Dimensions with their sizes and strides, outermost first.
pub type Dimensions = SmallVec<[(usize, usize); 4]>;

/// The elements of a tensor, split into reduced and kept dimensions. Adjacent dimensions of one
/// kind are merged, so that the innermost run is as long as possible.
#[derive(Debug)]
pub struct Layout {
    /// The kept dimensions, without the innermost run.
    pub kept: Dimensions,
    /// The reduced dimensions, without the innermost run.
    pub reduced: Dimensions,
    /// The length of the innermost run of contiguous elements.
    pub inner: usize,
    /// Whether the innermost run is reduced.
    pub inner_reduced: bool,
}

impl Layout {
    /// Returns the layout of `shape` when the dimensions of `mask` are reduced.
    pub fn new(shape: &[usize], mask: &[bool]) -> Layout {
        // Merged dimensions, innermost first, as (size, stride, reduced).
        let mut merged: SmallVec<[(usize, usize, bool); 6]> = SmallVec::new();
        let mut stride = 1usize;
        for (&size, &reduced) in shape.iter().zip(mask).rev() {
            match merged.last_mut() {
                // A dimension of size 1 neither separates its neighbours nor needs a loop.
                _ if size == 1 => {}
                Some((run, _, kind)) if *kind == reduced => *run *= size,
                _ => merged.push((size, stride, reduced)),
            }
            // Saturates, because sizes next to a 0 may be huge; such a layout is not walked.
            stride = stride.saturating_mul(size);
        }
        let mut rest = merged.into_iter();
        let (inner, _, inner_reduced) = rest.next().unwrap_or((1, 1, false));
        let mut layout = Layout { kept: Dimensions::new(), reduced: Dimensions::new(), inner, inner_reduced };
        for (size, stride, reduced) in rest {
            let list = if reduced { &mut layout.reduced } else { &mut layout.kept };
            list.insert(0, (size, stride));
        }
        layout
    }

    /// Returns how many runs are reduced for each output.
    #[inline]
    pub fn runs(&self) -> usize {
        count(&self.reduced)
    }

    /// Returns how many elements are reduced for each output.
    #[inline]
    pub fn combined(&self) -> usize {
        self.runs() * if self.inner_reduced { self.inner } else { 1 }
    }
}

/// Returns the number of positions of these dimensions.
#[inline]
pub fn count(dimensions: &Dimensions) -> usize {
    dimensions.iter().map(|&(size, _)| size).product()
}

/// Returns the offset of the position with this linear index.
#[inline]
pub fn offset(dimensions: &[(usize, usize)], mut index: usize) -> usize {
    let mut offset = 0;
    // Innermost first, so that each division yields one coordinate.
    for &(size, stride) in dimensions.iter().rev() {
        offset += index % size * stride;
        index /= size;
    }
    offset
}

/// Returns the row-major strides of `shape` as broadcast to `rank` dimensions. A stride is 0 if the
/// size is 1 or missing.
pub fn broadcast_strides(shape: &[usize], rank: usize) -> Shape {
    let mut strides: Shape = std::iter::repeat_n(0, rank).collect();
    let mut stride = 1;
    let start = rank.saturating_sub(shape.len());
    for (index, &size) in shape.iter().enumerate().rev() {
        if size != 1 {
            strides[start + index] = stride;
        }
        stride *= size;
    }
    strides
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_merge() {
        let layout = Layout::new(&[2, 3, 4, 5], &[false, true, true, false]);
        assert_eq!((layout.inner, layout.inner_reduced), (5, false));
        assert_eq!((layout.kept.as_slice(), layout.reduced.as_slice()), (&[(2, 60)][..], &[(12, 5)][..]));
        let layout = Layout::new(&[2, 1, 4], &[true, false, true]);
        assert_eq!((layout.inner, layout.inner_reduced, layout.runs()), (8, true, 1));
        let layout = Layout::new(&[2, 0], &[false, true]);
        assert_eq!((layout.inner, layout.combined()), (0, 0));
    }

    #[test]
    fn offsets_follow_strides() {
        let dimensions = Dimensions::from_slice(&[(2, 60), (3, 5)]);
        let offsets: Vec<usize> = (0..count(&dimensions)).map(|index| offset(&dimensions, index)).collect();
        assert_eq!(offsets, [0, 5, 10, 60, 65, 70]);
        assert_eq!(broadcast_strides(&[3, 1, 2], 4).as_slice(), [0, 2, 0, 1]);
    }
}
