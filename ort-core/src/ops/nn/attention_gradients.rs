//! Attention and rotary embeddings as primitive operators, for their gradients.
//!
//! The forward pass keeps its fused kernel and stores no scores. The backward pass recomputes the
//! attention weights from Q and K, as in Dao et al., FlashAttention, 2022, 3.1.

use crate::dim::Dim;
use crate::dtype::DType;
use crate::ir::{Attribute, ValueId};
use crate::spec::GradCx;
use crate::{Result, ensure, error};

/// An internal attribute of `Attention`: if it is 1, a query whose scores are all -inf returns NaN,
/// as the unfused softmax would. A fusion rule sets it. Otherwise such a query returns 0.
pub const HIDDEN_IS_NAN: &str = "hidden_is_nan";

/// Q, K and V by heads, and the additive masks of the scores.
pub(in crate::ops) struct Heads {
    /// `[batch, heads, queries, size]`.
    pub(in crate::ops) q: ValueId,
    /// `[batch, heads, keys, size]`; under grouped-query attention a head serves several query
    /// heads.
    pub(in crate::ops) k: ValueId,
    pub(in crate::ops) v: ValueId,
    /// The factor of the scores; `1 / sqrt(head size)` if absent.
    pub(in crate::ops) scale: Option<f32>,
    pub(in crate::ops) softcap: f32,
    /// Additive masks, broadcast against the scores. Minus infinity hides a key.
    pub(in crate::ops) added: Vec<ValueId>,
    /// Whether a query that sees no key returns NaN instead of 0.
    pub(in crate::ops) hidden_is_nan: bool,
}

fn axis(axis: i64) -> [(&'static str, Attribute); 1] {
    [("axis", Attribute::Int(axis))]
}

/// The accumulator type: at least single precision.
fn wide(dtype: DType) -> DType {
    if matches!(dtype, DType::F16 | DType::BF16) { DType::F32 } else { dtype }
}

/// Splits heads: `[batch, rows, heads * size]` becomes `[batch, heads, rows, size]`.
pub(in crate::ops) fn by_heads(cx: &mut GradCx<'_>, value: ValueId, heads: i64) -> Result<ValueId> {
    // A 0 copies the size, so batch and rows may be symbolic.
    let split = cx.reshape_to(value, &[0, 0, heads, -1])?;
    cx.transpose(split, &[0, 2, 1, 3])
}

/// Concatenates heads, the inverse of [`by_heads`].
pub(in crate::ops) fn side_by_side(cx: &mut GradCx<'_>, value: ValueId) -> Result<ValueId> {
    let turned = cx.transpose(value, &[0, 2, 1, 3])?;
    cx.reshape_to(turned, &[0, 0, -1])
}

/// An additive mask: 0 if the condition holds, minus infinity otherwise.
fn hidden_unless(cx: &mut GradCx<'_>, holds: ValueId, dtype: DType) -> Result<ValueId> {
    let (zero, hidden) = (cx.number(0.0, dtype)?, cx.number(f64::NEG_INFINITY, dtype)?);
    cx.emit("Where", &[holds, zero, hidden], &[])
}

impl Heads {
    /// Builds the attention and returns the output, `[batch, heads, queries, value size]`.
    pub(in crate::ops) fn attend(self, cx: &mut GradCx<'_>) -> Result<ValueId> {
        let own = cx.dtype(self.q)?;
        let dtype = wide(own);
        let q = cx.cast(self.q, dtype)?;
        let (k, v) = (self.for_queries(cx, self.k, dtype)?, self.for_queries(cx, self.v, dtype)?);
        // The default of the standard and of ONNX Runtime: one over the root of the head size.
        let scale = match self.scale {
            Some(scale) => cx.number(f64::from(scale), dtype)?,
            None => {
                let size = cx.sizes(q, 3, 4)?;
                let size = cx.cast(size, dtype)?;
                let root = cx.emit("Sqrt", &[size], &[])?;
                cx.emit("Reciprocal", &[root], &[])?
            }
        };
        let q = cx.emit("Mul", &[q, scale], &[])?;
        // Scores are [batch, heads, queries, keys].
        let turned = cx.transposed(k)?;
        let mut scores = cx.emit("MatMul", &[q, turned], &[])?;
        if self.softcap > 0.0 {
            let cap = cx.number(f64::from(self.softcap), dtype)?;
            let part = cx.emit("Div", &[scores, cap], &[])?;
            let part = cx.emit("Tanh", &[part], &[])?;
            scores = cx.emit("Mul", &[part, cap], &[])?;
        }
        let weights = self.weigh(cx, scores)?;
        let result = cx.emit("MatMul", &[weights, v], &[])?;
        cx.cast(result, own)
    }

    /// Keys or values with as many heads as Q: each KV head is repeated for its group of query
    /// heads.
    fn for_queries(&self, cx: &mut GradCx<'_>, value: ValueId, dtype: DType) -> Result<ValueId> {
        let value = cx.cast(value, dtype)?;
        let (heads, own) = (cx.size_at(self.q, 1)?, cx.size_at(value, 1)?);
        if heads == own {
            return Ok(value);
        }
        let (Some(heads), Some(own)) = (heads.as_constant(), own.as_constant().filter(|own| *own > 0)) else {
            return Err(error!(NotImplemented, "the gradient of attention whose heads only the run counts"));
        };
        let (two, group) = (cx.ints(&[2])?, cx.ints(&[heads / own])?);
        // Unsqueeze, expand, reshape: repeats each head `group` times in a row, as the standard
        // maps heads.
        let apart = cx.emit("Unsqueeze", &[value, two], &[])?;
        let (before, behind) = (cx.sizes(value, 0, 2)?, cx.sizes(value, 2, 4)?);
        let shape = cx.join(&[before, group, behind])?;
        let copies = cx.emit("Expand", &[apart, shape], &[])?;
        let all = cx.ints(&[0, heads])?;
        let shape = cx.join(&[all, behind])?;
        cx.reshape(copies, shape)
    }

    /// Masked softmax of the scores. A query that sees no key has weights of 0, or NaN if
    /// `hidden_is_nan`.
    fn weigh(&self, cx: &mut GradCx<'_>, mut scores: ValueId) -> Result<ValueId> {
        let dtype = cx.dtype(scores)?;
        if self.hidden_is_nan {
            for &added in &self.added {
                let added = cx.cast(added, dtype)?;
                scores = cx.emit("Add", &[scores, added], &[])?;
            }
            return cx.emit("Softmax", &[scores], &axis(-1));
        }
        // A finite stand-in for -inf keeps the softmax of a fully masked row free of NaN. It is
        // below every real score, and all masks together still add up to a finite number.
        let least = if dtype == DType::F64 { -1e300 } else { -3e38 / self.added.len().max(1) as f64 };
        let least = cx.number(least, dtype)?;
        let hidden = cx.number(f64::NEG_INFINITY, dtype)?;
        let mut seen: Option<ValueId> = None;
        for &added in &self.added {
            let added = cx.cast(added, dtype)?;
            let here = cx.emit("Greater", &[added, hidden], &[])?;
            seen = Some(match seen {
                None => here,
                Some(seen) => cx.emit("And", &[seen, here], &[])?,
            });
            let added = cx.emit("Where", &[here, added, least], &[])?;
            scores = cx.emit("Add", &[scores, added], &[])?;
        }
        let weights = cx.emit("Softmax", &[scores], &axis(-1))?;
        match seen {
            None => Ok(weights),
            // A fully masked row has a softmax over the stand-ins alone: its weights become 0 here.
            Some(seen) => {
                let zero = cx.number(0.0, dtype)?;
                cx.emit("Where", &[seen, weights, zero], &[])
            }
        }
    }
}

/// The positions of the queries and of the keys in the sequence: `[queries, 1]`, with leading batch
/// dimensions if `offset` has them, and `[keys]`. `offset` is the position of the first query.
pub(in crate::ops) fn places(
    cx: &mut GradCx<'_>,
    (q, k): (ValueId, ValueId),
    offset: Option<ValueId>,
) -> Result<[ValueId; 2]> {
    let (queries, keys) = (cx.sizes(q, 2, 3)?, cx.sizes(k, 2, 3)?);
    let (rows, columns) = (cx.range(queries)?, cx.range(keys)?);
    let mut rows = cx.reshape_to(rows, &[-1, 1])?;
    if let Some(offset) = offset {
        rows = cx.emit("Add", &[rows, offset], &[])?;
    }
    Ok([rows, columns])
}

/// The causal mask: hides the keys after each query's position.
pub(in crate::ops) fn causal(
    cx: &mut GradCx<'_>,
    [rows, columns]: [ValueId; 2],
    dtype: DType,
) -> Result<ValueId> {
    let holds = cx.emit("LessOrEqual", &[columns, rows], &[])?;
    hidden_unless(cx, holds, wide(dtype))
}

/// Decomposes the standard's `Attention`.
///
/// Its outputs are Y and the present keys and values; `qk_matmul_output` has no gradient.
pub(super) fn attention_parts(cx: &mut GradCx<'_>) -> Result<Vec<ValueId>> {
    let mut sides = Vec::with_capacity(3);
    let is_flat = cx.rank(cx.input(0)?)? == 3;
    for (index, heads) in [(0, "q_num_heads"), (1, "kv_num_heads"), (2, "kv_num_heads")] {
        let mut value = cx.input(index)?;
        if is_flat {
            value = by_heads(cx, value, cx.attrs().int(heads)?)?;
        }
        // New keys and values are appended to the KV cache.
        if let Some(past) = cx.find_input(index + 3).filter(|_| index > 0) {
            value = cx.emit("Concat", &[past, value], &axis(2))?;
        }
        sides.push(value);
    }
    let [q, k, v] = sides[..] else { return Err(error!(Fail, "Attention has three sides")) };
    let added = hidden_keys(cx, q, k)?;
    let softcap = cx.attrs().float("softcap")?;
    let hidden_is_nan = cx.attrs().find_int(HIDDEN_IS_NAN) == Some(1);
    let heads = Heads { q, k, v, scale: cx.attrs().find_float("scale"), softcap, added, hidden_is_nan };
    let result = heads.attend(cx)?;
    let result = if is_flat { side_by_side(cx, result)? } else { result };
    Ok(vec![result, k, v])
}

/// The additive masks of the node: its mask input, causality, sliding windows and sequence lengths.
fn hidden_keys(cx: &mut GradCx<'_>, q: ValueId, k: ValueId) -> Result<Vec<ValueId>> {
    let dtype = wide(cx.dtype(q)?);
    let mut added = Vec::new();
    if let Some(mask) = cx.find_input(3) {
        added.push(mask_of(cx, mask, k, dtype)?);
    }
    let lengths = match cx.find_input(6) {
        Some(lengths) => Some(cx.reshape_to(lengths, &[-1, 1, 1, 1])?),
        None => None,
    };
    let attrs = cx.attrs();
    let is_causal = attrs.flag("is_causal")?;
    let windows = [attrs.int("left_window_size")?, attrs.int("right_window_size")?];
    if !is_causal && windows.iter().all(|size| *size < 0) && lengths.is_none() {
        return Ok(added);
    }
    // The first query's position: after the cache, or such that the last query meets the last valid
    // key. Without either, queries and keys both count from 0.
    let offset = match (cx.find_input(4), lengths) {
        (Some(past), _) => Some(cx.sizes(past, 2, 3)?),
        (None, Some(lengths)) => {
            let queries = cx.sizes(q, 2, 3)?;
            Some(cx.emit("Sub", &[lengths, queries], &[])?)
        }
        (None, None) => None,
    };
    let [rows, columns] = places(cx, (q, k), offset)?;
    if is_causal {
        added.push(causal(cx, [rows, columns], dtype)?);
    }
    // A window of size w shows the keys from w before the query to w after it; -1 is no limit.
    for (size, sign) in windows.into_iter().zip([-1, 1]).filter(|(size, _)| *size >= 0) {
        let distance = cx.integer(sign * size)?;
        let end = cx.emit("Add", &[rows, distance], &[])?;
        let order = if sign < 0 { [end, columns] } else { [columns, end] };
        let holds = cx.emit("LessOrEqual", &order, &[])?;
        added.push(hidden_unless(cx, holds, dtype)?);
    }
    if let Some(lengths) = lengths {
        let holds = cx.emit("Less", &[columns, lengths], &[])?;
        added.push(hidden_unless(cx, holds, dtype)?);
    }
    Ok(added)
}

/// The mask input as an additive mask of the keys' length. The standard hides the keys that a
/// shorter mask does not reach.
fn mask_of(cx: &mut GradCx<'_>, mask: ValueId, k: ValueId, dtype: DType) -> Result<ValueId> {
    let added = match cx.dtype(mask)? {
        DType::Bool => hidden_unless(cx, mask, dtype)?,
        _ => cx.cast(mask, dtype)?,
    };
    let rank = cx.rank(mask)?;
    ensure!(rank > 0, InvalidGraph, "a mask without dimensions");
    if cx.size_at(mask, rank - 1)? == cx.size_at(k, 2)? {
        return Ok(added);
    }
    let (there, keys) = (cx.sizes(mask, rank - 1, rank)?, cx.sizes(k, 2, 3)?);
    let missing = cx.emit("Sub", &[keys, there], &[])?;
    let (zero, last) = (cx.ints(&[0])?, cx.ints(&[-1])?);
    // Pads on the last axis alone: none before it, the missing keys behind.
    let pads = cx.join(&[zero, missing])?;
    let hidden = cx.number(f64::NEG_INFINITY, dtype)?;
    cx.emit("Pad", &[added, pads, hidden, last], &[])
}

/// Decomposes the standard's `RotaryEmbedding`.
pub(super) fn rotary_parts(cx: &mut GradCx<'_>) -> Result<Vec<ValueId>> {
    let (x, cos, sin) = (cx.input(0)?, cx.input(1)?, cx.input(2)?);
    let mut caches = [cos, sin];
    // With position ids the caches are tables of all positions; without, they come by batch and
    // position.
    if let Some(ids) = cx.find_input(3) {
        for cache in &mut caches {
            *cache = cx.emit("Gather", &[*cache, ids], &axis(0))?;
        }
    }
    let heads = cx.attrs().find_int("num_heads").unwrap_or(0);
    rotate(cx, x, caches, heads).map(|y| vec![y])
}

/// Rotates each head by angles whose cosines and sines are `[batch, positions, half]`.
pub(in crate::ops) fn rotate(
    cx: &mut GradCx<'_>,
    x: ValueId,
    mut caches: [ValueId; 2],
    heads: i64,
) -> Result<ValueId> {
    let is_flat = cx.rank(x)? == 3;
    let turned = if is_flat { cx.reshape_to(x, &[0, 0, heads, -1])? } else { x };
    // The caches have no axis of heads: every head at a position turns by the same angles.
    let of_heads = cx.ints(&[if is_flat { 2 } else { 1 }])?;
    for cache in &mut caches {
        *cache = cx.emit("Unsqueeze", &[*cache, of_heads], &[])?;
    }
    // Rank 4 in both cases, but with the heads on axis 2 in the flat layout and on axis 1
    // otherwise.
    let size = cx.size_at(turned, 3)?;
    let rotated = cx.attrs().find_int("rotary_embedding_dim").unwrap_or(0);
    let is_whole = rotated == 0 || size == Dim::constant(rotated);
    let part = |cx: &mut GradCx<'_>, from: i64, to: i64| {
        let (from, to, last) = (cx.ints(&[from])?, cx.ints(&[to])?, cx.ints(&[-1])?);
        cx.emit("Slice", &[turned, from, to, last], &[])
    };
    let (first, rest) = match is_whole {
        // Only the first `rotary_embedding_dim` elements of a head turn; the rest pass through.
        true => (turned, None),
        false => (part(cx, 0, rotated)?, Some(part(cx, rotated, i64::MAX)?)),
    };
    let mut whole = rotate_pairs(cx, first, caches)?;
    if let Some(rest) = rest {
        whole = cx.emit("Concat", &[whole, rest], &axis(-1))?;
    }
    cx.reshape_like(whole, x)
}

/// Rotates the whole last dimension in pairs. A pair's elements are adjacent if `interleaved`, and
/// half the dimension apart otherwise.
fn rotate_pairs(cx: &mut GradCx<'_>, x: ValueId, [cos, sin]: [ValueId; 2]) -> Result<ValueId> {
    let interleaved = cx.attrs().find_int("interleaved").unwrap_or(0) != 0;
    let (mut whole, mut axes) = (x, axis(-1));
    if interleaved {
        // The new last axis holds the two elements of a pair.
        whole = cx.reshape_to(x, &[0, 0, 0, -1, 2])?;
        axes = axis(4);
    }
    let attrs = [axes[0].clone(), ("num_outputs", Attribute::Int(2))];
    let mut halves = cx.emit_many("Split", &[Some(whole)], &attrs, 2)?;
    let last = cx.ints(&[-1])?;
    if interleaved {
        for half in &mut halves {
            *half = cx.emit("Squeeze", &[*half, last], &[])?;
        }
    }
    let [a, b] = halves[..] else { return Err(error!(Fail, "Split has as many outputs as it is told")) };
    // A rotation by the angle t: (a cos t - b sin t, a sin t + b cos t).
    let product = |cx: &mut GradCx<'_>, x: ValueId, y: ValueId| cx.emit("Mul", &[x, y], &[]);
    let (cos_a, sin_b) = (product(cx, cos, a)?, product(cx, sin, b)?);
    let (sin_a, cos_b) = (product(cx, sin, a)?, product(cx, cos, b)?);
    let mut pair = [cx.emit("Sub", &[cos_a, sin_b], &[])?, cx.emit("Add", &[sin_a, cos_b], &[])?];
    if interleaved {
        for half in &mut pair {
            *half = cx.emit("Unsqueeze", &[*half, last], &[])?;
        }
    }
    let joined = cx.emit("Concat", &pair, &axis(-1))?;
    cx.reshape_like(joined, x)
}
