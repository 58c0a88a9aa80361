//! `EmbedLayerNormalization` and `QEmbedLayerNormalization`: layer normalization of the sum of
//! word, position and segment embeddings, of floats or quantized.

use super::{agree, check_per_column, check_rank, float, wants};
use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ir::{Attribute, ValueId};
use crate::ops;
use crate::spec::{AttrKind, Draft, InferCx, MICROSOFT, OP, OpSpec, Requirement, attr, one, opt, var};
use crate::tensor::Tensor;
use crate::{Result, ensure};

static EMBED_LAYER_NORMALIZATION: OpSpec = OpSpec {
    domain: MICROSOFT,
    name: "EmbedLayerNormalization",
    inputs: &[
        one("input_ids", "T1"),
        opt("segment_ids", "T1"),
        one("word_embedding", "T"),
        one("position_embedding", "T"),
        opt("segment_embedding", "T"),
        one("gamma", "T"),
        one("beta", "T"),
        opt("mask", "T1"),
        opt("position_ids", "T1"),
    ],
    outputs: &[one("output", "T"), opt("mask_index", "T1"), opt("embedding_sum", "T")],
    types: &[var("T1", TypeSet::of(&[DType::I32])), var("T", TypeSet::of(&[DType::F32, DType::F16]))],
    attrs: &[attr::float("epsilon", 1e-12), attr::optional("mask_index_type", AttrKind::Int)],
    infer,
    lower: Some(lower),
    ..OP
};

const BYTES: TypeSet = TypeSet::of(&[DType::I8, DType::U8]);

static QEMBED_LAYER_NORMALIZATION: OpSpec = OpSpec {
    domain: MICROSOFT,
    name: "QEmbedLayerNormalization",
    inputs: &[
        one("input_ids", "T1"),
        opt("segment_ids", "T1"),
        one("word_embedding_quant", "T2"),
        one("position_embedding_quant", "T2"),
        opt("segment_embedding", "T2"),
        one("gamma_quant", "T2"),
        one("beta_quant", "T2"),
        opt("mask", "T1"),
        one("word_embedding_scale", "T"),
        one("position_embedding_scale", "T"),
        opt("segment_embedding_scale", "T"),
        one("gamma_scale", "T"),
        one("beta_scale", "T"),
        one("word_embedding_zero_point", "T2"),
        one("position_embedding_zero_point", "T2"),
        opt("segment_embedding_zero_point", "T2"),
        one("gamma_zero_point", "T2"),
        one("beta_zero_point", "T2"),
    ],
    outputs: &[one("layernorm_out", "T"), one("mask_index_out", "T1")],
    types: &[var("T1", TypeSet::of(&[DType::I32])), var("T2", BYTES), var("T", TypeSet::of(&[DType::F32]))],
    attrs: &[attr::float("epsilon", 1e-12)],
    infer: infer_quantized,
    lower: Some(lower_quantized),
    ..OP
};

ops![EMBED_LAYER_NORMALIZATION, QEMBED_LAYER_NORMALIZATION];

fn infer_quantized(cx: &mut InferCx<'_>) -> Result<()> {
    let segments = [1, 4, 10, 15].map(|index| cx.has_input(index));
    ensure!(
        segments == [segments[0]; 4],
        InvalidGraph,
        "segment_ids, segment_embedding, its scale and its zero point must be given together"
    );
    for index in 8..18 {
        for size in cx.shape(index).unwrap_or(&[]) {
            agree("the elements of a scale or zero point", &Dim::constant(1), size)?;
        }
    }
    infer(cx)
}

/// Dequantizes only the rows that are looked up.
fn lower_quantized(draft: &mut Draft<'_>) -> Result<()> {
    let (ids, table) = (draft.required(0)?, draft.required(2)?);
    let words = draft.emit("Gather", &[table, ids], &[])?;
    let words = dequantize(draft, words, 8)?;
    let table = draft.required(3)?;
    let positions = first_positions(draft, table, ids)?;
    let positions = dequantize(draft, positions, 9)?;
    let mut sum = draft.emit("Add", &[words, positions], &[])?;
    if let (Some(which), Some(table)) = (draft.input(1), draft.input(4)) {
        let segments = draft.emit("Gather", &[table, which], &[])?;
        let segments = dequantize(draft, segments, 10)?;
        sum = draft.emit("Add", &[sum, segments], &[])?;
    }
    let (gamma, beta) = (draft.required(5)?, draft.required(6)?);
    let (gamma, beta) = (dequantize(draft, gamma, 11)?, dequantize(draft, beta, 12)?);
    let attrs = [("epsilon", Attribute::Float(float(draft, "epsilon")?))];
    let result = draft.emit("LayerNormalization", &[sum, gamma, beta], &attrs)?;
    // `replace` skips an output that the node lacks, so any value may stand in for it.
    let mask_index = if wants(draft, 1) { mask_index(draft, ids)? } else { result };
    draft.replace(&[result, mask_index])
}

/// Dequantizes a value with the single scale at `index` and its zero point.
fn dequantize(draft: &mut Draft<'_>, value: ValueId, index: usize) -> Result<ValueId> {
    let mut parameters = [draft.required(index)?, draft.required(index + 5)?];
    for parameter in &mut parameters {
        // One element of any rank.
        let scalar = draft.constant_ints(&[])?;
        *parameter = draft.emit("Reshape", &[*parameter, scalar], &[])?;
    }
    let [scale, zero] = parameters;
    draft.emit("DequantizeLinear", &[value, scale, zero], &[])
}

#[allow(
    clippy::indexing_slicing,
    reason = "the ranks of all tensors that are indexed are checked at the beginning"
)]
fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    for (index, what) in [
        (0, "input_ids"),
        (1, "segment_ids"),
        (2, "word_embedding"),
        (3, "position_embedding"),
        (4, "segment_embedding"),
        (7, "mask"),
    ] {
        check_rank(cx, index, what, 2)?;
    }
    ensure!(
        cx.has_input(4) || !cx.has_input(1),
        InvalidGraph,
        "segment_ids are given without a segment_embedding"
    );
    let Some(ids) = cx.shape(0) else { return Ok(()) };
    for (index, what) in [(1, "segment_ids"), (7, "mask")] {
        let Some(shape) = cx.shape(index) else { continue };
        cx.require_equal(format!("the batch of {what}"), &shape[0], &ids[0])?;
        cx.require_equal(format!("the length of {what}"), &shape[1], &ids[1])?;
    }
    // The other operator has no positions but a scale there.
    let has_positions = cx.has_input(8) && cx.input_count() <= 9;
    if has_positions {
        check_rank(cx, 8, "position_ids", 2)?;
    }
    if let Some(shape) = cx.shape(8).filter(|_| has_positions) {
        cx.require_equal("the length of position_ids", &shape[1], &ids[1])?;
        if shape[0] != Dim::constant(1) {
            agree("the batch of position_ids", &ids[0], &shape[0])?;
        }
    }
    // Without `position_ids` the positions are 0, 1, 2 and so on.
    if let (Some(table), false) = (cx.shape(3), has_positions) {
        let what = "the length of the sequences, each of whose tokens needs a position embedding,";
        cx.require(Requirement::at_most(what, &ids[1], &table[0]))?;
    }
    let mask_index = vec![ids[0].clone()];
    cx.set_shape(1, mask_index)?;
    let Some(words) = cx.shape(2) else { return Ok(()) };
    for (index, what) in [(3, "position_embedding"), (4, "segment_embedding")] {
        let Some(shape) = cx.shape(index) else { continue };
        cx.require_equal(format!("the width of {what}"), &shape[1], &words[1])?;
    }
    for (index, what) in [(5, "gamma"), (6, "beta")] {
        check_per_column(cx, index, what, words)?;
    }
    let shape = vec![ids[0].clone(), ids[1].clone(), words[1].clone()];
    cx.set_shape(0, shape.clone())?;
    cx.set_shape(2, shape)
}

fn lower(draft: &mut Draft<'_>) -> Result<()> {
    let (ids, words, positions) = (draft.required(0)?, draft.required(2)?, draft.required(3)?);
    let words = draft.emit("Gather", &[words, ids], &[])?;
    let positions = match draft.input(8) {
        Some(places) => draft.emit("Gather", &[positions, places], &[])?,
        None => first_positions(draft, positions, ids)?,
    };
    let mut sum = draft.emit("Add", &[words, positions], &[])?;
    if let Some(segments) = draft.input(4) {
        // Without `segment_ids` every word is in the first segment.
        let which = match draft.input(1) {
            Some(which) => which,
            None => draft.constant(Tensor::scalar(0_i64)?),
        };
        let segments = draft.emit("Gather", &[segments, which], &[])?;
        sum = draft.emit("Add", &[sum, segments], &[])?;
    }
    let attrs = [("epsilon", Attribute::Float(float(draft, "epsilon")?))];
    let (gamma, beta) = (draft.required(5)?, draft.required(6)?);
    let result = draft.emit("LayerNormalization", &[sum, gamma, beta], &attrs)?;
    // `replace` skips an output that the node lacks, so any value may stand in for it.
    let mask_index = if wants(draft, 1) { mask_index(draft, ids)? } else { result };
    draft.replace(&[result, mask_index, sum])
}

/// Returns the embeddings of the first positions, one for each word of a sequence.
fn first_positions(draft: &mut Draft<'_>, positions: ValueId, ids: ValueId) -> Result<ValueId> {
    let range = [("start", Attribute::Int(1)), ("end", Attribute::Int(2))];
    let length = draft.emit("Shape", &[ids], &range)?;
    // Rows 0 to the length. `Slice` clamps, but `infer` refuses a table that is known to be
    // shorter.
    let zero = draft.constant_ints(&[0])?;
    draft.emit("Slice", &[positions, zero, length, zero], &[])
}

/// Returns the number of ones in the mask of each sequence, or 0 without a mask.
fn mask_index(draft: &mut Draft<'_>, ids: ValueId) -> Result<ValueId> {
    let Some(mask) = draft.input(7) else {
        let batch = draft.emit("Shape", &[ids], &[("end", Attribute::Int(1))])?;
        let zero = Tensor::from_slice(&[1], &[0_i32])?;
        return draft.emit("ConstantOfShape", &[batch], &[("value", Attribute::Tensor(zero))]);
    };
    // ONNX Runtime counts the ones, so another nonzero value is no valid token.
    let one = draft.constant(Tensor::scalar(1_i32)?);
    let equal = draft.emit("Equal", &[mask, one], &[])?;
    let to = [("to", Attribute::Int(i64::from(DType::I32.onnx_code())))];
    let counted = draft.emit("Cast", &[equal], &to)?;
    let axis = draft.constant_ints(&[1])?;
    draft.emit("ReduceSum", &[counted, axis], &[("keepdims", Attribute::Int(0))])
}
