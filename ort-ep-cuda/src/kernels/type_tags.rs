//! Runtime type tags for quantized values and scales, as in `cu/codes.cuh`.

use ort_core::dtype::{DType, TypeSet};
use ort_core::{Result, error};

/// The quantized types of integer GEMMs: one byte each.
pub(super) const BYTES: TypeSet = TypeSet::of(&[DType::I8, DType::U8]);

/// Signed FP8 and FP4 formats, in the order of `cu/narrow.cu`.
const FORMATS: [DType; 5] =
    [DType::F8E4M3FN, DType::F8E4M3FNUZ, DType::F8E5M2, DType::F8E5M2FNUZ, DType::F4E2M1];
/// The same, as quantization targets.
pub(super) const FP8_FP4: TypeSet = TypeSet::of(&FORMATS);
/// Flag of such a type: out-of-range values become infinity or NaN instead of saturating.
pub(super) const BEYOND: usize = 4096;

/// Returns the tag of a quantized type: its bits, plus 64 if it is signed. For an FP8 or FP4 type:
/// its bits, plus 128, plus 256 times its format.
pub(super) fn quantized_tag(dtype: DType) -> Result<usize> {
    let format = FORMATS.into_iter().chain([DType::F8E8M0]).position(|own| own == dtype);
    if let (Some(format), Some(bits)) = (format, dtype.bits()) {
        return Ok(bits as usize + 128 + 256 * format);
    }
    let bits = dtype.bits().filter(|bits| *bits <= 32 && dtype.is_integer());
    let bits = bits.ok_or_else(|| {
        error!(NotImplemented, "quantized values of type {} are not supported", dtype.name())
    })?;
    Ok(bits as usize + if dtype.is_signed() { 64 } else { 0 })
}

/// Returns the tag of a scale type.
pub(super) fn scale_tag(dtype: DType) -> Result<usize> {
    match dtype {
        DType::F32 => Ok(0),
        DType::F16 => Ok(1),
        DType::BF16 => Ok(2),
        other => Err(error!(NotImplemented, "scales of type {} are not supported", other.name())),
    }
}
