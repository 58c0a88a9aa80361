//! `DeformConv` by direct loops: samples the image at offset positions and accumulates.

use ort_core::dim::Dim;
use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{CompileCx, Executable, KernelDef, RunCx};
use ort_core::ir::Attributes;
use ort_core::ops::nn::geometry::{WindowAxis, Windows};
use ort_core::tensor::{TensorView, element_count};
use ort_core::{Result, ensure, error};

use super::conv::groups_of;
use super::conv_reference::volume;
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::half_precision::via_f32;
use ort_cpu_matmul::real::Real;
use ort_cpu_threads::interrupt::spend;
use ort_cpu_threads::parallel::for_each_chunk_mut;

cpu_kernels![
    KernelDef {
        op: "DeformConv",
        types: &[("T", TypeSet::of(&[DType::F32, DType::F16, DType::BF16]))],
        make: |cx| via_f32(cx, make::<f32>),
        ..KernelDef::BASE
    },
    KernelDef {
        op: "DeformConv",
        types: &[("T", TypeSet::of(&[DType::F64]))],
        make: make::<f64>,
        ..KernelDef::BASE
    },
];

fn make<T: Real>(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let (attrs, groups) = (cx.attrs().clone(), groups_of(cx)?);
    let offset_groups = cx.attrs().int("offset_group")?;
    let offset_groups = usize::try_from(offset_groups).ok().filter(|count| *count > 0);
    let offset_groups = offset_groups.ok_or_else(|| error!(InvalidGraph, "offset_group is not positive"))?;
    Ok(Box::new(move |cx: &mut RunCx<'_>| run::<T>(cx, &attrs, groups, offset_groups)))
}

/// Interpolates linearly between the elements around a position. Outside, the image is zero.
fn sample<T: Real>(plane: &[T], sizes: &[usize], position: &[f64]) -> f64 {
    let ([size, sizes @ ..], [at, position @ ..]) = (sizes, position) else {
        return plane.first().map_or(0.0, |pixel| pixel.to_f64());
    };
    // Offsets are unbounded, so positions stay floats until they are known to be inside.
    let below = at.floor();
    let part = |index: f64, share: f64| {
        // A neighbor of weight 0 does not count, even if it is NaN.
        if !(share > 0.0 && index >= 0.0 && index < *size as f64) {
            return 0.0;
        }
        let len = plane.len() / size;
        share * sample(&plane[index as usize * len..][..len], sizes, position)
    };
    part(below, 1.0 - (at - below)) + part(below + 1.0, at - below)
}

/// Returns the distance of each kernel tap from the window's origin along each axis, less the
/// padding.
fn shifts(axes: &[WindowAxis]) -> Vec<f64> {
    let taps = volume(axes, |axis| axis.kernel);
    let mut shifts = vec![0.0; taps * axes.len()];
    for (tap, shifts) in shifts.chunks_exact_mut(axes.len().max(1)).enumerate() {
        let mut rest = tap;
        for (axis, shift) in axes.iter().zip(shifts).rev() {
            // Taps are row-major over the kernel, last axis fastest.
            *shift = (rest % axis.kernel * axis.dilation) as f64 - axis.pads[0] as f64;
            rest /= axis.kernel;
        }
    }
    shifts
}

/// Writes the origin of an output element's window along each axis, padding included.
fn write_origin(axes: &[WindowAxis], pixel: usize, origin: &mut [f64]) {
    let mut rest = pixel;
    for (axis, at) in axes.iter().zip(origin).rev() {
        *at = (rest % axis.output * axis.stride) as f64;
        rest /= axis.output;
    }
}

fn axes_of(attrs: &Attributes, image: &TensorView<'_>, weight: &TensorView<'_>) -> Result<Vec<WindowAxis>> {
    let ([_, _, sizes @ ..], [_, _, kernel @ ..]) = (image.shape(), weight.shape()) else {
        return Err(error!(InvalidArgument, "DeformConv of an image of shape {:?}", image.shape()));
    };
    let kernel: Vec<Dim> = kernel.iter().map(|&size| Dim::constant(size as i64)).collect();
    Windows::new(attrs, &kernel)?.on(sizes)
}

fn run<T: Real>(cx: &mut RunCx<'_>, attrs: &Attributes, groups: usize, offset_groups: usize) -> Result<()> {
    let (image, weight, offset) = (cx.input(0)?, cx.input(1)?, cx.input(2)?);
    let axes = axes_of(attrs, &image, &weight)?;
    let ([batch, channels, sizes @ ..], &[filters, group_channels, ..]) = (image.shape(), weight.shape())
    else {
        return Err(error!(InvalidArgument, "DeformConv with weights of shape {:?}", weight.shape()));
    };
    let (batch, channels, rank) = (*batch, *channels, axes.len());
    let taps = volume(&axes, |axis| axis.kernel);
    let pixels = volume(&axes, |axis| axis.output);
    let mask = cx.find_input(4).map(|mask| mask.as_slice::<T>()).transpose()?;
    let bias = cx.find_input(3).map(|bias| bias.as_slice::<T>()).transpose()?;
    // Image [batch, channels, ...]; offset [batch, offset_groups, taps, rank, pixels].
    let fits = group_channels.checked_mul(groups) == Some(channels)
        && filters.is_multiple_of(groups)
        && channels.is_multiple_of(offset_groups)
        && element_count(&[batch, offset_groups, taps, rank, pixels]).ok() == Some(offset.element_count())
        && mask
            .is_none_or(|mask| element_count(&[batch, offset_groups, taps, pixels]).ok() == Some(mask.len()))
        && bias.is_none_or(|bias| bias.len() == filters);
    ensure!(fits, InvalidArgument, "the shapes of image, weight, offset, bias and mask do not match");
    let plane_len = volume(&axes, |axis| axis.input);
    let (image, weight, offset) = (image.as_slice::<T>()?, weight.as_slice::<T>()?, offset.as_slice::<T>()?);
    // The taps' shifts do not depend on the output element, so they are computed once.
    let shifts = shifts(&axes);
    let (threads, result) = (cx.threads(), cx.output(0)?.as_mut_slice::<T>()?);
    for_each_chunk_mut(threads, result, pixels, |unit, plane| {
        let (batch, filter) = (unit / filters, unit % filters);
        let first = filter / (filters / groups) * group_channels;
        let (mut origin, mut position) = (vec![0.0; rank], vec![0.0; rank]);
        for (pixel, value) in plane.iter_mut().enumerate() {
            write_origin(&axes, pixel, &mut origin);
            let mut sum = bias.map_or(0.0, |bias| bias[filter].to_f64());
            for step in 0..group_channels {
                let channel = first + step;
                // Offset groups split the channels on their own, independently of `group`.
                let group = batch * offset_groups + channel / (channels / offset_groups);
                let from = &image[(batch * channels + channel) * plane_len..][..plane_len];
                spend(16 * taps);
                for (tap, shifts) in shifts.chunks_exact(rank).enumerate() {
                    for (axis, at) in position.iter_mut().enumerate() {
                        let moved = offset[((group * taps + tap) * rank + axis) * pixels + pixel].to_f64();
                        *at = origin[axis] + shifts[axis] + moved;
                    }
                    // The mask scales the sample, as in modulated deformable convolution (Zhu et
                    // al., 2019).
                    let factor =
                        mask.map_or(1.0, |mask| mask[(group * taps + tap) * pixels + pixel].to_f64());
                    let weight = weight[(filter * group_channels + step) * taps + tap].to_f64();
                    sum += sample(from, sizes, &position) * factor * weight;
                }
            }
            *value = T::from_f64(sum);
        }
    });
    Ok(())
}
