//! Integers as the numbers of programs.
//!
//! Sums and products wrap, as in NumPy. Division by 0 results in 0.

use std::convert::Infallible;

use num_traits::{AsPrimitive, PrimInt, WrappingAdd, WrappingMul, WrappingSub};
use ort_core::dtype::Element;
use ort_core::spec::{BinaryFn, UnaryFn};

use super::blocks::zip;
use super::lanes::{Lane, unary_f64};
use ort_cpu_kernel::broadcast::{BLOCK, Block};

/// An integer element type.
pub(super) trait Integer:
    Element
    + bytemuck::Pod
    + Default
    + PrimInt
    + WrappingAdd
    + WrappingSub
    + WrappingMul
    + AsPrimitive<f64>
    + AsPrimitive<u64>
{
    /// Converts a float, truncated and clamped.
    fn from_float(value: f64) -> Self;
    fn wrapping_neg(self) -> Self;
    /// Divides, rounding towards 0. Division by 0 results in 0.
    fn quotient(self, divisor: Self) -> Self;
    /// Returns the remainder with the sign of the dividend; 0 if the divisor is 0.
    fn remainder(self, divisor: Self) -> Self;
    /// Shifts left with zeros, or right with the sign, also past the width.
    fn shift(self, by: Self, left: bool) -> Self;
}

macro_rules! integers {
    ($($native:ty),*) => {$(
        impl Integer for $native {
            fn from_float(value: f64) -> $native {
                value as $native
            }
            fn wrapping_neg(self) -> $native {
                <$native>::wrapping_neg(self)
            }
            fn quotient(self, divisor: $native) -> $native {
                // Wrapping, because the least value divided by -1 overflows and would panic.
                if divisor == 0 { 0 } else { self.wrapping_div(divisor) }
            }
            fn remainder(self, divisor: $native) -> $native {
                if divisor == 0 { 0 } else { self.wrapping_rem(divisor) }
            }
            fn shift(self, by: $native, left: bool) -> $native {
                // A negative count does not fit either, and so shifts everything out.
                let by = u32::try_from(by).unwrap_or(u32::MAX);
                // For unsigned types the bound is 0, which no value is below.
                let sign = if self < <$native>::MIN.max(0) { !0 } else { 0 };
                match left {
                    true => self.checked_shl(by).unwrap_or(0),
                    false => self.checked_shr(by).unwrap_or(sign),
                }
            }
        }

        impl Lane for $native {
            type Own = Infallible;
            const REMAINDER_UNITS: usize = 0;
            const HAS_BINARY_IN_PLACE: bool = false;

            fn from_f64(value: f64) -> $native {
                <$native>::from_float(value)
            }

            fn own(function: Infallible, _: &[$native], _: &mut [$native]) {
                match function {}
            }

            fn own_in_place(function: Infallible, _: &mut [$native]) {
                match function {}
            }

            fn unary(function: UnaryFn, from: &[$native], to: &mut [$native]) {
                // Blocks stay in the cache between the copy and the function.
                for (from, to) in from.chunks(BLOCK).zip(to.chunks_mut(BLOCK)) {
                    to.copy_from_slice(from);
                    unary(function, to);
                }
            }

            fn unary_in_place(function: UnaryFn, data: &mut [$native]) {
                unary(function, data);
            }

            fn binary(
                function: BinaryFn,
                a: Block<'_, $native>,
                b: Block<'_, $native>,
                to: &mut [$native],
            ) {
                binary(function, a, b, to);
            }

            fn binary_in_place(_: BinaryFn, _: &mut [$native], _: Block<'_, $native>, _: bool) -> bool {
                false
            }
        }
    )*};
}

integers!(u8, i8, u16, i16, u32, i32, u64, i64);

/// Returns the remainder with the sign of the divisor.
fn floor_remainder<T: Integer>(a: T, b: T) -> T {
    let rest = a.remainder(b);
    // Python's `%`: the remainder moves to the side of the divisor.
    let differ = (rest < T::zero()) != (b < T::zero());
    if rest != T::zero() && differ { rest.wrapping_add(&b) } else { rest }
}

/// Computes an exact power if it fits, else it wraps. A negative exponent truncates the fraction,
/// so the result is 0 except for the bases 1 and -1.
pub(super) fn integer_power<T: Integer, E: Integer>(base: T, exponent: E) -> T {
    // The bits of the exponent; the sign is asked of its own type, because a large unsigned
    // exponent has the bits of a negative one.
    let mut rest: u64 = exponent.as_();
    if exponent < E::zero() {
        let odd = !rest.is_multiple_of(2);
        let unit = base == T::one() || base == T::one().wrapping_neg();
        return match (unit, odd) {
            (true, true) => base,
            (true, false) => T::one(),
            (false, _) => T::zero(),
        };
    }
    let (mut square, mut power) = (base, T::one());
    // Exponentiation by squaring: at most 64 rounds, whatever the exponent.
    while rest > 0 {
        if !rest.is_multiple_of(2) {
            power = power.wrapping_mul(&square);
        }
        square = square.wrapping_mul(&square);
        rest /= 2;
    }
    power
}

/// Computes a function of one value in place.
fn unary<T: Integer>(function: UnaryFn, data: &mut [T]) {
    fn each<T: Copy>(data: &mut [T], function: impl Fn(T) -> T) {
        data.iter_mut().for_each(|x| *x = function(*x));
    }
    match function {
        UnaryFn::Neg => each(data, |x: T| x.wrapping_neg()),
        UnaryFn::Abs => each(data, |x: T| if x < T::zero() { x.wrapping_neg() } else { x }),
        UnaryFn::Sign => {
            each(data, |x: T| if x < T::zero() { T::one().wrapping_neg() } else { x.min(T::one()) });
        }
        UnaryFn::Not => each(data, |x: T| if x == T::zero() { T::one() } else { T::zero() }),
        UnaryFn::Floor | UnaryFn::Ceil | UnaryFn::RoundHalfEven => {}
        // The others are functions of real numbers: in doubles, truncated and clamped.
        _ => {
            let function = unary_f64(function);
            each(data, |x: T| T::from_float(function(x.as_())));
        }
    }
}

/// Computes a function of two values.
fn binary<T: Integer>(function: BinaryFn, a: Block<'_, T>, b: Block<'_, T>, to: &mut [T]) {
    let zero = T::zero();
    let lane_of = |value: bool| if value { T::one() } else { zero };
    match function {
        BinaryFn::Add => zip(a, b, to, |a: T, b: T| a.wrapping_add(&b)),
        BinaryFn::Sub => zip(a, b, to, |a: T, b: T| a.wrapping_sub(&b)),
        BinaryFn::Mul => zip(a, b, to, |a: T, b: T| a.wrapping_mul(&b)),
        BinaryFn::Div => zip(a, b, to, T::quotient),
        BinaryFn::Min => zip(a, b, to, |a: T, b: T| a.min(b)),
        BinaryFn::Max => zip(a, b, to, |a: T, b: T| a.max(b)),
        BinaryFn::Pow => zip(a, b, to, integer_power::<T, T>),
        BinaryFn::Mod => zip(a, b, to, floor_remainder::<T>),
        BinaryFn::Fmod => zip(a, b, to, T::remainder),
        BinaryFn::Less => zip(a, b, to, |a, b| lane_of(a < b)),
        BinaryFn::LessOrEqual => zip(a, b, to, |a, b| lane_of(a <= b)),
        BinaryFn::Equal => zip(a, b, to, |a, b| lane_of(a == b)),
        // Booleans are bytes of 0 and 1; any other number counts as true. `&` instead of `&&`,
        // because a loop with a branch does not vectorize.
        BinaryFn::And => zip(a, b, to, |a, b| lane_of((a != zero) & (b != zero))),
        BinaryFn::Or => zip(a, b, to, |a, b| lane_of((a != zero) | (b != zero))),
        BinaryFn::Xor => zip(a, b, to, |a, b| lane_of((a != zero) != (b != zero))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shifts_follow_the_standard() {
        assert_eq!((16u8.shift(2, true), 16u8.shift(2, false), 255u8.shift(8, false)), (64, 4, 0));
        assert_eq!(
            ((-8i32).shift(1, false), (-8i32).shift(32, false), (-8i32).shift(-1, false)),
            (-4, -1, -1)
        );
        assert_eq!((1i8.shift(-1, true), 1i8.shift(7, true), 8i64.shift(64, false)), (0, -128, 0));
    }

    #[test]
    fn division_never_panics() {
        assert_eq!((i8::MIN.quotient(-1), 5i8.quotient(0), i64::MIN.remainder(-1)), (i8::MIN, 0, 0));
        assert_eq!((floor_remainder(-7i32, 3), floor_remainder(7i32, -3), (-7i32).remainder(3)), (2, -2, -1));
    }

    /// NumPy's results, with warnings off, on int8 and uint8.
    #[test]
    fn functions_of_two_integers_wrap_like_numpy() {
        let (a, b) = ([-128i8, 127, -7, 7, 5, -128], [-1i8, 1, 3, -3, 0, -128]);
        let (c, d) = ([0u8, 255, 7, 200, 5, 16], [1u8, 1, 3, 100, 0, 16]);
        let table: [(BinaryFn, [i8; 6], [u8; 6]); 11] = [
            (BinaryFn::Add, [127, -128, -4, 4, 5, 0], [1, 0, 10, 44, 5, 32]),
            (BinaryFn::Sub, [-127, 126, -10, 10, 5, 0], [255, 254, 4, 100, 5, 0]),
            (BinaryFn::Mul, [-128, 127, -21, -21, 0, 0], [0, 255, 21, 32, 0, 0]),
            (BinaryFn::Min, [-128, 1, -7, -3, 0, -128], [0, 1, 3, 100, 0, 16]),
            (BinaryFn::Max, [-1, 127, 3, 7, 5, -128], [1, 255, 7, 200, 5, 16]),
            (BinaryFn::Mod, [0, 0, 2, -2, 0, 0], [0, 0, 1, 0, 0, 0]),
            (BinaryFn::Fmod, [0, 0, -1, 1, 0, 0], [0, 0, 1, 0, 0, 0]),
            (BinaryFn::Less, [1, 0, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0]),
            (BinaryFn::LessOrEqual, [1, 0, 1, 0, 0, 1], [1, 0, 0, 0, 0, 1]),
            (BinaryFn::Equal, [0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 1]),
            (BinaryFn::Xor, [0, 0, 0, 0, 1, 0], [1, 0, 0, 0, 1, 0]),
        ];
        for (function, signed, unsigned) in table {
            let (mut got, mut unsigned_got) = ([99; 6], [99; 6]);
            binary(function, Block::Slice(&a), Block::Slice(&b), &mut got);
            binary(function, Block::Slice(&c), Block::Slice(&d), &mut unsigned_got);
            assert_eq!((got, unsigned_got), (signed, unsigned), "{function:?}");
        }
    }

    #[test]
    fn functions_of_one_integer_wrap_like_numpy() {
        let table: [(UnaryFn, [i8; 4], [u8; 3]); 4] = [
            (UnaryFn::Neg, [-128, 5, 0, -127], [0, 255, 1]),
            (UnaryFn::Abs, [-128, 5, 0, 127], [0, 1, 255]),
            (UnaryFn::Sign, [-1, -1, 0, 1], [0, 1, 1]),
            (UnaryFn::Sqrt, [0, 0, 0, 11], [0, 1, 15]),
        ];
        for (function, signed, unsigned) in table {
            let (mut got, mut unsigned_got) = ([-128i8, -5, 0, 127], [0u8, 1, 255]);
            unary(function, &mut got);
            unary(function, &mut unsigned_got);
            assert_eq!((got, unsigned_got), (signed, unsigned), "{function:?}");
        }
    }
}
