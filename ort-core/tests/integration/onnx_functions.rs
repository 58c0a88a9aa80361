//! Functions local to a model are inlined.

use crate::onnx_support::*;
use ort_core::ErrorKind;
use ort_core::onnx::proto::attribute_proto::AttributeType;
use ort_core::onnx::proto::*;

fn function(name: &str, inputs: &[&str], outputs: &[&str], nodes: Vec<NodeProto>) -> FunctionProto {
    FunctionProto {
        name: Some(name.into()),
        domain: Some("local".into()),
        input: inputs.iter().map(|name| name.to_string()).collect(),
        output: outputs.iter().map(|name| name.to_string()).collect(),
        node: nodes,
        opset_import: vec![opset("", 21), opset(TEST, 3), opset("local", 1)],
        ..FunctionProto::default()
    }
}

fn call(name: &str, inputs: &[&str], outputs: &[&str]) -> NodeProto {
    NodeProto { domain: Some("local".into()), ..node(name, inputs, outputs) }
}

fn with_functions(mut model: ModelProto, functions: Vec<FunctionProto>) -> ModelProto {
    model.functions = functions;
    model
}

#[test]
fn calls_become_nodes() {
    let twice =
        function("Twice", &["a"], &["b"], vec![node("Pair", &["a"], &["t"]), node("Pair", &["t"], &["b"])]);
    let outer =
        function("Outer", &["a"], &["b"], vec![call("Twice", &["a"], &["t"]), call("Twice", &["t"], &["b"])]);
    let graph =
        load(with_functions(model(vec![call("Outer", &["x"], &["y"])], &["x"], &["y"]), vec![twice, outer]))
            .unwrap();
    let expected = [
        "outer_y/twice_t/t = Pair(x)",
        "outer_y/t = Pair(outer_y/twice_t/t)",
        "outer_y/twice_b/t = Pair(outer_y/t)",
        "y = Pair(outer_y/twice_b/t)",
    ];
    assert_eq!(lines(&graph), expected);
    assert_eq!(&*graph.nodes[0].name, "outer_y/twice_t/pair_t");
}

#[test]
fn attributes_are_handed_through() {
    let ints = |name: &str| reference("ints", name, AttributeType::Ints);
    let alpha = |name: &str| reference("alpha", name, AttributeType::Float);
    let mut inner = function(
        "Inner",
        &["a"],
        &["b"],
        vec![with(with(node("Pair", &["a"], &["b"]), alpha("slope")), ints("list"))],
    );
    inner.attribute = vec!["list".into()];
    inner.attribute_proto = vec![AttributeProto { f: Some(0.5), ..attribute("slope", AttributeType::Float) }];
    let mut outer = function(
        "Outer",
        &["a"],
        &["b"],
        vec![with(call("Inner", &["a"], &["b"]), reference("slope", "s", AttributeType::Float))],
    );
    outer.attribute = vec!["s".into()];
    let given = AttributeProto { f: Some(4.0), ..attribute("s", AttributeType::Float) };
    let list = AttributeProto { ints: vec![1, 2], ..attribute("list", AttributeType::Ints) };
    let nodes = vec![
        with(call("Outer", &["x"], &["a"]), given),
        call("Outer", &["a"], &["b"]),
        with(call("Inner", &["b"], &["y"]), list),
    ];
    let graph = load(with_functions(model(nodes, &["x"], &["y"]), vec![inner, outer])).unwrap();
    let alphas: Vec<f32> = graph.nodes.iter().map(|node| node.attrs.float("alpha").unwrap()).collect();
    assert_eq!(alphas, [4.0, 0.5, 0.5], "given, left out by the caller, default");
    assert_eq!(graph.nodes[0].attrs.find_ints("ints"), None);
    assert_eq!(graph.nodes[2].attrs.ints("ints").unwrap(), [1, 2]);
}

#[test]
fn left_out_inputs_stay_left_out() {
    let body = function("Body", &["a", "b"], &["c"], vec![node("Pair", &["a", "b"], &["c"])]);
    let nodes = vec![call("Body", &["x"], &["t"]), call("Body", &["t", "x"], &["y"])];
    let graph = load(with_functions(model(nodes, &["x"], &["y"]), vec![body])).unwrap();
    assert_eq!(lines(&graph), ["t = Pair(x)", "y = Pair(t, x)"]);
}

#[test]
fn an_operator_goes_before_a_function_of_its_name_which_has_its_own_opset() {
    let mut own = function("Pair", &["a"], &["b"], vec![node("OldTriangle", &["a"], &["b"])]);
    own.domain = Some(TEST.into());
    let graph =
        load(with_functions(model(vec![node("Pair", &["x"], &["y"])], &["x"], &["y"]), vec![own])).unwrap();
    assert_eq!(lines(&graph), ["y = Pair(x)"]);
    let mut old = function("Old", &["a"], &["b"], vec![node("Pair", &["a"], &["b"])]);
    old.opset_import = vec![opset(TEST, 2)];
    let graph =
        load(with_functions(model(vec![call("Old", &["x"], &["y"])], &["x"], &["y"]), vec![old])).unwrap();
    assert_eq!(graph.nodes[0].attrs.string("mode").unwrap(), "upgraded");
    let mut forgetful = function("Old", &["a"], &["b"], vec![node("Pair", &["a"], &["b"])]);
    forgetful.opset_import = vec![];
    let graph =
        load(with_functions(model(vec![call("Old", &["x"], &["y"])], &["x"], &["y"]), vec![forgetful]))
            .unwrap();
    assert_eq!(graph.nodes[0].attrs.string("mode").unwrap(), "plain", "the model's version");
}

#[test]
fn overloads_are_told_apart() {
    let mut first = function("F", &["a"], &["b"], vec![node("Pair", &["a"], &["b"])]);
    let mut second = function("F", &["a"], &["b"], vec![node("Trilu", &["a"], &["b"])]);
    first.overload = Some("one".into());
    second.overload = Some("two".into());
    let mut nodes = vec![call("F", &["x"], &["t"]), call("F", &["t"], &["y"])];
    nodes[0].overload = Some("two".into());
    nodes[1].overload = Some("one".into());
    let graph = load(with_functions(model(nodes, &["x"], &["y"]), vec![first, second])).unwrap();
    assert_eq!(lines(&graph), ["t = Trilu(x)", "y = Pair(t)"]);
}

#[test]
fn subgraphs_inside_functions_see_the_function_alone() {
    let body = graph(vec![node("Pair", &["a"], &["r"])], &[], &["r"]);
    let run =
        function("F", &["a"], &["b"], vec![with(node("Run", &[], &["b"]), graph_attribute("body", body))]);
    let graph_ok =
        load(with_functions(model(vec![call("F", &["x"], &["y"])], &["x"], &["y"]), vec![run])).unwrap();
    let captures = &graph_ok.nodes[0].subgraphs[0].captures;
    assert_eq!(&*graph_ok.value(captures[0].outer).name, "x");
    let body = graph(vec![node("Pair", &["x"], &["r"])], &[], &["r"]);
    let peeks =
        function("F", &["a"], &["b"], vec![with(node("Run", &[], &["b"]), graph_attribute("body", body))]);
    let error = load(with_functions(model(vec![call("F", &["x"], &["y"])], &["x"], &["y"]), vec![peeks]))
        .unwrap_err();
    assert!(error.to_string().contains("however input 'x' of node"), "{error}");
}

#[test]
fn a_function_handing_constants_out_makes_constants() {
    let value = AttributeProto { i: Some(3), ..attribute("value_int", AttributeType::Int) };
    let three = function("Three", &[], &["c"], vec![with(node("Constant", &[], &["c"]), value)]);
    let graph =
        load(with_functions(model(vec![call("Three", &[], &["y"])], &["x"], &["y"]), vec![three])).unwrap();
    assert_eq!(graph.constants[&graph.outputs[0]].to_vec::<i64>().unwrap(), [3]);
}

#[test]
fn functions_that_call_themselves_or_explode_are_refused() {
    let own = function("Own", &["a"], &["b"], vec![call("Own", &["a"], &["b"])]);
    let ping = function("Ping", &["a"], &["b"], vec![call("Pong", &["a"], &["b"])]);
    let pong = function("Pong", &["a"], &["b"], vec![call("Ping", &["a"], &["b"])]);
    // Each level calls the one below twice: 2^40 nodes from 40 small functions.
    let mut bomb = vec![function("F0", &["a"], &["b"], vec![node("Pair", &["a"], &["b"])])];
    for level in 1..=40 {
        let below = format!("F{}", level - 1);
        let nodes = vec![call(&below, &["a"], &["t"]), call(&below, &["t"], &["b"])];
        bomb.push(function(&format!("F{level}"), &["a"], &["b"], nodes));
    }
    let mut tower = vec![function("T0", &["a"], &["b"], vec![node("Pair", &["a"], &["b"])])];
    for level in 1..=5000 {
        let nodes = vec![call(&format!("T{}", level - 1), &["a"], &["b"])];
        tower.push(function(&format!("T{level}"), &["a"], &["b"], nodes));
    }
    let cases = [
        ("Own", vec![own], "calls itself"),
        ("Ping", vec![ping, pong], "calls itself"),
        ("F40", bomb, "add too many nodes"),
        ("T5000", tower, "nested too deep"),
    ];
    for (name, functions, part) in cases {
        let error = load(with_functions(model(vec![call(name, &["x"], &["y"])], &["x"], &["y"]), functions))
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidGraph, "{name}: {error}");
        assert!(error.to_string().contains(part), "{name}: {error}");
    }
}

#[test]
fn wrong_calls_are_refused() {
    let body = || function("Body", &["a"], &["c"], vec![node("Pair", &["a"], &["c"])]);
    let never = function("Body", &["a"], &["c"], vec![node("Pair", &["a"], &["d"])]);
    let cases = [
        (call("Body", &["x", "x"], &["y"]), body(), "takes 1 inputs"),
        (call("Body", &["x"], &["y", "z"]), body(), "has 1 outputs"),
        (call("Body", &["x"], &["y"]), never, "never writes its output 'c'"),
    ];
    for (node, function, part) in cases {
        let error = load(with_functions(model(vec![node], &["x"], &["y"]), vec![function])).unwrap_err();
        assert!(error.to_string().contains(part), "{error}");
    }
}
