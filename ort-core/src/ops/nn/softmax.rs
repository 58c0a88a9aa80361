//! Softmax family: `Softmax`, `LogSoftmax` and `Hardmax` along one axis.

use crate::dtype::TypeSet;
use crate::ir::Attribute;
use crate::ops;
use crate::ops::axes::infer_same_along_axis;
use crate::ops::batch;
use crate::spec::{BatchRule, Draft, Grad, GradCx, OP, OpSpec, Upgrade, attr, one, var};
use crate::{Result, error};

const ALONG_AXIS: OpSpec = OpSpec {
    since: 13,
    inputs: &[one("input", "T")],
    outputs: &[one("output", "T")],
    types: &[var("T", TypeSet::FLOATS)],
    attrs: &[attr::int("axis", -1)],
    infer: infer_same_along_axis,
    upgrades: &[Upgrade { before: 13, apply: over_matrices }],
    batch: BatchRule::Rule(batch::along_axis),
    ..OP
};

static SOFTMAX: OpSpec =
    OpSpec { name: "Softmax", lower: Some(lower_softmax), grad: Grad::Rule(softmax_gradient), ..ALONG_AXIS };
static LOG_SOFTMAX: OpSpec = OpSpec {
    name: "LogSoftmax",
    lower: Some(lower_log_softmax),
    grad: Grad::Rule(log_softmax_gradient),
    ..ALONG_AXIS
};
static HARDMAX: OpSpec =
    OpSpec { name: "Hardmax", grad: Grad::Zero("its output jumps from 0 to 1"), ..ALONG_AXIS };

ops![SOFTMAX, LOG_SOFTMAX, HARDMAX];

/// Before version 13 the input was a matrix whose rows begin at `axis` (1 by default).
fn over_matrices(draft: &mut Draft<'_>) -> Result<()> {
    let axis = match draft.take_attr("axis") {
        None => 1,
        Some(Attribute::Int(axis)) => axis,
        Some(_) => return Err(error!(InvalidGraph, "attribute 'axis' must be an integer")),
    };
    let last = draft.shape(0).map(|shape| shape.len() as i64 - 1);
    // Rows that begin at the last axis are the current form.
    if axis == -1 || last == Some(axis) {
        draft.set_attr("axis", Attribute::Int(-1));
        return Ok(());
    }
    let input = draft.required(0)?;
    let op = draft.op.clone();
    let shape = draft.emit("Shape", &[input], &[])?;
    let matrix = draft.emit("Flatten", &[input], &[("axis", Attribute::Int(axis))])?;
    let result = draft.emit(&op, &[matrix], &[("axis", Attribute::Int(-1))])?;
    // A 0 in the input's own shape is a size.
    let restored = draft.emit("Reshape", &[result, shape], &[("allowzero", Attribute::Int(1))])?;
    draft.replace(&[restored])
}

fn axis_attr(draft: &Draft<'_>) -> i64 {
    match draft.attr("axis") {
        Some(Attribute::Int(axis)) => *axis,
        _ => -1,
    }
}

fn lower_softmax(draft: &mut Draft<'_>) -> Result<()> {
    let (input, axis) = (draft.required(0)?, axis_attr(draft));
    let axes = draft.constant_ints(&[axis])?;
    // Subtracting the maximum keeps Exp from overflowing.
    let greatest = draft.emit("ReduceMax", &[input, axes], &[])?;
    let shifted = draft.emit("Sub", &[input, greatest], &[])?;
    let powers = draft.emit("Exp", &[shifted], &[])?;
    let sum = draft.emit("ReduceSum", &[powers, axes], &[])?;
    draft.become_op("Div", &[powers, sum], &[]);
    Ok(())
}

fn lower_log_softmax(draft: &mut Draft<'_>) -> Result<()> {
    let (input, axis) = (draft.required(0)?, axis_attr(draft));
    let axes = draft.constant_ints(&[axis])?;
    // Subtracting the maximum keeps Exp from overflowing.
    let greatest = draft.emit("ReduceMax", &[input, axes], &[])?;
    let shifted = draft.emit("Sub", &[input, greatest], &[])?;
    let powers = draft.emit("Exp", &[shifted], &[])?;
    let sum = draft.emit("ReduceSum", &[powers, axes], &[])?;
    let log = draft.emit("Log", &[sum], &[])?;
    draft.become_op("Sub", &[shifted, log], &[]);
    Ok(())
}

/// `dx = y * (dy - sum(dy * y))`.
fn softmax_gradient(cx: &mut GradCx<'_>) -> Result<()> {
    let (output, upstream) = (cx.output(0)?, cx.upstream()?);
    let axes = cx.ints(&[cx.attrs().int("axis")?])?;
    let product = cx.emit("Mul", &[upstream, output], &[])?;
    let sum = cx.emit("ReduceSum", &[product, axes], &[])?;
    let centred = cx.emit("Sub", &[upstream, sum], &[])?;
    let gradient = cx.emit("Mul", &[centred, output], &[])?;
    cx.set(0, gradient);
    Ok(())
}

/// `dx = dy - exp(y) * sum(dy)`.
fn log_softmax_gradient(cx: &mut GradCx<'_>) -> Result<()> {
    let (output, upstream) = (cx.output(0)?, cx.upstream()?);
    let axes = cx.ints(&[cx.attrs().int("axis")?])?;
    let sum = cx.emit("ReduceSum", &[upstream, axes], &[])?;
    let softmax = cx.emit("Exp", &[output], &[])?;
    let part = cx.emit("Mul", &[softmax, sum], &[])?;
    let gradient = cx.emit("Sub", &[upstream, part], &[])?;
    cx.set(0, gradient);
    Ok(())
}
