//! `RotaryEmbedding`: like the standard's, but positions are a starting offset or one per token,
//! and batches may be packed.

use super::attention_gradients;
use super::attention_heads::ATTENTION_TYPES;
use crate::dtype::{DType, TypeSet};
use crate::ops;
use crate::ops::batch;
use crate::spec::{AttrKind, BatchRule, Grad, InferCx, MICROSOFT, OP, OpSpec, attr, one, var};
use crate::{Result, ensure};

static ROTARY_EMBEDDING: OpSpec = OpSpec {
    domain: MICROSOFT,
    name: "RotaryEmbedding",
    grad: Grad::Parts(attention_gradients::rotary_parts),
    since: 1,
    inputs: &[one("input", "T"), one("position_ids", "M"), one("cos_cache", "T"), one("sin_cache", "T")],
    outputs: &[one("output", "T")],
    types: &[var("T", ATTENTION_TYPES), var("M", TypeSet::of(&[DType::I64]))],
    attrs: &[
        attr::optional("interleaved", AttrKind::Int),
        attr::optional("is_packed_batching", AttrKind::Int),
        attr::optional("num_heads", AttrKind::Int),
        attr::optional("rotary_embedding_dim", AttrKind::Int),
        attr::optional("scale", AttrKind::Float),
    ],
    infer,
    batch: BatchRule::Rule(batch::rotary_with_offset),
    ..OP
};

ops![ROTARY_EMBEDDING];

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let given = |name: &str| cx.attrs.find_int(name).unwrap_or(0) > 0;
    let complete = given("num_heads") || !given("rotary_embedding_dim");
    ensure!(complete, InvalidGraph, "num_heads must be given with rotary_embedding_dim");
    let Some(shape) = cx.shape(0) else { return Ok(()) };
    ensure!(matches!(shape.len(), 3 | 4), InvalidGraph, "input has rank {}, expected 3 or 4", shape.len());
    cx.set_shape(0, shape.to_vec())
}
