//! Padding: `Pad` adds elements around a tensor, or crops it if pads are negative.

use crate::dtype::{DType, TypeSet};
use crate::ir::Attribute;
use crate::ops;
use crate::ops::axes;
use crate::ops::batch;
use crate::spec::{
    BatchRule, Draft, Grad, InferCx, OP, OpSpec, Upgrade, ViewCx, ViewOf, attr, one, opt, var,
};
use crate::tensor::Tensor;
use crate::{Result, ensure, error, one_of};

use super::geometry::normalize_axes;
use super::gradients;

static PAD: OpSpec = OpSpec {
    name: "Pad",
    since: 25,
    inputs: &[
        one("data", "T"),
        one("pads", "tensor(int64)").host(),
        opt("constant_value", "T"),
        opt("axes", "Tind").host(),
    ],
    outputs: &[one("output", "T")],
    types: &[var("T", TypeSet::ALL_TENSOR_IR13), var("Tind", TypeSet::of(&[DType::I32, DType::I64]))],
    attrs: &[attr::string("mode", "constant")],
    infer,
    view: Some(view),
    upgrades: &[Upgrade { before: 2, apply: rename_paddings }, Upgrade { before: 11, apply: pads_to_inputs }],
    grad: Grad::Rule(gradients::of_pad),
    batch: BatchRule::Rule(batch::padded),
    ..OP
};

ops![PAD];

fn rename_paddings(draft: &mut Draft<'_>) -> Result<()> {
    // The name of the attribute in version 1.
    if let Some(pads) = draft.take_attr("paddings") {
        draft.set_attr("pads", pads);
    }
    Ok(())
}

fn pads_to_inputs(draft: &mut Draft<'_>) -> Result<()> {
    ensure!(draft.attr("pads").is_some(), InvalidGraph, "Required attribute 'pads' is missing");
    draft.attr_to_input("pads", 1)?;
    let value = match draft.take_attr("value") {
        Some(Attribute::Float(value)) => value,
        Some(_) => return Err(error!(InvalidGraph, "attribute 'value' is not a float")),
        None => 0.0,
    };
    // Zero is the default for every type. Any other value was a float attribute and must become a
    // constant of the data's type.
    if value == 0.0 {
        return Ok(());
    }
    let constant = draft.constant(Tensor::scalar(value)?);
    let constant = match draft.dtype(0) {
        Ok(DType::F32) => constant,
        _ => {
            let data = draft.required(0)?;
            draft.emit("CastLike", &[constant, data], &[])?
        }
    };
    draft.set_input(2, constant);
    Ok(())
}

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let mode = cx.attrs.string("mode")?;
    one_of("the mode", mode, &["constant", "reflect", "edge", "wrap"])?;
    let Some(shape) = cx.shape(0) else { return Ok(()) };
    let axes = match (cx.has_input(3), cx.ints(3)) {
        (false, _) => Some((0..shape.len()).collect()),
        (true, Some(axes)) => Some(normalize_axes(&axes, shape.len())?),
        (true, None) => None,
    };
    // Unknown pads or axes still fix the rank.
    let (Some(axes), Some(pads)) = (axes, cx.dims(1)) else {
        let sizes = shape.iter().map(|_| cx.fresh()).collect();
        return cx.set_shape(0, sizes);
    };
    let count = axes.len();
    ensure!(
        pads.len() == 2 * count,
        InvalidGraph,
        "{} pads are given for {count} axes, expected two for each",
        pads.len()
    );
    let mut sizes = shape.to_vec();
    // The standard lists all begins, then all ends.
    let (begins, ends) = pads.split_at_checked(count).unwrap_or((&pads, &[]));
    for (&axis, (begin, end)) in axes.iter().zip(begins.iter().zip(ends)) {
        let size = axes::size(&sizes, axis)? + begin + end;
        let negative = size.as_constant().is_some_and(|size| size < 0);
        ensure!(
            !negative,
            InvalidGraph,
            help = "negative pads crop an axis, by at most its size",
            "pads {pads:?} leave nothing of shape {shape:?}"
        );
        sizes = axes::with_size(&sizes, axis, size);
    }
    cx.set_shape(0, sizes)
}

/// A view if all pads are zero.
fn view(cx: &ViewCx<'_>) -> Option<ViewOf> {
    let pads = cx.ints.get(1)?.as_deref()?;
    if pads.iter().all(|&pad| pad == 0) { ViewOf::whole(cx) } else { None }
}
