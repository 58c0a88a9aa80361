//! `Identity` of a constant is that constant; other copies stay nodes.

use crate::onnx_support::*;
use ort_core::onnx::proto::*;

fn with_weight(nodes: Vec<NodeProto>, outputs: &[&str]) -> ModelProto {
    let mut graph = graph(nodes, &["x"], outputs);
    graph.initializer = vec![weight("w", &[1.0, 2.0])];
    model_of(graph)
}

#[test]
fn a_chain_of_copies_of_a_constant_shares_its_memory() {
    // The chain is out of order in the file.
    let nodes = vec![
        node("Identity", &["a"], &["b"]),
        node("Identity", &["w"], &["a"]),
        node("Pair", &["x", "b"], &["y"]),
    ];
    let graph = load(with_weight(nodes, &["y", "a"])).unwrap();
    assert_eq!(lines(&graph), ["y = Pair(x, b)"]);
    let address = |name: &str| graph.constants[&graph.find_value(name).unwrap()].bytes().unwrap().as_ptr();
    assert_eq!(address("b"), address("w"));
    assert_eq!(graph.constants[&graph.outputs[1]].to_vec::<f32>().unwrap(), [1.0, 2.0]);
}

#[test]
fn a_subgraph_sees_the_copy_as_a_constant() {
    let body = graph(vec![node("Identity", &["w"], &["i"]), node("Pair", &["i"], &["r"])], &[], &["r"]);
    let nodes = vec![with(node("Run", &["x"], &["y"]), graph_attribute("body", body))];
    let graph = load(with_weight(nodes, &["y"])).unwrap();
    let body = &graph.nodes[0].subgraphs[0];
    assert!(body.captures.is_empty());
    assert_eq!(lines(&body.graph), ["r = Pair(i)"]);
}

#[test]
fn copies_of_other_values_stay() {
    let graph = load(model(vec![node("Identity", &["x"], &["y"])], &["x"], &["y"])).unwrap();
    assert_eq!(lines(&graph), ["y = Identity(x)"]);
    let mut overridable = graph_with_default();
    overridable.ir_version = Some(8);
    assert_eq!(lines(&load(overridable).unwrap()), ["y = Identity(d)"], "a default is no constant");
}

fn graph_with_default() -> ModelProto {
    let mut graph = graph(vec![node("Identity", &["d"], &["y"])], &["d"], &["y"]);
    graph.initializer = vec![weight("d", &[1.0])];
    model_of(graph)
}

#[test]
fn a_function_hands_an_input_through() {
    let function = FunctionProto {
        name: Some("Through".into()),
        domain: Some("local".into()),
        input: vec!["a".into()],
        output: vec!["a".into(), "b".into(), "b".into()],
        node: vec![node("Pair", &["a"], &["b"])],
        opset_import: vec![opset(TEST, 3)],
        ..FunctionProto::default()
    };
    let call = NodeProto { domain: Some("local".into()), ..node("Through", &["x"], &["y", "z", "twin"]) };
    let mut model = model(vec![call], &["x"], &["y", "z", "twin"]);
    model.functions = vec![function];
    let graph = load(model).unwrap();
    assert_eq!(lines(&graph), ["z = Pair(x)", "y = Identity(x)", "twin = Identity(z)"]);
}
