//! Causal depthwise convolution: `CausalConvWithState`.
//!
//! The convolution runs along time. Its last `kernel - 1` inputs are the state, which the next call
//! takes as `past_state`.

use crate::dtype::{DType, TypeSet};
use crate::ops;
use crate::ops::tensor::sample_gradients;
use crate::spec::{Cost, Grad, InferCx, OP, OpSpec, attr, one, opt, var};
use crate::{Result, error};

static CAUSAL_CONV_WITH_STATE: OpSpec = OpSpec {
    name: "CausalConvWithState",
    grad: Grad::Parts(sample_gradients::causal_conv_parts),
    since: 27,
    first: 27,
    inputs: &[one("input", "T"), one("weight", "T"), opt("bias", "T"), opt("past_state", "T")],
    outputs: &[one("output", "T"), one("present_state", "T")],
    types: &[var("T", TypeSet::of(&[DType::F32, DType::F16, DType::BF16]))],
    attrs: &[attr::string("activation", "none")],
    cost: Cost::Compute,
    infer,
    ..OP
};

ops![CAUSAL_CONV_WITH_STATE];

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let (Some(input), Some(weight)) = (cx.shape(0), cx.shape(1)) else { return Ok(()) };
    let ([batch, channels, _], [_, _, kernel]) = (input, weight) else {
        return Err(error!(InvalidGraph, "input and weight must have rank 3"));
    };
    // A window at the first new position reads this number of earlier ones.
    let state = vec![batch.clone(), channels.clone(), kernel - 1];
    cx.set_shape(0, input.to_vec())?;
    cx.set_shape(1, state)
}
