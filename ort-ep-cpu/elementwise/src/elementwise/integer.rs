//! Integer arithmetic and bit operations.
//!
//! Sums and products wrap, as in NumPy. Division by 0 results in 0.

use bytemuck::Pod;
use num_traits::{AsPrimitive, PrimInt, WrappingAdd, WrappingMul, WrappingSub};
use ort_core::dtype::{Element, TypeSet};
use ort_core::ep::{CompileCx, Executable, KernelDef, RunCx};
use ort_core::{Result, error, for_each_type};
use smallvec::SmallVec;

use super::blocks::{
    ZipBlock, operand, operand_block, output_elements, output_shape, run_in_place, run_zip, zip,
};
use ort_cpu_kernel::broadcast::{BLOCK, Block, Broadcast};
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_threads::interrupt::spend;

/// Returns a kernel for integers.
const fn integer(op: &'static str, make: Make) -> KernelDef {
    KernelDef { op, types: &[("T", TypeSet::INTEGERS)], in_place: &[(0, 0), (1, 0)], make, ..KernelDef::BASE }
}

type Make = fn(&mut CompileCx<'_>) -> Result<Box<dyn Executable>>;

cpu_kernels![
    integer("Add", |cx| make_binary(cx, Binary::Add)),
    integer("Sub", |cx| make_binary(cx, Binary::Sub)),
    integer("Mul", |cx| make_binary(cx, Binary::Mul)),
    integer("Div", |cx| make_binary(cx, Binary::Div)),
    integer("Mod", |cx| {
        let truncates = cx.attrs().flag("fmod")?;
        make_binary(cx, if truncates { Binary::TruncatedMod } else { Binary::FloorMod })
    }),
    integer("PRelu", |cx| make_binary(cx, Binary::PRelu)),
    integer("BitwiseAnd", |cx| make_binary(cx, Binary::And)),
    integer("BitwiseOr", |cx| make_binary(cx, Binary::Or)),
    integer("BitwiseXor", |cx| make_binary(cx, Binary::Xor)),
    integer("BitShift", |cx| {
        let left = cx.attrs().string("direction")? == "LEFT";
        make_binary(cx, if left { Binary::ShiftLeft } else { Binary::ShiftRight })
    }),
    integer("Min", |cx| make_folded(cx, Binary::Min)),
    integer("Max", |cx| make_folded(cx, Binary::Max)),
    integer("Abs", |cx| make_unary(cx, Unary::Abs)),
    integer("Neg", |cx| make_unary(cx, Unary::Neg)),
    integer("Sign", |cx| make_unary(cx, Unary::Sign)),
    integer("Relu", |cx| make_unary(cx, Unary::Relu)),
    integer("BitwiseNot", |cx| make_unary(cx, Unary::Not)),
    integer("Shrink", make_shrink),
];

/// A function of two integers.
#[derive(Clone, Copy)]
enum Binary {
    Add,
    Sub,
    Mul,
    Div,
    /// The remainder with the sign of the dividend.
    TruncatedMod,
    /// The remainder with the sign of the divisor.
    FloorMod,
    Min,
    Max,
    PRelu,
    And,
    Or,
    Xor,
    ShiftLeft,
    ShiftRight,
}

/// A function of one integer.
#[derive(Clone, Copy)]
enum Unary {
    Abs,
    Neg,
    Sign,
    Relu,
    Not,
}

/// An integer element type.
pub(super) trait Integer:
    Element + Pod + PrimInt + WrappingAdd + WrappingSub + WrappingMul + AsPrimitive<f64> + AsPrimitive<i64>
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

fn binary_function<T: Integer>(function: Binary) -> ZipBlock<T, T, T> {
    match function {
        Binary::Add => |a, b, out| zip(a, b, out, |a: T, b: T| a.wrapping_add(&b)),
        Binary::Sub => |a, b, out| zip(a, b, out, |a: T, b: T| a.wrapping_sub(&b)),
        Binary::Mul => |a, b, out| zip(a, b, out, |a: T, b: T| a.wrapping_mul(&b)),
        Binary::Div => |a, b, out| zip(a, b, out, T::quotient),
        Binary::TruncatedMod => |a, b, out| zip(a, b, out, T::remainder),
        Binary::FloorMod => |a, b, out| zip(a, b, out, floor_remainder::<T>),
        Binary::Min => |a, b, out| zip(a, b, out, |a: T, b: T| a.min(b)),
        Binary::Max => |a, b, out| zip(a, b, out, |a: T, b: T| a.max(b)),
        Binary::PRelu => |a, b, out| {
            zip(a, b, out, |a: T, b: T| if a < T::zero() { a.wrapping_mul(&b) } else { a });
        },
        Binary::And => |a, b, out| zip(a, b, out, |a: T, b: T| a & b),
        Binary::Or => |a, b, out| zip(a, b, out, |a: T, b: T| a | b),
        Binary::Xor => |a, b, out| zip(a, b, out, |a: T, b: T| a ^ b),
        Binary::ShiftLeft => |a, b, out| zip(a, b, out, |a: T, b: T| a.shift(b, true)),
        Binary::ShiftRight => |a, b, out| zip(a, b, out, |a: T, b: T| a.shift(b, false)),
    }
}

fn unknown(cx: &CompileCx<'_>) -> ort_core::Error {
    error!(Fail, "{} of integers has no type", cx.node.node.spec.name)
}

fn make_binary(cx: &mut CompileCx<'_>, function: Binary) -> Result<Box<dyn Executable>> {
    let dtype = cx.node.dtype(0).ok_or_else(|| unknown(cx))?;
    for_each_type!(dtype in INTEGERS, T => {
        let function = binary_function::<T>(function);
        Ok(Box::new(move |cx: &mut RunCx<'_>| run_zip::<T, T, T>(cx, function)))
    }, else => Err(unknown(cx)))
}

fn make_folded(cx: &mut CompileCx<'_>, function: Binary) -> Result<Box<dyn Executable>> {
    let dtype = cx.node.dtype(0).ok_or_else(|| unknown(cx))?;
    for_each_type!(dtype in INTEGERS, T => {
        let function = binary_function::<T>(function);
        Ok(Box::new(move |cx: &mut RunCx<'_>| run_folded::<T>(cx, function)))
    }, else => Err(unknown(cx)))
}

/// Folds all inputs block by block.
fn run_folded<T: Integer>(cx: &mut RunCx<'_>, function: ZipBlock<T, T, T>) -> Result<()> {
    let mut operands: SmallVec<[Option<&[T]>; 3]> = SmallVec::new();
    let mut shapes: SmallVec<[&[usize]; 3]> = SmallVec::new();
    for index in 0..cx.input_count() {
        let (elements, shape) = operand::<T>(cx, index)?;
        operands.push(elements);
        shapes.push(shape);
    }
    // The input that the output already holds comes first. The others may follow in any order.
    let shared = operands.iter().position(Option::is_none).unwrap_or(0);
    let walk = Broadcast::new(output_shape(cx, 0)?, &shapes)?;
    let threads = cx.threads();
    let out = output_elements::<T>(cx, 0)?;
    walk.for_each_block(threads, BLOCK, out, |(left, right): &mut (Vec<T>, Vec<T>), start, block| {
        match operand_block(&walk, (shared, operands[shared]), start, block, left) {
            Block::Slice(first) => block.copy_from_slice(first),
            Block::Scalar(first) => block.fill(first),
        }
        // Four elements per unit, as for other loops of one operation per element.
        spend(operands.len() * block.len() / 4);
        for index in (0..operands.len()).filter(|&index| index != shared) {
            // The function cannot read and write the block at once, so it reads a copy.
            left.clear();
            left.extend_from_slice(block);
            let next = operand_block(&walk, (index, operands[index]), start, block, right);
            function(Block::Slice(left), next, block);
        }
    });
    Ok(())
}

fn make_unary(cx: &mut CompileCx<'_>, function: Unary) -> Result<Box<dyn Executable>> {
    let dtype = cx.node.dtype(0).ok_or_else(|| unknown(cx))?;
    for_each_type!(dtype in INTEGERS, T => {
        let function = unary_function::<T>(function);
        Ok(Box::new(move |cx: &mut RunCx<'_>| run_in_place::<T>(cx, function)))
    }, else => Err(unknown(cx)))
}

fn unary_function<T: Integer>(function: Unary) -> fn(&mut [T]) {
    fn each<T: Copy>(block: &mut [T], function: impl Fn(T) -> T) {
        block.iter_mut().for_each(|x| *x = function(*x));
    }
    match function {
        Unary::Abs => |block| each(block, |x: T| if x < T::zero() { x.wrapping_neg() } else { x }),
        Unary::Neg => |block| each(block, |x: T| x.wrapping_neg()),
        Unary::Sign => |block| {
            each(block, |x: T| if x < T::zero() { T::one().wrapping_neg() } else { x.min(T::one()) });
        },
        Unary::Relu => |block| each(block, |x: T| x.max(T::zero())),
        Unary::Not => |block| each(block, |x: T| !x),
    }
}

fn make_shrink(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let dtype = cx.node.dtype(0).ok_or_else(|| unknown(cx))?;
    let bias = f64::from(cx.attrs().float("bias")?);
    let lambda = f64::from(cx.attrs().float("lambd")?);
    for_each_type!(dtype in INTEGERS, T => {
        Ok(Box::new(move |cx: &mut RunCx<'_>| {
            run_in_place::<T>(cx, |block| block.iter_mut().for_each(|x| *x = shrink(*x, lambda, bias)))
        }))
    }, else => Err(unknown(cx)))
}

/// Returns `x + bias` below `-lambda`, `x - bias` above `lambda`, else 0.
fn shrink<T: Integer>(x: T, lambda: f64, bias: f64) -> T {
    let value: f64 = x.as_();
    if value < -lambda {
        // In doubles, rounded towards zero and clamped, because bias and bounds are floats.
        T::from_float(value + bias)
    } else if value > lambda {
        T::from_float(value - bias)
    } else {
        T::zero()
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
}
