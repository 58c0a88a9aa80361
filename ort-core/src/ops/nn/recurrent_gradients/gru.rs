//! The gradient of `GRU`.
//!
//! The reset gate applies before or after the recurrence GEMM of the last gate
//! (`linear_before_reset`), and each form has its own backward loop.

use super::layer::{Direction, Layer, Looped};
use crate::ir::{Attribute, ValueId};
use crate::ops::nn::recurrent_steps::{Activation, parts};
use crate::spec::{GradCx, NodeEmitter};
use crate::{Result, ensure, error};

/// Splits recurrence weights or biases into those of the first two gates of a `GRU` and those of
/// the last.
fn split_gates(pen: &mut NodeEmitter<'_>, value: ValueId) -> Result<[ValueId; 2]> {
    // The standard orders the gates as update, reset, hidden.
    match parts(pen, value, 0, 3)?.as_slice() {
        [first, second, last] => {
            Ok([pen.emit("Concat", &[*first, *second], &[("axis", Attribute::Int(0))])?, *last])
        }
        _ => Err(error!(Fail, "Split has as many outputs as it is told")),
    }
}

pub(super) fn of_gru(cx: &mut GradCx<'_>, layer: &Layer, direction: &Direction) -> Result<Looped> {
    ensure!(direction.activations.len() == 2, Fail, "GRU has two activations");
    let after = cx.attrs().flag("linear_before_reset")?;
    let [of_x, of_h] = direction.biases.map_or([None; 2], |biases| biases.map(Some));
    let x = layer.gates(cx, (layer.x, direction.w), of_x)?;
    let mut back = layer.backward(cx, direction)?;
    let states = back.steps.scan(cx, direction.states)?;
    // With the reset gate after the GEMM, all recurrent projections run over all steps at once.
    // Before it, the last gate multiplies the reset state, which only the loop knows.
    let (recurrent, last) = match after {
        true => (layer.gates(cx, (direction.states, direction.r), of_h)?, None),
        false => {
            let [weights, last] = split_gates(&mut cx.pen, direction.r)?;
            let biases = of_h.map(|bias| split_gates(&mut cx.pen, bias)).transpose()?;
            let gates = layer.gates(cx, (direction.states, weights), biases.map(|[others, _]| others))?;
            let last = cx.transpose(last, &[1, 0])?;
            (
                gates,
                Some((back.steps.capture(cx, last), biases.map(|[_, last]| back.steps.capture(cx, last)))),
            )
        }
    };
    let (x, h) = (back.steps.scan(cx, x)?, back.steps.scan(cx, recurrent)?);
    // The nodes added from here on are the cell to differentiate.
    let start = back.steps.graph.nodes.len();
    let (next, reset) =
        gru_cell(&mut back.steps.pen(), &direction.activations, layer.clip, [x, h, states], last)?;
    let found = back.differentiate(start, &[x, h, states], &[(next, back.of_h)])?;
    let [of_x, of_h, of_state] = found.as_slice() else {
        return Err(error!(Fail, "three gradients were asked for"));
    };
    // Without `linear_before_reset`, the last gate's GEMM is part of the cell, and its share of the
    // gradient is already in `of_state`.
    let weights = match after {
        true => back.r,
        false => split_gates(&mut back.steps.pen(), back.r)?[0],
    };
    let before = back.state_before(*of_h, weights, Some(*of_state))?;
    let mut collected = vec![*of_x];
    collected.push(if after { *of_h } else { reset });
    let results = back.steps.finish(cx, !direction.reversed, (&[before], &collected))?;
    match results.as_slice() {
        [h, of_x, of_h] if after => {
            Ok(Looped { of_x: *of_x, of_h: *of_h, reset: None, h: *h, c: None, peepholes: None })
        }
        // A gate adds both projections before its activation, so the two have the same gradient.
        [h, of_x, reset] => {
            Ok(Looped { of_x: *of_x, of_h: *of_x, reset: Some(*reset), h: *h, c: None, peepholes: None })
        }
        _ => Err(error!(Fail, "Scan has as many outputs as it is told")),
    }
}

/// The cell of a `GRU`: returns the state after a step and the reset state before it.
///
/// `last` holds the last gate's recurrence weights and bias if the reset gate applies before that
/// GEMM.
fn gru_cell(
    pen: &mut NodeEmitter<'_>,
    activations: &[Activation],
    clip: Option<f32>,
    [x, h, state]: [ValueId; 3],
    last: Option<(ValueId, Option<ValueId>)>,
) -> Result<(ValueId, ValueId)> {
    let [f, g] = activations else { return Err(error!(Fail, "GRU has two activations")) };
    let from_x = parts(pen, x, -1, 3)?;
    // Each part is [batch, hidden].
    let from_h = parts(pen, h, -1, if last.is_some() { 2 } else { 3 })?;
    let ([z, r, n], [hz, hr, hn @ ..]) = (from_x.as_slice(), from_h.as_slice()) else {
        return Err(error!(Fail, "Split has as many outputs as it is told"));
    };
    let z = pen.emit("Add", &[*z, *hz], &[])?;
    let z = f.emit(pen, z, clip)?;
    let r = pen.emit("Add", &[*r, *hr], &[])?;
    let r = f.emit(pen, r, clip)?;
    let reset = pen.emit("Mul", &[r, state], &[])?;
    let more = match (last, hn) {
        (Some((weights, bias)), _) => {
            let product = pen.emit("MatMul", &[reset, weights], &[])?;
            bias.map_or(Ok(product), |bias| pen.emit("Add", &[product, bias], &[]))?
        }
        (None, [hn]) => pen.emit("Mul", &[r, *hn], &[])?,
        _ => return Err(error!(Fail, "a gate is missing")),
    };
    let n = pen.emit("Add", &[*n, more], &[])?;
    let n = g.emit(pen, n, clip)?;
    // (1 - z) n + z h = n + z (h - n)
    let change = pen.emit("Sub", &[state, n], &[])?;
    let change = pen.emit("Mul", &[z, change], &[])?;
    Ok((pen.emit("Add", &[n, change], &[])?, reset))
}
