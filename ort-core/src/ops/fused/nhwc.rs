//! Float image operators in NHWC layout: `NhwcConv`, `NhwcMaxPool` and `NhwcAveragePool`.
//!
//! They decompose into the standard operators between transpositions.

use crate::Result;
use crate::dim::Dim;
use crate::dtype::TypeSet;
use crate::ir::Attribute;
use crate::ops;
use crate::ops::batch;
use crate::ops::fused::activation::{Activation, end_with};
use crate::ops::microsoft::fused::CONV_ATTRS;
use crate::ops::microsoft::qlinear::{channels_first, image_rank, move_channels, set_image};
use crate::ops::microsoft::{agree, check_rank, draft_attributes};
use crate::ops::nn::conv;
use crate::ops::nn::geometry::Windows;
use crate::ops::nn::pool::{AVERAGE_POOL_ATTRS, NHWC_MAX_POOL_ATTRS};
use crate::spec::{BatchRule, Cost, Draft, InferCx, OP, OpSpec, RUNTIME, one, opt, var};

/// `FusedConv` in NHWC: `X` is [N, .., C], the filters `W` are [M, .., C / group], and the addend
/// `Z` and `Y` are [N, .., M].
static NHWC_CONV: OpSpec = OpSpec {
    domain: RUNTIME,
    name: "NhwcConv",
    inputs: &[one("X", "T"), one("W", "T"), opt("B", "T"), opt("Z", "T")],
    outputs: &[one("Y", "T")],
    types: &[var("T", TypeSet::FLOATS)],
    attrs: CONV_ATTRS,
    cost: Cost::Compute,
    infer: infer_conv,
    lower: Some(lower_conv),
    batch: BatchRule::Rule(batch::conv_with_addend),
    ..OP
};

/// `MaxPool` of `X` [N, .., C], without indices. ONNX Runtime's operator of this name takes
/// quantized values.
static NHWC_MAX_POOL: OpSpec = OpSpec {
    domain: RUNTIME,
    name: "NhwcMaxPool",
    inputs: &[one("X", "T")],
    outputs: &[one("Y", "T")],
    types: &[var("T", TypeSet::FLOATS)],
    attrs: NHWC_MAX_POOL_ATTRS,
    infer: infer_pool,
    lower: Some(|draft| lower_pool(draft, "MaxPool")),
    batch: BatchRule::Rule(batch::images),
    ..OP
};

/// `AveragePool` of `X` [N, .., C].
static NHWC_AVERAGE_POOL: OpSpec = OpSpec {
    domain: RUNTIME,
    name: "NhwcAveragePool",
    inputs: &[one("X", "T")],
    outputs: &[one("Y", "T")],
    types: &[var("T", TypeSet::FLOATS)],
    attrs: AVERAGE_POOL_ATTRS,
    infer: infer_pool,
    lower: Some(|draft| lower_pool(draft, "AveragePool")),
    batch: BatchRule::Rule(batch::images),
    ..OP
};

ops![NHWC_CONV, NHWC_MAX_POOL, NHWC_AVERAGE_POOL];

fn infer_conv(cx: &mut InferCx<'_>) -> Result<()> {
    Activation::of_attributes(cx.attrs)?;
    let (Some(image), Some(weight)) = (cx.shape(0), cx.shape(1)) else { return Ok(()) };
    let (image, weight) = (channels_first(image, true)?, channels_first(weight, true)?);
    let shape = conv::output_shape(cx, [&image, &weight], 2)?;
    set_image(cx, shape, true)?;
    let (Some(shape), Some(addend)) = (cx.output_shape(0), cx.shape(3)) else { return Ok(()) };
    check_rank(cx, 3, "Z", shape.len())?;
    shape.iter().zip(addend).try_for_each(|(size, own)| agree("a size of Z", size, own))
}

fn lower_conv(draft: &mut Draft<'_>) -> Result<()> {
    let activation = Activation::of_attributes(&draft_attributes(draft)?)?;
    let rank = image_rank(draft, Some(1))?;
    let [image, weight] = [draft.required(0)?, draft.required(1)?];
    let image = move_channels(draft, image, rank, true)?;
    let weight = move_channels(draft, weight, rank, true)?;
    let mut attrs = given(draft);
    // `Conv` has no activation. `end_with` applies it after the addend.
    attrs.retain(|(name, _)| !name.starts_with("activation"));
    let inputs = [Some(image), Some(weight), draft.input(2)];
    let mut result = draft.emit_one("Conv", &inputs, &named(&attrs))?;
    result = move_channels(draft, result, rank, false)?;
    // `Z` is NHWC like `Y`, so it is added after the transposition back.
    if let Some(addend) = draft.input(3) {
        result = draft.emit("Add", &[result, addend], &[])?;
    }
    end_with(draft, result, activation.as_ref())
}

/// Infers the output shape of an NHWC pool.
pub(in crate::ops) fn infer_pool(cx: &mut InferCx<'_>) -> Result<()> {
    let Some(image) = cx.shape(0) else { return Ok(()) };
    // We reuse the shape rules of the standard's pools, which are NCHW.
    let image = channels_first(image, true)?;
    let windows = Windows::of_pool(cx.attrs, image.len())?;
    let (outer, places) = image.split_at_checked(2).unwrap_or((&image, &[]));
    let mut shape: Vec<Dim> = outer.to_vec();
    shape.extend(windows.outputs(places));
    set_image(cx, shape, true)
}

/// Decomposes an NHWC pool into the standard's pool between transpositions.
pub(in crate::ops) fn lower_pool(draft: &mut Draft<'_>, op: &str) -> Result<()> {
    let (rank, image) = (image_rank(draft, None)?, draft.required(0)?);
    let image = move_channels(draft, image, rank, true)?;
    let attrs = given(draft);
    let result = draft.emit(op, &[image], &named(&attrs))?;
    let result = move_channels(draft, result, rank, false)?;
    draft.replace(&[result])
}

/// Returns the attributes of a draft, for another operator.
fn given(draft: &Draft<'_>) -> Vec<(String, Attribute)> {
    draft.attrs.iter().map(|(name, value)| (name.clone(), value.clone())).collect()
}

/// Returns attributes in the form in which drafts take them.
fn named(attrs: &[(String, Attribute)]) -> Vec<(&str, Attribute)> {
    attrs.iter().map(|(name, value)| (name.as_str(), value.clone())).collect()
}
