//! `NegativeLogLikelihoodLoss` and `SoftmaxCrossEntropyLoss`: losses of classification.

use crate::dtype::{DType, TypeSet};
use crate::ops;
use crate::spec::{AttrKind, InferCx, OP, OpSpec, attr, broadcast, one, opt, var};
use crate::{Result, ensure};

const INDICES: TypeSet = TypeSet::of(&[DType::I32, DType::I64]);

const LOSS: OpSpec = OpSpec {
    types: &[var("T", TypeSet::FLOATS), var("Tind", INDICES)],
    attrs: &[attr::optional("ignore_index", AttrKind::Int), attr::string("reduction", "mean")],
    infer,
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
    ensure!(known, InvalidGraph, "reduction '{reduction}' is none of 'none', 'mean', 'sum'");
    if reduction != "none" {
        cx.set_shape(0, Vec::new())?;
    }
    let Some(scores) = cx.shape(0) else { return Ok(()) };
    let [batch, _, spatial @ ..] = scores else {
        ensure!(scores.len() >= 2, InvalidGraph, "scores of rank {} have no classes", scores.len());
        return Ok(());
    };
    let mut expected = vec![batch.clone()];
    expected.extend_from_slice(spatial);
    if let Some(labels) = cx.shape(1) {
        ensure!(
            labels.len() == expected.len(),
            InvalidGraph,
            "labels of rank {} for scores of rank {}",
            labels.len(),
            scores.len()
        );
        expected = broadcast::dims(&[&expected, labels])?;
    }
    if reduction == "none" {
        cx.set_shape(0, expected)?;
    }
    cx.set_shape(1, scores.to_vec())
}
