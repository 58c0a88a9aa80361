//! Rotary position embedding: `RotaryEmbedding`.
//!
//! Rotates pairs of each head's elements by angles that depend on the position.

use super::attention_gradients;
use crate::dtype::{DType, TypeSet};
use crate::ops;
use crate::ops::batch;
use crate::spec::{AttrKind, BatchRule, Grad, InferCx, OP, OpSpec, attr, one, opt, var};
use crate::{ErrorKind, Result, ensure};

static ROTARY_EMBEDDING: OpSpec = OpSpec {
    name: "RotaryEmbedding",
    grad: Grad::Parts(attention_gradients::rotary_parts),
    since: 23,
    first: 23,
    inputs: &[one("X", "T"), one("cos_cache", "T"), one("sin_cache", "T"), opt("position_ids", "M")],
    outputs: &[one("Y", "T")],
    types: &[
        var("T", TypeSet::of(&[DType::F32, DType::F16, DType::BF16])),
        var("M", TypeSet::of(&[DType::I64])),
    ],
    attrs: &[
        attr::int("interleaved", 0),
        attr::optional("num_heads", AttrKind::Int),
        attr::int("rotary_embedding_dim", 0),
    ],
    infer,
    batch: BatchRule::Rule(batch::rotary),
    ..OP
};

ops![ROTARY_EMBEDDING];

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let Some(shape) = cx.shape(0) else { return Ok(()) };
    ensure!(matches!(shape.len(), 3 | 4), InvalidGraph, "X has rank {}, expected 3 or 4", shape.len());
    let has_heads = shape.len() == 4 || cx.attrs.find_int("num_heads").is_some_and(|heads| heads > 0);
    ensure!(has_heads, InvalidGraph, "num_heads must be given where X has rank 3");
    // [batch, length, hidden], or [batch, heads, length, size].
    if let [batch, .., length, _] = shape {
        cx.require_shape(3, &[batch.clone(), length.clone()], ErrorKind::InvalidArgument)?;
    }
    cx.set_shape(0, shape.to_vec())
}
