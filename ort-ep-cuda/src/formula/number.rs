//! Arithmetic types of formulas, and their names in PTX.

use ort_core::dtype::DType;
use ort_core::{Result, error};

/// The arithmetic type of a formula.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Number {
    F32,
    F64,
    S32,
    U32,
    S64,
    U64,
}

impl Number {
    /// Returns the arithmetic type for elements of a type.
    pub(crate) fn of(dtype: DType) -> Result<Number> {
        Ok(match dtype {
            DType::F32 | DType::F16 | DType::BF16 => Number::F32,
            DType::F64 => Number::F64,
            DType::I8 | DType::I16 | DType::I32 | DType::I4 | DType::I2 => Number::S32,
            DType::U8 | DType::U16 | DType::U32 | DType::Bool | DType::U4 | DType::U2 => Number::U32,
            DType::I64 => Number::S64,
            DType::U64 => Number::U64,
            other => return Err(error!(NotImplemented, "formulas of the type {}", other.name())),
        })
    }

    /// The type suffix of instructions.
    pub(super) fn name(self) -> &'static str {
        match self {
            Number::F32 => "f32",
            Number::F64 => "f64",
            Number::S32 => "s32",
            Number::U32 => "u32",
            Number::S64 => "s64",
            Number::U64 => "u64",
        }
    }

    /// The class of its registers.
    pub(super) fn class(self) -> char {
        match self {
            Number::F32 => 'f',
            Number::F64 => 'd',
            Number::S32 | Number::U32 => 'r',
            Number::S64 | Number::U64 => 'l',
        }
    }

    /// The type suffix of instructions that treat the value as untyped bits.
    pub(super) fn bits(self) -> &'static str {
        match self.class() {
            'f' | 'r' => "b32",
            _ => "b64",
        }
    }

    pub(super) fn is_float(self) -> bool {
        matches!(self, Number::F32 | Number::F64)
    }

    pub(super) fn is_unsigned(self) -> bool {
        matches!(self, Number::U32 | Number::U64)
    }
}
