//! Element types: the ONNX `TensorProto.DataType` values, sets of them, and the Rust types of one
//! element.
//!
//! Number formats without a Rust type are in [`minifloat`] and [`packed`]. [`convert()`] converts
//! buffers between types with the rules of the ONNX `Cast` operator. [`text`] converts to and from
//! strings.

pub mod convert;
mod element;
pub mod minifloat;
pub mod packed;
mod set;
pub mod text;

use half::{bf16, f16};
use num_complex::Complex;

pub use convert::{CastOptions, ConvertError, convert};
pub use element::{DType, Element};
pub use minifloat::{F8E4M3FN, F8E4M3FNUZ, F8E5M2, F8E5M2FNUZ, F8E8M0, RoundMode};
pub use set::TypeSet;

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
