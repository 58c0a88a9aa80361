//! Elements as data movement sees them: types by size, and units of several adjacent elements.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::NodeView;
use ort_core::{Result, error};

use super::MOST_AXES;
use crate::launch::Launch;

/// Types with elements of 1, 2, 4 or 8 bytes.
pub(super) const MOVED: TypeSet =
    TypeSet::NUMERIC.union(TypeSet::FLOAT8).union(TypeSet::of(&[DType::Bool, DType::F8E8M0, DType::C64]));

/// The most bytes a thread moves at once.
pub(super) const WIDEST: usize = 16;

/// Whether no tensor exceeds [`MOST_AXES`], as far as ranks are known.
pub(super) fn few_axes(node: &NodeView<'_>) -> bool {
    let result = node.output_type(0);
    let result = result.as_tensor().and_then(|tensor| Some(tensor.shape.as_ref()?.len()));
    let given = (0..node.node.inputs.len()).filter_map(|index| node.rank(index));
    given.chain(result).all(|rank| rank <= MOST_AXES)
}

/// Returns the bytes of an element.
pub(super) fn element_bytes(dtype: DType) -> Result<usize> {
    let bytes = dtype.byte_size().filter(|bytes| matches!(bytes, 1 | 2 | 4 | 8));
    bytes.ok_or_else(|| error!(NotImplemented, "elements of type {} are not moved", dtype.name()))
}

/// Returns how many elements can be moved at once, given that all these numbers are multiples of
/// it.
pub(super) fn unit(bytes: usize, numbers: impl IntoIterator<Item = usize>) -> usize {
    let widest = (WIDEST / bytes.max(1)).max(1);
    numbers.into_iter().fold(widest, |unit, number| {
        // Only powers of two count, so a number's lowest set bit is its largest usable divisor.
        if number == 0 { unit } else { unit.min(1 << number.trailing_zeros().min(8)) }
    })
}

/// Returns a launch of the entry for units of this many bytes.
pub(super) fn by_bytes(family: &'static str, entry: &str, bytes: usize) -> Launch {
    Launch::new(family, format!("{entry}_b{bytes}"))
}
