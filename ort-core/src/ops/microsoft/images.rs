//! Operators of diffusion models that keep the channels last: `GroupNorm`, `SkipGroupNorm` and
//! `NhwcConv`. They are decomposed into those of the standard between transpositions.

use super::{becomes, check_per_column, float, int, wants};
use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ir::{Attribute, ValueId};
use crate::ops;
use crate::ops::math::shared::same_shape;
use crate::ops::nn::conv::ATTRS as CONV_ATTRS;
use crate::spec::{
    AttrKind, AttrSpec, Draft, InferCx, MICROSOFT, OP, OpSpec, RUNTIME, Requirement, Traits, attr, one, opt,
    var,
};
use crate::{Result, ensure, error};

const SMALL: TypeSet = TypeSet::of(&[DType::F16, DType::F32]);

const NORM_ATTRS: &[AttrSpec] = &[
    attr::required("activation", AttrKind::Int),
    attr::int("channels_last", 1),
    attr::float("epsilon", 1e-5),
    attr::required("groups", AttrKind::Int),
];

static GROUP_NORM: OpSpec = OpSpec {
    domain: MICROSOFT,
    name: "GroupNorm",
    inputs: &[one("X", "T"), one("gamma", "M"), one("beta", "M")],
    outputs: &[one("Y", "T")],
    types: &[var("T", SMALL), var("M", SMALL)],
    attrs: NORM_ATTRS,
    traits: Traits::NORMALIZES,
    infer: infer_norm,
    lower: Some(|draft| {
        let x = draft.required(0)?;
        let result = normalize(draft, x)?;
        draft.replace(&[result])
    }),
    ..OP
};

static SKIP_GROUP_NORM: OpSpec = OpSpec {
    domain: MICROSOFT,
    name: "SkipGroupNorm",
    inputs: &[one("X", "T"), one("gamma", "M"), one("beta", "M"), one("skip", "T"), opt("bias", "T")],
    outputs: &[one("Y", "T"), opt("S", "T")],
    types: &[var("T", SMALL), var("M", SMALL)],
    attrs: NORM_ATTRS,
    traits: Traits::NORMALIZES,
    infer: infer_skip_norm,
    lower: Some(lower_skip_norm),
    ..OP
};

/// Our own operator of this name has the same layouts, and fuses more.
static NHWC_CONV: OpSpec = OpSpec {
    domain: MICROSOFT,
    name: "NhwcConv",
    inputs: &[one("X", "T"), one("W", "T"), opt("B", "T")],
    outputs: &[one("Y", "T")],
    types: &[var("T", TypeSet::IEEE_FLOATS)],
    attrs: CONV_ATTRS,
    upgrades: &[becomes(|draft| {
        draft.domain = RUNTIME.to_string();
        Ok(())
    })],
    ..OP
};

ops![GROUP_NORM, SKIP_GROUP_NORM, NHWC_CONV];

/// Returns the channels of an image.
fn channels<'s>(cx: &InferCx<'s>) -> Result<Option<&'s Dim>> {
    match (cx.shape(0), cx.attrs.flag("channels_last")?) {
        (None, _) => Ok(None),
        (Some([_, _, _, channels]), true) | (Some([_, channels, _, _]), false) => Ok(Some(channels)),
        (Some(shape), _) => Err(error!(InvalidGraph, "X has rank {}, expected 4", shape.len())),
    }
}

fn infer_norm(cx: &mut InferCx<'_>) -> Result<()> {
    let (groups, activation) = (cx.attrs.int("groups")?, cx.attrs.int("activation")?);
    ensure!(groups > 0, InvalidGraph, "groups is {groups}, expected at least 1");
    ensure!(matches!(activation, 0 | 1), InvalidGraph, "activation is {activation}, expected 0 or 1");
    if let Some(channels) = channels(cx)? {
        cx.require(Requirement::multiple("the number of channels", channels, groups))?;
        let channels = [channels.clone()];
        check_per_column(cx, 1, "gamma", &channels)?;
        check_per_column(cx, 2, "beta", &channels)?;
    }
    same_shape(cx)
}

fn infer_skip_norm(cx: &mut InferCx<'_>) -> Result<()> {
    infer_norm(cx)?;
    let (Some(shape), Some(channels)) = (cx.shape(0), channels(cx)?) else { return Ok(()) };
    if let Some(skip) = cx.shape(3) {
        // The skip is an image, or a vector of channels for each.
        let rank = skip.len();
        ensure!(matches!(rank, 2 | 4), InvalidGraph, "skip has rank {rank}, expected 2 or 4");
        let batch = shape.iter().take(1);
        let sizes: Vec<&Dim> =
            if rank == 2 { batch.chain([channels]).collect() } else { shape.iter().collect() };
        for (size, whole) in skip.iter().zip(sizes) {
            cx.require(Requirement::broadcast("a size of skip", size, whole))?;
        }
    }
    check_per_column(cx, 4, "bias", std::slice::from_ref(channels))?;
    cx.set_shape(1, shape.to_vec())
}

fn transpose(draft: &mut Draft<'_>, value: ValueId, order: &[i64]) -> Result<ValueId> {
    draft.emit("Transpose", &[value], &[("perm", Attribute::Ints(order.to_vec()))])
}

/// Emits the group norm of `x`, and its activation.
fn normalize(draft: &mut Draft<'_>, x: ValueId) -> Result<ValueId> {
    let is_last = int(draft, "channels_last")? != 0;
    let (groups, epsilon) = (int(draft, "groups")?, float(draft, "epsilon")?);
    let dtype = draft.dtype(0)?;
    let x = if is_last { transpose(draft, x, &[0, 3, 1, 2])? } else { x };
    let mut parameters = [draft.required(1)?, draft.required(2)?];
    for parameter in &mut parameters {
        if draft.value_type(*parameter).dtype() != Some(dtype) {
            let to = [("to", Attribute::Int(i64::from(dtype.onnx_code())))];
            *parameter = draft.emit("Cast", &[*parameter], &to)?;
        }
    }
    let [gamma, beta] = parameters;
    let attrs = [("num_groups", Attribute::Int(groups)), ("epsilon", Attribute::Float(epsilon))];
    let mut result = draft.emit("GroupNormalization", &[x, gamma, beta], &attrs)?;
    if int(draft, "activation")? != 0 {
        result = draft.emit("Swish", &[result], &[])?;
    }
    if is_last { transpose(draft, result, &[0, 2, 3, 1]) } else { Ok(result) }
}

/// The group norm of the sum of input, skip and bias.
fn lower_skip_norm(draft: &mut Draft<'_>) -> Result<()> {
    let (x, mut skip, bias) = (draft.required(0)?, draft.required(3)?, draft.input(4));
    let is_last = int(draft, "channels_last")? != 0;
    let rank = draft.shape(3).map(|shape| shape.len());
    if rank.ok_or_else(|| error!(NotImplemented, "a skip of unknown rank"))? == 2 {
        let axes = draft.constant_ints(if is_last { &[1, 2] } else { &[2, 3] })?;
        skip = draft.emit("Unsqueeze", &[skip, axes], &[])?;
    }
    let mut sum = draft.emit("Add", &[x, skip], &[])?;
    if let Some(mut bias) = bias {
        if !is_last {
            let axes = draft.constant_ints(&[1, 2])?;
            bias = draft.emit("Unsqueeze", &[bias, axes], &[])?;
        }
        sum = draft.emit("Add", &[sum, bias], &[])?;
    }
    let result = normalize(draft, sum)?;
    if wants(draft, 1) { draft.replace(&[result, sum]) } else { draft.replace(&[result]) }
}
