//! Axis arguments: normalization, masks and the shapes that follow from them.
//!
//! Negative axes count from the back, as in numpy.

use crate::ir::SymShape;
use crate::spec::InferCx;
use crate::{Result, ensure, error};

/// Normalizes an axis to an index below `rank`. The error names the rank that the axis exceeds.
pub(super) fn normalize(axis: i64, rank: usize) -> Result<usize> {
    // The standard accepts axes from -rank to rank - 1. A sum that is still negative fails the
    // conversion to `usize`.
    let from_front = if axis < 0 { axis.checked_add(rank as i64) } else { Some(axis) };
    from_front
        .and_then(|axis| usize::try_from(axis).ok())
        .filter(|&axis| axis < rank)
        .ok_or_else(|| error!(InvalidGraph, "axis {axis} is out of range for rank {rank}"))
}

/// Returns the size along an axis that [`normalize`] returned.
pub(super) fn size<T>(shape: &[T], axis: usize) -> Result<&T> {
    shape
        .get(axis)
        .ok_or_else(|| error!(InvalidGraph, "axis {axis} is out of range for rank {}", shape.len()))
}

/// Returns the shape with the size along an axis replaced.
pub(super) fn with_size<T: Clone>(shape: &[T], axis: usize, size: T) -> Vec<T> {
    let mut result = shape.to_vec();
    result.get_mut(axis).into_iter().for_each(|old| *old = size.clone());
    result
}

/// Returns the sizes before and after an axis.
pub(super) fn around<T>(shape: &[T], axis: usize) -> (&[T], &[T]) {
    // A scalar has no axis to leave out: `rest` is then empty, and so are both results.
    let (front, rest) = shape.split_at_checked(axis).unwrap_or((shape, &[]));
    (front, rest.get(1..).unwrap_or(&[]))
}

/// Returns for each dimension whether it is among `axes`. A repeated axis is an error.
pub(super) fn mask(axes: &[i64], rank: usize) -> Result<Vec<bool>> {
    let mut mask = vec![false; rank];
    for &axis in axes {
        // `normalize` returned an index below the rank, so `get_mut` finds every entry.
        let taken = mask.get_mut(normalize(axis, rank)?).is_none_or(|taken| std::mem::replace(taken, true));
        ensure!(!taken, InvalidGraph, "axis {axis} is given twice");
    }
    Ok(mask)
}

/// Infers output 0 with the shape of input 0, after checking the attribute `axis`.
pub(super) fn infer_same_along_axis(cx: &mut InferCx<'_>) -> Result<()> {
    let Some(shape) = cx.shape(0) else { return Ok(()) };
    let axis = cx.attrs.int("axis")?;
    // A scalar counts as a vector of one element, so axes 0 and -1 are valid.
    normalize(axis, shape.len().max(1))?;
    cx.set_shape(0, shape.to_vec())
}

/// Returns the shape after a reduction: the axes in `mask` are dropped, or become 1 with `keep`.
pub(super) fn without(shape: &SymShape, mask: &[bool], keep: bool) -> SymShape {
    let sizes = shape.iter().zip(mask);
    sizes
        .filter_map(|(size, &reduced)| match (reduced, keep) {
            (false, _) => Some(size.clone()),
            (true, true) => Some(1.into()),
            (true, false) => None,
        })
        .collect()
}
