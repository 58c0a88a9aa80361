//! Channel normalizations of images: `BatchNormalization` for inference, `InstanceNormalization`,
//! `GroupNormalization`, `MeanVarianceNormalization` and `LRN`.

use ort_core::Result;
use ort_core::ep::KernelDef;
use ort_core::ops::nn::problem::{ChannelGroups, LocalResponse, MVN_EPSILON, channels_of, check_parameter};
use ort_core::ops::reduce::problem::axes_mask;

use super::elementwise::FLOATS;
use super::norm::{INVERSE_DEVIATION, Norm, Written, reading};
use super::norm_rows::few_axes;
use super::rows::TeamRows;
use super::{WgpuKernel, wgpu_kernels};
use crate::launch::{Dispatch, OpCx};
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

/// Adds per-channel parameters, which are the inputs after the first.
fn with_parameters(cx: &OpCx<'_>, shader: Shader, channels: usize, names: &[&'static str]) -> Result<Shader> {
    names.iter().enumerate().try_fold(shader, |shader, (index, name)| {
        let parameter = cx.input(index + 1)?;
        check_parameter(parameter.count(), channels)?;
        Ok(shader.read(name, parameter))
    })
}

fn batch(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (x, y) = (cx.input(0)?, cx.output(0)?);
    let (channels, spatial) = channels_of(&y.shape);
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
    let groups = ChannelGroups::new(cx.attrs, &y.shape)?;
    let shader = reading(cx, x).number("groups", groups.groups).number("each", groups.each);
    let shader = shader.number("spatial", groups.spatial);
    let shader = with_parameters(cx, shader, groups.channels, &["scale", "bias"])?;
    // A row is one group of one image, and `r` counts through its channels and pixels.
    let channel = "row % p.groups * p.each + r / p.spatial";
    let norm = Norm {
        rows: TeamRows::rows(groups.count, groups.len()),
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
    let mask = axes_mask(cx.attrs.ints("axes")?, y.rank())?;
    if y.count() == 0 {
        return Ok(Vec::new());
    }
    let norm = Norm {
        rows: TeamRows::new(&y.shape, &mask),
        value: "x(place)",
        centers: true,
        // The ONNX function adds epsilon to the standard deviation, not to the variance.
        factor: "1.0 / (sqrt(variance) + p.epsilon)",
        result: "v",
        epsilon: MVN_EPSILON,
    };
    Ok(vec![norm.dispatch(reading(cx, x), Written { result: Some(y), ..Written::default() })?])
}

fn local_response(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let (x, y) = (cx.input(0)?, cx.output(0)?);
    let local = LocalResponse::new(cx.attrs, &y.shape)?;
    let shader = reading(cx, x)
        .write("y", y)
        .number("channels", local.channels)
        .number("spatial", local.spatial)
        .number("before", local.before)
        .number("after", local.after)
        .float("alpha", local.alpha)
        .float("beta", local.beta)
        .float("bias", local.bias);
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
