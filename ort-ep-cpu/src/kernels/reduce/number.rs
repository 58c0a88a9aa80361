//! Element types by how they compute: floats in `f64`, integers in `i128`, rounded or wrapped once
//! at the end.
//!
//! This is the exact and slow way that every type can go; `f32` has kernels of its own where it
//! matters.

use half::{bf16, f16};
use ort_core::dtype::Element;

use crate::interrupt::{PIECE, pieces, pieces_mut};

/// An element type that computes.
pub(crate) trait Number: Element + PartialOrd + Default {
    /// The type it computes in.
    type Wide: Wide;
    /// The least value: negative infinity for floats.
    const LOWEST: Self;
    /// The greatest value: infinity for floats.
    const HIGHEST: Self;

    /// The same number.
    fn widen(self) -> Self::Wide;
    /// The nearest number for floats, the number modulo 2^bits for integers.
    fn narrow(wide: Self::Wide) -> Self;
    /// The number as `f64`, rounded.
    fn to_f64(self) -> f64;
    /// The nearest number for floats; rounded towards zero and clamped for integers.
    fn from_f64(value: f64) -> Self;
    /// Whether it is not a number.
    #[allow(clippy::eq_op, reason = "only NaN differs from itself")]
    fn is_nan(self) -> bool {
        self != self
    }
}

/// A floating-point element type.
pub(crate) trait Real: Number<Wide = f64> {
    /// Gives the line to the function of its type, through `scratch` where it has none.
    fn apply(function: &impl super::lines::LineFn, line: &mut [Self], scratch: &mut Vec<f64>) {
        scratch.clear();
        scratch.reserve(line.len());
        for piece in pieces(line) {
            scratch.extend(piece.iter().map(|&x| x.to_f64()));
        }
        function.f64(scratch);
        for (piece, from) in pieces_mut(line).zip(scratch.chunks(PIECE)) {
            piece.iter_mut().zip(from).for_each(|(to, &from)| *to = Self::from_f64(from));
        }
    }

    /// Gives all columns of a block to the function at once, where it has a way for this type.
    fn apply_columns(_: &impl super::lines::LineFn, _block: &mut [Self], _inner: usize) -> bool {
        false
    }
}

/// A type to compute in.
pub(crate) trait Wide: bytemuck::Pod + PartialOrd + Send + Sync {
    const ZERO: Self;
    const ONE: Self;
    fn add(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn abs(self) -> Self;
    /// The quotient by a count, rounded towards zero for integers; integers give 0 for a count of
    /// 0.
    fn divide(self, count: usize) -> Self;
    /// A function of real numbers, its result rounded towards zero for integers.
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
        self.wrapping_abs()
    }
    fn divide(self, count: usize) -> i128 {
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
                wide as $type
            }
            #[inline(always)]
            fn to_f64(self) -> f64 {
                self as f64
            }
            #[inline(always)]
            fn from_f64(value: f64) -> $type {
                value as $type
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
        }
    )*};
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
    fn apply(function: &impl super::lines::LineFn, line: &mut [f32], _: &mut Vec<f64>) {
        function.f32(line);
    }

    fn apply_columns(function: &impl super::lines::LineFn, block: &mut [f32], inner: usize) -> bool {
        function.f32_columns(block, inner)
    }
}

impl Real for f64 {
    fn apply(function: &impl super::lines::LineFn, line: &mut [f64], _: &mut Vec<f64>) {
        function.f64(line);
    }
}
