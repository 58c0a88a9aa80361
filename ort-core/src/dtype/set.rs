//! Sets of element types, for operator and kernel signatures.

use std::fmt;

use super::element::DType;

/// A set of element types. All its operations are usable in constants, except iteration.
///
/// ```
/// use ort_core::dtype::{DType, TypeSet};
/// const KERNEL: TypeSet = TypeSet::FLOATS.union(TypeSet::of(&[DType::I32]));
/// assert!(KERNEL.contains(DType::I32) && !KERNEL.contains(DType::I64));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct TypeSet(u32);

const fn bit(dtype: DType) -> u32 {
    // ONNX's codes are 1 to 28, so 32 bits hold all.
    1 << (dtype as u32 - 1)
}

impl TypeSet {
    /// The empty set.
    pub const EMPTY: TypeSet = TypeSet(0);
    /// All types.
    pub const ALL: TypeSet = TypeSet((1 << 28) - 1);
    /// Unsigned integers of 8 to 64 bits.
    pub const UNSIGNED: TypeSet = TypeSet::of(&[DType::U8, DType::U16, DType::U32, DType::U64]);
    /// Signed integers of 8 to 64 bits.
    pub const SIGNED: TypeSet = TypeSet::of(&[DType::I8, DType::I16, DType::I32, DType::I64]);
    /// Integers of 8 to 64 bits.
    pub const INTEGERS: TypeSet = Self::UNSIGNED.union(Self::SIGNED);
    /// Integers narrower than a byte.
    pub const SUB_BYTE_INTEGERS: TypeSet = TypeSet::of(&[DType::U4, DType::I4, DType::U2, DType::I2]);
    /// `float16`, `float`, `double`: ONNX's floats before version 13.
    pub const IEEE_FLOATS: TypeSet = TypeSet::of(&[DType::F16, DType::F32, DType::F64]);
    /// `float16`, `bfloat16`, `float`, `double`.
    pub const FLOATS: TypeSet = Self::IEEE_FLOATS.union(TypeSet::of(&[DType::BF16]));
    /// The four 8-bit floats of opset 19.
    pub const FLOAT8: TypeSet =
        TypeSet::of(&[DType::F8E4M3FN, DType::F8E4M3FNUZ, DType::F8E5M2, DType::F8E5M2FNUZ]);
    /// Floats of 8 bits and narrower.
    pub const MINIFLOATS: TypeSet =
        Self::FLOAT8.union(TypeSet::of(&[DType::F4E2M1, DType::F8E8M0, DType::F6E2M3, DType::F6E3M2]));
    /// Real floating-point types of any width.
    pub const ALL_FLOATS: TypeSet = Self::FLOATS.union(Self::MINIFLOATS);
    /// Complex types.
    pub const COMPLEX: TypeSet = TypeSet::of(&[DType::C64, DType::C128]);
    /// `INTEGERS` and `FLOATS`: ONNX's "all numeric types" including bfloat16.
    pub const NUMERIC: TypeSet = Self::INTEGERS.union(Self::FLOATS);
    /// `FLOATS` and the 32- and 64-bit integers: ONNX's "high-precision numeric types".
    pub const HIGH_PRECISION: TypeSet =
        Self::FLOATS.union(TypeSet::of(&[DType::U32, DType::U64, DType::I32, DType::I64]));
    /// `NUMERIC`, `COMPLEX`, `bool` and `string`: ONNX's tensor types of IR version 4, with
    /// bfloat16.
    pub const ALL_TENSOR: TypeSet =
        Self::NUMERIC.union(Self::COMPLEX).union(TypeSet::of(&[DType::Bool, DType::String]));
    /// `ALL_TENSOR` and the float8 types: IR version 9.
    pub const ALL_TENSOR_IR9: TypeSet = Self::ALL_TENSOR.union(Self::FLOAT8);
    /// `ALL_TENSOR_IR9` and the 4-bit integers: IR version 10.
    pub const ALL_TENSOR_IR10: TypeSet = Self::ALL_TENSOR_IR9.union(TypeSet::of(&[DType::U4, DType::I4]));
    /// `ALL_TENSOR_IR10` and `float4e2m1`: IR version 11.
    pub const ALL_TENSOR_IR11: TypeSet = Self::ALL_TENSOR_IR10.union(TypeSet::of(&[DType::F4E2M1]));
    /// `ALL_TENSOR_IR11` and `float8e8m0`: IR version 12.
    pub const ALL_TENSOR_IR12: TypeSet = Self::ALL_TENSOR_IR11.union(TypeSet::of(&[DType::F8E8M0]));
    /// `ALL_TENSOR_IR12` and the 2-bit integers: IR version 13.
    pub const ALL_TENSOR_IR13: TypeSet = Self::ALL_TENSOR_IR12.union(TypeSet::of(&[DType::U2, DType::I2]));
    /// `ALL_TENSOR_IR13` and the 6-bit floats: every type, IR version 14.
    pub const ALL_TENSOR_IR14: TypeSet = Self::ALL;

    /// Creates the set of the given types.
    pub const fn of(mut types: &[DType]) -> TypeSet {
        let mut bits = 0;
        while let [first, rest @ ..] = types {
            bits |= bit(*first);
            types = rest;
        }
        TypeSet(bits)
    }

    /// Returns the union.
    pub const fn union(self, other: TypeSet) -> TypeSet {
        TypeSet(self.0 | other.0)
    }

    /// Returns the intersection.
    pub const fn intersection(self, other: TypeSet) -> TypeSet {
        TypeSet(self.0 & other.0)
    }

    /// Returns the types in this set but not in the other.
    pub const fn difference(self, other: TypeSet) -> TypeSet {
        TypeSet(self.0 & !other.0)
    }

    /// Returns whether the type is in the set.
    pub const fn contains(self, dtype: DType) -> bool {
        self.0 & bit(dtype) != 0
    }

    /// Returns whether the other set contains every type of this one.
    pub const fn is_subset(self, other: TypeSet) -> bool {
        self.0 & !other.0 == 0
    }

    /// Returns whether the set is empty.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Returns the number of types in the set.
    pub const fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    /// Iterates over the types in the order of ONNX's codes.
    pub fn iter(self) -> impl Iterator<Item = DType> {
        DType::all().filter(move |dtype| self.contains(*dtype))
    }
}

impl fmt::Display for TypeSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, dtype) in self.iter().enumerate() {
            f.write_str(if index == 0 { "" } else { ", " })?;
            f.write_str(dtype.name())?;
        }
        Ok(())
    }
}

impl fmt::Debug for TypeSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{{{self}}}")
    }
}

impl DType {
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
