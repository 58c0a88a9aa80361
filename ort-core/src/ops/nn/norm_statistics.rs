//! Batch statistics: `BatchNormalizationStatistics`.
//!
//! Computes the mean and deviation of each channel once, for a batch normalization in training mode
//! and for its gradient.

use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ir::Attribute;
use crate::ops;
use crate::spec::{Draft, InferCx, OP, OpSpec, RUNTIME, attr, one, opt, var};
use crate::tensor::Tensor;
use crate::{Result, ensure, error};

/// Batch normalization is then `(X - mean) * inverse_deviation`.
///
/// Both have the rank of X, with one element per channel. Running statistics are updated as ONNX's
/// `BatchNormalization` does, with the population variance.
static BATCH_NORMALIZATION_STATISTICS: OpSpec = OpSpec {
    domain: RUNTIME,
    name: "BatchNormalizationStatistics",
    inputs: &[one("X", "T"), one("input_mean", "T"), one("input_var", "T")],
    outputs: &[
        one("mean", "T"),
        opt("inverse_deviation", "T"),
        opt("running_mean", "T"),
        opt("running_var", "T"),
    ],
    types: &[var("T", TypeSet::of(&[DType::F32, DType::F64]))],
    attrs: &[attr::float("epsilon", 1e-5), attr::float("momentum", 0.9)],
    infer,
    lower: Some(lower),
    ..OP
};

ops![BATCH_NORMALIZATION_STATISTICS];

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    for index in [1, 2] {
        if let Some(running) = cx.shape(index) {
            let rank = running.len();
            ensure!(rank == 1, InvalidGraph, "the running statistics have rank {rank}, expected 1");
            cx.set_shape(index + 1, running.to_vec())?;
        }
    }
    let Some(shape) = cx.shape(0) else { return Ok(()) };
    ensure!(shape.len() >= 2, InvalidGraph, "the input has rank {}, expected 2 or more", shape.len());
    let of_channels: Vec<Dim> = shape
        .iter()
        .enumerate()
        .map(|(axis, size)| if axis == 1 { size.clone() } else { Dim::constant(1) })
        .collect();
    cx.set_shape(0, of_channels.clone())?;
    cx.set_shape(1, of_channels)
}

fn lower(draft: &mut Draft<'_>) -> Result<()> {
    let (x, running) = (draft.required(0)?, [draft.required(1)?, draft.required(2)?]);
    let rank = draft.shape(0).map(|shape| shape.len() as i64);
    let rank = rank.ok_or_else(|| error!(NotImplemented, "the rank is not known"))?;
    let number = |draft: &Draft<'_>, name: &str, default: f32| match draft.attr(name) {
        Some(Attribute::Float(number)) => *number,
        _ => default,
    };
    let (epsilon, momentum) = (number(draft, "epsilon", 1e-5), f64::from(number(draft, "momentum", 0.9)));
    let is_double = draft.dtype(0)? == DType::F64;
    let scalar = |draft: &mut Draft<'_>, value: f64| -> Result<_> {
        Ok(draft.constant(if is_double { Tensor::scalar(value)? } else { Tensor::scalar(value as f32)? }))
    };
    // All axes but the channels.
    let axes: Vec<i64> = std::iter::once(0).chain(2..rank).collect();
    let (axes, flat) = (draft.constant_ints(&axes)?, draft.constant_ints(&[-1])?);
    let mean = draft.emit("ReduceMean", &[x, axes], &[])?;
    let centred = draft.emit("Sub", &[x, mean], &[])?;
    let squares = draft.emit("Mul", &[centred, centred], &[])?;
    let variance = draft.emit("ReduceMean", &[squares, axes], &[])?;
    let epsilon = scalar(draft, f64::from(epsilon))?;
    let padded = draft.emit("Add", &[variance, epsilon], &[])?;
    let deviation = draft.emit("Sqrt", &[padded], &[])?;
    let mut outputs = vec![mean, draft.emit("Reciprocal", &[deviation], &[])?];
    // The standard: running = running * momentum + current * (1 - momentum).
    let (past, now) = (scalar(draft, momentum)?, scalar(draft, 1.0 - momentum)?);
    for (before, batch) in running.into_iter().zip([mean, variance]) {
        let batch = draft.emit("Reshape", &[batch, flat], &[])?;
        let (before, batch) =
            (draft.emit("Mul", &[before, past], &[])?, draft.emit("Mul", &[batch, now], &[])?);
        outputs.push(draft.emit("Add", &[before, batch], &[])?);
    }
    draft.replace(&outputs)
}
