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
use crate::ir::{Attribute, ValueId};
use crate::ops::nn::HIDDEN_IS_NAN;
use crate::rewrite::Then::{Build, Template};
use crate::rewrite::{Found, Patch};
use crate::tensor::Tensor;
use crate::{Result, rules};

rules! { "attention", Extended;
    /// MatMul with a transposed right side becomes FusedMatMul with `transB`: the transpose is
    /// never written.
    matmul_transposed: "MatMul(q, Transpose(k; perm=[0,1,3,2]))" if queries_are_matrices
        => Template("FusedMatMul(q, k; transB=1)"),
        ["q=f32[2,3,5,8] k=f32[2,3,7,8]"];
    /// The same for keys whose heads and positions are swapped, too: only that swap stays as a
    /// Transpose.
    matmul_transposed_heads: "MatMul(q, Transpose(k; perm=[0,2,3,1]))" if queries_are_matrices
        => Template("FusedMatMul(q, Transpose(k; perm=[0,2,1,3]); transB=1)"),
        ["q=f32[2,3,5,8] k=f32[2,7,3,8]"];
    /// A factor on the transposed keys becomes `alpha` of FusedMatMul.
    transposed_keys_times: "MatMul(q, Mul(Transpose(k; perm=[0,1,3,2]), #factor))" if scales_transposed_keys
        => Build(scale_scores), ["q=f32[2,3,5,8] k=f32[2,3,7,8] factor=f32:0.35"];
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
    /// `softmax(scale * Q * K^T + mask) * V` becomes Attention, if the mask broadcasts to the
    /// scores: the scores are never whole in memory.
    attention_masked: "MatMul(Softmax(sum@Add(m@FusedMatMul(q, k; transA=0; transB=1; activation=''), mask); axis=-1), v)"
        if are_heads => Build(attention),
        [
            "q=f32[2,3,5,8] k=f32[2,3,7,8] v=f32[2,3,7,8] mask=f32[2,1,5,7] m.alpha=0.35",
            "q=f32[2,3,5,8] k=f32[2,3,7,8] v=f32[2,3,7,8] mask=f32[5,1] m.alpha=0.35",
            "q=f32[2,3,5,8] k=f32[2,3,7,8] v=f32[2,3,7,8] mask=const:f32[2,1,5,7] m.alpha=0.35",
        ];
    /// `softmax(scale * Q * K^T) * V` becomes Attention: the scores are never whole in memory.
    attention: "MatMul(Softmax(m@FusedMatMul(q, k; transA=0; transB=1; activation=''); axis=-1), v)"
        if are_heads => Build(attention),
        ["q=f32[2,3,5,8] k=f32[2,3,7,8] v=f32[2,3,7,8] m.alpha=0.35"];
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

fn queries_are_matrices(found: &Found<'_>) -> bool {
    found.rank("q").is_some_and(|rank| rank >= 2)
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

fn scales_transposed_keys(found: &Found<'_>) -> bool {
    queries_are_matrices(found) && has_scale(found)
}

fn scale_scores(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    let found = patch.found();
    let Some(scale) = scale(&found) else { return Ok(None) };
    let inputs = ["q", "k"].map(|name| found.value(name));
    let attrs = [("alpha", Attribute::Float(scale)), ("transB", Attribute::Int(1))];
    Ok(Some(vec![patch.emit((crate::spec::RUNTIME, "FusedMatMul"), &inputs, &attrs)?]))
}

/// Whether queries, keys and values have four axes and equally many heads, and the mask does not
/// enlarge the scores.
fn are_heads(found: &Found<'_>) -> bool {
    let (Some([b, h, _, _]), Some([kb, kh, keys, _]), Some([vb, vh, values, _])) =
        (found.shape("q"), found.shape("k"), found.shape("v"))
    else {
        return false;
    };
    // With a mask, there must be as many keys as values: the mask could broadcast the scores of one
    // key to several values.
    let mask_fits = found.value("mask").is_none() || (keys == values && mask_fits(found));
    b == kb && b == vb && h == kh && h == vh && mask_fits
}

/// Whether a mask leaves batch, heads and queries of the scores as they are; [`mask_of_operator`]
/// handles the last axis. ONNX Runtime's kernel does not broadcast a mask over the queries.
fn mask_fits(found: &Found<'_>) -> bool {
    let (Some([scores @ .., _]), Some([sums @ .., _])) = (found.shape("m"), found.shape("sum")) else {
        return false;
    };
    let is_mask = found.rank("mask").is_some_and(|rank| (2..=4).contains(&rank));
    let queries = |shape: &'_ [Dim]| shape.iter().rev().nth(1).cloned();
    let has_queries = found.shape("mask").and_then(queries) == found.shape("m").and_then(queries);
    let is_portable = has_queries || !found.must_be_portable();
    is_mask && is_portable && scores == sums && found.dtype("mask") == found.dtype("q")
}

fn attention(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    let scale = alpha(&patch.found());
    let [q, k, v, mask] = ["q", "k", "v", "mask"].map(|name| patch.found.value(name));
    let mask = match mask {
        Some(mask) => match mask_of_operator(patch, mask)? {
            Some(mask) => Some(mask),
            None => return Ok(None),
        },
        None => None,
    };
    // The softmax of a row of only -inf is NaN in the formula.
    let attrs = [("scale", Attribute::Float(scale)), (HIDDEN_IS_NAN, Attribute::Int(1))];
    Ok(Some(vec![patch.emit(("", "Attention"), &[q, k, v, mask], &attrs)?]))
}

/// Returns a mask with which the operator computes what the formula computes with `mask`. Its last
/// axis has one number per key. A row of only -inf, which hides all keys, becomes NaN. `None` if
/// the type has no such numbers.
///
/// Masks are small compared to scores, and layers that share a mask share the nodes added here.
fn mask_of_operator(patch: &mut Patch<'_>, mask: ValueId) -> Result<Option<ValueId>> {
    let found = patch.found();
    let last = |name: &str| found.shape(name).and_then(<[Dim]>::last);
    let is_whole = last("mask") == last("m");
    let hides_all = found.tensor("mask").is_none_or(has_hidden_row);
    let mut mask = mask;
    if !is_whole {
        // The number of keys may be dynamic, so expand to it at run time.
        let keys = patch.value("k")?;
        let bounds = [("start", Attribute::Int(2)), ("end", Attribute::Int(3))];
        let count = patch.node("Shape", &[keys], &bounds)?;
        mask = patch.node("Expand", &[mask, count], &[])?;
    }
    if !hides_all {
        return Ok(Some(mask));
    }
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
