//! `MoE` and `QMoE`: a mixture of experts, in which a router selects the top `k` for each token.

use super::{agree, check_rank};
use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ops;
use crate::ops::math::shared::same_shape;
use crate::spec::{AttrKind, Cost, Grad, InferCx, MICROSOFT, OP, OpSpec, attr, one, opt, var};
use crate::{Result, ensure, error};

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

/// The float attributes have the defaults of `MoE`.
static QUANTIZED_MIXTURE: OpSpec = OpSpec {
    domain: MICROSOFT,
    name: "QMoE",
    grad: Grad::None("its experts are chosen by rank, and its weights are quantized"),
    since: 1,
    inputs: &[
        one("input", "T"),
        one("router_probs", "T"),
        one("fc1_experts_weights", "T1"),
        opt("fc1_scales", "T2"),
        opt("fc1_experts_bias", "T"),
        one("fc2_experts_weights", "T1"),
        opt("fc2_scales", "T2"),
        opt("fc2_experts_bias", "T"),
        opt("fc3_experts_weights", "T1"),
        opt("fc3_scales", "T2"),
        opt("fc3_experts_bias", "T"),
        opt("fc1_zero_points", "T1"),
        opt("fc2_zero_points", "T1"),
        opt("fc3_zero_points", "T1"),
        opt("router_weights", "T"),
        opt("fc1_global_scale", "T4"),
        opt("fc2_global_scale", "T4"),
        opt("fc1_act_scale", "T4"),
        opt("fc2_act_scale", "T4"),
        opt("fc1_act_block_scale", "T2"),
        opt("fc2_act_block_scale", "T2"),
    ],
    outputs: &[one("output", "T")],
    types: &[
        var("T", TypeSet::of(&[DType::F32, DType::F16, DType::BF16])),
        var("T1", TypeSet::of(&[DType::U8, DType::F8E4M3FN])),
        var("T2", TypeSet::of(&[DType::F32, DType::F16, DType::BF16, DType::F8E8M0, DType::F8E4M3FN])),
        var("T4", TypeSet::of(&[DType::F32])),
    ],
    attrs: &[
        attr::int("accuracy_level", 0),
        attr::float("activation_alpha", 1.0),
        attr::float("activation_beta", 0.0),
        attr::string("activation_type", "relu"),
        attr::optional("block_size", AttrKind::Int),
        attr::int("expert_weight_bits", 4),
        attr::optional("fc1_expert_weight_bits", AttrKind::Int),
        attr::optional("fc2_expert_weight_bits", AttrKind::Int),
        attr::optional("fc3_expert_weight_bits", AttrKind::Int),
        attr::int("k", 1),
        attr::int("normalize_routing_weights", 0),
        attr::string("quant_type", "int"),
        attr::int("swiglu_fusion", 0),
        attr::optional("swiglu_limit", AttrKind::Float),
        attr::int("use_sparse_mixer", 0),
        attr::int("weights_prepacked", -1),
    ],
    cost: Cost::Compute,
    infer: infer_quantized,
    ..OP
};

ops![MIXTURE, QUANTIZED_MIXTURE];

const ACTIVATIONS: &[&str] = &["relu", "gelu", "silu", "swiglu", "identity"];

/// Returns how many columns of the first layer make one input of the second: 2 for a fused SwiGLU,
/// whose gate and value are interleaved or concatenated. `third` is the input with the weights of a
/// third layer, and `third_bias` that with its bias.
fn fused(cx: &InferCx<'_>, [third, third_bias]: [usize; 2]) -> Result<i64> {
    let activation = cx.attrs.string("activation_type")?;
    ensure!(
        ACTIVATIONS.contains(&activation),
        InvalidGraph,
        "activation_type is '{activation}', expected one of {}",
        ACTIVATIONS.join(", ")
    );
    let fusion = cx.attrs.int("swiglu_fusion")?;
    ensure!((0..=2).contains(&fusion), InvalidGraph, "swiglu_fusion is {fusion}, expected 0, 1 or 2");
    let (has_third, is_gated) = (cx.has_input(third), activation == "swiglu");
    ensure!(
        !is_gated || has_third == (fusion == 0),
        InvalidGraph,
        "swiglu takes fc3_experts_weights with swiglu_fusion = 0 and only then, and swiglu_fusion is {fusion}"
    );
    let has_bias = cx.has_input(third_bias);
    ensure!(has_third || !has_bias, InvalidGraph, "fc3_experts_bias without fc3_experts_weights");
    Ok(if is_gated && fusion > 0 { 2 } else { 1 })
}

/// Checks the shape of an input against the expected sizes.
fn check(cx: &InferCx<'_>, spec: &OpSpec, index: usize, expected: &[&Dim]) -> Result<()> {
    let what = spec.input_param(index).map_or("", |param| param.name);
    check_rank(cx, index, what, expected.len())?;
    let own = cx.shape(index).unwrap_or(&[]);
    expected
        .iter()
        .zip(own)
        .try_for_each(|(expected, own)| agree(&format!("a size of {what}"), expected, own))
}

/// Returns the counts of tokens and the hidden width of the input, if its rank is known.
fn tokens_and_width(cx: &InferCx<'_>) -> Result<Option<[Dim; 2]>> {
    let count = cx.attrs.int("k")?;
    ensure!(count > 0, InvalidGraph, "k is {count}, expected at least 1");
    let tokens = match cx.shape(0) {
        None => None,
        Some([tokens, hidden]) => Some([tokens.clone(), hidden.clone()]),
        Some([batch, length, hidden]) => Some([batch * length, hidden.clone()]),
        Some(shape) => return Err(error!(InvalidGraph, "input has rank {}, expected 2 or 3", shape.len())),
    };
    check_rank(cx, 1, "router_probs", 2)?;
    if let Some([_, experts]) = cx.shape(1) {
        let few = experts.as_constant().is_none_or(|experts| count <= experts);
        ensure!(few, InvalidGraph, "k is {count}, but there are {experts} experts");
    }
    Ok(tokens)
}

/// Infers an output of the input's shape, and checks the other inputs against the counts of tokens
/// and experts and the hidden and inner widths.
fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let fused = fused(cx, [6, 7])?;
    let Some([tokens, hidden]) = tokens_and_width(cx)? else { return Ok(()) };
    check_rank(cx, 4, "fc2_experts_weights", 3)?;
    if let (Some([_, experts]), Some([_, _, inner])) = (cx.shape(1), cx.shape(4)) {
        // Weights are [experts, outputs, inputs], biases [experts, outputs].
        let first = inner * fused;
        let check = |index: usize, expected: &[&Dim]| check(cx, &MIXTURE, index, expected);
        check(1, &[&tokens, experts])?;
        check(2, &[experts, &first, &hidden])?;
        check(3, &[experts, &first])?;
        check(4, &[experts, &hidden, inner])?;
        check(5, &[experts, &hidden])?;
        check(6, &[experts, inner, &hidden])?;
        check(7, &[experts, inner])?;
    }
    same_shape(cx)
}

/// As [`infer`], for weights of which several share a byte.
fn infer_quantized(cx: &mut InferCx<'_>) -> Result<()> {
    let fused = fused(cx, [8, 10])?;
    let Some([tokens, hidden]) = tokens_and_width(cx)? else { return Ok(()) };
    // Floats of 4 and 8 bits have other layouts, which no provider takes.
    if cx.attrs.string("quant_type")? != "int" {
        return same_shape(cx);
    }
    let all = cx.attrs.int("expert_weight_bits")?;
    let names = ["fc1_expert_weight_bits", "fc2_expert_weight_bits", "fc3_expert_weight_bits"];
    let bits = names.map(|name| cx.attrs.find_int(name).unwrap_or(all));
    for (name, bits) in names.into_iter().zip(bits) {
        ensure!(matches!(bits, 2 | 4 | 8), InvalidGraph, "{name} is {bits}, expected 2, 4 or 8");
    }
    for (weights, scales) in [(2, 3), (5, 6), (8, 9)] {
        let is_complete = cx.has_input(scales) || !cx.has_input(weights);
        let name = QUANTIZED_MIXTURE.input_param(scales).map_or("", |param| param.name);
        ensure!(is_complete, InvalidGraph, "{name} is missing, and the weights are integers");
    }
    let packed = |size: &Dim, bits: i64| (size * bits).floor_div(&Dim::constant(8));
    check_rank(cx, 5, "fc2_experts_weights", 3)?;
    if let (Some([_, experts]), Some([_, _, bytes])) = (cx.shape(1), cx.shape(5)) {
        let [first_bits, second_bits, third_bits] = bits;
        let inner = &(bytes * (8 / second_bits));
        let first = inner * fused;
        let check = |index: usize, expected: &[&Dim]| check(cx, &QUANTIZED_MIXTURE, index, expected);
        check(1, &[&tokens, experts])?;
        check(2, &[experts, &first, &packed(&hidden, first_bits)])?;
        check(4, &[experts, &first])?;
        check(5, &[experts, &hidden, bytes])?;
        check(7, &[experts, &hidden])?;
        check(8, &[experts, inner, &packed(&hidden, third_bits)])?;
        check(10, &[experts, inner])?;
        check(14, &[&tokens, experts])?;
    }
    same_shape(cx)
}
