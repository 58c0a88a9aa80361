//! `LSTM`, `GRU` and `RNN`: one GEMM for the inputs of all steps, then one or two dispatches per
//! step.

use std::fmt::Write as _;

use ort_core::dtype::DType;
use ort_core::ep::KernelDef;
use ort_core::{Result, ensure, error};

use super::elementwise::FLOATS;
use super::recurrent_cells::{Phase, activations, gates, phases};
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
    steps: usize,
    batch: usize,
    hidden: usize,
    directions: usize,
    gates: usize,
    depth: usize,
    batch_first: bool,
    linear_before_reset: bool,
    /// The input GEMM's result for all steps, with biases. Each row of the input has its
    /// directions, and each direction its gates.
    inputs: Operand,
    /// Three slots of states for all directions and sequences.
    states: Operand,
}

impl Layer {
    fn new(cx: &OpCx<'_>, taken: &mut usize) -> Result<Layer> {
        let (x, recurrence, gates) = (cx.input(0)?, cx.input(2)?, gates(cx.op));
        let (&[first, second, depth], &[directions, rows, hidden]) = (&*x.shape, &*recurrence.shape) else {
            return Err(error!(InvalidArgument, "the input or the recurrence weights do not have rank 3"));
        };
        let two = cx.attrs.string("direction")? == "bidirectional";
        let fits = directions == if two { 2 } else { 1 } && rows == gates * hidden;
        ensure!(fits, InvalidArgument, "recurrence weights of shape {:?}", recurrence.shape);
        let batch_first = cx.attrs.find_int("layout").is_some_and(|layout| layout != 0);
        let (steps, batch) = if batch_first { (second, first) } else { (first, second) };
        let too_many = || error!(NotImplemented, "{steps} steps of {batch} sequences are too many");
        let all = steps.checked_mul(batch).and_then(|all| all.checked_mul(directions * rows * 4));
        all.ok_or_else(too_many)?;
        let inputs = cx.workspace(taken, DType::F32, &[steps, batch, directions * rows]);
        let states = directions.checked_mul(batch).and_then(|all| all.checked_mul(hidden));
        let states = states.filter(|all| *all < 1 << 30).ok_or_else(too_many)?;
        let states = cx.workspace(taken, DType::F32, &[3, states]);
        let linear_before_reset = cx.attrs.find_int("linear_before_reset").is_some_and(|flag| flag != 0);
        Ok(Layer {
            steps,
            batch,
            hidden,
            directions,
            gates,
            depth,
            batch_first,
            linear_before_reset,
            inputs,
            states,
        })
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
    let columns = layer.directions * layer.gates * layer.hidden;
    let weights = checked(cx, 1, columns.saturating_mul(layer.depth))?;
    let weights = weights.ok_or_else(|| error!(InvalidArgument, "the weights are missing"))?;
    let mut shader = Shader::new(cx).read("x", cx.input(0)?).read("w", weights);
    let mut bias = "";
    if let Some(given) = checked(cx, 3, 2 * columns)? {
        let joined = layer.joined_biases() * layer.hidden;
        shader = shader.read("b", given).number("width", layer.gates * layer.hidden).number("joined", joined);
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
        tiles::row_of_four("left", "x"),
        tiles::row_of_four("right", "w"),
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
    let Layer { steps, batch, hidden, directions, gates, .. } = *layer;
    let (first_gate, count) = phase.gates;
    let sequences = batch.min(SEQUENCES);
    let reverse = match cx.attrs.string("direction")? {
        "reverse" => 0,
        _ => 1,
    };
    let input_forget = cx.attrs.find_int("input_forget").is_some_and(|flag| flag != 0);
    // These three come first, where `at_step` finds them: lists would precede them, but there are
    // none.
    let mut shader = Shader::new(cx).number("step", 0).number("multiplied", 0).number("results", 0);
    shader = shader.number("size", layer.slot()).number("steps", steps).number("batch", batch);
    shader = shader.number("hidden", hidden).number("directions", directions).number("reverse", reverse);
    shader = shader.constant("GATES", gates).constant("FIRST_GATE", first_gate).constant("PARTS", PARTS);
    shader = shader.constant("SEQUENCES", sequences).constant("BATCH_FIRST", usize::from(layer.batch_first));
    shader = shader.constant("INPUT_FORGET", usize::from(input_forget));
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
    code.push_str(&activations(cx.op, cx.attrs, directions)?);
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
