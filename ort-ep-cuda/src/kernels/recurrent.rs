//! `LSTM`, `GRU` and `RNN`: one GEMM for the inputs of all time steps, then one or two launches per
//! step.

use ort_core::dtype::DType;
use ort_core::ep::KernelDef;
use ort_core::{Result, ensure, error};

use super::gemm::{Product, Side};
use super::lines::{SHORT_FLOATS, suffix};
use super::resize::bits;
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

/// Returns an operator's gates, its default activations, and the launches of a time step.
fn of_op(op: &str, linear: bool) -> (usize, &'static [&'static str], &'static [Phase]) {
    match op {
        "LSTM" => (4, &["sigmoid", "tanh", "tanh"], &[("lstm", in_turn)]),
        "GRU" if linear => (3, &["sigmoid", "tanh"], &[("gru_linear", in_turn)]),
        // The gates of the plain `GRU` scale the state before the second matrix product, which
        // needs a launch of its own.
        "GRU" => (3, &["sigmoid", "tanh"], &[("gru_gates", |_| [0, 0]), ("gru_candidate", |_| [2, 0])]),
        _ => (1, &["tanh"], &[("rnn", in_turn)]),
    }
}

/// The sizes of a layer, and its part of the workspace.
struct Layer {
    steps: usize,
    batch: usize,
    hidden: usize,
    directions: usize,
    depth: usize,
    /// The input GEMM's result: one row per input row, with the gates of each direction.
    inputs: Operand,
    /// Three slots for the states of all directions and sequences.
    states: Operand,
}

fn flag(cx: &OpCx<'_>, name: &str) -> bool {
    cx.attrs.find_int(name).is_some_and(|flag| flag != 0)
}

fn linear(cx: &OpCx<'_>) -> bool {
    flag(cx, "linear_before_reset")
}

impl Layer {
    fn new(cx: &OpCx<'_>, taken: &mut usize) -> Result<Layer> {
        let (x, recurrence, gates) = (cx.input(0)?, cx.input(2)?, of_op(cx.op, linear(cx)).0);
        let (&[first, second, depth], &[directions, rows, hidden]) = (&*x.shape, &*recurrence.shape) else {
            return Err(error!(InvalidArgument, "the input or the recurrence weights do not have rank 3"));
        };
        let both = cx.attrs.string("direction")? == "bidirectional";
        let fits = directions == if both { 2 } else { 1 } && rows == gates * hidden;
        ensure!(fits, InvalidArgument, "recurrence weights of shape {:?}", recurrence.shape);
        let (steps, batch) = if flag(cx, "layout") { (second, first) } else { (first, second) };
        let inputs = cx.workspace(taken, x.dtype, &[steps, batch, directions.saturating_mul(rows)]);
        let states = [directions, batch, hidden].into_iter().fold(1, usize::saturating_mul);
        let states = cx.workspace(taken, DType::F32, &[3, states]);
        let countable = inputs.count().max(states.count()) <= i32::MAX as usize;
        ensure!(countable, NotImplemented, "{steps} steps of {batch} sequences are too many");
        Ok(Layer { steps, batch, hidden, directions, depth, inputs, states })
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
        let left = Side { sizes: vec![rows, depth], steps: vec![depth, 1] };
        let right = Side { sizes: vec![depth, columns], steps: vec![1, depth] };
        Product::new([cx.input(0)?, weights], [left, right], &self.inputs)?.launches(cx)
    }

    /// Fills the structure `Layer` of `cu/recurrent.cu`.
    fn words(&self, cx: &OpCx<'_>) -> Result<Vec<i64>> {
        let sizes = [self.steps, self.batch, self.hidden, self.directions].map(|size| size as i64);
        let forward = cx.attrs.string("direction")? != "reverse";
        let flags = [forward, flag(cx, "layout"), flag(cx, "input_forget")].map(i64::from);
        let clip = cx.attrs.find_float("clip").filter(|bound| *bound > 0.0).unwrap_or(f32::INFINITY);
        let mut words = [&sizes[..], &flags, &[bits(clip)]].concat();
        words.extend(activations(cx, self.directions)?);
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
    let (gates, _, phases) = of_op(cx.op, linear(cx));
    let units = layer.directions * layer.hidden;
    let bias = checked(cx, 3, 2 * gates * units)?;
    let peepholes = if cx.op == "LSTM" { checked(cx, 7, 3 * units)? } else { None };
    let lengths = checked(cx, 4, layer.batch)?;
    let sequences = if layer.batch == 1 { 1 } else { SEQUENCES };
    let grid = [layer.hidden.div_ceil(UNITS), layer.batch.div_ceil(sequences), layer.directions];
    let words = layer.words(cx)?;
    let of_phase = |(name, slots): &Phase| -> Result<(Launch, fn(usize) -> [usize; 2])> {
        let launch = Launch::new("recurrent", format!("recurrent_{name}_{sequences}_{suffix}")).grid(grid)?;
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

/// The functions of `cu/recurrent.cu` by number, with the defaults of the parameters they have.
const FUNCTIONS: [(&str, Option<f32>, Option<f32>); 11] = [
    ("relu", None, None),
    ("tanh", None, None),
    ("sigmoid", None, None),
    ("affine", Some(1.0), Some(0.0)),
    ("leakyrelu", Some(0.01), None),
    ("thresholdedrelu", Some(1.0), None),
    ("scaledtanh", Some(1.0), Some(1.0)),
    ("hardsigmoid", Some(0.2), Some(0.5)),
    ("elu", Some(1.0), None),
    ("softsign", None, None),
    ("softplus", None, None),
];

/// Returns the activations of two directions, three each, as function and parameters. Each takes
/// the parameters it has from the attributes' lists, in order.
fn activations(cx: &OpCx<'_>, directions: usize) -> Result<Vec<i64>> {
    let defaults = of_op(cx.op, linear(cx)).1;
    let needed = directions * defaults.len();
    let mut names: Vec<String> = cx.attrs.find_strings("activations").unwrap_or(&[]).to_vec();
    names.iter_mut().for_each(|name| name.make_ascii_lowercase());
    if names.is_empty() {
        names = defaults.repeat(directions).into_iter().map(str::to_owned).collect();
    }
    ensure!(names.len() >= needed, InvalidGraph, "{} activations, expected {needed}", names.len());
    let mut alphas = cx.attrs.find_floats("activation_alpha").unwrap_or(&[]).iter().copied();
    let mut betas = cx.attrs.find_floats("activation_beta").unwrap_or(&[]).iter().copied();
    let mut words = Vec::new();
    for (index, name) in names.iter().take(needed).enumerate() {
        let number = FUNCTIONS.iter().position(|(known, ..)| *known == name.as_str());
        let found = number.and_then(|number| Some((number, FUNCTIONS.get(number)?)));
        let Some((number, (_, alpha, beta))) = found else {
            return Err(error!(InvalidGraph, "activation '{name}' is not in the ONNX standard"));
        };
        let alpha = alpha.map_or(0.0, |default| alphas.next().unwrap_or(default));
        let beta = beta.map_or(0.0, |default| betas.next().unwrap_or(default));
        words.extend([number as i64, bits(alpha), bits(beta)]);
        if (index + 1) % defaults.len() == 0 {
            let whole = (index + 1) / defaults.len() * 9;
            words.resize(whole, 0);
        }
    }
    Ok(words)
}
