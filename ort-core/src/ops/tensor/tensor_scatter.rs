//! `TensorScatter`: writes new entries into a cache, such as the KV cache of attention.

use super::index_gradients;
use crate::dtype::TypeSet;
use crate::ops;
use crate::spec::{Grad, InferCx, OP, OpSpec, Traits, attr, one, opt, var};
use crate::{Result, ensure, one_of};

use super::geometry::normalize_axis;

static TENSOR_SCATTER: OpSpec = OpSpec {
    name: "TensorScatter",
    grad: Grad::Rule(index_gradients::of_tensor_scatter),
    since: 24,
    first: 24,
    inputs: &[one("past_cache", "T"), one("update", "T"), opt("write_indices", "tensor(int64)")],
    outputs: &[one("present_cache", "T")],
    types: &[var("T", TypeSet::ALL_TENSOR_IR12)],
    attrs: &[attr::string("mode", "linear"), attr::int("axis", -2)],
    traits: Traits::MOVES_DATA,
    infer,
    ..OP
};

ops![TENSOR_SCATTER];

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let mode = cx.attrs.string("mode")?;
    one_of("the mode", mode, &["linear", "circular"])?;
    let Some(cache) = cx.shape(0) else { return Ok(()) };
    let axis = normalize_axis(cx.attrs.int("axis")?, cache.len())?;
    ensure!(axis > 0, InvalidGraph, "the axis cannot be the batch");
    let same = cx.shape(1).is_none_or(|update| update.len() == cache.len());
    ensure!(
        same,
        InvalidGraph,
        "the rank of the update differs from that of the cache, whose shape is {cache:?}"
    );
    cx.set_shape(0, cache.to_vec())
}
