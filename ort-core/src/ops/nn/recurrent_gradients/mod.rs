//! Backpropagation through time: gradients of `RNN`, `GRU` and `LSTM`.
//!
//! After Werbos, Backpropagation through time, 1990. The output `Y` holds all hidden states, so two
//! GEMMs over all steps at once recompute the gates' pre-activations. An `LSTM` also recomputes its
//! cell states, without a GEMM. The loop from the last step to the first has only the activations
//! and one GEMM with the recurrence weights. The weight gradients are GEMMs over all steps after
//! the loop.

mod gru;
mod layer;
mod lstm;
mod rnn;

use super::recurrent_steps::activations;
use crate::Result;
use crate::ir::{Attribute, ValueId};
use crate::spec::GradCx;
use layer::Layer;

pub(super) fn of_recurrent(cx: &mut GradCx<'_>) -> Result<()> {
    let layer = Layer::of(cx)?;
    let defaults: &[&str] = match cx.operator() {
        "RNN" => &["Tanh"],
        "GRU" => &["Sigmoid", "Tanh"],
        _ => &["Sigmoid", "Tanh", "Tanh"],
    };
    let activations = activations(cx.attrs(), layer.directions, defaults)?;
    let (mut of_x, mut others): (Option<ValueId>, Vec<(usize, Vec<ValueId>)>) = (None, Vec::new());
    for (index, activations) in activations.into_iter().enumerate() {
        let direction = layer.direction(cx, index, activations)?;
        let looped = match cx.operator() {
            "RNN" => rnn::of_rnn(cx, &layer, &direction)?,
            "GRU" => gru::of_gru(cx, &layer, &direction)?,
            _ => lstm::of_lstm(cx, &layer, &direction)?,
        };
        let found = layer.products(cx, &direction, &looped)?;
        // Both directions read the same input, so its gradients add up. The others are stacked.
        of_x = match (of_x, found.x) {
            (Some(sum), Some(more)) => Some(cx.emit("Add", &[sum, more], &[])?),
            (sum, more) => sum.or(more),
        };
        for (input, gradient) in found.others {
            match others.iter_mut().find(|(known, _)| *known == input) {
                Some((_, list)) => list.push(gradient),
                None => others.push((input, vec![gradient])),
            }
        }
    }
    if let Some(of_x) = of_x {
        let of_x = layer.turned(cx, of_x, &[1, 0, 2])?;
        cx.set(0, of_x);
    }
    for (input, list) in others {
        let whole = match list.as_slice() {
            [one] => *one,
            list => cx.emit("Concat", list, &[("axis", Attribute::Int(0))])?,
        };
        // `layout` orders the axes of X and of the states, but not those of weights and biases.
        let is_state = matches!(input, 5 | 6);
        let whole = if is_state { layer.turned(cx, whole, &[1, 0, 2])? } else { whole };
        cx.set(input, whole);
    }
    Ok(())
}
