//! Selection by value: `NonZero` and `Compress`, whose output sizes depend on the data.

use crate::Result;
use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ops;
use crate::ops::axes;
use crate::spec::{AttrKind, Grad, InferCx, OP, OpSpec, Traits, attr, one, var};

use super::geometry::normalize_axis;
use super::gradients;

static NON_ZERO: OpSpec = OpSpec {
    name: "NonZero",
    since: 13,
    first: 9,
    inputs: &[one("X", "T")],
    outputs: &[one("Y", "tensor(int64)")],
    types: &[var("T", TypeSet::ALL_TENSOR)],
    infer: infer_non_zero,
    ..OP
};

static COMPRESS: OpSpec = OpSpec {
    name: "Compress",
    since: 28,
    first: 9,
    inputs: &[one("input", "T"), one("condition", "T1").host()],
    outputs: &[one("output", "T")],
    types: &[var("T", TypeSet::ALL_TENSOR), var("T1", TypeSet::of(&[DType::Bool]))],
    attrs: &[attr::optional("axis", AttrKind::Int)],
    traits: Traits::MOVES_DATA,
    infer: infer_compress,
    grad: Grad::Rule(gradients::of_compress),
    ..OP
};

ops![NON_ZERO, COMPRESS];

fn infer_non_zero(cx: &mut InferCx<'_>) -> Result<()> {
    let rank = cx.shape(0).map(|shape| Dim::constant(shape.len() as i64));
    // A row of indices for each axis, a column for each nonzero element.
    let shape = vec![rank.unwrap_or_else(|| cx.fresh()), cx.fresh()];
    cx.set_shape(0, shape)
}

fn infer_compress(cx: &mut InferCx<'_>) -> Result<()> {
    let Some(input) = cx.shape(0) else { return Ok(()) };
    let axis = cx.attrs.find_int("axis").map(|axis| normalize_axis(axis, input.len())).transpose()?;
    let total = match axis {
        Some(axis) => axes::size(input, axis)?.clone(),
        None => input.iter().product(),
    };
    let condition = cx.known(1).and_then(|view| view.bytes().ok());
    let kept = match (condition, total.as_constant().and_then(|total| usize::try_from(total).ok())) {
        (Some(condition), Some(total)) => {
            // A condition longer than the data selects nothing beyond it.
            let kept = condition.iter().take(total).filter(|&&keep| keep != 0).count();
            Dim::constant(kept as i64)
        }
        _ => cx.fresh(),
    };
    let shape = match axis {
        Some(axis) => axes::with_size(input, axis, kept),
        None => vec![kept],
    };
    cx.set_shape(0, shape)
}
