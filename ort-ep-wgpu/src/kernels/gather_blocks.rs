//! `GatherBlockQuantized`: gathers rows of a block-quantized table, and dequantizes them.

use ort_core::Result;
use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::KernelDef;
use ort_core::ops::tensor::problem::GatherBlocks;
use ort_core::spec::MICROSOFT;

use super::elementwise::FLOATS;
use super::fill::fill;
use super::{WgpuKernel, wgpu_kernels};
use crate::launch::{Dispatch, OpCx};
use crate::shader::Shader;

wgpu_kernels![WgpuKernel::new(
    KernelDef {
        domain: MICROSOFT,
        op: "GatherBlockQuantized",
        types: &[("T1", TypeSet::of(&[DType::U8, DType::I4, DType::U4])), ("T2", FLOATS)],
        ..KernelDef::BASE
    },
    dispatches
)];

/// Element `i` of the result is element `e` of the table. An index out of range yields zeros.
const VALUE: &str = "
fn value(i: u32) -> f32 {
    let rest = i / p.inner;
    var index = i32(indices(rest % p.picks));
    if (index < 0) { index += i32(p.size); }
    if (index < 0 || u32(index) >= p.size) { return 0.0; }
    let e = (rest / p.picks * p.size + u32(index)) * p.inner + i % p.inner;
    let s = (e / (p.behind * p.axis) * p.blocks + e / p.behind % p.axis / p.block) * p.behind + e % p.behind;
    return (code(e) - zero_point(s)) * scales(s);
}
";

/// Quantized values packed into bytes. Each row of zero points starts at a byte.
const IN_BYTES: &str = "
fn code(e: u32) -> f32 {
    let bit = e % (8u / BITS) * BITS;
    return f32((quantized(e / (8u / BITS)) >> bit) & ((1u << BITS) - 1u));
}
";
const ZERO_IN_BYTES: &str = "
fn zero_point(s: u32) -> f32 {
    let inside = s % p.scale_row;
    let bytes = (p.scale_row * BITS + 7u) / 8u;
    let byte = zeros(s / p.scale_row * bytes + inside * BITS / 8u);
    return f32((byte >> (inside * BITS % 8u)) & ((1u << BITS) - 1u));
}
";

fn dispatches(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (data, indices, scales, y) = (cx.input(0)?, cx.input(1)?, cx.input(2)?, cx.output(0)?);
    if y.shape.contains(&0) {
        return Ok(Vec::new());
    }
    let table = GatherBlocks::new(cx.attrs, data.dtype, &data.shape, &scales.shape)?;
    let mut shader = Shader::new(cx).read("quantized", data).read("indices", indices).read("scales", scales);
    // Divisors in the shader must not be 0.
    shader = shader.number("inner", table.inner.max(1)).number("picks", indices.count().max(1));
    shader = shader.number("size", table.size).number("behind", table.behind.max(1));
    shader = shader.number("axis", table.quantized.max(1)).number("block", table.block.max(1));
    shader = shader.number("blocks", table.blocks);
    let in_bytes = table.packed_bits.is_some();
    let mut code = String::from(if in_bytes {
        IN_BYTES
    } else {
        "fn code(e: u32) -> f32 { return f32(quantized(e)); }\n"
    });
    if let Some(bits) = table.packed_bits {
        shader = shader.constant("BITS", bits);
    }
    if let Some(zeros) = cx.find_input(3) {
        shader = shader.read("zeros", zeros);
    }
    match (cx.find_input(3).is_some(), in_bytes) {
        (true, true) => {
            shader = shader.number("scale_row", scales.shape.last().copied().unwrap_or(1).max(1));
            code.push_str(ZERO_IN_BYTES);
        }
        (true, false) => code.push_str("fn zero_point(s: u32) -> f32 { return f32(zeros(s)); }\n"),
        // Packed values are unsigned, so the default zero point is the middle of their range.
        (false, true) => {
            code.push_str("fn zero_point(s: u32) -> f32 { return f32(1u << (BITS - 1u)); }\n");
        }
        (false, false) => code.push_str("fn zero_point(s: u32) -> f32 { return 0.0; }\n"),
    }
    code.push_str(VALUE);
    Ok(vec![fill(shader.write("y", y), y, &code)?])
}
