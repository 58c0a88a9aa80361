//! The floating-point types of 16 bits that models are converted to.

use ort_core::dtype::DType;

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
}
