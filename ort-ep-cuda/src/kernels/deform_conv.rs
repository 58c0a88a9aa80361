//! `DeformConv` kernel: im2col with sampled offsets, then a GEMM with the filters.

use ort_core::dim::Dim;
use ort_core::ep::KernelDef;
use ort_core::ops::nn::geometry::{WindowAxis, Windows};
use ort_core::{Result, ensure, error};

use super::conv::{Axes, FLOATS, has_up_to_three_axes, suffix_of, three, window_sizes};
use super::gemm::{Product, Side};
use super::{CudaKernel, cuda_kernels};
use crate::launch::{Launch, OpCx, Operand};

cuda_kernels![CudaKernel {
    workspace: Some(|cx| {
        let mut taken = 0;
        columns(cx, &axes(cx)?, &mut taken)?;
        Ok(taken)
    }),
    ..CudaKernel::new(
        KernelDef {
            op: "DeformConv",
            types: &[("T", FLOATS)],
            when: has_up_to_three_axes,
            ..KernelDef::BASE
        },
        launches,
    )
}];

fn axes(cx: &OpCx<'_>) -> Result<Axes> {
    let (image, weight) = (&cx.input(0)?.shape, &cx.input(1)?.shape);
    let ([_, _, sizes @ ..], [_, _, kernel @ ..]) = (&**image, &**weight) else {
        return Err(error!(InvalidArgument, "a convolution of shapes {image:?} and {weight:?}"));
    };
    let kernel: Vec<Dim> = kernel.iter().map(|size| Dim::constant(*size as i64)).collect();
    three(&Windows::new(cx.attrs, &kernel)?.on(sizes)?)
}

fn volume(axes: &Axes, of: fn(&WindowAxis) -> usize) -> usize {
    axes.iter().map(of).fold(1, usize::saturating_mul)
}

/// Reserves the sampled columns in the workspace: for each image, channel and tap, the values at
/// all positions.
fn columns(cx: &OpCx<'_>, axes: &Axes, taken: &mut usize) -> Result<Operand> {
    let x = cx.input(0)?;
    let (taps, pixels) = (volume(axes, |axis| axis.kernel), volume(axes, |axis| axis.output));
    Ok(cx.workspace(taken, x.dtype, &[x.size(0), x.size(1).saturating_mul(taps), pixels]))
}

/// Returns a positive group attribute that divides the given channel counts.
fn groups(cx: &OpCx<'_>, name: &str, whole: &[usize]) -> Result<usize> {
    let groups = usize::try_from(cx.attrs.int(name)?).ok().filter(|groups| *groups > 0);
    let groups = groups.filter(|groups| whole.iter().all(|count| count.is_multiple_of(*groups)));
    groups.ok_or_else(|| error!(InvalidGraph, "{name} does not divide the numbers of channels {whole:?}"))
}

fn launches(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (x, weight, offset, mask) = (cx.input(0)?, cx.input(1)?, cx.input(2)?, cx.find_input(4));
    let (axes, y) = (axes(cx)?, cx.output(0)?);
    let columns = columns(cx, &axes, &mut 0)?;
    let [batch, channels, filters] = [x.size(0), x.size(1), weight.size(0)];
    let (groups, offset_groups) =
        (groups(cx, "group", &[channels, filters])?, groups(cx, "offset_group", &[channels])?);
    let (taps, pixels, rank) =
        (volume(&axes, |axis| axis.kernel), columns.size(2), x.rank().saturating_sub(2));
    let moved = [batch, offset_groups, taps, pixels].into_iter().fold(1, usize::saturating_mul);
    let fits = offset.count() == moved.saturating_mul(rank)
        && mask.is_none_or(|mask| mask.count() == moved)
        && weight.size(1).checked_mul(groups) == Some(channels);
    ensure!(fits, InvalidArgument, "the shapes of image, weight, offset and mask do not match");
    if y.count() == 0 {
        return Ok(Vec::new());
    }
    let mut launches = Vec::new();
    if columns.count() > 0 {
        let mut sizes = window_sizes(&axes);
        sizes.extend([channels, offset_groups, rank]);
        let entry = format!("deform_columns_{}", suffix_of(x.dtype)?);
        let sample = Launch::new("sample", entry).threads(columns.count())?;
        let sample = sample.tensor(x).tensor(offset).find_tensor(mask).tensor(&columns);
        launches.push(sample.uints::<21>(&sizes)?.uint(columns.count())?);
    }
    let (filters, depth) = (filters / groups, channels / groups * taps);
    let weights = Side { sizes: vec![groups, filters, depth], steps: vec![filters * depth, depth, 1] };
    let places = Side {
        sizes: vec![batch, groups, depth, pixels],
        steps: vec![groups * depth * pixels, depth * pixels, pixels, 1],
    };
    // The sampled columns make the rest a plain batched GEMM.
    let mut product = Product::new([weight, &columns], [weights, places], y)?;
    if let Some(bias) = cx.find_input(3) {
        let count = bias.count();
        ensure!(
            count == weight.size(0),
            InvalidArgument,
            "got {count} biases, expected one for each of the {} filters",
            weight.size(0)
        );
        product.add(bias, Some(&[groups, filters, 1]))?;
    }
    launches.extend(product.launches(cx)?);
    Ok(launches)
}
