//! `MultiHeadAttention`: attention over projected queries, keys and values, with a padding mask and
//! a KV cache.

use super::attention_gradients;
use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ops;
use crate::ops::batch;
use crate::spec::{AttrKind, BatchRule, Cost, Grad, InferCx, MICROSOFT, OP, OpSpec, attr, one, opt, var};
use crate::{Result, ensure, error};

/// The types in which attention computes.
pub(super) const ATTENTION_TYPES: TypeSet = TypeSet::of(&[DType::F32, DType::F16, DType::BF16]);

static MULTI_HEAD_ATTENTION: OpSpec = OpSpec {
    domain: MICROSOFT,
    name: "MultiHeadAttention",
    grad: Grad::Parts(attention_gradients::multi_head_parts),
    since: 1,
    inputs: &[
        one("query", "T"),
        opt("key", "T"),
        opt("value", "T"),
        opt("bias", "T"),
        opt("key_padding_mask", "M"),
        opt("attention_bias", "T"),
        opt("past_key", "T"),
        opt("past_value", "T"),
        opt("past_sequence_length", "M").host(),
        opt("cache_indirection", "M"),
    ],
    outputs: &[one("output", "T"), opt("present_key", "T"), opt("present_value", "T"), opt("qk", "QK")],
    types: &[var("T", ATTENTION_TYPES), var("QK", ATTENTION_TYPES), var("M", TypeSet::of(&[DType::I32]))],
    attrs: &[
        attr::optional("mask_filter_value", AttrKind::Float),
        attr::required("num_heads", AttrKind::Int),
        attr::optional("scale", AttrKind::Float),
        attr::int("unidirectional", 0),
    ],
    cost: Cost::Compute,
    infer,
    batch: BatchRule::Rule(batch::multi_head),
    ..OP
};

ops![MULTI_HEAD_ATTENTION];

/// Returns a head count from an attribute.
pub(super) fn head_count(cx: &InferCx<'_>, name: &str) -> Result<Dim> {
    let count = cx.attrs.int(name)?;
    ensure!(count > 0, InvalidGraph, "{name} is {count}, expected at least 1");
    Ok(Dim::constant(count))
}

/// Returns the head size: the width divided by the head count.
pub(super) fn head_size(name: &str, width: &Dim, heads: &Dim) -> Result<Dim> {
    // A remainder by 0 would panic. A product of head counts that overflows is no constant.
    let exact = match (width.as_constant(), heads.as_constant()) {
        (Some(width), Some(heads)) => heads > 0 && width % heads == 0,
        _ => true,
    };
    ensure!(exact, InvalidGraph, "{name} has width {width}, expected a multiple of the {heads} heads");
    Ok(width.floor_div(heads))
}

/// Returns the number of new keys and values, and their head sizes. `None` if their shapes are
/// unknown.
fn fresh_keys(cx: &InferCx<'_>, heads: &Dim, query: &[Dim]) -> Result<Option<[Dim; 3]>> {
    // Rank 5 is packed QKV, [batch, sequence, heads, 3, size].
    if let [_, sequence, _, _, size] = query {
        return Ok(Some([sequence.clone(), size.clone(), size.clone()]));
    }
    let Some(key) = cx.shape(1) else {
        let known = cx.has_input(1);
        return if known {
            Ok(None)
        } else {
            Err(error!(InvalidGraph, "key is missing, and query is no packed QKV"))
        };
    };
    match (key, cx.shape(2)) {
        // Rank 5 is packed KV, [batch, sequence, heads, 2, size].
        ([_, sequence, _, _, size], _) => Ok(Some([sequence.clone(), size.clone(), size.clone()])),
        ([_, sequence, width], Some([_, _, value_width])) => {
            let sizes = [head_size("key", width, heads)?, head_size("value", value_width, heads)?];
            let [size, value_size] = sizes;
            Ok(Some([sequence.clone(), size, value_size]))
        }
        // Rank 4 is cross-attention, [batch, heads, sequence, size].
        ([_, _, sequence, size], Some([_, _, _, value_size])) => {
            Ok(Some([sequence.clone(), size.clone(), value_size.clone()]))
        }
        (_, None) if cx.has_input(2) => Ok(None),
        (key, value) => Err(error!(
            InvalidGraph,
            "key and value have ranks {} and {:?}, expected 3 and 3, 4 and 4, or 5 and none",
            key.len(),
            value.map(<[Dim]>::len)
        )),
    }
}

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let heads = head_count(cx, "num_heads")?;
    ensure!(
        cx.has_input(6) == cx.has_input(7),
        InvalidGraph,
        "past_key and past_value must be given together"
    );
    let Some(query) = cx.shape(0) else { return Ok(()) };
    let (batch, queries) = match query {
        [batch, queries, _] | [batch, queries, _, _, _] => (batch.clone(), queries.clone()),
        _ => return Err(error!(InvalidGraph, "query has rank {}, expected 3 or 5", query.len())),
    };
    // Values may have another head size than queries and keys, which sets the output's width.
    let Some([fresh, size, value_size]) = fresh_keys(cx, &heads, query)? else { return Ok(()) };
    cx.set_shape(0, vec![batch.clone(), queries.clone(), &heads * &value_size])?;
    let past = match cx.shape(6) {
        None if cx.has_input(6) => return Ok(()),
        None => Dim::constant(0),
        Some([_, _, past, _]) => past.clone(),
        Some(shape) => return Err(error!(InvalidGraph, "past_key has rank {}, expected 4", shape.len())),
    };
    // With `past_sequence_length` the past is a preallocated buffer that the present shares.
    let (present, total) = if cx.has_input(8) {
        let length = cx.dims(8).and_then(|length| length.first().cloned());
        (past, length.map_or_else(|| cx.fresh(), |length| length + fresh))
    } else {
        (&past + &fresh, past + fresh)
    };
    cx.set_shape(1, vec![batch.clone(), heads.clone(), present.clone(), size])?;
    cx.set_shape(2, vec![batch.clone(), heads.clone(), present, value_size])?;
    let dtype = cx.dtype(0)?;
    cx.set(3, dtype, Some(vec![batch, heads, queries, total]));
    Ok(())
}
