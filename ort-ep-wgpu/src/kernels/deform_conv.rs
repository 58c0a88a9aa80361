//! `DeformConv`: samples the image under deformed windows (im2col), then multiplies with the
//! filters.

use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ep::KernelDef;
use ort_core::ops::nn::problem::DeformConv;
use ort_gpu::read::{self, has_up_to_three_axes};

use super::conv::{Conv, of_floats};
use super::elementwise::FLOATS;
use super::windows::{WINDOWS, with_windows};
use super::{WgpuKernel, wgpu_kernels};
use crate::launch::{Dispatch, OpCx, Operand};
use crate::shader::Shader;

wgpu_kernels![WgpuKernel {
    workspace: Some(|cx| {
        let mut taken = 0;
        columns(cx, &read::deform_windows(cx)?, &mut taken);
        Ok(taken)
    }),
    ..WgpuKernel::new(
        KernelDef {
            op: "DeformConv",
            types: &[("T", FLOATS)],
            when: has_up_to_three_axes,
            ..KernelDef::BASE
        },
        dispatches,
    )
}];

/// The im2col matrix in the workspace.
fn columns(cx: &OpCx<'_>, conv: &DeformConv, taken: &mut usize) -> Operand {
    cx.workspace(taken, DType::F32, &conv.columns())
}

fn dispatches(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (x, weight, offset, mask) = (cx.input(0)?, cx.input(1)?, cx.input(2)?, cx.find_input(4));
    let deformed = read::deform_conv(cx)?;
    let columns = columns(cx, &deformed, &mut 0);
    let mut shader = with_windows(Shader::new(cx), &deformed.axes)
        .read("x", x)
        .read("offset", offset)
        .write("columns", &columns)
        .number("channels", deformed.channels)
        .number("offset_groups", deformed.offset_groups)
        .constant("RANK", deformed.rank);
    let mut factor = "fn factor(i: u32) -> f32 { return 1.0; }\n";
    if let Some(mask) = mask {
        shader = shader.read("mask", mask);
        factor = "fn factor(i: u32) -> f32 { return mask(i); }\n";
    }
    let sample =
        shader.each(columns.count(), &[WINDOWS, factor, include_str!("deform_conv.wgsl")].concat())?;
    // The columns count as channels of a pointwise convolution.
    // [filters, taps * channels of a group, 1]: a window is one tap of many channels.
    let products = [weight.size(0), deformed.taps() * weight.size(1), 1];
    let conv = Conv::pointwise(cx.attrs, &columns.shape, &products)?;
    let (shader, code) = of_floats(cx, (&columns, weight), [cx.find_input(3), None])?;
    Ok(vec![sample, conv.dispatch(shader, &code)?])
}
