//! The gradient of `RNN`: one activation of the sum of both projections.

use super::layer::{Direction, Layer, Looped};
use crate::spec::GradCx;
use crate::{Result, error};

pub(super) fn of_rnn(cx: &mut GradCx<'_>, layer: &Layer, direction: &Direction) -> Result<Looped> {
    let [f] = direction.activations.as_slice() else { return Err(error!(Fail, "RNN has one activation")) };
    let gates = layer.all_gates(cx, direction)?;
    let mut back = layer.backward(cx, direction)?;
    let x = back.steps.scan(cx, gates)?;
    // The nodes added from here on are the cell to differentiate.
    let start = back.steps.graph.nodes.len();
    let h = f.emit(&mut back.steps.pen(), x, layer.clip)?;
    let found = back.differentiate(start, &[x], &[(h, back.of_h)])?;
    let [of_x] = found.as_slice() else { return Err(error!(Fail, "one gradient was asked for")) };
    let before = back.state_before(*of_x, back.r, None)?;
    match back.steps.finish(cx, !direction.reversed, (&[before], &[*of_x]))?.as_slice() {
        [h, of_x] => Ok(Looped { of_x: *of_x, of_h: *of_x, reset: None, h: *h, c: None, peepholes: None }),
        _ => Err(error!(Fail, "Scan has as many outputs as it is told")),
    }
}
