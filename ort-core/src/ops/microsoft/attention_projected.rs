//! `Attention`: projects one input to queries, keys and values, and attends over them.
//!
//! It decomposes into a matmul and `MultiHeadAttention`. The file also holds what it shares with
//! the other operators that project.

use super::attention_heads::{ATTENTION_TYPES, head_count, head_size};
use super::{agree, check_rank, wants};
use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ir::{Attribute, ValueId};
use crate::ops;
use crate::spec::{AttrKind, Cost, Draft, InferCx, MICROSOFT, OP, OpSpec, attr, one, opt, var};
use crate::tensor::Tensor;
use crate::{Result, ensure, error};

static ATTENTION: OpSpec = OpSpec {
    domain: MICROSOFT,
    name: "Attention",
    since: 1,
    inputs: &[
        one("input", "T"),
        one("weights", "T"),
        opt("bias", "T"),
        opt("mask_index", "M"),
        opt("past", "T"),
        opt("attention_bias", "T"),
        opt("past_sequence_length", "M").host(),
    ],
    outputs: &[one("output", "T"), opt("present", "T")],
    types: &[var("T", ATTENTION_TYPES), var("M", TypeSet::of(&[DType::I32]))],
    attrs: &[
        attr::optional("do_rotary", AttrKind::Int),
        attr::optional("mask_filter_value", AttrKind::Float),
        attr::required("num_heads", AttrKind::Int),
        attr::optional("past_present_share_buffer", AttrKind::Int),
        attr::optional("qkv_hidden_sizes", AttrKind::Ints),
        attr::optional("rotary_embedding_dim", AttrKind::Int),
        attr::optional("scale", AttrKind::Float),
        attr::int("unidirectional", 0),
    ],
    cost: Cost::Compute,
    infer: |cx| infer_projected(cx, &PLACES),
    lower: Some(lower),
    ..OP
};

ops![ATTENTION];

/// The indices of the optional inputs of an operator that projects its input.
pub(super) struct OptionalInputs {
    pub(super) bias: usize,
    pub(super) mask: usize,
    pub(super) past: usize,
    pub(super) attention_bias: Option<usize>,
    /// The valid length of a past that shares its buffer with the present.
    pub(super) length: Option<usize>,
}

const PLACES: OptionalInputs =
    OptionalInputs { bias: 2, mask: 3, past: 4, attention_bias: Some(5), length: Some(6) };

/// Returns the head sizes of keys and of values, from weights with `width` columns.
pub(super) fn head_sizes(cx: &InferCx<'_>, width: &Dim, heads: &Dim) -> Result<[Dim; 2]> {
    let [keys, values] = match cx.attrs.find_ints("qkv_hidden_sizes") {
        Some(&[queries, keys, values]) => {
            // A score is a dot product of a query and a key, so their sizes must be equal.
            let fits = queries == keys && keys > 0 && values > 0;
            let sizes = [queries, keys, values];
            ensure!(
                fits,
                InvalidGraph,
                "qkv_hidden_sizes is {sizes:?}, expected sizes above 0, the first two equal"
            );
            let [keys, values] = [keys, values].map(Dim::constant);
            agree("the width of weights", &(&keys * 2 + &values), width)?;
            [keys, values]
        }
        Some(sizes) => {
            return Err(error!(InvalidGraph, "qkv_hidden_sizes is {sizes:?}, expected three sizes"));
        }
        None => {
            let part = head_size("weights", width, &Dim::constant(3))?;
            [part.clone(), part]
        }
    };
    Ok([head_size("key", &keys, heads)?, head_size("value", &values, heads)?])
}

/// Returns whether past and present share one preallocated buffer.
pub(super) fn shares_buffer(draft: &Draft<'_>) -> bool {
    matches!(draft.attr("past_present_share_buffer"), Some(Attribute::Int(shares)) if *shares != 0)
}

/// Infers the shapes of the output, `[batch, sequence, width of values]`, and of the present,
/// `[2, batch, heads, keys, size]`.
pub(super) fn infer_projected(cx: &mut InferCx<'_>, places: &OptionalInputs) -> Result<()> {
    let heads = head_count(cx, "num_heads")?;
    check_rank(cx, 0, "input", 3)?;
    check_rank(cx, 1, "the weights", 2)?;
    check_rank(cx, places.bias, "bias", 1)?;
    check_rank(cx, places.past, "past", 5)?;
    let shares =
        cx.attrs.find_int("past_present_share_buffer").unwrap_or(0) != 0 && cx.has_input(places.past);
    let tells = places.length.is_some_and(|index| cx.has_input(index));
    ensure!(tells || !shares, InvalidGraph, "past_present_share_buffer needs past_sequence_length");
    let (Some([batch, queries, depth]), Some([rows, width])) = (cx.shape(0), cx.shape(1)) else {
        return Ok(());
    };
    agree("the count of rows of the weights", depth, rows)?;
    if let Some([len]) = cx.shape(places.bias) {
        cx.require_equal("the length of bias", len, width)?;
    }
    let [size, value_size] = head_sizes(cx, width, &heads)?;
    cx.set_shape(0, vec![batch.clone(), queries.clone(), &heads * &value_size])?;
    if cx.has_input(places.past) || cx.has_output(1) {
        // The present stacks keys and values in one tensor.
        agree("the size of the heads of values, which are kept with keys,", &size, &value_size)?;
    }
    let total = match cx.shape(places.past) {
        None if cx.has_input(places.past) => return Ok(()),
        Some([sides, b, n, past, s]) => {
            let expected = [(&Dim::constant(2), sides), (batch, b), (&heads, n), (&size, s)];
            let mut sizes = expected.into_iter();
            sizes.try_for_each(|(expected, own)| cx.require_equal("a size of past", own, expected))?;
            // A shared buffer keeps its size; otherwise the present is the past with the new keys.
            if shares { past.clone() } else { past + queries }
        }
        _ => queries.clone(),
    };
    cx.set_shape(1, vec![Dim::constant(2), batch.clone(), heads, total, size])
}

fn lower(draft: &mut Draft<'_>) -> Result<()> {
    let (input, weights) = (draft.required(0)?, draft.required(1)?);
    let product = draft.emit("MatMul", &[input, weights], &[])?;
    attend_projected(draft, product, &PLACES)
}

/// The attributes shared with `MultiHeadAttention`.
const COMMON: &[&str] = &["mask_filter_value", "num_heads", "scale", "unidirectional"];

/// Returns the attributes of a node that `MultiHeadAttention` has too.
pub(super) fn common_attrs(draft: &Draft<'_>) -> Vec<(&'static str, Attribute)> {
    let given = COMMON.iter().map(|name| (*name, draft.attr(name).cloned()));
    given.filter_map(|(name, value)| Some((name, value?))).collect()
}

/// Splits the last dimension into queries, keys and values.
pub(super) fn split_projected(draft: &mut Draft<'_>, projected: ValueId) -> Result<[ValueId; 3]> {
    let last = ("axis", Attribute::Int(-1));
    let parts = match draft.attr("qkv_hidden_sizes").cloned() {
        Some(Attribute::Ints(sizes)) => {
            let sizes = draft.constant_ints(&sizes)?;
            draft.emit_many("Split", &[Some(projected), Some(sizes)], &[last], 3)?
        }
        _ => draft.emit_many("Split", &[Some(projected)], &[last, ("num_outputs", Attribute::Int(3))], 3)?,
    };
    <[ValueId; 3]>::try_from(parts).map_err(|_| error!(Fail, "Split has as many outputs as it is told"))
}

/// Replaces a node by `MultiHeadAttention` over `projected`, which holds queries, keys and values
/// side by side in its last dimension, without their bias. The past and the present are one tensor
/// of two halves: keys and values.
pub(super) fn attend_projected(
    draft: &mut Draft<'_>,
    projected: ValueId,
    places: &OptionalInputs,
) -> Result<()> {
    let rotates = matches!(draft.attr("do_rotary"), Some(Attribute::Int(rotates)) if *rotates != 0);
    ensure!(
        !rotates,
        NotImplemented,
        "do_rotary of {}; MultiHeadAttention behind RotaryEmbedding does the same",
        draft.op
    );
    let mut inputs: Vec<Option<ValueId>> = split_projected(draft, projected)?.into_iter().map(Some).collect();
    inputs.extend([
        draft.input(places.bias),
        draft.input(places.mask),
        places.attention_bias.and_then(|index| draft.input(index)),
    ]);
    if let Some(past) = draft.input(places.past) {
        for half in [0_i64, 1] {
            let half = draft.constant(Tensor::scalar(half)?);
            // A scalar index drops the axis of the halves: [batch, heads, keys, size].
            inputs.push(Some(draft.emit("Gather", &[past, half], &[])?));
        }
        // `MultiHeadAttention` takes a length to mean a shared buffer, so only such a past passes
        // one.
        let length = places.length.filter(|_| shares_buffer(draft));
        inputs.push(length.and_then(|index| draft.input(index)));
    }
    let attrs = common_attrs(draft);
    let outputs = if wants(draft, 1) { 3 } else { 1 };
    let results = draft.emit_in((MICROSOFT, "MultiHeadAttention"), &inputs, &attrs, outputs)?;
    let [result, halves @ ..] = &results[..] else {
        return Err(error!(Fail, "MultiHeadAttention has an output"));
    };
    if halves.is_empty() {
        return draft.replace(&[*result]);
    }
    let first = draft.constant_ints(&[0])?;
    let mut sides = Vec::with_capacity(2);
    for half in halves {
        sides.push(draft.emit("Unsqueeze", &[*half, first], &[])?);
    }
    let present = draft.emit("Concat", &sides, &[("axis", Attribute::Int(0))])?;
    draft.replace(&[*result, present])
}
