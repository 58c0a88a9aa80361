//! The compute types of this family's operators: narrow types compute in `f32`, wide ones in `f64`.

use half::{bf16, f16};
use num_traits::Float;
use ort_core::dtype::Element;

/// How scattered values combine with the element they meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reduction {
    Add,
    Mul,
    Min,
    Max,
}

/// Evaluates `$work` with the elements of a numeric or boolean input and output, and with the
/// number of reals per element: two for complex types.
macro_rules! with_numbers {
    ($input:expr, $output:expr, |$from:ident, $to:ident, $parts:ident| $work:expr, $what:literal) => {{
        let (input, output) = ($input, $output);
        let dtype = input.dtype();
        for_each_type!(dtype in [F32, F16, BF16, F64, U8, I8, U16, I16, U32, I32, U64, I64, Bool], T => {
            let ($from, $to, $parts) = (input.as_slice::<T>()?, output.as_mut_slice::<T>()?, 1usize);
            $work
        }, else => match dtype {
            DType::C64 => {
                // A complex number is its real and its imaginary part, one after the other.
                let $from: &[f32] = bytemuck::cast_slice(input.as_slice::<Complex<f32>>()?);
                let $to: &mut [f32] = bytemuck::cast_slice_mut(output.as_mut_slice::<Complex<f32>>()?);
                let $parts = 2usize;
                $work
            }
            DType::C128 => {
                let $from: &[f64] = bytemuck::cast_slice(input.as_slice::<Complex<f64>>()?);
                let $to: &mut [f64] = bytemuck::cast_slice_mut(output.as_mut_slice::<Complex<f64>>()?);
                let $parts = 2usize;
                $work
            }
            other => Err(error!(NotImplemented, concat!($what, " of {}"), other.name())),
        })
    }};
}
pub(super) use with_numbers;

/// An element type that the kernels compute with.
pub(super) trait Number: Element {
    /// The type of accumulators and weights.
    type Compute: Float + Number<Compute = Self::Compute> + std::ops::AddAssign;

    /// Converts to the compute type.
    fn widen(self) -> Self::Compute;

    /// Converts from the compute type. Integers truncate and saturate.
    fn narrow(value: Self::Compute) -> Self;

    /// Reduces two values to one.
    fn reduce(self, other: Self, reduction: Reduction) -> Self;
}

macro_rules! integers {
    ($($integer:ty as $compute:ty,)*) => {
        $(impl Number for $integer {
            type Compute = $compute;

            fn widen(self) -> $compute {
                self as $compute
            }

            fn narrow(value: $compute) -> $integer {
                value as $integer
            }

            fn reduce(self, other: $integer, reduction: Reduction) -> $integer {
                match reduction {
                    // Sums and products of integers wrap, as in NumPy.
                    Reduction::Add => self.wrapping_add(other),
                    Reduction::Mul => self.wrapping_mul(other),
                    Reduction::Min => self.min(other),
                    Reduction::Max => self.max(other),
                }
            }
        })*
    };
}

integers! {
    u8 as f32, i8 as f32, u16 as f32, i16 as f32, u32 as f64, i32 as f64, u64 as f64, i64 as f64,
}

/// True is one, and every nonzero value is true.
impl Number for bool {
    type Compute = f32;

    fn widen(self) -> f32 {
        f32::from(u8::from(self))
    }

    fn narrow(value: f32) -> bool {
        value != 0.0
    }

    fn reduce(self, other: bool, reduction: Reduction) -> bool {
        match reduction {
            Reduction::Add | Reduction::Max => self | other,
            Reduction::Mul | Reduction::Min => self & other,
        }
    }
}

macro_rules! floats {
    ($($float:ty as $compute:ty: $widen:expr, $narrow:expr;)*) => {
        $(impl Number for $float {
            type Compute = $compute;

            fn widen(self) -> $compute {
                $widen(self)
            }

            fn narrow(value: $compute) -> $float {
                $narrow(value)
            }

            fn reduce(self, other: $float, reduction: Reduction) -> $float {
                let (a, b): ($compute, $compute) = (self.widen(), other.widen());
                // NaN on either side propagates.
                let reduced = match reduction {
                    Reduction::Add => a + b,
                    Reduction::Mul => a * b,
                    Reduction::Min if a < b || a.is_nan() => a,
                    Reduction::Max if a > b || a.is_nan() => a,
                    _ => b,
                };
                <$float as Number>::narrow(reduced)
            }
        })*
    };
}

floats! {
    f32 as f32: std::convert::identity, std::convert::identity;
    f64 as f64: std::convert::identity, std::convert::identity;
    f16 as f32: f16::to_f32, f16::from_f32;
    bf16 as f32: bf16::to_f32, bf16::from_f32;
}
