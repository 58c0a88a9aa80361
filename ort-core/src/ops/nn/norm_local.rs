//! Local normalizations: `LRN` over neighbouring channels, `LpNormalization` along one axis.

use crate::dtype::TypeSet;
use crate::ops;
use crate::ops::axes;
use crate::ops::batch;
use crate::spec::{AttrKind, BatchRule, Grad, InferCx, OP, OpSpec, Traits, attr, one, var};
use crate::{Result, ensure};

use super::norm_gradients;

static LRN: OpSpec = OpSpec {
    name: "LRN",
    since: 13,
    inputs: &[one("X", "T")],
    outputs: &[one("Y", "T")],
    types: &[var("T", TypeSet::FLOATS)],
    attrs: &[
        attr::float("alpha", 1e-4),
        attr::float("beta", 0.75),
        attr::float("bias", 1.0),
        attr::required("size", AttrKind::Int),
    ],
    infer: infer_lrn,
    grad: Grad::Rule(norm_gradients::of_local_response),
    batch: BatchRule::Rule(batch::images),
    ..OP
};

static LP_NORMALIZATION: OpSpec = OpSpec {
    name: "LpNormalization",
    since: 22,
    inputs: &[one("input", "T")],
    outputs: &[one("output", "T")],
    types: &[var("T", TypeSet::FLOATS)],
    attrs: &[attr::int("axis", -1), attr::int("p", 2)],
    traits: Traits::NORMALIZES,
    infer: infer_lp,
    grad: Grad::Rule(norm_gradients::of_lp),
    batch: BatchRule::Rule(batch::along_axis),
    ..OP
};

ops![LRN, LP_NORMALIZATION];

fn infer_lrn(cx: &mut InferCx<'_>) -> Result<()> {
    let size = cx.attrs.int("size")?;
    ensure!(size > 0, InvalidGraph, "size of LRN is {size}, expected 1 or more");
    let Some(shape) = cx.shape(0) else { return Ok(()) };
    // The standard's shape is (N, C, D1, ...), and the windows run over the channels.
    ensure!(shape.len() >= 2, InvalidGraph, "an input with channels has rank 2 or more, got {}", shape.len());
    cx.set_shape(0, shape.to_vec())
}

fn infer_lp(cx: &mut InferCx<'_>) -> Result<()> {
    let p = cx.attrs.int("p")?;
    ensure!(p == 1 || p == 2, InvalidGraph, "p is {p}, expected 1 or 2");
    axes::infer_same_along_axis(cx)
}
