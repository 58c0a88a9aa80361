//! `DeformConv` kernel: im2col with sampled offsets, then a GEMM with the filters.

use ort_core::ep::KernelDef;
use ort_core::ops::nn::problem::DeformConv;
use ort_core::{Result, ensure, error};
use ort_gpu::gemm::{Gemm, MatrixLayout};
use ort_gpu::read::{self, has_up_to_three_axes};

use super::conv::{FLOATS, suffix_of, window_sizes};
use super::gemm::Product;
use super::{CudaKernel, cuda_kernels};
use crate::launch::{Launch, OpCx, Operand};

cuda_kernels![CudaKernel {
    workspace: Some(|cx| {
        let mut taken = 0;
        columns(cx, &read::deform_windows(cx)?, &mut taken)?;
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

/// Reserves the sampled columns in the workspace.
fn columns(cx: &OpCx<'_>, conv: &DeformConv, taken: &mut usize) -> Result<Operand> {
    Ok(cx.workspace(taken, cx.input(0)?.dtype, &conv.columns()))
}

fn launches(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (x, weight, offset, mask) = (cx.input(0)?, cx.input(1)?, cx.input(2)?, cx.find_input(4));
    let (conv, y) = (read::deform_conv(cx)?, cx.output(0)?);
    let columns = columns(cx, &conv, &mut 0)?;
    let DeformConv { batch, channels, .. } = conv;
    let (filters, taps, pixels) = (weight.size(0), conv.taps(), columns.size(2));
    let groups = usize::try_from(cx.attrs.int("group")?).ok().filter(|groups| *groups > 0);
    let groups = groups.filter(|groups| {
        filters.is_multiple_of(*groups) && weight.size(1).checked_mul(*groups) == Some(channels)
    });
    let groups = groups
        .ok_or_else(|| error!(InvalidGraph, "group does not divide the numbers of channels and filters"))?;
    if y.count() == 0 {
        return Ok(Vec::new());
    }
    let mut launches = Vec::new();
    if columns.count() > 0 {
        let mut sizes = window_sizes(&conv.axes);
        sizes.extend([channels, conv.offset_groups, conv.rank]);
        let entry = format!("deform_columns_{}", suffix_of(x.dtype)?);
        let sample = Launch::new("sample", entry).threads(columns.count())?;
        let sample = sample.tensor(x).tensor(offset).find_tensor(mask).tensor(&columns);
        launches.push(sample.uints::<21>(&sizes)?.uint(columns.count())?);
    }
    let (filters, depth) = (filters / groups, channels / groups * taps);
    let weights =
        MatrixLayout { sizes: vec![groups, filters, depth], steps: vec![filters * depth, depth, 1] };
    let places = MatrixLayout {
        sizes: vec![batch, groups, depth, pixels],
        steps: vec![groups * depth * pixels, depth * pixels, pixels, 1],
    };
    // The sampled columns make the rest a plain batched GEMM.
    let mut product = Product::new(Gemm::new([weight, &columns], [weights, places], y)?);
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
