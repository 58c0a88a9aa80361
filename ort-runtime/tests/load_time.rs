//! The time from a file's bytes to a planned session grows as the model does, whatever the shape of
//! its graph.
#![cfg(feature = "cpu")]
#![allow(clippy::unwrap_used)]

use std::time::{Duration, Instant};

use ort_runtime::onnx::proto::attribute_proto::AttributeType;
use ort_runtime::onnx::proto::tensor_shape_proto::{Dimension, dimension};
use ort_runtime::onnx::proto::*;
use ort_runtime::onnx::tensor_to_proto;
use ort_runtime::{DType, Model, Result, Session, Tensor};
use prost::Message;

/// A small model's nodes, and how many times larger the large one is.
const NODES: usize = 3_000;
const GROWTH: usize = 8;
/// How much more slowly the large model may load than by its size: with quadratic work it would be
/// `GROWTH`.
const SLACK: f64 = 3.0;

/// A name, and what makes a graph of about N nodes.
type Case = (&'static str, fn(usize) -> GraphProto);

const CASES: &[Case] = &[
    ("a chain", |count| chain(count, |index| node("Relu", &[&at(index)], &[&at(index + 1)]))),
    ("a chain in reverse order", |count| {
        let mut graph = chain(count, |index| node("Relu", &[&at(index)], &[&at(index + 1)]));
        graph.node.reverse();
        graph
    }),
    ("a chain with attributes", |count| {
        chain(count, |index| {
            let mut softmax = node("Softmax", &[&at(index)], &[&at(index + 1)]);
            softmax.attribute.push(int("axis", 1));
            softmax
        })
    }),
    ("a chain with a weight for each node", weights),
    ("a chain of nodes of one name", |count| {
        chain(count, |index| NodeProto {
            name: Some("same".into()),
            ..node("Relu", &[&at(index)], &[&at(index + 1)])
        })
    }),
    ("a chain of branches", |count| chain(count / 4, branches)),
    ("one value read by all", wide),
    ("one node with many outputs", fan),
];

#[test]
fn loading_takes_time_in_proportion_to_the_nodes() -> Result<()> {
    for (name, make) in CASES {
        let small = fastest(&bytes(make(NODES)), 3)?;
        let large = fastest(&bytes(make(NODES * GROWTH)), 2)?;
        let ratio = large.as_secs_f64() / small.as_secs_f64();
        println!("{name}: {small:?} and {large:?}, {ratio:.1} times for {GROWTH} times the nodes");
        assert!(ratio < GROWTH as f64 * SLACK, "{name}: {ratio:.1} times the time");
    }
    Ok(())
}

/// The shortest time of several, as others may use the machine.
fn fastest(bytes: &[u8], tries: usize) -> Result<Duration> {
    let mut best = Duration::MAX;
    for _ in 0..tries {
        let start = Instant::now();
        let session = Session::builder(&Model::from_bytes(bytes.to_vec())?).threads(1).build()?;
        session.plan(&[])?;
        best = best.min(start.elapsed());
    }
    Ok(best)
}

fn bytes(graph: GraphProto) -> Vec<u8> {
    let opset = OperatorSetIdProto { domain: None, version: Some(21) };
    let model = ModelProto {
        ir_version: Some(10),
        graph: Some(graph),
        opset_import: vec![opset],
        ..ModelProto::default()
    };
    model.encode_to_vec()
}

/// The name of a value of a chain.
fn at(index: usize) -> String {
    format!("v{index}")
}

fn node(op: &str, inputs: &[&str], outputs: &[&str]) -> NodeProto {
    let list = |names: &[&str]| names.iter().map(|name| name.to_string()).collect();
    NodeProto { op_type: Some(op.into()), input: list(inputs), output: list(outputs), ..NodeProto::default() }
}

fn int(name: &str, value: i64) -> AttributeProto {
    AttributeProto {
        name: Some(name.into()),
        r#type: Some(AttributeType::Int as i32),
        i: Some(value),
        ..AttributeProto::default()
    }
}

fn value(name: &str, dtype: DType, shape: &[i64]) -> ValueInfoProto {
    let dim =
        |&size: &i64| Dimension { value: Some(dimension::Value::DimValue(size)), ..Dimension::default() };
    let shape = TensorShapeProto { dim: shape.iter().map(dim).collect() };
    let tensor = type_proto::Tensor { elem_type: Some(dtype.onnx_code()), shape: Some(shape) };
    let ty = TypeProto { value: Some(type_proto::Value::TensorType(tensor)), ..TypeProto::default() };
    ValueInfoProto { name: Some(name.into()), r#type: Some(ty), ..ValueInfoProto::default() }
}

/// `count` nodes, each after the one before, from `v0` on; `c` is a boolean beside.
fn chain(count: usize, make: impl FnMut(usize) -> NodeProto) -> GraphProto {
    GraphProto {
        node: (0..count).map(make).collect(),
        input: vec![value("v0", DType::F32, &[1, 4]), value("c", DType::Bool, &[])],
        output: vec![value(&at(count), DType::F32, &[1, 4])],
        ..GraphProto::default()
    }
}

fn weights(count: usize) -> GraphProto {
    let weight = |index: usize| {
        let tensor = Tensor::from_slice(&[1, 4], &[index as f32; 4]).unwrap();
        tensor_to_proto(&format!("w{index}"), &tensor).unwrap()
    };
    let sum = |index: usize| node("Add", &[&at(index), &format!("w{index}")], &[&at(index + 1)]);
    GraphProto { initializer: (0..count).map(weight).collect(), ..chain(count, sum) }
}

fn branches(index: usize) -> NodeProto {
    let branch = |attr: &str, op: &str| {
        let (inner, result) = (format!("{op}{index}a"), format!("{op}{index}b"));
        let graph = GraphProto {
            node: vec![node(op, &[&at(index)], &[&inner]), node("Neg", &[&inner], &[&result])],
            output: vec![value(&result, DType::F32, &[1, 4])],
            ..GraphProto::default()
        };
        AttributeProto {
            name: Some(attr.into()),
            r#type: Some(AttributeType::Graph as i32),
            g: Some(Box::new(graph)),
            ..AttributeProto::default()
        }
    };
    let mut choice = node("If", &["c"], &[&at(index + 1)]);
    choice.attribute = vec![branch("then_branch", "Relu"), branch("else_branch", "Abs")];
    choice
}

/// Values of several sizes that all live at once, as one node at the end reads them.
fn wide(count: usize) -> GraphProto {
    let mut graph = chain(count, |index| {
        let copies = vec!["v0"; 1 + index % 5];
        let mut joined = node("Concat", &copies, &[&at(index + 1)]);
        joined.attribute.push(int("axis", 0));
        joined
    });
    let all: Vec<String> = (1..=count).map(at).collect();
    let all: Vec<&str> = all.iter().map(String::as_str).collect();
    let mut last = node("Concat", &all, &["y"]);
    last.attribute.push(int("axis", 0));
    graph.node.push(last);
    graph.output = vec![ValueInfoProto { r#type: None, ..value("y", DType::F32, &[]) }];
    graph
}

/// A node with an output for each of the others, and a node that reads all of theirs.
fn fan(count: usize) -> GraphProto {
    let parts: Vec<String> = (0..count).map(|index| format!("p{index}")).collect();
    let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
    let results: Vec<String> = (0..count).map(|index| format!("r{index}")).collect();
    let results: Vec<&str> = results.iter().map(String::as_str).collect();
    let mut split = node("Split", &["x"], &parts);
    split.attribute = vec![int("axis", 0), int("num_outputs", count as i64)];
    let mut join = node("Concat", &results, &["y"]);
    join.attribute.push(int("axis", 0));
    let middle = parts.iter().zip(&results).map(|(part, result)| node("Relu", &[part], &[result]));
    let nodes = [split].into_iter().chain(middle).chain([join]).collect();
    let rows = count as i64;
    GraphProto {
        node: nodes,
        input: vec![value("x", DType::F32, &[rows, 4])],
        output: vec![value("y", DType::F32, &[rows, 4])],
        ..GraphProto::default()
    }
}
