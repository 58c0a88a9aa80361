//! `Gelu`, `QuickGelu`, `FastGelu` and `BiasGelu`: variants of the standard's `Gelu` and `Swish`.

use super::{SAME_AS_STANDARD, becomes};
use crate::dtype::TypeSet;
use crate::ir::Attribute;
use crate::ops;
use crate::ops::math::shared::{same_shape, unary, x, y};
use crate::spec::{Draft, InferCx, MICROSOFT, OP, OpSpec, Traits, UnaryFn, attr, one, opt, var};
use crate::{Result, error};

static GELU: OpSpec =
    OpSpec { domain: MICROSOFT, upgrades: SAME_AS_STANDARD, ..unary("Gelu", 1, |_| Ok(x().gelu())) };

/// `x * sigmoid(alpha * x)`, the standard's `Swish` with another default.
static QUICK_GELU: OpSpec = OpSpec {
    domain: MICROSOFT,
    attrs: &[attr::float("alpha", 1.702)],
    upgrades: &[becomes(|draft| {
        let alpha = draft.take_attr("alpha").unwrap_or(Attribute::Float(1.702));
        let input = draft.required(0)?;
        draft.become_op("Swish", &[input], &[("alpha", alpha)]);
        Ok(())
    })],
    ..unary("QuickGelu", 1, |attrs| Ok(x() * (x() * attrs.float("alpha")?).apply(UnaryFn::Sigmoid)))
};

static BIAS_GELU: OpSpec = OpSpec {
    inputs: &[one("A", "T"), one("B", "T")],
    outputs: &[one("C", "T")],
    infer: infer_biased,
    upgrades: &[],
    domain: MICROSOFT,
    ..unary("BiasGelu", 1, |_| Ok((x() + y()).gelu()))
};

/// The `tanh` approximation of `Gelu`, of the input or of its sum with a bias.
static FAST_GELU: OpSpec = OpSpec {
    domain: MICROSOFT,
    name: "FastGelu",
    inputs: &[one("X", "T"), opt("bias", "T")],
    outputs: &[one("Y", "T")],
    types: &[var("T", TypeSet::FLOATS)],
    traits: Traits::ELEMENTWISE,
    infer: infer_biased,
    lower: Some(lower_fast),
    ..OP
};

ops![GELU, QUICK_GELU, BIAS_GELU, FAST_GELU];

/// Infers an output of the input's shape; the bias has one value per column.
fn infer_biased(cx: &mut InferCx<'_>) -> Result<()> {
    if let (Some(shape), Some(bias)) = (cx.shape(0), cx.shape(1)) {
        let [length] = bias else {
            return Err(error!(InvalidGraph, "the bias has rank {}, expected 1", bias.len()));
        };
        let width = shape.last();
        let width = width.ok_or_else(|| error!(InvalidGraph, "a scalar has no last dimension for a bias"))?;
        cx.require_equal("the length of the bias", length, width)?;
    }
    same_shape(cx)
}

fn lower_fast(draft: &mut Draft<'_>) -> Result<()> {
    let mut input = draft.required(0)?;
    if let Some(bias) = draft.input(1) {
        input = draft.emit("Add", &[input, bias], &[])?;
    }
    // The standard's `Gelu` of opset 20 has the same approximation.
    draft.become_op("Gelu", &[input], &[("approximate", Attribute::String("tanh".to_string()))]);
    Ok(())
}
