//! Axes as attributes and inputs give them: negative ones count from the back.

use crate::ir::SymShape;
use crate::spec::InferCx;
use crate::{Result, ensure, error};

/// The axis as an index below `rank`; the error says what range is allowed.
pub(super) fn normalize(axis: i64, rank: usize) -> Result<usize> {
    let from_front = if axis < 0 { axis.checked_add(rank as i64) } else { Some(axis) };
    from_front
        .and_then(|axis| usize::try_from(axis).ok())
        .filter(|&axis| axis < rank)
        .ok_or_else(|| error!(InvalidGraph, "axis {axis} is out of range for rank {rank}"))
}

/// The size along an axis that [`normalize`] counted from the front.
pub(super) fn size<T>(shape: &[T], axis: usize) -> Result<&T> {
    shape
        .get(axis)
        .ok_or_else(|| error!(InvalidGraph, "axis {axis} is out of range for rank {}", shape.len()))
}

/// The shape with another size along an axis.
pub(super) fn with_size<T: Clone>(shape: &[T], axis: usize, size: T) -> Vec<T> {
    let mut result = shape.to_vec();
    result.get_mut(axis).into_iter().for_each(|old| *old = size.clone());
    result
}

/// The sizes in front of an axis and behind it.
pub(super) fn around<T>(shape: &[T], axis: usize) -> (&[T], &[T]) {
    let (front, rest) = shape.split_at_checked(axis).unwrap_or((shape, &[]));
    (front, rest.get(1..).unwrap_or(&[]))
}

/// For each dimension, whether it is among `axes`; an axis given twice is an error.
pub(super) fn mask(axes: &[i64], rank: usize) -> Result<Vec<bool>> {
    let mut mask = vec![false; rank];
    for &axis in axes {
        let taken = mask.get_mut(normalize(axis, rank)?).is_none_or(|taken| std::mem::replace(taken, true));
        ensure!(!taken, InvalidGraph, "axis {axis} is given twice");
    }
    Ok(mask)
}

/// Sets output 0 to the shape of input 0, after checking the attribute `axis`.
pub(super) fn infer_same_along_axis(cx: &mut InferCx<'_>) -> Result<()> {
    let Some(shape) = cx.shape(0) else { return Ok(()) };
    let axis = cx.attrs.int("axis")?;
    // A tensor without dimensions has one line of one element.
    normalize(axis, shape.len().max(1))?;
    cx.set_shape(0, shape.to_vec())
}

/// The sizes that `mask` does not cover, or 1 in place of those it covers where they are kept.
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
