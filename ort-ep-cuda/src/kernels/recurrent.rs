//! `LSTM`, `GRU` and `RNN`: one GEMM for the inputs of all time steps, then one or two launches per
//! step.

use std::ops::Deref;

use ort_core::dtype::DType;
use ort_core::ep::KernelDef;
use ort_core::ops::nn::problem::{CellActivation, CellFunction, Recurrent, activations};
use ort_core::{Result, ensure, error};
use ort_gpu::gemm::{Gemm, MatrixLayout};
use ort_gpu::read;

use super::gemm::Product;
use super::resize::bits;
use super::rows::{SHORT_FLOATS, suffix};
use super::{CudaKernel, cuda_kernels};
use crate::launch::{Launch, OpCx, Operand};

/// The units of a block, as in `cu/recurrent.cu`.
const UNITS: usize = 4;
/// The sequences of a warp, as in `cu/recurrent.cu`.
const SEQUENCES: usize = 8;

const fn kernel(op: &'static str) -> CudaKernel {
    let def = KernelDef { op, types: &[("T", SHORT_FLOATS)], ..KernelDef::BASE };
    CudaKernel { workspace: Some(workspace), ..CudaKernel::new(def, launches) }
}

cuda_kernels![kernel("LSTM"), kernel("GRU"), kernel("RNN")];

/// One launch of a time step: its entry, and the state slots it reads and writes.
type Phase = (&'static str, fn(usize) -> [usize; 2]);

/// Double buffering: the states alternate between slots 0 and 1.
fn in_turn(step: usize) -> [usize; 2] {
    [step % 2, (step + 1) % 2]
}

/// Returns the launches of a time step.
fn phases_of(op: &str, linear_before_reset: bool) -> &'static [Phase] {
    match op {
        "LSTM" => &[("lstm", in_turn)],
        "GRU" if linear_before_reset => &[("gru_linear", in_turn)],
        // The gates of the plain `GRU` scale the state before the second matrix product, which
        // needs a launch of its own.
        "GRU" => &[("gru_gates", |_| [0, 0]), ("gru_candidate", |_| [2, 0])],
        _ => &[("rnn", in_turn)],
    }
}

/// The sizes of a layer, and its part of the workspace.
struct Layer {
    sizes: Recurrent,
    /// The input GEMM's result: one row per input row, with the gates of each direction.
    inputs: Operand,
    /// Three slots for the states of all directions and sequences.
    states: Operand,
}

impl Deref for Layer {
    type Target = Recurrent;

    fn deref(&self) -> &Recurrent {
        &self.sizes
    }
}

impl Layer {
    fn new(cx: &OpCx<'_>, taken: &mut usize) -> Result<Layer> {
        let (x, sizes) = (cx.input(0)?, read::recurrent(cx)?);
        let Recurrent { steps, batch, .. } = sizes;
        let inputs = cx.workspace(taken, x.dtype, &[steps, batch, sizes.columns()]);
        let states = cx.workspace(taken, DType::F32, &[3, sizes.states()]);
        let countable = inputs.count().max(states.count()) <= i32::MAX as usize;
        ensure!(countable, NotImplemented, "{steps} steps of {batch} sequences are too many");
        Ok(Layer { sizes, inputs, states })
    }

    /// Returns the elements of a state slot.
    fn slot(&self) -> usize {
        self.states.size(1)
    }

    /// Returns the GEMM of all inputs with the weights of all directions.
    fn products(&self, cx: &OpCx<'_>) -> Result<Vec<Launch>> {
        let (rows, columns, depth) = (self.steps * self.batch, self.inputs.size(2), self.depth);
        let weights = checked(cx, 1, columns.saturating_mul(depth))?;
        let weights = weights.ok_or_else(|| error!(InvalidArgument, "the weights are missing"))?;
        ensure!(depth > 0, InvalidArgument, "the inputs are of no elements");
        let lhs = MatrixLayout { sizes: vec![rows, depth], steps: vec![depth, 1] };
        // The weights are stored as rows of `depth`, so this layout transposes them.
        let rhs = MatrixLayout { sizes: vec![depth, columns], steps: vec![1, depth] };
        Product::new(Gemm::new([cx.input(0)?, weights], [lhs, rhs], &self.inputs)?).launches(cx)
    }

    /// Fills the structure `Layer` of `cu/recurrent.cu`.
    fn words(&self, cx: &OpCx<'_>) -> Result<Vec<i64>> {
        let sizes = [self.steps, self.batch, self.hidden, self.directions].map(|size| size as i64);
        let flags = [!self.reverse, self.batch_first, self.input_forget].map(i64::from);
        // A limit at infinity leaves all finite numbers unchanged.
        let clip = self.clip.unwrap_or(f32::INFINITY);
        let mut words = [&sizes[..], &flags, &[bits(clip)]].concat();
        words.extend(activation_words(cx, self.directions)?);
        Ok(words)
    }
}

fn workspace(cx: &OpCx<'_>) -> Result<usize> {
    let mut taken = 0;
    Layer::new(cx, &mut taken)?;
    Ok(taken)
}

/// Returns an optional input, after checking its element count.
fn checked<'a>(cx: &'a OpCx<'_>, index: usize, count: usize) -> Result<Option<&'a Operand>> {
    let input = cx.find_input(index);
    let fits = input.is_none_or(|input| input.count() == count);
    ensure!(fits, InvalidArgument, "input {index} does not have {count} elements");
    Ok(input)
}

fn launches(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let layer = Layer::new(cx, &mut 0)?;
    let (slot, is_lstm) = (layer.slot(), cx.op == "LSTM");
    if slot == 0 {
        return Ok(Vec::new());
    }
    let suffix = suffix(cx.input(0)?.dtype)?;
    let cells = if is_lstm { checked(cx, 6, slot)? } else { None };
    let first = Launch::new("recurrent", format!("first_states_{suffix}")).threads(slot)?;
    let first = first.find_tensor(checked(cx, 5, slot)?).find_tensor(cells).tensor(&layer.states);
    let mut launches = vec![first.uint(slot)?];
    // Slot 0 starts with the initial states, which are final if there are no steps.
    let mut shown = 0;
    if layer.steps > 0 {
        // The inputs of all steps are known, so one GEMM computes their part of the gates.
        launches.extend(layer.products(cx)?);
        shown = steps(cx, &layer, suffix, &mut launches)?;
    }
    let (h, c) = (cx.find_output(1), cx.find_output(2).filter(|_| is_lstm));
    if h.or(c).is_some() {
        let last = Launch::new("recurrent", format!("last_states_{suffix}")).threads(slot)?;
        let last = last.tensor(&layer.states).find_tensor(h).find_tensor(c);
        launches.push(last.uint(shown * slot)?.uint(slot)?);
    }
    Ok(launches)
}

/// Adds the launches of all time steps, and returns the slot that holds the final states.
fn steps(cx: &OpCx<'_>, layer: &Layer, suffix: &str, launches: &mut Vec<Launch>) -> Result<usize> {
    let (gates, phases) = (layer.gates, phases_of(cx.op, layer.linear_before_reset));
    let units = layer.directions * layer.hidden;
    let bias = checked(cx, 3, 2 * gates * units)?;
    let peepholes = if cx.op == "LSTM" { checked(cx, 7, 3 * units)? } else { None };
    let lengths = checked(cx, 4, layer.batch)?;
    // Kernels exist for one sequence and for `SEQUENCES` in a warp.
    let sequences = if layer.batch == 1 { 1 } else { SEQUENCES };
    let grid = [layer.hidden.div_ceil(UNITS), layer.batch.div_ceil(sequences), layer.directions];
    let words = layer.words(cx)?;
    let of_phase = |(name, slots): &Phase| -> Result<(Launch, fn(usize) -> [usize; 2])> {
        let launch = Launch::new("recurrent", format!("recurrent_{name}_{sequences}_{suffix}")).grid(grid)?;
        // Each warp computes one unit.
        let launch = launch.block([32 * UNITS as u32, 1, 1]).tensor(&layer.inputs).tensor(cx.input(2)?);
        let launch = launch.find_tensor(bias).find_tensor(peepholes).find_tensor(lengths);
        let launch = launch.tensor(&layer.states).find_tensor(cx.find_output(0));
        Ok((launch.ints::<26>(&words)?, *slots))
    };
    let phases = phases.iter().map(of_phase).collect::<Result<Vec<_>>>()?;
    let (size, mut shown) = (layer.slot(), 0);
    for step in 0..layer.steps {
        for (launch, slots) in &phases {
            let [from, to] = slots(step);
            launches.push(launch.clone().uints::<4>(&[step, from * size, to * size, size])?);
            shown = to;
        }
    }
    Ok(shown)
}

/// Returns a function's number in `cu/recurrent.cu`.
fn number_of(function: CellFunction) -> i64 {
    match function {
        CellFunction::Relu => 0,
        CellFunction::Tanh => 1,
        CellFunction::Sigmoid => 2,
        CellFunction::Affine => 3,
        CellFunction::LeakyRelu => 4,
        CellFunction::ThresholdedRelu => 5,
        CellFunction::ScaledTanh => 6,
        CellFunction::HardSigmoid => 7,
        CellFunction::Elu => 8,
        CellFunction::Softsign => 9,
        CellFunction::Softplus => 10,
    }
}

/// Returns the activations of the directions, three each, as function and parameters.
fn activation_words(cx: &OpCx<'_>, directions: usize) -> Result<Vec<i64>> {
    let mut words = Vec::new();
    for (direction, cell) in activations(cx.op, cx.attrs, directions)?.iter().enumerate() {
        for CellActivation { function, alpha, beta } in cell {
            words.extend([number_of(*function), bits(*alpha), bits(*beta)]);
        }
        // Cells with fewer functions leave the rest of their nine words 0.
        words.resize((direction + 1) * 9, 0);
    }
    Ok(words)
}
