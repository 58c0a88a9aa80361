//! The types of quantized codes and of their scales, as kernels learn them when they run
//! (`cu/codes.cuh`).

use ort_core::dtype::{DType, TypeSet};
use ort_core::{Result, error};

/// The types of codes of products: one byte each.
pub(super) const BYTES: TypeSet = TypeSet::of(&[DType::I8, DType::U8]);

/// Floats of eight and four bits that have a sign, in the order of their numbers in `cu/narrow.cu`.
const FORMATS: [DType; 5] =
    [DType::F8E4M3FN, DType::F8E4M3FNUZ, DType::F8E5M2, DType::F8E5M2FNUZ, DType::F4E2M1];
/// The same, as what numbers are quantized to.
pub(super) const NARROW: TypeSet = TypeSet::of(&FORMATS);
/// Added to the number of such a type where numbers beyond the largest become infinity or NaN.
pub(super) const BEYOND: usize = 4096;

/// The number of a type of codes: its bits, and 64 more where it has a sign; of a narrow float 128
/// more, and 256 times its format.
pub(super) fn code_kind(dtype: DType) -> Result<usize> {
    let format = FORMATS.into_iter().chain([DType::F8E8M0]).position(|own| own == dtype);
    if let (Some(format), Some(bits)) = (format, dtype.bits()) {
        return Ok(bits as usize + 128 + 256 * format);
    }
    let bits = dtype.bits().filter(|bits| *bits <= 32 && dtype.is_integer());
    let bits = bits.ok_or_else(|| error!(NotImplemented, "codes of type {}", dtype.name()))?;
    Ok(bits as usize + if dtype.is_signed() { 64 } else { 0 })
}

/// The number of a type of scales.
pub(super) fn float_kind(dtype: DType) -> Result<usize> {
    match dtype {
        DType::F32 => Ok(0),
        DType::F16 => Ok(1),
        DType::BF16 => Ok(2),
        other => Err(error!(NotImplemented, "scales of type {}", other.name())),
    }
}
