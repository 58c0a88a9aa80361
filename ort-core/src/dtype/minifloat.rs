//! Floats of 8, 6 and 4 bits: a codec driven by a format description, and the power-of-two scale
//! E8M0.
//!
//! The formats are those of the ONNX specification: FN formats from "FP8 Formats for Deep
//! Learning", arXiv:2209.05433, FNUZ formats from arXiv:2206.02915, narrower ones from the OCP
//! Microscaling specification 1.0.

use super::element::{DType, Element};

/// How a value is rounded to a power of two in `float8e8m0`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum RoundMode {
    /// Away from zero.
    #[default]
    Up,
    /// Towards zero.
    Down,
    /// To the nearest, ties away from zero.
    Nearest,
}

/// The meaning of the bit patterns beyond the finite numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Special {
    /// The largest exponent encodes infinities and NaN, as in IEEE 754.
    Ieee,
    /// All bits set is NaN. There is no infinity.
    OnlyNan,
    /// The pattern of negative zero is NaN. There is no infinity and no negative zero.
    NanForNegativeZero,
    /// Every pattern is a finite number.
    Finite,
}

/// A binary floating-point format with a sign bit and at most 8 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Format {
    exponent_bits: u32,
    mantissa_bits: u32,
    bias: i32,
    special: Special,
}

const fn format(exponent_bits: u32, mantissa_bits: u32, bias: i32, special: Special) -> Format {
    Format { exponent_bits, mantissa_bits, bias, special }
}

/// Returns 2 to the power of an exponent in the range of normal doubles.
fn power_of_two(exponent: i32) -> f64 {
    f64::from_bits(((exponent + 1023) as u64) << 52)
}

/// Returns the exponent of a finite value's leading bit: at most -1023 for zero and subnormal
/// doubles.
fn exponent_of(value: f64) -> i32 {
    ((value.to_bits() >> 52) & 0x7ff) as i32 - 1023
}

impl Format {
    /// `float8e4m3fn`.
    pub const E4M3FN: Format = format(4, 3, 7, Special::OnlyNan);
    /// `float8e4m3fnuz`.
    pub const E4M3FNUZ: Format = format(4, 3, 8, Special::NanForNegativeZero);
    /// `float8e5m2`.
    pub const E5M2: Format = format(5, 2, 15, Special::Ieee);
    /// `float8e5m2fnuz`.
    pub const E5M2FNUZ: Format = format(5, 2, 16, Special::NanForNegativeZero);
    /// `float4e2m1`.
    pub const E2M1: Format = format(2, 1, 1, Special::Finite);
    /// `float6e2m3`.
    pub const E2M3: Format = format(2, 3, 1, Special::Finite);
    /// `float6e3m2`.
    pub const E3M2: Format = format(3, 2, 3, Special::Finite);

    /// Returns the format of an element type, or `None` if it is not a signed narrow float.
    pub const fn of(dtype: DType) -> Option<Format> {
        match dtype {
            DType::F8E4M3FN => Some(Format::E4M3FN),
            DType::F8E4M3FNUZ => Some(Format::E4M3FNUZ),
            DType::F8E5M2 => Some(Format::E5M2),
            DType::F8E5M2FNUZ => Some(Format::E5M2FNUZ),
            DType::F4E2M1 => Some(Format::E2M1),
            DType::F6E2M3 => Some(Format::E2M3),
            DType::F6E3M2 => Some(Format::E3M2),
            _ => None,
        }
    }

    const fn magnitude_bits(self) -> u32 {
        self.exponent_bits + self.mantissa_bits
    }

    /// Returns the bit pattern of the largest finite number.
    const fn max_code(self) -> u32 {
        match self.special {
            // The all-ones exponent with a mantissa of zero is infinity; the code before it is the
            // largest number.
            Special::Ieee => (((1 << self.exponent_bits) - 1) << self.mantissa_bits) - 1,
            // All bits set is NaN, so 0x7e, not 0x7f: 448 in E4M3FN.
            Special::OnlyNan => (1 << self.magnitude_bits()) - 2,
            Special::NanForNegativeZero | Special::Finite => (1 << self.magnitude_bits()) - 1,
        }
    }

    /// Decodes a bit pattern, exactly: every value fits a float. Bits above the format's width are
    /// ignored.
    pub fn decode(self, code: u8) -> f32 {
        let is_negative = (code >> self.magnitude_bits()) & 1 == 1;
        let magnitude = u32::from(code) & ((1 << self.magnitude_bits()) - 1);
        let sign = if is_negative { -1.0 } else { 1.0 };
        if self.special == Special::NanForNegativeZero && is_negative && magnitude == 0 {
            return -f32::NAN;
        }
        if magnitude > self.max_code() {
            let is_infinite = self.special == Special::Ieee && magnitude == self.max_code() + 1;
            return if is_infinite { sign * f32::INFINITY } else { f32::NAN.copysign(sign) };
        }
        let (exponent, mantissa) =
            (magnitude >> self.mantissa_bits, magnitude & ((1 << self.mantissa_bits) - 1));
        // Subnormals have no implicit bit and the exponent of the smallest normals.
        let significand = if exponent == 0 { mantissa } else { mantissa | 1 << self.mantissa_bits };
        let scale = exponent.max(1) as i32 - self.bias - self.mantissa_bits as i32;
        (f64::from(significand) * power_of_two(scale)) as f32 * sign
    }

    /// Encodes a value, rounded to nearest with ties to even, as in the ONNX `Cast` operator.
    ///
    /// With `saturate`, out-of-range values and infinities become the largest finite number.
    /// Without it they become infinity or NaN, if the format has one. A format without NaN encodes
    /// NaN as a zero.
    pub fn encode(self, value: f64, saturate: bool) -> u8 {
        let sign = u32::from(value.is_sign_negative()) << self.magnitude_bits();
        if value.is_nan() {
            return self.nan(sign);
        }
        let overflow = || match self.special {
            Special::Ieee if !saturate => (sign | (self.max_code() + 1)) as u8,
            Special::OnlyNan | Special::NanForNegativeZero if !saturate => self.nan(sign),
            // Formats without infinity and NaN saturate always.
            _ => (sign | self.max_code()) as u8,
        };
        if value.is_infinite() {
            return overflow();
        }
        // In units of the last place the value is a small integer. The exponent is added to it, so
        // that a carry out of the mantissa increments the exponent.
        let lowest = 1 - self.bias;
        let exponent = exponent_of(value).max(lowest);
        if exponent > lowest + (1 << self.exponent_bits) {
            return overflow();
        }
        let units = value.abs() * power_of_two(self.mantissa_bits as i32 - exponent);
        let code = units.round_ties_even() as u32 + (((exponent - lowest) as u32) << self.mantissa_bits);
        if code > self.max_code() {
            return overflow();
        }
        let has_sign = code != 0 || self.special != Special::NanForNegativeZero;
        (code | if has_sign { sign } else { 0 }) as u8
    }

    fn nan(self, sign: u32) -> u8 {
        let negative_zero = 1 << self.magnitude_bits();
        let code = match self.special {
            // A quiet NaN: the top mantissa bit is set.
            Special::Ieee => sign | (self.max_code() + 1) | 1 << (self.mantissa_bits - 1),
            Special::OnlyNan => sign | (self.max_code() + 1),
            Special::NanForNegativeZero => negative_zero,
            Special::Finite => sign ^ negative_zero,
        };
        code as u8
    }
}

/// The bit pattern of NaN in E8M0.
const SCALE_NAN: u8 = 0xff;
/// The bit pattern of the largest power of two in E8M0, 2^127.
const SCALE_MAX: u8 = 0xfe;

/// Decodes an E8M0 bit pattern: 2 to the power of `code - 127`, or NaN.
pub fn decode_scale(code: u8) -> f32 {
    if code == SCALE_NAN { f32::NAN } else { power_of_two(i32::from(code) - 127) as f32 }
}

/// Encodes the magnitude of a value in E8M0, rounded to a power of two.
///
/// With `saturate`, an out-of-range magnitude becomes the nearest one in range. Without it zero,
/// infinity and out-of-range magnitudes become NaN, as in the table of ONNX's `Cast`. The format
/// has no sign.
pub fn encode_scale(value: f64, saturate: bool, mode: RoundMode) -> u8 {
    let magnitude = value.abs();
    if magnitude.is_nan() || (magnitude.is_infinite() && !saturate) {
        return SCALE_NAN;
    }
    let out_of_range = |code| if saturate { code } else { SCALE_NAN };
    let exponent = exponent_of(magnitude);
    if exponent < -127 {
        let reaches = mode == RoundMode::Up && magnitude > power_of_two(-128);
        return if reaches { 0 } else { out_of_range(0) };
    }
    // Infinity has exponent 1024, which `power_of_two` cannot represent. Its code exceeds the
    // largest anyway.
    let fraction = magnitude / power_of_two(exponent.min(1023));
    let round_up = match mode {
        RoundMode::Up => fraction > 1.0,
        RoundMode::Nearest => fraction >= 1.5,
        RoundMode::Down => false,
    };
    let code = exponent + 127 + i32::from(round_up);
    u8::try_from(code).ok().filter(|code| *code <= SCALE_MAX).unwrap_or_else(|| out_of_range(SCALE_MAX))
}

macro_rules! narrow_floats {
    ($($(#[$doc:meta])* $name:ident = $format:expr;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, bytemuck::Pod, bytemuck::Zeroable)]
        #[repr(transparent)]
        pub struct $name(pub u8);

        impl $name {
            /// Converts to a float, exactly.
            pub fn to_f32(self) -> f32 {
                $format.decode(self.0)
            }

            /// Rounds to the nearest number, ties to even; see [`Format::encode`].
            pub fn from_f32(value: f32, saturate: bool) -> Self {
                Self($format.encode(value.into(), saturate))
            }
        }

        const _: () = assert!(size_of::<$name>() == 1 && matches!(<$name as Element>::DTYPE, DType::$name));
    )*};
}

narrow_floats! {
    /// The bits of a `float8e4m3fn`.
    F8E4M3FN = Format::E4M3FN;
    /// The bits of a `float8e4m3fnuz`.
    F8E4M3FNUZ = Format::E4M3FNUZ;
    /// The bits of a `float8e5m2`.
    F8E5M2 = Format::E5M2;
    /// The bits of a `float8e5m2fnuz`.
    F8E5M2FNUZ = Format::E5M2FNUZ;
}

/// The bits of a `float8e8m0`: a power of two.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub struct F8E8M0(pub u8);

impl F8E8M0 {
    /// Converts to a float, exactly.
    pub fn to_f32(self) -> f32 {
        decode_scale(self.0)
    }

    /// Rounds the magnitude to a power of two; see [`encode_scale`].
    pub fn from_f32(value: f32, saturate: bool, mode: RoundMode) -> Self {
        Self(encode_scale(value.into(), saturate, mode))
    }
}
