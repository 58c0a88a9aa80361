//! Attention fusion: the formula that exporters write becomes one operator, which need not store
//! all scores at once.
//!
//! Vaswani et al., "Attention Is All You Need", arXiv 1706.03762:
//! `softmax(scale * Q * K^T + mask) * V`.
//!
//! The operator and the formula treat masks differently. If the last axis of a mask is too short,
//! the operator pads it with -inf, and the formula broadcasts it. For a query that sees no key, the
//! operator returns zeros, and the softmax of the formula NaN. The fused form returns what the
//! formula returns, so [`mask_of_operator`] adapts the mask. Scores may also be -inf because they
//! overflow, which no mask shows: [`HIDDEN_IS_NAN`] covers those. That attribute is not written to
//! files, so the NaN in the mask is still needed. ONNX Runtime's operator returns 0 for what the
//! mask hides, but NaN for what overflows.

use crate::dim::Dim;
use crate::dtype::DType;
use crate::ir::{Attribute, ValueId};
use crate::ops::nn::HIDDEN_IS_NAN;
use crate::rewrite::Then::{Build, Template};
use crate::rewrite::{Found, Patch};
use crate::tensor::Tensor;
use crate::{Result, rules};

/// `TensorProto.DataType.FLOAT`, as `softmax_precision` encodes it.
const FLOAT: i64 = 1;

rules! { "attention", Extended;
    /// MatMul with a transposed right side becomes FusedMatMul with `transB`, if the transposition
    /// then keeps the last axis: it is cheaper, or never written.
    matmul_transposed: "MatMul(q, t@Transpose(k))" if turns_keys => Build(scale_turned),
        [
            "q=f32[2,3,5,8] k=f32[2,3,7,8] t.perm=[0,1,3,2]",
            "q=f32[2,3,5,8] k=f32[2,7,3,8] t.perm=[0,2,3,1]",
            "q=f32[6,5,8] k=f32[7,6,8] t.perm=[1,2,0]",
            "q=f32[2,2,3,5,8] k=f32[2,2,3,7,8] t.perm=[0,1,2,4,3]",
        ];
    /// Keys that are transposed before a reshape splits their batch into heads are split first, so
    /// that the transposition meets the MatMul. Exporters write this around attention.
    split_turned_keys: "r@Reshape(Transpose(k; perm=[0,2,1]), _)" if splits_batch => Build(turn_split_keys),
        ["k=f32[6,7,8] _0=[2,3,8,7]"];
    /// A factor on the transposed keys becomes `alpha` of FusedMatMul.
    transposed_keys_times: "MatMul(q, Mul(t@Transpose(k), #factor))" if scales_turned_keys => Build(scale_turned),
        [
            "q=f32[2,3,5,8] k=f32[2,3,7,8] t.perm=[0,1,3,2] factor=f32:0.35",
            "q=f32[2,3,5,8] k=f32[2,7,3,8] t.perm=[0,2,3,1] factor=f32:0.35",
        ];
    /// A factor on the scores becomes `alpha` of FusedMatMul.
    scores_times: "Mul(m@FusedMatMul(q, k; transA=0; transB=1; activation=''), #factor)" if has_scale
        => Build(scale_scores), ["q=f32[2,3,5,8] k=f32[2,3,7,8] factor=f32:0.125"];
    /// A divisor of the scores becomes `alpha` of FusedMatMul.
    scores_over: "Div(m@FusedMatMul(q, k; transA=0; transB=1; activation=''), #divisor)" if has_scale
        => Build(scale_scores), ["q=f32[2,3,5,8] k=f32[2,3,7,8] divisor=f32:8"];
    /// A factor on the queries becomes `alpha` of FusedMatMul.
    queries_times: "m@FusedMatMul(Mul(q, #factor), k; transA=0; transB=1; activation='')" if has_scale
        => Build(scale_scores), ["q=f32[2,3,5,8] k=f32[2,3,7,8] factor=f32:0.35"];
    /// A factor on the keys becomes `alpha` of FusedMatMul.
    keys_times: "m@FusedMatMul(q, Mul(k, #factor); transA=0; transB=1; activation='')" if has_scale
        => Build(scale_scores), ["q=f32[2,3,5,8] k=f32[2,3,7,8] factor=f32:0.35"];
    /// Attention whose scores get a bias for each row and each column of a grid of keys (decomposed
    /// relative positions) becomes GridAttention: neither scores nor biases are whole in memory.
    attention_grid: "MatMul(Softmax(flat@Reshape(sum@Add(Add(Reshape(m@FusedMatMul(q, k; transA=0; transB=1; activation=''), _), first), second), _); axis=-1), v)"
        if has_key_grid => Build(grid_attention),
        [
            "q=f32[2,6,8] k=f32[2,20,8] v=f32[2,20,7] _0=[2,2,3,4,5] first=f32[2,2,3,4,1] second=f32[2,2,3,1,5] _1=[2,6,20] m.alpha=0.35",
            "q=f32[2,3,6,8] k=f32[2,3,20,8] v=f32[2,3,20,8] _0=[6,2,3,4,5] first=f32[6,2,3,1,5] second=f32[6,2,3,4,1] _1=[2,3,6,20]",
        ];
    /// The same where the biases are added to each other first.
    attention_grid_of_sums: "MatMul(Softmax(Add(m@FusedMatMul(q, k; transA=0; transB=1; activation=''), flat@Reshape(sum@Add(first, second), _)); axis=-1), v)"
        if has_key_grid => Build(grid_attention),
        [
            "q=f32[2,6,8] k=f32[2,20,8] v=f32[2,20,7] first=f32[2,2,3,4,1] second=f32[2,2,3,1,5] _0=[2,6,20] m.alpha=0.35",
            "q=f32[2,3,6,8] k=f32[2,3,20,8] v=f32[2,3,20,8] first=f32[2,3,2,3,1,5] second=f32[2,3,2,3,4,1] _0=[2,3,6,20]",
        ];
    /// The same where the operator has the biases as its mask.
    attention_grid_as_mask: "a@Attention(q, k, v, flat@Reshape(sum@Add(first, second), _); is_causal=0; softcap=0; left_window_size=-1; right_window_size=-1; qk_matmul_output_mode=0)"
        if has_key_grid_as_mask => Build(grid_attention),
        [
            "q=f32[2,3,6,8] k=f32[2,3,20,8] v=f32[2,3,20,8] first=f32[6,2,3,4,1] second=f32[6,2,3,1,5] _0=[2,3,6,20] a.scale=0.35",
        ];
    /// `softmax(scale * Q * K^T + mask) * V` becomes Attention, if the mask broadcasts to the
    /// scores: the scores are never whole in memory.
    attention_masked: "MatMul(Softmax(sum@Add(m@FusedMatMul(q, k; transA=0; transB=1; activation=''), mask); axis=-1), v)"
        if are_heads => Build(attention),
        [
            "q=f32[2,3,5,8] k=f32[2,3,7,8] v=f32[2,3,7,8] mask=f32[2,1,5,7] m.alpha=0.35",
            "q=f32[2,3,5,8] k=f32[2,3,7,8] v=f32[2,3,7,8] mask=f32[5,1] m.alpha=0.35",
            "q=f32[2,3,5,8] k=f32[2,3,7,8] v=f32[2,3,7,8] mask=const:f32[2,1,5,7] m.alpha=0.35",
            "q=f32[6,5,8] k=f32[6,7,8] v=f32[6,7,8] mask=f32[6,5,7] m.alpha=0.35",
            "q=f32[6,5,8] k=f32[6,7,8] v=f32[6,7,8] mask=f32[1,5,1] m.alpha=0.35",
        ];
    /// The same for heads in the batch, which a reshape gives an axis of their own for the mask.
    attention_viewed: "MatMul(Softmax(flat@Reshape(sum@Add(wide@Reshape(m@FusedMatMul(q, k; transA=0; transB=1; activation=''), _), mask), _); axis=-1), v)"
        if are_viewed => Build(attention_viewed),
        [
            "q=f32[6,5,8] k=f32[6,7,8] v=f32[6,7,4] _0=[2,3,5,7] mask=f32[2,1,5,7] _1=[6,5,7] m.alpha=0.35",
            "q=f32[6,5,8] k=f32[6,7,8] v=f32[6,7,8] _0=[2,3,5,7] mask=const:f32[5,7] _1=[6,5,7]",
        ];
    /// Scores that a condition replaces by -inf or a number as low become Attention with a mask:
    /// the scores are never whole in memory.
    attention_filled: "MatMul(Softmax(sum@Where(mask, m@FusedMatMul(q, k; transA=0; transB=1; activation=''), #fill); axis=-1), v)"
        if are_filled => Build(attention_shown),
        [
            "q=f32[2,3,5,8] k=f32[2,3,7,8] v=f32[2,3,7,8] mask=bool[2,1,5,7] fill=f32:-3.4028234663852886e38 m.alpha=0.35",
            "q=f32[6,5,8] k=f32[6,7,8] v=f32[6,7,8] mask=bool[6,5,7] fill=f32:-inf",
        ];
    /// The same where the condition holds for the scores that are replaced.
    attention_filled_if: "MatMul(Softmax(sum@Where(mask, #fill, m@FusedMatMul(q, k; transA=0; transB=1; activation='')); axis=-1), v)"
        if are_filled => Build(attention_hidden),
        ["q=f32[2,3,5,8] k=f32[2,3,7,8] v=f32[2,3,7,8] mask=bool[2,1,5,7] fill=f32:-3.4028234663852886e38 m.alpha=0.35"];
    /// `softmax(scale * Q * K^T) * V` becomes Attention: the scores are never whole in memory.
    attention: "MatMul(Softmax(m@FusedMatMul(q, k; transA=0; transB=1; activation=''); axis=-1), v)"
        if are_heads => Build(attention),
        [
            "q=f32[2,3,5,8] k=f32[2,3,7,8] v=f32[2,3,7,8] m.alpha=0.35",
            "q=f32[6,5,8] k=f32[6,7,8] v=f32[6,7,4] m.alpha=0.35",
        ];
    /// The guard against rows that a mask hides entirely is removed, if both of the mask's numbers
    /// are finite: softmax then returns no NaN.
    mask_of_finite: "Where(Equal(ReduceMax(m@Where(_, #shown, #hidden), _), #least), _, m)" if hides_no_query
        => Template("m"),
        ["_0=bool[2,1,5,7] shown=f32:0 hidden=f32:-10000 _1=[-1] least=f32:-inf _2=f32:nan"], keep true;
    /// Attention between the transposes that split and join the heads becomes Attention on tensors
    /// of rank 3: heads are read and written in place.
    attention_in_place: "Reshape(Transpose(a@Attention(Transpose(Reshape(q, _); perm=[0,2,1,3]), Transpose(Reshape(k, _); perm=[0,2,1,3]), Transpose(Reshape(v, _); perm=[0,2,1,3]), mask?; qk_matmul_output_mode=0); perm=[0,2,1,3]), _)"
        if joins_heads => Build(attention_in_place),
        ["q=f32[2,5,24] _0=[2,5,3,8] k=f32[2,7,24] _1=[2,7,3,8] v=f32[2,7,24] _2=[2,7,3,8] mask=f32[2,1,5,7] _3=[2,5,24]"],
        keep true;
}

/// Whether the last axis of the keys is the second to last of the transposed keys.
fn turns_keys(found: &Found<'_>) -> bool {
    let rank = found.rank("k").unwrap_or(0);
    rank >= 3
        && found.rank("q").is_some_and(|rank| rank >= 2)
        && perm(found).get(rank - 2) == Some(&(rank as i64 - 1))
}

/// Returns the permutation of the transposed keys.
fn perm(found: &Found<'_>) -> Vec<i64> {
    let perm = found.node("t").and_then(|node| node.attrs.find_ints("perm"));
    perm.map(<[i64]>::to_vec).unwrap_or_default()
}

fn alpha(found: &Found<'_>) -> f32 {
    found.node("m").and_then(|node| node.attrs.find_float("alpha")).unwrap_or(1.0)
}

/// Returns the total factor of the scores, if a float attribute can hold it.
fn scale(found: &Found<'_>) -> Option<f32> {
    let factor = match (found.scalar("factor"), found.scalar("divisor")) {
        (Some(factor), _) => factor,
        (None, Some(divisor)) => 1.0 / divisor,
        (None, None) => return None,
    };
    let scale = found.attribute("q", f64::from(alpha(found)) * factor)?;
    // If the product of both factors underflows to 0, the formula still has a scale: do not fuse.
    (scale.is_finite() && (scale != 0.0 || factor == 0.0)).then_some(scale)
}

fn has_scale(found: &Found<'_>) -> bool {
    scale(found).is_some()
}

fn scales_turned_keys(found: &Found<'_>) -> bool {
    turns_keys(found) && has_scale(found)
}

/// Whether a reshape splits the first of three axes into two.
fn splits_batch(found: &Found<'_>) -> bool {
    let (Some([_, keys, size]), Some([_, heads, own_size, own_keys])) =
        (found.shape("k"), found.output_shape())
    else {
        return false;
    };
    heads.as_constant().is_some_and(|heads| heads > 0) && [keys, size] == [own_keys, own_size]
}

fn turn_split_keys(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    let sizes = patch.found().output_shape().map(|shape| [0, 1].map(|axis| shape.get(axis)?.as_constant()));
    let Some([batch, Some(heads)]) = sizes else { return Ok(None) };
    let keys = patch.value("k")?;
    let split = reshape_front(patch, keys, &[batch.unwrap_or(-1), heads], 1)?;
    let perm = [("perm", Attribute::Ints(vec![0, 1, 3, 2]))];
    Ok(Some(vec![patch.node("Transpose", &[split], &perm)?]))
}

/// Multiplies with keys whose transposition leaves the last axis in its place.
fn scale_turned(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    let found = patch.found();
    let scale = if found.value("factor").is_some() { scale(&found) } else { Some(1.0) };
    let Some(scale) = scale else { return Ok(None) };
    let mut perm = perm(&found);
    let last = perm.len().saturating_sub(1);
    perm.swap(last.saturating_sub(1), last);
    let mut keys = patch.value("k")?;
    if !perm.iter().copied().eq(0..perm.len() as i64) {
        keys = patch.node("Transpose", &[keys], &[("perm", Attribute::Ints(perm))])?;
    }
    let inputs = [Some(patch.value("q")?), Some(keys)];
    let attrs = [("alpha", Attribute::Float(scale)), ("transB", Attribute::Int(1))];
    Ok(Some(vec![patch.emit((crate::spec::RUNTIME, "FusedMatMul"), &inputs, &attrs)?]))
}

fn scale_scores(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    let found = patch.found();
    let Some(scale) = scale(&found) else { return Ok(None) };
    let inputs = ["q", "k"].map(|name| found.value(name));
    let attrs = [("alpha", Attribute::Float(scale)), ("transB", Attribute::Int(1))];
    Ok(Some(vec![patch.emit((crate::spec::RUNTIME, "FusedMatMul"), &inputs, &attrs)?]))
}

/// Whether queries, keys and values have equally many heads, as an axis of their own or in the
/// batch, and the mask does not enlarge the scores.
fn are_heads(found: &Found<'_>) -> bool {
    let has_type = found.value("mask").is_none() || found.dtype("mask") == found.dtype("q");
    have_equal_heads(found) && has_type
}

/// Whether reshapes only split the heads from the batch for the mask, and join them again.
fn are_viewed(found: &Found<'_>) -> bool {
    let (Some(scores @ [_, queries, keys]), Some([_, heads, own_queries, own_keys])) =
        (found.shape("m"), found.shape("wide"))
    else {
        return false;
    };
    let is_split = heads.as_constant().is_some_and(|heads| heads > 0)
        && [queries, keys] == [own_queries, own_keys]
        && found.shape("flat") == Some(scores);
    is_split && are_heads(found)
}

/// Whether the formula also fills hidden scores with a number that no score is near to, so that the
/// number plus the score is the number. Numbers of half precision are not large enough.
fn are_filled(found: &Found<'_>) -> bool {
    const LARGE: f64 = 1e37;
    let is_large = found.scalar("fill").is_some_and(|fill| fill < -LARGE);
    have_equal_heads(found) && is_large && found.dtype("mask") == Some(DType::Bool)
}

fn have_equal_heads(found: &Found<'_>) -> bool {
    let shape = |name: &str| found.shape(name).and_then(|shape| shape.split_last_chunk::<2>());
    let (Some((q, _)), Some((k, [keys, _])), Some((v, [values, _]))) = (shape("q"), shape("k"), shape("v"))
    else {
        return false;
    };
    // With a mask, there must be as many keys as values: the mask could broadcast the scores of one
    // key to several values.
    let mask_fits = found.value("mask").is_none() || (keys == values && mask_fits(found));
    matches!(q.len(), 1 | 2) && q == k && q == v && mask_fits
}

/// Whether a mask leaves batch, heads and queries of the scores as they are; [`whole_mask`] handles
/// the last axis. ONNX Runtime's kernel does not broadcast a mask over the queries.
fn mask_fits(found: &Found<'_>) -> bool {
    let scores = found.shape("wide").or_else(|| found.shape("m"));
    let (Some(scores), Some(sums)) = (scores, found.shape("sum")) else { return false };
    let (Some((_, outer)), Some((_, sums))) = (scores.split_last(), sums.split_last()) else { return false };
    let is_mask = found.rank("mask").is_some_and(|rank| (2..=scores.len()).contains(&rank));
    let queries = |shape: &[Dim]| shape.iter().rev().nth(1).cloned();
    let has_queries = found.shape("mask").and_then(queries) == queries(scores);
    let is_portable = has_queries || !found.must_be_portable();
    is_mask && is_portable && outer == sums
}

/// Returns the attributes that give tensors of three axes one head: their batch has the heads.
fn one_head(found: &Found<'_>) -> Vec<(&'static str, Attribute)> {
    match found.rank("q") {
        Some(3) => ["q_num_heads", "kv_num_heads"].map(|name| (name, Attribute::Int(1))).to_vec(),
        _ => Vec::new(),
    }
}

/// Keys that form a grid, with a bias of the scores for each row and each column of it.
struct KeyGrid {
    /// The biases, in any shape of `[batch * heads, queries, rows]` and of as many columns.
    rows: ValueId,
    columns: ValueId,
    heads: i64,
    queries: i64,
    sizes: [i64; 2],
}

/// Finds the grid of keys: the sum of both biases is [.., query rows, query columns, key rows, key
/// columns], and one bias has one key column, the other one key row. `None` if the scores have
/// another shape, or if only the run knows these sizes.
fn key_grid(found: &Found<'_>) -> Option<KeyGrid> {
    let (q, k, scores) = (found.shape("q")?, found.shape("k")?, found.shape("flat")?);
    let heads = match (q, k, scores) {
        ([batch, _, _], [_, keys, _], [all, queries, columns]) => {
            let is_whole = batch == all && keys == columns && q.get(1) == Some(queries);
            is_whole.then_some(1)?
        }
        ([batch, heads, _, _], [_, _, keys, _], [all, own, queries, columns]) => {
            let is_whole = [batch, heads, keys] == [all, own, columns] && q.get(2) == Some(queries);
            heads.as_constant().filter(|_| is_whole)?
        }
        _ => return None,
    };
    let [.., queries, keys] = scores else { return None };
    let (queries, keys) = (queries.as_constant()?, keys.as_constant()?);
    let [outer @ .., query_rows, query_columns, rows, columns] = found.shape("sum")? else { return None };
    let area = |[one, other]: [&Dim; 2]| one.as_constant()?.checked_mul(other.as_constant()?);
    let is_grid = area([query_rows, query_columns]) == Some(queries) && area([rows, columns]) == Some(keys);
    let of_queries: Vec<&Dim> = outer.iter().chain([query_rows, query_columns]).collect();
    let one = Dim::constant(1);
    let is_bias = |name: &str, keys: [&Dim; 2]| {
        found.shape(name).is_some_and(|shape| shape.iter().eq(of_queries.iter().copied().chain(keys)))
    };
    let pair = |rows_of: &str, columns_of: &str| {
        is_bias(rows_of, [rows, &one]) && is_bias(columns_of, [&one, columns])
    };
    let orders = [("first", "second"), ("second", "first")];
    let (rows_of, columns_of) = orders.into_iter().find(|&(rows, columns)| pair(rows, columns))?;
    let sizes = [rows.as_constant()?, columns.as_constant()?];
    let is_typed = [rows_of, columns_of].iter().all(|name| found.dtype(name) == found.dtype("q"));
    let (rows, columns) = (found.value(rows_of)?, found.value(columns_of)?);
    // Without elements, a reshape could not tell the batch.
    let is_empty = [heads, queries].iter().chain(&sizes).any(|size| *size < 1);
    (is_grid && is_typed && !is_empty).then_some(KeyGrid { rows, columns, heads, queries, sizes })
}

/// Whether the scores of a formula have such a grid.
fn has_key_grid(found: &Found<'_>) -> bool {
    let batches = |name: &str| found.shape(name).and_then(|shape| shape.split_last_chunk::<2>());
    let (Some((q, _)), Some((k, [keys, _])), Some((v, [values, _]))) =
        (batches("q"), batches("k"), batches("v"))
    else {
        return false;
    };
    let is_kept = found.shape("flat") == found.shape("m");
    q == k && q == v && keys == values && is_kept && key_grid(found).is_some()
}

/// Whether the operator has such a grid as its mask, and nothing else that changes its scores.
fn has_key_grid_as_mask(found: &Found<'_>) -> bool {
    let plain = found.node("a").is_some_and(|node| {
        let is_single = node.attrs.find_int("softmax_precision").is_none_or(|code| code == FLOAT);
        is_single
            && node.inputs.iter().skip(4).all(Option::is_none)
            && node.outputs.iter().skip(1).all(Option::is_none)
    });
    plain && found.rank("q") == Some(4) && found.dtype("q") == found.dtype("v") && key_grid(found).is_some()
}

fn grid_attention(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    let found = patch.found();
    let Some(KeyGrid { rows, columns, heads, queries, sizes: [height, width] }) = key_grid(&found) else {
        return Ok(None);
    };
    let mut attrs = vec![];
    match found.node("a") {
        Some(node) => {
            let kept = ["scale", HIDDEN_IS_NAN].into_iter();
            attrs.extend(kept.filter_map(|name| Some((name, node.attrs.get(name)?.clone()))));
        }
        None => attrs.extend(attention_attributes(&found)),
    }
    attrs.extend(one_head(&found));
    let mut inputs = patch.inputs(&["q", "k", "v"])?;
    for (bias, size) in [(rows, height), (columns, width)] {
        // -1 is the batch, which may be symbolic.
        let shape = patch.constant_ints(&[-1, heads, queries, size])?;
        inputs.push(Some(patch.node("Reshape", &[bias, shape], &[])?));
    }
    Ok(Some(vec![patch.emit((crate::spec::RUNTIME, "GridAttention"), &inputs, &attrs)?]))
}

fn attention(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    match patch.found.value("mask") {
        None => attention_with(patch, None).map(Some),
        Some(mask) => {
            let mask = whole_mask(patch, mask)?;
            let hides_all = patch.found().tensor("mask").is_none_or(has_hidden_row);
            if !hides_all {
                return attention_with(patch, Some(mask)).map(Some);
            }
            match mask_of_operator(patch, mask)? {
                Some(mask) => attention_with(patch, Some(mask)).map(Some),
                None => Ok(None),
            }
        }
    }
}

/// Attention between reshapes that split the heads from the batch and join them again.
fn attention_viewed(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    let found = patch.found();
    let heads = found.shape("wide").and_then(|shape| shape.get(1)?.as_constant());
    let (Some(heads), mask) = (heads, patch.value("mask")?) else { return Ok(None) };
    let mut mask = whole_mask(patch, mask)?;
    if patch.found().tensor("mask").is_none_or(has_hidden_row) {
        let Some(adapted) = mask_of_operator(patch, mask)? else { return Ok(None) };
        mask = adapted;
    }
    let attrs = attention_attributes(&patch.found());
    let mut inputs = Vec::new();
    for name in ["q", "k", "v"] {
        let value = patch.value(name)?;
        inputs.push(Some(reshape_front(patch, value, &[-1, heads], 1)?));
    }
    inputs.push(Some(mask));
    let result = patch.emit(("", "Attention"), &inputs, &attrs)?;
    Ok(Some(vec![reshape_front(patch, result, &[-1], 2)?]))
}

/// Reshapes the axes of a value before `first` to `sizes`. The others may be symbolic.
fn reshape_front(patch: &mut Patch<'_>, value: ValueId, sizes: &[i64], first: i64) -> Result<ValueId> {
    let rest = patch.node("Shape", &[value], &[("start", Attribute::Int(first))])?;
    let sizes = patch.constant_ints(sizes)?;
    let shape = patch.node("Concat", &[sizes, rest], &[("axis", Attribute::Int(0))])?;
    patch.node("Reshape", &[value, shape], &[])
}

/// Attention to the keys for which the condition holds.
fn attention_shown(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    attention_filled(patch, |fill, zero| [zero, fill])
}

/// Attention to the keys for which the condition does not hold.
fn attention_hidden(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    attention_filled(patch, |fill, zero| [fill, zero])
}

/// Attention with a mask of 0 and the number that hidden scores are filled with. `of` returns the
/// number if the condition holds, and the one if it does not.
fn attention_filled(
    patch: &mut Patch<'_>,
    of: fn(ValueId, ValueId) -> [ValueId; 2],
) -> Result<Option<Vec<ValueId>>> {
    let Some(zero) = patch.number_like("q", 0.0)? else { return Ok(None) };
    let (condition, fill) = (patch.value("mask")?, patch.without_axes("fill")?);
    let condition = whole_mask(patch, condition)?;
    let [holds, fails] = of(fill, zero);
    let mask = patch.node("Where", &[condition, holds, fails], &[])?;
    if patch.found().scalar("fill") != Some(f64::NEG_INFINITY) {
        return attention_with(patch, Some(mask)).map(Some);
    }
    match mask_of_operator(patch, mask)? {
        Some(mask) => attention_with(patch, Some(mask)).map(Some),
        None => Ok(None),
    }
}

/// Returns the attributes with which the operator computes what the formula computes.
fn attention_attributes(found: &Found<'_>) -> Vec<(&'static str, Attribute)> {
    // The softmax of a row of only -inf is NaN in the formula.
    vec![("scale", Attribute::Float(alpha(found))), (HIDDEN_IS_NAN, Attribute::Int(1))]
}

/// Attention with the mask of the operator.
fn attention_with(patch: &mut Patch<'_>, mask: Option<ValueId>) -> Result<Vec<ValueId>> {
    let found = patch.found();
    let mut attrs = attention_attributes(&found);
    attrs.extend(one_head(&found));
    let is_by_batch = found.rank("q") == Some(3) && found.rank("mask") == Some(3);
    let [q, k, v] = ["q", "k", "v"].map(|name| found.value(name));
    let mask = match mask {
        // The operator's masks have an axis of heads.
        Some(mask) if is_by_batch => {
            let axis = patch.constant_ints(&[1])?;
            Some(patch.node("Unsqueeze", &[mask, axis], &[])?)
        }
        mask => mask,
    };
    Ok(vec![patch.emit(("", "Attention"), &[q, k, v, mask], &attrs)?])
}

/// Returns the mask of the formula with one number for each key on its last axis.
fn whole_mask(patch: &mut Patch<'_>, mask: ValueId) -> Result<ValueId> {
    let found = patch.found();
    let last = |name: &str| found.shape(name).and_then(<[Dim]>::last);
    if last("mask") == last("m") {
        return Ok(mask);
    }
    // The number of keys may be dynamic, so expand to it at run time.
    let keys = patch.value("k")?;
    let bounds = [("start", Attribute::Int(-2)), ("end", Attribute::Int(-1))];
    let count = patch.node("Shape", &[keys], &bounds)?;
    patch.node("Expand", &[mask, count], &[])
}

/// Returns a mask with which the operator computes what the formula computes with `mask`: a row of
/// only -inf, which hides all keys, becomes NaN. `None` if the type has no such numbers.
///
/// Masks are small compared to scores, and layers that share a mask share the nodes added here.
fn mask_of_operator(patch: &mut Patch<'_>, mask: ValueId) -> Result<Option<ValueId>> {
    let numbers = (patch.number_like("q", f32::NEG_INFINITY)?, patch.number_like("q", f32::NAN)?);
    let (Some(hidden), Some(nan)) = numbers else { return Ok(None) };
    // A row hides all keys if its maximum is -inf.
    let axes = patch.constant_ints(&[-1])?;
    let greatest = patch.node("ReduceMax", &[mask, axes], &[("keepdims", Attribute::Int(1))])?;
    let is_hidden = patch.node("Equal", &[greatest, hidden], &[])?;
    patch.node("Where", &[is_hidden, nan, mask], &[]).map(Some)
}

/// Whether both numbers of a mask are finite, and the pattern looks for rows of only -inf.
fn hides_no_query(found: &Found<'_>) -> bool {
    let is_finite = |name| {
        let numbers = found.tensor(name).and_then(|tensor| tensor.to_doubles().ok());
        numbers.is_some_and(|numbers| numbers.iter().all(|number| number.is_finite()))
    };
    is_finite("shown") && is_finite("hidden") && found.scalar("least") == Some(f64::NEG_INFINITY)
}

/// Whether a constant mask has a row of only -inf.
fn has_hidden_row(mask: &Tensor) -> bool {
    // `chunks` panics at a size of 0. An empty mask has no row.
    let width = mask.shape().last().copied().unwrap_or(1).max(1);
    mask.to_doubles().is_ok_and(|numbers| {
        numbers.chunks(width).any(|row| row.iter().all(|number| *number == f64::NEG_INFINITY))
    })
}

/// Whether queries, keys, values and the result have three axes, the last one over all heads.
fn joins_heads(found: &Found<'_>) -> bool {
    let (Some([b, l, _]), Some([qb, ql, _]), Some(3), Some(3)) =
        (found.output_shape(), found.shape("q"), found.rank("k"), found.rank("v"))
    else {
        return false;
    };
    // The replacement passes on four inputs and one output, so a cache must be absent.
    let plain = found.node("a").is_some_and(|node| {
        node.inputs.iter().skip(4).all(Option::is_none) && node.outputs.iter().skip(1).all(Option::is_none)
    });
    plain && b == qb && l == ql && heads(found).is_some()
}

/// Returns the number of heads of queries and of keys. `None` unless queries, keys and values each
/// split their last axis into heads and keep batch and positions. A reshape may also move positions
/// into the batch, for divided or windowed attention.
fn heads(found: &Found<'_>) -> Option<(i64, i64)> {
    let node = found.node("a")?;
    let heads_of = |name: &str, index: usize| {
        let value = node.inputs.get(index).copied().flatten()?;
        let (Some([batch, positions, whole]), Some([own_batch, heads, own_positions, size])) =
            (found.shape(name), found.graph.value(value).ty.shape())
        else {
            return None;
        };
        // The head counts become attributes, which hold numbers only.
        let (heads, size) = (heads.as_constant()?, size.as_constant()?);
        let keeps = batch == own_batch && positions == own_positions;
        (keeps && size.checked_mul(heads) == whole.as_constant()).then_some(heads)
    };
    let (queries, keys, values) = (heads_of("q", 0)?, heads_of("k", 1)?, heads_of("v", 2)?);
    (keys == values).then_some((queries, keys))
}

fn attention_in_place(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    let Some((query_heads, heads)) = heads(&patch.found()) else { return Ok(None) };
    let mut attrs = patch.attrs("a");
    // With three axes, only attributes tell the operator the number of heads.
    attrs.retain(|(name, _)| !name.ends_with("num_heads"));
    attrs.push(("q_num_heads", Attribute::Int(query_heads)));
    attrs.push(("kv_num_heads", Attribute::Int(heads)));
    let inputs = ["q", "k", "v", "mask"].map(|name| patch.found.value(name));
    Ok(Some(vec![patch.emit(("", "Attention"), &inputs, &attrs)?]))
}
