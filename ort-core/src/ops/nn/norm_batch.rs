//! Batch normalization: `BatchNormalization`.
//!
//! Normalizes each channel by the mean and variance of the batch (training mode) or by running
//! statistics.

use crate::dtype::TypeSet;
use crate::ir::Attribute;
use crate::ops;
use crate::ops::batch;
use crate::spec::{BatchRule, Draft, Grad, InferCx, OP, OpSpec, Traits, Upgrade, attr, one, opt, var};
use crate::tensor::Tensor;
use crate::{Result, ensure, error};

use super::norm_gradients;

static BATCH_NORMALIZATION: OpSpec = OpSpec {
    name: "BatchNormalization",
    since: 15,
    inputs: &[
        one("X", "T"),
        one("scale", "T1"),
        one("B", "T1"),
        one("input_mean", "T2"),
        one("input_var", "T2"),
    ],
    outputs: &[one("Y", "T"), opt("running_mean", "T2"), opt("running_var", "T2")],
    types: &[var("T", TypeSet::FLOATS), var("T1", TypeSet::FLOATS), var("T2", TypeSet::FLOATS)],
    attrs: &[attr::float("epsilon", 1e-5), attr::float("momentum", 0.9), attr::int("training_mode", 0)],
    traits: Traits::NORMALIZES,
    infer,
    upgrades: &[Upgrade { before: 7, apply: drop_test_flag }, Upgrade { before: 14, apply: name_the_mode }],
    grad: Grad::Rule(norm_gradients::of_batch),
    batch: BatchRule::Rule(batch::batch_norm),
    ..OP
};

ops![BATCH_NORMALIZATION];

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let training = cx.attrs.flag("training_mode")?;
    let statistics = cx.has_output(1) || cx.has_output(2);
    ensure!(training || !statistics, InvalidGraph, "running statistics are outputs of training mode only");
    for index in [1, 2] {
        if let Some(shape) = cx.shape(index + 2) {
            cx.set_shape(index, shape.to_vec())?;
        }
    }
    let Some(shape) = cx.shape(0) else { return Ok(()) };
    ensure!(!shape.is_empty(), InvalidGraph, "the input has no batch dimension");
    cx.set_shape(0, shape.to_vec())
}

/// Before version 7, `is_test` separated inference from training; since then the number of outputs
/// does.
fn drop_test_flag(draft: &mut Draft<'_>) -> Result<()> {
    draft.take_attr("consumed_inputs");
    if matches!(draft.take_attr("is_test"), Some(Attribute::Int(1))) {
        draft.outputs.truncate(1);
    }
    Ok(())
}

/// Sets `training_mode`. Before version 14 a node with statistics as outputs was in training.
///
/// Version 9 removed `spatial` 0, statistics of each activation instead of each channel.
fn name_the_mode(draft: &mut Draft<'_>) -> Result<()> {
    let spatial = !matches!(draft.take_attr("spatial"), Some(Attribute::Int(0)));
    let training = draft.outputs.iter().skip(1).any(Option::is_some);
    let saved = draft.outputs.iter().skip(3).any(Option::is_some);
    // An old training node may have five outputs: running mean and variance, and those of the
    // batch.
    if !saved {
        draft.outputs.truncate(if training { 3 } else { 1 });
    }
    draft.set_attr("training_mode", Attribute::Int(i64::from(training)));
    match (training, spatial) {
        (true, true) if !saved => Ok(()),
        (true, _) => train(draft, spatial),
        (false, true) => Ok(()),
        (false, false) => each_activation(draft),
    }
}

/// Training with the batch's own statistics as further outputs, or with statistics of each
/// activation.
///
/// For the latter, the image is flattened so that activations become channels.
fn train(draft: &mut Draft<'_>, spatial: bool) -> Result<()> {
    let [x, scale, bias, mean, variance] = [0, 1, 2, 3, 4].map(|index| draft.required(index));
    let (x, scale, bias, mean, variance) = (x?, scale?, bias?, mean?, variance?);
    let mut given = [x, scale, bias, mean, variance];
    if !spatial {
        let flat = draft.constant_ints(&[-1])?;
        // [N, C * H * W] and [C * H * W].
        let [image, others @ ..] = &mut given;
        *image = draft.emit("Flatten", &[x], &[])?;
        for input in others {
            *input = draft.emit("Reshape", &[*input, flat], &[])?;
        }
    }
    let given = given.map(Some);
    let attrs = draft.attrs.clone();
    let mut attrs: Vec<(&str, Attribute)> =
        attrs.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    let mut outputs = draft.emit_many("BatchNormalization", &given, &attrs, 3)?;
    if draft.outputs.len() > 3 {
        // With a momentum of 0 the running statistics are those of this batch.
        attrs.retain(|(name, _)| *name != "momentum");
        attrs.push(("momentum", Attribute::Float(0.0)));
        outputs.extend(draft.emit_many("BatchNormalization", &given, &attrs, 3)?.into_iter().skip(1));
    }
    if !spatial {
        let (of_image, of_statistics) = (draft.emit("Shape", &[x], &[])?, draft.emit("Shape", &[mean], &[])?);
        for (index, output) in outputs.iter_mut().enumerate() {
            let shape = if index == 0 { of_image } else { of_statistics };
            *output = draft.emit("Reshape", &[*output, shape], &[])?;
        }
    }
    draft.replace(&outputs)
}

/// `(X - mean) / sqrt(var + epsilon) * scale + B`, elementwise.
fn each_activation(draft: &mut Draft<'_>) -> Result<()> {
    let epsilon = match draft.attr("epsilon") {
        None => 1e-5,
        Some(Attribute::Float(epsilon)) => *epsilon,
        Some(_) => return Err(error!(InvalidGraph, "attribute 'epsilon' must be a float")),
    };
    let [x, scale, bias, mean, variance] = [0, 1, 2, 3, 4].map(|index| draft.required(index));
    let (x, scale, bias, mean, variance) = (x?, scale?, bias?, mean?, variance?);
    let epsilon = draft.constant(Tensor::scalar(epsilon)?);
    let epsilon = draft.emit("CastLike", &[epsilon, variance], &[])?;
    let padded = draft.emit("Add", &[variance, epsilon], &[])?;
    let deviation = draft.emit("Sqrt", &[padded], &[])?;
    // Statistics, scale and bias have the shape of one item here, and broadcast over the batch.
    let centred = draft.emit("Sub", &[x, mean], &[])?;
    let scaled = draft.emit("Div", &[centred, deviation], &[])?;
    let scaled = draft.emit("Mul", &[scaled, scale], &[])?;
    draft.become_op("Add", &[scaled, bias], &[]);
    Ok(())
}
