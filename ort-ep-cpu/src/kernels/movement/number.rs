//! Numbers as the operators of this family compute with them: narrow types in `f32`, wide ones in `f64`.

use half::{bf16, f16};
use num_traits::Float;
use ort_core::dtype::Element;

/// How scattered values meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reduction {
    Add,
    Mul,
    Min,
    Max,
}

/// A numeric element.
pub(super) trait Number: Element {
    /// The type of sums and weights.
    type Compute: Float + Number<Compute = Self::Compute> + std::ops::AddAssign;

    /// The value in the type of computation.
    fn widen(self) -> Self::Compute;

    /// The value as an element; integers are cut and kept in range.
    fn narrow(value: Self::Compute) -> Self;

    /// Two values reduced to one.
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
                // A NaN on either side stays.
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
