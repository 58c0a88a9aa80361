//! Bit operations, and `Shrink` of integers.
//!
//! Arithmetic of integers follows from the formulas of records (`formula.rs`). These do not: bit
//! operations have no formula, because no float has them. The attributes of `Shrink` are floats, so
//! it computes in doubles.

use ort_core::dtype::TypeSet;
use ort_core::ep::{CompileCx, Executable, KernelDef, RunCx};
use ort_core::{Result, error, for_each_type};

use super::blocks::{ZipBlock, run_in_place, run_zip, zip};
use super::integer_lanes::Integer;
use ort_cpu_kernel::cpu_kernels;

/// Returns a kernel for integers.
const fn integer(op: &'static str, make: Make) -> KernelDef {
    KernelDef { op, types: &[("T", TypeSet::INTEGERS)], in_place: &[(0, 0), (1, 0)], make, ..KernelDef::BASE }
}

type Make = fn(&mut CompileCx<'_>) -> Result<Box<dyn Executable>>;

cpu_kernels![
    integer("BitwiseAnd", |cx| make_binary(cx, Binary::And)),
    integer("BitwiseOr", |cx| make_binary(cx, Binary::Or)),
    integer("BitwiseXor", |cx| make_binary(cx, Binary::Xor)),
    integer("BitShift", |cx| {
        let left = cx.attrs().string("direction")? == "LEFT";
        make_binary(cx, if left { Binary::ShiftLeft } else { Binary::ShiftRight })
    }),
    integer("BitwiseNot", make_not),
    integer("Shrink", make_shrink),
];

/// A function of the bits of two integers.
#[derive(Clone, Copy)]
enum Binary {
    And,
    Or,
    Xor,
    ShiftLeft,
    ShiftRight,
}

fn binary_function<T: Integer>(function: Binary) -> ZipBlock<T, T, T> {
    match function {
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

fn make_not(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let dtype = cx.node.dtype(0).ok_or_else(|| unknown(cx))?;
    for_each_type!(dtype in INTEGERS, T => {
        Ok(Box::new(move |cx: &mut RunCx<'_>| {
            run_in_place::<T>(cx, |block| block.iter_mut().for_each(|x| *x = !*x))
        }))
    }, else => Err(unknown(cx)))
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
