//! `MoE`: a mixture of experts, in which a router selects the top `k` for each token.

use super::{agree, check_rank};
use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ops;
use crate::spec::{AttrKind, Cost, Grad, InferCx, MICROSOFT, OP, OpSpec, attr, one, opt, var};
use crate::{Result, ensure};

static MIXTURE: OpSpec = OpSpec {
    domain: MICROSOFT,
    name: "MoE",
    grad: Grad::None("its experts are chosen by rank, and it is not made of other operators"),
    since: 1,
    inputs: &[
        one("input", "T"),
        one("router_probs", "T"),
        one("fc1_experts_weights", "T"),
        opt("fc1_experts_bias", "T"),
        one("fc2_experts_weights", "T"),
        opt("fc2_experts_bias", "T"),
        opt("fc3_experts_weights", "T"),
        opt("fc3_experts_bias", "T"),
    ],
    outputs: &[one("output", "T")],
    types: &[var("T", TypeSet::of(&[DType::F32, DType::F16, DType::BF16]))],
    attrs: &[
        attr::float("activation_alpha", 1.0),
        attr::float("activation_beta", 0.0),
        attr::string("activation_type", "relu"),
        attr::int("k", 1),
        attr::int("normalize_routing_weights", 0),
        attr::int("swiglu_fusion", 0),
        attr::optional("swiglu_limit", AttrKind::Float),
        attr::int("use_sparse_mixer", 0),
    ],
    cost: Cost::Compute,
    infer,
    ..OP
};

ops![MIXTURE];

const ACTIVATIONS: &[&str] = &["relu", "gelu", "silu", "swiglu", "identity"];

/// Returns how many columns of the first layer make one input of the second: 2 for a fused SwiGLU,
/// whose gate and value are interleaved or concatenated.
fn fused(cx: &InferCx<'_>) -> Result<i64> {
    let activation = cx.attrs.string("activation_type")?;
    ensure!(
        ACTIVATIONS.contains(&activation),
        InvalidGraph,
        "activation_type is '{activation}', expected one of {}",
        ACTIVATIONS.join(", ")
    );
    let fusion = cx.attrs.int("swiglu_fusion")?;
    ensure!((0..=2).contains(&fusion), InvalidGraph, "swiglu_fusion is {fusion}, expected 0, 1 or 2");
    let (has_third, is_gated) = (cx.has_input(6), activation == "swiglu");
    ensure!(
        !is_gated || has_third == (fusion == 0),
        InvalidGraph,
        "swiglu takes fc3_experts_weights with swiglu_fusion = 0 and only then, and swiglu_fusion is {fusion}"
    );
    ensure!(has_third || !cx.has_input(7), InvalidGraph, "fc3_experts_bias without fc3_experts_weights");
    Ok(if is_gated && fusion > 0 { 2 } else { 1 })
}

/// Checks the shape of an input against the expected sizes.
fn check(cx: &InferCx<'_>, index: usize, expected: &[&Dim]) -> Result<()> {
    let what = MIXTURE.input_param(index).map_or("", |param| param.name);
    check_rank(cx, index, what, expected.len())?;
    let own = cx.shape(index).unwrap_or(&[]);
    expected
        .iter()
        .zip(own)
        .try_for_each(|(expected, own)| agree(&format!("a size of {what}"), expected, own))
}

/// Infers an output of the input's shape, and checks the other inputs against the counts of tokens
/// and experts and the hidden and inner widths.
fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let (count, fused) = (cx.attrs.int("k")?, fused(cx)?);
    ensure!(count > 0, InvalidGraph, "k is {count}, expected at least 1");
    let Some(shape) = cx.shape(0) else { return Ok(()) };
    let (tokens, hidden) = match shape {
        [tokens, hidden] => (tokens.clone(), hidden),
        [batch, length, hidden] => (batch * length, hidden),
        _ => return Err(crate::error!(InvalidGraph, "input has rank {}, expected 2 or 3", shape.len())),
    };
    check_rank(cx, 1, "router_probs", 2)?;
    check_rank(cx, 4, "fc2_experts_weights", 3)?;
    if let (Some([_, experts]), Some([_, _, inner])) = (cx.shape(1), cx.shape(4)) {
        let few = experts.as_constant().is_none_or(|experts| count <= experts);
        ensure!(few, InvalidGraph, "k is {count}, but there are {experts} experts");
        // Weights are [experts, outputs, inputs], biases [experts, outputs].
        let first = inner * fused;
        check(cx, 1, &[&tokens, experts])?;
        check(cx, 2, &[experts, &first, hidden])?;
        check(cx, 3, &[experts, &first])?;
        check(cx, 4, &[experts, hidden, inner])?;
        check(cx, 5, &[experts, hidden])?;
        check(cx, 6, &[experts, inner, hidden])?;
        check(cx, 7, &[experts, inner])?;
    }
    cx.set_shape(0, shape.to_vec())
}
