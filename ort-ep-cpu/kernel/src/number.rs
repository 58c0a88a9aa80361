//! Accumulator types: `f64` for floats, `i128` for integers.
//!
//! Results are rounded or wrapped once at the end. This is the exact and slow path that every type
//! can take. `f32` has its own kernels if speed matters.

#![allow(
    clippy::indexing_slicing,
    reason = "places are counted over shapes that inference checked and that views are as long as"
)]

use half::{bf16, f16};
use ort_core::dtype::Element;
use ort_core::tensor::TensorView;
use ort_core::{Result, error, for_each_type};

use ort_cpu_threads::interrupt::{PIECE, pieces, pieces_mut, spending};

/// An element type that can be accumulated.
pub trait Number: Element + PartialOrd + Default {
    /// The accumulator type.
    type Wide: Wide;
    /// The least value; negative infinity for floats.
    const LOWEST: Self;
    /// The greatest value; infinity for floats.
    const HIGHEST: Self;

    /// Converts to the accumulator type, exactly.
    fn widen(self) -> Self::Wide;
    /// Converts back: to the nearest float, or to an integer modulo 2^bits.
    fn narrow(wide: Self::Wide) -> Self;
    /// Converts to `f64`, rounded.
    fn to_f64(self) -> f64;
    /// Converts from `f64`: to the nearest float, or to an integer, rounded towards zero and
    /// clamped.
    fn from_f64(value: f64) -> Self;
    /// Maps values to keys of the same order. Both zeros have one key, and so has every NaN, above
    /// all numbers.
    fn sort_key(self) -> u64;
    /// Returns whether the value is NaN.
    #[allow(clippy::eq_op, reason = "only NaN differs from itself")]
    fn is_nan(self) -> bool {
        self != self
    }
}

/// A floating-point element type.
pub trait Real: Number<Wide = f64> {
    /// Applies the function to the lane, through `scratch` if it has no loop for this type.
    fn apply(function: &impl crate::lane_fn::LaneFn, lane: &mut [Self], scratch: &mut Vec<f64>) {
        // The scratch is the caller's, so that many lanes share one allocation.
        scratch.clear();
        scratch.reserve(lane.len());
        for piece in pieces(lane) {
            scratch.extend(piece.iter().map(|&x| x.to_f64()));
        }
        function.f64(scratch);
        for (piece, from) in pieces_mut(lane).zip(scratch.chunks(PIECE)) {
            piece.iter_mut().zip(from).for_each(|(to, &from)| *to = Self::from_f64(from));
        }
    }

    /// Applies the function to all columns of a block at once. Returns false if it has no loop for
    /// this type.
    fn apply_columns(_: &impl crate::lane_fn::LaneFn, _block: &mut [Self], _inner: usize) -> bool {
        false
    }
}

/// An accumulator type.
pub trait Wide: bytemuck::Pod + PartialOrd + Send + Sync {
    /// Zero.
    const ZERO: Self;
    /// One.
    const ONE: Self;
    /// Adds; integers wrap.
    fn add(self, other: Self) -> Self;
    /// Multiplies; integers wrap.
    fn mul(self, other: Self) -> Self;
    /// Returns the absolute value.
    fn abs(self) -> Self;
    /// Divides by a count, rounding towards zero for integers. An integer divided by 0 is 0.
    fn divide(self, count: usize) -> Self;
    /// Applies a function of real numbers, rounding its result towards zero for integers.
    fn real(self, function: impl Fn(f64) -> f64) -> Self;
}

impl Wide for f64 {
    const ZERO: f64 = 0.0;
    const ONE: f64 = 1.0;
    #[inline(always)]
    fn add(self, other: f64) -> f64 {
        self + other
    }
    #[inline(always)]
    fn mul(self, other: f64) -> f64 {
        self * other
    }
    #[inline(always)]
    fn abs(self) -> f64 {
        f64::abs(self)
    }
    #[inline]
    fn divide(self, count: usize) -> f64 {
        self / count as f64
    }
    fn real(self, function: impl Fn(f64) -> f64) -> f64 {
        function(self)
    }
}

impl Wide for i128 {
    const ZERO: i128 = 0;
    const ONE: i128 = 1;
    #[inline(always)]
    fn add(self, other: i128) -> i128 {
        self.wrapping_add(other)
    }
    #[inline(always)]
    fn mul(self, other: i128) -> i128 {
        self.wrapping_mul(other)
    }
    #[inline(always)]
    fn abs(self) -> i128 {
        // Only the least value wraps, to itself.
        self.wrapping_abs()
    }
    #[inline]
    fn divide(self, count: usize) -> i128 {
        // A count of elements fits `i128`, so only 0 fails.
        self.checked_div(count as i128).unwrap_or(0)
    }
    fn real(self, function: impl Fn(f64) -> f64) -> i128 {
        function(self as f64) as i128
    }
}

macro_rules! integers {
    ($($type:ty)*) => {$(
        impl Number for $type {
            type Wide = i128;
            const LOWEST: $type = <$type>::MIN;
            const HIGHEST: $type = <$type>::MAX;
            #[inline(always)]
            fn widen(self) -> i128 {
                i128::from(self)
            }
            #[inline(always)]
            fn narrow(wide: i128) -> $type {
                // Keeps the low bits, which makes sums of any order wrap as in the type itself.
                wide as $type
            }
            #[inline(always)]
            fn to_f64(self) -> f64 {
                self as f64
            }
            #[inline(always)]
            fn from_f64(value: f64) -> $type {
                // `as` rounds towards zero, saturates, and maps NaN to 0.
                value as $type
            }
            #[inline(always)]
            fn sort_key(self) -> u64 {
                // The distance from the least value fits, because no type has more than 64 bits.
                (i128::from(self) - i128::from(<$type>::MIN)) as u64
            }
        }
    )*};
}

integers!(i8 u8 i16 u16 i32 u32 i64 u64);

macro_rules! floats {
    ($($type:ty, $widen:expr, $narrow:expr;)*) => {$(
        impl Number for $type {
            type Wide = f64;
            const LOWEST: $type = <$type>::NEG_INFINITY;
            const HIGHEST: $type = <$type>::INFINITY;
            #[inline(always)]
            fn widen(self) -> f64 {
                $widen(self)
            }
            #[inline(always)]
            fn narrow(wide: f64) -> $type {
                $narrow(wide)
            }
            #[inline(always)]
            fn to_f64(self) -> f64 {
                $widen(self)
            }
            #[inline(always)]
            fn from_f64(value: f64) -> $type {
                $narrow(value)
            }
            #[inline(always)]
            fn sort_key(self) -> u64 {
                float_sort_key($widen(self))
            }
        }
    )*};
}

/// [`Number::sort_key`] of a float.
#[inline(always)]
fn float_sort_key(value: f64) -> u64 {
    const SIGN: u64 = 1 << 63;
    // The sum turns negative zero into positive zero.
    let bits = (value + 0.0).to_bits();
    // Of negative floats, the bits order the magnitudes.
    let key = if bits & SIGN == 0 { bits | SIGN } else { !bits };
    if value.is_nan() { u64::MAX } else { key }
}

floats! {
    f32, f64::from, |wide| wide as f32;
    f64, std::convert::identity, std::convert::identity;
    f16, f64::from, f16::from_f64;
    bf16, f64::from, bf16::from_f64;
}

impl Real for f16 {}
impl Real for bf16 {}

impl Real for f32 {
    fn apply(function: &impl crate::lane_fn::LaneFn, lane: &mut [f32], _: &mut Vec<f64>) {
        function.f32(lane);
    }

    fn apply_columns(function: &impl crate::lane_fn::LaneFn, block: &mut [f32], inner: usize) -> bool {
        function.f32_columns(block, inner)
    }
}

impl Real for f64 {
    fn apply(function: &impl crate::lane_fn::LaneFn, lane: &mut [f64], _: &mut Vec<f64>) {
        function.f64(lane);
    }
}

/// Returns the elements of a small tensor of floats.
pub fn to_f64s(view: &TensorView<'_>) -> Result<Vec<f64>> {
    let dtype = view.dtype();
    for_each_type!(dtype in FLOATS, T => {
        Ok(spending(1, &*view.to_cow::<T>()?).map(|x| x.to_f64()).collect())
    }, else => Err(error!(InvalidArgument, "expected floats, got {}", dtype.name())))
}

#[cfg(test)]
mod tests {
    use std::fmt::Debug;

    use super::*;

    fn is_ascending<T: Number + Debug>(values: &[T]) {
        for pair in values.windows(2) {
            assert!(pair[0].sort_key() < pair[1].sort_key(), "{pair:?}");
        }
    }

    #[test]
    fn sort_keys_keep_the_order() {
        is_ascending(&[i8::MIN, -1, 0, 1, i8::MAX]);
        is_ascending(&[i64::MIN, i64::MIN + 1, -1, 0, 1, i64::MAX]);
        is_ascending(&[0, 1, u64::MAX / 2 + 1, u64::MAX]);
        is_ascending(&[f32::NEG_INFINITY, f32::MIN, -1.5, -1e-45, 0.0, 1e-45, 1.5, f32::INFINITY, f32::NAN]);
        is_ascending(&[
            f64::NEG_INFINITY,
            f64::MIN,
            -5e-324,
            -0.0,
            5e-324,
            f64::MAX,
            f64::INFINITY,
            -f64::NAN,
        ]);
        is_ascending(
            [f16::NEG_INFINITY, f16::NEG_ONE, f16::ZERO, f16::MIN_POSITIVE_SUBNORMAL, f16::NAN].as_slice(),
        );
        assert_eq!((-0.0f32).sort_key(), 0.0f32.sort_key());
        assert_eq!((-f64::NAN).sort_key(), f64::NAN.sort_key());
    }
}
