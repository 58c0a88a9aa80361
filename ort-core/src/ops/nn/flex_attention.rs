//! Attention with user-defined subgraphs: `FlexAttention` of the preview domain.
//!
//! One subgraph modifies the scores, another the probabilities.

use crate::dtype::{DType, TypeSet};
use crate::ir::ValueType;
use crate::ops;
use crate::spec::{AttrKind, Cost, Grad, InferCx, ONNX_PREVIEW, OP, OpSpec, attr, one, var};
use crate::{Result, error};

static FLEX_ATTENTION: OpSpec = OpSpec {
    domain: ONNX_PREVIEW,
    name: "FlexAttention",
    grad: Grad::None("a graph of its own changes its scores; Attention has a gradient"),
    since: 1,
    inputs: &[one("Q", "T1"), one("K", "T1"), one("V", "T1")],
    outputs: &[one("Y", "T1")],
    types: &[var("T1", TypeSet::FLOATS)],
    attrs: &[
        attr::optional("prob_mod", AttrKind::Graph),
        attr::optional("scale", AttrKind::Float),
        attr::optional("score_mod", AttrKind::Graph),
        attr::optional("softmax_precision", AttrKind::Int),
    ],
    cost: Cost::Compute,
    infer,
    ..OP
};

ops![FLEX_ATTENTION];

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let (Some(q), Some(v)) = (cx.shape(0), cx.shape(2)) else { return Ok(()) };
    let ([batch, heads, time, _], [_, _, _, size]) = (q, v) else {
        return Err(error!(InvalidGraph, "Q, K and V must have rank 4"));
    };
    let keys = cx.shape(1).and_then(|k| k.get(2)).cloned().unwrap_or_else(|| cx.fresh());
    // The subgraphs see scores of the softmax's type: at least single precision by default.
    let dtype = match cx.attrs.find_int("softmax_precision") {
        Some(code) => i32::try_from(code).ok().and_then(DType::from_onnx),
        None if cx.dtype(0)? == DType::F64 => Some(DType::F64),
        None => Some(DType::F32),
    };
    let dtype = dtype.ok_or_else(|| error!(InvalidGraph, "softmax_precision names no type"))?;
    let scores = vec![batch.clone(), heads.clone(), time.clone(), keys];
    for attr in ["score_mod", "prob_mod"] {
        if let Some(index) = cx.find_subgraph(attr) {
            cx.infer_subgraph(index, &[ValueType::tensor(dtype, Some(scores.clone()))])?;
        }
    }
    cx.set_shape(0, vec![batch.clone(), heads.clone(), time.clone(), size.clone()])
}
