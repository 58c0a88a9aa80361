//! Elementwise operators of `com.microsoft` that add a bias along the last axis.

use ort_core::ep::KernelDef;
use ort_core::spec::MICROSOFT;
use ort_core::{Result, ensure};

use super::elementwise::FLOATS;
use super::fill::fill;
use super::{WgpuKernel, wgpu_kernels};
use crate::launch::{Dispatch, OpCx};
use crate::shader::Shader;

const BASE: KernelDef = KernelDef { domain: MICROSOFT, types: &[("T", FLOATS)], ..KernelDef::BASE };

wgpu_kernels![
    WgpuKernel::new(KernelDef { op: "FastGelu", ..BASE }, fast_gelu),
    WgpuKernel::new(KernelDef { op: "BiasAdd", ..BASE }, bias_add),
    WgpuKernel::new(KernelDef { op: "BiasSplitGelu", ..BASE }, bias_split_gelu),
];

/// Begins a shader with the input and its bias, and returns the width of the last axis.
fn biased(cx: &OpCx<'_>) -> Result<(Shader, usize)> {
    let (x, bias) = (cx.input(0)?, cx.input(1)?);
    let width = x.shape.last().copied().unwrap_or(1);
    ensure!(bias.count() == width, InvalidArgument, "{} biases for rows of {width}", bias.count());
    let shader = Shader::new(cx).read("x", x).read("bias", bias);
    Ok((shader.number("width", width), width))
}

fn fast_gelu(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let y = cx.output(0)?;
    let (shader, sum) = match cx.find_input(1) {
        Some(_) => (biased(cx)?.0, "x(i) + bias(i % p.width)"),
        None => (Shader::new(cx).read("x", cx.input(0)?), "x(i)"),
    };
    let code = format!("fn value(i: u32) -> f32 {{ return gelu_tanh({sum}); }}\n");
    Ok(vec![fill(shader.write("y", y), y, &code)?])
}

fn bias_add(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let shader = biased(cx)?.0.read("skip", cx.input(2)?);
    let code = "fn value(i: u32) -> f32 { return x(i) + bias(i % p.width) + skip(i); }\n";
    Ok(vec![fill(shader.write("y", cx.output(0)?), cx.output(0)?, code)?])
}

fn bias_split_gelu(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (shader, width) = biased(cx)?;
    // At least 1: the shader divides by it.
    let shader = shader.number("split", (width / 2).max(1));
    let code = "fn value(i: u32) -> f32 {
        let column = i % p.split;
        let at = i / p.split * p.width + column;
        return (x(at) + bias(column)) * gelu_erf(x(at + p.split) + bias(column + p.split));
    }\n";
    Ok(vec![fill(shader.write("y", cx.output(0)?), cx.output(0)?, code)?])
}
