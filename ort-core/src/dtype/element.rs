//! The element types, their properties, and the trait of their Rust types.

use std::fmt;

use bytemuck::{CheckedBitPattern, NoUninit};

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
