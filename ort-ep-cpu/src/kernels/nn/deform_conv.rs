//! `DeformConv`: bilinear samples at moved positions, then sums, as the definition has it.

use ort_core::dim::Dim;
use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{CompileCx, Executable, KernelDef, RunCx};
use ort_core::ir::Attributes;
use ort_core::ops::nn::geometry::{WindowAxis, Windows};
use ort_core::{Result, ensure, error};

use super::conv::groups_of;
use crate::cpu_kernels;
use crate::kernels::linalg::real::Real;
use crate::kernels::linalg::widened::widened;
use crate::parallel::for_each_chunk_mut;

cpu_kernels![
    KernelDef {
        op: "DeformConv",
        types: &[("T", TypeSet::of(&[DType::F32, DType::F16, DType::BF16]))],
        when: |node| node.rank(0).is_none_or(|rank| rank == 4),
        make: |cx| widened(cx, make::<f32>),
        ..KernelDef::BASE
    },
    KernelDef {
        op: "DeformConv",
        types: &[("T", TypeSet::of(&[DType::F64]))],
        when: |node| node.rank(0).is_none_or(|rank| rank == 4),
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

/// The value between four pixels; outside the image is zero.
fn sample<T: Real>(plane: &[T], [height, width]: [usize; 2], y: f64, x: f64) -> f64 {
    let (top, left) = (y.floor(), x.floor());
    let at = |row: f64, column: f64| {
        let inside = row >= 0.0 && column >= 0.0 && row < height as f64 && column < width as f64;
        if inside { plane[row as usize * width + column as usize].to_f64() } else { 0.0 }
    };
    let (down, right) = (y - top, x - left);
    let upper = at(top, left) * (1.0 - right) + at(top, left + 1.0) * right;
    let lower = at(top + 1.0, left) * (1.0 - right) + at(top + 1.0, left + 1.0) * right;
    upper * (1.0 - down) + lower * down
}

fn run<T: Real>(cx: &mut RunCx<'_>, attrs: &Attributes, groups: usize, offset_groups: usize) -> Result<()> {
    let (image, weight, offset) = (cx.input(0)?, cx.input(1)?, cx.input(2)?);
    let (&[batch, channels, height, width], &[filters, group_channels, kernel_h, kernel_w]) =
        (image.shape(), weight.shape())
    else {
        return Err(error!(NotImplemented, "DeformConv of an image of shape {:?}", image.shape()));
    };
    let kernel = [kernel_h, kernel_w].map(|size| Dim::constant(size as i64));
    let axes = Windows::new(attrs, &kernel)?.on(&[height, width])?;
    let [y_axis, x_axis]: [WindowAxis; 2] =
        axes.try_into().map_err(|_| error!(Fail, "a plane does not have two axes"))?;
    let (taps, pixels) = (kernel_h * kernel_w, y_axis.output * x_axis.output);
    let mask = cx.find_input(4).map(|mask| mask.as_slice::<T>()).transpose()?;
    let bias = cx.find_input(3).map(|bias| bias.as_slice::<T>()).transpose()?;
    let fits = group_channels * groups == channels
        && filters.is_multiple_of(groups)
        && channels.is_multiple_of(offset_groups)
        && offset.element_count() == batch * offset_groups * 2 * taps * pixels
        && mask.is_none_or(|mask| mask.len() == batch * offset_groups * taps * pixels)
        && bias.is_none_or(|bias| bias.len() == filters);
    ensure!(fits, InvalidArgument, "the shapes of image, weight, offset, bias and mask do not go together");
    let (image, weight, offset) = (image.as_slice::<T>()?, weight.as_slice::<T>()?, offset.as_slice::<T>()?);
    let (threads, result) = (cx.threads(), cx.output(0)?.as_mut_slice::<T>()?);
    for_each_chunk_mut(threads, result, pixels, |unit, plane| {
        let (batch, filter) = (unit / filters, unit % filters);
        let first = filter / (filters / groups) * group_channels;
        for (pixel, value) in plane.iter_mut().enumerate() {
            let (row, column) = (pixel / x_axis.output, pixel % x_axis.output);
            let mut sum = bias.map_or(0.0, |bias| bias[filter].to_f64());
            for step in 0..group_channels {
                let channel = first + step;
                let group = batch * offset_groups + channel / (channels / offset_groups);
                let from = &image[(batch * channels + channel) * height * width..][..height * width];
                for tap in 0..taps {
                    let moved =
                        |which: usize| offset[((group * taps + tap) * 2 + which) * pixels + pixel].to_f64();
                    let place = |axis: &WindowAxis, at: usize, tap: usize| {
                        (at * axis.stride + tap * axis.dilation) as f64 - axis.pads[0] as f64
                    };
                    let y = place(&y_axis, row, tap / kernel_w) + moved(0);
                    let x = place(&x_axis, column, tap % kernel_w) + moved(1);
                    let factor =
                        mask.map_or(1.0, |mask| mask[(group * taps + tap) * pixels + pixel].to_f64());
                    let weight = weight[(filter * group_channels + step) * taps + tap].to_f64();
                    sum += sample(from, [height, width], y, x) * factor * weight;
                }
            }
            *value = T::from_f64(sum);
        }
    });
    Ok(())
}
