//! Element types: the ONNX `TensorProto.DataType` values, sets of them, and the Rust types of one
//! element.
//!
//! Number formats without a Rust type are in [`minifloat`] and [`packed`]. [`convert()`] converts
//! buffers between types with the rules of the ONNX `Cast` operator. [`text`] converts to and from
//! strings.

pub mod convert;
pub mod minifloat;
pub mod packed;
mod set;
pub mod text;

use std::fmt;

use bytemuck::{CheckedBitPattern, NoUninit};
use half::{bf16, f16};
use num_complex::Complex;

pub use convert::{CastOptions, ConvertError, convert};
pub use minifloat::{F8E4M3FN, F8E4M3FNUZ, F8E5M2, F8E5M2FNUZ, F8E8M0, RoundMode};
pub use set::TypeSet;

/// The type of a tensor's elements, one variant per ONNX `TensorProto.DataType`.
///
/// The discriminants are ONNX's codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum DType {
    /// IEEE 754 single precision.
    F32 = 1,
    /// Unsigned, 8 bits.
    U8 = 2,
    /// Signed, 8 bits.
    I8 = 3,
    /// Unsigned, 16 bits.
    U16 = 4,
    /// Signed, 16 bits.
    I16 = 5,
    /// Signed, 32 bits.
    I32 = 6,
    /// Signed, 64 bits.
    I64 = 7,
    /// UTF-8 text of any length.
    String = 8,
    /// One byte that is 0 or 1.
    Bool = 9,
    /// IEEE 754 half precision.
    F16 = 10,
    /// IEEE 754 double precision.
    F64 = 11,
    /// Unsigned, 32 bits.
    U32 = 12,
    /// Unsigned, 64 bits.
    U64 = 13,
    /// Two single-precision numbers, real part first.
    C64 = 14,
    /// Two double-precision numbers, real part first.
    C128 = 15,
    /// The upper half of a single-precision number.
    BF16 = 16,
    /// 8-bit float, 4 exponent and 3 mantissa bits, finite, NaN, no infinity.
    F8E4M3FN = 17,
    /// 8-bit float, 4 exponent and 3 mantissa bits, one unsigned zero, one NaN, no infinity.
    F8E4M3FNUZ = 18,
    /// 8-bit float, 5 exponent and 2 mantissa bits, with infinities and NaN as in IEEE 754.
    F8E5M2 = 19,
    /// 8-bit float, 5 exponent and 2 mantissa bits, one unsigned zero, one NaN, no infinity.
    F8E5M2FNUZ = 20,
    /// Unsigned, 4 bits, two to a byte.
    U4 = 21,
    /// Signed, 4 bits, two to a byte.
    I4 = 22,
    /// 4-bit float, 2 exponent bits and 1 mantissa bit, two to a byte.
    F4E2M1 = 23,
    /// A power of two as its biased 8-bit exponent: the scale of the MX formats.
    F8E8M0 = 24,
    /// Unsigned, 2 bits, four to a byte.
    U2 = 25,
    /// Signed, 2 bits, four to a byte.
    I2 = 26,
    /// 6-bit float, 2 exponent and 3 mantissa bits, four to three bytes.
    F6E2M3 = 27,
    /// 6-bit float, 3 exponent and 2 mantissa bits, four to three bytes.
    F6E3M2 = 28,
}

/// The properties of one element type; [`DType::record`] looks them up.
struct Record {
    dtype: DType,
    name: &'static str,
    bits: Option<u32>,
}

/// One row per type, in the order of ONNX's codes: row `code - 1` describes `code`.
static RECORDS: [Record; 28] = [
    row(DType::F32, "float", 32),
    row(DType::U8, "uint8", 8),
    row(DType::I8, "int8", 8),
    row(DType::U16, "uint16", 16),
    row(DType::I16, "int16", 16),
    row(DType::I32, "int32", 32),
    row(DType::I64, "int64", 64),
    Record { dtype: DType::String, name: "string", bits: None },
    row(DType::Bool, "bool", 8),
    row(DType::F16, "float16", 16),
    row(DType::F64, "double", 64),
    row(DType::U32, "uint32", 32),
    row(DType::U64, "uint64", 64),
    row(DType::C64, "complex64", 64),
    row(DType::C128, "complex128", 128),
    row(DType::BF16, "bfloat16", 16),
    row(DType::F8E4M3FN, "float8e4m3fn", 8),
    row(DType::F8E4M3FNUZ, "float8e4m3fnuz", 8),
    row(DType::F8E5M2, "float8e5m2", 8),
    row(DType::F8E5M2FNUZ, "float8e5m2fnuz", 8),
    row(DType::U4, "uint4", 4),
    row(DType::I4, "int4", 4),
    row(DType::F4E2M1, "float4e2m1", 4),
    row(DType::F8E8M0, "float8e8m0", 8),
    row(DType::U2, "uint2", 2),
    row(DType::I2, "int2", 2),
    row(DType::F6E2M3, "float6e2m3", 6),
    row(DType::F6E3M2, "float6e3m2", 6),
];

const fn row(dtype: DType, name: &'static str, bits: u32) -> Record {
    Record { dtype, name, bits: Some(bits) }
}

impl DType {
    /// Iterates over all element types in the order of ONNX's codes.
    pub fn all() -> impl Iterator<Item = DType> {
        RECORDS.iter().map(|record| record.dtype)
    }

    #[allow(clippy::indexing_slicing, reason = "the records are in the order of the codes, which begin at 1")]
    fn record(self) -> &'static Record {
        &RECORDS[self as usize - 1]
    }

    /// Returns the type with an ONNX `TensorProto.DataType` code, or `None` for 0 (undefined) and
    /// unknown codes.
    pub fn from_onnx(code: i32) -> Option<DType> {
        let index = usize::try_from(code).ok()?.checked_sub(1)?;
        RECORDS.get(index).map(|record| record.dtype)
    }

    /// Returns the ONNX `TensorProto.DataType` code.
    pub const fn onnx_code(self) -> i32 {
        self as i32
    }

    /// Returns ONNX's name of the type, as in type strings: `float` in `tensor(float)`.
    pub fn name(self) -> &'static str {
        self.record().name
    }

    /// Returns the type with an ONNX name: `float`, `int64`, `bfloat16`.
    ///
    /// ```
    /// use ort_core::dtype::DType;
    /// assert_eq!(DType::from_name("double"), Some(DType::F64));
    /// assert_eq!(DType::from_name("f64"), None);
    /// ```
    pub fn from_name(name: &str) -> Option<DType> {
        RECORDS.iter().find(|record| record.name == name).map(|record| record.dtype)
    }

    /// Returns the bits of one element; `None` for strings.
    pub fn bits(self) -> Option<u32> {
        self.record().bits
    }

    /// Returns the bytes of one element; `None` for sub-byte types and strings.
    pub fn byte_size(self) -> Option<usize> {
        self.bits().filter(|bits| bits % 8 == 0).map(|bits| bits as usize / 8)
    }

    /// Returns the bytes that `elements` elements take, rounded up for packed types. Returns `None`
    /// for strings and on overflow.
    ///
    /// ```
    /// use ort_core::dtype::DType;
    /// assert_eq!(DType::F32.byte_len(3), Some(12));
    /// assert_eq!(DType::U4.byte_len(3), Some(2));
    /// assert_eq!(DType::F32.byte_len(usize::MAX), None);
    /// ```
    pub fn byte_len(self, elements: usize) -> Option<usize> {
        let bits = self.bits()? as usize;
        if bits.is_multiple_of(8) {
            return elements.checked_mul(bits / 8);
        }
        // Count groups of eight, which take exactly `bits` bytes: intermediate results cannot
        // overflow unless the final one does.
        let whole = (elements / 8).checked_mul(bits)?;
        whole.checked_add((elements % 8 * bits).div_ceil(8))
    }

    /// Returns whether elements of this type share bytes (widths of 2, 4 and 6 bits).
    pub fn is_packed(self) -> bool {
        self.bits().is_some_and(|bits| bits < 8)
    }

    /// Returns whether this is a real floating-point type of any width.
    pub const fn is_float(self) -> bool {
        TypeSet::ALL_FLOATS.contains(self)
    }

    /// Returns whether this is an integer type of any width. `bool` is not.
    pub const fn is_integer(self) -> bool {
        TypeSet::INTEGERS.union(TypeSet::SUB_BYTE_INTEGERS).contains(self)
    }

    /// Returns whether the type can represent negative numbers: signed integers, floats except the
    /// power-of-two scale, complex.
    pub const fn is_signed(self) -> bool {
        let signed = TypeSet::SIGNED.union(TypeSet::ALL_FLOATS).union(TypeSet::COMPLEX);
        signed
            .union(TypeSet::of(&[DType::I4, DType::I2]))
            .difference(TypeSet::of(&[DType::F8E8M0]))
            .contains(self)
    }

    /// Returns whether this is a complex type.
    pub const fn is_complex(self) -> bool {
        TypeSet::COMPLEX.contains(self)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A Rust type that holds one element of a tensor.
///
/// Implemented for types whose bytes are the tensor's bytes. Only `bool` has invalid bit patterns:
/// kernels view a bool tensor as `bool` through a checked cast, or as `u8` with the values 0 and 1.
pub trait Element:
    Copy + NoUninit + CheckedBitPattern + Send + Sync + PartialEq + fmt::Debug + 'static
{
    /// The element type of a tensor of these.
    const DTYPE: DType;
}

macro_rules! elements {
    ($($variant:ident: $native:ty,)*) => {
        $(impl Element for $native {
            const DTYPE: DType = DType::$variant;
        })*

        /// The Rust type of each element type, under the name of its [`DType`] variant.
        #[allow(missing_docs)]
        pub mod native {
            use super::*;
            $(pub type $variant = $native;)*
        }
    };
}

elements! {
    F32: f32, F64: f64, F16: f16, BF16: bf16,
    U8: u8, I8: i8, U16: u16, I16: i16, U32: u32, I32: i32, U64: u64, I64: i64,
    Bool: bool, C64: Complex<f32>, C128: Complex<f64>,
    F8E4M3FN: minifloat::F8E4M3FN, F8E4M3FNUZ: minifloat::F8E4M3FNUZ,
    F8E5M2: minifloat::F8E5M2, F8E5M2FNUZ: minifloat::F8E5M2FNUZ, F8E8M0: minifloat::F8E8M0,
}

/// Monomorphizes an expression for each element type, and dispatches on a [`DType`] known only at
/// run time.
///
/// The types are a list of [`DType`] variants in brackets or one of `FLOATS` (f16, bf16, f32, f64),
/// `INTEGERS` (8 to 64 bits), `NUMERIC` (both).
///
/// ```
/// use ort_core::dtype::DType;
/// use ort_core::for_each_type;
/// let size = |dtype| for_each_type!(dtype in [F32, F64], T => Some(size_of::<T>()), else => None);
/// assert_eq!((size(DType::F64), size(DType::I8)), (Some(8), None));
/// ```
#[macro_export]
macro_rules! for_each_type {
    ($dtype:ident in [$($variant:ident),* $(,)?], $t:ident => $body:expr, else => $other:expr $(,)?) => {
        match $dtype {
            $($crate::dtype::DType::$variant => {
                #[allow(dead_code)]
                type $t = $crate::dtype::native::$variant;
                $body
            })*
            #[allow(unreachable_patterns)]
            _ => $other,
        }
    };
    ($dtype:ident in FLOATS, $($rest:tt)*) => {
        $crate::for_each_type!($dtype in [F32, F16, BF16, F64], $($rest)*)
    };
    ($dtype:ident in INTEGERS, $($rest:tt)*) => {
        $crate::for_each_type!($dtype in [U8, I8, U16, I16, U32, I32, U64, I64], $($rest)*)
    };
    ($dtype:ident in NUMERIC, $($rest:tt)*) => {
        $crate::for_each_type!($dtype in [F32, F16, BF16, F64, U8, I8, U16, I16, U32, I32, U64, I64], $($rest)*)
    };
}

/// Monomorphizes an expression for each element size (1, 2, 4, 8 or 16 bytes) and dispatches on a
/// size known only at run time. For kernels that only move elements.
///
/// ```
/// use ort_core::for_each_size;
/// let bits = |bytes: usize| for_each_size!(bytes, T => Some(T::BITS), else => None);
/// assert_eq!((bits(16), bits(3)), (Some(128), None));
/// ```
#[macro_export]
macro_rules! for_each_size {
    ($bytes:expr, $t:ident => $body:expr, else => $other:expr $(,)?) => {
        match $bytes {
            1 => $crate::for_each_size!(@one u8, $t, $body),
            2 => $crate::for_each_size!(@one u16, $t, $body),
            4 => $crate::for_each_size!(@one u32, $t, $body),
            8 => $crate::for_each_size!(@one u64, $t, $body),
            16 => $crate::for_each_size!(@one u128, $t, $body),
            _ => $other,
        }
    };
    (@one $native:ty, $t:ident, $body:expr) => {{
        #[allow(dead_code)]
        type $t = $native;
        $body
    }};
}
