//! Scaled dot-product attention: `Attention`.
//!
//! Covers additive masks, sliding windows, grouped-query heads and the KV cache. Inputs come by
//! heads (rank 4) or with the heads concatenated (rank 3).

pub mod problem;

use super::attention_gradients::{HIDDEN_IS_NAN, attention_parts};
use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ir::Attribute;
use crate::ops;
use crate::ops::batch;
use crate::spec::{AttrKind, BatchRule, Cost, Draft, Grad, InferCx, OP, OpSpec, attr, one, opt, var};
use crate::{Result, ensure, error};

static ATTENTION: OpSpec = OpSpec {
    name: "Attention",
    grad: Grad::Parts(attention_parts),
    since: 25,
    first: 23,
    inputs: &[
        one("Q", "T1"),
        one("K", "T1"),
        one("V", "T2"),
        opt("attn_mask", "U"),
        opt("past_key", "T1"),
        opt("past_value", "T2"),
        opt("nonpad_kv_seqlen", "tensor(int64)"),
    ],
    outputs: &[
        one("Y", "T1"),
        opt("present_key", "T1"),
        opt("present_value", "T2"),
        opt("qk_matmul_output", "T1"),
    ],
    types: &[
        var("T1", TypeSet::FLOATS),
        var("T2", TypeSet::FLOATS),
        var("U", TypeSet::NUMERIC.union(TypeSet::of(&[DType::Bool]))),
    ],
    attrs: &[
        attr::int("is_causal", 0),
        attr::optional("kv_num_heads", AttrKind::Int),
        attr::int("left_window_size", -1),
        attr::optional("q_num_heads", AttrKind::Int),
        attr::int("qk_matmul_output_mode", 0),
        attr::int("right_window_size", -1),
        attr::optional("scale", AttrKind::Float),
        attr::float("softcap", 0.0),
        attr::optional("softmax_precision", AttrKind::Int),
    ],
    internal_attrs: &[attr::int(HIDDEN_IS_NAN, 0)],
    cost: Cost::Compute,
    infer,
    lower: Some(lower),
    batch: BatchRule::Rule(batch::attention),
    ..OP
};

ops![ATTENTION];

/// `TensorProto.DataType.DOUBLE`, as `softmax_precision` encodes it.
const DOUBLE: i64 = 11;

/// Decomposes into casts around an `Attention` of `double`.
///
/// Applies if the inputs mix types of which one is `double`, or if `softmax_precision` asks for it.
/// Everything else needs the kernel.
fn lower(draft: &mut Draft<'_>) -> Result<()> {
    let (query, value) = (draft.dtype(0)?, draft.dtype(2)?);
    let precision = match draft.attr("softmax_precision") {
        Some(Attribute::Int(code)) => *code,
        _ => 0,
    };
    let asked = query == DType::F64 || value == DType::F64 || precision == DOUBLE;
    // `double` throughout has a kernel, and must not be decomposed into itself without end.
    ensure!(asked && (query != value || query != DType::F64), NotImplemented, "Attention has no parts");
    let to = |dtype: DType| [("to", Attribute::Int(i64::from(dtype.onnx_code())))];
    let mut inputs = draft.inputs.clone();
    // Q, K, V and the KV cache. Masks and lengths keep their types.
    for index in [0, 1, 2, 4, 5] {
        if let (Some(input), Some(cast)) = (draft.input(index), inputs.get_mut(index)) {
            *cast = Some(draft.emit("Cast", &[input], &to(DType::F64))?);
        }
    }
    let attrs = draft.attrs.clone();
    let attrs: Vec<(&str, Attribute)> =
        attrs.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    let outputs = draft.emit_many("Attention", &inputs, &attrs, draft.outputs.len())?;
    let mut results = Vec::with_capacity(outputs.len());
    for (index, output) in outputs.into_iter().enumerate() {
        // Only `present_value` has the type of V; the other outputs have that of Q.
        let dtype = if index == 2 { value } else { query };
        results.push(draft.emit("Cast", &[output], &to(dtype))?);
    }
    draft.replace(&results)
}

/// The shape of Q, K or V as (batch, heads, sequence, head size).
///
/// A tensor of rank 3 concatenates its heads, and `attribute` counts them. A symbolic width is
/// taken to divide.
pub(in crate::ops) fn split_heads(
    cx: &InferCx<'_>,
    name: &str,
    shape: &[Dim],
    attribute: &str,
) -> Result<[Dim; 4]> {
    match shape {
        [batch, heads, sequence, size] => Ok([batch.clone(), heads.clone(), sequence.clone(), size.clone()]),
        [batch, sequence, hidden] => {
            let count = cx.attrs.int(attribute)?;
            ensure!(count > 0, InvalidGraph, "{attribute} is {count}, expected at least 1");
            let divides = hidden.as_constant().is_none_or(|hidden| hidden % count == 0);
            ensure!(
                divides,
                InvalidGraph,
                "{name} has width {hidden}, expected a multiple of the {count} heads"
            );
            let size = hidden.floor_div(&Dim::constant(count));
            Ok([batch.clone(), Dim::constant(count), sequence.clone(), size])
        }
        _ => Err(error!(InvalidGraph, "{name} has rank {}, expected 3 or 4", shape.len())),
    }
}

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let (past_key, past_value) = (cx.has_input(4), cx.has_input(5));
    ensure!(past_key == past_value, InvalidGraph, "past_key and past_value must be given together");
    let (Some(q), Some(k), Some(v)) = (cx.shape(0), cx.shape(1), cx.shape(2)) else { return Ok(()) };
    ensure!(q.len() == k.len() && k.len() == v.len(), InvalidGraph, "Q, K and V must have one rank");
    // Rank 3 is [batch, sequence, heads * size], rank 4 [batch, heads, sequence, size].
    let is_flat = q.len() == 3;
    let [batch, query_heads, time, _] = split_heads(cx, "Q", q, "q_num_heads")?;
    let [_, key_heads, fresh, key_size] = split_heads(cx, "K", k, "kv_num_heads")?;
    let [_, value_heads, _, value_size] = split_heads(cx, "V", v, "kv_num_heads")?;
    let past = match (past_key, cx.shape(4)) {
        (false, _) => Dim::constant(0),
        (true, Some([_, _, past, _])) => past.clone(),
        (true, Some(_)) => return Err(error!(InvalidGraph, "past_key must have rank 4")),
        // Without the past length no output shape is known, not even a symbolic total.
        (true, None) => return Ok(()),
    };
    let total = past + fresh;
    // The kernel attends by heads, but Y comes back in the layout of Q: rank 3 or 4.
    let y = match is_flat {
        true => vec![batch.clone(), time.clone(), &query_heads * &value_size],
        false => vec![batch.clone(), query_heads.clone(), time.clone(), value_size.clone()],
    };
    cx.set_shape(0, y)?;
    // The cache has rank 4 in either layout.
    cx.set_shape(1, vec![batch.clone(), key_heads, total.clone(), key_size])?;
    cx.set_shape(2, vec![batch.clone(), value_heads, total.clone(), value_size])?;
    cx.set_shape(3, vec![batch, query_heads, time, total])
}
