//! Shapes, and the elements and bytes that they count.

use std::ops::Range;

use smallvec::SmallVec;

use crate::dtype::DType;
use crate::{Result, ensure, error};

/// The sizes of a tensor's dimensions, outermost first.
///
/// Where speed matters, copy with `Shape::from_slice`: `clone` and `into` copy size by size.
pub type Shape = SmallVec<[usize; 6]>;

/// The largest product of the other sizes of an empty tensor. Kernels may loop over those sizes,
/// although such a tensor takes no memory.
const EMPTY_EXTENT: usize = 1 << 31;

/// Formats the type and shape of an output for messages.
pub(crate) fn in_words(known: &Option<(DType, Shape)>) -> String {
    known.as_ref().map_or("of no known size".to_string(), |(dtype, shape)| format!("{dtype}{shape:?}"))
}

/// Returns the number of elements of a shape. Overflow is an error, and so is an empty tensor whose
/// other sizes multiply to more than 2^31.
pub fn element_count(shape: &[usize]) -> Result<usize> {
    let mut others = shape.iter().filter(|&&size| size != 0);
    let extent = others.try_fold(1usize, |count, &size| count.checked_mul(size));
    match (extent, shape.contains(&0)) {
        // The product is taken without the zeros: `[0, 2^40, 2^40]` has no elements, but kernels
        // loop over the others.
        (Some(extent), true) if extent <= EMPTY_EXTENT => Ok(0),
        (Some(count), false) => Ok(count),
        _ => Err(error!(InvalidArgument, "a shape of {shape:?} has too many elements to address")
            .help("use smaller sizes")),
    }
}

/// Multiplies sizes, saturating on overflow. Parts of a shape may overflow even if the whole does
/// not, because it contains a 0.
pub(crate) fn saturating_product(sizes: &[usize]) -> usize {
    sizes.iter().fold(1, |product, &size| product.saturating_mul(size))
}

/// Returns the size in bytes of a tensor of fixed-size elements. Strings and overflow are errors.
pub fn byte_count(dtype: DType, shape: &[usize]) -> Result<usize> {
    dtype.byte_len(element_count(shape)?).ok_or_else(|| {
        error!(
            InvalidArgument,
            "a {} tensor of shape {shape:?} is too large, or its elements have no fixed size",
            dtype.name()
        )
        .help("use smaller sizes, and no strings")
    })
}

/// Returns the byte range of `count` elements from `offset` on. Packed types must start on a byte.
pub(crate) fn element_byte_range(dtype: DType, offset: usize, count: usize) -> Result<Range<usize>> {
    let no_bytes = || error!(Fail, "elements {offset}+{count} of {} are not whole bytes", dtype.name());
    let bits = dtype.bits().ok_or_else(no_bytes)? as usize;
    let start = offset.checked_mul(bits).ok_or_else(no_bytes)?;
    // Only types of less than 8 bits can fail here; a shift of all bits would need a copy.
    ensure!(start % 8 == 0, Fail, "a view of {} starts inside a byte", dtype.name());
    let len = dtype.byte_len(count).ok_or_else(no_bytes)?;
    Ok(start / 8..start / 8 + len)
}
