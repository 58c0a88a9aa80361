//! The gradient of `LSTM`.
//!
//! The forward pass stores no cell states. A scan first recomputes them from the gates, without a
//! GEMM.

use super::layer::{Direction, Layer, Looped};
use crate::ir::ValueId;
use crate::ops::nn::recurrent_steps::{Activation, Steps, parts};
use crate::spec::{GradCx, NodeEmitter};
use crate::{Result, error};

/// What a cell depends on besides its operands.
struct CellSettings<'a> {
    activations: &'a [Activation],
    clip: Option<f32>,
    /// Whether the forget gate is one minus the input gate.
    input_forget: bool,
}

impl<'a> CellSettings<'a> {
    fn of(cx: &GradCx<'_>, layer: &Layer, direction: &'a Direction) -> Result<CellSettings<'a>> {
        let input_forget = cx.attrs().flag("input_forget")?;
        Ok(CellSettings { activations: &direction.activations, clip: layer.clip, input_forget })
    }
}

/// The cell of an `LSTM`: returns the hidden and cell states after a step.
fn lstm_cell(
    pen: &mut NodeEmitter<'_>,
    settings: &CellSettings<'_>,
    gates: ValueId,
    c: ValueId,
    peepholes: Option<ValueId>,
) -> Result<[ValueId; 2]> {
    let &CellSettings { activations, clip, input_forget } = settings;
    let [f, g, h] = activations else { return Err(error!(Fail, "LSTM has three activations")) };
    // The standard orders gates as input, output, forget, cell, and peepholes as input, output,
    // forget.
    let gates = parts(pen, gates, -1, 4)?;
    let &[mut input, mut output, mut forget, cell] = gates.as_slice() else {
        return Err(error!(Fail, "Split has as many outputs as it is told"));
    };
    let peepholes = match peepholes {
        None => None,
        Some(peepholes) => <[ValueId; 3]>::try_from(parts(pen, peepholes, 0, 3)?).ok(),
    };
    let peep =
        |pen: &mut NodeEmitter<'_>, gate: ValueId, weights: Option<ValueId>, state: ValueId| match weights {
            None => Ok(gate),
            Some(weights) => {
                let product = pen.emit("Mul", &[weights, state], &[])?;
                pen.emit("Add", &[gate, product], &[])
            }
        };
    input = peep(pen, input, peepholes.map(|[input, ..]| input), c)?;
    forget = peep(pen, forget, peepholes.map(|[.., forget]| forget), c)?;
    let input = f.emit(pen, input, clip)?;
    let forget = match input_forget {
        true => {
            let one = pen.number(1.0, pen.dtype(input)?)?;
            pen.emit("Sub", &[one, input], &[])?
        }
        false => f.emit(pen, forget, clip)?,
    };
    let cell = g.emit(pen, cell, clip)?;
    let kept = pen.emit("Mul", &[forget, c], &[])?;
    let added = pen.emit("Mul", &[input, cell], &[])?;
    let c = pen.emit("Add", &[kept, added], &[])?;
    // The output gate peeps at the new cell state, unlike the other two.
    output = peep(pen, output, peepholes.map(|[_, output, _]| output), c)?;
    let output = f.emit(pen, output, clip)?;
    let state = h.emit(pen, c, None)?;
    Ok([pen.emit("Mul", &[output, state], &[])?, c])
}

/// The cell state before each step, recomputed by a forward scan.
fn cell_states(cx: &mut GradCx<'_>, layer: &Layer, direction: &Direction, gates: ValueId) -> Result<ValueId> {
    let first = direction.c.ok_or_else(|| error!(Fail, "LSTM has a cell state"))?;
    let settings = CellSettings::of(cx, layer, direction)?;
    let mut steps = Steps::new(cx);
    let c = steps.carry(cx, first);
    let x = steps.scan(cx, gates)?;
    let active = layer.active.map(|[now, _]| steps.scan(cx, now)).transpose()?;
    let peepholes = direction.peepholes.map(|peepholes| steps.capture(cx, peepholes));
    let mut pen = steps.pen();
    let [_, mut next] = lstm_cell(&mut pen, &settings, x, c, peepholes)?;
    // Past a sequence's end the cell state stays as it is.
    if let Some(active) = active {
        next = pen.emit("Where", &[active, next, c], &[])?;
    }
    // The scan collects the state before a step, not the one after it.
    let results = steps.finish(cx, direction.reversed, (&[next], &[c]))?;
    results.last().copied().ok_or_else(|| error!(Fail, "Scan has outputs"))
}

pub(super) fn of_lstm(cx: &mut GradCx<'_>, layer: &Layer, direction: &Direction) -> Result<Looped> {
    let gates = layer.all_gates(cx, direction)?;
    let cells = cell_states(cx, layer, direction, gates)?;
    let mut back = layer.backward(cx, direction)?;
    let (x, c) = (back.steps.scan(cx, gates)?, back.steps.scan(cx, cells)?);
    let mut peepholes = None;
    if let Some(outer) = direction.peepholes {
        // The peepholes are the same in every step, so the loop carries the sum of their gradients.
        let zeros = cx.filled(0.0, outer)?;
        peepholes = Some((back.steps.capture(cx, outer), back.steps.carry(cx, zeros)));
    }
    let start = back.steps.graph.nodes.len();
    let inner = peepholes.map(|(inner, _)| inner);
    let settings = CellSettings::of(cx, layer, direction)?;
    let [h, after] = lstm_cell(&mut back.steps.pen(), &settings, x, c, inner)?;
    let xs: Vec<ValueId> = [x, c].into_iter().chain(inner).collect();
    // The cell state has a gradient of its own, besides the one through the hidden state.
    let seeds = [Some((h, back.of_h)), back.of_c.map(|of_c| (after, of_c))];
    let seeds: Vec<(ValueId, ValueId)> = seeds.into_iter().flatten().collect();
    let found = back.differentiate(start, &xs, &seeds)?;
    let &[of_x, mut of_c, ref of_peepholes @ ..] = found.as_slice() else {
        return Err(error!(Fail, "two gradients were asked for"));
    };
    // The order of the carried values: hidden state, cell state, peepholes.
    let mut carried = vec![back.state_before(of_x, back.r, None)?];
    if let Some((_, Some(passed))) = back.through {
        of_c = back.steps.pen().emit("Add", &[of_c, passed], &[])?;
    }
    carried.push(of_c);
    if let (Some((_, sum)), [more]) = (peepholes, of_peepholes) {
        carried.push(back.steps.pen().emit("Add", &[sum, *more], &[])?);
    }
    let results = back.steps.finish(cx, !direction.reversed, (&carried, &[of_x]))?;
    match results.as_slice() {
        [h, c, peepholes @ .., of_x] => Ok(Looped {
            of_x: *of_x,
            of_h: *of_x,
            reset: None,
            h: *h,
            c: Some(*c),
            peepholes: peepholes.first().copied(),
        }),
        _ => Err(error!(Fail, "Scan has as many outputs as it is told")),
    }
}
