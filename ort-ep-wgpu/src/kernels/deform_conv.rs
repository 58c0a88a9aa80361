//! `DeformConv`: samples the image under deformed windows (im2col), then multiplies with the
//! filters.

use ort_core::dtype::DType;
use ort_core::ep::KernelDef;
use ort_core::{Result, ensure, error};

use super::conv::{Conv, has_up_to_three_axes, of_floats};
use super::elementwise::FLOATS;
use super::windows::{self, Axes, WINDOWS, volume, with_windows};
use super::{WgpuKernel, wgpu_kernels};
use crate::launch::{Dispatch, OpCx, Operand};
use crate::shader::Shader;

wgpu_kernels![WgpuKernel {
    workspace: Some(|cx| {
        let mut taken = 0;
        columns(cx, &axes_of(cx)?, &mut taken)?;
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

fn axes_of(cx: &OpCx<'_>) -> Result<Axes> {
    let (image, weight) = (&cx.input(0)?.shape, &cx.input(1)?.shape);
    let (Some(sizes), Some(kernel)) = (image.get(2..), weight.get(2..)) else {
        return Err(error!(InvalidArgument, "a convolution of shapes {image:?} and {weight:?}"));
    };
    windows::three(&windows::of_kernel(cx.attrs, kernel)?.on(sizes)?)
}

/// The im2col matrix in the workspace: for each image, channel and tap, the sample at each
/// position.
fn columns(cx: &OpCx<'_>, axes: &Axes, taken: &mut usize) -> Result<Operand> {
    let x = cx.input(0)?;
    let (taps, pixels) = (volume(axes, |axis| axis.kernel), volume(axes, |axis| axis.output));
    Ok(cx.workspace(taken, DType::F32, &[x.size(0), x.size(1).saturating_mul(taps), pixels]))
}

fn dispatches(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (x, weight, offset, mask) = (cx.input(0)?, cx.input(1)?, cx.input(2)?, cx.find_input(4));
    let axes = axes_of(cx)?;
    let columns = columns(cx, &axes, &mut 0)?;
    let groups = usize::try_from(cx.attrs.int("offset_group")?).ok();
    let groups = groups.filter(|groups| *groups > 0 && x.size(1).is_multiple_of(*groups));
    let groups = groups.ok_or_else(|| error!(InvalidGraph, "offset_group does not divide the channels"))?;
    let per_group = volume(&axes, |axis| axis.kernel).saturating_mul(columns.size(2));
    let of_groups = x.size(0).saturating_mul(groups).saturating_mul(per_group);
    let rank = x.rank().saturating_sub(2);
    let fits =
        offset.count() == of_groups.saturating_mul(rank) && mask.is_none_or(|mask| mask.count() == of_groups);
    ensure!(fits, InvalidArgument, "the shapes of image, weight, offset and mask do not match");
    let mut shader = with_windows(Shader::new(cx), &axes)
        .read("x", x)
        .read("offset", offset)
        .write("columns", &columns)
        .number("channels", x.size(1))
        .number("offset_groups", groups)
        .constant("RANK", rank);
    let mut factor = "fn factor(i: u32) -> f32 { return 1.0; }\n";
    if let Some(mask) = mask {
        shader = shader.read("mask", mask);
        factor = "fn factor(i: u32) -> f32 { return mask(i); }\n";
    }
    let sample =
        shader.each(columns.count(), &[WINDOWS, factor, include_str!("deform_conv.wgsl")].concat())?;
    // The columns count as channels of a pointwise convolution.
    let products = [weight.size(0), columns.size(1) / x.size(1).max(1) * weight.size(1), 1];
    let conv = Conv::pointwise(cx.attrs, &columns.shape, &products)?;
    let (shader, code) = of_floats(cx, (&columns, weight), [cx.find_input(3), None])?;
    Ok(vec![sample, conv.dispatch(shader, &code)?])
}
