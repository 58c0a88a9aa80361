//! `LSTM`, `GRU` and `RNN`: one GEMM for the inputs of all steps, then one or two dispatches per
//! step.

use std::fmt::Write as _;
use std::ops::Deref;

use ort_core::dtype::DType;
use ort_core::ep::KernelDef;
use ort_core::ops::nn::problem::Recurrent;
use ort_core::ops::tensor::geometry::product;
use ort_core::{Result, ensure, error};
use ort_gpu::read;

use super::elementwise::FLOATS;
use super::recurrent_cells::{Phase, functions, phases};
use super::{WgpuKernel, tiles, wgpu_kernels};
use crate::launch::{Dispatch, OpCx, Operand};
use crate::shader::Shader;

/// The invocations of a workgroup of a step.
const LANES: usize = 64;
/// The invocations that share a hidden unit.
const PARTS: usize = 16;
/// The most sequences of a workgroup.
const SEQUENCES: usize = 4;

const fn kernel(op: &'static str) -> WgpuKernel {
    let def = KernelDef { op, types: &[("T", FLOATS)], ..KernelDef::BASE };
    WgpuKernel { workspace: Some(workspace), ..WgpuKernel::new(def, dispatches) }
}

wgpu_kernels![kernel("LSTM"), kernel("GRU"), kernel("RNN")];

/// The sizes of a layer, and its workspace.
struct Layer {
    sizes: Recurrent,
    /// The input GEMM's result for all steps, with biases. Each row of the input has its
    /// directions, and each direction its gates.
    inputs: Operand,
    /// Three slots of states for all directions and sequences.
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
        let sizes = read::recurrent(cx)?;
        let (shape, states) = ([sizes.steps, sizes.batch, sizes.columns()], sizes.states());
        // Bytes of both parts must be countable.
        let fits = product(&shape).checked_mul(4).is_some() && states < 1 << 30;
        let [steps, batch, _] = shape;
        ensure!(fits, NotImplemented, "{steps} steps of {batch} sequences are too many");
        let inputs = cx.workspace(taken, DType::F32, &shape);
        let states = cx.workspace(taken, DType::F32, &[3, states]);
        Ok(Layer { sizes, inputs, states })
    }

    /// Returns the elements of a slot.
    fn slot(&self) -> usize {
        self.states.size(1)
    }

    /// Returns the number of gates whose recurrent bias is added to the input's. If the GRU's reset
    /// gate applies after the linear transform, it also applies to the candidate's recurrent bias.
    fn joined_biases(&self) -> usize {
        if self.gates == 3 && self.linear_before_reset { 2 } else { self.gates }
    }
}

fn workspace(cx: &OpCx<'_>) -> Result<usize> {
    let mut taken = 0;
    Layer::new(cx, &mut taken)?;
    Ok(taken)
}

fn dispatches(cx: &OpCx<'_>) -> Result<Vec<Dispatch>> {
    let layer = Layer::new(cx, &mut 0)?;
    if layer.slot() == 0 {
        return Ok(Vec::new());
    }
    let mut all = vec![first_states(cx, &layer)?];
    let mut shown = 0;
    if layer.steps > 0 {
        all.push(input_product(cx, &layer)?);
        // Steps differ only in three uniforms, so each phase is generated once.
        let mut templates = Vec::new();
        for phase in phases(cx.op, layer.linear_before_reset) {
            templates.push((phase, phase_of_step(cx, &layer, phase)?));
        }
        for step in 0..layer.steps {
            for (phase, template) in &templates {
                let (from, to) = (phase.slots)(step);
                all.push(at_step(template, [step, from * layer.slot(), to * layer.slot()])?);
                shown = to;
            }
        }
    }
    all.extend(last_states(cx, &layer, shown)?);
    Ok(all)
}

/// Returns an optional input, after checking its number of elements.
fn checked<'a>(cx: &'a OpCx<'_>, index: usize, count: usize) -> Result<Option<&'a Operand>> {
    let input = cx.find_input(index);
    if let Some(input) = input {
        ensure!(input.count() == count, InvalidArgument, "input {index} has shape {:?}", input.shape);
    }
    Ok(input)
}

/// Initializes the states before the first step.
fn first_states(cx: &OpCx<'_>, layer: &Layer) -> Result<Dispatch> {
    let mut shader = Shader::new(cx).write("state", &layer.states).number("size", layer.slot());
    let mut code = String::from("fn element(i: u32) {\n");
    // Slot 0 has the hidden states. Slot 2 has the cell states of an LSTM.
    for (index, name, slot) in [(5, "h", 0), (6, "c", 2)] {
        let given = if index == 6 && cx.op != "LSTM" { None } else { checked(cx, index, layer.slot())? };
        let value = match given {
            Some(given) => {
                shader = shader.read(name, given);
                format!("{name}(i)")
            }
            None => "0.0".to_owned(),
        };
        // Writing to a string does not fail.
        let _ = writeln!(code, "set_state({slot}u * p.size + i, {value});");
    }
    code.push_str("}\n");
    shader.each(layer.slot(), &code)
}

/// Copies the states after the last step to the outputs that have readers.
fn last_states(cx: &OpCx<'_>, layer: &Layer, slot: usize) -> Result<Option<Dispatch>> {
    let mut shader = Shader::new(cx).read("state", &layer.states).number("size", layer.slot());
    let mut code = String::from("fn element(i: u32) {\n");
    let mut any = false;
    for (index, name, slot) in [(1, "h", slot), (2, "c", 2)] {
        let Some(output) = cx.find_output(index) else { continue };
        ensure!(output.count() == layer.slot(), Fail, "output {index} has shape {:?}", output.shape);
        shader = shader.write(name, output);
        // Writing to a string does not fail.
        let _ = writeln!(code, "set_{name}(i, state({slot}u * p.size + i));");
        any = true;
    }
    code.push_str("}\n");
    if any { shader.each(layer.slot(), &code).map(Some) } else { Ok(None) }
}

/// The GEMM of all inputs with the weights of all directions, plus the biases.
fn input_product(cx: &OpCx<'_>, layer: &Layer) -> Result<Dispatch> {
    let columns = layer.columns();
    let weights = checked(cx, 1, columns.saturating_mul(layer.depth))?;
    let weights = weights.ok_or_else(|| error!(InvalidArgument, "the weights are missing"))?;
    let mut shader = Shader::new(cx).read("x", cx.input(0)?).read("w", weights);
    let mut bias = "";
    // Each direction has input biases, then recurrent ones (ONNX, `LSTM`).
    if let Some(given) = checked(cx, 3, 2 * columns)? {
        let joined = layer.joined_biases() * layer.hidden;
        shader = shader.read("b", given).number("width", layer.rows()).number("joined", joined);
        bias = "let at = column / p.width * p.width * 2u + column % p.width;
            sum += b(at);
            if (column % p.width < p.joined) { sum += b(at + p.width); }";
    }
    let code = format!(
        "{}{}
        fn result(row: u32, column: u32, value: f32) {{
            var sum = value;
            {bias}
            set_inputs(row * p.n + column, sum);
        }}\n",
        tiles::row_of_four("lhs", "x"),
        tiles::row_of_four("rhs", "w"),
    );
    let sizes = [layer.steps * layer.batch, columns, layer.depth];
    tiles::product(shader.write("inputs", &layer.inputs), sizes, &code)
}

/// Generates the recurrent sums of a phase, for one gate or for several at once.
fn sums(gates: usize, sequences: usize) -> String {
    let (sums, weights) = match gates {
        1 => ("f32".to_owned(), "recurrence(at)".to_owned()),
        _ => {
            let weights: Vec<String> =
                (0..gates).map(|gate| format!("recurrence(at + {gate}u * p.hidden * p.hidden)")).collect();
            (format!("vec{gates}<f32>"), format!("vec{gates}<f32>({})", weights.join(", ")))
        }
    };
    let (mut start, mut step, mut end) = (String::new(), String::new(), String::new());
    // Writing to a string does not fail.
    for i in 0..sequences {
        let _ = writeln!(
            start,
            "let row{i} = p.multiplied + state_row(direction, min(first + {i}u, p.batch - 1u)) * p.hidden;\n\
             var sums{i} = sums_t();"
        );
        let _ = writeln!(step, "sums{i} += weights * state(row{i} + k);");
        let _ = writeln!(end, "partial[{i}u * LANES + lane] = sums{i};");
    }
    format!(
        "alias sums_t = {sums};
        fn sum_parts(direction: u32, first: u32, row: u32, lane: u32) {{
            {start}
            for (var k = lane % PARTS; k < p.hidden; k += PARTS) {{
                let at = row + k;
                let weights = {weights};
                {step}
            }}
            {end}
        }}\n"
    )
}

/// Generates the dispatch of a phase for any step: [`at_step`] sets its first uniforms.
fn phase_of_step(cx: &OpCx<'_>, layer: &Layer, phase: &Phase) -> Result<Dispatch> {
    let Recurrent { steps, batch, hidden, directions, gates, .. } = layer.sizes;
    let (first_gate, count) = phase.gates;
    let sequences = batch.min(SEQUENCES);
    // The first direction that runs backwards.
    let reverse = usize::from(!layer.reverse);
    // These three come first, where `at_step` finds them: lists would precede them, but there are
    // none.
    let mut shader = Shader::new(cx).number("step", 0).number("multiplied", 0).number("results", 0);
    shader = shader.number("size", layer.slot()).number("steps", steps).number("batch", batch);
    shader = shader.number("hidden", hidden).number("directions", directions).number("reverse", reverse);
    shader = shader.constant("GATES", gates).constant("FIRST_GATE", first_gate).constant("PARTS", PARTS);
    shader = shader.constant("SEQUENCES", sequences).constant("BATCH_FIRST", usize::from(layer.batch_first));
    shader = shader.constant("INPUT_FORGET", usize::from(layer.input_forget));
    shader = shader.read("inputs", &layer.inputs).read("recurrence", cx.input(2)?);
    shader = shader.write("state", &layer.states);
    let mut code = format!("{}{}", sums(count, sequences), include_str!("recurrent.wgsl"));
    let mut optional = |given: Option<&Operand>, name: &'static str, head: &str, value: &str, other: &str| {
        let value = if given.is_some() { value } else { other };
        // Writing to a string does not fail.
        let _ = writeln!(code, "fn {head} {{ return {value}; }}");
        if let Some(given) = given {
            let earlier = std::mem::replace(&mut shader, Shader::new(cx));
            shader = earlier.read(name, given);
        }
    };
    let lengths = checked(cx, 4, batch)?;
    optional(lengths, "lengths", "length(sequence: u32) -> i32", "lengths(sequence)", "i32(p.steps)");
    if cx.op == "LSTM" {
        // Peepholes of the input, output and forget gates.
        let peepholes = checked(cx, 7, directions * 3 * hidden)?;
        let value = "peepholes((place.direction * 3u + gate) * p.hidden + place.unit)";
        optional(peepholes, "peepholes", "peephole(place: Place, gate: u32) -> f32", value, "0.0");
    }
    if layer.joined_biases() < gates {
        let bias = cx.find_input(3);
        let value = "bias((place.direction * 2u * GATES + 2u * GATES - 1u) * p.hidden + place.unit)";
        optional(bias, "bias", "last_bias(place: Place) -> f32", value, "0.0");
    }
    code.push_str("fn finish(place: Place, h: f32, shown: f32) {\nset_state(p.results + place.state, h);\n");
    if let Some(y) = cx.find_output(0).filter(|_| phase.ends) {
        shader = shader.write("y", y);
        code.push_str("set_y(y_place(place), shown);\n");
    }
    code.push_str("}\n");
    code.push_str(&functions(cx.op, cx.attrs, &layer.sizes)?);
    code.push_str(phase.code);
    let tiles = hidden.div_ceil(LANES / PARTS).saturating_mul(batch.div_ceil(sequences));
    shader.groups(tiles.saturating_mul(directions), LANES, &code)
}

/// Returns a copy of a [`phase_of_step`] dispatch for a step, with the offsets of the slots that it
/// multiplies and writes.
fn at_step(template: &Dispatch, numbers: [usize; 3]) -> Result<Dispatch> {
    let mut dispatch = template.clone();
    for (place, number) in dispatch.numbers.iter_mut().zip(numbers) {
        *place = u32::try_from(number).map_err(|_| error!(NotImplemented, "{number} is beyond 32 bits"))?;
    }
    Ok(dispatch)
}
