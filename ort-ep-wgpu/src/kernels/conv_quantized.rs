//! `ConvInteger` and `QLinearConv`: convolutions of 8-bit quantized values, with 32-bit
//! accumulators.

use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ep::KernelDef;
use ort_gpu::read::has_up_to_three_axes;

use super::conv::Conv;
use super::{WgpuKernel, wgpu_kernels};
use crate::launch::{Dispatch, OpCx, Operand};
use crate::shader::Shader;

wgpu_kernels![
    WgpuKernel::new(
        KernelDef { op: "ConvInteger", when: has_up_to_three_axes, ..KernelDef::BASE },
        conv_integer
    ),
    WgpuKernel {
        workspace: Some(|cx| {
            let mut taken = 0;
            factors(cx, &mut taken)?;
            Ok(taken)
        }),
        ..WgpuKernel::new(
            KernelDef { op: "QLinearConv", when: has_up_to_three_axes, ..KernelDef::BASE },
            qlinear_conv,
        )
    },
];

/// Begins a shader that reads image and filters, and subtracts their zero points.
fn of_quantized(cx: &OpCx<'_>, x: [usize; 2], w: [usize; 2]) -> Result<(Shader, String)> {
    let ([x, x_zero], [w, w_zero]) = (x, w);
    let mut shader = Shader::new(cx).read("x", cx.input(x)?).read("w", cx.input(w)?);
    let (mut pixel, mut weight) = ("i32(x(i))".to_owned(), "i32(w(i))".to_owned());
    if let Some(zero) = cx.find_input(x_zero) {
        shader = shader.read("x_zero", zero);
        pixel += " - i32(x_zero(0u))";
    }
    if let Some(zero) = cx.find_input(w_zero) {
        shader = shader.read("w_zero", zero);
        weight += &format!(" - i32(w_zero({}))", of_filter(zero));
    }
    let code = format!(
        "alias num = i32;\n\
         fn pixel(i: u32) -> num {{ return {pixel}; }}\n\
         fn weight(i: u32, m: u32) -> num {{ return {weight}; }}\n"
    );
    Ok((shader, code))
}

/// The index for filter `m` in a tensor with one element for all filters, or one for each.
fn of_filter(tensor: &Operand) -> &'static str {
    if tensor.count() > 1 { "m" } else { "0u" }
}

fn conv_integer(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let conv = Conv::new(cx.attrs, &cx.input(0)?.shape, &cx.input(1)?.shape)?;
    let (shader, code) = of_quantized(cx, [0, 2], [1, 3])?;
    let finish = "fn finish(i: u32, m: u32, sum: num) { set_y(i, sum); }\n";
    Ok(vec![conv.dispatch(shader.write("y", cx.output(0)?), &(code + finish))?])
}

/// The requantization factor of each filter, in the workspace.
fn factors(cx: &OpCx<'_>, taken: &mut usize) -> Result<Operand> {
    Ok(cx.workspace(taken, DType::F32, &[cx.input(3)?.size(0)]))
}

fn qlinear_conv(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let conv = Conv::new(cx.attrs, &cx.input(0)?.shape, &cx.input(3)?.shape)?;
    let (w_scale, y) = (cx.input(4)?, cx.output(0)?);
    let factors = factors(cx, &mut 0)?;
    // The scales are in device memory, so a dispatch of its own computes the factors.
    let scales = Shader::new(cx)
        .read("x_scale", cx.input(1)?)
        .read("w_scale", w_scale)
        .read("y_scale", cx.input(6)?)
        .write("factors", &factors);
    let factor = format!(
        "fn element(m: u32) {{ set_factors(m, x_scale(0u) * w_scale({}) / y_scale(0u)); }}",
        of_filter(w_scale)
    );
    let (mut shader, code) = of_quantized(cx, [0, 2], [3, 5])?;
    shader = shader.read("factors", &factors).read("y_zero", cx.input(7)?).write("y", y);
    let mut sum = "sum".to_owned();
    if let Some(bias) = cx.find_input(8) {
        shader = shader.read("b", bias);
        sum += " + b(m)";
    }
    let (least, most) = if y.dtype == DType::I8 { (-128, 127) } else { (0, 255) };
    let finish = format!(
        "fn finish(i: u32, m: u32, sum: num) {{\n\
         let code = round(f32({sum}) * factors(m)) + f32(y_zero(0u));\n\
         set_y(i, y_t(clamp(code, {least}.0, {most}.0)));\n}}\n"
    );
    Ok(vec![scales.each(factors.count(), &factor)?, conv.dispatch(shader, &(code + &finish))?])
}
