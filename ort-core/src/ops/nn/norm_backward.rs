//! Batch normalization backward: `BatchNormalizationGrad`.
//!
//! The gradients of a batch normalization in training mode by its input, scale and bias.

use crate::dtype::{DType, TypeSet};
use crate::ir::{Attribute, ValueId};
use crate::ops;
use crate::spec::{Draft, Grad, InferCx, OP, OpSpec, RUNTIME, attr, one, opt, var};
use crate::tensor::Tensor;
use crate::{Result, ensure, error};

static BATCH_NORMALIZATION_GRAD: OpSpec = OpSpec {
    domain: RUNTIME,
    name: "BatchNormalizationGrad",
    inputs: &[
        one("X", "T"),
        one("scale", "T"),
        one("dY", "T"),
        opt("mean", "T"),
        opt("inverse_deviation", "T"),
    ],
    outputs: &[one("dX", "T"), opt("dScale", "T"), opt("dB", "T")],
    types: &[var("T", TypeSet::of(&[DType::F32, DType::F64]))],
    attrs: &[attr::float("epsilon", 1e-5)],
    infer,
    lower: Some(lower),
    grad: Grad::Derived,
    ..OP
};

ops![BATCH_NORMALIZATION_GRAD];

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    if let Some(scale) = cx.shape(1) {
        ensure!(scale.len() == 1, InvalidGraph, "the scale has rank {}, expected 1", scale.len());
        for index in [1, 2] {
            cx.set_shape(index, scale.to_vec())?;
        }
    }
    let Some(shape) = cx.shape(0) else { return Ok(()) };
    ensure!(shape.len() >= 2, InvalidGraph, "the input has rank {}, expected 2 or more", shape.len());
    cx.set_shape(0, shape.to_vec())
}

/// With `x̂` the normalized input and `g` the upstream gradient, per channel:
/// `dx = scale (g - mean(g) - x̂ mean(g x̂)) / deviation`.
fn lower(draft: &mut Draft<'_>) -> Result<()> {
    let (x, scale, upstream) = (draft.required(0)?, draft.required(1)?, draft.required(2)?);
    let rank = draft.shape(0).map(|shape| shape.len() as i64);
    let rank = rank.ok_or_else(|| error!(NotImplemented, "the rank is not known"))?;
    // All axes but the channels.
    let axes: Vec<i64> = std::iter::once(0).chain(2..rank).collect();
    let axes = draft.constant_ints(&axes)?;
    // The forward pass may have saved the statistics; otherwise they are recomputed from x.
    let (centred, inverse) = match (draft.input(3), draft.input(4)) {
        (Some(mean), Some(inverse)) => (draft.emit("Sub", &[x, mean], &[])?, inverse),
        _ => standardize(draft, x, axes)?,
    };
    let unit = draft.emit("Mul", &[centred, inverse], &[])?;
    let along = draft.emit("Mul", &[upstream, unit], &[])?;
    let part = draft.emit("ReduceMean", &[along, axes], &[])?;
    let part = draft.emit("Mul", &[unit, part], &[])?;
    let rest = draft.emit("Sub", &[upstream, part], &[])?;
    let level = draft.emit("ReduceMean", &[upstream, axes], &[])?;
    let rest = draft.emit("Sub", &[rest, level], &[])?;
    // The scale broadcasts from the last axis, so it becomes [C, 1, ...].
    let shape: Vec<i64> = std::iter::once(-1).chain((2..rank).map(|_| 1)).collect();
    let shape = draft.constant_ints(&shape)?;
    let scale = draft.emit("Reshape", &[scale, shape], &[])?;
    let factor = draft.emit("Mul", &[scale, inverse], &[])?;
    let of_x = draft.emit("Mul", &[rest, factor], &[])?;
    let keep = [("keepdims", Attribute::Int(0))];
    let of_scale = draft.emit("ReduceSum", &[along, axes], &keep)?;
    let of_bias = draft.emit("ReduceSum", &[upstream, axes], &keep)?;
    draft.replace(&[of_x, of_scale, of_bias])
}

/// Returns the centred input and the inverse standard deviation, per channel.
fn standardize(draft: &mut Draft<'_>, x: ValueId, axes: ValueId) -> Result<(ValueId, ValueId)> {
    let epsilon = match draft.attr("epsilon") {
        Some(Attribute::Float(epsilon)) => *epsilon,
        _ => 1e-5,
    };
    let epsilon = match draft.dtype(0)? {
        DType::F64 => Tensor::scalar(f64::from(epsilon))?,
        _ => Tensor::scalar(epsilon)?,
    };
    let epsilon = draft.constant(epsilon);
    let mean = draft.emit("ReduceMean", &[x, axes], &[])?;
    let centred = draft.emit("Sub", &[x, mean], &[])?;
    let squares = draft.emit("Mul", &[centred, centred], &[])?;
    let variance = draft.emit("ReduceMean", &[squares, axes], &[])?;
    let padded = draft.emit("Add", &[variance, epsilon], &[])?;
    let root = draft.emit("Sqrt", &[padded], &[])?;
    Ok((centred, draft.emit("Reciprocal", &[root], &[])?))
}
