//! `RotaryEmbedding` and `MRotaryEmbedding`: like the standard's, but positions are a starting
//! offset or one per token, or three per token, and batches may be packed.

use super::attention_gradients;
use super::attention_heads::ATTENTION_TYPES;
use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ir::Attribute;
use crate::ops;
use crate::ops::batch;
use crate::spec::{AttrKind, BatchRule, Draft, Grad, InferCx, MICROSOFT, OP, OpSpec, attr, one, var};
use crate::tensor::Tensor;
use crate::{Result, ensure, error};

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

/// Three positions for each token, of time, height and width. Each pair of a head is rotated by one
/// of them.
static MROTARY_EMBEDDING: OpSpec = OpSpec {
    domain: MICROSOFT,
    name: "MRotaryEmbedding",
    since: 1,
    inputs: &[one("input", "T"), one("position_ids", "M"), one("cos_cache", "T"), one("sin_cache", "T")],
    outputs: &[one("output", "T")],
    types: &[var("T", ATTENTION_TYPES), var("M", TypeSet::of(&[DType::I64]))],
    attrs: &[
        attr::optional("interleaved", AttrKind::Int),
        attr::optional("is_packed_batching", AttrKind::Int),
        attr::optional("mrope_layout", AttrKind::Int),
        attr::required("mrope_section", AttrKind::Ints),
        attr::optional("num_heads", AttrKind::Int),
        attr::optional("rotary_embedding_dim", AttrKind::Int),
        attr::optional("scale", AttrKind::Float),
    ],
    infer: infer_sections,
    lower: Some(lower_sections),
    ..OP
};

ops![ROTARY_EMBEDDING, MROTARY_EMBEDDING];

/// Returns for each pair of a head the stream of positions that rotates it: 0, 1 or 2.
fn streams(sections: &[i64], is_interleaved: bool) -> Result<Vec<usize>> {
    /// No head has more pairs. The bound keeps a wrong section from filling the memory.
    const MOST: i64 = 1 << 16;
    let &[time, height, width] = sections else {
        return Err(error!(InvalidGraph, "mrope_section has {} sizes, expected 3", sections.len()));
    };
    let fits = sections.iter().all(|size| (0..=MOST).contains(size));
    ensure!(fits, InvalidGraph, "mrope_section is {sections:?}, expected sizes of at least 0");
    let stream = |pair: i64| match (is_interleaved, pair % 3) {
        (true, 1) if pair < 3 * height => 1,
        (true, 2) if pair < 3 * width => 2,
        (true, _) => 0,
        (false, _) => usize::from(pair >= time) + usize::from(pair >= time + height),
    };
    Ok((0..time + height + width).map(stream).collect())
}

fn infer_sections(cx: &mut InferCx<'_>) -> Result<()> {
    let layout = cx.attrs.find_int("mrope_layout").unwrap_or(0);
    ensure!(matches!(layout, 0 | 1), InvalidGraph, "mrope_layout is {layout}, expected 0 or 1");
    let pairs = streams(cx.attrs.ints("mrope_section")?, layout == 1)?.len() as i64;
    if let Some([_, half]) = cx.shape(2) {
        cx.require_equal("the width of cos_cache", half, &Dim::constant(pairs))?;
    }
    if let Some(ids) = cx.shape(1) {
        let [streams, _, _] = ids else {
            return Err(error!(InvalidGraph, "position_ids has rank {}, expected 3", ids.len()));
        };
        cx.require_equal("the first size of position_ids", streams, &Dim::constant(3))?;
    }
    infer(cx)
}

/// Selects cosines and sines for each token and pair, for the standard's `RotaryEmbedding`.
fn lower_sections(draft: &mut Draft<'_>) -> Result<()> {
    let given = |name: &str| match draft.attr(name) {
        Some(Attribute::Int(value)) => *value,
        _ => 0,
    };
    let Some(Attribute::Ints(sections)) = draft.attr("mrope_section") else {
        return Err(error!(InvalidGraph, "mrope_section must be a list of integers"));
    };
    let streams = streams(sections, given("mrope_layout") == 1)?;
    let scale = match draft.attr("scale") {
        Some(Attribute::Float(scale)) => *scale,
        _ => 1.0,
    };
    let (is_interleaved, mut heads) = (given("interleaved"), given("num_heads"));
    let (half, dtype) = (streams.len(), draft.dtype(0)?);
    if let (0, Some([_, _, hidden])) = (heads, draft.shape(0).as_deref()) {
        // Without `num_heads`, a head is as wide as the caches cover.
        let hidden = hidden.as_constant();
        let hidden =
            hidden.ok_or_else(|| error!(NotImplemented, "num_heads for an input of unknown width"))?;
        heads = hidden.checked_div(2 * half as i64).unwrap_or(0);
    }
    let mut mask = vec![0.0_f32; 3 * half];
    for (pair, stream) in streams.iter().enumerate() {
        mask.iter_mut().skip(stream * half + pair).take(1).for_each(|chosen| *chosen = scale);
    }
    let mask = draft.constant(Tensor::from_slice(&[3, 1, 1, half], &mask)?);
    let to = [("to", Attribute::Int(i64::from(dtype.onnx_code())))];
    let mask = draft.emit("Cast", &[mask], &to)?;
    let (input, ids, axis) = (draft.required(0)?, draft.required(1)?, draft.constant_ints(&[0])?);
    let mut caches = [draft.required(2)?, draft.required(3)?];
    for cache in &mut caches {
        // [3, batch, sequence, pairs], of which one stream per pair is left.
        let rows = draft.emit("Gather", &[*cache, ids], &[])?;
        let chosen = draft.emit("Mul", &[rows, mask], &[])?;
        *cache = draft.emit("ReduceSum", &[chosen, axis], &[("keepdims", Attribute::Int(0))])?;
    }
    let [cos, sin] = caches;
    let attrs = [
        ("interleaved", Attribute::Int(is_interleaved)),
        ("num_heads", Attribute::Int(heads)),
        ("rotary_embedding_dim", Attribute::Int(2 * half as i64)),
    ];
    let result = draft.emit("RotaryEmbedding", &[input, cos, sin], &attrs)?;
    draft.replace(&[result])
}

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let given = |name: &str| cx.attrs.find_int(name).unwrap_or(0) > 0;
    let complete = given("num_heads") || !given("rotary_embedding_dim");
    ensure!(complete, InvalidGraph, "num_heads must be given with rotary_embedding_dim");
    let Some(shape) = cx.shape(0) else { return Ok(()) };
    ensure!(matches!(shape.len(), 3 | 4), InvalidGraph, "input has rank {}, expected 3 or 4", shape.len());
    cx.set_shape(0, shape.to_vec())
}
