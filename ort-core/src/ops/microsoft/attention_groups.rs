//! `GroupQueryAttention`: causal attention with a KV cache, in which a group of query heads shares
//! one head of keys and values.

use super::attention_heads::{ATTENTION_TYPES, head_count, head_size};
use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ops;
use crate::ops::batch;
use crate::ops::nn::attention::problem::{CacheQuantization, GroupQuery};
use crate::spec::{AttrKind, BatchRule, Cost, Grad, InferCx, MICROSOFT, OP, OpSpec, attr, one, opt, var};
use crate::{Result, ensure, error};

const CACHE_TYPES: TypeSet = ATTENTION_TYPES.union(TypeSet::of(&[DType::U8, DType::I8, DType::F8E4M3FN]));

static GROUP_QUERY_ATTENTION: OpSpec = OpSpec {
    domain: MICROSOFT,
    name: "GroupQueryAttention",
    grad: Grad::None("it is for generation, over a cache; Attention has a gradient"),
    since: 1,
    inputs: &[
        one("query", "T"),
        opt("key", "T"),
        opt("value", "T"),
        opt("past_key", "T_CACHE"),
        opt("past_value", "T_CACHE"),
        one("seqlens_k", "M"),
        one("total_sequence_length", "M").host(),
        opt("cos_cache", "T"),
        opt("sin_cache", "T"),
        opt("position_ids", "tensor(int64)"),
        opt("attention_bias", "T"),
        opt("head_sink", "T"),
        opt("k_scale", "T_KV_SCALE"),
        opt("v_scale", "T_KV_SCALE"),
        opt("q_norm_weight", "T"),
        opt("k_norm_weight", "T"),
    ],
    outputs: &[
        one("output", "T"),
        opt("present_key", "T_CACHE"),
        opt("present_value", "T_CACHE"),
        opt("output_qk", "T"),
    ],
    types: &[
        var("T", ATTENTION_TYPES),
        var("T_CACHE", CACHE_TYPES),
        var("T_KV_SCALE", TypeSet::of(&[DType::F32])),
        var("M", TypeSet::of(&[DType::I32])),
    ],
    attrs: &[
        attr::int("causal", 1),
        attr::optional("do_rotary", AttrKind::Int),
        attr::string("k_quant_type", "NONE"),
        attr::optional("kv_cache_bit_width", AttrKind::Int),
        attr::required("kv_num_heads", AttrKind::Int),
        attr::int("local_window_size", -1),
        attr::required("num_heads", AttrKind::Int),
        attr::float("qk_norm_epsilon", 1e-6),
        attr::int("qk_output", 0),
        attr::optional("rotary_interleaved", AttrKind::Int),
        attr::optional("scale", AttrKind::Float),
        attr::int("sliding_window_cache", 0),
        attr::int("smooth_softmax", -1),
        attr::optional("softcap", AttrKind::Float),
        attr::string("v_quant_type", "NONE"),
    ],
    cost: Cost::Compute,
    infer,
    batch: BatchRule::Rule(batch::group_query),
    ..OP
};

ops![GROUP_QUERY_ATTENTION];

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    // Refuses attributes that contradict each other before a provider is asked.
    let node = GroupQuery::new(cx.attrs)?;
    let (heads, key_heads) = (head_count(cx, "num_heads")?, head_count(cx, "kv_num_heads")?);
    // Both counts are constants above 0, so this is the remainder of the division.
    let groups = &heads - &key_heads * heads.floor_div(&key_heads);
    ensure!(
        groups == Dim::constant(0),
        InvalidGraph,
        "{heads} query heads are not a multiple of {key_heads} key heads"
    );
    for (first, second, names) in [(1, 2, "key and value"), (3, 4, "past_key and past_value")] {
        let together = cx.has_input(first) == cx.has_input(second);
        ensure!(together, InvalidGraph, "{names} must be given together");
    }
    let query = match cx.shape(0) {
        None => return Ok(()),
        Some([batch, queries, width]) => [batch, queries, width],
        Some(shape) => return Err(error!(InvalidGraph, "query has rank {}, expected 3", shape.len())),
    };
    let [batch, queries, width] = query.map(Dim::clone);
    // Without keys the query is packed: the heads of keys and values follow its own.
    let size = match cx.has_input(1) {
        true => head_size("query", &width, &heads)?,
        false => head_size("query", &width, &(&heads + &key_heads * 2))?,
    };
    cx.set_shape(0, vec![batch.clone(), queries.clone(), &heads * &size])?;
    // Two elements of 4 bits share a byte.
    let row = match node.quantization {
        Some(CacheQuantization { bits: 4, .. }) => (&size + 1).floor_div(&Dim::constant(2)),
        _ => size,
    };
    // `total_sequence_length` covers the past and the new tokens of the longest sequence.
    let total = cx.dims(6).and_then(|total| total.first().cloned()).unwrap_or_else(|| cx.fresh());
    let (cache, row) = match cx.shape(3) {
        None if cx.has_input(3) => return Ok(()),
        None => (total.clone(), row),
        Some([_, _, past, own]) => {
            // Exporters leave this size open, although the width of the query decides it.
            cx.require_equal("the last size of past_key", own, &row)?;
            // If the past has room for the total length it is also the buffer of the present;
            // otherwise the present is longer. A sliding window never grows.
            (if node.slides { past.clone() } else { past.max(&total) }, own.clone())
        }
        Some(shape) => return Err(error!(InvalidGraph, "past_key has rank {}, expected 4", shape.len())),
    };
    // The cache may be quantized, so its type follows the past, not the query.
    let dtype = cx.dtype(if cx.has_input(3) { 3 } else { 0 })?;
    for index in [1, 2] {
        let shape = vec![batch.clone(), key_heads.clone(), cache.clone(), row.clone()];
        cx.set(index, dtype, Some(shape));
    }
    cx.set_shape(3, vec![batch, heads, queries, total])
}
