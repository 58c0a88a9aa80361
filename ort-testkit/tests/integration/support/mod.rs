//! Graphs that several tests of this crate run.

#![allow(dead_code, reason = "each test uses some of it")]

use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ir::{Attribute, Capture, Graph, GraphBuilder, Subgraph, ValueId, ValueType};
use ort_core::session::Session;
use ort_core::tensor::{Tensor, Value};
use ort_ep_cpu as _;

/// A `float` tensor.
pub(crate) fn floats(shape: &[usize], elements: &[f32]) -> Result<Tensor> {
    Tensor::from_slice(shape, elements)
}

/// A one-dimensional `int64` tensor.
pub(crate) fn ints(elements: &[i64]) -> Result<Tensor> {
    Tensor::from_slice(&[elements.len()], elements)
}

/// Attributes by name.
pub(crate) fn axis(axis: i64) -> [(&'static str, Attribute); 1] {
    [("axis", Attribute::Int(axis))]
}

/// `Relu(x * weight + bias)` with x of [rows, 3] and a weight of [3, 4].
pub(crate) fn layer() -> Result<Graph> {
    let mut builder = GraphBuilder::new("layer");
    let x = builder.input("x", DType::F32, &["rows", "3"]);
    let weight = [1.0, 0.0, -1.0, 2.0, 0.5, 1.0, 0.0, -1.0, 2.0, -1.0, 1.0, 0.0];
    let weight = builder.constant(floats(&[3, 4], &weight)?);
    let bias = builder.constant(floats(&[4], &[0.25, -0.5, 1.0, 0.0])?);
    let product = builder.node("MatMul", &[x, weight], &[])?;
    let sum = builder.node("Add", &[product, bias], &[])?;
    let result = builder.node("Relu", &[sum], &[])?;
    builder.finish(&[result])
}

/// The input of [`layer`] with two rows, and its output.
pub(crate) fn layer_data() -> Result<(Value, Value)> {
    let input = floats(&[2, 3], &[1.0, -2.0, 3.0, 0.5, 0.0, -1.0])?;
    let output = floats(&[2, 4], &[6.25, 0.0, 3.0, 4.0, 0.0, 0.5, 0.0, 1.0])?;
    Ok((input.into(), output.into()))
}

/// `-sqrt(2x)` with x of [rows, 2]: products, which stay on the opaque device, around a node that
/// only the CPU runs.
pub(crate) fn round_trip() -> Result<Graph> {
    let mut builder = GraphBuilder::new("round_trip");
    let x = builder.input("x", DType::F32, &["rows", "2"]);
    let doubled = scaled(&mut builder, x, 2, 2.0)?;
    let root = builder.node("Sqrt", &[doubled], &[])?;
    let result = scaled(&mut builder, root, 2, -1.0)?;
    builder.finish(&[result])
}

/// A matrix of `columns` columns times a number, as a matmul, which a device keeps however small
/// it is.
pub(crate) fn scaled(builder: &mut GraphBuilder, x: ValueId, columns: usize, factor: f32) -> Result<ValueId> {
    let elements = (0..columns * columns).map(|index| if index % (columns + 1) == 0 { factor } else { 0.0 });
    let weight = builder.constant(floats(&[columns, columns], &elements.collect::<Vec<f32>>())?);
    builder.node("MatMul", &[x, weight], &[])
}

/// (operator, provider) of each step, sorted.
pub(crate) fn placed(session: &Session) -> Vec<(String, String)> {
    let mut placed: Vec<_> = session.steps().into_iter().map(|(_, op, provider)| (op, provider)).collect();
    placed.sort();
    placed
}

/// How often an operator runs on a provider.
pub(crate) fn count(session: &Session, op: &str, provider: &str) -> usize {
    placed(session).iter().filter(|(o, p)| o == op && p == provider).count()
}

/// The elements of the only output of a run on `x`.
pub(crate) fn run_one(session: &Session, x: Value) -> Result<Vec<f32>> {
    let outputs = session.run(&[("x", x)])?;
    outputs[0].1.tensor()?.to_vec()
}

/// A branch of `If` with one captured value and one output.
pub(crate) fn branch(
    attr: &'static str,
    outer: ValueId,
    build: fn(&mut GraphBuilder, ValueId) -> Result<ValueId>,
) -> Result<Subgraph> {
    let mut graph = Graph::new(attr);
    let inner = graph.add_value("captured", ValueType::Unknown);
    let mut builder = GraphBuilder::extend(graph);
    let result = build(&mut builder, inner)?;
    let graph = builder.finish_subgraph(&[result]);
    Ok(Subgraph { attr, graph, captures: vec![Capture { outer, inner }] })
}
