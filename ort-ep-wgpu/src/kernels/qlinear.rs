//! `QLinearAdd`, `QLinearMul`, `QLinearSigmoid`, `QLinearLeakyRelu` and `QLinearConcat`, on 8-bit
//! quantized values.

use ort_core::dtype::DType;
use ort_core::ep::{KernelDef, NodeView};
use ort_core::spec::MICROSOFT;
use ort_core::{Result, error};

use super::fill::fill;
use super::quantize::code_of;
use super::{WgpuKernel, wgpu_kernels};
use crate::launch::{Dispatch, OpCx, Walk};
use crate::shader::{MOST_AXES, Shader};

const fn kernel(
    op: &'static str,
    host_inputs: &'static [usize],
    dispatches: fn(&OpCx<'_>) -> Result<Vec<Dispatch>>,
) -> WgpuKernel {
    let def = KernelDef { domain: MICROSOFT, op, host_inputs, when: few_axes, ..KernelDef::BASE };
    WgpuKernel::new(def, dispatches)
}

wgpu_kernels![
    kernel("QLinearAdd", &[1, 2, 4, 5, 6, 7], |cx| binary(cx, false)),
    kernel("QLinearMul", &[1, 2, 4, 5, 6, 7], |cx| binary(cx, true)),
    kernel("QLinearSigmoid", &[1, 2, 3, 4], |cx| unary(cx, "sigmoid_(v)", 0.0)),
    kernel("QLinearLeakyRelu", &[1, 2, 3, 4], |cx| {
        unary(cx, "select(v, p.alpha * v, v < 0.0)", cx.attrs.float("alpha")?)
    }),
    WgpuKernel::new(KernelDef { domain: MICROSOFT, op: "QLinearConcat", ..KernelDef::BASE }, concat),
];

fn few_axes(node: &NodeView<'_>) -> bool {
    let few = |index| node.rank(index).is_none_or(|rank| rank <= MOST_AXES);
    // Input 3 is a scale of the unary operators, and the second operand of the others.
    few(0) && (node.dtype(3) == Some(DType::F32) || few(3))
}

/// Returns the single element of a scale.
fn scale(cx: &OpCx<'_>, index: usize) -> Result<f32> {
    let view = cx.find_host(index).ok_or_else(|| error!(InvalidArgument, "input {index} is missing"))?;
    let values = view.to_cow::<f32>()?;
    values.first().copied().ok_or_else(|| error!(InvalidArgument, "the scale at input {index} is empty"))
}

/// Returns the single element of a zero point, 0 by default.
fn zero_point(cx: &OpCx<'_>, index: usize) -> Result<f32> {
    let values = cx.find_ints(index)?;
    Ok(values.and_then(|values| values.first().copied()).unwrap_or(0) as f32)
}

/// Adds or multiplies. The zero point is added before rounding, as in ONNX Runtime.
fn binary(cx: &OpCx<'_>, multiplies: bool) -> Result<Vec<Dispatch>> {
    let (a, b, c) = (cx.input(0)?, cx.input(3)?, cx.output(0)?);
    let walk = Walk::broadcast(&c.shape, &[&a.shape, &b.shape])?;
    let (a_scale, b_scale, c_scale) = (scale(cx, 1)?, scale(cx, 4)?, scale(cx, 6)?);
    let (a_zero, b_zero, c_zero) = (zero_point(cx, 2)?, zero_point(cx, 5)?, zero_point(cx, 7)?);
    let mut shader = Shader::new(cx).read("a", a).read("b", b).walk(&walk, &["a", "b"]);
    let result = match multiplies {
        true => {
            shader = shader.float("a_zero", a_zero).float("b_zero", b_zero).float("c_zero", c_zero);
            shader = shader.float("factor", a_scale * b_scale / c_scale);
            "(lhs - p.a_zero) * (rhs - p.b_zero) * p.factor + p.c_zero"
        }
        false => {
            // All zero points fold into one constant.
            let (a_factor, b_factor) = (a_scale / c_scale, b_scale / c_scale);
            shader = shader.float("a_factor", a_factor).float("b_factor", b_factor);
            shader = shader.float("rest", c_zero - (a_factor * a_zero + b_factor * b_zero));
            "fma(lhs, p.a_factor, fma(rhs, p.b_factor, p.rest))"
        }
    };
    let code = format!(
        "{}fn value(i: u32) -> y_t {{
            let lhs = f32(a(at_a(i)));
            let rhs = f32(b(at_b(i)));
            return code_of(round({result}));
        }}",
        code_of(c.dtype)?
    );
    Ok(vec![fill(shader.write("y", c), c, &code)?])
}

fn unary(cx: &OpCx<'_>, function: &str, alpha: f32) -> Result<Vec<Dispatch>> {
    let (x, y) = (cx.input(0)?, cx.output(0)?);
    let shader = Shader::new(cx).read("x", x).float("alpha", alpha);
    let shader = shader.float("x_scale", scale(cx, 1)?).float("x_zero", zero_point(cx, 2)?);
    let shader = shader.float("y_scale", scale(cx, 3)?).float("y_zero", zero_point(cx, 4)?);
    let code = format!(
        "{}fn value(i: u32) -> y_t {{
            let v = (f32(x(i)) - p.x_zero) * p.x_scale;
            return code_of(round(divide_({function}, p.y_scale)) + p.y_zero);
        }}",
        code_of(y.dtype)?
    );
    Ok(vec![fill(shader.write("y", y), y, &code)?])
}

/// Requantizes each input to its range of every output line. An input's scale and zero point follow
/// it in the input list.
fn concat(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let y = cx.output(0)?;
    let axis = cx.axis(cx.attrs.int("axis")?, y.rank())?;
    let line =
        |shape: &[usize]| shape.iter().skip(axis).fold(1usize, |line, size| line.saturating_mul(*size));
    let code = format!(
        "{}fn element(i: u32) {{
            let v = (f32(x(i)) - f32(x_zero(0u))) * x_scale(0u);
            let code = code_of(round(divide_(v, y_scale(0u))) + f32(y_zero(0u)));
            set_y(i / p.part * p.line + p.start + i % p.part, code);
        }}",
        code_of(y.dtype)?
    );
    let (mut all, mut start) = (Vec::new(), 0);
    for index in (2..cx.inputs.len()).step_by(3) {
        let x = cx.input(index)?;
        let part = line(&x.shape);
        if x.count() > 0 {
            let shader = Shader::new(cx).read("x", x).read("x_scale", cx.input(index + 1)?);
            let shader = shader.read("x_zero", cx.input(index + 2)?).read("y_scale", cx.input(0)?);
            let shader = shader.read("y_zero", cx.input(1)?).write("y", y);
            let shader = shader.number("part", part).number("line", line(&y.shape)).number("start", start);
            all.push(shader.each(x.count(), &code)?);
        }
        start += part;
    }
    Ok(all)
}
