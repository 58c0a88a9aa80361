//! `PackedAttention`: `Attention` over a batch of sequences of different lengths, stored without
//! padding.

use super::attention_heads::head_count;
use super::attention_projected::{common_attrs, head_sizes, split_projected};
use super::{agree, check_rank, number};
use crate::dtype::{DType, TypeSet};
use crate::ir::{Attribute, ValueId};
use crate::ops;
use crate::spec::{AttrKind, Cost, Draft, InferCx, MICROSOFT, OP, OpSpec, attr, one, opt, var};
use crate::{Result, ensure, error};

static PACKED_ATTENTION: OpSpec = OpSpec {
    domain: MICROSOFT,
    name: "PackedAttention",
    since: 1,
    inputs: &[
        one("input", "T"),
        one("weights", "T"),
        one("bias", "T"),
        one("token_offset", "M"),
        one("cumulative_sequence_length", "M"),
        opt("attention_bias", "T"),
    ],
    outputs: &[one("output", "T")],
    types: &[var("T", TypeSet::of(&[DType::F32, DType::F16])), var("M", TypeSet::of(&[DType::I32]))],
    attrs: &[
        attr::required("num_heads", AttrKind::Int),
        attr::optional("qkv_hidden_sizes", AttrKind::Ints),
        attr::optional("scale", AttrKind::Float),
    ],
    cost: Cost::Compute,
    infer,
    lower: Some(lower),
    ..OP
};

ops![PACKED_ATTENTION];

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let heads = head_count(cx, "num_heads")?;
    let inputs = [
        (0, "input", 2),
        (1, "the weights", 2),
        (2, "bias", 1),
        (3, "token_offset", 2),
        (4, "cumulative_sequence_length", 1),
        (5, "attention_bias", 4),
    ];
    for (index, what, rank) in inputs {
        check_rank(cx, index, what, rank)?;
    }
    if let (Some([batch, _]), Some([len])) = (cx.shape(3), cx.shape(4)) {
        agree("the length of cumulative_sequence_length", &(batch + 1), len)?;
    }
    let (Some([tokens, depth]), Some([rows, width])) = (cx.shape(0), cx.shape(1)) else { return Ok(()) };
    agree("the count of rows of the weights", depth, rows)?;
    if let Some([len]) = cx.shape(2) {
        agree("the length of bias", width, len)?;
    }
    if let Some([batch, longest]) = cx.shape(3) {
        // `token_offset` has an entry for each place of the padded batch, so there cannot be more
        // tokens.
        let places = (batch * longest).as_constant();
        let enough =
            !matches!((tokens.as_constant(), places), (Some(tokens), Some(places)) if tokens > places);
        ensure!(enough, InvalidGraph, "{tokens} tokens for {batch} sequences of at most {longest}");
    }
    let [_, value_size] = head_sizes(cx, width, &heads)?;
    cx.set_shape(0, vec![tokens.clone(), heads * value_size])
}

/// Scatters the projections to their tokens' places in the padded batch, attends with the sequence
/// lengths as the mask, and gathers the results.
fn lower(draft: &mut Draft<'_>) -> Result<()> {
    let (input, weights, bias) = (draft.required(0)?, draft.required(1)?, draft.required(2)?);
    let (offsets, ends) = (draft.required(3)?, draft.required(4)?);
    let dtype = draft.dtype(0)?;
    let [zero, one, rest] =
        [draft.constant_ints(&[0])?, draft.constant_ints(&[1])?, draft.constant_ints(&[-1])?];
    let padded = draft.emit("Shape", &[offsets], &[])?;
    let batch = draft.emit("Shape", &[offsets], &[("end", Attribute::Int(1))])?;
    let tokens = draft.emit("Shape", &[input], &[("end", Attribute::Int(1))])?;
    let places = draft.emit("ReduceProd", &[padded], &[])?;

    // `token_offset` lists the places of all tokens first, then those of the padding.
    let offsets =
        draft.emit("Cast", &[offsets], &[("to", Attribute::Int(i64::from(DType::I64.onnx_code())))])?;
    let offsets = draft.emit("Reshape", &[offsets, rest], &[])?;
    let offsets = draft.emit("Slice", &[offsets, zero, tokens], &[])?;
    let offsets = draft.emit("Reshape", &[offsets, tokens], &[])?;

    // `MultiHeadAttention` adds the bias, to the rows of the padding as well; the lengths mask
    // these.
    let projected = draft.emit("MatMul", &[input, weights], &[])?;
    let width = draft.emit("Shape", &[weights], &[("start", Attribute::Int(1))])?;
    let (blank, shape) = (number(draft, 0.0, dtype)?, concat(draft, &[places, width])?);
    let empty = draft.emit("Expand", &[blank, shape], &[])?;
    let rows = draft.emit("Unsqueeze", &[offsets, one], &[])?;
    let unpacked = draft.emit("ScatterND", &[empty, rows, projected], &[])?;
    let shape = concat(draft, &[padded, width])?;
    let unpacked = draft.emit("Reshape", &[unpacked, shape], &[("allowzero", Attribute::Int(1))])?;

    // The lengths are the differences of the cumulative lengths.
    let last = draft.constant_ints(&[i64::MAX])?;
    let starts = draft.emit("Slice", &[ends, zero, rest], &[])?;
    let ends = draft.emit("Slice", &[ends, one, last], &[])?;
    let lengths = draft.emit("Sub", &[ends, starts], &[])?;
    let lengths = draft.emit("Reshape", &[lengths, batch], &[])?;
    let [query, key, value] = split_projected(draft, unpacked)?;
    let inputs = [query, key, value, bias, lengths].map(Some);
    let inputs: Vec<Option<ValueId>> = inputs.into_iter().chain([draft.input(5)]).collect();
    let attrs = common_attrs(draft);
    let results = draft.emit_in((MICROSOFT, "MultiHeadAttention"), &inputs, &attrs, 1)?;
    let [result] = results[..] else { return Err(error!(Fail, "MultiHeadAttention has no output")) };

    // From [batch, longest, width] to [batch * longest, width], in which the offsets are rows.
    let width = draft.emit("Shape", &[result], &[("start", Attribute::Int(2))])?;
    let shape = concat(draft, &[places, width])?;
    let result = draft.emit("Reshape", &[result, shape], &[("allowzero", Attribute::Int(1))])?;
    draft.become_op("Gather", &[result, offsets], &[]);
    Ok(())
}

/// Concatenates sizes into a shape.
fn concat(draft: &mut Draft<'_>, parts: &[ValueId]) -> Result<ValueId> {
    draft.emit("Concat", parts, &[("axis", Attribute::Int(0))])
}
