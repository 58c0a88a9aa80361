//! Gradients of `MultiHeadAttention` and `RotaryEmbedding` of `com.microsoft`, by decomposition
//! into differentiable operators.

use crate::dtype::DType;
use crate::ir::{Attribute, ValueId};
use crate::ops::nn::attention_gradients::{Heads, by_heads, causal, places, rotate, side_by_side};
use crate::spec::GradCx;
use crate::{Result, ensure, error};

fn axis(axis: i64) -> [(&'static str, Attribute); 1] {
    [("axis", Attribute::Int(axis))]
}

/// Decomposes `MultiHeadAttention`; returns the output and the present keys and values.
pub(super) fn multi_head_parts(cx: &mut GradCx<'_>) -> Result<Vec<ValueId>> {
    let shares = [8, 9].iter().any(|&index| cx.find_input(index).is_some());
    ensure!(
        !shares,
        NotImplemented,
        "a past in a buffer that is shared or gathered by beams has no gradient"
    );
    let mut sides = queries_keys_values(cx)?;
    for (side, past) in sides.iter_mut().skip(1).zip([6, 7]) {
        if let Some(past) = cx.find_input(past) {
            // [batch, heads, past + new keys, size].
            *side = cx.emit("Concat", &[past, *side], &axis(2))?;
        }
    }
    let [q, k, v] = sides;
    let dtype = cx.dtype(q)?;
    // Padding mask, attention bias and causal mask are terms that are added to the scores.
    let mut added = Vec::new();
    if let Some(mask) = cx.find_input(4) {
        added.push(padding(cx, mask, k)?);
    }
    added.extend(cx.find_input(5));
    if cx.attrs().flag("unidirectional")? {
        let offset = match cx.find_input(6) {
            Some(past) => Some(cx.sizes(past, 2, 3)?),
            None => None,
        };
        let places = places(cx, (q, k), offset)?;
        added.push(causal(cx, places, dtype)?);
    }
    // A scale of 0 means the default, one over the root of the head size.
    let scale = cx.attrs().find_float("scale").filter(|scale| *scale != 0.0);
    let result = Heads { q, k, v, scale, softcap: 0.0, added, hidden_is_nan: false }.attend(cx)?;
    Ok(vec![side_by_side(cx, result)?, k, v])
}

/// Emits queries, keys and values with their bias, each `[batch, heads, rows, size]`.
fn queries_keys_values(cx: &mut GradCx<'_>) -> Result<[ValueId; 3]> {
    let heads = cx.attrs().int("num_heads")?;
    let query = cx.input(0)?;
    // Splits a packed tensor `[batch, rows, heads, parts, size]` into its parts, each
    // `[batch, rows, heads * size]`.
    let packed = |cx: &mut GradCx<'_>, value: ValueId, count: i64| -> Result<Vec<ValueId>> {
        // `Split` keeps the axis of parts with size 1, and the reshape merges it with heads and
        // sizes.
        let attrs = [axis(3)[0].clone(), ("num_outputs", Attribute::Int(count))];
        let parts = cx.emit_many("Split", &[Some(value)], &attrs, count as usize)?;
        parts.into_iter().map(|part| cx.reshape_to(part, &[0, 0, -1])).collect()
    };
    let mut sides = match (cx.rank(query)?, cx.find_input(1)) {
        (5, _) => packed(cx, query, 3)?,
        (_, Some(key)) if cx.rank(key)? == 5 => [vec![query], packed(cx, key, 2)?].concat(),
        (_, Some(key)) => vec![query, key, cx.input(2)?],
        (_, None) => return Err(error!(InvalidGraph, "key is missing, and query is no packed QKV")),
    };
    let crossed = sides.get(1).is_some_and(|key| cx.rank(*key).is_ok_and(|rank| rank == 4));
    if let Some(bias) = cx.find_input(3) {
        let mut sizes = Vec::with_capacity(3);
        for side in &sides {
            let rank = cx.rank(*side)?;
            sizes.push(match rank {
                3 => cx.sizes(*side, 2, 3)?,
                _ => {
                    let (heads, size) = (cx.sizes(*side, 1, 2)?, cx.sizes(*side, 3, 4)?);
                    cx.emit("Mul", &[heads, size], &[])?
                }
            });
        }
        let sizes = cx.join(&sizes)?;
        // One bias vector holds those of queries, keys and values, in this order.
        let parts = cx.emit_many("Split", &[Some(bias), Some(sizes)], &axis(0), 3)?;
        // In cross-attention keys and values of rank 4 already contain their bias, so only queries
        // get it.
        let biased = if crossed { 1 } else { 3 };
        for (side, bias) in sides.iter_mut().zip(parts).take(biased) {
            *side = cx.emit("Add", &[*side, bias], &[])?;
        }
    }
    for side in &mut sides {
        if cx.rank(*side)? == 3 {
            *side = by_heads(cx, *side, heads)?;
        }
    }
    <[ValueId; 3]>::try_from(sides).map_err(|_| error!(Fail, "attention has three sides"))
}

/// Emits the mask that padding adds to the scores: `mask_filter_value` for the keys to ignore, else
/// 0.
fn padding(cx: &mut GradCx<'_>, mask: ValueId, k: ValueId) -> Result<ValueId> {
    let dtype = cx.dtype(k)?;
    // A filter such as -1e9 is infinite in float16. The scores are computed in float32 as well.
    let wide = if matches!(dtype, DType::F16 | DType::BF16) { DType::F32 } else { dtype };
    let (rank, filter) = (cx.rank(mask)?, cx.attrs().find_float("mask_filter_value").unwrap_or(-10000.0));
    let holds = match rank {
        // One number per sequence is the count of its valid keys.
        1 if cx.size_at(mask, 0)? == cx.size_at(k, 0)? => {
            let keys = cx.sizes(k, 2, 3)?;
            let keys = cx.range(keys)?;
            let lengths = cx.cast(mask, DType::I64)?;
            let lengths = cx.reshape_to(lengths, &[-1, 1, 1, 1])?;
            cx.emit("Less", &[keys, lengths], &[])?
        }
        2 | 3 => {
            // A mask of [batch, keys] or [batch, queries, keys] broadcasts over the axes that it
            // lacks.
            let axes: &[i64] = if rank == 2 { &[1, 2] } else { &[1] };
            let axes = cx.ints(axes)?;
            let mask = cx.cast(mask, DType::Bool)?;
            cx.emit("Unsqueeze", &[mask, axes], &[])?
        }
        _ => return Err(error!(NotImplemented, "a mask of padding in this form has no gradient")),
    };
    let (zero, filter) = (cx.number(0.0, wide)?, cx.number(f64::from(filter), wide)?);
    cx.emit("Where", &[holds, zero, filter], &[])
}

/// Decomposes `RotaryEmbedding`; returns its output.
pub(super) fn rotary_parts(cx: &mut GradCx<'_>) -> Result<Vec<ValueId>> {
    let (x, ids) = (cx.input(0)?, cx.input(1)?);
    let is_packed = cx.attrs().find_int("is_packed_batching").unwrap_or(0) != 0;
    ensure!(!is_packed, NotImplemented, "is_packed_batching has no gradient");
    let is_flat = cx.rank(x)? == 3;
    let at = if is_flat { 1 } else { 2 };
    // A single number is the position of the first token, in every sequence of the batch.
    let ids = match cx.rank(ids)? {
        1 => {
            let count = cx.sizes(x, at, at + 1)?;
            let places = cx.range(count)?;
            let ids = cx.emit("Add", &[places, ids], &[])?;
            cx.reshape_to(ids, &[1, -1])?
        }
        _ => ids,
    };
    let mut caches = [cx.input(2)?, cx.input(3)?];
    let width = cx.size_at(caches[0], 1)?.as_constant().unwrap_or(0);
    for cache in &mut caches {
        *cache = cx.emit("Gather", &[*cache, ids], &axis(0))?;
    }
    let mut heads = cx.attrs().find_int("num_heads").unwrap_or(0);
    if is_flat && heads == 0 {
        let all = cx.size_at(x, 2)?.as_constant().filter(|_| width > 0);
        let all =
            all.ok_or_else(|| error!(NotImplemented, "the gradient of heads that only the run counts"))?;
        // A head has two elements for each column of the caches.
        heads = all / (2 * width);
    }
    rotate(cx, x, caches, heads).map(|y| vec![y])
}
