//! `Dropout`: in training, zeroes random elements and scales up the others; otherwise the identity.

use crate::dtype::{DType, TypeSet};
use crate::ir::Attribute;
use crate::ops;
use crate::spec::{AttrKind, Draft, Grad, GradCx, InferCx, OP, OpSpec, Traits, Upgrade, attr, one, opt, var};
use crate::tensor::Tensor;
use crate::{Result, ensure, error};

use super::shared::DROP_HINT;

const FLOATS: TypeSet = TypeSet::FLOATS.union(TypeSet::FLOAT8);

static DROPOUT: OpSpec = OpSpec {
    name: "Dropout",
    since: 22,
    inputs: &[one("data", "T"), opt("ratio", "T1"), opt("training_mode", "T2")],
    outputs: &[one("output", "T"), opt("mask", "T2")],
    types: &[var("T", FLOATS), var("T1", FLOATS), var("T2", TypeSet::of(&[DType::Bool]))],
    attrs: &[attr::optional("seed", AttrKind::Int)],
    traits: Traits::RANDOM,
    infer,
    upgrades: &[
        DROP_HINT,
        Upgrade { before: 7, apply: test_to_input },
        Upgrade { before: 10, apply: mask_of_numbers },
        Upgrade { before: 12, apply: drop_ratio },
    ],
    grad: Grad::Rule(gradient),
    ..OP
};

ops![DROPOUT];

/// The gradient of `Dropout`: kept elements pass the upstream gradient with the same scale. The
/// pass demands the mask from the forward node to know which were kept.
fn gradient(cx: &mut GradCx<'_>) -> Result<()> {
    let upstream = cx.first_upstream()?;
    let Some(training) = cx.find_input(2) else {
        cx.set(0, upstream);
        return Ok(());
    };
    let dtype = cx.dtype(upstream)?;
    let one = cx.number(1.0, dtype)?;
    let ratio = match cx.find_input(1) {
        Some(ratio) => cx.cast(ratio, dtype)?,
        // The standard's default ratio.
        None => cx.number(0.5, dtype)?,
    };
    let kept = cx.emit("Sub", &[one, ratio], &[])?;
    // Outside of training nothing is scaled, so the divisor is 1.
    let kept = cx.emit("Where", &[training, kept, one], &[])?;
    let mask = cx.demand_output(1)?;
    let zero = cx.number(0.0, dtype)?;
    let scaled = cx.emit("Div", &[upstream, kept], &[])?;
    let gradient = cx.emit("Where", &[mask, scaled, zero], &[])?;
    cx.set(0, gradient);
    Ok(())
}

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    for index in [1, 2] {
        let one = cx
            .shape(index)
            .is_none_or(|shape| shape.iter().all(|size| size.as_constant().is_none_or(|size| size == 1)));
        ensure!(one, InvalidGraph, "input {index} of Dropout must be one element");
    }
    let shape = cx.shape(0).map(<[_]>::to_vec);
    if let Some(shape) = shape.clone() {
        cx.set_shape(0, shape)?;
    }
    cx.set(1, DType::Bool, shape);
    Ok(())
}

/// Before version 7 the attribute `is_test`, 0 by default, said whether the node is the identity.
fn test_to_input(draft: &mut Draft<'_>) -> Result<()> {
    let test = match draft.take_attr("is_test") {
        None => false,
        Some(Attribute::Int(value)) => value != 0,
        Some(_) => return Err(error!(InvalidGraph, "attribute 'is_test' is not an integer")),
    };
    // The attribute `ratio` stays behind here, and `drop_ratio` removes it.
    if test {
        return Ok(());
    }
    let ratio = match draft.take_attr("ratio") {
        None => 0.5,
        Some(Attribute::Float(value)) => value,
        Some(_) => return Err(error!(InvalidGraph, "attribute 'ratio' is not a float")),
    };
    let ratio = draft.constant(Tensor::scalar(ratio)?);
    let training = draft.constant(Tensor::from_bools(&[], &[true])?);
    draft.set_input(1, ratio);
    draft.set_input(2, training);
    Ok(())
}

/// Before version 10 the mask had the type of the data, so the boolean mask is cast.
fn mask_of_numbers(draft: &mut Draft<'_>) -> Result<()> {
    if draft.outputs.get(1).copied().flatten().is_none() {
        return Ok(());
    }
    let (data, inputs) = (draft.required(0)?, draft.inputs.clone());
    let dropped = draft.emit_many("Dropout", &inputs, &[], 2)?;
    let [output, mask] = dropped[..] else { return Err(error!(Fail, "Dropout has two outputs")) };
    let mask = draft.emit("CastLike", &[mask, data], &[])?;
    draft.replace(&[output, mask])
}

/// From version 7 until version 12 the ratio was an attribute without effect, because the node was
/// always the identity.
fn drop_ratio(draft: &mut Draft<'_>) -> Result<()> {
    draft.take_attr("ratio");
    Ok(())
}
