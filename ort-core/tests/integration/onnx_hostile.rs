//! Models that contradict the standard: one clear error each, with the place.

use crate::onnx_support::*;
use bytes::Bytes;
use ort_core::ErrorKind::{self, Fail, InvalidArgument, InvalidGraph};
use ort_core::onnx::proto::attribute_proto::AttributeType;
use ort_core::onnx::proto::*;

type Case = (&'static str, ModelProto, ErrorKind, &'static [&'static str]);

fn simple(nodes: Vec<NodeProto>) -> ModelProto {
    model(nodes, &["x"], &["y"])
}

fn with_weight(change: impl Fn(&mut TensorProto)) -> ModelProto {
    let mut tensor = weight("w", &[1.0, 2.0]);
    change(&mut tensor);
    let mut graph = graph(vec![node("Pair", &["x", "w"], &["y"])], &["x"], &["y"]);
    graph.initializer = vec![tensor];
    model_of(graph)
}

fn with_attribute(attribute: AttributeProto) -> ModelProto {
    simple(vec![with(node("Pair", &["x"], &["y"]), attribute)])
}

fn changed(change: impl Fn(&mut ModelProto)) -> ModelProto {
    let mut model = simple(vec![node("Pair", &["x"], &["y"])]);
    change(&mut model);
    model
}

fn graph_cases() -> Vec<Case> {
    let body = |input: &str| graph(vec![node("Pair", &[input], &["r"])], &[], &["r"]);
    vec![
        (
            "cycle",
            simple(vec![
                node("Pair", &["x", "b"], &["a"]),
                node("Pair", &["a"], &["b"]),
                node("Pair", &["b"], &["y"]),
            ]),
            Fail,
            &["not acyclic", "pair_a -> pair_b -> pair_a"],
        ),
        ("self loop", simple(vec![node("Pair", &["y"], &["y"])]), Fail, &["not acyclic", "pair_y -> pair_y"]),
        (
            "cycle through a subgraph",
            simple(vec![with(node("Run", &[], &["y"]), graph_attribute("body", body("y")))]),
            Fail,
            &["not acyclic"],
        ),
        (
            "dangling input",
            simple(vec![node("Pair", &["x", "nowhere"], &["y"])]),
            InvalidArgument,
            &["node 'pair_y' (Pair) > input 1", "'nowhere'"],
        ),
        (
            "dangling input of a subgraph",
            simple(vec![with(node("Run", &[], &["y"]), graph_attribute("body", body("nowhere")))]),
            InvalidGraph,
            &["node 'run_y' (Run) > body > node 'pair_r' (Pair) > input 0", "topologically sorted"],
        ),
        (
            "dangling output",
            simple(vec![node("Pair", &["x"], &["z"])]),
            Fail,
            &["Graph output (y) does not exist in the graph"],
        ),
        (
            "value written twice",
            simple(vec![node("Pair", &["x"], &["y"]), node("Trilu", &["x"], &["y"])]),
            Fail,
            &["Duplicate definition of name (y)", "node 'trilu_y'", "node 'pair_y' writes it too"],
        ),
        (
            "input written",
            simple(vec![node("Pair", &["x"], &["x"])]),
            Fail,
            &["Duplicate definition of name (x)"],
        ),
        ("input twice", model(vec![], &["x", "x"], &["x"]), Fail, &["Duplicate definition-site for (x)"]),
        ("too many inputs", simple(vec![node("Pair", &["x", "x", "x"], &["y"])]), InvalidGraph, &["pair_y"]),
        (
            "too few inputs",
            simple(vec![node("Pair", &[], &["y"])]),
            InvalidGraph,
            &["pair_y", "size 0 not in range [min=1, max=2]"],
        ),
        ("no such operator", simple(vec![node("Nothing", &["x"], &["y"])]), Fail, &["Nothing", "nothing_y"]),
        ("no operator name", simple(vec![node("", &["x"], &["y"])]), InvalidGraph, &["domain test"]),
        (
            "no operator set",
            changed(|model| model.opset_import.clear()),
            Fail,
            &["Missing opset in the model", "domain 'test'"],
        ),
        (
            "operator set 0",
            changed(|model| model.opset_import = vec![opset(TEST, 0)]),
            InvalidGraph,
            &["version 0"],
        ),
        (
            "input without a type",
            changed(|model| model.graph.as_mut().unwrap().input[0].r#type = None),
            Fail,
            &["input 'x'", "does not have type information"],
        ),
        (
            "input of an unknown type",
            changed(|model| {
                let mut ty = TypeProto::default();
                let tensor = type_proto::Tensor { elem_type: Some(99), shape: None };
                ty.value = Some(type_proto::Value::TensorType(tensor));
                model.graph.as_mut().unwrap().input[0].r#type = Some(ty);
            }),
            InvalidArgument,
            &["input 'x'", "99"],
        ),
    ]
}

fn attribute_cases() -> Vec<Case> {
    vec![
        (
            "unknown attribute",
            with_attribute(attribute("stray", AttributeType::Int)),
            InvalidGraph,
            &["Unrecognized attribute: stray for operator Pair", "pair_y"],
        ),
        (
            "attribute of another kind",
            with_attribute(attribute("alpha", AttributeType::Int)),
            InvalidGraph,
            &["Mismatched attribute type in 'alpha'. Expected: 'FLOAT', actual: 'INT'"],
        ),
        (
            "attribute kind from the future",
            with_attribute(AttributeProto { r#type: Some(77), ..attribute("alpha", AttributeType::Float) }),
            InvalidGraph,
            &["Field 'type' of 'attr'", "77"],
        ),
        (
            "attribute without any value",
            with_attribute(AttributeProto { name: Some("alpha".into()), ..AttributeProto::default() }),
            InvalidGraph,
            &["Mismatched attribute type in 'alpha'", "UNDEFINED"],
        ),
        (
            "tensor attribute without a tensor",
            with_attribute(attribute("tensor", AttributeType::Tensor)),
            InvalidGraph,
            &["missing"],
        ),
        (
            "text that is not UTF-8",
            with_attribute(AttributeProto {
                s: Some(Bytes::from_static(b"\xff")),
                ..attribute("mode", AttributeType::String)
            }),
            InvalidGraph,
            &["UTF-8"],
        ),
        (
            "graph where none is known",
            with_attribute(graph_attribute("mode", graph(vec![], &["x"], &["x"]))),
            InvalidGraph,
            &["Mismatched attribute type in 'mode'. Expected: 'STRING', actual: 'GRAPH'"],
        ),
        ("subgraph left out", simple(vec![node("Run", &[], &["y"])]), InvalidGraph, &["body"]),
        (
            "constant without a value",
            simple(vec![node("Constant", &[], &["y"])]),
            InvalidGraph,
            &["exactly one value"],
        ),
    ]
}

fn weight_cases() -> Vec<Case> {
    let external = |pairs: &[(&str, &str)]| {
        let entry = |(key, value): &(&str, &str)| StringStringEntryProto {
            key: Some(key.to_string()),
            value: Some(value.to_string()),
        };
        let entries: Vec<StringStringEntryProto> = pairs.iter().map(entry).collect();
        with_weight(move |w| {
            (w.data_location, w.raw_data, w.external_data) = (Some(1), None, entries.clone())
        })
    };
    vec![
        ("negative dimension", with_weight(|w| w.dims = vec![-2]), Fail, &["tensor 'w'", "negative"]),
        ("too many elements", with_weight(|w| w.dims = vec![i64::MAX, i64::MAX]), Fail, &["tensor 'w'"]),
        ("too many bytes", with_weight(|w| w.dims = vec![i64::MAX]), Fail, &["tensor 'w'"]),
        (
            "a byte short",
            with_weight(|w| w.raw_data = Some(Bytes::from(vec![0; 7]))),
            Fail,
            &["8 bytes", "7"],
        ),
        ("a byte long", with_weight(|w| w.raw_data = Some(Bytes::from(vec![0; 9]))), Fail, &["8 bytes", "9"]),
        ("no data", with_weight(|w| w.raw_data = None), Fail, &["data field count (0)", "shape (2)"]),
        ("unknown type", with_weight(|w| w.data_type = Some(1000)), Fail, &["1000"]),
        ("undefined type", with_weight(|w| w.data_type = None), Fail, &["element type is not given"]),
        ("raw strings", with_weight(|w| w.data_type = Some(8)), Fail, &["tensor 'w'"]),
        ("unknown location", with_weight(|w| w.data_location = Some(7)), Fail, &["location 7"]),
        ("external has no location", external(&[]), Fail, &["has no location"]),
        ("external and absolute", external(&[("location", "/etc/passwd")]), Fail, &["not relative"]),
        ("external in memory", external(&[("location", "w.data")]), Fail, &["from memory"]),
        (
            "nameless",
            with_weight(|w| w.name = None),
            InvalidArgument,
            &["Node input 'w' is not a graph input"],
        ),
    ]
}

#[test]
fn each_contradiction_is_one_clear_error() {
    for (name, model, kind, parts) in graph_cases().into_iter().chain(attribute_cases()).chain(weight_cases())
    {
        let error = load(model).map(|_| ()).expect_err(name);
        let text = error.to_string();
        for part in parts {
            assert!(text.contains(part), "{name}: '{part}' is not in: {text}");
        }
        assert_eq!(error.kind(), kind, "{name}: {text}");
    }
}

#[test]
fn a_small_file_cannot_claim_much_memory() {
    let mut indices = weight("", &[]);
    (indices.data_type, indices.dims, indices.raw_data) = (Some(7), vec![1], None);
    indices.int64_data = vec![0];
    for dims in [vec![1 << 40], vec![1 << 20, 1 << 20], vec![i64::MAX, 8]] {
        let sparse = SparseTensorProto {
            values: Some(weight("w", &[1.0])),
            indices: Some(indices.clone()),
            dims: dims.clone(),
        };
        let mut graph = graph(vec![node("Pair", &["x", "w"], &["y"])], &["x"], &["y"]);
        graph.sparse_initializer = vec![sparse];
        assert!(load(model_of(graph)).is_err(), "{dims:?}");
    }
}

#[test]
fn a_long_chain_in_reverse_order_loads_quickly() {
    let count = 20_000;
    let mut nodes: Vec<NodeProto> = (0..count)
        .map(|index| node("Pair", &[&format!("v{index}")], &[&format!("v{}", index + 1)]))
        .collect();
    nodes.reverse();
    let model = model(nodes, &["v0"], &[&format!("v{count}")]);
    let start = std::time::Instant::now();
    assert_eq!(load(model).unwrap().nodes.len(), count);
    assert!(start.elapsed().as_secs() < 10, "{:?}", start.elapsed());
}
