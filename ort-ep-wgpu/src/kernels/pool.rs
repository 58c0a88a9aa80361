//! `MaxPool`, `AveragePool`, `LpPool` and the global pools.

use ort_core::Result;
use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::KernelDef;
use ort_core::ops::nn::problem::{PixelLayout, PoolFold, PoolKind, pool_windows};
use ort_gpu::read::has_up_to_three_axes;

use super::elementwise::FLOATS;
use super::windows::{WINDOWS, with_windows};
use super::{WgpuKernel, wgpu_kernels};
use crate::launch::{Dispatch, OpCx};
use crate::shader::Shader;

const OF_MAX: TypeSet = FLOATS.union(TypeSet::of(&[DType::I8, DType::U8]));

const fn windowed(op: &'static str) -> KernelDef {
    KernelDef { op, types: &[("T", FLOATS)], when: has_up_to_three_axes, ..KernelDef::BASE }
}

const fn global(op: &'static str) -> KernelDef {
    KernelDef { op, types: &[("T", FLOATS)], ..KernelDef::BASE }
}

wgpu_kernels![
    WgpuKernel::new(KernelDef { types: &[("T", OF_MAX)], left_out: &[0], ..windowed("MaxPool") }, max_pool),
    WgpuKernel::new(windowed("AveragePool"), pool),
    WgpuKernel::new(windowed("LpPool"), pool),
    WgpuKernel::new(global("GlobalAveragePool"), global_pool),
    WgpuKernel::new(global("GlobalMaxPool"), global_pool),
    WgpuKernel::new(global("GlobalLpPool"), global_pool),
];

/// Generates the fold of a pool over floats: `Sum`, `start`, `fold`, `merge` and `finish`.
fn fold_of(cx: &OpCx<'_>) -> Result<String> {
    let PoolFold { kind, power } = PoolFold::of(cx.op, cx.attrs)?;
    let (start, fold, merge, result) = match kind {
        PoolKind::Max => ("-infinity()", "max_(sum, v)", "max_(a, b)", "sum"),
        PoolKind::Average => ("0.0", "sum + v", "a + b", "sum / f32(count)"),
        PoolKind::L1 => ("0.0", "sum + abs(v)", "a + b", "sum"),
        PoolKind::L2 => ("0.0", "sum + v * v", "a + b", "sqrt(sum)"),
        PoolKind::Lp => ("0.0", "sum + pow_(abs(v), POWER)", "a + b", "pow_(sum, 1.0 / POWER)"),
    };
    Ok(format!(
        "alias Sum = f32;\n\
         const POWER: f32 = f32({power});\n\
         fn start() -> f32 {{ return {start}; }}\n\
         fn fold(sum: f32, v: f32, place: u32) -> f32 {{ return {fold}; }}\n\
         fn merge(a: f32, b: f32) -> f32 {{ return {merge}; }}\n\
         fn finish(i: u32, sum: f32, count: u32) {{ set_y(i, {result}); }}\n"
    ))
}

/// Finishes a dispatch over windows, for a shader that has its outputs.
fn windows_of(cx: &OpCx<'_>, shader: Shader, count: usize, code: &str) -> Result<Dispatch> {
    let axes = pool_windows(cx.attrs, &cx.input(0)?.shape, PixelLayout::ChannelsFirst)?;
    // Only `AveragePool` has this attribute.
    let include_pad = cx.attrs.find_int("count_include_pad").unwrap_or(0) != 0;
    let shader = with_windows(shader.read("x", cx.input(0)?), &axes)
        .sizes("pads_behind", &axes.map(|axis| axis.pads[1]))
        .constant("INCLUDE_PAD", usize::from(include_pad));
    shader.each(count, &[WINDOWS, code, include_str!("pool.wgsl")].concat())
}

fn pool(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let y = cx.output(0)?;
    Ok(vec![windows_of(cx, Shader::new(cx).write("y", y), y.count(), &fold_of(cx)?)?])
}

fn max_pool(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let x = cx.input(0)?;
    // NaN wins over numbers, and the first of equal values stays.
    let (least, replaces) = match x.dtype {
        DType::I8 => ("-128", "new_value > best"),
        DType::U8 => ("0u", "new_value > best"),
        _ => ("-infinity()", "new_value > best || (is_nan(new_value) && !is_nan(best))"),
    };
    let column_major = cx.attrs.find_int("storage_order").unwrap_or(0) != 0;
    let mut shader = Shader::new(cx).constant("COLUMN_MAJOR", usize::from(column_major));
    let (mut finish, mut count) = (String::new(), 0);
    if let Some(y) = cx.find_output(0) {
        (shader, count) = (shader.write("y", y), y.count());
        finish += "set_y(i, best.value);\n";
    }
    if let Some(indices) = cx.find_output(1) {
        (shader, count) = (shader.write("indices", indices), indices.count());
        finish += "set_indices(i, bitcast<i32>(index_of(i, best)));\n";
    }
    let code = format!(
        "{}fn least() -> x_t {{ return {least}; }}\n\
         fn replaces(new_value: x_t, best: x_t) -> bool {{ return {replaces}; }}\n\
         fn finish(i: u32, best: Sum, count: u32) {{\n{finish}}}\n",
        include_str!("max_pool.wgsl")
    );
    Ok(vec![windows_of(cx, shader, count, &code)?])
}

fn global_pool(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (x, y) = (cx.input(0)?, cx.output(0)?);
    // The axes after batch and channel form the plane.
    let plane = x.shape.iter().skip(2).fold(1, |plane: usize, size| plane.saturating_mul(*size));
    let shader = Shader::new(cx).read("x", x).write("y", y).number("plane", plane);
    // A large plane keeps more lanes busy.
    let lanes = if plane > 1024 { 256 } else { 64 };
    let code = fold_of(cx)? + include_str!("pool_global.wgsl");
    Ok(vec![shader.groups(y.count(), lanes, &code)?])
}
