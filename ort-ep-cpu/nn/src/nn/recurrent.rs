//! Recurrent layers: one GEMM for the inputs of all steps, then a cell step by step.
//!
//! Weights are floats or 8-bit quantized values. For the latter, each GEMM quantizes inputs or
//! states dynamically.

use std::borrow::Cow;

use ort_core::dtype::DType;
use ort_core::ep::{CompileCx, Executable, IoShapes, RunCx};
use ort_core::tensor::TensorView;
use ort_core::{Result, ensure, error};

use ort_cpu_gemm::{Cpu, RhsSource};
use ort_cpu_kernel::packed::is_weight;
use ort_cpu_kernel::workspace::{bytes_of, scratch, take};
use ort_cpu_matmul::packed_weight::PackedWeight;
use ort_cpu_matmul::quantized_gemm::{PackedQuantized, QuantizedRhs, QuantizedWeights};
use ort_cpu_matmul::real::{GemmTarget, Matrix, Real, Rhs};
use ort_cpu_threads::interrupt::spend;

/// The equations of one layer.
pub(super) trait Cell<T: Real>: Send + Sync {
    /// Returns how many gates each recurrent GEMM computes, in order.
    fn parts(&self) -> &'static [usize];

    /// Returns whether the recurrent bias of the last gate is kept apart from the sum of biases.
    fn keeps_last_bias(&self) -> bool {
        false
    }

    /// Advances the states by one step.
    fn step(&self, step: &mut Step<'_, T>) -> Result<()>;
}

/// One step of one direction, over a batch.
pub(super) struct Step<'a, T> {
    pub(super) cpu: Cpu,
    pub(super) direction: usize,
    pub(super) hidden: usize,
    /// The gates of each sequence: at first the contribution of the input, with biases.
    pub(super) gates: &'a mut [T],
    /// The recurrent weights, one matrix for each of [`Cell::parts`].
    pub(super) recurrence: &'a [Rhs<'a, T>],
    /// The hidden states.
    pub(super) h: &'a mut [T],
    /// The cell states.
    pub(super) c: &'a mut [T],
    /// Scratch, as long as `h`.
    pub(super) extra: &'a mut [T],
    /// The recurrent bias of the last gate, if it is kept apart.
    pub(super) last_bias: &'a [T],
    /// The peepholes; empty if there are none.
    pub(super) peepholes: &'a [T],
    /// Which sequences have not ended.
    pub(super) active: &'a [bool],
    /// Which sequences had already ended a step earlier.
    pub(super) ended: &'a [bool],
    pub(super) workspace: &'a mut [T],
}

/// The packed weights of one direction.
struct Packed {
    input: PackedWeight,
    recurrence: Vec<PackedWeight>,
}

/// A recurrent layer.
pub(super) struct Layer<C> {
    cell: C,
    reverse: Vec<bool>,
    batch_first: bool,
    /// Whether the weights are quantized. They are then transposed, with scales and zero points
    /// after the other inputs.
    is_quantized: bool,
    packed: Option<Vec<Packed>>,
    /// The packed quantized weights of inputs and states, by direction.
    packed_quantized: Option<[Vec<PackedQuantized>; 2]>,
    hidden: usize,
}

/// Returns the directions of a node, true for a reverse one.
pub(super) fn directions(cx: &CompileCx<'_>) -> Result<Vec<bool>> {
    match cx.attrs().string("direction")? {
        "forward" => Ok(vec![false]),
        "reverse" => Ok(vec![true]),
        "bidirectional" => Ok(vec![false, true]),
        other => {
            Err(error!(InvalidGraph, "direction is '{other}', expected forward, reverse or bidirectional"))
        }
    }
}

/// Creates a layer. Constant weights are packed if they are quantized or `T` is `float`.
pub(super) fn make<T: Real, C: Cell<T> + 'static>(
    cx: &mut CompileCx<'_>,
    cell: C,
) -> Result<Box<dyn Executable>> {
    let reverse = directions(cx)?;
    let batch_first = cx.attrs().find_int("layout").is_some_and(|layout| layout != 0);
    let is_quantized = matches!(cx.node.dtype(1), Some(DType::I8 | DType::U8));
    let can_pack = T::DTYPE == DType::F32 && is_weight(cx.node.dtype(1));
    let mut layer =
        Layer { cell, reverse, batch_first, is_quantized, packed: None, packed_quantized: None, hidden: 0 };
    if let (true, Some(weights), Some(recurrence)) = (can_pack, cx.constant(1), cx.constant(2)) {
        layer.pack(cx, weights, recurrence)?;
    }
    if let (true, Some(weights), Some(recurrence)) = (is_quantized, cx.constant(1), cx.constant(2)) {
        layer.pack_quantized(cx, [weights, recurrence])?;
    }
    Ok(Box::new(Runner { layer, element: std::marker::PhantomData::<fn() -> T> }))
}

impl<T: Real> Step<'_, T> {
    /// Copies the states to `extra` with zeros for ended sequences, if the states are quantized and
    /// a sequence has ended. Returns whether it copied.
    ///
    /// An ended sequence must not widen the quantization range of the others. ONNX Runtime drops a
    /// state one step after its last, so we do the same to get the same quantized values.
    pub(super) fn hides_ended(&mut self) -> bool {
        let is_quantized = matches!(self.recurrence, [Rhs::Quantized(_), ..]);
        if !is_quantized || self.hidden == 0 || !self.ended.contains(&true) {
            return false;
        }
        let rows = self.extra.chunks_mut(self.hidden).zip(self.h.chunks(self.hidden));
        for ((to, from), ended) in rows.zip(self.ended) {
            match ended {
                true => to.fill(T::ZERO),
                false => to.copy_from_slice(from),
            }
        }
        true
    }
}

impl<C> Layer<C> {
    fn pack<T: Real>(
        &mut self,
        cx: &mut CompileCx<'_>,
        weights: TensorView<'_>,
        recurrence: TensorView<'_>,
    ) -> Result<()>
    where
        C: Cell<T>,
    {
        // [directions, gates * hidden, inputs] and [directions, gates * hidden, hidden].
        let (&[count, rows, inputs], &[r_count, r_rows, hidden]) = (weights.shape(), recurrence.shape())
        else {
            return Err(error!(InvalidGraph, "the weights do not have rank 3"));
        };
        let parts = self.cell.parts();
        let gates: usize = parts.iter().sum();
        let fits = [count, r_count] == [self.reverse.len(); 2] && [rows, r_rows] == [gates * hidden; 2];
        ensure!(fits, InvalidGraph, "weights of shape {:?} and {:?}", weights.shape(), recurrence.shape());
        let mut packed = Vec::with_capacity(count);
        for direction in 0..count {
            let first = direction * rows * inputs;
            // ONNX stores gates as rows. Packing reads the transpose.
            let input = PackedWeight::new(cx, weights, first, [inputs, rows], [1, inputs])?;
            let (mut parts_packed, mut first) = (Vec::new(), direction * rows * hidden);
            // The gates of one recurrent GEMM are adjacent rows, so each part is a matrix of its
            // own.
            for part in parts {
                let columns = part * hidden;
                parts_packed.push(PackedWeight::new(cx, recurrence, first, [hidden, columns], [1, hidden])?);
                first += columns * hidden;
            }
            packed.push(Packed { input, recurrence: parts_packed });
        }
        (self.packed, self.hidden) = (Some(packed), hidden);
        cx.consume(1);
        cx.consume(2);
        Ok(())
    }
}

impl<C> Layer<C> {
    /// Packs quantized weights of shape `[directions, inputs, gates]`.
    fn pack_quantized(&mut self, cx: &mut CompileCx<'_>, weights: [TensorView<'_>; 2]) -> Result<()> {
        let mut packed = [Vec::new(), Vec::new()];
        for (view, packed) in weights.into_iter().zip(&mut packed) {
            let &[count, k, columns] = view.shape() else {
                return Err(error!(InvalidGraph, "the weights do not have rank 3"));
            };
            for direction in 0..count {
                let first = direction * k * columns;
                packed.push(PackedQuantized::new(cx, view, first, [k, columns], [columns, 1])?);
            }
            // The recurrence comes second, and its k is the hidden size.
            self.hidden = k;
        }
        self.packed_quantized = Some(packed);
        cx.consume(1);
        cx.consume(2);
        Ok(())
    }
}

struct Runner<T, C> {
    layer: Layer<C>,
    element: std::marker::PhantomData<fn() -> T>,
}

/// The sizes of a run.
#[derive(Clone, Copy)]
struct RecurrentSizes {
    steps: usize,
    batch: usize,
    inputs: usize,
    hidden: usize,
    gates: usize,
}

impl<T: Real, C: Cell<T>> Runner<T, C> {
    fn sizes(&self, x: &[usize], recurrence: &[usize]) -> Result<RecurrentSizes> {
        let &[first, second, inputs] = x else {
            return Err(error!(InvalidArgument, "an input of shape {x:?}"));
        };
        let (steps, batch) = if self.layer.batch_first { (second, first) } else { (first, second) };
        let is_packed = self.layer.packed.is_some() || self.layer.packed_quantized.is_some();
        let hidden = match (is_packed, recurrence) {
            // Packed weights may no longer be inputs, so their shape is not known here.
            (true, _) => self.layer.hidden,
            (false, [_, hidden, _]) if self.layer.is_quantized => *hidden,
            _ => recurrence.last().copied().unwrap_or(0),
        };
        Ok(RecurrentSizes { steps, batch, inputs, hidden, gates: self.layer.cell.parts().iter().sum() })
    }

    /// Returns the GEMM workspace, in values.
    fn gemm_len(&self, cpu: Cpu, sizes: RecurrentSizes) -> usize {
        let RecurrentSizes { steps, batch, inputs, hidden, gates } = sizes;
        let source = if self.layer.packed.is_some() { RhsSource::Packed } else { RhsSource::Strided };
        let len = |shape: [usize; 3]| match self.layer.is_quantized {
            true => QuantizedRhs::workspace_len(cpu, shape, self.layer.packed_quantized.is_some()),
            false => T::workspace_len(cpu, shape, source),
        };
        let parts = self.layer.cell.parts().iter().map(|part| len([batch, part * hidden, hidden]));
        // The GEMMs run one after the other and share a workspace.
        parts.fold(len([steps * batch, gates * hidden, inputs]), usize::max)
    }

    /// Returns the workspace in values: gates of all steps, gates of one step, both states,
    /// `extra`, two biases, GEMM workspace.
    fn workspace_len(&self, cpu: Cpu, sizes: RecurrentSizes) -> usize {
        let RecurrentSizes { steps, batch, hidden, gates, .. } = sizes;
        let per_sequence = hidden * (gates * (steps + 1) + 3);
        per_sequence.saturating_mul(batch) + 2 * gates * hidden + self.gemm_len(cpu, sizes)
    }
}

impl<T: Real, C: Cell<T>> Executable for Runner<T, C> {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        let sizes = self.sizes(shapes.input(0), shapes.input(2))?;
        bytes_of::<T>(self.workspace_len(Cpu::with_threads(shapes.threads), sizes))
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let cpu = Cpu::with_threads(cx.threads());
        let x = cx.input(0)?;
        let sizes = self.sizes(x.shape(), cx.find_input(2).map_or(&[], |r| r.shape()))?;
        let inputs = Inputs::<T>::new(cx, sizes, &self.layer)?;
        let workspace = scratch::<T>(cx.workspace()?)?;
        let mut outputs = Outputs::<T>::new(cx)?;
        // Steps past the end of a sequence are zero.
        if let Some(y) = &mut outputs.y {
            y.fill(T::ZERO);
        }
        for direction in 0..self.layer.reverse.len() {
            self.run_direction(cpu, direction, sizes, &inputs, &mut outputs, workspace)?;
            cx.check()?;
        }
        Ok(())
    }
}

/// The inputs as slices; a missing input is empty.
struct Inputs<'a, T: Clone> {
    x: &'a [T],
    /// Empty if they are packed. Constants may be unaligned, hence the `Cow`.
    weights: Cow<'a, [T]>,
    recurrence: Cow<'a, [T]>,
    bias: &'a [T],
    h: &'a [T],
    c: &'a [T],
    peepholes: &'a [T],
    /// The weights of inputs and states if they are quantized; the two above are then empty.
    quantized: Option<[QuantizedWeights<'a>; 2]>,
    /// The length of each sequence.
    lengths: Vec<usize>,
}

impl<'a, T: Real> Inputs<'a, T> {
    fn new<'b: 'a, C>(cx: &RunCx<'b>, sizes: RecurrentSizes, layer: &'a Layer<C>) -> Result<Inputs<'a, T>> {
        let RecurrentSizes { steps, batch, hidden, gates, inputs } = sizes;
        let (directions, is_quantized) = (layer.reverse.len(), layer.is_quantized);
        let weights = |index: usize, rows: usize, scales: usize| {
            let shape = [directions, rows, gates * hidden];
            let (scales, zeros) = (cx.input(scales)?, cx.input(scales + 1)?);
            match &layer.packed_quantized {
                Some(packed) => QuantizedWeights::packed(&packed[index - 1], shape, scales, zeros),
                None => QuantizedWeights::new(cx.input(index)?, shape, scales, zeros),
            }
        };
        let quantized =
            // ONNX Runtime's order: scale and zero point of the weights, then of the recurrence.
            if is_quantized { Some([weights(1, inputs, 8)?, weights(2, hidden, 10)?]) } else { None };
        let slice = |index: usize, len: usize| -> Result<&'a [T]> {
            let Some(view) = cx.find_input(index) else { return Ok(&[]) };
            let values = view.as_slice::<T>()?;
            ensure!(values.len() == len, InvalidArgument, "input {index} has shape {:?}", view.shape());
            Ok(values)
        };
        // Other nodes may read the weights too, so packed ones may still be present.
        let is_packed = is_quantized || layer.packed.is_some();
        let matrix = |index: usize, columns: usize| -> Result<Cow<'a, [T]>> {
            let Some(view) = cx.find_input(index).filter(|_| !is_packed) else {
                return Ok(Cow::Borrowed(&[]));
            };
            let values = view.to_cow::<T>()?;
            let fits = values.len() == directions * gates * hidden * columns;
            ensure!(fits, InvalidArgument, "input {index} has shape {:?}", view.shape());
            Ok(values)
        };
        let lengths = match cx.find_input(4) {
            // Without lengths, all sequences last for all steps.
            None => vec![steps; batch],
            Some(view) => {
                let lengths = view.to_ints()?;
                let fits =
                    lengths.len() == batch && lengths.iter().all(|len| (0..=steps as i64).contains(len));
                ensure!(
                    fits,
                    InvalidArgument,
                    "sequence_lens is {lengths:?}, expected {batch} lengths from 0 to {steps}"
                );
                lengths.into_iter().map(|len| len as usize).collect()
            }
        };
        // Both layouts of a state have the same number of elements.
        let state = directions * batch * hidden;
        Ok(Inputs {
            x: cx.input(0)?.as_slice()?,
            weights: matrix(1, inputs)?,
            recurrence: matrix(2, hidden)?,
            bias: slice(3, directions * 2 * gates * hidden)?,
            h: slice(5, state)?,
            c: slice(6, state)?,
            peepholes: slice(7, directions * 3 * hidden)?,
            quantized,
            lengths,
        })
    }
}

/// The outputs that the run must write.
struct Outputs<'a, T> {
    y: Option<&'a mut [T]>,
    h: Option<&'a mut [T]>,
    c: Option<&'a mut [T]>,
}

impl<'a, T: Real> Outputs<'a, T> {
    fn new(cx: &mut RunCx<'a>) -> Result<Outputs<'a, T>> {
        let mut slice =
            |index| if cx.wants(index) { cx.output(index)?.as_mut_slice().map(Some) } else { Ok(None) };
        Ok(Outputs { y: slice(0)?, h: slice(1)?, c: slice(2)? })
    }
}

/// Returns the part of a slice that belongs to one direction; empty if the slice is.
fn part<T>(values: &[T], direction: usize, directions: usize) -> &[T] {
    let len = values.len() / directions;
    &values[direction * len..(direction + 1) * len]
}

impl<T: Real, C: Cell<T>> Runner<T, C> {
    /// Returns the row of a sequence's state in a direction.
    fn state_row(&self, direction: usize, sequence: usize, batch: usize) -> usize {
        match self.layer.batch_first {
            // `layout` 1 is [batch, directions, hidden], `layout` 0 [directions, batch, hidden].
            true => sequence * self.layer.reverse.len() + direction,
            false => direction * batch + sequence,
        }
    }

    fn load_states(&self, from: &[T], direction: usize, sizes: RecurrentSizes, to: &mut [T]) {
        let RecurrentSizes { batch, hidden, .. } = sizes;
        // The standard: an initial state that is not given is 0.
        to.fill(T::ZERO);
        if from.is_empty() || hidden == 0 {
            return;
        }
        for (sequence, to) in to.chunks_mut(hidden).enumerate() {
            to.copy_from_slice(&from[self.state_row(direction, sequence, batch) * hidden..][..hidden]);
        }
    }

    fn store_states(&self, from: &[T], direction: usize, sizes: RecurrentSizes, to: Option<&mut &mut [T]>) {
        let RecurrentSizes { batch, hidden, .. } = sizes;
        let Some(to) = to.filter(|_| hidden > 0) else { return };
        for (sequence, from) in from.chunks(hidden).enumerate() {
            to[self.state_row(direction, sequence, batch) * hidden..][..hidden].copy_from_slice(from);
        }
    }

    fn run_direction(
        &self,
        cpu: Cpu,
        direction: usize,
        sizes: RecurrentSizes,
        inputs: &Inputs<'_, T>,
        outputs: &mut Outputs<'_, T>,
        workspace: &mut [T],
    ) -> Result<()> {
        let RecurrentSizes { steps, batch, hidden, gates, .. } = sizes;
        let (directions, width) = (self.layer.reverse.len(), gates * hidden);
        let mut rest = workspace;
        // In the layout of the input: [steps, batch, width], or [batch, steps, width].
        let all_gates = take(&mut rest, steps * batch * width)?;
        let step_gates = take(&mut rest, batch * width)?;
        let [h, c, extra] = [(); 3].map(|()| take(&mut rest, batch * hidden));
        let (h, c, extra) = (h?, c?, extra?);
        let (bias, last_bias) = (take(&mut rest, width)?, take(&mut rest, width)?);
        self.biases(part(inputs.bias, direction, directions), hidden, bias, last_bias);
        let weights = self.weights(direction, sizes, inputs);
        let longest = inputs.lengths.iter().copied().max().unwrap_or(0);
        // Steps past the end of all sequences must not widen the quantization range. Only
        // time-major rows can be cut off.
        let rows = if self.layer.batch_first { steps } else { longest } * batch;
        let rows = Matrix::rows(inputs.x, rows, sizes.inputs);
        // One GEMM serves the inputs of all steps. Only the recurrent part depends on the step
        // before.
        T::multiply(cpu, rows, weights.input, GemmTarget::write(all_gates, width), rest)?;
        self.load_states(inputs.h, direction, sizes, h);
        self.load_states(inputs.c, direction, sizes, c);
        let (mut active, mut ended) = (vec![true; batch], vec![false; batch]);
        for index in 0..longest {
            // An activation costs as much as several simple operations.
            spend(4 * batch * width);
            let time = |sequence: usize| match self.layer.reverse[direction] {
                // In reverse, a sequence starts at its own last step, not at that of the batch.
                true => inputs.lengths[sequence].checked_sub(index + 1),
                false => Some(index).filter(|index| *index < inputs.lengths[sequence]),
            };
            for sequence in 0..batch {
                let to = &mut step_gates[sequence * width..][..width];
                let time = time(sequence);
                // Before `active` changes, it tells about the step before.
                ended[sequence] = !active[sequence];
                active[sequence] = time.is_some();
                // An ended sequence may read any row, because its gates are not used.
                let row = self.row(time.unwrap_or(0), sequence, sizes);
                let from = &all_gates[row * width..][..width];
                to.iter_mut().zip(from).zip(&*bias).for_each(|((to, from), bias)| *to = *from + *bias);
            }
            self.layer.cell.step(&mut Step {
                cpu,
                direction,
                hidden,
                gates: &mut *step_gates,
                recurrence: &weights.recurrence,
                h: &mut *h,
                c: &mut *c,
                extra: &mut *extra,
                last_bias: &last_bias[..hidden],
                peepholes: part(inputs.peepholes, direction, directions),
                active: &active,
                ended: &ended,
                workspace: &mut *rest,
            })?;
            let Some(y) = &mut outputs.y else { continue };
            for sequence in 0..batch {
                let Some(time) = time(sequence) else { continue };
                // [batch, steps, directions, hidden], or [steps, directions, batch, hidden].
                let row = match self.layer.batch_first {
                    true => self.row(time, sequence, sizes) * directions + direction,
                    false => (time * directions + direction) * batch + sequence,
                };
                y[row * hidden..][..hidden].copy_from_slice(&h[sequence * hidden..][..hidden]);
            }
        }
        // Cells keep the states of ended sequences, so these are the last valid ones.
        self.store_states(h, direction, sizes, outputs.h.as_mut());
        self.store_states(c, direction, sizes, outputs.c.as_mut());
        Ok(())
    }

    /// Returns the row of the input for a time of a sequence.
    fn row(&self, time: usize, sequence: usize, sizes: RecurrentSizes) -> usize {
        if self.layer.batch_first { sequence * sizes.steps + time } else { time * sizes.batch + sequence }
    }

    /// Sums both biases of each gate. The recurrent bias of the last gate is kept apart if the cell
    /// asks for it.
    fn biases(&self, given: &[T], hidden: usize, bias: &mut [T], last_bias: &mut [T]) {
        bias.fill(T::ZERO);
        last_bias.fill(T::ZERO);
        if given.is_empty() {
            return;
        }
        let width = bias.len();
        let (input, recurrent) = given.split_at(width);
        // With `linear_before_reset`, a GRU's reset gate scales the recurrent part of the last
        // gate, its bias included.
        let apart = if self.layer.cell.keeps_last_bias() { width - hidden } else { width };
        bias.copy_from_slice(input);
        bias[..apart].iter_mut().zip(recurrent).for_each(|(bias, recurrent)| *bias = *bias + *recurrent);
        last_bias[..width - apart].copy_from_slice(&recurrent[apart..]);
    }

    fn weights<'b>(
        &'b self,
        direction: usize,
        sizes: RecurrentSizes,
        inputs: &'b Inputs<'b, T>,
    ) -> Weights<'b, T> {
        if let Some(packed) = &self.layer.packed {
            let packed = &packed[direction];
            let recurrence = packed.recurrence.iter().map(Rhs::Packed).collect();
            return Weights { input: Rhs::Packed(&packed.input), recurrence };
        }
        if let Some([input, recurrence]) = &inputs.quantized {
            let recurrence = vec![Rhs::Quantized(recurrence.at(direction))];
            return Weights { input: Rhs::Quantized(input.at(direction)), recurrence };
        }
        let RecurrentSizes { hidden, gates, inputs: size, .. } = sizes;
        let directions = self.layer.reverse.len();
        let values = part(&inputs.weights, direction, directions);
        // ONNX stores gates as rows. The GEMM reads the transpose in place.
        let input = Rhs::Plain(Matrix::transposed(values, size, gates * hidden));
        let (mut recurrence, mut rest) = (Vec::new(), part(&inputs.recurrence, direction, directions));
        for part in self.layer.cell.parts() {
            let (values, others) = rest.split_at((part * hidden * hidden).min(rest.len()));
            recurrence.push(Rhs::Plain(Matrix::transposed(values, hidden, part * hidden)));
            rest = others;
        }
        Weights { input, recurrence }
    }
}

struct Weights<'a, T> {
    input: Rhs<'a, T>,
    recurrence: Vec<Rhs<'a, T>>,
}
