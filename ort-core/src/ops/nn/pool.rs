//! Pools: `MaxPool`, `AveragePool`, `LpPool`, and their global forms.

use super::conv_gradients;
use super::geometry::Windows;
use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ir::Attribute;
use crate::ops;
use crate::ops::batch;
use crate::spec::{
    AttrKind, AttrSpec, BatchRule, Draft, Grad, InferCx, OP, OpSpec, Param, TypeVar, Upgrade, attr, one, opt,
    var,
};
use crate::tensor::Tensor;
use crate::{Result, ensure};

const X: &[Param] = &[one("X", "T")];
const Y: &[Param] = &[one("Y", "T")];
const FLOATS: &[TypeVar] = &[var("T", TypeSet::FLOATS)];

const AUTO_PAD: AttrSpec = attr::string("auto_pad", "NOTSET");
const CEIL_MODE: AttrSpec = attr::int("ceil_mode", 0);
const DILATIONS: AttrSpec = attr::optional("dilations", AttrKind::Ints);
const KERNEL_SHAPE: AttrSpec = attr::required("kernel_shape", AttrKind::Ints);
const PADS: AttrSpec = attr::optional("pads", AttrKind::Ints);
const STRIDES: AttrSpec = attr::optional("strides", AttrKind::Ints);

/// The attributes of `AveragePool`, in NCHW or NHWC.
pub(in crate::ops) const AVERAGE_POOL_ATTRS: &[AttrSpec] =
    &[AUTO_PAD, CEIL_MODE, attr::int("count_include_pad", 0), DILATIONS, KERNEL_SHAPE, PADS, STRIDES];
/// The attributes of `NhwcMaxPool`, which returns no indices.
pub(in crate::ops) const NHWC_MAX_POOL_ATTRS: &[AttrSpec] =
    &[AUTO_PAD, CEIL_MODE, DILATIONS, KERNEL_SHAPE, PADS, STRIDES];

static MAX_POOL: OpSpec = OpSpec {
    name: "MaxPool",
    since: 22,
    inputs: X,
    outputs: &[one("Y", "T"), opt("Indices", "I")],
    types: &[
        var("T", TypeSet::FLOATS.union(TypeSet::of(&[DType::I8, DType::U8]))),
        var("I", TypeSet::of(&[DType::I64])),
    ],
    attrs: &[AUTO_PAD, CEIL_MODE, DILATIONS, KERNEL_SHAPE, PADS, attr::int("storage_order", 0), STRIDES],
    infer,
    grad: Grad::Rule(conv_gradients::of_max_pool),
    batch: BatchRule::Rule(batch::max_pool),
    ..OP
};

static AVERAGE_POOL: OpSpec = OpSpec {
    name: "AveragePool",
    since: 22,
    inputs: X,
    outputs: Y,
    types: FLOATS,
    attrs: AVERAGE_POOL_ATTRS,
    infer,
    grad: Grad::Rule(conv_gradients::of_average_pool),
    batch: BatchRule::Rule(batch::images),
    ..OP
};

static LP_POOL: OpSpec = OpSpec {
    name: "LpPool",
    since: 22,
    inputs: X,
    outputs: Y,
    types: FLOATS,
    attrs: &[AUTO_PAD, CEIL_MODE, DILATIONS, KERNEL_SHAPE, attr::int("p", 2), PADS, STRIDES],
    infer,
    upgrades: &[Upgrade { before: 2, apply: whole_power }],
    grad: Grad::Rule(conv_gradients::of_lp_pool),
    batch: BatchRule::Rule(batch::images),
    ..OP
};

static GLOBAL_MAX_POOL: OpSpec = OpSpec {
    name: "GlobalMaxPool",
    since: 22,
    inputs: X,
    outputs: Y,
    types: FLOATS,
    infer: infer_global,
    grad: Grad::Rule(conv_gradients::of_global_max),
    batch: BatchRule::Rule(batch::images),
    ..OP
};

static GLOBAL_AVERAGE_POOL: OpSpec = OpSpec {
    name: "GlobalAveragePool",
    since: 22,
    inputs: X,
    outputs: Y,
    types: FLOATS,
    infer: infer_global,
    grad: Grad::Rule(conv_gradients::of_global_average),
    batch: BatchRule::Rule(batch::images),
    ..OP
};

static GLOBAL_LP_POOL: OpSpec = OpSpec {
    name: "GlobalLpPool",
    since: 22,
    inputs: X,
    outputs: Y,
    types: FLOATS,
    attrs: &[attr::int("p", 2)],
    infer: infer_global,
    upgrades: &[Upgrade { before: 2, apply: whole_power }],
    grad: Grad::Rule(conv_gradients::of_lp_pool),
    batch: BatchRule::Rule(batch::images),
    ..OP
};

ops![MAX_POOL, AVERAGE_POOL, LP_POOL, GLOBAL_MAX_POOL, GLOBAL_AVERAGE_POOL, GLOBAL_LP_POOL];

/// Version 1 had a float as the power.
///
/// A fractional power is taken elementwise before a pool with `p = 1`, and its root afterwards.
fn whole_power(draft: &mut Draft<'_>) -> Result<()> {
    let Some(Attribute::Float(power)) = draft.attr("p").cloned() else { return Ok(()) };
    // A whole float below 1e6 converts to `i64` exactly.
    if power.fract() == 0.0 && power.abs() < 1e6 {
        draft.set_attr("p", Attribute::Int(power as i64));
        return Ok(());
    }
    let x = draft.required(0)?;
    let size = draft.emit("Abs", &[x], &[])?;
    let exponent = draft.constant(Tensor::scalar(power)?);
    // Powers of absolute values are not negative, so a pool with `p = 1` sums them as they are.
    let powers = draft.emit("Pow", &[size, exponent], &[])?;
    draft.set_attr("p", Attribute::Int(1));
    let attrs = draft.attrs.clone();
    let attrs: Vec<(&str, Attribute)> =
        attrs.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    let op = draft.op.clone();
    let sum = draft.emit(&op, &[powers], &attrs)?;
    let exponent = draft.constant(Tensor::scalar(1.0 / power)?);
    draft.become_op("Pow", &[sum, exponent], &[]);
    Ok(())
}

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let Some(image) = cx.shape(0) else { return Ok(()) };
    let windows = Windows::of_pool(cx.attrs, image.len())?;
    let (outer, spatial) = image.split_at_checked(2).unwrap_or((image, &[]));
    let mut shape = outer.to_vec();
    shape.extend(windows.outputs(spatial));
    // Only `MaxPool` has this output; `set` ignores positions that a node lacks.
    cx.set(1, DType::I64, Some(shape.clone()));
    cx.set_shape(0, shape)
}

fn infer_global(cx: &mut InferCx<'_>) -> Result<()> {
    let Some(image) = cx.shape(0) else { return Ok(()) };
    ensure!(image.len() >= 2, InvalidGraph, "an image has rank 2 or more, got rank {}", image.len());
    let ones = std::iter::repeat(Dim::constant(1));
    let shape = image.iter().take(2).cloned().chain(ones).take(image.len()).collect();
    cx.set_shape(0, shape)
}
