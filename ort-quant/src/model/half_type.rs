//! The floating-point types of 16 bits that models are converted to.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use ort_core::dtype::DType;

use crate::noise::Noise;

/// A floating-point type of 16 bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HalfType {
    /// 11 bits of precision, and magnitudes up to 65504.
    #[default]
    Float16,
    /// 8 bits of precision, and the range of float32.
    BFloat16,
}

impl HalfType {
    pub(super) fn dtype(self) -> DType {
        match self {
            HalfType::Float16 => DType::F16,
            HalfType::BFloat16 => DType::BF16,
        }
    }

    /// The name in messages.
    pub(super) fn name(self) -> &'static str {
        match self {
            HalfType::Float16 => "float16",
            HalfType::BFloat16 => "bfloat16",
        }
    }

    /// The name in those of values.
    pub(super) fn suffix(self) -> &'static str {
        match self {
            HalfType::Float16 => "fp16",
            HalfType::BFloat16 => "bf16",
        }
    }

    /// Converts at most [`CHUNK`] numbers to the bytes of 16 bits. Returns what changed in the
    /// finite ones.
    pub(super) fn convert(self, values: &[f32], bytes: &mut [[u8; 2]]) -> Noise {
        match self {
            HalfType::Float16 => convert([f16::ZERO; CHUNK], limited_half, (values, bytes)),
            HalfType::BFloat16 => convert([bf16::ZERO; CHUNK], limited_bfloat, (values, bytes)),
        }
    }
}

/// The elements that are converted at a time.
pub(super) const CHUNK: usize = 1024;

/// The least magnitude that a constant other than 0 becomes: that of float16, as ONNX Runtime's
/// converter has it.
const LEAST_HALF: f32 = 5.96e-8;

/// The number whose nearest float16 counts. Finite numbers stay finite, and none but 0 becomes 0.
#[inline]
fn limited_half(value: f32) -> f32 {
    let limited = value.abs().clamp(LEAST_HALF, f16::MAX.to_f32()).copysign(value);
    if value.is_finite() && value != 0.0 { limited } else { value }
}

/// The number whose nearest bfloat16 counts. Finite numbers stay finite.
#[inline]
fn limited_bfloat(value: f32) -> f32 {
    let limited = value.clamp(bf16::MIN.to_f32(), bf16::MAX.to_f32());
    if value.is_finite() { limited } else { value }
}

/// The nearest float16. Finite numbers stay finite, and none but 0 becomes 0.
pub(super) fn nearest_half(value: f32) -> f16 {
    f16::from_f32(limited_half(value))
}

/// The nearest bfloat16. Finite numbers stay finite.
pub(super) fn nearest_bfloat(value: f32) -> bf16 {
    bf16::from_f32(limited_bfloat(value))
}

/// Converts numbers by slices, because `half` looks for the CPU's instructions once a call.
fn convert<H: Copy>(
    mut halves: [H; CHUNK],
    limited: impl Fn(f32) -> f32,
    (values, bytes): (&[f32], &mut [[u8; 2]]),
) -> Noise
where
    [H]: HalfFloatSliceExt,
{
    let (mut wide, mut noise) = ([0.0_f32; CHUNK], Noise::default());
    let parts = (halves.get_mut(..values.len()), wide.get_mut(..values.len()));
    let (Some(halves), Some(wide)) = parts else { return noise };
    wide.iter_mut().zip(values).for_each(|(limit, value)| *limit = limited(*value));
    halves.convert_from_f32_slice(wide);
    let bits: &[u16] = halves.reinterpret_cast();
    bytes.iter_mut().zip(bits).for_each(|(bytes, bits)| *bytes = bits.to_le_bytes());
    halves.convert_to_f32_slice(wide);
    if values.iter().fold(true, |all, value| all & value.is_finite()) {
        noise.add_all(values, wide);
    } else {
        let pairs = values.iter().zip(&*wide).filter(|(value, _)| value.is_finite());
        pairs.for_each(|(value, became)| noise.add(*value, *became));
    }
    noise
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finite_numbers_stay_finite_in_16_bits() {
        for value in [f32::MAX, f32::MIN, 65520.0, -1e38] {
            assert!(nearest_half(value).is_finite() && nearest_bfloat(value).is_finite(), "{value}");
            assert_eq!(nearest_bfloat(value).is_sign_negative(), value < 0.0);
        }
        assert_eq!(nearest_bfloat(f32::MIN), bf16::MIN);
        assert!(nearest_bfloat(f32::INFINITY).is_infinite() && nearest_bfloat(f32::NAN).is_nan());
    }

    #[test]
    fn converted_chunks_are_the_nearest_numbers() {
        let mut values: Vec<f32> = (0..CHUNK as u16).map(|step| (f32::from(step) - 500.0) * 0.77).collect();
        for odd in [None, Some(f32::NAN), Some(f32::NEG_INFINITY), Some(1e30), Some(1e-30), Some(-0.0)] {
            values.iter_mut().skip(70).take(1).for_each(|value| *value = odd.unwrap_or(*value));
            for ty in [HalfType::Float16, HalfType::BFloat16] {
                let mut bytes = vec![[0; 2]; values.len()];
                let noise = ty.convert(&values, &mut bytes);
                let mut expected = Noise::default();
                for (value, bytes) in values.iter().zip(bytes) {
                    let (nearest, became) = match ty {
                        HalfType::Float16 => {
                            (nearest_half(*value).to_le_bytes(), nearest_half(*value).to_f32())
                        }
                        HalfType::BFloat16 => {
                            (nearest_bfloat(*value).to_le_bytes(), nearest_bfloat(*value).to_f32())
                        }
                    };
                    assert_eq!(bytes, nearest, "{value} {ty:?}");
                    if value.is_finite() {
                        expected.add(*value, became);
                    }
                }
                assert!((noise.error - expected.error).abs() <= 1e-9 * expected.error, "{odd:?} {ty:?}");
                assert!((noise.signal - expected.signal).abs() <= 1e-9 * expected.signal, "{odd:?} {ty:?}");
            }
        }
    }
}
