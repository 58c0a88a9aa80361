//! `DecoderMaskedMultiHeadAttention`: one decoding step. It decomposes into `MultiHeadAttention`,
//! whose inputs have another order.

use super::attention_heads::{head_count, head_size};
use super::attention_projected::{common_attrs, shares_buffer, split_projected};
use super::{agree, check_rank};
use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ir::ValueIds;
use crate::ops;
use crate::spec::{AttrKind, Cost, Draft, InferCx, MICROSOFT, OP, OpSpec, attr, one, opt, var};
use crate::{Result, ensure, error};

const FLOATS: TypeSet = TypeSet::of(&[DType::F32, DType::F16]);

static DECODER_MASKED_MULTI_HEAD_ATTENTION: OpSpec = OpSpec {
    domain: MICROSOFT,
    name: "DecoderMaskedMultiHeadAttention",
    since: 1,
    inputs: &[
        one("query", "T"),
        opt("key", "T"),
        opt("value", "T"),
        opt("mask_index", "M"),
        opt("attention_bias", "T"),
        opt("past_key", "T"),
        opt("past_value", "T"),
        opt("past_sequence_length", "M").host(),
        opt("beam_width", "M").host(),
        opt("cache_indirection", "M"),
        opt("bias", "T"),
    ],
    outputs: &[one("output", "T"), opt("present_key", "T"), opt("present_value", "T"), opt("qk", "QK")],
    types: &[var("T", FLOATS), var("QK", FLOATS), var("M", TypeSet::of(&[DType::I32]))],
    attrs: &[
        attr::optional("mask_filter_value", AttrKind::Float),
        attr::required("num_heads", AttrKind::Int),
        attr::optional("output_qk", AttrKind::Int),
        attr::optional("past_present_share_buffer", AttrKind::Int),
        attr::optional("scale", AttrKind::Float),
    ],
    cost: Cost::Compute,
    infer,
    lower: Some(lower),
    ..OP
};

ops![DECODER_MASKED_MULTI_HEAD_ATTENTION];

/// The new keys and values of a node: their number, and their head sizes.
struct Keys {
    fresh: Dim,
    size: Dim,
    value_size: Dim,
}

/// Returns the new keys and values, which a packed query holds as well. `None` if their shapes are
/// unknown.
fn keys(cx: &InferCx<'_>, width: &Dim, heads: &Dim) -> Result<Option<Keys>> {
    ensure!(cx.has_input(1) == cx.has_input(2), InvalidGraph, "key and value must be given together");
    let one = Dim::constant(1);
    if !cx.has_input(1) {
        // A packed query holds queries, keys and values side by side.
        let size = head_size("query", width, &(heads * 3))?;
        return Ok(Some(Keys { fresh: one, value_size: size.clone(), size }));
    }
    match (cx.shape(1), cx.shape(2)) {
        (Some([_, fresh, width]), Some([_, _, value_width])) => {
            agree("the length of key", &one, fresh)?;
            let (size, value_size) =
                (head_size("key", width, heads)?, head_size("value", value_width, heads)?);
            Ok(Some(Keys { fresh: one, size, value_size }))
        }
        (Some([_, n, fresh, size]), Some([_, _, _, value_size])) => {
            // Cross-attention: keys and values are already split into heads and complete, so there
            // is no past.
            agree("the count of heads of key", heads, n)?;
            let past = cx.has_input(5);
            ensure!(!past, InvalidGraph, "past_key for a key of rank 4, which holds all keys");
            Ok(Some(Keys { fresh: fresh.clone(), size: size.clone(), value_size: value_size.clone() }))
        }
        (Some(key), Some(value)) => Err(error!(
            InvalidGraph,
            "key and value have ranks {} and {}, expected 3 or 4 of both",
            key.len(),
            value.len()
        )),
        _ => Ok(None),
    }
}

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let heads = head_count(cx, "num_heads")?;
    for (index, what, rank) in [
        (0, "query", 3),
        (3, "mask_index", 2),
        (4, "attention_bias", 4),
        (5, "past_key", 4),
        (6, "past_value", 4),
        (9, "cache_indirection", 3),
        (10, "bias", 1),
    ] {
        check_rank(cx, index, what, rank)?;
    }
    ensure!(
        cx.has_input(5) == cx.has_input(6),
        InvalidGraph,
        "past_key and past_value must be given together"
    );
    let shares = cx.attrs.find_int("past_present_share_buffer").unwrap_or(0) != 0;
    // Without a length, the valid part of a shared buffer is unknown.
    let complete = !shares || (cx.has_input(5) && cx.has_input(7));
    ensure!(complete, InvalidGraph, "past_present_share_buffer needs past_key and past_sequence_length");
    check_beams(cx, shares)?;
    let Some([batch, queries, width]) = cx.shape(0) else { return Ok(()) };
    cx.require_equal("the length of query", queries, &Dim::constant(1))?;
    let Some(Keys { fresh, size, value_size }) = keys(cx, width, &heads)? else { return Ok(()) };
    cx.set_shape(0, vec![batch.clone(), Dim::constant(1), &heads * &value_size])?;
    // An omitted past is empty; a past of unknown shape leaves the present open.
    let past = match cx.shape(5) {
        None if cx.has_input(5) => return Ok(()),
        Some([_, _, past, _]) => past.clone(),
        _ => Dim::constant(0),
    };
    let (present, total) = if shares {
        // The past is a preallocated buffer, of which `past_sequence_length` entries are valid. The
        // present is the same buffer.
        let length = cx.dims(7).and_then(|length| length.first().cloned());
        (past, length.map_or_else(|| cx.fresh(), |length| length + fresh))
    } else {
        (&past + &fresh, past + fresh)
    };
    cx.set_shape(1, vec![batch.clone(), heads.clone(), present.clone(), size])?;
    cx.set_shape(2, vec![batch.clone(), heads.clone(), present, value_size])?;
    let dtype = cx.dtype(0)?;
    cx.set(3, dtype, Some(vec![batch.clone(), heads, Dim::constant(1), total]));
    Ok(())
}

/// Checks the beam width, if it is known, against `cache_indirection`, which says for each beam
/// where its tokens are in the cache.
fn check_beams(cx: &InferCx<'_>, shares: bool) -> Result<()> {
    let has_table = cx.has_input(9);
    ensure!(shares || !has_table, InvalidGraph, "cache_indirection needs past_present_share_buffer");
    let Some(&[width]) = cx.ints(8).as_deref() else { return Ok(()) };
    ensure!(has_table || width == 1, InvalidGraph, "beam_width is {width} without cache_indirection");
    match cx.shape(9) {
        Some([_, beams, _]) => agree("the count of beams of cache_indirection", &Dim::constant(width), beams),
        _ => Ok(()),
    }
}

fn lower(draft: &mut Draft<'_>) -> Result<()> {
    let mut inputs: ValueIds = match draft.input(1) {
        Some(_) => (0..3).map(|index| draft.input(index)).collect(),
        // Without keys the query is packed.
        None => split_projected(draft, draft.required(0)?)?.map(Some).as_slice().into(),
    };
    // `MultiHeadAttention` orders its inputs bias, mask, attention bias, past keys, past values.
    inputs.extend([10, 3, 4, 5, 6].map(|index| draft.input(index)));
    if shares_buffer(draft) {
        // `beam_width` has no counterpart, because `cache_indirection` has an axis of beams.
        inputs.extend([7, 9].map(|index| draft.input(index)));
    }
    let attrs = common_attrs(draft);
    draft.op = "MultiHeadAttention".to_string();
    draft.inputs = inputs;
    draft.attrs = attrs.into_iter().map(|(name, value)| (name.to_string(), value)).collect();
    Ok(())
}
