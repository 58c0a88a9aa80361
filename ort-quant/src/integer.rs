//! The integer types of quantized tensors, and the affine grid that a range gives.
//!
//! A code `q` stands for `(q - zero_point) * scale`. The formulas are those of
//! onnxruntime.quantization 1.31.1, so that scales and zero points are bit-identical to its own.

use ort_core::dtype::DType;
use ort_core::{Error, ErrorKind, Result};

use crate::grid::limit;

/// An integer type of quantized values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QuantType {
    /// Signed, 4 bits, two to a byte.
    Int4,
    /// Unsigned, 4 bits, two to a byte.
    UInt4,
    /// Signed, 8 bits.
    Int8,
    /// Unsigned, 8 bits.
    UInt8,
    /// Signed, 16 bits.
    Int16,
    /// Unsigned, 16 bits.
    UInt16,
}

/// The least and the greatest code, both inclusive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CodeRange {
    /// The least code.
    pub least: i32,
    /// The greatest code.
    pub greatest: i32,
}

/// The grid of a tensor, or of a channel of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Grid {
    /// The distance between neighbouring values.
    pub scale: f32,
    /// The code of zero.
    pub zero_point: i32,
}

/// How a range becomes a grid.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GridOptions {
    /// The type of the codes.
    pub ty: QuantType,
    /// Whether zero is in the middle of the codes.
    pub is_symmetric: bool,
    /// Whether half of the codes stays unused, so that 16-bit sums of two products cannot saturate
    /// on processors without dot-product instructions. The kernels of this project are exact
    /// without.
    pub reduce_range: bool,
    /// The least width of the range, for values that hardly vary.
    pub least_width: Option<f64>,
    /// Whether the scale is stored as float16, which has a larger least normal number.
    pub is_half: bool,
}

impl QuantType {
    /// The element type of tensors.
    pub fn dtype(self) -> DType {
        match self {
            QuantType::Int4 => DType::I4,
            QuantType::UInt4 => DType::U4,
            QuantType::Int8 => DType::I8,
            QuantType::UInt8 => DType::U8,
            QuantType::Int16 => DType::I16,
            QuantType::UInt16 => DType::U16,
        }
    }

    /// The bits of a code.
    pub fn bits(self) -> usize {
        match self {
            QuantType::Int4 | QuantType::UInt4 => 4,
            QuantType::Int8 | QuantType::UInt8 => 8,
            QuantType::Int16 | QuantType::UInt16 => 16,
        }
    }

    /// Whether codes may be negative.
    pub fn is_signed(self) -> bool {
        matches!(self, QuantType::Int4 | QuantType::Int8 | QuantType::Int16)
    }

    /// All codes of the type.
    pub fn codes(self) -> CodeRange {
        let half = 1 << (self.bits() - 1);
        match self.is_signed() {
            true => CodeRange { least: -half, greatest: half - 1 },
            false => CodeRange { least: 0, greatest: 2 * half - 1 },
        }
    }

    /// The bytes of a tensor of this type.
    pub fn byte_count(self, elements: usize) -> usize {
        match self {
            QuantType::Int4 | QuantType::UInt4 => elements.div_ceil(2),
            QuantType::Int8 | QuantType::UInt8 => elements,
            QuantType::Int16 | QuantType::UInt16 => elements.saturating_mul(2),
        }
    }

    /// The codes over which a range is spread. Signed codes of 8 and 16 bits are -127 to 127 and so
    /// on if they are symmetric, and all codes of 4 bits are used.
    fn spread(self, is_symmetric: bool, reduce_range: bool) -> CodeRange {
        let CodeRange { least, greatest } = self.codes();
        match (self, reduce_range) {
            (QuantType::Int4, true) => CodeRange { least: -4, greatest: 3 },
            // 64 and not 63: the reduced range of signed codes has one code more than half of them.
            (QuantType::Int8 | QuantType::Int16, true) => {
                CodeRange { least: least / 2, greatest: -(least / 2) }
            }
            (_, true) => CodeRange { least: 0, greatest: greatest / 2 },
            (QuantType::Int8 | QuantType::Int16, false) if is_symmetric => {
                CodeRange { least: -greatest, greatest }
            }
            (_, false) => CodeRange { least, greatest },
        }
    }
}

impl GridOptions {
    /// Options for a type with its whole range of codes, and scales in float32.
    pub fn new(ty: QuantType, is_symmetric: bool) -> GridOptions {
        GridOptions { ty, is_symmetric, reduce_range: false, least_width: None, is_half: false }
    }

    /// The grid for values from `low` to `high`, extended to contain 0.
    ///
    /// A range whose scale would be subnormal has scale 1 and zero point 0, as do empty tensors,
    /// whose range is 0 to 0.
    ///
    /// # Errors
    ///
    /// A bound is NaN or infinite.
    pub fn grid(&self, low: f64, high: f64) -> Result<Grid> {
        if !low.is_finite() || !high.is_finite() {
            let text = format!("a range from {low} to {high} cannot be quantized");
            return Err(Error::new(ErrorKind::InvalidArgument, text)
                .help("keep what has such values in floating point"));
        }
        let (mut low, mut high) = (low.min(0.0), high.max(0.0));
        if let Some(width) = self.least_width {
            high = high.max(low + width);
        }
        if self.is_symmetric {
            high = high.max(-low);
            low = -high;
        }
        let CodeRange { least, greatest } = self.ty.spread(self.is_symmetric, self.reduce_range);
        let (least, greatest) = (f64::from(least), f64::from(greatest));
        let scale = (high - low) / (greatest - least);
        if scale < self.least_scale() {
            return Ok(Grid { scale: 1.0, zero_point: 0 });
        }
        // The zero point is computed from the scale before that is rounded.
        let zero_point = match self.is_symmetric {
            true => (least + greatest) / 2.0,
            false => least - low / scale,
        };
        let stored = if self.is_half { half::f16::from_f64(scale).to_f32() } else { scale as f32 };
        if !stored.is_finite() {
            let text = format!("the scale of a range from {low} to {high} is above the greatest float");
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        Ok(Grid { scale: stored, zero_point: zero_point.round_ties_even() as i32 })
    }

    /// The least normal number of the type in which the scale is stored.
    fn least_scale(&self) -> f64 {
        if self.is_half { half::f16::MIN_POSITIVE.to_f64() } else { f64::from(f32::MIN_POSITIVE) }
    }
}

impl Grid {
    /// The code of a value, in the order of the operator `QuantizeLinear`: a division in float32,
    /// rounding half to even, then the zero point.
    #[inline]
    pub fn code(&self, value: f32, codes: CodeRange) -> i32 {
        code_of(value, self.scale, self.zero_point as f32, codes)
    }

    /// The value of a code.
    #[inline]
    pub fn value(&self, code: i32) -> f32 {
        (code - self.zero_point) as f32 * self.scale
    }
}

/// No code of up to 16 bits is this far from its zero point.
const FAR: f32 = 262_144.0;
/// The sum of this and a number below [`FAR`] has no bits below 1, so that the addition rounds to
/// the nearest integer, half to even. Processors without an instruction for it would call a
/// function.
const ROUNDING: f32 = 12_582_912.0;

/// The code of a value, in the order of the operator `QuantizeLinear`: a division in float32,
/// rounding half to even, then the zero point. NaN has the least code.
#[inline]
pub(crate) fn code_of(value: f32, scale: f32, point: f32, range: CodeRange) -> i32 {
    let steps = limit(value / scale, -FAR, FAR);
    let rounded = (steps + ROUNDING) - ROUNDING;
    limit(rounded + point, range.least as f32, range.greatest as f32) as i32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_that_cannot_be_quantized_are_errors() {
        let options = GridOptions::new(QuantType::UInt8, false);
        for (low, high) in [(f64::NAN, 1.0), (0.0, f64::INFINITY), (f64::NEG_INFINITY, 0.0)] {
            assert!(options.grid(low, high).is_err(), "{low} {high}");
        }
        let half = GridOptions { is_half: true, ..options };
        assert!(half.grid(0.0, 1e30).is_err());
    }

    #[test]
    fn a_least_width_widens_a_range_upwards() -> Result<()> {
        let options = GridOptions { least_width: Some(0.5), ..GridOptions::new(QuantType::UInt8, false) };
        assert_eq!(options.grid(-0.1, 0.1)?, Grid { scale: (0.5_f64 / 255.0) as f32, zero_point: 51 });
        assert_eq!(options.grid(0.0, 1.0)?, Grid { scale: (1.0_f64 / 255.0) as f32, zero_point: 0 });
        Ok(())
    }

    #[test]
    fn codes_stay_in_the_type() -> Result<()> {
        let ty = QuantType::Int8;
        let grid = GridOptions::new(ty, true).grid(-1.0, 1.0)?;
        let values = [f32::NAN, f32::NEG_INFINITY, -9.0, -1.0, 0.0, 1.0, f32::INFINITY];
        let codes = values.map(|value| grid.code(value, ty.codes()));
        assert_eq!(codes, [-128, -128, -128, -127, 0, 127, 127]);
        assert_eq!(grid.value(127), 127.0 * grid.scale);
        Ok(())
    }
}
