//! Gradients through control flow against central finite differences, on the CPU, in `double`.

use crate::gradient_support::rows::{check_all, row};
use crate::gradient_support::{Build, STEP, doubles};
use crate::support::session;
use ort_runtime::ir::{Attribute, Capture, Graph, GraphBuilder, Subgraph, ValueId, ValueType};
use ort_runtime::pass::add_backward;
use ort_runtime::{DType, Result, Session, Tensor, Value};

/// A subgraph under construction, with what it captures.
struct Body {
    builder: GraphBuilder,
    captures: Vec<Capture>,
}

impl Body {
    fn new(outer: &[ValueId]) -> (Body, Vec<ValueId>) {
        let mut graph = Graph::new("body");
        let inner: Vec<ValueId> = (0..outer.len())
            .map(|index| graph.add_value(format!("captured_{index}"), ValueType::Unknown))
            .collect();
        let captures = outer.iter().zip(&inner).map(|(&outer, &inner)| Capture { outer, inner }).collect();
        (Body { builder: GraphBuilder::extend(graph), captures }, inner)
    }

    fn inputs(&mut self, names: &[&str]) -> Vec<ValueId> {
        names.iter().map(|name| self.builder.typed_input(name, ValueType::Unknown)).collect()
    }

    fn finish(self, attr: &'static str, outputs: &[ValueId]) -> Subgraph {
        Subgraph { attr, graph: self.builder.finish_subgraph(outputs), captures: self.captures }
    }
}

/// The elements of all outputs, one behind the other.
fn joined(b: &mut GraphBuilder, outputs: &[ValueId]) -> Result<ValueId> {
    let flat = b.constant(Tensor::from_slice(&[1], &[-1i64])?);
    let mut lists = Vec::new();
    for output in outputs {
        lists.push(b.node("Reshape", &[*output, flat], &[])?);
    }
    b.node("Concat", &lists, &[("axis", Attribute::Int(0))])
}

/// `h = tanh(x w + h u)`, with all states and the last; `u` is captured, the initial state given.
fn recurrence(b: &mut GraphBuilder, x: &[ValueId], attrs: &[(&'static str, Attribute)]) -> Result<ValueId> {
    let (mut body, captured) = Body::new(&[x[2], x[3]]);
    let inner = body.inputs(&["h", "x"]);
    let from_x = body.builder.node("MatMul", &[inner[1], captured[0]], &[])?;
    let from_h = body.builder.node("MatMul", &[inner[0], captured[1]], &[])?;
    let sum = body.builder.node("Add", &[from_x, from_h], &[])?;
    let h = body.builder.node("Tanh", &[sum], &[])?;
    let square = body.builder.node("Mul", &[h, inner[0]], &[])?;
    let body = body.finish("body", &[h, square]);
    let mut attrs = attrs.to_vec();
    attrs.push(("num_scan_inputs", Attribute::Int(1)));
    let outputs = b.add(("", "Scan"), &[Some(x[0]), Some(x[1])], &attrs, 2, vec![body])?;
    joined(b, &outputs)
}

const STATE: &[usize] = &[3, 2];

#[test]
fn scans() {
    check_all(&[
        row("recurrence", |b, x| recurrence(b, x, &[]), &[STATE, &[4, 3, 2], &[2, 2], &[2, 2]]),
        row(
            "backwards, outputs from behind",
            |b, x| {
                let attrs = [
                    ("scan_input_directions", Attribute::Ints(vec![1])),
                    ("scan_output_directions", Attribute::Ints(vec![1])),
                ];
                recurrence(b, x, &attrs)
            },
            &[STATE, &[4, 3, 2], &[2, 2], &[2, 2]],
        ),
        row(
            "backwards, by another number than 1",
            |b, x| {
                let attrs = [
                    ("scan_input_directions", Attribute::Ints(vec![2])),
                    ("scan_output_directions", Attribute::Ints(vec![-1])),
                ];
                recurrence(b, x, &attrs)
            },
            &[STATE, &[4, 3, 2], &[2, 2], &[2, 2]],
        ),
        row(
            "other axes",
            |b, x| {
                let attrs = [
                    ("scan_input_axes", Attribute::Ints(vec![1])),
                    ("scan_output_axes", Attribute::Ints(vec![-1])),
                ];
                recurrence(b, x, &attrs)
            },
            &[STATE, &[3, 4, 2], &[2, 2], &[2, 2]],
        ),
        row(
            "a counter besides",
            |b, x| {
                let (mut body, _) = Body::new(&[]);
                let inner = body.inputs(&["n", "x"]);
                let one = body.builder.constant(Tensor::scalar(1i64)?);
                let next = body.builder.node("Add", &[inner[0], one], &[])?;
                let code = Attribute::Int(i64::from(DType::F64.onnx_code()));
                let number = body.builder.node("Cast", &[inner[0]], &[("to", code)])?;
                let scaled = body.builder.node("Mul", &[number, inner[1]], &[])?;
                let body = body.finish("body", &[next, scaled]);
                let zero = b.constant(Tensor::scalar(0i64)?);
                let attrs = [("num_scan_inputs", Attribute::Int(1))];
                b.add(("", "Scan"), &[Some(zero), Some(x[0])], &attrs, 2, vec![body]).map(|all| all[1])
            },
            &[&[4, 3]],
        ),
    ]);
}

/// `x = sin(x) * c` while the counter is below `trips` and the sum of `x` is below a bound.
fn looped(b: &mut GraphBuilder, x: &[ValueId], trips: Option<i64>, bound: Option<f64>) -> Result<ValueId> {
    let (mut body, captured) = Body::new(&[x[1]]);
    let inner = body.inputs(&["number", "holds", "x"]);
    let sine = body.builder.node("Sin", &[inner[2]], &[])?;
    let factor = body.builder.constant(Tensor::scalar(0.3f64)?);
    let sine = body.builder.node("Mul", &[sine, factor], &[])?;
    let next = body.builder.node("Mul", &[sine, captured[0]], &[])?;
    let code = Attribute::Int(i64::from(DType::F64.onnx_code()));
    let number = body.builder.node("Cast", &[inner[0]], &[("to", code)])?;
    let handed = body.builder.node("Mul", &[number, next], &[])?;
    let holds = match bound {
        None => inner[1],
        Some(bound) => {
            let size = body.builder.node("ReduceL1", &[next], &[("keepdims", Attribute::Int(0))])?;
            let bound = body.builder.constant(Tensor::scalar(bound)?);
            body.builder.node("Greater", &[size, bound], &[])?
        }
    };
    let body = body.finish("body", &[holds, next, handed]);
    let trips = match trips {
        None => None,
        Some(trips) => Some(b.constant(Tensor::scalar(trips)?)),
    };
    let holds = b.constant(Tensor::scalar(true)?);
    let outputs = b.add(("", "Loop"), &[trips, Some(holds), Some(x[0])], &[], 2, vec![body])?;
    joined(b, &outputs)
}

#[test]
fn loops() {
    check_all(&[
        row("four times", |b, x| looped(b, x, Some(4), None), &[&[2, 3], &[3]]),
        row("not at all", |b, x| looped(b, x, Some(0), None), &[&[2, 3], &[3]]),
        row("while it is large", |b, x| looped(b, x, None, Some(0.3)), &[&[2, 3], &[3]]),
        row(
            "a value that grows, whose last form has no reader",
            |b, x| {
                let (mut body, captured) = Body::new(&[x[1]]);
                let inner = body.inputs(&["number", "holds", "x"]);
                let product = body.builder.node("Mul", &[inner[2], captured[0]], &[])?;
                let grown =
                    body.builder.node("Concat", &[inner[2], product], &[("axis", Attribute::Int(0))])?;
                let sine = body.builder.node("Sin", &[grown], &[])?;
                let body = body.finish("body", &[inner[1], grown, sine]);
                let trips = b.constant(Tensor::scalar(1i64)?);
                b.add(("", "Loop"), &[Some(trips), None, Some(x[0])], &[], 2, vec![body]).map(|all| all[1])
            },
            &[&[2, 3], &[3]],
        ),
        row(
            "a loop in a loop, without a value that it carries",
            |b, x| {
                let (mut outer, captured) = Body::new(&[x[0], x[1]]);
                let inputs = outer.inputs(&["number", "holds"]);
                let (mut inner, values) = Body::new(&captured);
                let names = inner.inputs(&["number", "holds", "y"]);
                let product = inner.builder.node("Mul", &[names[2], values[1]], &[])?;
                let sum = inner.builder.node("Add", &[product, values[0]], &[])?;
                let inner = inner.finish("body", &[names[1], sum]);
                let trips = outer.builder.constant(Tensor::scalar(2i64)?);
                let y = outer.builder.add(
                    ("", "Loop"),
                    &[Some(trips), None, Some(captured[0])],
                    &[],
                    1,
                    vec![inner],
                )?;
                let outer = outer.finish("body", &[inputs[1], y[0]]);
                let trips = b.constant(Tensor::scalar(3i64)?);
                b.add(("", "Loop"), &[Some(trips), None], &[], 1, vec![outer]).map(|all| all[0])
            },
            &[&[2, 3], &[2, 3]],
        ),
    ]);
}

/// The sine of `a` where the first element of `a` is above a bound, else the product with `b`; `a`
/// itself besides.
fn branched(b: &mut GraphBuilder, x: &[ValueId], bound: f64) -> Result<ValueId> {
    let zero = b.constant(Tensor::from_slice(&[2], &[0i64, 0])?);
    let first = b.node("GatherND", &[x[0], zero], &[])?;
    let bound = b.constant(Tensor::scalar(bound)?);
    let condition = b.node("Greater", &[first, bound], &[])?;
    let (mut then, captured) = Body::new(&[x[0]]);
    let sine = then.builder.node("Sin", &captured, &[])?;
    let then = then.finish("then_branch", &[sine, captured[0]]);
    let (mut otherwise, captured) = Body::new(&[x[0], x[1]]);
    let product = otherwise.builder.node("Mul", &captured, &[])?;
    let otherwise = otherwise.finish("else_branch", &[product, captured[1]]);
    let outputs = b.add(("", "If"), &[Some(condition)], &[], 2, vec![then, otherwise])?;
    joined(b, &outputs)
}

#[test]
fn branches() {
    check_all(&[
        row("then", |b, x| branched(b, x, -10.0), &[&[2, 3], &[2, 3]]),
        row("else", |b, x| branched(b, x, 10.0), &[&[2, 3], &[2, 3]]),
    ]);
}

/// The sum of squares of the gradient of a sum of squares, and its gradient, both by the first
/// input.
fn second_order(build: Build, shapes: &[&[usize]]) -> Result<Session> {
    let mut b = GraphBuilder::new("second");
    let mut inputs = Vec::new();
    for (index, shape) in shapes.iter().enumerate() {
        let sizes: Vec<String> = shape.iter().map(usize::to_string).collect();
        let sizes: Vec<&str> = sizes.iter().map(String::as_str).collect();
        inputs.push(b.input(&format!("x{index}"), DType::F64, &sizes));
    }
    let y = build(&mut b, &inputs)?;
    let loss = b.node("ReduceSumSquare", &[y], &[("keepdims", Attribute::Int(0))])?;
    let mut graph = b.finish(&[loss])?;
    let first = add_backward(&mut graph, loss, &inputs[..1])?;
    let mut b = GraphBuilder::extend(graph);
    let first: Vec<ValueId> = first.into_iter().flatten().collect();
    let loss = b.node("ReduceSumSquare", &first, &[("keepdims", Attribute::Int(0))])?;
    let mut graph = b.finish(&[loss])?;
    let second = add_backward(&mut graph, loss, &inputs[..1])?;
    graph.outputs = std::iter::once(loss).chain(second.into_iter().flatten()).collect();
    session(graph)
}

#[test]
fn gradients_of_gradients() -> Result<()> {
    let scanned: Build = |b, x| recurrence(b, x, &[]);
    let iterated: Build = |b, x| looped(b, x, Some(3), None);
    let scan_shapes: &[&[usize]] = &[&[2, 2], &[3, 2, 2], &[2, 2], &[2, 2]];
    let loop_shapes: &[&[usize]] = &[&[2, 2], &[2]];
    for (build, shapes) in [(scanned, scan_shapes), (iterated, loop_shapes)] {
        let session = second_order(build, shapes)?;
        let element = |index: usize, at: usize| ((at * 37 + index * 17 + 5) % 101) as f64 / 60.0 - 0.8;
        let all: Vec<Vec<f64>> = shapes
            .iter()
            .enumerate()
            .map(|(index, shape)| (0..shape.iter().product()).map(|at| element(index, at)).collect())
            .collect();
        let run = |all: &[Vec<f64>]| -> Result<(f64, Vec<f64>)> {
            let names: Vec<String> = (0..all.len()).map(|index| format!("x{index}")).collect();
            let mut inputs: Vec<(&str, Value)> = Vec::new();
            for ((name, elements), shape) in names.iter().zip(all).zip(shapes) {
                inputs.push((name, Tensor::from_slice(shape, elements)?.into()));
            }
            let outputs = session.run(&inputs)?;
            Ok((doubles(&outputs, 0)?[0], doubles(&outputs, 1)?))
        };
        for (place, actual) in run(&all)?.1.into_iter().enumerate() {
            let at = |offset: f64| -> Result<f64> {
                let mut moved = all.clone();
                moved[0][place] += offset;
                Ok(run(&moved)?.0)
            };
            let expected = (at(STEP)? - at(-STEP)?) / (2.0 * STEP);
            let near = (actual - expected).abs() <= 1e-5 * expected.abs().max(1.0);
            assert!(near, "[{place}] is {actual}, differences give {expected}");
        }
    }
    Ok(())
}
