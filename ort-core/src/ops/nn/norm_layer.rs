//! Per-item normalization.
//!
//! `LayerNormalization`, `RMSNormalization`, `InstanceNormalization`, `GroupNormalization`,
//! `MeanVarianceNormalization`.

use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ir::Attribute;
use crate::ops;
use crate::ops::axes;
use crate::ops::batch;
use crate::spec::{
    AttrKind, BatchRule, Draft, Grad, InferCx, OP, OpSpec, Traits, Upgrade, attr, one, opt, var,
};
use crate::{Result, ensure, error};

use super::norm_gradients;

const EPSILON: f32 = 1e-5;

static LAYER_NORMALIZATION: OpSpec = OpSpec {
    name: "LayerNormalization",
    unchecked_before: 17,
    since: 17,
    first: 17,
    inputs: &[one("X", "T"), one("Scale", "T"), opt("B", "T")],
    outputs: &[one("Y", "T"), opt("Mean", "U"), opt("InvStdDev", "U")],
    types: &[var("T", TypeSet::FLOATS), var("U", TypeSet::of(&[DType::F32, DType::BF16]))],
    attrs: &[attr::int("axis", -1), attr::float("epsilon", EPSILON), attr::int("stash_type", 1)],
    traits: Traits::NORMALIZES,
    infer: infer_layer,
    grad: Grad::Rule(norm_gradients::of_layer),
    batch: BatchRule::Rule(batch::layer_norm),
    ..OP
};

static RMS_NORMALIZATION: OpSpec = OpSpec {
    name: "RMSNormalization",
    since: 23,
    first: 23,
    inputs: &[one("X", "T"), one("scale", "V")],
    outputs: &[one("Y", "V")],
    types: &[var("T", TypeSet::FLOATS), var("V", TypeSet::FLOATS)],
    attrs: &[attr::int("axis", -1), attr::float("epsilon", EPSILON), attr::int("stash_type", 1)],
    traits: Traits::NORMALIZES,
    infer: axes::infer_same_along_axis,
    grad: Grad::Rule(norm_gradients::of_layer),
    batch: BatchRule::Rule(batch::layer_norm),
    ..OP
};

static INSTANCE_NORMALIZATION: OpSpec = OpSpec {
    name: "InstanceNormalization",
    since: 22,
    inputs: &[one("input", "T"), one("scale", "T"), one("B", "T")],
    outputs: &[one("output", "T")],
    types: &[var("T", TypeSet::FLOATS)],
    attrs: &[attr::float("epsilon", EPSILON)],
    traits: Traits::NORMALIZES,
    infer: infer_channels,
    upgrades: &[Upgrade { before: 6, apply: drop_consumed_inputs }],
    grad: Grad::Rule(norm_gradients::of_channels),
    batch: BatchRule::Rule(batch::images),
    ..OP
};

static GROUP_NORMALIZATION: OpSpec = OpSpec {
    name: "GroupNormalization",
    since: 21,
    first: 21,
    inputs: &[one("X", "T"), one("scale", "T"), one("bias", "T")],
    outputs: &[one("Y", "T")],
    types: &[var("T", TypeSet::FLOATS)],
    attrs: &[
        attr::float("epsilon", EPSILON),
        attr::required("num_groups", AttrKind::Int),
        attr::int("stash_type", 1),
    ],
    traits: Traits::NORMALIZES,
    infer: infer_groups,
    upgrades: &[Upgrade { before: 21, apply: scale_each_channel }],
    grad: Grad::Rule(norm_gradients::of_channels),
    batch: BatchRule::Rule(batch::images),
    ..OP
};

static MEAN_VARIANCE_NORMALIZATION: OpSpec = OpSpec {
    name: "MeanVarianceNormalization",
    since: 13,
    first: 9,
    inputs: &[one("X", "T")],
    outputs: &[one("Y", "T")],
    types: &[var("T", TypeSet::FLOATS)],
    attrs: &[attr::ints("axes", &[0, 2, 3])],
    traits: Traits::NORMALIZES,
    infer: infer_mean_variance,
    upgrades: &[Upgrade { before: 9, apply: mean_variance_by_flags }],
    grad: Grad::Rule(norm_gradients::of_mean_variance),
    batch: BatchRule::Rule(batch::mean_variance),
    ..OP
};

ops![
    LAYER_NORMALIZATION,
    RMS_NORMALIZATION,
    INSTANCE_NORMALIZATION,
    GROUP_NORMALIZATION,
    MEAN_VARIANCE_NORMALIZATION,
];

/// The type in which statistics are computed and returned.
fn stash_type(cx: &InferCx<'_>) -> Result<DType> {
    let code = cx.attrs.int("stash_type")?;
    let dtype = i32::try_from(code).ok().and_then(DType::from_onnx);
    dtype
        .filter(|dtype| TypeSet::FLOATS.contains(*dtype))
        .ok_or_else(|| error!(InvalidGraph, "stash_type {code} is not a floating-point type"))
}

pub(in crate::ops) fn infer_layer(cx: &mut InferCx<'_>) -> Result<()> {
    let stash = stash_type(cx)?;
    // Type variable `U` is bound by no input, so the statistics' type is set even without a shape.
    let Some(shape) = cx.shape(0) else {
        cx.set(1, stash, None);
        cx.set(2, stash, None);
        return Ok(());
    };
    let axis = axes::normalize(cx.attrs.int("axis")?, shape.len())?;
    // The statistics keep the rank, with 1 along the normalized axes.
    let ones = std::iter::repeat(Dim::constant(1));
    let statistics: Vec<Dim> = shape.iter().take(axis).cloned().chain(ones).take(shape.len()).collect();
    cx.set(1, stash, Some(statistics.clone()));
    cx.set(2, stash, Some(statistics));
    cx.set_shape(0, shape.to_vec())
}

fn infer_channels(cx: &mut InferCx<'_>) -> Result<()> {
    let Some(shape) = cx.shape(0) else { return Ok(()) };
    ensure!(shape.len() >= 2, InvalidGraph, "an input with channels has rank 2 or more, got {}", shape.len());
    cx.set_shape(0, shape.to_vec())
}

fn infer_groups(cx: &mut InferCx<'_>) -> Result<()> {
    let groups = cx.attrs.int("num_groups")?;
    ensure!(groups > 0, InvalidGraph, "num_groups is {groups}, expected 1 or more");
    if let Some(channels) = cx.shape(0).and_then(|shape| shape.get(1)).and_then(Dim::as_constant) {
        let even = channels % groups == 0;
        ensure!(
            even,
            InvalidGraph,
            "the number of channels is {channels}, expected a multiple of num_groups {groups}"
        );
    }
    infer_channels(cx)
}

fn infer_mean_variance(cx: &mut InferCx<'_>) -> Result<()> {
    let Some(shape) = cx.shape(0) else { return Ok(()) };
    // Refuses an axis that is out of range, or named twice.
    axes::mask(cx.attrs.ints("axes")?, shape.len())?;
    cx.set_shape(0, shape.to_vec())
}

/// Decomposes the form before version 9, which had flags instead of axes.
///
/// `across_channels` includes the channels in the mean, `normalize_variance` divides by the
/// deviation. No epsilon guards that division: a constant channel returns NaN.
fn mean_variance_by_flags(draft: &mut Draft<'_>) -> Result<()> {
    let mut flag = |name: &str, default: bool| match draft.take_attr(name) {
        None => Ok(default),
        Some(Attribute::Int(value)) => Ok(value != 0),
        Some(_) => Err(error!(InvalidGraph, "attribute '{name}' must be an integer")),
    };
    let (across, normalize) = (flag("across_channels", false)?, flag("normalize_variance", true)?);
    // The old form was for images: rank 4 if unknown.
    let rank = draft.shape(0).map_or(4, |shape| shape.len() as i64);
    let axes: Vec<i64> = (0..rank).filter(|&axis| across || axis != 1).collect();
    let (x, axes) = (draft.required(0)?, draft.constant_ints(&axes)?);
    let mean = draft.emit("ReduceMean", &[x, axes], &[])?;
    let mut result = draft.emit("Sub", &[x, mean], &[])?;
    if normalize {
        let square = draft.emit("Mul", &[result, result], &[])?;
        let variance = draft.emit("ReduceMean", &[square, axes], &[])?;
        let deviation = draft.emit("Sqrt", &[variance], &[])?;
        result = draft.emit("Div", &[result, deviation], &[])?;
    }
    draft.replace(&[result])
}

fn drop_consumed_inputs(draft: &mut Draft<'_>) -> Result<()> {
    draft.take_attr("consumed_inputs");
    Ok(())
}

/// Version 18 had a scale and bias per group; repeats them for each channel of the group.
fn scale_each_channel(draft: &mut Draft<'_>) -> Result<()> {
    let groups = match draft.attr("num_groups") {
        Some(Attribute::Int(groups)) if *groups > 0 => *groups,
        _ => return Err(error!(InvalidGraph, "attribute 'num_groups' must be a positive integer")),
    };
    let input = draft.required(0)?;
    // The number of channels may be known to the run alone, so nodes compute the repeats.
    let range = [("start", Attribute::Int(1)), ("end", Attribute::Int(2))];
    let channels = draft.emit("Shape", &[input], &range)?;
    let groups = draft.constant_ints(&[groups])?;
    let each = draft.emit("Div", &[channels, groups], &[])?;
    let one = draft.constant_ints(&[1])?;
    let repeats = draft.emit("Concat", &[one, each], &[("axis", Attribute::Int(0))])?;
    let flat = draft.constant_ints(&[-1])?;
    for index in [1, 2] {
        let value = draft.required(index)?;
        // [G], [G, 1], [G, C / G], [C].
        let column = draft.emit("Unsqueeze", &[value, one], &[])?;
        let repeated = draft.emit("Expand", &[column, repeats], &[])?;
        let channels = draft.emit("Reshape", &[repeated, flat], &[])?;
        draft.set_input(index, channels);
    }
    Ok(())
}
