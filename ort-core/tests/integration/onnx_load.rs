//! What loading makes of well-formed models.

use crate::onnx_support::*;
use bytes::Bytes;
use ort_core::dim::Dim;
use ort_core::dtype::DType;
use ort_core::ir::{Attribute, ValueType};
use ort_core::onnx::proto::attribute_proto::AttributeType;
use ort_core::onnx::proto::*;
use ort_core::onnx::{ExternalData, Source, load_proto, unknown_operators};
use prost::Message;

#[test]
fn nodes_are_put_in_order() {
    let nodes = vec![
        node("Pair", &["b", "c"], &["y"]),
        node("Pair", &["b"], &["c"]),
        node("Pair", &["x"], &["a"]),
        node("Pair", &["a"], &["b"]),
    ];
    let graph = load(model(nodes, &["x"], &["y"])).unwrap();
    assert_eq!(lines(&graph), ["a = Pair(x)", "b = Pair(a)", "c = Pair(b)", "y = Pair(b, c)"]);
}

#[test]
fn types_and_dimensions_are_read() {
    let mut graph = graph(vec![node("Pair", &["x"], &["y"])], &[], &["y"]);
    graph.input = vec![value("x", &["batch", "", "3*seq", "5"])];
    let graph = load(model_of(graph)).unwrap();
    let ValueType::Tensor(ty) = &graph.value(graph.inputs[0]).ty else { panic!("not a tensor") };
    assert_eq!(ty.dtype, DType::F32);
    let expected = [Dim::parse("batch"), Dim::named("x.1"), Dim::parse("3*seq"), Dim::constant(5)];
    assert_eq!(ty.shape.as_deref().unwrap(), expected);
}

#[test]
fn names_are_filled_in_and_made_unique() {
    let mut nodes = vec![
        node("Pair", &["x"], &["a"]),
        node("Pair", &["a"], &["b"]),
        node("Pair", &["b"], &["c"]),
        node("Pair", &["c"], &["y"]),
    ];
    nodes[0].name = None;
    nodes[1].name = Some("twin".into());
    nodes[2].name = Some("twin".into());
    nodes[3].name = Some("twin_2".into());
    let graph = load(model(nodes, &["x"], &["y"])).unwrap();
    let names: Vec<&str> = graph.nodes.iter().map(|node| &*node.name).collect();
    assert_eq!(names, ["Pair_0", "twin", "twin_2", "twin_2_2"]);
}

#[test]
fn attributes_are_typed_and_default() {
    let float = AttributeProto { f: Some(2.5), ..attribute("alpha", AttributeType::Float) };
    let ints = AttributeProto { ints: vec![1, -2], ..attribute("ints", AttributeType::Ints) };
    let floats = AttributeProto { floats: vec![0.5], ..attribute("floats", AttributeType::Floats) };
    let strings = AttributeProto {
        strings: vec![Bytes::from("a"), Bytes::from("b")],
        ..attribute("strings", AttributeType::Strings)
    };
    let tensor = AttributeProto {
        t: Some(Box::new(weight("", &[7.0]))),
        ..attribute("tensor", AttributeType::Tensor)
    };
    let ty = AttributeProto {
        tp: Some(Box::new(value("", &["2"]).r#type.unwrap())),
        ..attribute("type", AttributeType::TypeProto)
    };
    let full =
        [float, ints, floats, strings, tensor, ty].into_iter().fold(node("Pair", &["x"], &["y"]), with);
    let graph = load(model(vec![full], &["x"], &["y"])).unwrap();
    let attrs = &graph.nodes[0].attrs;
    assert_eq!(attrs.float("alpha").unwrap(), 2.5);
    assert_eq!(attrs.ints("ints").unwrap(), [1, -2]);
    assert_eq!(attrs.floats("floats").unwrap(), [0.5]);
    assert_eq!(attrs.strings("strings").unwrap(), ["a", "b"]);
    assert_eq!(attrs.tensor("tensor").unwrap().to_vec::<f32>().unwrap(), [7.0]);
    assert_eq!(attrs.value_type("type").unwrap().to_string(), "float[2]");
    assert_eq!(attrs.int("axis").unwrap(), -1, "a default");
}

#[test]
fn attributes_without_a_kind_are_recognised_by_their_field() {
    let untyped = |name: &str| AttributeProto { name: Some(name.into()), ..AttributeProto::default() };
    let attributes = [
        AttributeProto { f: Some(2.5), ..untyped("alpha") },
        AttributeProto { i: Some(0), ..untyped("axis") },
        AttributeProto { s: Some(Bytes::from("old")), ..untyped("mode") },
        untyped("ints"),
    ];
    let full = attributes.into_iter().fold(node("Pair", &["x"], &["y"]), with);
    let graph = load(model(vec![full], &["x"], &["y"])).unwrap();
    let attrs = &graph.nodes[0].attrs;
    assert_eq!((attrs.float("alpha").unwrap(), attrs.int("axis").unwrap()), (2.5, 0));
    assert_eq!(attrs.string("mode").unwrap(), "old");
    assert!(attrs.ints("ints").unwrap().is_empty());
}

#[test]
fn old_nodes_are_upgraded() {
    for (version, alpha, mode) in
        [(1, 0.25, "upgraded"), (2, 1.0, "upgraded"), (3, 1.0, "plain"), (9, 1.0, "plain")]
    {
        let slope = AttributeProto { f: Some(0.25), ..attribute("slope", AttributeType::Float) };
        let old = node("Pair", &["x"], &["y"]);
        let old = if version == 1 { with(old, slope) } else { old };
        let mut model = model(vec![old], &["x"], &["y"]);
        model.opset_import = vec![opset(TEST, version)];
        let graph = load(model).unwrap();
        let attrs = &graph.nodes[0].attrs;
        assert_eq!(
            (attrs.float("alpha").unwrap(), attrs.string("mode").unwrap()),
            (alpha, mode),
            "version {version}"
        );
    }
}

#[test]
fn a_retired_operator_becomes_another() {
    let graph = load(model(vec![node("OldTriangle", &["x"], &["y"])], &["x"], &["y"])).unwrap();
    assert_eq!(lines(&graph), ["y = Trilu(x)"]);
    assert_eq!(graph.nodes[0].attrs.int("upper").unwrap(), 0);
}

#[test]
fn constant_nodes_become_constants() {
    let tensor = AttributeProto {
        t: Some(Box::new(weight("", &[1.0, 2.0]))),
        ..attribute("value", AttributeType::Tensor)
    };
    let int = AttributeProto { i: Some(3), ..attribute("value_int", AttributeType::Int) };
    let ints = AttributeProto { ints: vec![4, 5], ..attribute("value_ints", AttributeType::Ints) };
    let text =
        AttributeProto { s: Some(Bytes::from("hi")), ..attribute("value_string", AttributeType::String) };
    let nodes = vec![
        with(node("Constant", &[], &["a"]), tensor),
        with(node("Constant", &[], &["b"]), int),
        with(node("Constant", &[], &["c"]), ints),
        with(node("Constant", &[], &["d"]), text),
        node("Pair", &["a", "a"], &["y"]),
    ];
    let graph = load(model(nodes, &["x"], &["y", "b", "c", "d"])).unwrap();
    assert_eq!(lines(&graph), ["y = Pair(a, a)"]);
    let constant = |name: &str| &graph.constants[&graph.find_value(name).unwrap()];
    assert_eq!(constant("a").to_vec::<f32>().unwrap(), [1.0, 2.0]);
    assert_eq!((constant("b").shape(), constant("b").to_vec::<i64>().unwrap()), (&[][..], vec![3]));
    assert_eq!(constant("c").to_vec::<i64>().unwrap(), [4, 5]);
    assert_eq!(constant("d").strings().unwrap(), ["hi"]);
}

#[test]
fn initializers_among_the_inputs_are_defaults_or_constants() {
    for (ir_version, inputs, defaults, constants) in [(8, 2, 1, 1), (4, 2, 1, 1), (3, 1, 0, 2)] {
        let mut graph = graph(
            vec![node("Pair", &["x", "w"], &["a"]), node("Pair", &["a", "v"], &["y"])],
            &["x", "w"],
            &["y"],
        );
        graph.initializer = vec![weight("w", &[1.0]), weight("v", &[2.0])];
        let mut model = model_of(graph);
        model.ir_version = Some(ir_version);
        let graph = load(model).unwrap();
        let counts = (graph.inputs.len(), graph.input_defaults.len(), graph.constants.len());
        assert_eq!(counts, (inputs, defaults, constants), "IR version {ir_version}");
    }
}

/// The initializer `w`.
fn sparse_weight() -> SparseTensorProto {
    let mut indices = weight("", &[]);
    indices.data_type = Some(7);
    indices.dims = vec![2];
    indices.raw_data = None;
    indices.int64_data = vec![1, 5];
    SparseTensorProto { values: Some(weight("w", &[3.0, 4.0])), indices: Some(indices), dims: vec![2, 3] }
}

#[test]
fn sparse_initializers_become_dense() {
    let mut graph = graph(vec![node("Pair", &["x", "w"], &["y"])], &["x"], &["y"]);
    graph.sparse_initializer = vec![sparse_weight()];
    let graph = load(model_of(graph)).unwrap();
    let dense = &graph.constants[&graph.find_value("w").unwrap()];
    assert_eq!(
        (dense.shape(), dense.to_vec::<f32>().unwrap()),
        (&[2, 3][..], vec![0.0, 3.0, 0.0, 0.0, 0.0, 4.0])
    );
}

/// Else the body would wait for `w` around it, and that for the body.
#[test]
fn initializers_of_a_body_hide_names_around_it() {
    let body = || graph(vec![node("Pair", &["x", "w"], &["r"])], &[], &["r"]);
    let dense = GraphProto { initializer: vec![weight("w", &[1.0])], ..body() };
    let sparse = GraphProto { sparse_initializer: vec![sparse_weight()], ..body() };
    for body in [dense, sparse] {
        let run = with(node("Run", &[], &["a"]), graph_attribute("body", body));
        let graph = load(model(vec![run, node("Pair", &["a"], &["w"])], &["x"], &["w"])).unwrap();
        assert_eq!(lines(&graph), ["a = Run()", "w = Pair(a)"]);
    }
}

#[test]
fn subgraphs_capture_what_they_read() {
    let mut inner =
        graph(vec![node("Pair", &["x", "w"], &["i"]), node("Pair", &["i", "a"], &["r"])], &[], &["r"]);
    inner.initializer = vec![weight("own", &[1.0])];
    let middle = graph(vec![with(node("Run", &[], &["m"]), graph_attribute("body", inner))], &[], &["m"]);
    let mut main = graph(
        // The body reads `a`, which the file only defines after it.
        vec![with(node("Run", &[], &["y"]), graph_attribute("body", middle)), node("Pair", &["x"], &["a"])],
        &["x"],
        &["y"],
    );
    main.initializer = vec![weight("w", &[9.0])];
    let graph = load(model_of(main)).unwrap();
    assert_eq!(lines(&graph), ["a = Pair(x)", "y = Run()"]);
    let middle = &graph.nodes[1].subgraphs[0];
    let names = |graph: &ort_core::ir::Graph, ids: Vec<ort_core::ir::ValueId>| -> Vec<String> {
        ids.into_iter().map(|id| graph.value(id).name.to_string()).collect()
    };
    assert_eq!(names(&graph, middle.captures.iter().map(|capture| capture.outer).collect()), ["x", "a"]);
    let inner = &middle.graph.nodes[0].subgraphs[0];
    assert_eq!(
        names(&middle.graph, inner.captures.iter().map(|capture| capture.outer).collect()),
        ["x", "a"]
    );
    assert_eq!(lines(&inner.graph), ["i = Pair(x, w)", "r = Pair(i, a)"]);
    let shared = &inner.graph.constants[&inner.graph.find_value("w").unwrap()];
    let outer = &graph.constants[&graph.find_value("w").unwrap()];
    assert_eq!(shared.bytes().unwrap().as_ptr(), outer.bytes().unwrap().as_ptr(), "constants share memory");
}

#[test]
fn a_subgraph_may_hide_outer_names() {
    let body = graph(vec![node("Pair", &["x"], &["a"])], &["x"], &["a"]);
    let nodes =
        vec![node("Pair", &["x"], &["a"]), with(node("Run", &["a"], &["y"]), graph_attribute("body", body))];
    let graph = load(model(nodes, &["x"], &["y"])).unwrap();
    assert!(graph.nodes[1].subgraphs[0].captures.is_empty());
}

#[test]
fn outputs_left_out_and_inputs_left_out_keep_their_places() {
    let mut nodes = vec![node("Pair", &["x", ""], &["", "y"])];
    nodes[0].name = None;
    let graph = load(model(nodes, &["x"], &["y"])).unwrap();
    assert_eq!(lines(&graph), ["_, y = Pair(x)"]);
}

#[test]
fn a_graph_of_inputs_and_constants_alone_loads() {
    let mut graph = graph(vec![], &["x"], &["x", "w"]);
    graph.initializer = vec![weight("w", &[1.0])];
    let graph = load(model_of(graph)).unwrap();
    assert_eq!((graph.nodes.len(), graph.outputs.len()), (0, 2));
}

#[test]
fn unknown_operators_are_all_named_at_once() {
    let foreign = |op: &str, output: &str| NodeProto {
        domain: Some("com.example".into()),
        ..node(op, &["x"], &[output])
    };
    let body = graph(vec![foreign("Foo", "r")], &[], &["r"]);
    let nodes = vec![
        foreign("Foo", "a"),
        foreign("Bar", "b"),
        with(node("Run", &[], &["y"]), graph_attribute("body", body)),
        node("Pair", &["a", "b"], &["z"]),
    ];
    let model = model(nodes, &["x"], &["y", "z"]);
    let unknown = unknown_operators(&model).unwrap();
    let found: Vec<(&str, usize, &str)> =
        unknown.iter().map(|operator| (&*operator.op, operator.count, &*operator.first_node)).collect();
    assert_eq!(found, [("Foo", 2, "foo_a"), ("Bar", 1, "bar_b")]);
    let error = load(model).unwrap_err();
    assert_eq!(error.kind(), ort_core::ErrorKind::InvalidGraph);
    let text = error.to_string();
    for part in [
        "No opset import for domain 'com.example' of operator Foo (domain com.example, 2 nodes, first 'foo_a')",
        "operator Bar (domain com.example, 1 node",
    ] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn a_file_keeps_its_mapping_and_tells_about_itself() {
    let mut graph = graph(vec![node("Pair", &["x", "w"], &["y"])], &["x"], &["y"]);
    graph.initializer = vec![weight("w", &[1.0; 100])];
    let mut model = model_of(graph);
    model.producer_name = Some("by hand".into());
    model.metadata_props = vec![StringStringEntryProto { key: Some("k".into()), value: Some("v".into()) }];
    let folder = tempfile::TempDir::new().unwrap();
    let path = folder.path().join("model.onnx");
    std::fs::write(&path, model.encode_to_vec()).unwrap();
    let loaded = ort_core::onnx::load(&Source::open(&path, Default::default()).unwrap()).unwrap();
    assert_eq!(loaded.info.producer_name, "by hand");
    assert_eq!(loaded.info.opsets[1], (TEST.to_string(), 3));
    assert_eq!(loaded.info.metadata, [("k".to_string(), "v".to_string())]);
    let weight = loaded.graph.constants.values().next().unwrap();
    assert!(loaded.mappings[0].contains(weight.bytes().unwrap()), "the weight was copied");
}

#[test]
fn typed_data_is_taken_over() {
    let mut weight = weight("w", &[]);
    (weight.raw_data, weight.float_data, weight.dims) = (None, vec![1.0, 2.0], vec![2]);
    let mut graph = graph(vec![node("Pair", &["x", "w"], &["y"])], &["x"], &["y"]);
    graph.initializer = vec![weight];
    let loaded = load_proto(model_of(graph), ExternalData::unavailable()).unwrap();
    let weight = loaded.graph.constants.values().next().unwrap();
    assert_eq!(weight.to_vec::<f32>().unwrap(), [1.0, 2.0]);
    let _: Option<&Attribute> = loaded.graph.nodes[0].attrs.get("alpha");
}
