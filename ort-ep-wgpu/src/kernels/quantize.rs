//! `QuantizeLinear` and `DequantizeLinear`, per tensor, per axis or per block.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::KernelDef;
use ort_core::ops::quant::problem::{Granularity, GranularityKind, Quantization};
use ort_core::{Result, error};
use ort_gpu::quantize::granularity;

use super::elementwise::FLOATS;
use super::fill::fill;
use super::{WgpuKernel, wgpu_kernels};
use crate::launch::{Dispatch, OpCx};
use crate::shader::Shader;

/// The types of quantized values.
const QUANTIZED: TypeSet =
    TypeSet::SUB_BYTE_INTEGERS.union(TypeSet::of(&[DType::I8, DType::U8, DType::I16, DType::U16]));
const WITH_INT32: TypeSet = QUANTIZED.union(TypeSet::of(&[DType::I32]));

const QUANTIZE: &[(&str, TypeSet)] = &[("T1", FLOATS), ("T2", FLOATS), ("T3", QUANTIZED)];
const DEQUANTIZE: &[(&str, TypeSet)] = &[("T1", WITH_INT32), ("T2", FLOATS), ("T3", FLOATS)];

wgpu_kernels![
    WgpuKernel::new(KernelDef { op: "QuantizeLinear", types: QUANTIZE, ..KernelDef::BASE }, quantize),
    WgpuKernel::new(KernelDef { op: "DequantizeLinear", types: DEQUANTIZE, ..KernelDef::BASE }, dequantize),
];

/// Adds scales and zero points to a shader, and generates the function that maps an element to its
/// scale.
fn scales(cx: &OpCx<'_>, shader: Shader) -> Result<(Shader, String)> {
    let Granularity { kind, axis, inner } = granularity(cx)?;
    let mut shader = shader.read("scale", cx.input(1)?);
    let zero_code = match cx.find_input(2) {
        Some(zero) => {
            shader = shader.read("zeros", zero);
            "f32(zeros(s))"
        }
        None => "0.0",
    };
    if kind != GranularityKind::Tensor {
        shader = shader.number("inner", inner.max(1)).number("axis", axis.max(1));
    }
    let place = match kind {
        GranularityKind::Tensor => "0u",
        GranularityKind::Axis => "i / p.inner % p.axis",
        GranularityKind::Blocks { size, count } => {
            // A larger block spans the whole axis anyway, and must fit its uniform.
            shader = shader.number("blocks", count).number("block", size.min(1 << 31));
            "(i / (p.inner * p.axis) * p.blocks + i / p.inner % p.axis / p.block) * p.inner + i % p.inner"
        }
    };
    let code = format!(
        "fn scale_at(i: u32) -> u32 {{ return {place}; }}\n\
         fn zero_point(s: u32) -> f32 {{ return {zero_code}; }}\n"
    );
    Ok((shader, code))
}

fn dequantize(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    if cx.input(0)?.shape.contains(&0) {
        return Ok(Vec::new());
    }
    let (shader, mut code) = scales(cx, Shader::new(cx).read("x", cx.input(0)?))?;
    code.push_str(
        "fn value(i: u32) -> f32 {
            let s = scale_at(i);
            return (f32(x(i)) - zero_point(s)) * scale(s);
        }",
    );
    Ok(vec![fill(shader.write("y", cx.output(0)?), cx.output(0)?, &code)?])
}

/// Returns the least and the greatest value of an integer type of at most 16 bits.
pub(super) fn range(dtype: DType) -> Result<(f32, f32)> {
    let bits = dtype.bits().filter(|bits| *bits <= 16 && dtype.is_integer());
    let bits = bits.ok_or_else(|| {
        error!(NotImplemented, "quantized values of type {} are not supported", dtype.name())
    })?;
    let count = (1_u32 << bits) as f32;
    Ok(if dtype.is_signed() { (-count / 2.0, count / 2.0 - 1.0) } else { (0.0, count - 1.0) })
}

/// Generates `fn code_of(rounded: f32) -> y_t`, which saturates a rounded number to a type. NaN
/// becomes 0.
pub(super) fn code_of(dtype: DType) -> Result<String> {
    let (least, greatest) = range(dtype)?;
    Ok(format!(
        "fn code_of(rounded: f32) -> y_t {{\n\
         if (is_nan(rounded)) {{ return y_t(0); }}\n\
         return y_t(clamp(rounded, f32({least:?}), f32({greatest:?})));\n}}\n"
    ))
}

fn quantize(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let y = cx.output(0)?;
    if y.shape.contains(&0) {
        return Ok(Vec::new());
    }
    let (shader, mut code) = scales(cx, Shader::new(cx).read("x", cx.input(0)?))?;
    code.push_str(&code_of(y.dtype)?);
    // Round operand and quotient to the type of the division.
    code.push_str(match Quantization::division(cx.attrs)?.unwrap_or(cx.input(1)?.dtype) {
        DType::F16 => "fn narrow(v: f32) -> f32 { return unpack2x16float(half_bits(v)).x; }\n",
        DType::BF16 => "fn narrow(v: f32) -> f32 { return bitcast<f32>(bfloat_bits(v) << 16u); }\n",
        _ => "fn narrow(v: f32) -> f32 { return v; }\n",
    });
    code.push_str(
        "fn value(i: u32) -> y_t {
            let s = scale_at(i);
            return code_of(round(narrow(divide_(narrow(x(i)), scale(s)))) + zero_point(s));
        }",
    );
    Ok(vec![fill(shader.write("y", y), y, &code)?])
}
