//! Recurrent layers: one GEMM for the inputs of a chunk of steps, then a cell step by step.
//!
//! Weights are floats or 8-bit quantized values. For the latter, each GEMM quantizes inputs or
//! states dynamically. A `float` layer runs its directions, and groups of sequences, on threads of
//! their own: they do not depend on each other, and a barrier in each step would cost more than a
//! small GEMM.

use std::ops::Range;

use ort_core::dtype::DType;
use ort_core::ep::{CompileCx, Executable, IoShapes, RunCx};
use ort_core::{Result, error};
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::recurrent_layer::{Inputs, Layer, Outputs, RecurrentSizes, directions, pack_skinny, part};
use super::recurrent_step::{Cell, Recurrence, Step, add, floats, floats_mut};
use ort_cpu_gemm::{Cpu, RhsSource};
use ort_cpu_kernel::packed::{PackedFloats, is_weight};
use ort_cpu_kernel::workspace::{bytes_of, scratch, take};
use ort_cpu_matmul::quantized_gemm::QuantizedRhs;
use ort_cpu_matmul::real::{GemmTarget, Matrix, Real, Rhs};
use ort_cpu_threads::interrupt::spend;
use ort_cpu_threads::parallel::{RowBlock, StridedRows};
use ort_cpu_vector::simd::Isa;
use ort_cpu_vector::simd::skinny_gemm::SkinnyRhs;

/// Creates a layer. Constant weights are packed if they are quantized or `T` is `float`.
pub(super) fn make<T: Real, C: Cell<T> + 'static>(
    cx: &mut CompileCx<'_>,
    cell: C,
) -> Result<Box<dyn Executable>> {
    let reverse = directions(cx)?;
    let batch_first = cx.attrs().find_int("layout").is_some_and(|layout| layout != 0);
    let is_quantized = matches!(cx.node.dtype(1), Some(DType::I8 | DType::U8));
    let can_pack = T::DTYPE == DType::F32 && is_weight(cx.node.dtype(1));
    let mut layer = Layer {
        cell,
        reverse,
        batch_first,
        is_quantized,
        packed: None,
        packed_quantized: None,
        hidden: 0,
        has_lengths: cx.node.dtype(4).is_some(),
    };
    if let (true, Some(weights), Some(recurrence)) = (can_pack, cx.constant(1), cx.constant(2)) {
        layer.pack(cx, weights, recurrence)?;
    }
    if let (true, Some(weights), Some(recurrence)) = (is_quantized, cx.constant(1), cx.constant(2)) {
        layer.pack_quantized(cx, [weights, recurrence])?;
    }
    Ok(Box::new(Runner { layer, element: std::marker::PhantomData::<fn() -> T> }))
}

struct Runner<T, C> {
    layer: Layer<C>,
    element: std::marker::PhantomData<fn() -> T>,
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

    /// Whether the layer computes in `float`, with recurrent weights that are packed for few rows.
    fn is_float(&self) -> bool {
        T::DTYPE == DType::F32 && !self.layer.is_quantized
    }

    /// Returns the workspace of a GEMM of this shape (rows, columns, k), in values.
    fn gemm_len(&self, cpu: Cpu, shape: [usize; 3]) -> usize {
        let source = if self.layer.packed.is_some() { RhsSource::Packed } else { RhsSource::Strided };
        match self.layer.is_quantized {
            true => QuantizedRhs::workspace_len(cpu, shape, self.layer.packed_quantized.is_some()),
            false => T::workspace_len(cpu, shape, source),
        }
    }

    /// Returns the workspace of the GEMM of the inputs of a chunk, and of the recurrent GEMMs of a
    /// group, in values.
    fn gemm_lens(&self, cpu: Cpu, sizes: RecurrentSizes, division: Division) -> [usize; 2] {
        let RecurrentSizes { steps, batch, inputs, hidden, gates } = sizes;
        let of_chunk = |steps: usize| self.gemm_len(cpu, [steps * batch, gates * hidden, inputs]);
        // The last chunk may be shorter, and a GEMM of fewer rows may need more.
        let last = match steps % division.steps.max(1) {
            0 => 0,
            rest => of_chunk(rest),
        };
        let parts = self.layer.cell.parts().iter();
        let parts = parts.map(|part| self.gemm_len(cpu, [batch, part * hidden, hidden]));
        let recurrent = if self.is_float() { 0 } else { parts.fold(0, usize::max) };
        [of_chunk(division.steps).max(last), recurrent]
    }

    /// Returns the values of the recurrent weights of a direction that a run packs: those of
    /// `float` that are not constant.
    fn packed_in_run(&self, sizes: RecurrentSizes) -> usize {
        let RecurrentSizes { hidden, .. } = sizes;
        let len = |part: &usize| SkinnyRhs::len(Isa::current(), hidden, part * hidden);
        match self.is_float() && self.layer.packed.is_none() {
            true => self.layer.cell.parts().iter().map(len).sum(),
            false => 0,
        }
    }

    /// Divides a run among threads.
    fn division(&self, cpu: Cpu, sizes: RecurrentSizes) -> Division {
        /// Multiply-adds of a layer that are worth waking threads for.
        const WORTH_THREADS: usize = 1 << 19;
        let RecurrentSizes { steps, batch, hidden, gates, .. } = sizes;
        let directions = self.layer.reverse.len();
        let steps_at_once = self.steps_at_once(sizes);
        let work = [steps, batch, gates * hidden, hidden].into_iter().fold(1, usize::saturating_mul);
        // Dynamic quantization takes the range of a whole batch, and GEMMs in `double` are split
        // themselves.
        if cpu.threads == 1 || !self.is_float() || work < WORTH_THREADS {
            return Division { directions: 1, steps: steps_at_once, rows: batch.max(1), takers: 1 };
        }
        let groups = (cpu.threads / directions).clamp(1, batch.max(1));
        let rows = batch.div_ceil(groups).max(1);
        let takers = (directions * batch.div_ceil(rows)).clamp(1, cpu.threads);
        Division { directions, steps: steps_at_once, rows, takers }
    }

    /// Returns the steps of a chunk, whose inputs one GEMM multiplies.
    fn steps_at_once(&self, sizes: RecurrentSizes) -> usize {
        /// Enough rows for a GEMM to reuse its weights: a multiple of the heights of all tiles.
        const ROWS: usize = 96;
        /// Gates that stay in cache beside the recurrent weights, and that repay a parallel region.
        const GATES: usize = 1 << 16;
        let RecurrentSizes { steps, batch, hidden, gates, .. } = sizes;
        let layer = &self.layer;
        // A GEMM that packs its weights would pack them for each chunk. Sequences of different
        // lengths are not at the same time of a reverse direction.
        let is_one = !self.is_float() || layer.packed.is_none() || layer.has_lengths;
        // The rows of a chunk must be adjacent.
        if is_one || (layer.batch_first && batch > 1) {
            return steps;
        }
        let rows = ROWS.max(GATES / (gates * hidden).max(1));
        let most = rows.div_ceil(batch.max(1));
        steps.div_ceil(steps.div_ceil(most).max(1))
    }

    /// Returns the scratch of a group of sequences in values: gates of one step, both states,
    /// `extra`, GEMM workspace.
    fn group_len(&self, sizes: RecurrentSizes, division: Division, gemm_len: usize) -> usize {
        division.rows.saturating_mul((sizes.gates + 3) * sizes.hidden).saturating_add(gemm_len)
    }

    /// Returns the workspace in values: for each direction at once both states, two biases, the
    /// weights that are packed in the run and the gates of a chunk, then the GEMM of the inputs or
    /// the groups.
    fn workspace_len(&self, cpu: Cpu, sizes: RecurrentSizes) -> usize {
        let RecurrentSizes { batch, hidden, gates, .. } = sizes;
        let division = self.division(cpu, sizes);
        let [gemm_len, recurrent_len] = self.gemm_lens(cpu, sizes, division);
        let per_direction = (gates * hidden)
            .saturating_mul(division.steps.saturating_mul(batch).saturating_add(2))
            .saturating_add((2 * hidden).saturating_mul(batch))
            .saturating_add(self.packed_in_run(sizes));
        let groups = self.group_len(sizes, division, recurrent_len).saturating_mul(division.takers);
        division.directions.saturating_mul(per_direction).saturating_add(gemm_len.max(groups))
    }
}

/// How a run is divided, into chunks of steps and among threads.
#[derive(Clone, Copy)]
struct Division {
    /// The directions that run at once.
    directions: usize,
    /// The steps of a chunk.
    steps: usize,
    /// The sequences of a group, which one thread advances.
    rows: usize,
    /// The threads that take groups.
    takers: usize,
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
        if sizes.hidden == 0 {
            return Ok(());
        }
        // Steps past the end of a sequence are zero.
        if let Some(y) = outputs.y.as_mut().filter(|_| inputs.lengths.iter().any(|len| *len < sizes.steps)) {
            y.fill(T::ZERO);
        }
        let division = self.division(cpu, sizes);
        for first in (0..self.layer.reverse.len()).step_by(division.directions) {
            let run = LayerRun { runner: self, cpu, sizes, inputs: &inputs, division };
            run.run_directions(first, &mut outputs, workspace)?;
            cx.check()?;
        }
        Ok(())
    }
}

/// A run of a layer.
struct LayerRun<'a, T: Real, C> {
    runner: &'a Runner<T, C>,
    cpu: Cpu,
    sizes: RecurrentSizes,
    inputs: &'a Inputs<'a, T>,
    division: Division,
}

/// What all steps of a direction read.
struct Prepared<'a, T> {
    direction: usize,
    bias: &'a [T],
    last_bias: &'a [T],
    recurrence: SmallVec<[Recurrence<'a, T>; 2]>,
}

/// A chunk of the steps of a direction.
struct Chunk<'a, T> {
    /// The steps, counted from the first one of the direction.
    steps: Range<usize>,
    /// The first time of the chunk.
    first_time: usize,
    /// The contribution of the input to all gates, in the layout of the input: [steps, batch,
    /// width], or [batch, steps, width].
    gates: &'a [T],
}

impl<'a, T: Real, C: Cell<T>> LayerRun<'a, T, C> {
    /// Runs the directions that run at once, from `first` on.
    fn run_directions(&self, first: usize, outputs: &mut Outputs<'_, T>, workspace: &mut [T]) -> Result<()> {
        let RecurrentSizes { steps, batch, hidden, .. } = self.sizes;
        let (count, mut rest) = (self.division.directions, workspace);
        let states = take(&mut rest, 2 * count * batch * hidden)?;
        self.load_states(first, states);
        let states = Mutex::new(states);
        let mut prepared = SmallVec::<[Prepared<'_, T>; 2]>::new();
        for direction in first..first + count {
            prepared.push(self.prepare(direction, &mut rest)?);
        }
        for start in (0..steps.max(1)).step_by(self.division.steps.max(1)) {
            let chunk_steps = start..(start + self.division.steps).min(steps);
            let mut free = &mut *rest;
            let mut chunks = SmallVec::<[Chunk<'_, T>; 2]>::new();
            for direction in first..first + count {
                chunks.push(self.multiply_inputs(direction, chunk_steps.clone(), &mut free)?);
            }
            self.run_chunk(&prepared, &chunks, outputs.y.as_deref_mut(), free, &states)?;
        }
        self.store_states(first, states.into_inner(), outputs);
        Ok(())
    }

    /// Runs the steps of a chunk of all directions at once, in groups of sequences.
    fn run_chunk(
        &self,
        prepared: &[Prepared<'_, T>],
        chunks: &[Chunk<'_, T>],
        y: Option<&mut [T]>,
        scratch: &mut [T],
        states: &Mutex<&mut [T]>,
    ) -> Result<()> {
        let RecurrentSizes { steps, batch, hidden, .. } = self.sizes;
        let (layer, Division { rows, takers, .. }) = (&self.runner.layer, self.division);
        let directions = layer.reverse.len();
        // The strides of direction, sequence and step: [batch, steps, directions, hidden], or
        // [steps, directions, batch, hidden].
        let strides = match layer.batch_first {
            true => [hidden, steps * directions * hidden, directions * hidden],
            false => [batch * hidden, hidden, directions * batch * hidden],
        };
        let first = prepared.first().map_or(0, |prepared| prepared.direction);
        let y = y.filter(|y| !y.is_empty()).and_then(|y| y.get_mut(first * strides[0]..));
        let y = match y {
            Some(y) => StridedRows::new(y, [prepared.len(), batch, steps], strides, hidden),
            // Without rows to write, the groups run all the same.
            None => StridedRows::new(&mut [], [prepared.len(), batch, 1], [0; 3], 0),
        };
        let y = y.ok_or_else(|| error!(Fail, "the output does not have its shape"))?;
        let [_, gemm_len] = self.runner.gemm_lens(self.cpu, self.sizes, self.division);
        let group_len = self.runner.group_len(self.sizes, self.division, gemm_len);
        let result = Mutex::new(Ok(()));
        y.for_each_block(takers, [rows, steps.max(1)], (scratch, group_len), |block, scratch| {
            let (prepared, chunk) = (&prepared[block.outer], &chunks[block.outer]);
            if let Err(error) = self.run_group(prepared, chunk, block, scratch, states) {
                *result.lock() = Err(error);
            }
        });
        result.into_inner()
    }

    /// Takes what all steps of a direction read from the workspace.
    fn prepare<'b>(&self, direction: usize, rest: &mut &'b mut [T]) -> Result<Prepared<'b, T>>
    where
        'a: 'b,
    {
        let RecurrentSizes { hidden, gates, .. } = self.sizes;
        let width = gates * hidden;
        let (bias, last_bias) = (take(rest, width)?, take(rest, width)?);
        let given = part(self.inputs.bias, direction, self.runner.layer.reverse.len());
        self.runner.biases(given, hidden, bias, last_bias);
        let packed = take(rest, self.runner.packed_in_run(self.sizes))?;
        let recurrence = self.recurrence(direction, packed)?;
        Ok(Prepared { direction, bias, last_bias, recurrence })
    }

    /// Multiplies the inputs of a chunk in one GEMM. Only the recurrent part depends on the step
    /// before.
    fn multiply_inputs<'b>(
        &self,
        direction: usize,
        steps: Range<usize>,
        free: &mut &'b mut [T],
    ) -> Result<Chunk<'b, T>> {
        let RecurrentSizes { batch, inputs, hidden, gates, .. } = self.sizes;
        let (layer, width) = (&self.runner.layer, gates * hidden);
        // A chunk that is not the whole has sequences of one length.
        let first_time = match layer.reverse[direction] {
            true => self.sizes.steps - steps.end,
            false => steps.start,
        };
        let longest = self.inputs.lengths.iter().copied().max().unwrap_or(0);
        // Steps past the end of all sequences must not widen the quantization range. Only
        // time-major rows can be cut off.
        let cut = if layer.batch_first { steps.len() } else { steps.len().min(longest) } * batch;
        let x = self.inputs.x.get(first_time * batch * inputs..).unwrap_or(&[]);
        let to = take(free, steps.len() * batch * width)?;
        // A GEMM of fewer rows may need more workspace than is declared. That of quantized weights
        // never does.
        let is_fit = self.runner.gemm_len(self.cpu, [cut, width, inputs]) <= free.len();
        let rows = if is_fit { cut } else { steps.len() * batch };
        let target = GemmTarget::write(&mut *to, width);
        T::multiply(self.cpu, Matrix::rows(x, rows, inputs), self.input_weights(direction), target, free)?;
        Ok(Chunk { steps, first_time, gates: to })
    }

    /// Runs the steps of a chunk for a group of sequences in one direction.
    fn run_group(
        &self,
        prepared: &Prepared<'_, T>,
        chunk: &Chunk<'_, T>,
        mut block: RowBlock<'_, T>,
        scratch: &mut [T],
        states: &Mutex<&mut [T]>,
    ) -> Result<()> {
        let (layer, direction) = (&self.runner.layer, prepared.direction);
        let RecurrentSizes { batch, hidden, gates, .. } = self.sizes;
        let (width, sequences, mut rest) = (gates * hidden, block.ranges[0].clone(), scratch);
        let rows = sequences.len();
        let step_gates = take(&mut rest, rows * width)?;
        let [h, c, extra] = [(); 3].map(|()| take(&mut rest, rows * hidden));
        let (h, c, extra) = (h?, c?, extra?);
        let lengths = &self.inputs.lengths[sequences.clone()];
        let first_h = (block.outer * batch + sequences.start) * hidden;
        let first_c = first_h + self.division.directions * batch * hidden;
        {
            let states = states.lock();
            h.copy_from_slice(&states[first_h..][..rows * hidden]);
            c.copy_from_slice(&states[first_c..][..rows * hidden]);
        }
        // All threads split the steps of a group that runs alone.
        let cpu = if self.division.takers > 1 { Cpu { threads: 1, ..self.cpu } } else { self.cpu };
        let end = lengths.iter().copied().max().unwrap_or(0).min(chunk.steps.end);
        for index in chunk.steps.start..end {
            // An activation costs as much as several simple operations.
            spend(4 * rows * width);
            let time = |length: usize| match layer.reverse[direction] {
                // In reverse, a sequence starts at its own last step, not at that of the batch.
                true => length.checked_sub(index + 1),
                false => Some(index).filter(|index| *index < length),
            };
            for ((sequence, length), to) in sequences.clone().zip(lengths).zip(step_gates.chunks_mut(width)) {
                // An ended sequence may read any row, because its gates are not used.
                let row = self.row(time(*length).map_or(0, |time| time - chunk.first_time), sequence);
                add(&chunk.gates[row * width..][..width], prepared.bias, to);
            }
            layer.cell.step(&mut Step {
                cpu,
                direction,
                hidden,
                gates: &mut *step_gates,
                recurrence: &prepared.recurrence,
                h: &mut *h,
                c: &mut *c,
                extra: &mut *extra,
                last_bias: &prepared.last_bias[..hidden],
                peepholes: part(self.inputs.peepholes, direction, layer.reverse.len()),
                lengths,
                index,
                workspace: &mut *rest,
            })?;
            for ((sequence, length), h) in sequences.clone().zip(lengths).zip(h.chunks(hidden)) {
                let Some(time) = time(*length) else { continue };
                let y = block.row([sequence, time]);
                // An output that is not wanted has empty rows.
                if !y.is_empty() {
                    y.copy_from_slice(h);
                }
            }
        }
        let mut states = states.lock();
        states[first_h..][..rows * hidden].copy_from_slice(h);
        states[first_c..][..rows * hidden].copy_from_slice(c);
        Ok(())
    }

    /// Returns the row of a chunk for a time of a sequence, counted from its first time.
    fn row(&self, time: usize, sequence: usize) -> usize {
        let RecurrentSizes { steps, batch, .. } = self.sizes;
        if self.runner.layer.batch_first { sequence * steps + time } else { time * batch + sequence }
    }

    /// Loads the initial states of the directions at once, first all hidden states, then all cell
    /// states.
    fn load_states(&self, first: usize, states: &mut [T]) {
        let inputs = [self.inputs.h, self.inputs.c];
        // The standard: an initial state that is not given is 0.
        states.fill(T::ZERO);
        for ((from, place), to) in self.places(first).zip(states.chunks_mut(self.sizes.hidden)) {
            if let Some(from) = inputs[from].get(place..).and_then(|rest| rest.get(..to.len())) {
                to.copy_from_slice(from);
            }
        }
    }

    /// Stores the last states, which are the last valid ones: cells keep those of ended sequences.
    fn store_states(&self, first: usize, states: &[T], outputs: &mut Outputs<'_, T>) {
        let mut outputs = [outputs.h.as_deref_mut(), outputs.c.as_deref_mut()];
        for ((to, place), from) in self.places(first).zip(states.chunks(self.sizes.hidden)) {
            if let Some(to) = &mut outputs[to] {
                to[place..][..from.len()].copy_from_slice(from);
            }
        }
    }

    /// Returns for each state of the directions at once whether it is hidden (0) or a cell's (1),
    /// and its place in the tensor of that kind.
    fn places(&self, first: usize) -> impl Iterator<Item = (usize, usize)> {
        let RecurrentSizes { batch, hidden, .. } = self.sizes;
        let directions = first..first + self.division.directions;
        (0..2).flat_map(move |kind| {
            directions.clone().flat_map(move |direction| {
                let place = move |sequence| self.runner.state_row(direction, sequence, batch) * hidden;
                (0..batch).map(move |sequence| (kind, place(sequence)))
            })
        })
    }

    fn input_weights(&self, direction: usize) -> Rhs<'a, T> {
        let RecurrentSizes { hidden, gates, inputs: size, .. } = self.sizes;
        let layer = &self.runner.layer;
        if let Some(packed) = &layer.packed {
            return Rhs::Packed(&packed[direction].input);
        }
        if let Some([input, _]) = &self.inputs.quantized {
            return Rhs::Quantized(input.at(direction));
        }
        let values = part(&self.inputs.weights, direction, layer.reverse.len());
        // ONNX stores gates as rows. The GEMM reads the transpose in place.
        Rhs::Plain(Matrix::transposed(values, size, gates * hidden))
    }

    /// Returns the recurrent weights of a direction. Those of `float` that are not constant are
    /// packed in `packed`.
    fn recurrence<'b>(
        &self,
        direction: usize,
        packed: &'b mut [T],
    ) -> Result<SmallVec<[Recurrence<'b, T>; 2]>>
    where
        'a: 'b,
    {
        let (layer, hidden) = (&self.runner.layer, self.sizes.hidden);
        let parts = layer.cell.parts().iter().map(|part| [hidden, part * hidden]);
        let skinny = |shape, values: &'b [f32]| {
            let rhs = SkinnyRhs::new(Isa::current(), shape, values);
            rhs.map(Recurrence::Skinny).ok_or_else(|| error!(Fail, "packed weights have another length"))
        };
        if let Some(constant) = &layer.packed {
            let values = constant[direction].recurrence.iter().map(PackedFloats::values);
            return parts.zip(values).map(|(shape, values)| skinny(shape, values)).collect();
        }
        if let Some([_, recurrence]) = &self.inputs.quantized {
            return Ok(smallvec::smallvec![Recurrence::Rhs(Rhs::Quantized(recurrence.at(direction)))]);
        }
        let values = part(&self.inputs.recurrence, direction, layer.reverse.len());
        let firsts = parts.clone().scan(0, |first, shape| Some(std::mem::replace(first, *first + shape[1])));
        let (mut rest, mut recurrence) = (packed, SmallVec::new());
        for (shape, first) in parts.zip(firsts) {
            let values = &values[first * hidden..][..shape[1] * hidden];
            if !self.runner.is_float() {
                recurrence.push(Recurrence::Rhs(Rhs::Plain(Matrix::transposed(values, hidden, shape[1]))));
                continue;
            }
            let to = take(&mut rest, SkinnyRhs::len(Isa::current(), hidden, shape[1]))?;
            let (Some(values), Some(to)) = (floats(values), floats_mut(to)) else {
                return Err(error!(Fail, "packed weights are of float"));
            };
            pack_skinny(values, 0, shape, to)?;
            recurrence.push(skinny(shape, to)?);
        }
        Ok(recurrence)
    }
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
}
