//! `TopK`: the greatest or least elements along an axis and their indices.

use crate::dtype::{DType, TypeSet};
use crate::ir::Attribute;
use crate::ops;
use crate::ops::axes;
use crate::ops::batch;
use crate::spec::{BatchRule, Draft, Grad, InferCx, OP, OpSpec, Upgrade, attr, one, var};
use crate::{Result, ensure, error};

use super::gradients;

static TOP_K: OpSpec = OpSpec {
    name: "TopK",
    since: 24,
    inputs: &[one("X", "T"), one("K", "tensor(int64)").host()],
    outputs: &[one("Values", "T"), one("Indices", "I")],
    types: &[var("T", TypeSet::NUMERIC), var("I", TypeSet::of(&[DType::I64]))],
    attrs: &[attr::int("axis", -1), attr::int("largest", 1), attr::int("sorted", 1)],
    infer,
    upgrades: &[Upgrade { before: 10, apply: k_to_input }],
    grad: Grad::Rule(gradients::of_top_k),
    batch: BatchRule::Rule(batch::along_axis),
    ..OP
};

ops![TOP_K];

/// Before version 10, the count was the attribute `k`.
fn k_to_input(draft: &mut Draft<'_>) -> Result<()> {
    let Some(Attribute::Int(k)) = draft.take_attr("k") else {
        return Err(error!(InvalidGraph, "Required attribute 'k' is missing"));
    };
    let k = draft.constant_ints(&[k])?;
    draft.set_input(1, k);
    Ok(())
}

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let Some(shape) = cx.shape(0) else { return Ok(()) };
    let axis = axes::normalize(cx.attrs.int("axis")?, shape.len())?;
    // `dims` flattens, so a scalar K counts as a list of one number.
    let count = match cx.dims(1).as_deref() {
        Some([count]) => count.clone(),
        Some(_) => return Err(error!(InvalidGraph, "K must hold one number")),
        None => cx.fresh(),
    };
    if let (Some(count), Some(size)) = (count.as_constant(), axes::size(shape, axis)?.as_constant()) {
        let fits = (0..=size).contains(&count);
        ensure!(
            fits,
            InvalidGraph,
            help = format!("K is 0 to {size}"),
            "K is {count}, but axis {axis} has {size} elements"
        );
    }
    let shape = axes::with_size(shape, axis, count);
    cx.set_shape(0, shape.clone())?;
    cx.set_shape(1, shape)
}
