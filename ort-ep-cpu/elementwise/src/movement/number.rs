//! The compute types of this family's operators: narrow types compute in `f32`, wide ones in `f64`.

use std::fmt::Debug;

use bytemuck::{CheckedBitPattern, NoUninit, Pod, Zeroable};
use half::{bf16, f16};
use num_traits::Float;

/// A boolean as tensors store it: any byte but 0 is true, and results are 0 or 1. It is no `bool`,
/// because output memory and the memory of callers hold other bytes, too.
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
#[repr(transparent)]
pub(super) struct Flag(u8);

impl Flag {
    pub(super) fn of(value: bool) -> Flag {
        Flag(u8::from(value))
    }

    pub(super) fn is_set(self) -> bool {
        self.0 != 0
    }
}

/// What the elements and the accumulators of this family have in common.
pub(super) trait Plain:
    Copy + NoUninit + CheckedBitPattern + Send + Sync + PartialEq + Debug + 'static
{
}

impl<T> Plain for T where T: Copy + NoUninit + CheckedBitPattern + Send + Sync + PartialEq + Debug + 'static {}

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
        for_each_type!(dtype in NUMERIC, T => {
            let ($from, $to, $parts) = (input.as_slice::<T>()?, output.as_mut_slice::<T>()?, 1usize);
            $work
        }, else => match dtype {
            DType::Bool => {
                use $crate::movement::number::Flag;
                let $from: &[Flag] = bytemuck::cast_slice(input.bytes()?);
                let $to: &mut [Flag] = bytemuck::cast_slice_mut(output.bytes_mut()?);
                let $parts = 1usize;
                $work
            }
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
pub(super) trait Number: Plain {
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
impl Number for Flag {
    type Compute = f32;

    fn widen(self) -> f32 {
        f32::from(u8::from(self.is_set()))
    }

    fn narrow(value: f32) -> Flag {
        Flag::of(value != 0.0)
    }

    fn reduce(self, other: Flag, reduction: Reduction) -> Flag {
        Flag::of(match reduction {
            Reduction::Add | Reduction::Max => self.is_set() | other.is_set(),
            Reduction::Mul | Reduction::Min => self.is_set() & other.is_set(),
        })
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
