//! Counter-based dropout: `CounterDropout`.
//!
//! The random numbers depend only on a seed, a step and an element's index. Element `i` is dropped
//! if word `i % 4` of Philox4x32-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3,
//! 2011) of the counter `i / 4`, `step` is below `ratio * 2^32`. The key comes from `seed` and
//! `stream`. There is no state, and no mask to keep for the backward pass: the gradient is the same
//! operator applied to the upstream gradient.

use super::step::check_scalar;
use crate::Result;
use crate::dtype::TypeSet;
use crate::ops;
use crate::spec::{Grad, GradCx, InferCx, OP, OpSpec, Param, RUNTIME, attr, one, var};

const INPUTS: &[Param] = &[
    one("data", "T"),
    one("ratio", "tensor(float)"),
    one("seed", "tensor(int64)"),
    one("step", "tensor(int64)"),
];

static COUNTER_DROPOUT: OpSpec = OpSpec {
    domain: RUNTIME,
    name: "CounterDropout",
    inputs: INPUTS,
    outputs: &[one("output", "T")],
    types: &[var("T", TypeSet::FLOATS)],
    attrs: &[attr::int("stream", 0)],
    infer,
    grad: Grad::Rule(gradient),
    ..OP
};

ops![COUNTER_DROPOUT];

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    for (index, param) in INPUTS.iter().enumerate().skip(1) {
        check_scalar(cx, index, param.name)?;
    }
    match cx.shape(0) {
        Some(shape) => cx.set_shape(0, shape.to_vec()),
        None => Ok(()),
    }
}

/// Applies the same dropout to the gradient: the same elements are kept, with the same scale.
fn gradient(cx: &mut GradCx<'_>) -> Result<()> {
    let mut inputs = vec![cx.upstream()?];
    for index in 1..INPUTS.len() {
        inputs.push(cx.input(index)?);
    }
    let gradient = cx.repeat(&inputs)?;
    cx.set(0, gradient);
    Ok(())
}
