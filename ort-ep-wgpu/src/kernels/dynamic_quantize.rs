//! `DynamicQuantizeLinear`: reduces the range of the data by parts, then quantizes.

use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ep::KernelDef;

use super::fill::{per_word, stored};
use super::{WgpuKernel, wgpu_kernels};
use crate::launch::{Dispatch, OpCx, Operand};
use crate::shader::Shader;

/// The invocations of a workgroup. Also the most parts, because each lane of the second pass reads
/// one.
const LANES: usize = 256;
/// The least number of elements in a part.
const PART: usize = 1 << 12;
/// The words that an invocation writes.
const WORDS: usize = 4;

wgpu_kernels![WgpuKernel {
    workspace: Some(|cx| {
        let mut taken = 0;
        ranges(cx, &mut taken)?;
        Ok(taken)
    }),
    ..WgpuKernel::new(KernelDef { op: "DynamicQuantizeLinear", ..KernelDef::BASE }, dispatches)
}];

/// The minimum and maximum of each part, in the workspace.
fn ranges(cx: &OpCx<'_>, taken: &mut usize) -> Result<Operand> {
    // No data still has one part, whose range is that of zero.
    let parts = cx.input(0)?.count().div_ceil(PART).clamp(1, LANES);
    Ok(cx.workspace(taken, DType::F32, &[parts, 2]))
}

/// WGSL: `extremes(lane, own)` combines the ranges of a workgroup's invocations. The range always
/// includes zero.
const EXTREMES: &str = "
var<workgroup> spans: array<vec2<f32>, LANES>;
fn span(a: vec2<f32>, b: vec2<f32>) -> vec2<f32> {
    return vec2<f32>(min_(a.x, b.x), max_(a.y, b.y));
}
fn extremes(lane: u32, own: vec2<f32>) -> vec2<f32> {
    spans[lane] = own;
    for (var half = LANES / 2u; half > 0u; half = half >> 1u) {
        workgroupBarrier();
        if (lane < half) { spans[lane] = span(spans[lane], spans[lane + half]); }
    }
    workgroupBarrier();
    return spans[0];
}
";

const RANGE_OF_PART: &str = "
fn group(index: u32, lane: u32) {
    var own = vec2<f32>(0.0, 0.0);
    for (var i = index * LANES + lane; i < p.elements; i += p.parts * LANES) {
        let v = x(i);
        own = span(own, vec2<f32>(v, v));
    }
    let all = extremes(lane, own);
    if (lane == 0u) {
        set_ranges(2u * index, all.x);
        set_ranges(2u * index + 1u, all.y);
    }
}
";

/// Computes scale and zero point from the ranges of the parts, then quantizes. Every workgroup
/// repeats the reduction, which saves a dispatch. NaN data yields scale 0.
const QUANTIZE: &str = "
var<private> divisor: f32;
var<private> zero: f32;
fn value(i: u32) -> u32 {
    let rounded = round(divide_(x(i), divisor)) + zero;
    if (is_nan(rounded)) { return 0u; }
    return u32(clamp(rounded, 0.0, 255.0));
}
fn group(index: u32, lane: u32) {
    var own = vec2<f32>(0.0, 0.0);
    if (lane < p.parts) { own = vec2<f32>(ranges(2u * lane), ranges(2u * lane + 1u)); }
    let all = extremes(lane, own);
    let least = select(all.x, 0.0, is_nan(all.x));
    let greatest = select(all.y, 0.0, is_nan(all.y));
    let scale = divide_(greatest - least, 255.0);
    divisor = select(scale, 1.0, scale == 0.0);
    zero = round(clamp(divide_(-least, divisor), 0.0, 255.0));
    if (index == 0u && lane == 0u) { finish(scale, u32(zero)); }
    for (var k = 0u; k < WORDS; k++) {
        let w = (index * WORDS + k) * LANES + lane;
        if (w < p.words) { set_word(w); }
    }
}
";

fn dispatches(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let x = cx.input(0)?;
    let ranges = ranges(cx, &mut 0)?;
    let parts = ranges.size(0);
    let first = Shader::new(cx).read("x", x).write("ranges", &ranges);
    let first = first.number("elements", x.count()).number("parts", parts);
    let first = first.groups(parts, LANES, &format!("{EXTREMES}{RANGE_OF_PART}"))?;

    // Without a reader, bind an empty tensor: nothing is written.
    let mut none = ranges.clone();
    none.dtype = DType::U8;
    none.shape = [0].as_slice().into();
    let y = cx.find_output(0).unwrap_or(&none);
    let words = y.count().div_ceil(per_word(DType::U8)?);
    let mut shader = Shader::new(cx).read("x", x).read("ranges", &ranges).write("y", y);
    shader = shader.number("elements", y.count()).number("parts", parts);
    shader = shader.number("words", words).constant("WORDS", WORDS);
    let mut finish = String::from("fn finish(scale: f32, zero: u32) {\n");
    if let Some(scale) = cx.find_output(1) {
        shader = shader.write("y_scale", scale);
        finish.push_str("set_y_scale(0u, scale);\n");
    }
    if let Some(zero) = cx.find_output(2) {
        shader = shader.write("y_zero_point", zero);
        finish.push_str("set_y_zero_point(0u, zero);\n");
    }
    let set_word = format!(
        "fn set_word(w: u32) {{\nlet at = 4u * w;\nlet used = min(4u, p.elements - at);\n{}\n}}\n",
        stored(DType::U8, "value(at + n)")?
    );
    let code = format!("{EXTREMES}{finish}}}\n{set_word}{QUANTIZE}");
    // Without elements, one workgroup still writes scale and zero point.
    let groups = words.div_ceil(LANES * WORDS).max(1);
    Ok(vec![first, shader.groups(groups, LANES, &code)?])
}
