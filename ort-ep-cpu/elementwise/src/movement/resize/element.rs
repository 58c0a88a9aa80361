//! Compute types of interpolation: floats use `f32` or `f64`, integers use `f64` and round once at
//! the end.

use half::{bf16, f16};
use num_traits::Float;

use super::super::number::{Flag, Plain};

/// An element type of an image.
pub(super) trait Pixel: Plain {
    /// The type of accumulators and weights.
    type Sum: Float + Pixel<Sum = Self::Sum> + std::ops::AddAssign;

    /// Converts to the accumulator type.
    fn widen(self) -> Self::Sum;

    /// Rounds a sum to an element. Integers saturate and round half to even, as in the standard's
    /// evaluator. Truncation would change images of a single value.
    fn rounded(sum: Self::Sum) -> Self;
}

macro_rules! pixels {
    ($($element:ty as $sum:ty: $widen:expr, $rounded:expr;)*) => {$(
        impl Pixel for $element {
            type Sum = $sum;

            fn widen(self) -> $sum {
                $widen(self)
            }

            fn rounded(sum: $sum) -> $element {
                $rounded(sum)
            }
        }
    )*};
}

macro_rules! integers {
    ($($integer:ty)*) => {
        pixels! { $($integer as f64: |x: $integer| x as f64, |sum: f64| sum.round_ties_even() as $integer;)* }
    };
}

integers! { u8 i8 u16 i16 u32 i32 u64 i64 }

pixels! {
    Flag as f64: |x: Flag| f64::from(u8::from(x.is_set())), |sum: f64| Flag::of(sum != 0.0);
    f32 as f32: std::convert::identity, std::convert::identity;
    f64 as f64: std::convert::identity, std::convert::identity;
    f16 as f32: f16::to_f32, f16::from_f32;
    bf16 as f32: bf16::to_f32, bf16::from_f32;
}
