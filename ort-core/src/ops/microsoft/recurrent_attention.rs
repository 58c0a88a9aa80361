//! What models with linear attention are made of: `LinearAttention`, `CausalConvWithState`,
//! `LinearAttentionGate` and `GatedRMSNorm`.
//!
//! The first two differ from the standard's operators by a window of states for speculative
//! decoding, and in more key heads than query heads or other layouts of a convolution.

use super::{becomes, check_per_column, float, wants};
use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ir::{Attribute, ValueId};
use crate::ops;
use crate::ops::math::shared::same_shape;
use crate::ops::nn::linear_attention::LINEAR_ATTENTION;
use crate::spec::{
    AttrKind, Cost, Draft, Grad, InferCx, MICROSOFT, OP, OpSpec, Requirement, Traits, attr, one, opt, var,
};
use crate::{ErrorKind, Result, ensure, error, unknown_name};

const FLOATS: TypeSet = TypeSet::of(&[DType::F32, DType::F16, DType::BF16]);

static WINDOWED_LINEAR_ATTENTION: OpSpec = OpSpec {
    domain: MICROSOFT,
    attrs: &[
        attr::int("chunk_size", 64),
        attr::required("kv_num_heads", AttrKind::Int),
        attr::required("q_num_heads", AttrKind::Int),
        attr::float("scale", 0.0),
        attr::int("state_window", 0),
        attr::string("update_rule", "gated_delta"),
    ],
    infer: infer_attention,
    ..LINEAR_ATTENTION
};

static CAUSAL_CONV_WITH_STATE: OpSpec = OpSpec {
    domain: MICROSOFT,
    name: "CausalConvWithState",
    grad: Grad::None("only its form in the standard has a gradient"),
    inputs: &[one("input", "T"), one("weight", "T"), opt("bias", "T"), opt("past_state", "T")],
    outputs: &[one("output", "T"), one("present_state", "T")],
    types: &[var("T", FLOATS)],
    attrs: &[
        attr::string("activation", "none"),
        attr::int("channels_last", 0),
        attr::int("dilation", 1),
        attr::int("ndim", 1),
        attr::int("state_window", 0),
    ],
    cost: Cost::Compute,
    infer: infer_convolution,
    upgrades: &[becomes(standard_convolution)],
    ..OP
};

static LINEAR_ATTENTION_GATE: OpSpec = OpSpec {
    domain: MICROSOFT,
    name: "LinearAttentionGate",
    inputs: &[one("a", "T"), one("dt_bias", "TF"), one("decay_scale", "TF"), opt("b", "T")],
    outputs: &[one("decay", "T"), opt("beta", "T")],
    types: &[var("T", FLOATS), var("TF", TypeSet::of(&[DType::F32]))],
    infer: infer_gate,
    lower: Some(lower_gate),
    ..OP
};

static GATED_RMS_NORM: OpSpec = OpSpec {
    domain: MICROSOFT,
    name: "GatedRMSNorm",
    inputs: &[one("X", "T"), one("scale", "T"), one("gate", "T")],
    outputs: &[one("Y", "T")],
    types: &[var("T", FLOATS)],
    attrs: &[attr::string("activation", "silu"), attr::float("epsilon", 1e-5)],
    traits: Traits::NORMALIZES,
    infer: infer_gated_norm,
    lower: Some(lower_gated_norm),
    ..OP
};

ops![WINDOWED_LINEAR_ATTENTION, CAUSAL_CONV_WITH_STATE, LINEAR_ATTENTION_GATE, GATED_RMS_NORM];

/// The most states that ONNX Runtime keeps for speculative decoding.
const MOST_STATES: i64 = 8;

/// Returns `state` with the leading axis of a window of states, if the node has one.
fn windowed(cx: &InferCx<'_>, state: Vec<Dim>) -> Result<Vec<Dim>> {
    let window = cx.attrs.int("state_window")?;
    ensure!(
        (0..=MOST_STATES).contains(&window),
        InvalidGraph,
        "state_window is {window}, expected 0 to {MOST_STATES}"
    );
    let leading = (window > 0).then(|| Dim::constant(window));
    Ok(leading.into_iter().chain(state).collect())
}

fn infer_attention(cx: &mut InferCx<'_>) -> Result<()> {
    let (queries, heads) = (cx.attrs.int("q_num_heads")?, cx.attrs.int("kv_num_heads")?);
    let fits = heads > 0 && queries > 0 && (queries % heads == 0 || heads % queries == 0);
    ensure!(
        fits,
        InvalidGraph,
        "q_num_heads is {queries} and kv_num_heads {heads}, expected one to be a multiple of the other"
    );
    // A past state fixes the type of the present one; without it the state has the type of the
    // query.
    let state_type = cx.dtype(3).or_else(|_| cx.dtype(0))?;
    let (Some(query), Some(value)) = (cx.shape(0), cx.shape(2)) else {
        cx.set(1, state_type, None);
        return Ok(());
    };
    let ([batch, time, query], [_, _, value]) = (query, value) else {
        return Err(error!(
            InvalidGraph,
            "query has rank {} and value {}, expected 3",
            query.len(),
            value.len()
        ));
    };
    let key_size = query.floor_div(&Dim::constant(queries));
    let value_size = value.floor_div(&Dim::constant(heads));
    let state = vec![batch.clone(), Dim::constant(heads), key_size, value_size.clone()];
    let state = windowed(cx, state)?;
    cx.require_shape(3, &state, ErrorKind::InvalidArgument)?;
    cx.set(1, state_type, Some(state));
    // With more key heads than query heads, each key head has an output.
    cx.set_shape(0, vec![batch.clone(), time.clone(), value_size * queries.max(heads)])
}

/// The convolution of the standard has one layout and no dilation.
fn standard_convolution(draft: &mut Draft<'_>) -> Result<()> {
    let defaults = [("channels_last", 0), ("dilation", 1), ("ndim", 1), ("state_window", 0)];
    let is_default = |(name, default): &(&str, i64)| match draft.attr(name) {
        None => true,
        Some(value) => matches!(value, Attribute::Int(given) if given == default),
    };
    if defaults.iter().all(is_default) {
        defaults.iter().for_each(|(name, _)| drop(draft.take_attr(name)));
        draft.domain.clear();
    }
    Ok(())
}

fn infer_convolution(cx: &mut InferCx<'_>) -> Result<()> {
    let int = |name: &str| cx.attrs.int(name);
    let (dilation, dimensions, last) = (int("dilation")?, int("ndim")?, int("channels_last")?);
    ensure!(dilation >= 1, InvalidGraph, "dilation is {dilation}, expected at least 1");
    ensure!((1..=3).contains(&dimensions), InvalidGraph, "ndim is {dimensions}, expected 1, 2 or 3");
    ensure!(matches!(last, 0 | 1), InvalidGraph, "channels_last is {last}, expected 0 or 1");
    ensure!(
        last == 0 || dimensions == 1,
        InvalidGraph,
        "channels_last needs ndim = 1, which is {dimensions}"
    );
    let activation = cx.attrs.string("activation")?;
    let activations = ["none", "silu", "swish"];
    if !activations.contains(&activation) {
        return Err(unknown_name("activation", activation, &activations));
    }
    let (Some(input), Some(weight)) = (cx.shape(0), cx.shape(1)) else { return Ok(()) };
    let rank = dimensions as usize + 2;
    let fits = weight.len() == rank && (input.len() == rank || (last == 1 && input.len() > rank));
    ensure!(
        fits,
        InvalidGraph,
        "input has rank {} and weight {}, expected {rank}",
        input.len(),
        weight.len()
    );
    let (Some(kernel), [batch, rest @ ..]) = (weight.last(), input) else { return Ok(()) };
    // A window at the first new position reads this many earlier ones, along the last axis or,
    // with the channels last, along the first behind the batch.
    let carried = (kernel - 1) * dilation;
    let mut state = vec![batch.clone()];
    match rest {
        [_, channels @ ..] if last == 1 => state.extend(std::iter::once(&carried).chain(channels).cloned()),
        [others @ .., _] => state.extend(others.iter().chain([&carried]).cloned()),
        [] => {}
    }
    let state = windowed(cx, state)?;
    cx.require_shape(3, &state, ErrorKind::InvalidArgument)?;
    cx.set_shape(0, input.to_vec())?;
    cx.set_shape(1, state)
}

fn infer_gate(cx: &mut InferCx<'_>) -> Result<()> {
    ensure!(
        cx.has_input(3) || !cx.has_output(1),
        InvalidGraph,
        help = "give input b, or leave the output out",
        "output beta needs input b, which is missing"
    );
    let Some(shape) = cx.shape(0) else { return Ok(()) };
    check_per_column(cx, 1, "dt_bias", shape)?;
    check_per_column(cx, 2, "decay_scale", shape)?;
    cx.set_shape(0, shape.to_vec())?;
    match cx.shape(3) {
        Some(shape) => cx.set_shape(1, shape.to_vec()),
        None => Ok(()),
    }
}

/// Casts a value, unless it has the type already.
fn cast(draft: &mut Draft<'_>, value: ValueId, to: DType) -> Result<ValueId> {
    match draft.value_type(value).dtype() == Some(to) {
        true => Ok(value),
        false => draft.emit("Cast", &[value], &[("to", Attribute::Int(i64::from(to.onnx_code())))]),
    }
}

/// `decay_scale * Softplus(a + dt_bias)` in float32, and the sigmoid of `b`.
fn lower_gate(draft: &mut Draft<'_>) -> Result<()> {
    let (a, bias, factor) = (draft.required(0)?, draft.required(1)?, draft.required(2)?);
    let dtype = draft.dtype(0)?;
    let a = cast(draft, a, DType::F32)?;
    let sum = draft.emit("Add", &[a, bias], &[])?;
    let step = draft.emit("Softplus", &[sum], &[])?;
    let decay = draft.emit("Mul", &[step, factor], &[])?;
    let decay = cast(draft, decay, dtype)?;
    match draft.input(3) {
        Some(rate) if wants(draft, 1) => {
            let rate = draft.emit("Sigmoid", &[rate], &[])?;
            draft.replace(&[decay, rate])
        }
        // `replace` skips outputs that the node does not have.
        _ => draft.replace(&[decay, decay]),
    }
}

fn infer_gated_norm(cx: &mut InferCx<'_>) -> Result<()> {
    let activation = cx.attrs.string("activation")?;
    let activations = ["silu", "swish", "sigmoid"];
    if !activations.contains(&activation) {
        return Err(unknown_name("activation", activation, &activations));
    }
    if let Some(scale) = cx.shape(1) {
        let [size] = scale else {
            return Err(error!(InvalidGraph, "scale has rank {}, expected 1", scale.len()));
        };
        let width = cx.shape(0).and_then(<[Dim]>::last);
        if let (Some(size), Some(width)) = (size.as_constant(), width) {
            ensure!(size > 0, InvalidGraph, "scale has no elements");
            cx.require(Requirement::multiple("the last dimension of X", width, size))?;
        }
    }
    if let Some(shape) = cx.shape(0) {
        cx.require_shape(2, shape, ErrorKind::InvalidArgument)?;
    }
    same_shape(cx)
}

/// An RMS norm of each group of as many elements as the scale has, times the activated gate. All
/// of it in float32, rounded once.
fn lower_gated_norm(draft: &mut Draft<'_>) -> Result<()> {
    let (x, scale, gate) = (draft.required(0)?, draft.required(1)?, draft.required(2)?);
    let (dtype, epsilon) = (draft.dtype(0)?, float(draft, "epsilon")?);
    let is_sigmoid = matches!(draft.attr("activation"), Some(Attribute::String(name)) if name == "sigmoid");
    let size = |index: usize| draft.shape(index)?.last()?.as_constant();
    let is_one_group = size(0).is_some() && size(0) == size(1);
    let mut norm = cast(draft, x, DType::F32)?;
    let scale = cast(draft, scale, DType::F32)?;
    if !is_one_group {
        let (groups, size) = (draft.constant_ints(&[-1])?, draft.emit("Shape", &[scale], &[])?);
        let shape = draft.emit("Concat", &[groups, size], &[("axis", Attribute::Int(0))])?;
        norm = draft.emit("Reshape", &[norm, shape], &[])?;
    }
    norm = draft.emit("RMSNormalization", &[norm, scale], &[("epsilon", Attribute::Float(epsilon))])?;
    if !is_one_group {
        let shape = draft.emit("Shape", &[x], &[])?;
        norm = draft.emit("Reshape", &[norm, shape], &[])?;
    }
    let gate = cast(draft, gate, DType::F32)?;
    let gate = draft.emit(if is_sigmoid { "Sigmoid" } else { "Swish" }, &[gate], &[])?;
    let result = draft.emit("Mul", &[norm, gate], &[])?;
    let result = cast(draft, result, dtype)?;
    draft.replace(&[result])
}
