//! A recurrent layer: its packed weights, and the inputs and outputs of a run.

use std::borrow::Cow;

use ort_core::ep::{CompileCx, RunCx};
use ort_core::tensor::TensorView;
use ort_core::{Result, ensure, error};

use ort_cpu_gemm::Weight;
use ort_cpu_kernel::packed::PackedFloats;
use ort_cpu_kernel::with_weight;
use ort_cpu_matmul::packed_weight::PackedWeight;
use ort_cpu_matmul::quantized_gemm::{PackedQuantized, QuantizedWeights};
use ort_cpu_matmul::real::Real;
use ort_cpu_vector::simd::Isa;
use ort_cpu_vector::simd::skinny_gemm::SkinnyRhs;

use super::recurrent_step::Cell;

/// The packed weights of one direction.
pub(super) struct Packed {
    pub(super) input: PackedWeight,
    pub(super) recurrence: Vec<PackedFloats>,
}

/// A recurrent layer.
pub(super) struct Layer<C> {
    pub(super) cell: C,
    pub(super) reverse: Vec<bool>,
    pub(super) batch_first: bool,
    /// Whether the weights are quantized. They are then transposed, with scales and zero points
    /// after the other inputs.
    pub(super) is_quantized: bool,
    pub(super) packed: Option<Vec<Packed>>,
    /// The packed quantized weights of inputs and states, by direction.
    pub(super) packed_quantized: Option<[Vec<PackedQuantized>; 2]>,
    pub(super) hidden: usize,
    /// Whether sequences may have lengths of their own.
    pub(super) has_lengths: bool,
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

impl<C> Layer<C> {
    pub(super) fn pack<T: Real>(
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
        let (parts, size) = (self.cell.parts(), recurrence.dtype().byte_size().unwrap_or(1));
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
                let shape = [hidden, part * hidden];
                let (len, count) = (SkinnyRhs::len(Isa::current(), shape[0], shape[1]), shape[0] * shape[1]);
                let release = cx.release();
                parts_packed.push(PackedFloats::new(cx, len, |packed| {
                    with_weight!(recurrence, weights => pack_skinny(weights, first, shape, packed))?;
                    let read = recurrence.bytes()?.get(first * size..(first + count) * size);
                    read.into_iter().for_each(release);
                    Ok(())
                })?);
                first += count;
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
    pub(super) fn pack_quantized(
        &mut self,
        cx: &mut CompileCx<'_>,
        weights: [TensorView<'_>; 2],
    ) -> Result<()> {
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

/// Packs the transpose of `shape` (k, columns) of rows of a weight, from element `first` on.
pub(super) fn pack_skinny<W: Weight>(
    weights: &[W],
    first: usize,
    [k, columns]: [usize; 2],
    packed: &mut [f32],
) -> Result<()> {
    let weights = weights.get(first..).and_then(|rest| rest.get(..k * columns));
    let weights = weights.ok_or_else(|| error!(InvalidGraph, "a weight is shorter than its shape"))?;
    SkinnyRhs::pack(Isa::current(), [k, columns], |row, column| weights[column * k + row].widen(), packed);
    Ok(())
}

/// The sizes of a run.
#[derive(Clone, Copy)]
pub(super) struct RecurrentSizes {
    pub(super) steps: usize,
    pub(super) batch: usize,
    pub(super) inputs: usize,
    pub(super) hidden: usize,
    pub(super) gates: usize,
}

/// The inputs as slices; a missing input is empty.
pub(super) struct Inputs<'a, T: Clone> {
    pub(super) x: &'a [T],
    /// Empty if they are packed. Constants may be unaligned, hence the `Cow`.
    pub(super) weights: Cow<'a, [T]>,
    pub(super) recurrence: Cow<'a, [T]>,
    pub(super) bias: &'a [T],
    pub(super) h: &'a [T],
    pub(super) c: &'a [T],
    pub(super) peepholes: &'a [T],
    /// The weights of inputs and states if they are quantized; the two above are then empty.
    pub(super) quantized: Option<[QuantizedWeights<'a>; 2]>,
    /// The length of each sequence.
    pub(super) lengths: Vec<usize>,
}

impl<'a, T: Real> Inputs<'a, T> {
    pub(super) fn new<'b: 'a, C>(
        cx: &RunCx<'b>,
        sizes: RecurrentSizes,
        layer: &'a Layer<C>,
    ) -> Result<Inputs<'a, T>> {
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
pub(super) struct Outputs<'a, T> {
    pub(super) y: Option<&'a mut [T]>,
    pub(super) h: Option<&'a mut [T]>,
    pub(super) c: Option<&'a mut [T]>,
}

impl<'a, T: Real> Outputs<'a, T> {
    pub(super) fn new(cx: &mut RunCx<'a>) -> Result<Outputs<'a, T>> {
        let mut slice =
            |index| if cx.wants(index) { cx.output(index)?.as_mut_slice().map(Some) } else { Ok(None) };
        Ok(Outputs { y: slice(0)?, h: slice(1)?, c: slice(2)? })
    }
}

/// Returns the part of a slice that belongs to one direction; empty if the slice is.
pub(super) fn part<T>(values: &[T], direction: usize, directions: usize) -> &[T] {
    let len = values.len() / directions;
    &values[direction * len..(direction + 1) * len]
}
