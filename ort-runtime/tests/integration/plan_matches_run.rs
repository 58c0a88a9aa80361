//! The planned peak of activations is what a run takes, to the byte.

use crate::support::{axis, branch, counter, floats, inputs_of, ints, layer, numbers, run, session};
use ort_runtime::ir::{Attribute, GraphBuilder, Subgraph, ValueId, ValueType};
use ort_runtime::{DType, Result, RunOptions, Session, TensorBuffer, Value};

type Build = fn(&mut GraphBuilder, ValueId) -> Result<Vec<ValueId>>;

/// Graphs over x of [n, 8].
const GRAPHS: &[(&str, Build)] = &[
    ("chain in place", |b, x| {
        let exponential = b.node("Exp", &[x], &[])?;
        let negative = b.node("Neg", &[exponential], &[])?;
        let positive = b.node("Relu", &[negative], &[])?;
        Ok(vec![b.node("Abs", &[positive], &[])?])
    }),
    ("two readers", |b, x| {
        let a = b.node("Exp", &[x], &[])?;
        let c = b.node("Neg", &[a], &[])?;
        let d = b.node("Add", &[a, c], &[])?;
        Ok(vec![b.node("Mul", &[d, c], &[])?])
    }),
    ("matrix product", |b, x| {
        let weight = b.constant(numbers(&[8, 5], 1)?);
        let product = b.node("MatMul", &[x, weight], &[])?;
        let positive = b.node("Relu", &[product], &[])?;
        Ok(vec![b.node("Softmax", &[positive], &axis(-1))?])
    }),
    ("product of activations", |b, x| {
        let a = b.node("Neg", &[x], &[])?;
        let turned = b.node("Transpose", &[a], &[])?;
        let product = b.node("MatMul", &[a, turned], &[])?;
        Ok(vec![b.node("Exp", &[product], &[])?])
    }),
    ("views of shape", |b, x| {
        let flat = b.constant(ints(&[-1])?);
        let back = b.constant(ints(&[-1, 4])?);
        let a = b.node("Neg", &[x], &[])?;
        let line = b.node("Reshape", &[a, flat], &[])?;
        let table = b.node("Reshape", &[line, back], &[])?;
        let c = b.node("Relu", &[table], &[])?;
        Ok(vec![b.node("Exp", &[c], &[])?])
    }),
    ("parts of columns", |b, x| {
        let a = b.node("Neg", &[x], &[])?;
        let parts = b.add(("", "Split"), &[Some(a)], &axis(1), 2, Vec::new())?;
        let sum = b.node("Add", &[parts[0], parts[1]], &[])?;
        Ok(vec![b.node("Exp", &[sum], &[])?])
    }),
    ("parts along the outer axis", |b, x| {
        let shape = b.constant(ints(&[2, -1])?);
        let a = b.node("Neg", &[x], &[])?;
        let halves = b.node("Reshape", &[a, shape], &[])?;
        let parts = b.add(("", "Split"), &[Some(halves)], &axis(0), 2, Vec::new())?;
        let c = b.node("Exp", &[parts[1]], &[])?;
        let d = b.node("Relu", &[parts[0]], &[])?;
        let e = b.node("Add", &[c, d], &[])?;
        Ok(vec![b.node("Abs", &[e], &[])?])
    }),
    ("slice of rows", |b, x| {
        let (starts, ends) = (b.constant(ints(&[0])?), b.constant(ints(&[1])?));
        let a = b.node("Neg", &[x], &[])?;
        let row = b.node("Slice", &[a, starts, ends], &[])?;
        let c = b.node("Exp", &[row], &[])?;
        Ok(vec![b.node("Add", &[c, a], &[])?])
    }),
    ("concatenation", |b, x| {
        let a = b.node("Neg", &[x], &[])?;
        let c = b.node("Exp", &[x], &[])?;
        let both = b.node("Concat", &[a, c, x], &axis(0))?;
        Ok(vec![b.node("Relu", &[both], &[])?])
    }),
    ("sum of rows", |b, x| {
        let a = b.node("Exp", &[x], &[])?;
        let axes = b.constant(ints(&[0])?);
        let sum = b.node("ReduceSum", &[a, axes], &[])?;
        Ok(vec![b.node("Div", &[a, sum], &[])?])
    }),
    ("an input is an output", |b, x| Ok(vec![x, b.node("Neg", &[x], &[])?])),
    ("a constant is an output", |b, x| Ok(vec![b.constant(numbers(&[100], 0)?), b.node("Neg", &[x], &[])?])),
    ("nothing but an input", |_, x| Ok(vec![x])),
    ("an output twice", |b, x| {
        let a = b.node("Neg", &[x], &[])?;
        Ok(vec![a, a, b.node("Relu", &[a], &[])?])
    }),
    ("views of an input and of an output are outputs", |b, x| {
        let flat = b.constant(ints(&[-1])?);
        let a = b.node("Neg", &[x], &[])?;
        let of_input = b.node("Reshape", &[x, flat], &[])?;
        let of_output = b.node("Reshape", &[a, flat], &[])?;
        Ok(vec![of_input, a, of_output])
    }),
    ("a shape is an output", |b, x| {
        let a = b.node("Neg", &[x], &[])?;
        Ok(vec![b.node("Shape", &[a], &[])?, b.node("Relu", &[a], &[])?])
    }),
    ("an output that is read again", |b, x| {
        let a = b.node("Neg", &[x], &[])?;
        let c = b.node("Relu", &[a], &[])?;
        let d = b.node("Exp", &[c], &[])?;
        Ok(vec![a, c, d])
    }),
    ("convolution", |b, x| {
        let shape = b.constant(ints(&[-1, 2, 2, 2])?);
        let image = b.node("Reshape", &[x, shape], &[])?;
        let weight = b.constant(numbers(&[6, 2, 3, 3], 2)?);
        let pads = [("pads", Attribute::Ints(vec![1, 1, 1, 1]))];
        let features = b.node("Conv", &[image, weight], &pads)?;
        let positive = b.node("Relu", &[features], &[])?;
        Ok(vec![b.node("GlobalAveragePool", &[positive], &[])?])
    }),
    ("a branch", |b, x| {
        let condition = b.input("c", DType::Bool, &[]);
        let a = b.node("Neg", &[x], &[])?;
        let then = branch("then_branch", a, |b, a| {
            let c = b.node("Exp", &[a], &[])?;
            let d = b.node("Mul", &[c, a], &[])?;
            let e = b.node("Add", &[c, d], &[])?;
            b.node("Relu", &[e], &[])
        })?;
        let otherwise = branch("else_branch", a, |b, a| b.node("Abs", &[a], &[]))?;
        let chosen = b.add(("", "If"), &[Some(condition)], &[], 1, vec![then, otherwise])?;
        Ok(vec![b.node("Add", &[chosen[0], x], &[])?])
    }),
    ("a branch that hands on what it captures", |b, x| {
        let condition = b.input("c", DType::Bool, &[]);
        let a = b.node("Neg", &[x], &[])?;
        let then = branch("then_branch", a, |_, a| Ok(a))?;
        let otherwise = branch("else_branch", a, |b, a| b.node("Abs", &[a], &[]))?;
        let chosen = b.add(("", "If"), &[Some(condition)], &[], 1, vec![then, otherwise])?;
        Ok(vec![b.node("Add", &[chosen[0], a], &[])?])
    }),
];

/// A Scan whose state is the sum of the rows so far, beginning with `start`. Its outputs are the
/// final sum and the `outputs` that the body adds.
fn running_sum(
    b: &mut GraphBuilder,
    (start, x): (ValueId, ValueId),
    outputs: fn(&mut GraphBuilder, ValueId, ValueId) -> Result<Vec<ValueId>>,
) -> Result<Vec<ValueId>> {
    let mut body = GraphBuilder::new("body");
    let sum = body.typed_input("sum", ValueType::Unknown);
    let row = body.typed_input("row", ValueType::Unknown);
    let mut results = vec![body.node("Add", &[sum, row], &[])?];
    results.extend(outputs(&mut body, sum, row)?);
    let body = Subgraph { attr: "body", graph: body.finish_subgraph(&results), captures: Vec::new() };
    let scanned = [("num_scan_inputs", Attribute::Int(1))];
    b.add(("", "Scan"), &[Some(start), Some(x)], &scanned, results.len(), vec![body])
}

/// Scans over the rows of `x`, whose states have 32, 1600 or 4 bytes.
const SCANS: &[(&str, Build)] = &[
    ("a state and its items", |b, x| {
        let start = b.constant(numbers(&[8], 3)?);
        running_sum(b, (start, x), |body, sum, row| {
            let product = body.node("Mul", &[sum, row], &[])?;
            let large = body.node("Exp", &[product], &[])?;
            Ok(vec![body.node("Sub", &[large, row], &[])?])
        })
    }),
    ("a state alone", |b, x| {
        let start = b.constant(numbers(&[8], 3)?);
        running_sum(b, (start, x), |_, _, _| Ok(Vec::new()))
    }),
    ("a state that nobody reads again", |b, x| {
        let start = b.constant(numbers(&[8], 3)?);
        let outputs = running_sum(b, (start, x), |body, _, row| Ok(vec![body.node("Neg", &[row], &[])?]))?;
        Ok(vec![b.node("Relu", &[outputs[1]], &[])?])
    }),
    ("a large state", |b, x| {
        let start = b.constant(numbers(&[50, 8], 3)?);
        running_sum(b, (start, x), |body, sum, _| Ok(vec![body.node("Neg", &[sum], &[])?]))
    }),
    ("a state that stays", |b, x| {
        let start = b.node("ReduceMax", &[x], &[("keepdims", Attribute::Int(0))])?;
        let mut body = GraphBuilder::new("body");
        let state = body.typed_input("state", ValueType::Unknown);
        let row = body.typed_input("row", ValueType::Unknown);
        let scaled = body.node("Mul", &[state, row], &[])?;
        let graph = body.finish_subgraph(&[state, scaled]);
        let body = Subgraph { attr: "body", graph, captures: Vec::new() };
        let scanned = [("num_scan_inputs", Attribute::Int(1))];
        b.add(("", "Scan"), &[Some(start), Some(x)], &scanned, 2, vec![body])
    }),
    ("a scan in a scan", |b, x| {
        let scanned = [("num_scan_inputs", Attribute::Int(1))];
        let mut inner = GraphBuilder::new("inner");
        let number = inner.typed_input("number", ValueType::Unknown);
        let positive = inner.node("Relu", &[number], &[])?;
        let inner =
            Subgraph { attr: "body", graph: inner.finish_subgraph(&[positive]), captures: Vec::new() };
        let mut outer = GraphBuilder::new("outer");
        let row = outer.typed_input("row", ValueType::Unknown);
        let items = outer.add(("", "Scan"), &[Some(row)], &scanned, 1, vec![inner])?;
        let graph = outer.finish_subgraph(&items);
        let outer = Subgraph { attr: "body", graph, captures: Vec::new() };
        b.add(("", "Scan"), &[Some(x)], &scanned, 1, vec![outer])
    }),
];

#[test]
fn the_planned_peak_is_the_measured_one() -> Result<()> {
    let mut wrong = Vec::new();
    for (name, build) in GRAPHS.iter().chain(SCANS) {
        for n in [0, 1, 2, 3, 100] {
            let mut builder = GraphBuilder::new(name);
            let x = builder.input("x", DType::F32, &["n", "8"]);
            let outputs = build(&mut builder, x)?;
            let session = session(builder.finish(&outputs)?)?;
            let planned = session.plan(&[("n", n as i64)])?;
            let outputs = run(&session, &inputs_of(&session, n)?)?;
            let measured = session.memory().activations_peak;
            if planned.peak_bytes != Some(measured) {
                wrong.push(format!("{name}, n = {n}: planned {:?}, measured {measured}", planned.peak_bytes));
            }
            drop(outputs);
            session.trim();
            let left = session.memory().activations;
            if left > 0 {
                wrong.push(format!("{name}, n = {n}: {left} bytes are still in use"));
            }
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
    Ok(())
}

/// Runs that take over `x` compute what other runs do, in what they plan, which is never more.
#[test]
fn donated_inputs_change_no_bit() -> Result<()> {
    for (name, build) in GRAPHS.iter().chain(SCANS) {
        for n in [0, 1, 3, 200] {
            let made = || {
                let mut builder = GraphBuilder::new(name);
                let x = builder.input("x", DType::F32, &["n", "8"]);
                let outputs = build(&mut builder, x)?;
                session(builder.finish(&outputs)?)
            };
            let (lending, session) = (made()?, made()?);
            let inputs = inputs_of(&session, n)?;
            let expected = run(&lending, &inputs)?;
            let planned = session.plan_donating(&[("n", n as i64)], &["x"])?.peak_bytes;
            assert!(planned <= session.plan(&[("n", n as i64)])?.peak_bytes, "{name}, n = {n}");
            let found = run_donating_x(&session, &inputs)?;
            for (found, (_, expected)) in found.iter().zip(&expected) {
                assert_eq!(found.tensor()?.bytes(), expected.tensor()?.bytes(), "{name}, n = {n}");
            }
            assert_eq!(planned, Some(session.memory().activations_peak), "{name}, n = {n}");
        }
    }
    Ok(())
}

/// Runs with a copy of `x` that the run takes over.
fn run_donating_x(session: &Session, inputs: &[(String, Value)]) -> Result<Vec<Value>> {
    let named = inputs.iter().map(|(name, value)| (name.as_str(), value.clone()));
    let (donated, others): (Vec<_>, Vec<_>) = named.partition(|(name, _)| *name == "x");
    let copies = donated.iter().map(|(name, x)| Ok((*name, TensorBuffer::copy_of(x.tensor()?)?)));
    session.run_donating(&others, copies.collect::<Result<_>>()?, &RunOptions::default())
}

#[test]
fn a_dead_donated_input_holds_later_values() -> Result<()> {
    let mut builder = GraphBuilder::new("chain");
    let mut x = builder.input("x", DType::F32, &["n", "8"]);
    for seed in 0..4 {
        let weight = builder.constant(numbers(&[8, 8], seed)?);
        x = builder.node("MatMul", &[x, weight], &[])?;
        x = builder.node("Softmax", &[x], &axis(-1))?;
    }
    let session = session(builder.finish(&[x])?)?;
    let dims = [("n", 500)];
    let (lent, donated) = (session.plan(&dims)?, session.plan_donating(&dims, &["x"])?);
    // Two values are live at a time: one in the memory of `x`, one in the buffer of the output.
    let value = 500 * 8 * 4;
    assert_eq!(donated.peak_bytes, Some(value));
    assert!(lent.peak_bytes >= Some(2 * value), "{:?}", lent.peak_bytes);
    let twice =
        [("x", TensorBuffer::new(DType::F32, &[3, 8])?), ("x", TensorBuffer::new(DType::F32, &[3, 8])?)];
    let problem = session.run_donating(&[], twice.into(), &RunOptions::default());
    assert!(problem.is_err_and(|problem| problem.to_string().contains("input 'x' is given twice")));
    assert!(session.plan_donating(&dims, &["y"]).is_err(), "an unknown input is an error");
    Ok(())
}

#[test]
fn a_plan_from_inputs_is_the_plan_of_their_sizes() -> Result<()> {
    let session = session(layer()?)?;
    let x = floats(&[7, 3], &[1.0; 21])?;
    let of_inputs = session.plan_for_inputs(&[("x", x.into())])?;
    let of_sizes = session.plan(&[("rows", 7)])?;
    assert_eq!(of_inputs.peak_bytes, of_sizes.peak_bytes);
    assert_eq!(of_inputs.dims, [("rows".to_string(), 7)]);
    assert!(session.plan(&[("columns", 7)]).is_err(), "an unknown dimension is an error");
    Ok(())
}

#[test]
fn sizes_that_only_the_run_tells_are_told_apart() -> Result<()> {
    let mut builder = GraphBuilder::new("found");
    let x = builder.input("x", DType::F32, &["n"]);
    let a = builder.node("Neg", &[x], &[])?;
    let places = builder.node("NonZero", &[a], &[])?;
    let doubled = builder.node("Add", &[places, places], &[])?;
    let flat = builder.constant(ints(&[-1])?);
    let line = builder.node("Reshape", &[doubled, flat], &[])?;
    let sum = builder.node("Add", &[line, line], &[])?;
    let session = session(builder.finish(&[sum])?)?;
    let plan = session.plan(&[("n", 6)])?;
    assert_eq!(plan.peak_bytes, None);
    let dynamic = plan.values.iter().filter(|value| value.kind.name() == "dynamic").count();
    assert_eq!(dynamic, 4);
    let x = floats(&[6], &[0.0, 1.0, 0.0, 2.0, 0.0, 3.0])?;
    let outputs = session.run(&[("x", x.into())])?;
    assert_eq!(outputs[0].1.tensor()?.to_vec::<i64>()?, [4, 12, 20]);
    assert!(session.memory().activations_peak > plan.planned_bytes);
    drop(outputs);
    session.trim();
    assert_eq!(session.memory().activations, 0);
    Ok(())
}

#[test]
fn a_loop_gives_everything_back() -> Result<()> {
    let session = session(counter()?)?;
    let count = ort_runtime::Tensor::scalar(50i64)?;
    let x = floats(&[3], &[0.0, 1.0, 2.0])?;
    let outputs = session.run(&[("count", count.into()), ("x", x.into())])?;
    assert_eq!(outputs[0].1.tensor()?.to_vec::<f32>()?, [50.0, 51.0, 52.0]);
    let peak = session.memory().activations_peak;
    assert!(peak < 10 * 64, "50 rounds on 12 bytes took {peak} bytes at once");
    drop(outputs);
    session.trim();
    assert_eq!(session.memory().activations, 0);
    Ok(())
}
