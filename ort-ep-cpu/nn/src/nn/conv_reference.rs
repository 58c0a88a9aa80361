//! Reference `Conv` and `ConvTranspose`, by direct loops.
//!
//! They take any number of axes, in `float` or `double`.

use ort_core::dim::Dim;
use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{CompileCx, Executable, KernelDef, RunCx};
use ort_core::ir::Attributes;
use ort_core::ops::nn::geometry::{WindowAxis, Windows};
use ort_core::{Result, ensure, error};

use super::conv::groups_of;
use ort_cpu_gemm::generic::Number;
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::half_precision::via_f32;
use ort_cpu_matmul::real::Real;
use ort_cpu_threads::interrupt::{self, spend};
use ort_cpu_threads::parallel::for_each_chunk_mut;

const HALVES: TypeSet = TypeSet::of(&[DType::F32, DType::F16, DType::BF16]);
const DOUBLE: TypeSet = TypeSet::of(&[DType::F64]);

cpu_kernels![
    KernelDef {
        op: "Conv",
        types: &[("T", HALVES)],
        rank: -1,
        make: |cx| via_f32(cx, make_conv::<f32>),
        ..KernelDef::BASE
    },
    KernelDef { op: "Conv", types: &[("T", DOUBLE)], make: make_conv::<f64>, ..KernelDef::BASE },
    KernelDef {
        op: "ConvTranspose",
        types: &[("T", HALVES)],
        rank: -1,
        make: |cx| via_f32(cx, make_transposed::<f32>),
        ..KernelDef::BASE
    },
    KernelDef {
        op: "ConvTranspose",
        types: &[("T", DOUBLE)],
        make: make_transposed::<f64>,
        ..KernelDef::BASE
    },
];

/// Returns the kernel's sizes as dimensions, as shape inference has them.
fn kernel_dims(weight: &[usize]) -> Result<Vec<Dim>> {
    ensure!(weight.len() >= 3, InvalidArgument, "a weight of shape {weight:?}");
    Ok(weight[2..].iter().map(|&size| Dim::constant(size as i64)).collect())
}

/// Advances `position` through an array of `sizes`, last axis fastest. Returns false after the last
/// one.
pub(super) fn advance(position: &mut [usize], sizes: impl DoubleEndedIterator<Item = usize>) -> bool {
    for (at, size) in position.iter_mut().rev().zip(sizes.rev()) {
        *at += 1;
        if *at < size {
            return true;
        }
        *at = 0;
    }
    false
}

/// Returns the index of the image's element that window `output` reads at kernel position `tap`;
/// none if it is padding.
pub(super) fn meets(axes: &[WindowAxis], output: &[usize], tap: &[usize]) -> Option<usize> {
    let mut place = 0;
    for ((axis, output), tap) in axes.iter().zip(output).zip(tap) {
        // Negative places are padding before the image.
        let at = (output * axis.stride + tap * axis.dilation).checked_sub(axis.pads[0])?;
        if at >= axis.input {
            return None;
        }
        place = place * axis.input + at;
    }
    Some(place)
}

/// Returns the product of one size of all axes. It saturates, because the other sizes of an empty
/// tensor may be arbitrarily large; no element is read through them.
pub(super) fn volume(axes: &[WindowAxis], size: fn(&WindowAxis) -> usize) -> usize {
    axes.iter().map(size).fold(1, usize::saturating_mul)
}

/// Accumulates one plane of a convolution's result over the channels of its group.
/// `add(sum, image, weight)` adds one term. `weight` starts at the filter.
pub(super) fn convolve_plane<X: Copy, W: Copy, S: Copy>(
    axes: &[WindowAxis],
    (image, weight): (&[X], &[W]),
    plane: &mut [S],
    add: impl Fn(S, X, W) -> S,
) {
    let input = volume(axes, |axis| axis.input);
    let taps = volume(axes, |axis| axis.kernel);
    if input == 0 || taps == 0 {
        return;
    }
    let (mut output, mut tap) = (vec![0; axes.len()], vec![0; axes.len()]);
    for sum in plane {
        // `meets` costs about two terms for each tap, even if it finds padding.
        spend(taps * (2 + image.len() / input));
        for step in 0..taps {
            if let Some(place) = meets(axes, &output, &tap) {
                // Channels innermost: the place of a tap is computed once for all of them.
                for (image, weight) in image.chunks_exact(input).zip(weight.chunks_exact(taps)) {
                    *sum = add(*sum, image[place], weight[step]);
                }
            }
            advance(&mut tap, axes.iter().map(|axis| axis.kernel));
        }
        advance(&mut output, axes.iter().map(|axis| axis.output));
    }
}

fn make_conv<T: Real + Number>(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let (attrs, groups) = (cx.attrs().clone(), groups_of(cx)?);
    Ok(Box::new(move |cx: &mut RunCx<'_>| conv::<T>(cx, &attrs, groups)))
}

fn conv<T: Real + Number>(cx: &mut RunCx<'_>, attrs: &Attributes, groups: usize) -> Result<()> {
    let (image, weight) = (cx.input(0)?, cx.input(1)?);
    let kernel = kernel_dims(weight.shape())?;
    let [_, channels, spatial @ ..] = image.shape() else {
        return Err(error!(InvalidArgument, "an image of shape {:?}", image.shape()));
    };
    let axes = Windows::new(attrs, &kernel)?.on(spatial)?;
    let (filters, group_channels) = (weight.shape()[0], weight.shape()[1]);
    ensure!(
        group_channels.checked_mul(groups) == Some(*channels) && filters.is_multiple_of(groups),
        InvalidArgument,
        "a weight of shape {:?} does not fit {groups} groups of {channels} channels",
        weight.shape()
    );
    let (image, weight) = (image.as_slice::<T>()?, weight.as_slice::<T>()?);
    let bias = cx.find_input(2).map(|bias| bias.as_slice::<T>()).transpose()?;
    ensure!(bias.is_none_or(|bias| bias.len() == filters), InvalidArgument, "the bias has another length");
    let input = volume(&axes, |axis| axis.input);
    let output = volume(&axes, |axis| axis.output);
    let (image_len, weight_len) = (group_channels.saturating_mul(input), weight.len() / filters.max(1));
    let (threads, result) = (cx.threads(), cx.output(0)?.as_mut_slice::<T>()?);
    for_each_chunk_mut(threads, result, output, |unit, plane| {
        let (batch, filter) = (unit / filters, unit % filters);
        // The filters of a group are adjacent, as the standard orders them.
        let group = batch * groups + filter / (filters / groups);
        let sides = (&image[group * image_len..][..image_len], &weight[filter * weight_len..][..weight_len]);
        interrupt::fill(plane, bias.map_or(T::ZERO, |bias| bias[filter]));
        convolve_plane(&axes, sides, plane, T::add_product);
    });
    Ok(())
}

fn make_transposed<T: Real + Number>(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let (attrs, groups) = (cx.attrs().clone(), groups_of(cx)?);
    Ok(Box::new(move |cx: &mut RunCx<'_>| transposed::<T>(cx, &attrs, groups)))
}

fn transposed<T: Real + Number>(cx: &mut RunCx<'_>, attrs: &Attributes, groups: usize) -> Result<()> {
    let (image, weight) = (cx.input(0)?, cx.input(1)?);
    let kernel = kernel_dims(weight.shape())?;
    let [_, channels, spatial @ ..] = image.shape() else {
        return Err(error!(InvalidArgument, "an image of shape {:?}", image.shape()));
    };
    let axes = Windows::new(attrs, &kernel)?.transposed_on(attrs, spatial)?;
    // The weight is [channels, filters / groups, ...], unlike that of `Conv`. Without channels,
    // their number is a multiple of any `groups`, and the number of filters may overflow.
    let group_filters = weight.shape()[1];
    let filters = group_filters.checked_mul(groups);
    let filters = filters.filter(|_| weight.shape()[0] == *channels && channels.is_multiple_of(groups));
    ensure!(
        filters.is_some(),
        InvalidArgument,
        "a weight of shape {:?} does not fit {groups} groups of {channels} channels",
        weight.shape()
    );
    let (image, weight) = (image.as_slice::<T>()?, weight.as_slice::<T>()?);
    let (filters, group_channels) = (filters.unwrap_or_default(), channels / groups);
    let bias = cx.find_input(2).map(|bias| bias.as_slice::<T>()).transpose()?;
    ensure!(bias.is_none_or(|bias| bias.len() == filters), InvalidArgument, "the bias has another length");
    // The axes are those of the forward convolution, whose input is our result.
    let plane_len = volume(&axes, |axis| axis.input);
    let pixels = volume(&axes, |axis| axis.output);
    let taps = volume(&axes, |axis| axis.kernel);
    let (threads, result) = (cx.threads(), cx.output(0)?.as_mut_slice::<T>()?);
    // A task owns whole planes of the result, so it can scatter without locks.
    for_each_chunk_mut(threads, result, plane_len, |unit, plane| {
        let (batch, filter) = (unit / filters, unit % filters);
        let group = filter / group_filters;
        interrupt::fill(plane, bias.map_or(T::ZERO, |bias| bias[filter]));
        let (mut position, mut tap) = (vec![0; axes.len()], vec![0; axes.len()]);
        for pixel in 0..pixels {
            spend(taps * (2 + group_channels));
            for step in 0..taps {
                if let Some(place) = meets(&axes, &position, &tap) {
                    for channel in group * group_channels..(group + 1) * group_channels {
                        let value = image[(batch * groups * group_channels + channel) * pixels + pixel];
                        let factor = weight[(channel * group_filters + filter % group_filters) * taps + step];
                        plane[place] = plane[place].add_product(value, factor);
                    }
                }
                advance(&mut tap, axes.iter().map(|axis| axis.kernel));
            }
            advance(&mut position, axes.iter().map(|axis| axis.output));
        }
    });
    Ok(())
}
