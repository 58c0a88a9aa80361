//! `GridAttention`: attention to keys that form a grid, with a bias for each row and each column of
//! it.
//!
//! Decomposed relative positions of images are such biases (Li et al., *MViTv2*, arXiv 2112.01526;
//! Kirillov et al., *Segment Anything*, arXiv 2304.02643). A mask with their sums would be as large
//! as the scores.

use crate::dim::Dim;
use crate::dtype::TypeSet;
use crate::ops;
use crate::ops::batch;
use crate::ops::microsoft::agree;
use crate::ops::nn::HIDDEN_IS_NAN;
use crate::ops::nn::attention::split_heads;
use crate::spec::{AttrKind, BatchRule, Cost, Draft, InferCx, OP, OpSpec, RUNTIME, attr, one, var};
use crate::{Result, ensure, error};

/// `Y = softmax(scale * Q K^T + bias) V` over the keys `row * columns + column`, whose bias is
/// `row_bias[.., row] + column_bias[.., column]`.
///
/// Q, K and V have the layouts of `Attention`. The biases are [batch, heads, queries, rows] and
/// [batch, heads, queries, columns].
static GRID_ATTENTION: OpSpec = OpSpec {
    domain: RUNTIME,
    name: "GridAttention",
    inputs: &[one("Q", "T"), one("K", "T"), one("V", "T"), one("row_bias", "T"), one("column_bias", "T")],
    outputs: &[one("Y", "T")],
    types: &[var("T", TypeSet::FLOATS)],
    attrs: &[
        attr::int(HIDDEN_IS_NAN, 0),
        attr::optional("kv_num_heads", AttrKind::Int),
        attr::optional("q_num_heads", AttrKind::Int),
        attr::optional("scale", AttrKind::Float),
    ],
    cost: Cost::Compute,
    infer,
    lower: Some(lower),
    batch: BatchRule::Rule(batch::items_first),
    ..OP
};

ops![GRID_ATTENTION];

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let (Some(q), Some(k), Some(v)) = (cx.shape(0), cx.shape(1), cx.shape(2)) else { return Ok(()) };
    ensure!(q.len() == k.len() && k.len() == v.len(), InvalidGraph, "Q, K and V must have one rank");
    let [batch, heads, queries, _] = split_heads(cx, "Q", q, "q_num_heads")?;
    let [_, _, keys, _] = split_heads(cx, "K", k, "kv_num_heads")?;
    let [_, _, _, size] = split_heads(cx, "V", v, "kv_num_heads")?;
    let y = match q.len() {
        3 => vec![batch.clone(), queries.clone(), &heads * &size],
        _ => vec![batch.clone(), heads.clone(), queries.clone(), size],
    };
    let mut grid = Dim::constant(1);
    for (index, name) in [(3, "row_bias"), (4, "column_bias")] {
        let Some(shape) = cx.shape(index) else { return cx.set_shape(0, y) };
        let [own_batch, own_heads, own_queries, size] = shape else {
            return Err(error!(InvalidGraph, "{name} has rank {}, expected 4", shape.len()));
        };
        agree("the batch of a bias", &batch, own_batch)?;
        agree("the number of heads of a bias", &heads, own_heads)?;
        agree("the number of queries of a bias", &queries, own_queries)?;
        grid = &grid * size;
    }
    agree("the number of keys on the grid", &keys, &grid)?;
    cx.set_shape(0, y)
}

/// `Attention` with a mask that has the bias of each key.
fn lower(draft: &mut Draft<'_>) -> Result<()> {
    let [q, k, v] = [draft.required(0)?, draft.required(1)?, draft.required(2)?];
    let (last, before) = (draft.constant_ints(&[-1])?, draft.constant_ints(&[-2])?);
    let (rows, columns) = (draft.required(3)?, draft.required(4)?);
    let rows = draft.emit("Unsqueeze", &[rows, last], &[])?;
    let columns = draft.emit("Unsqueeze", &[columns, before], &[])?;
    let bias = draft.emit("Add", &[rows, columns], &[])?;
    // A 0 copies the size, so the batch may be symbolic.
    let keys = draft.constant_ints(&[0, 0, 0, -1])?;
    let bias = draft.emit("Reshape", &[bias, keys], &[])?;
    let attrs = draft.attrs.clone();
    let attrs: Vec<_> = attrs.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    let result = draft.emit("Attention", &[q, k, v, bias], &attrs)?;
    draft.replace(&[result])
}
