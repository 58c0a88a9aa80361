//! What is saved loads again as the same graph, and files appear whole or not at all.

use crate::onnx_support::*;
use ort_core::Result;
use ort_core::ir::{Attribute, Attributes, Graph, ValueId};
use ort_core::onnx::proto::attribute_proto::AttributeType;
use ort_core::onnx::proto::*;
use ort_core::onnx::{ExternalData, FileAccess, ModelInfo, Source, Weights, load_proto};
use tempfile::TempDir;

/// A graph with weights of several sizes, attributes, left-out values, captures and a default.
fn sample() -> Graph {
    let mut body =
        graph(vec![node("Pair", &["x", "w"], &["i"]), node("Pair", &["i", "a"], &["r"])], &[], &["r"]);
    body.initializer = vec![weight("own", &[1.0, 2.0])];
    let ints = AttributeProto { ints: vec![1, -2], ..attribute("ints", AttributeType::Ints) };
    let tensor = AttributeProto {
        t: Some(Box::new(weight("", &[7.0]))),
        ..attribute("tensor", AttributeType::Tensor)
    };
    let ty = value("", &["2", "n"]).r#type.map(Box::new);
    let ty = AttributeProto { tp: ty, ..attribute("type", AttributeType::TypeProto) };
    let nodes = vec![
        [ints, tensor, ty].into_iter().fold(node("Pair", &["x", "d"], &["", "a"]), with),
        with(node("Run", &[], &["y"]), graph_attribute("body", body)),
        node("Pair", &["a", "big"], &["z"]),
    ];
    let mut main = graph(nodes, &["x", "d"], &["y", "z"]);
    main.initializer = vec![weight("w", &[9.0]), weight("big", &[0.5; 5000]), weight("d", &[4.0; 30])];
    load(model_of(main)).unwrap()
}

/// Everything of a graph as text, weights included.
fn fingerprint(graph: &Graph) -> String {
    let summary =
        |elements: &[f32]| format!("{} elements, sum {}", elements.len(), elements.iter().sum::<f32>());
    let mut text = graph.to_string();
    let mut constants: Vec<(ValueId, Vec<f32>)> =
        graph.constants.iter().map(|(id, tensor)| (*id, tensor.to_vec::<f32>().unwrap())).collect();
    constants.sort_by_key(|(id, _)| graph.value(*id).name.clone());
    for (id, elements) in constants {
        text += &format!("{} = {}\n", graph.value(id).name, summary(&elements));
    }
    for (id, tensor) in &graph.input_defaults {
        text +=
            &format!("{} defaults to {}\n", graph.value(*id).name, summary(&tensor.to_vec::<f32>().unwrap()));
    }
    for subgraph in graph.nodes.iter().flat_map(|node| &node.subgraphs) {
        let captures = subgraph.captures.iter().map(|capture| &graph.value(capture.outer).name);
        text += &format!("captures {:?}\n{}", captures.collect::<Vec<_>>(), fingerprint(&subgraph.graph));
    }
    text
}

fn save(graph: &Graph, path: &std::path::Path, weights: &Weights) -> Result<()> {
    ort_core::onnx::save(graph, &ModelInfo::default(), path, weights)
}

fn reload(path: &std::path::Path) -> Graph {
    ort_core::onnx::load(&Source::open(path, FileAccess::default()).unwrap()).unwrap().graph
}

#[test]
fn a_saved_graph_loads_as_it_was() {
    let folder = TempDir::new().unwrap();
    let graph = sample();
    for (name, weights, data_file) in [
        ("inside.onnx", Weights::Inside, false),
        ("beside.onnx", Weights::Beside { least: 0 }, true),
        ("large.onnx", Weights::Beside { least: 1024 }, true),
        ("none.onnx", Weights::Beside { least: 1 << 30 }, false),
    ] {
        let path = folder.path().join(name);
        save(&graph, &path, &weights).unwrap();
        assert_eq!(fingerprint(&reload(&path)), fingerprint(&graph), "{name}");
        assert_eq!(folder.path().join(format!("{name}.data")).exists(), data_file, "{name}");
    }
    let names = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
    let temporary: Vec<_> = names.filter(|name| name.to_string_lossy().contains("tmp")).collect();
    assert!(temporary.is_empty(), "left behind: {temporary:?}");
}

/// Rewrites mark nodes with attributes that the standard does not have.
#[test]
fn internal_attributes_stay_out_of_files() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("model.onnx");
    let mut graph = sample();
    let plain = fingerprint(&graph);
    let first = graph.nodes.first_mut().unwrap();
    let mut attrs: Vec<(String, Attribute)> =
        first.attrs.iter().map(|(name, value)| (name.to_owned(), value.clone())).collect();
    attrs.push(("mark".to_owned(), Attribute::Int(1)));
    first.attrs = Attributes::new(first.spec, attrs).unwrap();
    assert_ne!(fingerprint(&graph), plain);
    save(&graph, &path, &Weights::Inside).unwrap();
    assert_eq!(fingerprint(&reload(&path)), plain);
    let mark = AttributeProto { i: Some(1), ..attribute("mark", AttributeType::Int) };
    let refused = load(model(vec![with(node("Pair", &["x"], &["y"]), mark)], &["x"], &["y"]));
    let problem = refused.unwrap_err().to_string();
    assert!(problem.contains("Unrecognized attribute: mark for operator"), "{problem}");
}

#[test]
fn a_second_name_of_a_weight_adds_no_bytes() {
    // The copies are read by a node, read in a body, an output, and an output of a body.
    let body = graph(
        vec![node("Identity", &["w"], &["inner"]), node("Pair", &["inner", "copy"], &["r"])],
        &[],
        &["r", "inner"],
    );
    let nodes = vec![
        node("Identity", &["w"], &["copy"]),
        node("Identity", &["copy"], &["out"]),
        with(node("Run", &[], &["y", "i"]), graph_attribute("body", body)),
        node("Pair", &["x", "copy"], &["z"]),
        node("Pair", &["x", "equal"], &["e"]),
    ];
    let numbers = [0.5; 5000];
    let mut main = graph(nodes, &["x"], &["y", "i", "z", "out", "e"]);
    // `equal` has bytes of its own.
    main.initializer = vec![weight("w", &numbers), weight("equal", &numbers)];
    let folder = TempDir::new().unwrap();
    let (first, second) = (folder.path().join("first.onnx"), folder.path().join("second.onnx"));
    let loaded = load_proto(model_of(main), ExternalData::unavailable()).unwrap();
    let expected = fingerprint(&loaded.graph);
    ort_core::onnx::save(&loaded.graph, &loaded.info, &first, &Weights::Inside).unwrap();
    let names = |path: &std::path::Path| -> Vec<String> {
        let model = Source::open(path, FileAccess::default()).unwrap().decode().unwrap();
        model.graph.unwrap().initializer.iter().map(|it| it.name().to_string()).collect()
    };
    assert_eq!(names(&first), ["w", "equal"]);
    let size = std::fs::metadata(&first).unwrap().len();
    assert!((40_000..44_000).contains(&size), "{size} bytes for two weights of 20,000");
    // Saved again, the file holds the same.
    let again = ort_core::onnx::load(&Source::open(&first, FileAccess::default()).unwrap()).unwrap();
    ort_core::onnx::save(&again.graph, &again.info, &second, &Weights::Inside).unwrap();
    assert_eq!(names(&second), ["w", "equal"]);
    for graph in [&again.graph, &reload(&second)] {
        let outputs: Vec<&str> = graph.outputs.iter().map(|id| &*graph.value(*id).name).collect();
        assert_eq!(outputs, ["y", "i", "z", "out", "e"]);
        assert_eq!(graph.constants[&graph.outputs[3]].to_vec::<f32>().unwrap(), numbers);
    }
    assert!(expected.contains("out = 5000 elements"), "{expected}");
}

#[test]
fn buffers_that_pytorch_marks_stay_marked() {
    let mut main = graph(
        vec![node("Pair", &["x", "w"], &["y"]), node("Pair", &["b", "c"], &["z"])],
        &["x"],
        &["y", "z"],
    );
    main.initializer = vec![weight("w", &[1.0]), weight("b", &[2.0]), weight("c", &[3.0])];
    // As `torch.onnx.export(..., dynamo=True)` writes them.
    main.value_info = [("w", "PARAMETER"), ("b", "BUFFER"), ("c", "CONSTANT_TENSOR")]
        .map(|(name, kind)| {
            let entry = |key: &str, value: &str| StringStringEntryProto {
                key: Some(key.into()),
                value: Some(value.into()),
            };
            let metadata_props = vec![
                entry("pkg.torch.export.graph_signature.InputSpec.kind", kind),
                entry("pkg.torch.export.graph_signature.InputSpec.persistent", "True"),
            ];
            ValueInfoProto { metadata_props, ..value(name, &["1"]) }
        })
        .to_vec();
    let loaded = load_proto(model_of(main), ExternalData::unavailable()).unwrap();
    assert_eq!(loaded.info.buffers, ["b", "c"]);
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("model.onnx");
    ort_core::onnx::save(&loaded.graph, &loaded.info, &path, &Weights::Inside).unwrap();
    let again = ort_core::onnx::load(&Source::open(&path, FileAccess::default()).unwrap()).unwrap();
    assert_eq!(again.info.buffers, ["b", "c"]);
    assert_eq!(fingerprint(&again.graph), fingerprint(&loaded.graph));
}

#[test]
fn large_weights_start_at_pages() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("model.onnx");
    save(&sample(), &path, &Weights::Beside { least: 0 }).unwrap();
    let model = Source::open(&path, FileAccess::default()).unwrap().decode().unwrap();
    let mut offsets = Vec::new();
    for tensor in model.graph.unwrap().initializer {
        let find = |key: &str| {
            let entry = tensor.external_data.iter().find(|entry| entry.key() == key).unwrap();
            entry.value().parse::<usize>().unwrap()
        };
        offsets.push((tensor.name().to_string(), find("offset"), find("length")));
    }
    assert_eq!(offsets.iter().map(|(name, ..)| name.as_str()).collect::<Vec<_>>(), ["w", "big", "d"]);
    assert!(offsets.iter().all(|(_, offset, length)| offset % if *length >= 4096 { 4096 } else { 64 } == 0));
    assert!(offsets.windows(2).all(|pair| pair[0].1 + pair[0].2 <= pair[1].1), "{offsets:?}");
}

#[test]
fn a_model_can_be_saved_over_the_file_it_is_mapped_from() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("model.onnx");
    save(&sample(), &path, &Weights::Beside { least: 0 }).unwrap();
    let mapped = reload(&path);
    let before = fingerprint(&mapped);
    save(&mapped, &path, &Weights::Beside { least: 0 }).unwrap();
    assert_eq!(fingerprint(&mapped), before);
    assert_eq!(fingerprint(&reload(&path)), before);
}

#[test]
fn a_save_that_fails_leaves_what_was_there() {
    let folder = TempDir::new().unwrap();
    let missing = folder.path().join("missing/model.onnx");
    assert!(save(&sample(), &missing, &Weights::Inside).is_err());
    // The data file's name is taken by a folder, so the model must not be written either.
    let path = folder.path().join("model.onnx");
    std::fs::write(&path, b"old").unwrap();
    std::fs::create_dir(folder.path().join("model.onnx.data")).unwrap();
    assert!(save(&sample(), &path, &Weights::Beside { least: 0 }).is_err());
    assert_eq!(std::fs::read(&path).unwrap(), b"old");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2, "temporary files are left");
}

#[test]
fn constants_that_share_memory_are_written_once() {
    let model = ort_core::onnx::to_proto(&sample(), &ModelInfo::default()).unwrap();
    let graph = model.graph.unwrap();
    let inner = graph.node[1].attribute[0].g.as_ref().unwrap();
    assert_eq!(inner.initializer.iter().map(|tensor| tensor.name()).collect::<Vec<_>>(), ["own"]);
    assert_eq!(inner.node[0].input, ["x", "w"]);
}

#[test]
fn operator_sets_are_raised_as_far_as_upgrades_lead() {
    let graph =
        load(model(vec![node("Pair", &["x"], &["a"]), node("Trilu", &["a"], &["y"])], &["x"], &["y"]))
            .unwrap();
    let from = |opsets: &[(&str, i64)]| {
        let opsets = opsets.iter().map(|(domain, version)| (domain.to_string(), *version)).collect();
        let metadata = vec![("k".to_string(), "v".to_string())];
        let info = ModelInfo { opsets, metadata, ..ModelInfo::default() };
        let proto = ort_core::onnx::to_proto(&graph, &info).unwrap();
        assert_eq!(ModelInfo::of(&proto).metadata, info.metadata);
        ModelInfo::of(&proto).opsets
    };
    let expect = |standard, test| vec![(String::new(), standard), (TEST.to_string(), test)];
    assert_eq!(from(&[]), expect(21, 3), "from no file");
    assert_eq!(from(&[("ai.onnx", 14), (TEST, 1)]), expect(21, 3));
    assert_eq!(from(&[("", 23), (TEST, 9)]), expect(23, 9));
}

#[test]
fn descriptions_are_kept() {
    let graph = load(model(vec![node("Pair", &["x"], &["y"])], &["x"], &["y"])).unwrap();
    let info = ModelInfo {
        description: "what the model is".into(),
        graph_description: "what the graph is".into(),
        ..ModelInfo::default()
    };
    let kept = ModelInfo::of(&ort_core::onnx::to_proto(&graph, &info).unwrap());
    assert_eq!(kept.description, info.description);
    assert_eq!(kept.graph_description, info.graph_description);
    let none = ort_core::onnx::to_proto(&graph, &ModelInfo::default()).unwrap();
    assert_eq!((none.doc_string, none.graph.unwrap().doc_string), (None, None));
}

#[test]
fn names_of_subgraphs_do_not_hide_outer_ones() {
    let body = graph(vec![node("Pair", &["x"], &["a"])], &["x"], &["a"]);
    let nodes =
        vec![node("Pair", &["x"], &["a"]), with(node("Run", &["a"], &["y"]), graph_attribute("body", body))];
    let graph = load(model(nodes, &["x"], &["y"])).unwrap();
    let proto = ort_core::onnx::to_proto(&graph, &ModelInfo::default()).unwrap().graph.unwrap();
    let inner = proto.node[1].attribute[0].g.as_ref().unwrap();
    assert_eq!((inner.input[0].name(), inner.output[0].name()), ("x_2", "a_2"));
    assert_eq!(inner.node[0].input, ["x_2"]);
}
