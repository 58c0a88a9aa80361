//! `SGD`: stochastic gradient descent with plain or Nesterov momentum.
//!
//! As `torch.optim.SGD` without dampening.

use super::step::{
    FIRST_ROW, GRADIENT, LEARNING_RATE, PARAMETER, POSITIVE, SCALE, StepPen, TYPES, UPDATE, check_range,
    infer_step, needs, same_shapes,
};
use crate::ops;
use crate::spec::{Draft, InferCx, OP, OpSpec, Param, RUNTIME, attr, opt};
use crate::{Result, ensure};

const INPUTS: &[Param] = &[PARAMETER, GRADIENT, LEARNING_RATE, SCALE, UPDATE, opt("velocity", "T")];
const VELOCITY: usize = 5;

static SGD: OpSpec = OpSpec {
    domain: RUNTIME,
    name: "SGD",
    inputs: INPUTS,
    outputs: &[PARAMETER, opt("velocity", "T")],
    types: TYPES,
    attrs: &[
        attr::float("momentum", 0.0),
        attr::int("nesterov", 0),
        attr::float("weight_decay", 0.0),
        FIRST_ROW,
    ],
    infer,
    lower: Some(lower),
    ..OP
};

ops![SGD];

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    check_range(cx.attrs, "momentum", POSITIVE)?;
    check_range(cx.attrs, "weight_decay", POSITIVE)?;
    let has_momentum = cx.attrs.float("momentum")? != 0.0;
    ensure!(
        has_momentum || !cx.attrs.flag("nesterov")?,
        InvalidGraph,
        help = "set 'momentum' to a number above 0, or 'nesterov' to 0",
        "attribute 'nesterov' is set, but 'momentum' is 0"
    );
    if has_momentum {
        needs(cx, VELOCITY, "velocity", "momentum is not 0")?;
    }
    infer_step(cx, INPUTS, &[VELOCITY])?;
    same_shapes(cx, INPUTS, &[VELOCITY])
}

fn lower(draft: &mut Draft<'_>) -> Result<()> {
    let mut pen = StepPen::new(draft)?;
    let (parameter, momentum) = (pen.tensor(0)?, pen.attr("momentum")?);
    let mut gradient = pen.gradient()?;
    let decay = pen.attr("weight_decay")?;
    // L2 regularization: as in torch, the decay passes through the momentum.
    if decay != 0.0 {
        let decayed = pen.times(parameter, decay)?;
        gradient = pen.op("Add", &[gradient, decayed])?;
    }
    let mut velocity = gradient;
    if pen.draft.input(VELOCITY).is_some() {
        let old = pen.tensor(VELOCITY)?;
        let kept = pen.times(old, momentum)?;
        velocity = pen.op("Add", &[kept, gradient])?;
        // Nesterov looks ahead: it adds the momentum of the new velocity to the gradient.
        gradient = match pen.attrs.flag("nesterov")? {
            false => velocity,
            true => {
                let ahead = pen.times(velocity, momentum)?;
                pen.op("Add", &[gradient, ahead])?
            }
        };
    }
    let rate = pen.rate()?;
    let rate = pen.narrow(rate)?;
    let change = pen.op("Mul", &[rate, gradient])?;
    let new = pen.op("Sub", &[parameter, change])?;
    pen.finish(&[(0, new), (VELOCITY, velocity)])
}
