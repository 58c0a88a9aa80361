//! What the gradients of `RNN`, `GRU` and `LSTM` share: the layer, its directions, and the loop
//! from the last step to the first.

use super::super::recurrent_steps::{Activation, Steps, parts};
use crate::dtype::DType;
use crate::ir::{Attribute, NodeId, ValueId};
use crate::spec::{BackwardPass, GradCx, NodeEmitter, NotDifferentiable};
use crate::{Result, error};

/// What the directions of a layer share. Sequences have their steps first.
pub(super) struct Layer {
    /// `[steps, batch, inputs]`.
    pub(super) x: ValueId,
    /// `[steps, directions, batch, hidden]`.
    pub(super) y: ValueId,
    /// Whether a sequence has this step, `[steps, batch, 1]`, and whether it has the next one.
    /// Absent unless the sequences have lengths of their own.
    pub(super) active: Option<[ValueId; 2]>,
    pub(super) batch_first: bool,
    pub(super) directions: usize,
    pub(super) clip: Option<f32>,
}

/// One direction of a layer.
pub(super) struct Direction {
    pub(super) reversed: bool,
    /// `[gates, inputs]`.
    pub(super) w: ValueId,
    /// `[gates, hidden]`.
    pub(super) r: ValueId,
    /// The biases of the input and the recurrent projection, `[gates]` each.
    pub(super) biases: Option<[ValueId; 2]>,
    pub(super) peepholes: Option<ValueId>,
    /// The initial states, `[batch, hidden]`.
    pub(super) h: ValueId,
    pub(super) c: Option<ValueId>,
    /// The hidden state before each step, `[steps, batch, hidden]`.
    pub(super) states: ValueId,
    pub(super) activations: Vec<Activation>,
    /// The upstream gradients.
    pub(super) of_y: Option<ValueId>,
    pub(super) of_h: Option<ValueId>,
    pub(super) of_c: Option<ValueId>,
}

/// The gradients of one direction.
#[derive(Default)]
pub(super) struct Gradients {
    pub(super) x: Option<ValueId>,
    /// By input index: `W`, `R`, `B`, `initial_h`, `initial_c`, `P`, each with a leading axis for
    /// the direction.
    pub(super) others: Vec<(usize, ValueId)>,
}

/// The results of a direction's backward loop.
pub(super) struct Looped {
    /// The gradients of the gates' input projections, `[steps, batch, gates]`.
    pub(super) of_x: ValueId,
    /// The gradients of the gates' recurrent projections.
    pub(super) of_h: ValueId,
    /// The operand of the last gate's recurrence GEMM, if it is not the hidden state.
    pub(super) reset: Option<ValueId>,
    pub(super) h: ValueId,
    pub(super) c: Option<ValueId>,
    pub(super) peepholes: Option<ValueId>,
}

impl Layer {
    pub(super) fn of(cx: &mut GradCx<'_>) -> Result<Layer> {
        let attrs = cx.attrs();
        let directions = if attrs.string("direction")? == "bidirectional" { 2 } else { 1 };
        let batch_first = attrs.find_int("layout").unwrap_or(0) != 0;
        // A clip of 0 or less means no clipping.
        let clip = attrs.find_float("clip").filter(|bound| *bound > 0.0);
        // The hidden states are needed even if the forward pass did not return them.
        let (x, y) = (cx.input(0)?, cx.demand_output(0)?);
        let mut layer = Layer { x, y, active: None, batch_first, directions, clip };
        layer.x = layer.turned(cx, x, &[1, 0, 2])?;
        // With layout 1, `Y` is [batch, steps, directions, hidden].
        layer.y = layer.turned(cx, y, &[1, 2, 0, 3])?;
        if let Some(lengths) = cx.find_input(4) {
            let lengths = cx.cast(lengths, DType::I64)?;
            let lengths = cx.reshape_to(lengths, &[1, -1, 1])?;
            let count = cx.sizes(layer.x, 0, 1)?;
            let step = cx.range(count)?;
            let step = cx.reshape_to(step, &[-1, 1, 1])?;
            let one = cx.integer(1)?;
            // [steps, 1, 1] and [1, batch, 1] compare to [steps, batch, 1].
            let next = cx.emit("Add", &[step, one], &[])?;
            let now = cx.emit("Less", &[step, lengths], &[])?;
            layer.active = Some([now, cx.emit("Less", &[next, lengths], &[])?]);
        }
        Ok(layer)
    }

    /// Permutes a value between the batch-first layout and the one of this file; a no-op if the
    /// node does not have `layout` 1.
    pub(super) fn turned(&self, cx: &mut GradCx<'_>, value: ValueId, order: &[usize]) -> Result<ValueId> {
        if self.batch_first { cx.transpose(value, order) } else { Ok(value) }
    }

    /// Selects the direction `index` of a value along `axis`.
    pub(super) fn part(
        &self,
        cx: &mut GradCx<'_>,
        value: ValueId,
        axis: i64,
        index: usize,
    ) -> Result<ValueId> {
        if self.directions == 1 {
            let axes = cx.ints(&[axis])?;
            return cx.emit("Squeeze", &[value, axes], &[]);
        }
        let index = cx.integer(index as i64)?;
        cx.emit("Gather", &[value, index], &[("axis", Attribute::Int(axis))])
    }

    /// Selects a direction's state, or its gradient.
    pub(super) fn state(
        &self,
        cx: &mut GradCx<'_>,
        value: Option<ValueId>,
        index: usize,
    ) -> Result<Option<ValueId>> {
        let Some(value) = value else { return Ok(None) };
        // With layout 1, states are [batch, directions, hidden].
        let value = self.turned(cx, value, &[1, 0, 2])?;
        self.part(cx, value, 0, index).map(Some)
    }

    pub(super) fn direction(
        &self,
        cx: &mut GradCx<'_>,
        index: usize,
        activations: Vec<Activation>,
    ) -> Result<Direction> {
        let reversed = cx.attrs().string("direction")? == "reverse" || index == 1;
        let (w, r) = (cx.input(1)?, cx.input(2)?);
        let (w, r) = (self.part(cx, w, 0, index)?, self.part(cx, r, 0, index)?);
        let mut lists = [None, None];
        for (list, input) in lists.iter_mut().zip([3, 7]) {
            if let Some(value) = cx.find_input(input) {
                *list = Some(self.part(cx, value, 0, index)?);
            }
        }
        // `B` holds the biases of the input projection, then those of the recurrent one.
        let [bias, peepholes] = lists;
        let biases = match bias {
            None => None,
            Some(bias) => <[ValueId; 2]>::try_from(parts(&mut cx.pen, bias, 0, 2)?).ok(),
        };
        let y = self.part(cx, self.y, 1, index)?;
        let of_y = match cx.find_upstream(0) {
            None => None,
            Some(upstream) => {
                let upstream = self.turned(cx, upstream, &[1, 2, 0, 3])?;
                Some(self.part(cx, upstream, 1, index)?)
            }
        };
        let given = self.state(cx, cx.find_input(5), index)?;
        let h = match given {
            Some(h) => h,
            None => {
                let (batch, hidden) = (cx.sizes(self.x, 1, 2)?, cx.sizes(r, 1, 2)?);
                let shape = cx.join(&[batch, hidden])?;
                cx.zeros(shape, cx.dtype(y)?)?
            }
        };
        let c = match cx.operator() {
            "LSTM" => match self.state(cx, cx.find_input(6), index)? {
                None => Some(cx.filled(0.0, h)?),
                given => given,
            },
            _ => None,
        };
        let (of_h, of_c) =
            (self.state(cx, cx.find_upstream(1), index)?, self.state(cx, cx.find_upstream(2), index)?);
        let states = self.states_before(cx, (y, h), reversed)?;
        Ok(Direction { reversed, w, r, biases, peepholes, h, c, states, activations, of_y, of_h, of_c })
    }

    /// Returns the state before each step: `first`, then the states after all steps but the last.
    pub(super) fn states_before(
        &self,
        cx: &mut GradCx<'_>,
        (y, first): (ValueId, ValueId),
        reversed: bool,
    ) -> Result<ValueId> {
        let zero = cx.ints(&[0])?;
        let first = cx.emit("Unsqueeze", &[first, zero], &[])?;
        // A reversed direction runs from the last step: the state before a step is that after the
        // next one.
        let (start, end) = if reversed { (1, i64::MAX) } else { (0, -1) };
        let bounds = (cx.ints(&[start])?, cx.ints(&[end])?);
        let others = cx.emit("Slice", &[y, bounds.0, bounds.1, zero], &[])?;
        let order = if reversed { [others, first] } else { [first, others] };
        let states = cx.emit("Concat", &order, &[("axis", Attribute::Int(0))])?;
        match self.active {
            // Read backwards, a short sequence starts at its own last step, from the initial state.
            Some([_, next]) if reversed => cx.emit("Where", &[next, states, first], &[]),
            _ => Ok(states),
        }
    }

    /// `sequence * weights^T`, plus the bias if there is one.
    pub(super) fn gates(
        &self,
        cx: &mut GradCx<'_>,
        (sequence, weights): (ValueId, ValueId),
        bias: Option<ValueId>,
    ) -> Result<ValueId> {
        let turned = cx.transpose(weights, &[1, 0])?;
        let product = cx.emit("MatMul", &[sequence, turned], &[])?;
        match bias {
            None => Ok(product),
            Some(bias) => cx.emit("Add", &[product, bias], &[]),
        }
    }

    /// The pre-activations of all gates, over all steps.
    pub(super) fn all_gates(&self, cx: &mut GradCx<'_>, direction: &Direction) -> Result<ValueId> {
        let [of_x, of_h] = direction.biases.map_or([None; 2], |biases| biases.map(Some));
        let from_x = self.gates(cx, (self.x, direction.w), of_x)?;
        let from_h = self.gates(cx, (direction.states, direction.r), of_h)?;
        cx.emit("Add", &[from_x, from_h], &[])
    }

    /// The gradients of inputs, weights, biases and initial states from those of the gates.
    pub(super) fn products(
        &self,
        cx: &mut GradCx<'_>,
        direction: &Direction,
        looped: &Looped,
    ) -> Result<Gradients> {
        let mut found = Gradients::default();
        if cx.wants(0) {
            // [steps, batch, gates] and [gates, inputs].
            found.x = Some(cx.emit("MatMul", &[looped.of_x, direction.w], &[])?);
        }
        if cx.wants(1) {
            let gradient = over_all_steps(cx, looped.of_x, self.x)?;
            found.others.push((1, gradient));
        }
        if cx.wants(2) {
            let gradient = match looped.reset {
                None => over_all_steps(cx, looped.of_h, direction.states)?,
                // The last gate multiplied the reset state, so its weights' gradient does too.
                Some(reset) => {
                    let [others, last] = last_apart(&mut cx.pen, looped.of_h)?;
                    let others = over_all_steps(cx, others, direction.states)?;
                    let last = over_all_steps(cx, last, reset)?;
                    cx.emit("Concat", &[others, last], &[("axis", Attribute::Int(0))])?
                }
            };
            found.others.push((2, gradient));
        }
        if cx.wants(3) {
            let mut sums = Vec::with_capacity(2);
            for gates in [looped.of_x, looped.of_h] {
                let axes = cx.ints(&[0, 1])?;
                sums.push(cx.emit("ReduceSum", &[gates, axes], &[("keepdims", Attribute::Int(0))])?);
            }
            let gradient = cx.emit("Concat", &sums, &[("axis", Attribute::Int(0))])?;
            found.others.push((3, gradient));
        }
        // The inputs `initial_h`, `initial_c` and `P`.
        for (input, gradient) in [(5, Some(looped.h)), (6, looped.c), (7, looped.peepholes)] {
            if let Some(gradient) = gradient.filter(|_| cx.wants(input)) {
                found.others.push((input, gradient));
            }
        }
        let front = cx.ints(&[0])?;
        for (_, gradient) in &mut found.others {
            *gradient = cx.emit("Unsqueeze", &[*gradient, front], &[])?;
        }
        Ok(found)
    }

    /// Starts the loop from the last step to the first.
    pub(super) fn backward(&self, cx: &mut GradCx<'_>, direction: &Direction) -> Result<Backward> {
        let mut steps = Steps::new(cx);
        let first = |cx: &mut GradCx<'_>, given: Option<ValueId>| match given {
            Some(given) => Ok(given),
            None => cx.filled(0.0, direction.h),
        };
        let h = first(cx, direction.of_h)?;
        let carried_h = steps.carry(cx, h);
        let carried_c = match direction.c {
            None => None,
            Some(_) => {
                let c = first(cx, direction.of_c)?;
                Some(steps.carry(cx, c))
            }
        };
        let active = self.active.map(|[now, _]| steps.scan(cx, now)).transpose()?;
        let of_y = direction.of_y.map(|of_y| steps.scan(cx, of_y)).transpose()?;
        let r = steps.capture(cx, direction.r);
        let mut pen = steps.pen();
        let zero = pen.number(0.0, pen.dtype(carried_h)?)?;
        let mut of_h = carried_h;
        let mut through = None;
        if let Some(of_y) = of_y {
            of_h = pen.emit("Add", &[of_h, of_y], &[])?;
        }
        let mut of_c = carried_c;
        // A step past a sequence's end passes the gradients through unchanged.
        if let Some(active) = active {
            let of_c_there = carried_c.map(|c| pen.emit("Where", &[active, zero, c], &[])).transpose()?;
            through = Some((pen.emit("Where", &[active, zero, carried_h], &[])?, of_c_there));
            of_h = pen.emit("Where", &[active, of_h, zero], &[])?;
            of_c = carried_c.map(|c| pen.emit("Where", &[active, c, zero], &[])).transpose()?;
        }
        Ok(Backward { steps, of_h, of_c, through, r })
    }
}

/// A loop from the last step to the first, under construction.
pub(super) struct Backward {
    pub(super) steps: Steps,
    /// The gradients of the states after the step.
    pub(super) of_h: ValueId,
    pub(super) of_c: Option<ValueId>,
    /// The gradients that bypass the step, of sequences that do not have it.
    pub(super) through: Option<(ValueId, Option<ValueId>)>,
    /// The recurrence weights.
    pub(super) r: ValueId,
}

impl Backward {
    /// The gradients of `xs` from `seeds`, pairs of a value and its gradient. The cell's nodes
    /// begin at `start`.
    pub(super) fn differentiate(
        &mut self,
        start: usize,
        xs: &[ValueId],
        seeds: &[(ValueId, ValueId)],
    ) -> Result<Vec<ValueId>> {
        let graph = &mut self.steps.graph;
        let cell = graph.nodes.iter().enumerate().skip(start);
        let forward: Vec<_> = cell.map(|(index, node)| (NodeId(index as u32), node.clone())).collect();
        let mut obstacles = Vec::new();
        let totals =
            BackwardPass { forward: &forward, xs, boundary: xs }.accumulate(graph, seeds, &mut obstacles)?;
        NotDifferentiable::refuse(&obstacles)?;
        let mut pen = self.steps.pen();
        // A value that no seed depends on has a gradient of zeros, because the loop returns one for
        // each.
        xs.iter().map(|x| totals.get(x).map_or_else(|| pen.filled(0.0, *x), |total| Ok(*total))).collect()
    }

    /// The gradient of the state before the step: through the gates, plus what reaches it
    /// otherwise.
    pub(super) fn state_before(
        &mut self,
        gates: ValueId,
        weights: ValueId,
        others: Option<ValueId>,
    ) -> Result<ValueId> {
        let passed = self.through.map(|(h, _)| h);
        let mut pen = self.steps.pen();
        let mut sum = pen.emit("MatMul", &[gates, weights], &[])?;
        for other in [others, passed].into_iter().flatten() {
            sum = pen.emit("Add", &[sum, other], &[])?;
        }
        Ok(sum)
    }
}

/// `left^T * right`, summed over all steps and sequences by one GEMM.
pub(super) fn over_all_steps(cx: &mut GradCx<'_>, left: ValueId, right: ValueId) -> Result<ValueId> {
    let rows = |cx: &mut GradCx<'_>, value: ValueId| {
        // [steps * batch, width].
        let (width, all) = (cx.sizes(value, 2, 3)?, cx.ints(&[-1])?);
        let shape = cx.join(&[all, width])?;
        cx.reshape(value, shape)
    };
    let (left, right) = (rows(cx, left)?, rows(cx, right)?);
    cx.emit("Gemm", &[left, right], &[("transA", Attribute::Int(1))])
}

/// Splits three gates into the first two and the last.
pub(super) fn last_apart(pen: &mut NodeEmitter<'_>, gates: ValueId) -> Result<[ValueId; 2]> {
    match parts(pen, gates, -1, 3)?.as_slice() {
        [first, second, last] => {
            Ok([pen.emit("Concat", &[*first, *second], &[("axis", Attribute::Int(-1))])?, *last])
        }
        _ => Err(error!(Fail, "Split has as many outputs as it is told")),
    }
}
