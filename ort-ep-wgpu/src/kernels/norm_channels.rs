//! Channel normalizations of images: `BatchNormalization` for inference, `InstanceNormalization`,
//! `GroupNormalization`, `MeanVarianceNormalization` and `LRN`.

use ort_core::ep::KernelDef;
use ort_core::{Result, ensure, error};

use super::elementwise::FLOATS;
use super::lines::{Lines, product};
use super::norm::{INVERSE_DEVIATION, Norm, Written, reading};
use super::norm_rows::few_axes;
use super::{WgpuKernel, wgpu_kernels};
use crate::launch::{Dispatch, OpCx, Operand};
use crate::shader::Shader;

const BATCH: KernelDef = KernelDef {
    op: "BatchNormalization",
    types: &[("T", FLOATS), ("T1", FLOATS), ("T2", FLOATS)],
    in_place: &[(0, 0)],
    when: |node| node.attrs().flag("training_mode").is_ok_and(|training| !training),
    ..KernelDef::BASE
};

const GROUPS: KernelDef =
    KernelDef { op: "GroupNormalization", types: &[("T", FLOATS)], in_place: &[(0, 0)], ..KernelDef::BASE };

wgpu_kernels![
    WgpuKernel::new(BATCH, batch),
    WgpuKernel::new(KernelDef { op: "InstanceNormalization", ..GROUPS }, groups),
    WgpuKernel::new(GROUPS, groups),
    WgpuKernel::new(KernelDef { op: "MeanVarianceNormalization", when: few_axes, ..GROUPS }, mean_variance),
    WgpuKernel::new(KernelDef { op: "LRN", in_place: &[], ..GROUPS }, local_response),
];

/// Returns the channels of an image, and the elements of a channel.
fn channels_of(x: &Operand) -> (usize, usize) {
    (x.size(1), product(x.shape.get(2..).unwrap_or_default()))
}

/// Adds per-channel parameters, which are the inputs after the first.
fn with_parameters(cx: &OpCx<'_>, shader: Shader, channels: usize, names: &[&'static str]) -> Result<Shader> {
    names.iter().enumerate().try_fold(shader, |shader, (index, name)| {
        let parameter = cx.input(index + 1)?;
        let count = parameter.count();
        ensure!(
            count == channels,
            InvalidArgument,
            "{name} has {count} elements, expected one for each of the {channels} channels"
        );
        Ok(shader.read(name, parameter))
    })
}

fn batch(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (x, y) = (cx.input(0)?, cx.output(0)?);
    let (channels, spatial) = channels_of(y);
    let shader = reading(cx, x).write("y", y).number("channels", channels).number("spatial", spatial);
    let shader = with_parameters(cx, shader, channels, &["scale", "bias", "mean", "variance"])?;
    let code = "fn element(i: u32) {
        let c = i / p.spatial % p.channels;
        let factor = scale(c) / sqrt(variance(c) + p.epsilon);
        set_y(i, (x(i) - mean(c)) * factor + bias(c));
    }";
    Ok(vec![shader.float("epsilon", cx.attrs.float("epsilon")?).each(y.count(), code)?])
}

fn groups(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (x, y) = (cx.input(0)?, cx.output(0)?);
    let (channels, spatial) = channels_of(y);
    // Instance normalization is group normalization with one group per channel.
    let groups = match cx.attrs.find_int("num_groups") {
        Some(groups) => usize::try_from(groups).unwrap_or(0),
        None => channels,
    };
    let each = channels.checked_div(groups).unwrap_or(0);
    let even = each.checked_mul(groups) == Some(channels);
    ensure!(
        even,
        InvalidArgument,
        "the number of channels is {channels}, expected a multiple of num_groups {groups}"
    );
    let count = y.size(0).saturating_mul(groups);
    let shader = reading(cx, x).number("groups", groups).number("each", each).number("spatial", spatial);
    let shader = with_parameters(cx, shader, channels, &["scale", "bias"])?;
    let channel = "line % p.groups * p.each + r / p.spatial";
    let norm = Norm {
        lines: Lines::rows(count, each.saturating_mul(spatial)),
        value: "x(place)",
        centers: true,
        factor: INVERSE_DEVIATION,
        result: &format!("v * scale({channel}) + bias({channel})"),
        epsilon: cx.attrs.float("epsilon")?,
    };
    Ok(vec![norm.dispatch(shader, Written { result: Some(y), ..Written::default() })?])
}

fn mean_variance(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (x, y) = (cx.input(0)?, cx.output(0)?);
    let mut mask = vec![false; y.rank()];
    for axis in cx.attrs.ints("axes")? {
        let axis = cx.axis(*axis, y.rank())?;
        mask.get_mut(axis).into_iter().for_each(|along| *along = true);
    }
    if y.count() == 0 {
        return Ok(Vec::new());
    }
    let norm = Norm {
        lines: Lines::new(&y.shape, &mask),
        value: "x(place)",
        centers: true,
        // The ONNX function adds epsilon to the standard deviation, not to the variance.
        factor: "1.0 / (sqrt(variance) + p.epsilon)",
        result: "v",
        epsilon: 1e-9,
    };
    Ok(vec![norm.dispatch(reading(cx, x), Written { result: Some(y), ..Written::default() })?])
}

fn local_response(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (x, y) = (cx.input(0)?, cx.output(0)?);
    let (channels, spatial) = channels_of(y);
    let size = cx.attrs.int("size")?;
    let size = usize::try_from(size).ok().filter(|size| *size > 0);
    let size = size.ok_or_else(|| error!(InvalidGraph, "LRN over no channels"))?;
    let shader = reading(cx, x)
        .write("y", y)
        .number("channels", channels)
        .number("spatial", spatial)
        .number("before", ((size - 1) / 2).min(channels))
        .number("after", (size / 2).min(channels))
        .float("alpha", cx.attrs.float("alpha")? / size as f32)
        .float("beta", cx.attrs.float("beta")?)
        .float("bias", cx.attrs.float("bias")?);
    let code = "fn element(i: u32) {
        let c = i / p.spatial % p.channels;
        let first = c - min(c, p.before);
        let last = min(c + p.after, p.channels - 1u);
        var squares = 0.0;
        for (var other = first; other <= last; other++) {
            let v = x(i + other * p.spatial - c * p.spatial);
            squares += v * v;
        }
        set_y(i, x(i) / pow_(p.bias + p.alpha * squares, p.beta));
    }";
    Ok(vec![shader.each(y.count(), code)?])
}
