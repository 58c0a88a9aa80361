//! `LAMB`: Adam with a trust ratio.
//!
//! The step size is relative to the norm of the parameter (You et al., Large Batch Optimization for
//! Deep Learning, 2020).

use super::adam::{FIRST, INPUTS, MOMENTS, SECOND, check_moments, moments};
use super::step::{POSITIVE, StepPen, TYPES, check_range, infer_step, same_shapes};
use crate::Result;
use crate::dtype::DType;
use crate::ir::ValueId;
use crate::ops;
use crate::spec::{Draft, InferCx, OP, OpSpec, RUNTIME, attr};

static LAMB: OpSpec = OpSpec {
    domain: RUNTIME,
    name: "LAMB",
    inputs: INPUTS,
    outputs: MOMENTS,
    types: TYPES,
    attrs: &[
        attr::float("beta1", 0.9),
        attr::float("beta2", 0.999),
        attr::float("epsilon", 1e-6),
        attr::float("weight_decay", 0.0),
        attr::float("max_trust_ratio", 10.0),
        attr::int("correct_bias", 1),
    ],
    infer,
    lower: Some(lower),
    ..OP
};

ops![LAMB];

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    check_moments(cx.attrs)?;
    check_range(cx.attrs, "max_trust_ratio", POSITIVE)?;
    infer_step(cx, INPUTS, &[FIRST, SECOND])?;
    same_shapes(cx, INPUTS, &[FIRST, SECOND])
}

fn lower(draft: &mut Draft<'_>) -> Result<()> {
    let mut pen = StepPen::new(draft)?;
    let (parameter, gradient) = (pen.draft.required(0)?, pen.gradient()?);
    let (first, second) = moments(&mut pen, gradient)?;
    let (beta1, beta2, epsilon) = (pen.attr("beta1")?, pen.attr("beta2")?, pen.attr("epsilon")?);
    let (bias1, bias2) = (pen.bias(beta1)?, pen.bias(beta2)?);
    let (bias1, bias2) = (pen.narrow(bias1)?, pen.narrow(bias2)?);
    let (first_even, second_even) = (pen.op("Div", &[first, bias1])?, pen.op("Div", &[second, bias2])?);
    let root = pen.op("Sqrt", &[second_even])?;
    let denominator = pen.plus(root, epsilon)?;
    let mut update = pen.op("Div", &[first_even, denominator])?;
    let decay = pen.attr("weight_decay")?;
    // The decay is part of the update, so the trust ratio scales it as well.
    if decay != 0.0 {
        let decayed = pen.times(parameter, decay)?;
        update = pen.op("Add", &[update, decayed])?;
    }
    let (rate, ratio) = (pen.rate()?, trust_ratio(&mut pen, parameter, update)?);
    let size = pen.op("Mul", &[rate, ratio])?;
    let size = pen.narrow(size)?;
    let change = pen.op("Mul", &[size, update])?;
    let new = pen.op("Sub", &[parameter, change])?;
    pen.finish(&[(0, new), (FIRST, first), (SECOND, second)])
}

/// The norm of the parameter over that of its update, at most `max_trust_ratio`; 1 if either is 0.
fn trust_ratio(pen: &mut StepPen<'_, '_>, parameter: ValueId, update: ValueId) -> Result<ValueId> {
    let (norm, update_norm) = (pen.norm(parameter)?, pen.norm(update)?);
    let most = pen.attr("max_trust_ratio")?;
    let ratio = pen.op("Div", &[norm, update_norm])?;
    let most = pen.number_of(most, DType::F64)?;
    let ratio = pen.op("Min", &[ratio, most])?;
    let (zero, one) = (pen.number_of(0.0, DType::F64)?, pen.number_of(1.0, DType::F64)?);
    // A product of 0 finds either norm. The quotient may be NaN then, and `Where` discards it.
    let product = pen.op("Mul", &[norm, update_norm])?;
    let is_zero = pen.op("Equal", &[product, zero])?;
    pen.op("Where", &[is_zero, one, ratio])
}
