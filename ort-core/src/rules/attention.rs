//! Attention as exporters write it, as one operator that need not hold all scores at once.
//!
//! Vaswani et al., "Attention Is All You Need", arXiv 1706.03762: `softmax(scale * Q * K^T + mask) * V`.

use crate::ir::{Attribute, ValueId};
use crate::rewrite::Then::Build;
use crate::rewrite::Then::Template;
use crate::rewrite::{Found, Patch};
use crate::{Result, rules};

rules! { "attention", Extended;
    /// A product with the last two axes of the right side exchanged.
    matmul_transposed: "MatMul(q, Transpose(k; perm=[0,1,3,2]))" => Template("FusedMatMul(q, k; transB=1)"),
        ["q=f32[2,3,5,8] k=f32[2,3,7,8]"];
    /// The same where heads and positions are exchanged on the way.
    matmul_transposed_heads: "MatMul(q, Transpose(k; perm=[0,2,3,1]))"
        => Template("FusedMatMul(q, Transpose(k; perm=[0,2,1,3]); transB=1)"),
        ["q=f32[2,3,5,8] k=f32[2,7,3,8]"];
    /// A factor of the keys, which stand transposed already.
    transposed_keys_times: "MatMul(q, Mul(Transpose(k; perm=[0,1,3,2]), #factor))" if factor_is_scalar
        => Build(scale_scores), ["q=f32[2,3,5,8] k=f32[2,3,7,8] factor=f32:0.35"];
    /// A factor of the scores.
    scores_times: "Mul(m@FusedMatMul(q, k; transA=0; transB=1; activation=''), #factor)" if factor_is_scalar
        => Build(scale_scores), ["q=f32[2,3,5,8] k=f32[2,3,7,8] factor=f32:0.125"];
    /// A divisor of the scores.
    scores_over: "Div(m@FusedMatMul(q, k; transA=0; transB=1; activation=''), #divisor)" if divisor_is_scalar
        => Build(scale_scores), ["q=f32[2,3,5,8] k=f32[2,3,7,8] divisor=f32:8"];
    /// A factor of the queries.
    queries_times: "m@FusedMatMul(Mul(q, #factor), k; transA=0; transB=1; activation='')" if factor_is_scalar
        => Build(scale_scores), ["q=f32[2,3,5,8] k=f32[2,3,7,8] factor=f32:0.35"];
    /// A factor of the keys.
    keys_times: "m@FusedMatMul(q, Mul(k, #factor); transA=0; transB=1; activation='')" if factor_is_scalar
        => Build(scale_scores), ["q=f32[2,3,5,8] k=f32[2,3,7,8] factor=f32:0.35"];
    /// Scores with a mask, their softmax, and the values.
    attention_masked: "MatMul(Softmax(Add(m@FusedMatMul(q, k; transA=0; transB=1; activation=''), mask); axis=-1), v)"
        if are_heads => Build(attention),
        ["q=f32[2,3,5,8] k=f32[2,3,7,8] v=f32[2,3,7,8] mask=f32[2,1,5,7] m.alpha=0.35"];
    /// Scores, their softmax, and the values.
    attention: "MatMul(Softmax(m@FusedMatMul(q, k; transA=0; transB=1; activation=''); axis=-1), v)"
        if are_heads => Build(attention),
        ["q=f32[2,3,5,8] k=f32[2,3,7,8] v=f32[2,3,7,8] m.alpha=0.35"];
    /// Attention between transpositions that bring the heads to the front and back reads and writes them where they lie.
    attention_in_place: "Reshape(Transpose(a@Attention(Transpose(Reshape(q, _); perm=[0,2,1,3]), Transpose(Reshape(k, _); perm=[0,2,1,3]), Transpose(Reshape(v, _); perm=[0,2,1,3]), mask?; qk_matmul_output_mode=0); perm=[0,2,1,3]), _)"
        if joins_heads => Build(attention_in_place),
        ["q=f32[2,5,24] _0=[2,5,3,8] k=f32[2,7,24] _1=[2,7,3,8] v=f32[2,7,24] _2=[2,7,3,8] mask=f32[2,1,5,7] _3=[2,5,24]"],
        keep true;
}

fn factor_is_scalar(found: &Found<'_>) -> bool {
    found.scalar("factor").is_some()
}

fn divisor_is_scalar(found: &Found<'_>) -> bool {
    found.scalar("divisor").is_some_and(|divisor| divisor != 0.0)
}

fn alpha(found: &Found<'_>) -> f32 {
    found.node("m").and_then(|node| node.attrs.find_float("alpha")).unwrap_or(1.0)
}

fn scale_scores(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    let found = patch.found();
    let factor = match (found.scalar("factor"), found.scalar("divisor")) {
        (Some(factor), _) => factor,
        (None, Some(divisor)) => 1.0 / divisor,
        (None, None) => return Ok(None),
    };
    let scaled = (f64::from(alpha(&found)) * factor) as f32;
    let inputs = ["q", "k"].map(|name| found.value(name));
    let attrs = [("alpha", Attribute::Float(scaled)), ("transB", Attribute::Int(1))];
    Ok(Some(vec![patch.emit((crate::spec::RUNTIME, "FusedMatMul"), &inputs, &attrs)?]))
}

/// Whether queries, keys and values have four axes, and as many heads each.
fn are_heads(found: &Found<'_>) -> bool {
    let (Some([b, h, _, _]), Some([kb, kh, _, _]), Some([vb, vh, _, _])) =
        (found.shape("q"), found.shape("k"), found.shape("v"))
    else {
        return false;
    };
    let mask_fits = found.value("mask").is_none()
        || found.rank("mask").is_some_and(|rank| (2..=4).contains(&rank))
            && found.dtype("mask") == found.dtype("q");
    b == kb && b == vb && h == kh && h == vh && mask_fits
}

fn attention(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    let scale = alpha(&patch.found());
    let inputs = ["q", "k", "v", "mask"].map(|name| patch.found.value(name));
    Ok(Some(vec![patch.emit(("", "Attention"), &inputs, &[("scale", Attribute::Float(scale))])?]))
}

/// Whether queries, keys, values and the result have three axes, the last of which is that of all heads.
fn joins_heads(found: &Found<'_>) -> bool {
    let (Some([b, l, _]), Some([qb, ql, _]), Some(3), Some(3)) =
        (found.output_shape(), found.shape("q"), found.rank("k"), found.rank("v"))
    else {
        return false;
    };
    let plain = found.node("a").is_some_and(|node| {
        node.inputs.iter().skip(4).all(Option::is_none) && node.outputs.iter().skip(1).all(Option::is_none)
    });
    plain && b == qb && l == ql && heads(found).is_some()
}

/// The heads of queries and of keys: the second axis of what the attention reads.
fn heads(found: &Found<'_>) -> Option<(i64, i64)> {
    let node = found.node("a")?;
    let heads_of = |index: usize| {
        let value = node.inputs.get(index).copied().flatten()?;
        found.graph.value(value).ty.shape()?.get(1)?.as_constant()
    };
    let is_split = |name: &str, index: usize| {
        let value = node.inputs.get(index).copied().flatten()?;
        let size = found.graph.value(value).ty.shape()?.get(3)?.as_constant()?;
        let whole = found.shape(name)?.get(2)?.as_constant()?;
        Some(size.checked_mul(heads_of(index)?) == Some(whole))
    };
    let split = is_split("q", 0)? && is_split("k", 1)? && is_split("v", 2)?;
    split.then_some((heads_of(0)?, heads_of(1)?))
}

fn attention_in_place(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    let Some((query_heads, heads)) = heads(&patch.found()) else { return Ok(None) };
    let mut attrs = patch.attrs("a");
    attrs.retain(|(name, _)| !name.ends_with("num_heads"));
    attrs.push(("q_num_heads", Attribute::Int(query_heads)));
    attrs.push(("kv_num_heads", Attribute::Int(heads)));
    let inputs = ["q", "k", "v", "mask"].map(|name| patch.found.value(name));
    Ok(Some(vec![patch.emit(("", "Attention"), &inputs, &attrs)?]))
}
