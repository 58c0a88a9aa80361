//! Control flow whose bodies a device claims: placement must put the node on the device, and
//! results must equal those of the CPU alone.

use std::sync::Arc;

use ort_core::dtype::DType;
use ort_core::ep::Device;
use ort_core::ir::{Attribute, Capture, Graph, GraphBuilder, Subgraph, ValueId, ValueType};
use ort_core::rewrite::Level;
use ort_core::session::{Model, Session};
use ort_core::tensor::{Tensor, Value};
use ort_core::{ErrorKind, Result, Within, ensure};

use super::{assert_close, cpu, numbers};

/// The columns of the loop-carried values, and the size of their square weights.
const WIDE: usize = 8;

/// A model, the inputs of a run, and the control flow operator that must be placed on the device.
pub struct ControlCase {
    /// Its name in messages.
    pub name: &'static str,
    graph: Graph,
    inputs: Vec<(&'static str, Value)>,
    op: &'static str,
}

/// A subgraph under construction.
pub(super) struct Body {
    pub(super) builder: GraphBuilder,
    captures: Vec<Capture>,
}

impl Body {
    pub(super) fn new() -> Body {
        Body { builder: GraphBuilder::new("body"), captures: Vec::new() }
    }

    pub(super) fn input(&mut self, name: &str) -> ValueId {
        // ONNX lets the inputs of a body leave out their types, which follow from the node's
        // inputs.
        self.builder.typed_input(name, ValueType::Unknown)
    }

    fn capture(&mut self, outer: ValueId) -> ValueId {
        let name = format!("captured_{}", self.captures.len());
        // A captured value is no input: the graph outside supplies it under this value.
        let inner = self.builder.graph_mut().add_value(name, ValueType::Unknown);
        self.captures.push(Capture { outer, inner });
        inner
    }

    pub(super) fn finish(self, attr: &'static str, outputs: &[ValueId]) -> Subgraph {
        Subgraph { attr, graph: self.builder.finish_subgraph(outputs), captures: self.captures }
    }
}

/// A square matrix of small pseudo-random numbers.
fn weight(builder: &mut GraphBuilder, seed: usize) -> Result<ValueId> {
    // Halved, so that the products of many iterations stay small.
    let elements: Vec<f32> = numbers(WIDE * WIDE, seed).iter().map(|number| number / 2.0).collect();
    Ok(builder.constant(Tensor::from_slice(&[WIDE, WIDE], &elements)?))
}

fn product(builder: &mut GraphBuilder, x: ValueId, seed: usize) -> Result<ValueId> {
    let weight = weight(builder, seed)?;
    builder.node("MatMul", &[x, weight], &[])
}

fn rows(count: usize, seed: usize) -> Result<Value> {
    Ok(Tensor::from_slice(&[count, WIDE], &numbers(count * WIDE, seed))?.into())
}

/// One iteration: `relu(state * weight + captured)`.
fn iterated(builder: &mut GraphBuilder, state: ValueId, captured: ValueId) -> Result<ValueId> {
    let next = product(builder, state, 3)?;
    let next = builder.node("Add", &[next, captured], &[])?;
    builder.node("Relu", &[next], &[])
}

/// A loop with a trip count, a loop-carried state, and a scan output.
fn counted(trips: i64) -> Result<ControlCase> {
    let mut main = GraphBuilder::new("counted");
    let count = main.input("trips", DType::I64, &[]);
    let x = main.input("x", DType::F32, &["n", "8"]);
    let outer = product(&mut main, x, 1)?;
    let mut body = Body::new();
    // The body of a `Loop` takes the number of the iteration, the condition, and the loop-carried
    // values.
    let (_, holds, state) = (body.input("number"), body.input("holds"), body.input("state"));
    let captured = body.capture(outer);
    let next = iterated(&mut body.builder, state, captured)?;
    let given = body.builder.node("Neg", &[next], &[])?;
    // It returns the condition, the loop-carried values, and the elements of the scan outputs.
    let body = body.finish("body", &[holds, next, given]);
    // No condition, so only the trip count ends the loop.
    let outputs = main.add(("", "Loop"), &[Some(count), None, Some(x)], &[], 2, vec![body])?;
    let last = product(&mut main, outputs[0], 2)?;
    let graph = main.finish(&[last, outputs[1], outer])?;
    let inputs = vec![("trips", Tensor::scalar(trips)?.into()), ("x", rows(3, 5)?)];
    Ok(ControlCase { name: "a counted loop", graph, inputs, op: "Loop" })
}

/// The same iterations unrolled.
fn unrolled(trips: i64) -> Result<Graph> {
    let mut main = GraphBuilder::new("unrolled");
    // Unused, so that both graphs take the same inputs.
    main.input("trips", DType::I64, &[]);
    let x = main.input("x", DType::F32, &["n", "8"]);
    let outer = product(&mut main, x, 1)?;
    let mut state = x;
    for _ in 0..trips {
        state = iterated(&mut main, state, outer)?;
    }
    let last = product(&mut main, state, 2)?;
    main.finish(&[last])
}

/// A loop that ends on a condition on the sum of its state.
fn until_a_condition() -> Result<ControlCase> {
    let mut main = GraphBuilder::new("until");
    let x = main.input("x", DType::F32, &["n", "8"]);
    let mut body = Body::new();
    let (_, _, state) = (body.input("number"), body.input("holds"), body.input("state"));
    let builder = &mut body.builder;
    let next = product(builder, state, 4)?;
    let moved = builder.constant(Tensor::scalar(0.5f32)?);
    let next = builder.node("Add", &[next, moved], &[])?;
    let next = builder.node("Relu", &[next], &[])?;
    let next = builder.node("Add", &[next, state], &[])?;
    let sum = builder.node("ReduceSum", &[next], &[("keepdims", Attribute::Int(0))])?;
    let most = builder.constant(Tensor::scalar(60.0f32)?);
    let holds = builder.node("Less", &[sum, most], &[])?;
    let body = body.finish("body", &[holds, next, next]);
    let trips = main.constant(Tensor::scalar(1000i64)?);
    let outputs = main.add(("", "Loop"), &[Some(trips), None, Some(x)], &[], 2, vec![body])?;
    let graph = main.finish(&outputs)?;
    Ok(ControlCase { name: "a loop with an early end", graph, inputs: vec![("x", rows(2, 7)?)], op: "Loop" })
}

/// A loop whose body selects one of two branches by the iteration number.
fn branches_in_a_loop() -> Result<ControlCase> {
    let mut main = GraphBuilder::new("nested");
    let trips = main.input("trips", DType::I64, &[]);
    let x = main.input("x", DType::F32, &["n", "8"]);
    let outer = product(&mut main, x, 1)?;
    let mut body = Body::new();
    let (number, holds, state) = (body.input("number"), body.input("holds"), body.input("state"));
    let captured = body.capture(outer);
    let branch = |attr, is_first: bool| -> Result<Subgraph> {
        let mut branch = Body::new();
        let (state, captured) = (branch.capture(state), branch.capture(captured));
        let result = product(&mut branch.builder, if is_first { state } else { captured }, 8)?;
        Ok(branch.finish(attr, &[result]))
    };
    let branches = vec![branch("then_branch", true)?, branch("else_branch", false)?];
    let builder = &mut body.builder;
    let two = builder.constant(Tensor::scalar(2i64)?);
    let rest = builder.node("Mod", &[number, two], &[])?;
    let zero = builder.constant(Tensor::scalar(0i64)?);
    let is_even = builder.node("Equal", &[rest, zero], &[])?;
    let chosen = builder.add(("", "If"), &[Some(is_even)], &[], 1, branches)?;
    let next = builder.node("Add", &[chosen[0], state], &[])?;
    let body = body.finish("body", &[holds, next]);
    let outputs = main.add(("", "Loop"), &[Some(trips), None, Some(x)], &[], 1, vec![body])?;
    let graph = main.finish(&outputs)?;
    let inputs = vec![("trips", Tensor::scalar(5i64)?.into()), ("x", rows(3, 9)?)];
    Ok(ControlCase { name: "branches in a loop", graph, inputs, op: "Loop" })
}

/// A loop over two states, one of which it passes through unchanged, with a scan output whose size
/// only the run determines.
fn sizes_of_the_run() -> Result<ControlCase> {
    let mut main = GraphBuilder::new("sizes");
    let trips = main.input("trips", DType::I64, &[]);
    let until = main.input("until", DType::I64, &["1"]);
    let x = main.input("x", DType::F32, &["n", "8"]);
    let zero = main.constant(Tensor::from_slice(&[1], &[0i64])?);
    // An input sets the end of the slice, so only the run knows the rows.
    let some = main.node("Slice", &[x, zero, until], &[])?;
    let outer = product(&mut main, some, 1)?;
    let mut body = Body::new();
    let (_, holds) = (body.input("number"), body.input("holds"));
    let (state, same) = (body.input("state"), body.input("same"));
    let captured = body.capture(outer);
    let next = product(&mut body.builder, state, 6)?;
    let part = body.builder.node("Add", &[captured, same], &[])?;
    let given = product(&mut body.builder, part, 2)?;
    let body = body.finish("body", &[holds, next, same, given]);
    let first = main.constant(Tensor::from_slice(&[1, WIDE], &numbers(WIDE, 12))?);
    let inputs = [Some(trips), None, Some(x), Some(first)];
    let outputs = main.add(("", "Loop"), &inputs, &[], 3, vec![body])?;
    let graph = main.finish(&outputs)?;
    let until = Tensor::from_slice(&[1], &[2i64])?.into();
    let inputs = vec![("trips", Tensor::scalar(7i64)?.into()), ("until", until), ("x", rows(4, 10)?)];
    Ok(ControlCase { name: "sizes that the run tells", graph, inputs, op: "Loop" })
}

/// The token at which a decoding loop ends. The fourth iteration is the first to choose it.
const END: i64 = 5;

/// A greedy decoding loop: it appends the argmax of its state to a token list, up to a token from
/// `end` on, or a maximum length.
fn decoding(end: i64) -> Result<ControlCase> {
    let mut main = GraphBuilder::new("decoding");
    let x = main.input("x", DType::F32, &["1", "8"]);
    let first = main.input("first", DType::I64, &["1", "t"]);
    let outer = product(&mut main, x, 1)?;
    let mut body = Body::new();
    let (number, _) = (body.input("number"), body.input("holds"));
    let (state, list) = (body.input("state"), body.input("list"));
    let captured = body.capture(outer);
    let next = iterated(&mut body.builder, state, captured)?;
    let builder = &mut body.builder;
    let best = builder.node("ArgMax", &[next], &[("axis", Attribute::Int(1))])?;
    let longer = builder.node("Concat", &[list, best], &[("axis", Attribute::Int(1))])?;
    let most = builder.constant(Tensor::scalar(6i64)?);
    let is_early = builder.node("Less", &[number, most], &[])?;
    let last = builder.constant(Tensor::from_slice(&[1], &[end])?);
    let is_other = builder.node("Less", &[best, last], &[])?;
    // The condition must be a scalar, but `best` is [1, 1].
    let shape = builder.constant(Tensor::from_slice(&[0], &[0i64; 0])?);
    let is_other = builder.node("Reshape", &[is_other, shape], &[])?;
    let holds = builder.node("And", &[is_early, is_other], &[])?;
    let body = body.finish("body", &[holds, next, longer]);
    let outputs = main.add(("", "Loop"), &[None, None, Some(x), Some(first)], &[], 2, vec![body])?;
    let list = main.node("Cast", &[outputs[1]], &[("to", Attribute::Int(1))])?;
    let graph = main.finish(&[outputs[0], list])?;
    let first = Tensor::from_slice(&[1, 2], &[3i64, 5])?;
    let inputs = vec![("x", rows(1, 18)?), ("first", first.into())];
    Ok(ControlCase { name: "a decoding loop", graph, inputs, op: "Loop" })
}

/// A conditional between a product and the captured value itself.
fn choice(condition: bool) -> Result<ControlCase> {
    let mut main = GraphBuilder::new("choice");
    let chosen = main.input("c", DType::Bool, &[]);
    let x = main.input("x", DType::F32, &["n", "8"]);
    let outer = product(&mut main, x, 1)?;
    let mut then = Body::new();
    let captured = then.capture(outer);
    let first = product(&mut then.builder, captured, 2)?;
    let second = product(&mut then.builder, first, 3)?;
    let then = then.finish("then_branch", &[second, first]);
    let mut otherwise = Body::new();
    let captured = otherwise.capture(outer);
    let fixed = otherwise.builder.constant(Tensor::from_slice(&[1, WIDE], &numbers(WIDE, 13))?);
    let otherwise = otherwise.finish("else_branch", &[captured, fixed]);
    let outputs = main.add(("", "If"), &[Some(chosen)], &[], 2, vec![then, otherwise])?;
    let last = product(&mut main, outputs[0], 4)?;
    let graph = main.finish(&[last, outputs[1]])?;
    let inputs = vec![("c", Tensor::from_bools(&[], &[condition])?.into()), ("x", rows(3, 11)?)];
    Ok(ControlCase { name: "a choice", graph, inputs, op: "If" })
}

/// A scan over slices of one input, in both directions, along these axes.
fn scan(reversed: bool, axes: [i64; 2], length: usize) -> Result<ControlCase> {
    let mut main = GraphBuilder::new("scan");
    let start = main.input("start", DType::F32, &["2", "8"]);
    let shape: &[&str] = if axes[0] == 0 { &["n", "2", "8"] } else { &["2", "n", "8"] };
    let x = main.input("x", DType::F32, shape);
    let outer = product(&mut main, start, 1)?;
    let mut body = Body::new();
    let (state, slice) = (body.input("state"), body.input("slice"));
    let captured = body.capture(outer);
    let builder = &mut body.builder;
    let next = product(builder, state, 2)?;
    let next = builder.node("Add", &[next, slice], &[])?;
    let next = builder.node("Relu", &[next], &[])?;
    let given = builder.node("Mul", &[next, captured], &[])?;
    let body = body.finish("body", &[next, given, slice]);
    // The second scan output is stacked in the other direction.
    let flag = i64::from(reversed);
    let mut attrs = vec![
        ("num_scan_inputs", Attribute::Int(1)),
        ("scan_input_directions", Attribute::Ints(vec![flag])),
        ("scan_output_directions", Attribute::Ints(vec![flag, 1 - flag])),
    ];
    // ONNX's default is axis 0, so this case leaves the attributes out.
    if axes != [0, 0] {
        attrs.push(("scan_input_axes", Attribute::Ints(vec![axes[0]])));
        attrs.push(("scan_output_axes", Attribute::Ints(vec![axes[1], axes[1]])));
    }
    let outputs = main.add(("", "Scan"), &[Some(start), Some(x)], &attrs, 3, vec![body])?;
    let graph = main.finish(&outputs)?;
    let shape = if axes[0] == 0 { [length, 2, WIDE] } else { [2, length, WIDE] };
    let x = Tensor::from_slice(&shape, &numbers(length * 2 * WIDE, 14))?;
    Ok(ControlCase {
        name: "a scan",
        graph,
        inputs: vec![("start", rows(2, 15)?), ("x", x.into())],
        op: "Scan",
    })
}

/// Returns all cases.
pub fn cases() -> Result<Vec<ControlCase>> {
    let mut cases = vec![choice(true)?, choice(false)?, until_a_condition()?, branches_in_a_loop()?];
    // No token reaches the number of columns, so that loop ends at the maximum length.
    cases.extend([sizes_of_the_run()?, decoding(END)?, decoding(WIDE as i64)?]);
    // 0 iterations return the initial state, and a scan output without elements.
    for trips in [0, 1, 6] {
        cases.push(counted(trips)?);
    }
    for axes in [[1, 0], [1, 2], [0, -1]] {
        cases.push(scan(false, axes, 4)?);
        cases.push(scan(true, axes, 3)?);
    }
    for reversed in [false, true] {
        for length in [0, 1, 5] {
            cases.push(scan(reversed, [0, 0], length)?);
        }
    }
    Ok(cases)
}

fn session(graph: Graph, devices: &[Arc<dyn Device>], level: Level) -> Result<Session> {
    let mut builder = Session::builder(&Model::from_graph(graph)).threads(2).opt_level(level);
    for device in devices {
        builder = builder.device(device.clone());
    }
    builder.build()
}

fn values(session: &Session, inputs: &[(&'static str, Value)]) -> Result<Vec<Value>> {
    Ok(session.run(inputs)?.into_iter().map(|(_, value)| value).collect())
}

/// Runs the cases on the device with the CPU as fallback, and on the CPU alone.
pub fn results(device: &Arc<dyn Device>) -> Result<()> {
    for (index, case) in cases()?.into_iter().enumerate() {
        let ControlCase { name, graph, inputs, op } = case;
        for level in [Level::Disabled, Level::All] {
            let what = || format!("{name} ({index}, {level:?})");
            let own = session(graph.clone(), &[device.clone(), cpu()?], level)?;
            let placed = own.placement();
            let place = placed.iter().find(|placed| placed.operator == op);
            let provider = place.map(|placed| placed.provider);
            assert_eq!(provider, Some(device.info().provider), "{}: {place:?}", what());
            let alone = session(graph.clone(), &[cpu()?], level)?;
            let (found, expected) = (values(&own, &inputs).within(what)?, values(&alone, &inputs)?);
            for (output, (found, expected)) in found.iter().zip(&expected).enumerate() {
                assert_close(found, expected, 1e-5, &format!("{}, output {output}", what()))?;
            }
            // A second run reuses the memory that the first one left.
            let again = values(&own, &inputs).within(what)?;
            let pairs = again.iter().zip(&found);
            for (output, (again, first)) in pairs.enumerate() {
                assert_eq!(again.tensor()?.bytes(), first.tensor()?.bytes(), "{}, output {output}", what());
            }
        }
    }
    Ok(())
}

/// A loop returns the same bits as its unrolled iterations.
pub fn bits(device: &Arc<dyn Device>) -> Result<()> {
    let devices = [device.clone(), cpu()?];
    for trips in [1, 4] {
        let ControlCase { graph, inputs, .. } = counted(trips)?;
        let looped = values(&session(graph, &devices, Level::Disabled)?, &inputs)?;
        let nodes = values(&session(unrolled(trips)?, &devices, Level::Disabled)?, &inputs)?;
        assert_eq!(looped[0].tensor()?.bytes(), nodes[0].tensor()?.bytes(), "{trips} iterations");
    }
    Ok(())
}

/// Returns `count` before and after a run of the counted loop, and of the scan, with few iterations
/// and with many.
pub fn counts<T>(
    device: &Arc<dyn Device>,
    count: impl Fn() -> T,
) -> Result<Vec<(&'static str, [(T, T); 2])>> {
    let devices = [device.clone(), cpu()?];
    let measured = |case: ControlCase| -> Result<(T, T)> {
        let session = session(case.graph, &devices, Level::All)?;
        // The first run makes the plan, which must not count.
        values(&session, &case.inputs)?;
        let before = count();
        let outputs = values(&session, &case.inputs)?;
        ensure!(!outputs.is_empty(), Fail, "a run without outputs");
        Ok((before, count()))
    };
    Ok(vec![
        ("Loop", [measured(counted(2)?)?, measured(counted(9)?)?]),
        ("Scan", [measured(scan(false, [0, 0], 2)?)?, measured(scan(false, [0, 0], 9)?)?]),
    ])
}

/// Returns the planned peak of a scan on the device, the measured peak, and the bytes of the slab
/// there. Checks that a limit which leaves this much suffices, and that a lower one is refused
/// before anything runs.
pub fn planned(device: &Arc<dyn Device>) -> Result<(Option<usize>, usize, usize)> {
    let length = 50;
    let ControlCase { graph, inputs, .. } = scan(false, [0, 0], length)?;
    let devices = [device.clone(), cpu()?];
    let session = session(graph.clone(), &devices, Level::Disabled)?;
    let (plan, held) = (session.plan(&[("n", length as i64)])?, session.memory().total());
    let expected = values(&session, &inputs)?;
    let peak = plan.peak_bytes.unwrap_or(plan.planned_bytes);
    let model = Model::from_graph(graph);
    // What the session holds, and what a run takes beside it.
    for (limit, fits) in [(held + peak, true), (peak - 1, false)] {
        let builder = Session::builder(&model).threads(2).opt_level(Level::Disabled).memory_limit(limit);
        let bounded =
            devices.iter().fold(builder, |builder, device| builder.device(device.clone())).build()?;
        match values(&bounded, &inputs) {
            Ok(found) if fits => {
                for (found, expected) in found.iter().zip(&expected) {
                    assert_eq!(found.tensor()?.bytes(), expected.tensor()?.bytes());
                }
            }
            Err(problem) if !fits && problem.kind() == ErrorKind::OutOfMemory => {}
            other => panic!("with a limit of {limit}: {:?}", other.map(|found| found.len())),
        }
    }
    let slab = plan.slabs.get(1).copied().unwrap_or(0);
    Ok((plan.peak_bytes, session.memory().activations_peak, slab))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ort_ep_cpu as _;

    #[test]
    fn decoding_ends_at_a_token_or_at_the_maximum_length() -> Result<()> {
        let all = [3i64, 5, 1, 1, 1, 5, 5, 5, 5];
        for (end, expected) in [(END, &all[..6]), (WIDE as i64, &all[..])] {
            let ControlCase { graph, inputs, .. } = decoding(end)?;
            let found = values(&session(graph, &[cpu()?], Level::Disabled)?, &inputs)?;
            let tokens = found[1].tensor()?.to_vec::<f32>()?;
            assert_eq!(tokens.iter().map(|token| *token as i64).collect::<Vec<_>>(), expected, "{end}");
        }
        Ok(())
    }
}
