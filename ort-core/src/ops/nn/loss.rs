//! Classification losses: `NegativeLogLikelihoodLoss` and `SoftmaxCrossEntropyLoss`.

use crate::dtype::{DType, TypeSet};
use crate::ir::{Attribute, ValueId};
use crate::ops;
use crate::spec::{AttrKind, Grad, GradCx, InferCx, OP, OpSpec, attr, broadcast, one, opt, var};
use crate::{ErrorKind, Result, ensure};

const INDICES: TypeSet = TypeSet::of(&[DType::I32, DType::I64]);

const LOSS: OpSpec = OpSpec {
    types: &[var("T", TypeSet::FLOATS), var("Tind", INDICES)],
    attrs: &[attr::optional("ignore_index", AttrKind::Int), attr::string("reduction", "mean")],
    infer,
    grad: Grad::Rule(gradient),
    ..OP
};

static NEGATIVE_LOG_LIKELIHOOD_LOSS: OpSpec = OpSpec {
    name: "NegativeLogLikelihoodLoss",
    since: 22,
    first: 12,
    inputs: &[one("input", "T"), one("target", "Tind"), opt("weight", "T")],
    outputs: &[one("loss", "T")],
    ..LOSS
};

static SOFTMAX_CROSS_ENTROPY_LOSS: OpSpec = OpSpec {
    name: "SoftmaxCrossEntropyLoss",
    since: 13,
    first: 12,
    inputs: &[one("scores", "T"), one("labels", "Tind"), opt("weights", "T")],
    outputs: &[one("output", "T"), opt("log_prob", "T")],
    ..LOSS
};

ops![NEGATIVE_LOG_LIKELIHOOD_LOSS, SOFTMAX_CROSS_ENTROPY_LOSS];

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let reduction = cx.attrs.string("reduction")?;
    let known = ["none", "mean", "sum"].contains(&reduction);
    ensure!(known, InvalidGraph, "reduction is '{reduction}', expected 'none', 'mean' or 'sum'");
    // A reduced loss is a scalar, even of scores of unknown rank.
    if reduction != "none" {
        cx.set_shape(0, Vec::new())?;
    }
    let Some(scores) = cx.shape(0) else { return Ok(()) };
    let [batch, _, spatial @ ..] = scores else {
        ensure!(
            scores.len() >= 2,
            InvalidGraph,
            "the scores have rank {}, expected 2 or more: [batch, classes, ...]",
            scores.len()
        );
        return Ok(());
    };
    let mut expected = vec![batch.clone()];
    expected.extend_from_slice(spatial);
    if let Some(labels) = cx.shape(1) {
        ensure!(
            labels.len() == expected.len(),
            InvalidGraph,
            "the labels have rank {}, expected one less than the scores, which have rank {}",
            labels.len(),
            scores.len()
        );
        cx.require_shape(1, &expected, ErrorKind::InvalidArgument)?;
        // Of a constant and a symbolic size, `broadcast` takes the constant.
        expected = broadcast::dims(&[&expected, labels])?;
    }
    if reduction == "none" {
        cx.set_shape(0, expected)?;
    }
    cx.set_shape(1, scores.to_vec())
}

/// The gradient of the scores.
///
/// By log-probabilities it is minus the label's weight at the label, 0 elsewhere. By logits it is
/// the softmax minus the one-hot label, times that weight (Goodfellow, Bengio & Courville, Deep
/// Learning, 6.2.2.3).
fn gradient(cx: &mut GradCx<'_>) -> Result<()> {
    let scores = cx.input(0)?;
    ensure!(!cx.wants(2), NotImplemented, "{} has no gradient by its weights", cx.operator());
    let (labels, share) = shares(cx)?;
    let dtype = cx.dtype(scores)?;
    let classes = cx.ints(&[1])?;
    let labels = cx.emit("Unsqueeze", &[labels, classes], &[])?;
    let share = cx.emit("Unsqueeze", &[share, classes], &[])?;
    let at_label = [("axis", Attribute::Int(1)), ("reduction", Attribute::String("add".into()))];
    let gradient = if cx.operator() == "SoftmaxCrossEntropyLoss" {
        // The forward pass may have left the log-probabilities as its second output.
        let logarithms = match cx.find_output(1) {
            Some(logarithms) => logarithms,
            None => cx.emit("LogSoftmax", &[scores], &[("axis", Attribute::Int(1))])?,
        };
        let probabilities = cx.emit("Exp", &[logarithms], &[])?;
        let one = cx.number(-1.0, dtype)?;
        let shape = cx.shape_of(labels)?;
        let ones = cx.emit("Expand", &[one, shape], &[])?;
        // Adding -1 at the labels subtracts the one-hot labels without building them.
        let rest = cx.emit("ScatterElements", &[probabilities, labels, ones], &at_label)?;
        cx.emit("Mul", &[rest, share], &[])?
    } else {
        let zeros = cx.filled(0.0, scores)?;
        let shares = cx.emit("Neg", &[share], &[])?;
        cx.emit("ScatterElements", &[zeros, labels, shares], &at_label)?
    };
    cx.set(0, gradient);
    Ok(())
}

/// Returns the labels, with class 0 in place of ignored ones, and the upstream gradient times the
/// weight of each label's loss in the output.
fn shares(cx: &mut GradCx<'_>) -> Result<(ValueId, ValueId)> {
    let (scores, mut labels, upstream) = (cx.input(0)?, cx.input(1)?, cx.first_upstream()?);
    let dtype = cx.dtype(scores)?;
    labels = cx.cast(labels, DType::I64)?;
    let ignored = match cx.attrs().find_int("ignore_index") {
        Some(index) => {
            let index = cx.integer(index)?;
            Some(cx.emit("Equal", &[labels, index], &[])?)
        }
        None => None,
    };
    // An ignored label may be no class at all: class 0 keeps the gathers and scatters in range, and
    // the weight of 0 below cancels it.
    if let Some(ignored) = ignored {
        let zero = cx.integer(0)?;
        labels = cx.emit("Where", &[ignored, zero, labels], &[])?;
    }
    let mut weight = match cx.find_input(2) {
        Some(weights) => cx.emit("Gather", &[weights, labels], &[])?,
        None => {
            let (one, shape) = (cx.number(1.0, dtype)?, cx.shape_of(labels)?);
            cx.emit("Expand", &[one, shape], &[])?
        }
    };
    if let Some(ignored) = ignored {
        let zero = cx.number(0.0, dtype)?;
        weight = cx.emit("Where", &[ignored, zero, weight], &[])?;
    }
    // The mean divides by the sum of the weights, not by the number of labels.
    if cx.attrs().string("reduction")? == "mean" {
        let all = cx.emit("ReduceSum", &[weight], &[("keepdims", Attribute::Int(0))])?;
        weight = cx.emit("Div", &[weight, all], &[])?;
    }
    let share = cx.emit("Mul", &[weight, upstream], &[])?;
    Ok((labels, share))
}
