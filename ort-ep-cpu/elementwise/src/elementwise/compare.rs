//! Comparisons, logic, and classification of floats, with booleans as bytes 0 and 1.

use bytemuck::Pod;
use half::{bf16, f16};
use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, RunCx};
use ort_core::{Result, error, for_each_type};

use super::blocks::{ZipBlock, output_elements, output_shape, run_in_place, run_map, run_zip, zip};
use ort_cpu_kernel::broadcast::{BLOCK, Block, Broadcast};
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::heap::{WithHeap, elements};
use ort_cpu_threads::interrupt::{spend_text, spending};

const STRINGS: TypeSet = TypeSet::of(&[DType::String]);

const COMPARABLE: &[(&str, TypeSet)] = &[("T", TypeSet::NUMERIC.union(TypeSet::of(&[DType::Bool])))];

type Make = fn(&mut CompileCx<'_>) -> Result<Box<dyn Executable>>;

const fn comparison(op: &'static str, make: Make) -> KernelDef {
    KernelDef { op, types: COMPARABLE, make, ..KernelDef::BASE }
}

const fn logic(op: &'static str, make: Make) -> KernelDef {
    KernelDef { op, in_place: &[(0, 0), (1, 0)], make, ..KernelDef::BASE }
}

#[derive(Clone, Copy)]
enum Comparison {
    Equal,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
}

cpu_kernels![
    comparison("Equal", |cx| make_comparison(cx, Comparison::Equal)),
    comparison("Less", |cx| make_comparison(cx, Comparison::Less)),
    comparison("LessOrEqual", |cx| make_comparison(cx, Comparison::LessOrEqual)),
    comparison("Greater", |cx| make_comparison(cx, Comparison::Greater)),
    comparison("GreaterOrEqual", |cx| make_comparison(cx, Comparison::GreaterOrEqual)),
    KernelDef {
        op: "Equal",
        rank: 1,
        types: &[("T", STRINGS)],
        make: |_| Ok(Box::new(WithHeap { bound: places, run: equal_strings })),
        ..KernelDef::BASE
    },
    logic("And", |_| Ok(logic_kernel(|a, b, out| zip_bools(a, b, out, |a, b| a & b)))),
    logic("Or", |_| Ok(logic_kernel(|a, b, out| zip_bools(a, b, out, |a, b| a | b)))),
    logic("Xor", |_| Ok(logic_kernel(|a, b, out| zip_bools(a, b, out, |a, b| a != b)))),
    KernelDef {
        op: "Not",
        in_place: &[(0, 0)],
        make: |_| {
            Ok(Box::new(|cx: &mut RunCx<'_>| {
                run_in_place::<u8>(cx, |block| block.iter_mut().for_each(|x| *x = u8::from(*x == 0)))
            }))
        },
        ..KernelDef::BASE
    },
    KernelDef { op: "IsNaN", make: make_is_nan, ..KernelDef::BASE },
    KernelDef { op: "IsInf", make: make_is_inf, ..KernelDef::BASE },
];

fn comparison_function<T: Copy + PartialOrd>(comparison: Comparison) -> ZipBlock<T, T, u8> {
    match comparison {
        Comparison::Equal => |a, b, out| zip(a, b, out, |a: T, b: T| u8::from(a == b)),
        Comparison::Less => |a, b, out| zip(a, b, out, |a: T, b: T| u8::from(a < b)),
        Comparison::LessOrEqual => |a, b, out| zip(a, b, out, |a: T, b: T| u8::from(a <= b)),
        Comparison::Greater => |a, b, out| zip(a, b, out, |a: T, b: T| u8::from(a > b)),
        Comparison::GreaterOrEqual => |a, b, out| zip(a, b, out, |a: T, b: T| u8::from(a >= b)),
    }
}

fn make_comparison(cx: &mut CompileCx<'_>, comparison: Comparison) -> Result<Box<dyn Executable>> {
    let unknown = || error!(Fail, "a comparison has no type");
    let dtype = cx.node.dtype(0).ok_or_else(unknown)?;
    if dtype == DType::Bool {
        return Ok(logic_kernel(match comparison {
            Comparison::Equal => |a, b, out| zip_bools(a, b, out, |a, b| a == b),
            Comparison::Less => |a, b, out| zip_bools(a, b, out, |a, b| !a & b),
            Comparison::LessOrEqual => |a, b, out| zip_bools(a, b, out, |a, b| !a | b),
            Comparison::Greater => |a, b, out| zip_bools(a, b, out, |a, b| a & !b),
            Comparison::GreaterOrEqual => |a, b, out| zip_bools(a, b, out, |a, b| a | !b),
        }));
    }
    for_each_type!(dtype in NUMERIC, T => Ok(comparison_kernel::<T>(comparison)), else => Err(unknown()))
}

fn comparison_kernel<T: Pod + PartialOrd + Send + Sync>(comparison: Comparison) -> Box<dyn Executable> {
    let function = comparison_function::<T>(comparison);
    Box::new(move |cx: &mut RunCx<'_>| run_zip::<T, T, u8>(cx, function))
}

/// Combines booleans. Any byte but 0 is true: callers view bytes of other libraries as booleans.
#[inline(always)]
fn zip_bools(a: Block<'_, u8>, b: Block<'_, u8>, out: &mut [u8], function: impl Fn(bool, bool) -> bool) {
    zip(a, b, out, |a, b| u8::from(function(a != 0, b != 0)));
}

fn logic_kernel(function: ZipBlock<u8, u8, u8>) -> Box<dyn Executable> {
    Box::new(move |cx: &mut RunCx<'_>| run_zip::<u8, u8, u8>(cx, function))
}

/// Returns the bytes of the indices of all strings.
fn places(shapes: &IoShapes<'_>) -> usize {
    let count = elements(shapes.input(0)).saturating_add(elements(shapes.input(1)));
    count.saturating_mul(size_of::<usize>())
}

fn equal_strings(cx: &mut RunCx<'_>) -> Result<()> {
    let (a, b) = (cx.input(0)?, cx.input(1)?);
    let walk = Broadcast::new(output_shape(cx, 0)?, &[a.shape(), b.shape()])?;
    // Blocks hold indices instead of strings.
    let (a, b) = (a.strings()?, b.strings()?);
    let places = |count: usize| -> Vec<usize> { spending(1, 0..count).collect() };
    let (a_places, b_places) = (places(a.len()), places(b.len()));
    let out = output_elements::<u8>(cx, 0)?;
    walk.for_each_block(1, BLOCK, out, |(left, right): &mut (Vec<usize>, Vec<usize>), start, block| {
        let left: Block<'_, usize> = walk.block(0, &a_places, start, block.len(), left);
        let right = walk.block(1, &b_places, start, block.len(), right);
        zip(left, right, block, |left, right| {
            let (left, right) = (a[left].as_str(), b[right].as_str());
            // Only strings of equal length are compared byte by byte.
            spend_text(if left.len() == right.len() { left } else { "" });
            u8::from(left == right)
        });
    });
    Ok(())
}

/// The class of an 8-bit float.
#[derive(PartialEq)]
enum Class {
    Nan,
    Infinite,
    Finite,
}

fn classify(dtype: DType, code: u8) -> Class {
    // The sign does not matter, except for the only NaN of the FNUZ types.
    match (dtype, code & 0x7f) {
        (DType::F8E4M3FN, 0x7f) | (DType::F8E5M2, 0x7d..) => Class::Nan,
        (DType::F8E5M2, 0x7c) => Class::Infinite,
        (DType::F8E4M3FNUZ | DType::F8E5M2FNUZ, 0) if code == 0x80 => Class::Nan,
        _ => Class::Finite,
    }
}

fn make_is_nan(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    Ok(match cx.node.dtype(0) {
        Some(DType::F32) => Box::new(|cx: &mut RunCx<'_>| run_map(cx, |x: f32| u8::from(x.is_nan()))),
        Some(DType::F64) => Box::new(|cx: &mut RunCx<'_>| run_map(cx, |x: f64| u8::from(x.is_nan()))),
        Some(DType::F16) => Box::new(|cx: &mut RunCx<'_>| run_map(cx, |x: f16| u8::from(x.is_nan()))),
        Some(DType::BF16) => Box::new(|cx: &mut RunCx<'_>| run_map(cx, |x: bf16| u8::from(x.is_nan()))),
        Some(dtype) if TypeSet::FLOAT8.contains(dtype) => Box::new(move |cx: &mut RunCx<'_>| {
            run_map(cx, |code: u8| u8::from(classify(dtype, code) == Class::Nan))
        }),
        other => return Err(error!(NotImplemented, "IsNaN of {other:?} is not supported")),
    })
}

fn make_is_inf(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let negative = cx.attrs().flag("detect_negative")?;
    let positive = cx.attrs().flag("detect_positive")?;
    let wanted =
        move |x: f64| u8::from((positive && x == f64::INFINITY) || (negative && x == f64::NEG_INFINITY));
    Ok(match cx.node.dtype(0) {
        Some(DType::F32) => Box::new(move |cx: &mut RunCx<'_>| run_map(cx, |x: f32| wanted(x.into()))),
        Some(DType::F64) => Box::new(move |cx: &mut RunCx<'_>| run_map(cx, wanted)),
        Some(DType::F16) => Box::new(move |cx: &mut RunCx<'_>| run_map(cx, |x: f16| wanted(x.into()))),
        Some(DType::BF16) => Box::new(move |cx: &mut RunCx<'_>| run_map(cx, |x: bf16| wanted(x.into()))),
        Some(dtype) if TypeSet::FLOAT8.contains(dtype) => Box::new(move |cx: &mut RunCx<'_>| {
            run_map(cx, |code: u8| {
                // The highest bit is the sign.
                let sign = if code < 0x80 { positive } else { negative };
                u8::from(sign && classify(dtype, code) == Class::Infinite)
            })
        }),
        other => return Err(error!(NotImplemented, "IsInf of {other:?} is not supported")),
    })
}
