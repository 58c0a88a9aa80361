//! The compute types of programs, and the element types stored as them. `integer_lanes.rs` has the
//! integers.

use std::convert::Infallible;

use bytemuck::Pod;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use ort_core::spec::{BinaryFn, UnaryFn};

use super::blocks::zip;
use ort_cpu_kernel::broadcast::{Block, Repeated};
use ort_cpu_vector::elementwise::{
    Binary, Operand, RowNumbers, Unary, binary, binary_in_place, binary_in_place_swapped,
    binary_rows_in_place, unary, unary_in_place,
};
use ort_cpu_vector::simd::Isa;

/// A number type that programs compute in.
pub(super) trait Lane: Pod + Default + PartialEq + Send + Sync {
    /// Functions of one value that it has beside those of formulas.
    type Own: Copy + PartialEq + Send + Sync;
    /// The units of work of a remainder beyond the one that every element counts for: of floats, it
    /// may take a step for each power of two between its operands.
    const REMAINDER_UNITS: usize = 32;
    /// Whether [`binary_in_place`](Self::binary_in_place) has loops.
    const HAS_BINARY_IN_PLACE: bool;
    fn from_f64(value: f64) -> Self;
    fn own(function: Self::Own, from: &[Self], to: &mut [Self]);
    fn own_in_place(function: Self::Own, data: &mut [Self]);
    fn unary(function: UnaryFn, from: &[Self], to: &mut [Self]);
    fn unary_in_place(function: UnaryFn, data: &mut [Self]);
    fn binary(function: BinaryFn, a: Block<'_, Self>, b: Block<'_, Self>, to: &mut [Self]);
    /// Replaces `data` by the function of itself and `other`, or of `other` and itself if
    /// `swapped`. Returns false if there is no loop for that.
    fn binary_in_place(function: BinaryFn, data: &mut [Self], other: Block<'_, Self>, swapped: bool) -> bool;

    /// [`binary_in_place`](Self::binary_in_place) with one number per row.
    fn binary_rows_in_place(
        function: BinaryFn,
        data: &mut [Self],
        rows: Repeated<'_, Self>,
        swapped: bool,
    ) -> bool {
        rows.rows(data.len()).all(|(row, number)| {
            Self::binary_in_place(function, &mut data[row], Block::Scalar(number), swapped)
        })
    }

    /// Writes the function of `data` and, row by row, of one number to `to`. The operands are
    /// exchanged if `swapped`.
    fn binary_rows(
        function: BinaryFn,
        data: &[Self],
        rows: Repeated<'_, Self>,
        swapped: bool,
        to: &mut [Self],
    ) {
        for (row, number) in rows.rows(to.len()) {
            let (data, number) = (Block::Slice(&data[row.clone()]), Block::Scalar(number));
            let (a, b) = if swapped { (number, data) } else { (data, number) };
            // Rows share a number, so the loop for a slice and a scalar serves each of them.
            Self::binary(function, a, b, &mut to[row]);
        }
    }
}

impl Lane for f32 {
    type Own = Unary;
    const HAS_BINARY_IN_PLACE: bool = true;

    fn from_f64(value: f64) -> f32 {
        value as f32
    }

    fn own(function: Unary, from: &[f32], to: &mut [f32]) {
        unary(Isa::current(), function, from, to);
    }

    fn own_in_place(function: Unary, data: &mut [f32]) {
        unary_in_place(Isa::current(), function, data);
    }

    fn unary(function: UnaryFn, from: &[f32], to: &mut [f32]) {
        match vector_unary(function) {
            Ok(function) => unary(Isa::current(), function, from, to),
            // Functions without a vector loop go element by element.
            Err(function) => to.iter_mut().zip(from).for_each(|(to, &x)| *to = function(x)),
        }
    }

    fn unary_in_place(function: UnaryFn, data: &mut [f32]) {
        match vector_unary(function) {
            Ok(function) => unary_in_place(Isa::current(), function, data),
            Err(function) => data.iter_mut().for_each(|x| *x = function(*x)),
        }
    }

    fn binary(function: BinaryFn, a: Block<'_, f32>, b: Block<'_, f32>, to: &mut [f32]) {
        // Only a scalar exponent: a test for each element would cost more than it saves.
        if let (BinaryFn::Pow, Block::Scalar(exponent), Block::Slice(a)) = (function, b, a)
            && small_power(exponent, a, to)
        {
            return;
        }
        match vector_binary(function) {
            Some(function) => binary(Isa::current(), function, vector_operand(a), vector_operand(b), to),
            None => scalar_binary(function, a, b, to),
        }
    }

    fn binary_in_place(function: BinaryFn, data: &mut [f32], other: Block<'_, f32>, swapped: bool) -> bool {
        // `Pow` goes through `binary`, which has loops for common exponents.
        let Some(function) = vector_binary(function).filter(|function| *function != Binary::Pow) else {
            return false;
        };
        let apply = if swapped { binary_in_place_swapped } else { binary_in_place };
        apply(Isa::current(), function, data, vector_operand(other));
        true
    }

    fn binary_rows_in_place(
        function: BinaryFn,
        data: &mut [f32],
        rows: Repeated<'_, f32>,
        swapped: bool,
    ) -> bool {
        let Some(function) = vector_binary(function).filter(|function| *function != Binary::Pow) else {
            return false;
        };
        let rows = RowNumbers { numbers: rows.elements, first: rows.first, each: rows.each };
        binary_rows_in_place(Isa::current(), function, data, rows, swapped);
        true
    }
}

/// Computes the powers that models use most, without a call for each element. Returns false for
/// other exponents.
fn small_power(exponent: f32, from: &[f32], to: &mut [f32]) -> bool {
    let isa = Isa::current();
    if exponent == 1.0 {
        to.copy_from_slice(from);
    } else if exponent == 2.0 {
        unary(isa, Unary::Square, from, to);
    } else if exponent == 3.0 {
        unary(isa, Unary::Square, from, to);
        binary_in_place(isa, Binary::Mul, to, Operand::Slice(from));
    } else {
        return false;
    }
    true
}

fn vector_operand(block: Block<'_, f32>) -> Operand<'_> {
    match block {
        Block::Slice(slice) => Operand::Slice(slice),
        Block::Scalar(value) => Operand::Scalar(value),
    }
}

fn vector_binary(function: BinaryFn) -> Option<Binary> {
    Some(match function {
        BinaryFn::Add => Binary::Add,
        BinaryFn::Sub => Binary::Sub,
        BinaryFn::Mul => Binary::Mul,
        BinaryFn::Div => Binary::Div,
        BinaryFn::Min => Binary::Min,
        BinaryFn::Max => Binary::Max,
        BinaryFn::Pow => Binary::Pow,
        _ => return None,
    })
}

fn vector_unary(function: UnaryFn) -> Result<Unary, fn(f32) -> f32> {
    Ok(match function {
        UnaryFn::Neg => Unary::Neg,
        UnaryFn::Abs => Unary::Abs,
        UnaryFn::Sign => Unary::Sign,
        UnaryFn::Floor => Unary::Floor,
        UnaryFn::Ceil => Unary::Ceil,
        UnaryFn::RoundHalfEven => Unary::Round,
        UnaryFn::Reciprocal => Unary::Reciprocal,
        UnaryFn::Sqrt => Unary::Sqrt,
        UnaryFn::Exp => Unary::Exp,
        UnaryFn::Expm1 => Unary::Expm1,
        UnaryFn::Log => Unary::Log,
        UnaryFn::Log1p => Unary::Log1p,
        UnaryFn::Sigmoid => Unary::Sigmoid,
        UnaryFn::Erf => Unary::Erf,
        UnaryFn::Sin => Unary::Sin,
        UnaryFn::Cos => Unary::Cos,
        UnaryFn::Tanh => Unary::Tanh,
        // These have no vector loop.
        UnaryFn::Tan => return Err(f32::tan),
        UnaryFn::Asin => return Err(f32::asin),
        UnaryFn::Acos => return Err(f32::acos),
        UnaryFn::Atan => return Err(f32::atan),
        UnaryFn::Sinh => return Err(f32::sinh),
        UnaryFn::Cosh => return Err(f32::cosh),
        UnaryFn::Asinh => return Err(libm::asinhf),
        // `libm` returns numbers for some arguments outside of the domain.
        UnaryFn::Acosh => return Err(|x| if x < 1.0 { f32::NAN } else { libm::acoshf(x) }),
        UnaryFn::Atanh => return Err(libm::atanhf),
        UnaryFn::IsNan => return Err(|x| f32::from(u8::from(x.is_nan()))),
        UnaryFn::IsInf => return Err(|x| f32::from(u8::from(x.is_infinite()))),
        UnaryFn::Not => return Err(|x| f32::from(u8::from(x == 0.0))),
    })
}

impl Lane for f64 {
    type Own = Infallible;
    const HAS_BINARY_IN_PLACE: bool = false;

    fn from_f64(value: f64) -> f64 {
        value
    }

    fn own(function: Infallible, _: &[f64], _: &mut [f64]) {
        match function {}
    }

    fn own_in_place(function: Infallible, _: &mut [f64]) {
        match function {}
    }

    fn unary(function: UnaryFn, from: &[f64], to: &mut [f64]) {
        let function = unary_f64(function);
        to.iter_mut().zip(from).for_each(|(to, &x)| *to = function(x));
    }

    fn unary_in_place(function: UnaryFn, data: &mut [f64]) {
        let function = unary_f64(function);
        data.iter_mut().for_each(|x| *x = function(*x));
    }

    fn binary(function: BinaryFn, a: Block<'_, f64>, b: Block<'_, f64>, to: &mut [f64]) {
        scalar_binary(function, a, b, to);
    }

    fn binary_in_place(_: BinaryFn, _: &mut [f64], _: Block<'_, f64>, _: bool) -> bool {
        false
    }
}

pub(super) fn unary_f64(function: UnaryFn) -> fn(f64) -> f64 {
    match function {
        UnaryFn::Neg => |x| -x,
        UnaryFn::Abs => f64::abs,
        // `signum` of a zero is 1 or -1. Adding 0.0 turns -0.0 into 0.0 and keeps NaN.
        UnaryFn::Sign => |x| if x == 0.0 || x.is_nan() { x + 0.0 } else { x.signum() },
        UnaryFn::Floor => f64::floor,
        UnaryFn::Ceil => f64::ceil,
        UnaryFn::RoundHalfEven => f64::round_ties_even,
        UnaryFn::Reciprocal => f64::recip,
        UnaryFn::Sqrt => f64::sqrt,
        UnaryFn::Exp => f64::exp,
        UnaryFn::Expm1 => f64::exp_m1,
        UnaryFn::Log => f64::ln,
        UnaryFn::Log1p => f64::ln_1p,
        UnaryFn::Sigmoid => |x| 1.0 / (1.0 + (-x).exp()),
        UnaryFn::Erf => libm::erf,
        UnaryFn::Sin => f64::sin,
        UnaryFn::Cos => f64::cos,
        UnaryFn::Tan => f64::tan,
        UnaryFn::Asin => f64::asin,
        UnaryFn::Acos => f64::acos,
        UnaryFn::Atan => f64::atan,
        UnaryFn::Sinh => f64::sinh,
        UnaryFn::Cosh => f64::cosh,
        UnaryFn::Tanh => f64::tanh,
        UnaryFn::Asinh => libm::asinh,
        // `libm` returns numbers for some arguments outside of the domain.
        UnaryFn::Acosh => |x| if x < 1.0 { f64::NAN } else { libm::acosh(x) },
        UnaryFn::Atanh => libm::atanh,
        UnaryFn::IsNan => |x| f64::from(u8::from(x.is_nan())),
        UnaryFn::IsInf => |x| f64::from(u8::from(x.is_infinite())),
        UnaryFn::Not => |x| f64::from(u8::from(x == 0.0)),
    }
}

/// Computes the functions of two values by plain loops.
fn scalar_binary<T: Lane + num_traits::Float>(
    function: BinaryFn,
    a: Block<'_, T>,
    b: Block<'_, T>,
    to: &mut [T],
) {
    let lane_of = |value: bool| if value { T::one() } else { T::zero() };
    let zero = T::zero();
    match function {
        BinaryFn::Add => zip(a, b, to, |a, b| a + b),
        BinaryFn::Sub => zip(a, b, to, |a, b| a - b),
        BinaryFn::Mul => zip(a, b, to, |a, b| a * b),
        BinaryFn::Div => zip(a, b, to, |a, b| a / b),
        // A NaN on either side wins: as `a` by the test, as `b` because comparisons with it fail.
        BinaryFn::Min => zip(a, b, to, |a, b| if a < b || a.is_nan() { a } else { b }),
        BinaryFn::Max => zip(a, b, to, |a, b| if a > b || a.is_nan() { a } else { b }),
        BinaryFn::Pow => zip(a, b, to, T::powf),
        BinaryFn::Mod => zip(a, b, to, floor_remainder),
        // The sign of the dividend, as in C; Rust's `%` does the same.
        BinaryFn::Fmod => zip(a, b, to, |a, b| a % b),
        BinaryFn::Less => zip(a, b, to, |a, b| lane_of(a < b)),
        BinaryFn::LessOrEqual => zip(a, b, to, |a, b| lane_of(a <= b)),
        BinaryFn::Equal => zip(a, b, to, |a, b| lane_of(a == b)),
        // Booleans are lanes of 0 and 1; any other number counts as true.
        BinaryFn::And => zip(a, b, to, |a, b| lane_of(a != zero && b != zero)),
        BinaryFn::Or => zip(a, b, to, |a, b| lane_of(a != zero || b != zero)),
        BinaryFn::Xor => zip(a, b, to, |a, b| lane_of((a != zero) != (b != zero))),
    }
}

/// Returns the remainder with the sign of the divisor, and the special cases that the standard
/// lists for `Mod`.
fn floor_remainder<T: num_traits::Float>(a: T, b: T) -> T {
    let rest = a % b;
    // A remainder of 0 takes the sign of the divisor too, as in Python.
    if rest.is_zero() {
        return T::zero().copysign(b);
    }
    if (rest < T::zero()) != (b < T::zero()) { rest + b } else { rest }
}

/// An element type that programs compute in as [`Storage::Lane`].
pub(super) trait Storage: Pod + Send + Sync {
    type Lane: Lane;
    fn widen_one(self) -> Self::Lane;
    /// Replaces the content of `to` by the numbers of `from`.
    fn widen(from: &[Self], to: &mut Vec<Self::Lane>);
    /// Rounds once to the element type.
    fn narrow(from: &[Self::Lane], to: &mut [Self]);
    /// Returns the elements themselves, if they are lanes already.
    fn lanes(elements: &[Self]) -> Option<&[Self::Lane]>;
    fn lanes_mut(elements: &mut [Self]) -> Option<&mut [Self::Lane]>;
}

/// Types that are lanes themselves.
macro_rules! stored_as_is {
    ($($native:ty),*) => {$(
        impl Storage for $native {
            type Lane = $native;
            fn widen_one(self) -> $native {
                self
            }
            fn widen(from: &[$native], to: &mut Vec<$native>) {
                to.clear();
                to.extend_from_slice(from);
            }
            fn narrow(from: &[$native], to: &mut [$native]) {
                to.copy_from_slice(from);
            }
            fn lanes(elements: &[$native]) -> Option<&[$native]> {
                Some(elements)
            }
            fn lanes_mut(elements: &mut [$native]) -> Option<&mut [$native]> {
                Some(elements)
            }
        }
    )*};
}

stored_as_is!(f32, f64, u8, i8, u16, i16, u32, i32, u64, i64);

/// 16-bit floats, computed in `f32`.
macro_rules! stored_as_f32 {
    ($($native:ty),*) => {$(
        impl Storage for $native {
            type Lane = f32;
            fn widen_one(self) -> f32 {
                self.to_f32()
            }
            fn widen(from: &[$native], to: &mut Vec<f32>) {
                to.resize(from.len(), 0.0);
                from.convert_to_f32_slice(to);
            }
            fn narrow(from: &[f32], to: &mut [$native]) {
                to.convert_from_f32_slice(from);
            }
            fn lanes(_: &[$native]) -> Option<&[f32]> {
                None
            }
            fn lanes_mut(_: &mut [$native]) -> Option<&mut [f32]> {
                None
            }
        }
    )*};
}

stored_as_f32!(f16, bf16);
