//! The types of quantized codes and of their scales, as kernels learn them when they run (`cu/codes.cuh`).

use ort_core::dtype::DType;
use ort_core::{Result, error};

/// The types of codes of products: one byte each.
pub(super) const BYTES: ort_core::dtype::TypeSet = ort_core::dtype::TypeSet::of(&[DType::I8, DType::U8]);

/// The number of a type of codes: its bits, and 64 more where it has a sign.
pub(super) fn code_kind(dtype: DType) -> Result<usize> {
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
