//! Unbroadcasting: `SumTo` sums a gradient over the dimensions that a value was broadcast along.
//!
//! It takes the value's shape as an input, so it also works if the axes to sum are known only at
//! run time.

use crate::dtype::{DType, TypeSet};
use crate::ir::{Attribute, ValueId};
use crate::ops;
use crate::spec::{Draft, Grad, GradCx, InferCx, OP, OpSpec, RUNTIME, ViewCx, ViewOf, one, var};
use crate::tensor::Tensor;
use crate::{Result, ensure, error};

static SUM_TO: OpSpec = OpSpec {
    domain: RUNTIME,
    name: "SumTo",
    inputs: &[one("data", "T"), one("shape", "tensor(int64)").host()],
    outputs: &[one("reduced", "T")],
    types: &[var("T", TypeSet::of(&[DType::F16, DType::BF16, DType::F32, DType::F64]))],
    infer,
    view: Some(view),
    lower: Some(lower),
    grad: Grad::Rule(gradient),
    ..OP
};

ops![SUM_TO];

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let Some(shape) = cx.dims(1) else { return Ok(()) };
    if let Some(data) = cx.shape(0) {
        let from_end = data.iter().rev().zip(shape.iter().rev());
        let differ = from_end.filter_map(|(from, to)| Some((from.as_constant()?, to.as_constant()?)));
        ensure!(
            data.len() >= shape.len() && differ.into_iter().all(|(from, to)| from == to || to == 1),
            InvalidGraph,
            "shape {shape:?} does not broadcast to {data:?}"
        );
    }
    cx.set_shape(0, shape)
}

/// A view of the data if no dimension was broadcast.
fn view(cx: &ViewCx<'_>) -> Option<ViewOf> {
    let (from, to) = (cx.inputs.first()?.as_deref()?, cx.outputs.first()?.as_deref()?);
    if from.iter().ne(to.iter()) {
        return None;
    }
    ViewOf::whole(cx)
}

/// Decomposes into a `ReduceSum` with axes from run time: the leading ones that only the data has,
/// then those whose sizes differ.
fn lower(draft: &mut Draft<'_>) -> Result<()> {
    let (data, shape) = (draft.required(0)?, draft.required(1)?);
    let rank = |shape: Option<usize>| shape.ok_or_else(|| error!(NotImplemented, "the rank is not known"));
    let from = rank(draft.shape(0).map(|shape| shape.len()))?;
    let to = rank(draft.shape(1).and_then(|shape| shape.first()?.as_constant()).map(|rank| rank as usize))?;
    let lead = from.saturating_sub(to);
    let own = draft.emit("Shape", &[data], &[("start", Attribute::Int(lead as i64))])?;
    let same = draft.emit("Equal", &[own, shape], &[])?;
    let differ = draft.emit("Not", &[same], &[])?;
    let found = draft.emit("NonZero", &[differ], &[])?;
    let flat = draft.constant_ints(&[-1])?;
    let found = draft.emit("Reshape", &[found, flat], &[])?;
    let offset = draft.constant(Tensor::scalar(lead as i64)?);
    let found = draft.emit("Add", &[found, offset], &[])?;
    let leading: Vec<i64> = (0..lead as i64).collect();
    let leading = draft.constant_ints(&leading)?;
    let axes = draft.emit("Concat", &[leading, found], &[("axis", Attribute::Int(0))])?;
    // Without the flag, an empty list of axes would reduce all of them.
    let keep = [("keepdims", Attribute::Int(1)), ("noop_with_empty_axes", Attribute::Int(1))];
    let sum = draft.emit("ReduceSum", &[data, axes], &keep)?;
    // Drops the leading axes, which the sum keeps with size 1.
    let sum = draft.emit("Reshape", &[sum, shape], &[("allowzero", Attribute::Int(1))])?;
    draft.replace(&[sum])
}

/// Broadcasts the gradient over the summed axes.
fn gradient(cx: &mut GradCx<'_>) -> Result<()> {
    let (data, upstream): (ValueId, ValueId) = (cx.input(0)?, cx.upstream()?);
    let shape = cx.shape_of(data)?;
    let gradient = cx.emit("Expand", &[upstream, shape], &[])?;
    cx.set(0, gradient);
    Ok(())
}
