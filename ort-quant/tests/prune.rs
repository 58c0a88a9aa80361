//! Pruned models against prototypes in NumPy, and what pruning does with layers out of the
//! ordinary.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, missing_docs)]

use std::path::{Path, PathBuf};

use half::f16;
use ort_core::onnx::proto::attribute_proto::AttributeType;
use ort_core::onnx::proto::tensor_shape_proto::{Dimension, dimension};
use ort_core::onnx::proto::{
    AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, TensorShapeProto, TypeProto,
    ValueInfoProto, type_proto,
};
use ort_core::onnx::{ExternalData, Weights, tensor_from_proto, tensor_to_proto};
use ort_core::session::{Model, Session};
use ort_core::tensor::{Tensor, Value};
use ort_ep_cpu as _;
use ort_quant::{
    Calibration, ChannelPruner, PruneCalibration, PruneMethod, PruneOutcome, PruneScope, PruneTuning,
    PrunedLayer, Pruner, Sparsity, Written,
};
use prost::Message;
use serde_json::Value as Json;

mod support;

use support::{floats, node, random, save, source, unit};

/// By NumPy.
const CASES: &str = include_str!("data/pruning.json");

fn integer(name: &str, value: i64) -> AttributeProto {
    let (name, r#type) = (Some(name.to_string()), Some(AttributeType::Int as i32));
    AttributeProto { name, r#type, i: Some(value), ..AttributeProto::default() }
}

fn integers(name: &str, values: &[usize]) -> AttributeProto {
    let (name, r#type) = (Some(name.to_string()), Some(AttributeType::Ints as i32));
    let ints = values.iter().map(|value| *value as i64).collect();
    AttributeProto { name, r#type, ints, ..AttributeProto::default() }
}

fn branch(name: &str, graph: GraphProto) -> AttributeProto {
    let (name, r#type) = (Some(name.to_string()), Some(AttributeType::Graph as i32));
    AttributeProto { name, r#type, g: Some(Box::new(graph)), ..AttributeProto::default() }
}

/// A value of a type by ONNX's code, with this shape or any.
fn typed(name: &str, code: i32, shape: Option<&[usize]>) -> ValueInfoProto {
    let dim = |size: &usize| {
        let value = Some(dimension::Value::DimValue(*size as i64));
        Dimension { value, ..Dimension::default() }
    };
    let shape = shape.map(|shape| TensorShapeProto { dim: shape.iter().map(dim).collect() });
    let tensor = type_proto::Tensor { elem_type: Some(code), shape };
    let ty = TypeProto { value: Some(type_proto::Value::TensorType(tensor)), ..TypeProto::default() };
    ValueInfoProto { name: Some(name.into()), r#type: Some(ty), ..ValueInfoProto::default() }
}

fn value(name: &str, shape: &[usize]) -> ValueInfoProto {
    typed(name, 1, Some(shape))
}

fn graph(node: Vec<NodeProto>, input: Vec<ValueInfoProto>, initializer: Vec<TensorProto>) -> GraphProto {
    let output = vec![typed("y", 1, None)];
    GraphProto { name: Some("g".into()), node, input, output, initializer, ..GraphProto::default() }
}

fn pruner(method: PruneMethod, sparsity: Sparsity) -> Pruner {
    Pruner { method, sparsity, only: Vec::new(), exclude: Vec::new(), tuning: PruneTuning::default() }
}

fn share(share: f64, scope: PruneScope) -> Sparsity {
    Sparsity::Share { share, scope }
}

/// Observes samples, in parts that take about this many bytes. Returns how many weights are tuned.
fn observe(pruner: &mut Pruner, path: &Path, samples: &[Vec<(&str, Value)>], memory: usize) -> usize {
    let session = Calibration::session(Session::builder(&Model::load(path).unwrap())).unwrap();
    let mut count = 0;
    for part in pruner.inputs(&source(path), memory).unwrap() {
        let calibration = PruneCalibration::new(&part);
        samples.iter().for_each(|sample| drop(calibration.run(&session, sample).unwrap()));
        count += pruner.observe(&source(path), &calibration.into_statistics()).unwrap();
    }
    count
}

/// Writes a model, and checks that it runs.
fn write(pruner: &Pruner, path: &Path, out: &Path) -> (Vec<PrunedLayer>, Written) {
    let source = source(path);
    let pruning = pruner.prune(&source).unwrap();
    let layers = pruning.layers().to_vec();
    let mut check = |model: &Model| Session::builder(model).build().map(drop);
    let written = pruning.write(out, &Weights::Inside, &mut check).unwrap();
    (layers, written)
}

fn weight(path: &Path, name: &str) -> Vec<f32> {
    let graph = ModelProto::decode(&*std::fs::read(path).unwrap()).unwrap().graph.unwrap();
    let proto = graph.initializer.into_iter().find(|tensor| tensor.name() == name).unwrap();
    tensor_from_proto(proto, &mut ExternalData::unavailable()).unwrap().to_vec::<f32>().unwrap()
}

fn method(layer: &PrunedLayer) -> &str {
    match &layer.outcome {
        PruneOutcome::Pruned { method, .. } => method,
        PruneOutcome::Kept { reason } => reason,
        PruneOutcome::Narrowed { .. } => panic!("{layer:?}"),
    }
}

fn sizes(case: &Json, name: &str) -> Vec<usize> {
    let list = case[name].as_array().into_iter().flatten();
    list.map(|size| size.as_u64().unwrap() as usize).collect()
}

/// The input that the script makes.
fn input(shape: &[usize], is_image: bool) -> Vec<f32> {
    let count: usize = shape.iter().product();
    let mut values: Vec<f32> = (100_000..100_000 + count).map(unit).collect();
    let axis = if is_image { 1 } else { shape.len() - 1 };
    let (channels, inner) = (shape[axis], shape[axis + 1..].iter().product::<usize>());
    for place in 0..count {
        if place / inner % channels > 0 {
            values[place] += 0.5 * values[place - inner];
        }
    }
    for (place, value) in values.iter_mut().enumerate() {
        if (place / inner % channels).is_multiple_of(3) {
            *value *= 4.0;
        }
    }
    values
}

/// The model of a case, with its input.
fn model_of(case: &Json, folder: &Path) -> (PathBuf, Value) {
    let (shape, input_shape) = (sizes(case, "shape"), sizes(case, "input"));
    let count: usize = shape.iter().product();
    let coarse = |value: f32| (value * 16.0).round_ties_even() / 8.0;
    let is_coarse = case["method"] == "magnitude";
    let values = (7..7 + count).map(unit).map(|value| if is_coarse { coarse(value) } else { value });
    let values: Vec<f32> = values.collect();
    let mut layer = node(case["operator"].as_str().unwrap(), &["x", "W"], "y");
    for name in ["group", "transB"] {
        layer.attribute.extend(case[name].as_i64().map(|number| integer(name, number)));
    }
    let is_image = case["kernel"].is_array();
    if is_image {
        for name in ["strides", "dilations", "pads"] {
            layer.attribute.push(integers(name, &sizes(case, name)));
        }
    }
    let weights = vec![floats("W", &shape, &values)];
    let path = save(folder, graph(vec![layer], vec![value("x", &input_shape)], weights));
    (path, Tensor::from_slice(&input_shape, &input(&input_shape, is_image)).unwrap().into())
}

fn sparsity_of(case: &Json) -> Sparsity {
    if let [kept, of] = sizes(case, "pattern")[..] {
        return Sparsity::Pattern { kept, of };
    }
    let scope = if case["scope"] == "row" { PruneScope::Row } else { PruneScope::Layer };
    share(case["share"].as_f64().unwrap(), scope)
}

fn method_of(case: &Json) -> PruneMethod {
    match case["method"].as_str().unwrap() {
        "magnitude" => PruneMethod::Magnitude,
        "wanda" => PruneMethod::Wanda,
        _ => PruneMethod::SparseGpt,
    }
}

#[test]
fn weights_are_those_of_prototypes() {
    let cases: Vec<Json> = serde_json::from_str(CASES).unwrap();
    assert_eq!(cases.len(), 67);
    for case in &cases {
        let folder = tempfile::tempdir().unwrap();
        let (path, x) = model_of(case, folder.path());
        let out = folder.path().join("out.onnx");
        let mut pruner = pruner(method_of(case), sparsity_of(case));
        if pruner.method != PruneMethod::Magnitude {
            assert_eq!(observe(&mut pruner, &path, &[vec![("x", x)]], usize::MAX), 1);
        }
        let (layers, written) = write(&pruner, &path, &out);
        let mut label = case.clone();
        label.as_object_mut().unwrap().retain(|name, _| name != "zeros" && name != "values");
        assert_eq!(method(&layers[0]), case["method"], "{label}");
        let found = weight(&out, "W");
        let text = case["zeros"].as_str().unwrap();
        let bit = |place: usize| {
            let digit = text.as_bytes()[place / 4] as char;
            digit.to_digit(16).unwrap() >> (3 - place % 4) & 1 == 1
        };
        let expected: Vec<bool> = (0..found.len()).map(bit).collect();
        let zeros: Vec<bool> = found.iter().map(|value| *value == 0.0).collect();
        assert_eq!(zeros, expected, "{label}");
        let values = case["values"].as_array().unwrap();
        for (found, expected) in found.iter().step_by(11).zip(values) {
            let expected = expected.as_f64().unwrap();
            assert!((f64::from(*found) - expected).abs() < 2e-4, "{label}: {found} {expected}");
        }
        // Removed elements and those that were zero before.
        let PruneOutcome::Pruned { removed, .. } = layers[0].outcome else { panic!("{label}") };
        let counted = written.zeros["W"];
        let zeros = zeros.iter().filter(|is_zero| **is_zero).count();
        assert_eq!((counted.after, counted.elements), (zeros as u64, found.len() as u64), "{label}");
        assert!(removed <= zeros && zeros <= removed.max(counted.before as usize), "{label}");
    }
}

/// Correlated inputs, of which some channels are larger: the less a method knows, the larger its
/// error.
#[test]
fn methods_that_know_more_have_lower_errors() {
    let folder = tempfile::tempdir().unwrap();
    let shape = [64, 96];
    let layer = node("MatMul", &["x", "W"], "y");
    let weights = vec![random("W", &shape, 7, 1.0)];
    let path = save(folder.path(), graph(vec![layer], vec![value("x", &[300, 64])], weights));
    let x = |seed: usize| {
        let mut values = input(&[300, 64], false);
        values.rotate_left(64 * seed);
        Value::from(Tensor::from_slice(&[300, 64], &values).unwrap())
    };
    let out = folder.path().join("out.onnx");
    for sparsity in [
        share(0.5, PruneScope::Layer),
        share(0.7, PruneScope::Row),
        Sparsity::Pattern { kept: 2, of: 4 },
        Sparsity::Pattern { kept: 4, of: 8 },
    ] {
        let run = |method: PruneMethod| {
            let mut pruner = pruner(method, sparsity);
            assert_eq!(observe(&mut pruner, &path, &[vec![("x", x(0))], vec![("x", x(7))]], usize::MAX), 1);
            let (layers, _) = write(&pruner, &path, &out);
            let PruneOutcome::Pruned { errors: Some(errors), .. } = layers[0].outcome else { panic!() };
            // The error that the report estimates is that of the outputs on the samples.
            let outputs = |path: &Path| -> Vec<f32> {
                let session = Session::builder(&Model::load(path).unwrap()).build().unwrap();
                let outputs = session.run(&[("x", x(0))]).unwrap();
                outputs[0].1.tensor().unwrap().to_vec::<f32>().unwrap()
            };
            let (before, after) = (outputs(&path), outputs(&out));
            let energy = |values: &[f32]| values.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>();
            let change: Vec<f32> = before.iter().zip(&after).map(|(one, other)| one - other).collect();
            let measured = (energy(&change) / energy(&before)).sqrt();
            assert!((measured / errors.pruned - 1.0).abs() < 0.1, "{measured} {errors:?}");
            errors
        };
        let [magnitude, wanda, sparse_gpt] =
            [PruneMethod::Magnitude, PruneMethod::Wanda, PruneMethod::SparseGpt].map(run);
        let label = format!("{sparsity:?}: {magnitude:?} {wanda:?} {sparse_gpt:?}");
        assert_eq!(magnitude.pruned, magnitude.magnitude, "{label}");
        assert_eq!((wanda.magnitude, sparse_gpt.magnitude), (magnitude.pruned, magnitude.pruned), "{label}");
        assert!(wanda.pruned < 0.9 * magnitude.pruned, "{label}");
        assert!(sparse_gpt.pruned < wanda.pruned, "{label}");
    }
}

/// One layer for each reason to stay or to be pruned by magnitude, and one of each kind that is
/// pruned.
#[test]
fn layers_out_of_the_ordinary_have_a_reason() {
    let folder = tempfile::tempdir().unwrap();
    let mut gemm = node("Gemm", &["x", "rows"], "b");
    gemm.attribute.push(integer("transB", 1));
    let mut turned = node("Gemm", &["x", "turned"], "c");
    turned.attribute.push(integer("transA", 1));
    let mut twice = node("Gemm", &["x", "twice"], "d");
    twice.attribute.push(integer("transB", 1));
    let halves: Vec<f16> = (0..64).map(|step| f16::from_f32(unit(step))).collect();
    let nodes = vec![
        node("MatMul", &["x", "columns"], "a"),
        gemm,
        turned,
        twice,
        node("MatMul", &["x", "twice"], "e"),
        node("MatMul", &["x", "table"], "f"),
        node("Gather", &["table", "ids"], "g"),
        node("MatMul", &["x", "x"], "h"),
        node("MatMul", &["x", "out"], "i"),
        node("MatMul", &["x", "excluded"], "j"),
        node("MatMul", &["hx", "half"], "k"),
        node("MatMul", &["x", "empty"], "l"),
        node("MatMul", &["dx", "double"], "m"),
        node("Conv", &["image", "odd"], "n"),
        node("ConvTranspose", &["image", "filters"], "o"),
        node("MatMul", &["x", "given"], "p"),
        node("Add", &["a", "d"], "y"),
    ];
    let inputs = vec![
        value("x", &[8, 8]),
        typed("ids", 7, Some(&[2])),
        typed("hx", 10, Some(&[2, 8])),
        typed("dx", 11, Some(&[2, 8])),
        value("image", &[1, 3, 4, 4]),
        // A default, which a caller may override.
        value("given", &[8, 8]),
    ];
    let square = |name: &str, from: usize| random(name, &[8, 8], from, 1.0);
    let weights = vec![
        square("columns", 0),
        square("rows", 900),
        square("turned", 100),
        square("twice", 200),
        square("table", 300),
        square("out", 400),
        square("excluded", 500),
        square("given", 600),
        tensor_to_proto("half", &Tensor::from_slice(&[8, 8], &halves).unwrap()).unwrap(),
        floats("empty", &[8, 0], &[]),
        tensor_to_proto("double", &Tensor::from_slice(&[8, 1], &[1.0_f64; 8]).unwrap()).unwrap(),
        random("odd", &[4, 3, 1, 1], 700, 1.0),
        random("filters", &[3, 4, 1, 1], 800, 1.0),
    ];
    let mut all = graph(nodes, inputs, weights);
    all.output.push(value("out", &[8, 8]));
    let path = save(folder.path(), all);
    let mut pruner = pruner(PruneMethod::Wanda, Sparsity::Pattern { kept: 2, of: 4 });
    pruner.exclude.push("MatMul_j".parse().unwrap());
    let layers = pruner.prune(&source(&path)).unwrap().layers().to_vec();
    let found: Vec<(&str, &str)> = layers.iter().map(|layer| (layer.node.as_str(), method(layer))).collect();
    let unseen = "magnitude: no sample says anything about its input";
    let expected = [
        ("MatMul_a", unseen),
        ("Gemm_b", unseen),
        ("Gemm_c", "magnitude: its input is transposed"),
        ("Gemm_d", "its weight has other rows in 'Gemm_d' and in 'MatMul_e'"),
        ("MatMul_e", "its weight has other rows in 'Gemm_d' and in 'MatMul_e'"),
        ("MatMul_f", "its weight is also read by 'Gather_g'"),
        ("MatMul_h", "its weight is computed"),
        ("MatMul_i", "its weight is also read as an output of the graph"),
        ("MatMul_j", "excluded by 'MatMul_j'"),
        ("MatMul_k", unseen),
        ("MatMul_l", "its weight is empty"),
        ("MatMul_m", "its weight is double"),
        ("Conv_n", "its 3 input channels per output are no multiple of 4"),
        ("ConvTranspose_o", "its 3 input channels per output are no multiple of 4"),
        ("MatMul_p", "its weight is computed"),
    ];
    assert_eq!(found, expected);
    pruner.sparsity = share(0.5, PruneScope::Row);
    let layers = pruner.prune(&source(&path)).unwrap().layers().to_vec();
    assert_eq!(method(&layers[13]), "magnitude: its outputs overlap");
    // Invalid options, and patterns of no node.
    for sparsity in [
        share(-0.1, PruneScope::Layer),
        share(1.5, PruneScope::Row),
        share(f64::NAN, PruneScope::Layer),
        Sparsity::Pattern { kept: 4, of: 4 },
        Sparsity::Pattern { kept: 0, of: 4 },
        Sparsity::Pattern { kept: 1, of: 65 },
    ] {
        pruner.sparsity = sparsity;
        assert!(pruner.prune(&source(&path)).is_err(), "{sparsity:?}");
    }
    pruner.sparsity = share(0.5, PruneScope::Row);
    pruner.only = vec!["nowhere*".parse().unwrap()];
    let problem = pruner.prune(&source(&path)).err().unwrap().to_string();
    assert!(problem.contains("matches no node"), "{problem}");
    pruner.only = vec!["op:Gather".parse().unwrap()];
    let problem = pruner.prune(&source(&path)).err().unwrap().to_string();
    assert!(problem.contains("no layer of the model can be pruned"), "{problem}");
}

/// A weight of two inputs has the statistics of both, wherever they are.
#[test]
fn shared_weights_and_branches_are_pruned_once() {
    let folder = tempfile::tempdir().unwrap();
    let body = |output: &str, factor: usize| {
        let nodes = vec![node("MatMul", &["x", "V"], "v"), node("MatMul", &["v", "S"], output)];
        let output = vec![typed(output, 1, None)];
        let initializer = vec![random("V", &[16, 16], factor, 1.0)];
        GraphProto { name: Some("b".into()), node: nodes, output, initializer, ..GraphProto::default() }
    };
    let mut choice = node("If", &["first"], "z");
    choice.attribute = vec![branch("then_branch", body("t", 500)), branch("else_branch", body("e", 900))];
    let nodes = vec![node("MatMul", &["x", "S"], "s"), choice, node("Add", &["s", "z"], "y")];
    let inputs = vec![typed("first", 9, Some(&[])), value("x", &[12, 16])];
    let path = save(folder.path(), graph(nodes, inputs, vec![random("S", &[16, 16], 0, 1.0)]));
    let values = input(&[12, 16], false);
    let sample = |first: bool| {
        vec![
            ("first", Value::from(Tensor::from_bools(&[], &[first]).unwrap())),
            ("x", Tensor::from_slice(&[12, 16], &values).unwrap().into()),
        ]
    };
    let out = folder.path().join("out.onnx");
    let mut pruner = pruner(PruneMethod::SparseGpt, share(0.5, PruneScope::Layer));
    // The branch `else` never runs.
    let count = observe(&mut pruner, &path, &[sample(true)], usize::MAX);
    let (layers, written) = write(&pruner, &path, &out);
    let names: Vec<(&str, &str)> = layers.iter().map(|layer| (layer.node.as_str(), method(layer))).collect();
    let products: Vec<&str> =
        names.iter().filter(|(node, _)| *node == "MatMul_v").map(|(_, method)| *method).collect();
    assert_eq!(products, ["sparsegpt"; 2], "both branches read x");
    assert_eq!(count, 3, "{names:?}");
    let shared: Vec<bool> = layers
        .iter()
        .filter_map(|layer| match &layer.outcome {
            PruneOutcome::Pruned { weight, is_shared, .. } if weight == "S" => Some(*is_shared),
            _ => None,
        })
        .collect();
    assert_eq!(shared, [false, true, true]);
    assert_eq!(written.zeros.len(), 3, "{:?}", written.zeros);
    for zeros in written.zeros.values() {
        assert_eq!((zeros.after, zeros.before, zeros.elements), (128, 0, 256));
    }
}

/// Without rows, or with NaN in them, samples say nothing.
#[test]
fn inputs_without_numbers_leave_magnitudes() {
    let folder = tempfile::tempdir().unwrap();
    let layer = node("MatMul", &["x", "W"], "y");
    let path = save(
        folder.path(),
        graph(vec![layer], vec![value("x", &[2, 16])], vec![random("W", &[16, 8], 0, 1.0)]),
    );
    let (plain, out) = (folder.path().join("plain.onnx"), folder.path().join("out.onnx"));
    let sparsity = share(0.5, PruneScope::Layer);
    write(&pruner(PruneMethod::Magnitude, sparsity), &path, &plain);
    let nan = [&[f32::NAN; 16][..], &[1.0; 16]].concat();
    for values in [vec![0.0; 32], nan] {
        for method_arg in [PruneMethod::Wanda, PruneMethod::SparseGpt] {
            let mut pruner = pruner(method_arg, sparsity);
            let sample = vec![("x", Value::from(Tensor::from_slice(&[2, 16], &values).unwrap()))];
            assert_eq!(observe(&mut pruner, &path, &[sample], usize::MAX), 0);
            let (layers, _) = write(&pruner, &path, &out);
            assert_eq!(method(&layers[0]), "magnitude: no sample says anything about its input");
            assert_eq!(std::fs::read(&out).unwrap(), std::fs::read(&plain).unwrap());
        }
    }
    // A Hessian that does not fit; norms do.
    let sample = vec![("x", Value::from(Tensor::from_slice(&[2, 16], &input(&[2, 16], false)).unwrap()))];
    let mut sparse_gpt = pruner(PruneMethod::SparseGpt, sparsity);
    assert_eq!(observe(&mut sparse_gpt, &path, std::slice::from_ref(&sample), 100), 0);
    let (layers, _) = write(&sparse_gpt, &path, &out);
    assert_eq!(method(&layers[0]), "magnitude: its Hessian is beyond the memory limit");
    let mut wanda = pruner(PruneMethod::Wanda, sparsity);
    assert_eq!(observe(&mut wanda, &path, &[sample], 100), 1);
    let (layers, _) = write(&wanda, &path, &out);
    assert!(matches!(&layers[0].outcome, PruneOutcome::Pruned { errors: None, .. }), "{layers:?}");
}

/// Of float16 weights, the elements that stay have the same bits.
#[test]
fn halves_and_not_finite_weights() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out.onnx");
    let halves: Vec<f16> = (0..64).map(|step| f16::from_f32(unit(step))).collect();
    let layer = node("MatMul", &["x", "W"], "y");
    let weights = vec![tensor_to_proto("W", &Tensor::from_slice(&[8, 8], &halves).unwrap()).unwrap()];
    let mut half = graph(vec![layer.clone()], vec![typed("x", 10, Some(&[2, 8]))], weights);
    half.output = vec![typed("y", 10, None)];
    let path = save(folder.path(), half);
    let (_, written) =
        write(&pruner(PruneMethod::Magnitude, Sparsity::Pattern { kept: 1, of: 4 }), &path, &out);
    assert_eq!(written.zeros["W"].after, 48);
    let graph_of = |path: &Path| ModelProto::decode(&*std::fs::read(path).unwrap()).unwrap().graph.unwrap();
    let bytes = graph_of(&out).initializer[0].raw_data.clone().unwrap();
    let found: Vec<f16> = bytes.chunks(2).map(|pair| f16::from_le_bytes([pair[0], pair[1]])).collect();
    assert!(found.iter().zip(&halves).all(|(found, given)| found == given || *found == f16::ZERO));
    for element in [f32::NAN, f32::NEG_INFINITY] {
        let mut values: Vec<f32> = (0..64).map(unit).collect();
        values[5] = element;
        let weights = vec![floats("W", &[8, 8], &values)];
        let path = save(folder.path(), graph(vec![layer.clone()], vec![value("x", &[2, 8])], weights));
        std::fs::remove_file(&out).ok();
        let pruner = pruner(PruneMethod::Magnitude, share(0.5, PruneScope::Layer));
        let source = source(&path);
        let problem =
            pruner.prune(&source).unwrap().write(&out, &Weights::Inside, &mut |_| Ok(())).unwrap_err();
        assert!(problem.to_string().contains("weight 'W'"), "{problem}");
        assert!(!out.exists());
    }
}

/// Values of which some channels are zero along an axis.
fn with_zeros(name: &str, shape: &[usize], axis: usize, dead: &[usize]) -> TensorProto {
    let inner: usize = shape[axis + 1..].iter().product();
    let start = name.bytes().map(usize::from).sum::<usize>() * 1000;
    let value = |place: usize| {
        if dead.contains(&(place / inner % shape[axis])) { 0.0 } else { unit(start + place) }
    };
    let values: Vec<f32> = (0..shape.iter().product()).map(value).collect();
    floats(name, shape, &values)
}

fn with(mut node: NodeProto, attributes: Vec<AttributeProto>) -> NodeProto {
    node.attribute.extend(attributes);
    node
}

/// A residual network of which half of all channels are zero: without them it computes the same.
#[test]
fn channels_that_are_zero_make_no_difference() {
    let folder = tempfile::tempdir().unwrap();
    let (dead, few, some) = ([0, 3, 4, 7], [1, 2, 5], [0, 1, 4, 8, 9]);
    let pads = || integers("pads", &[1; 4]);
    let two = |name: &str| integers(name, &[2, 2]);
    let nodes = vec![
        // As exporters share equal constants.
        node("Identity", &["zero"], "mean"),
        node("Identity", &["bb"], "bias_once"),
        node("Identity", &["bias_once"], "bias"),
        with(node("Conv", &["x", "A"], "a"), vec![pads()]),
        node("BatchNormalization", &["a", "scale", "zero", "mean", "one"], "n"),
        node("Relu", &["n"], "r"),
        with(node("Conv", &["r", "B", "bias"], "b"), vec![pads()]),
        node("Sigmoid", &["b"], "s"),
        node("Mul", &["b", "s"], "sw"),
        node("Mul", &["sw", "factor"], "m"),
        node("Add", &["m", "r"], "sum"),
        with(node("Conv", &["sum", "D", "db"], "d"), vec![pads(), integer("group", 8)]),
        node("Conv", &["d", "C"], "c"),
        with(node("MaxPool", &["c"], "p"), vec![two("kernel_shape"), two("strides")]),
        node("Reshape", &["p", "matrix"], "f"),
        with(node("Gemm", &["f", "G", "gb"], "g"), vec![integer("transB", 1)]),
        node("Tanh", &["g"], "t"),
        node("MatMul", &["t", "W"], "w"),
        node("Add", &["w", "wb"], "y"),
    ];
    let shape = Tensor::from_slice(&[2], &[-1_i64, 54]).unwrap();
    let weights = vec![
        with_zeros("A", &[8, 3, 3, 3], 0, &dead),
        random("scale", &[8], 11, 1.0),
        floats("zero", &[8], &[0.0; 8]),
        floats("one", &[8], &[1.0; 8]),
        with_zeros("B", &[8, 8, 3, 3], 0, &dead),
        with_zeros("bb", &[8], 0, &dead),
        random("factor", &[8, 1, 1], 20, 1.0),
        random("D", &[8, 1, 3, 3], 30, 1.0),
        with_zeros("db", &[8], 0, &dead),
        with_zeros("C", &[6, 8, 1, 1], 0, &few),
        tensor_to_proto("matrix", &shape).unwrap(),
        with_zeros("G", &[10, 54], 0, &some),
        with_zeros("gb", &[10], 0, &some),
        random("W", &[10, 5], 50, 1.0),
        random("wb", &[5], 60, 1.0),
    ];
    let path = save(folder.path(), graph(nodes, vec![value("x", &[2, 3, 6, 6])], weights));
    let out = folder.path().join("out.onnx");
    let source = source(&path);
    let pruner = ChannelPruner { share: 0.5, multiple: 1, only: Vec::new(), exclude: Vec::new() };
    let pruning = pruner.prune(&source).unwrap();
    let shapes: Vec<(String, Vec<usize>, Option<String>)> = pruning
        .layers()
        .iter()
        .map(|layer| match &layer.outcome {
            PruneOutcome::Narrowed { shape, outputs, .. } => {
                (layer.node.clone(), shape.clone(), outputs.clone())
            }
            other => panic!("{other:?}"),
        })
        .collect();
    let last = Some("an output of the model has its channels".to_string());
    let expected = [
        ("Conv_a", vec![4, 3, 3, 3], None),
        ("Conv_b", vec![4, 4, 3, 3], None),
        ("Conv_d", vec![4, 1, 3, 3], None),
        ("Conv_c", vec![3, 4, 1, 1], None),
        ("Gemm_g", vec![5, 27], None),
        ("MatMul_w", vec![5, 5], last),
    ];
    assert_eq!(shapes, expected.map(|(name, shape, outputs)| (name.to_string(), shape, outputs)));
    pruning.write(&out, &Weights::Inside, &mut |_| Ok(())).unwrap();
    let x = Value::from(Tensor::from_slice(&[2, 3, 6, 6], &input(&[2, 3, 6, 6], true)).unwrap());
    let run = |path: &Path| {
        let session = Session::builder(&Model::load(path).unwrap()).build().unwrap();
        let plan = session.plan_for_inputs(&[("x", x.clone())]).unwrap();
        let outputs = session.run(&[("x", x.clone())]).unwrap();
        (
            outputs[0].1.tensor().unwrap().to_vec::<f32>().unwrap(),
            plan.peak_bytes.unwrap(),
            plan.weights_bytes,
        )
    };
    let ((before, peak, weights), (after, small_peak, small_weights)) = (run(&path), run(&out));
    assert!(before.iter().any(|value| value.abs() > 0.01), "{before:?}");
    for (before, after) in before.iter().zip(&after) {
        assert!((before - after).abs() < 1e-5, "{before} {after}");
    }
    assert!(10 * small_peak < 7 * peak, "{small_peak} of {peak}");
    assert!(10 * small_weights < 5 * weights, "{small_weights} of {weights}");
}

/// Each blocks the channels of the first convolution in its own way.
#[test]
fn channels_that_something_else_reads_stay() {
    let then = || {
        let body = vec![node("Identity", &["a"], "t")];
        let output = vec![typed("t", 1, None)];
        branch(
            "then_branch",
            GraphProto { name: Some("b".into()), node: body, output, ..GraphProto::default() },
        )
    };
    let otherwise = || {
        let body = vec![node("Identity", &["x"], "e")];
        let output = vec![typed("e", 1, None)];
        branch(
            "else_branch",
            GraphProto { name: Some("b".into()), node: body, output, ..GraphProto::default() },
        )
    };
    let cases = [
        (vec![node("Identity", &["a"], "y")], "an output of the model has its channels"),
        (vec![node("Softmax", &["a"], "y")], "'Softmax_y' (Softmax) is not followed"),
        (
            vec![with(node("Concat", &["a", "x"], "y"), vec![integer("axis", 1)])],
            "'Concat_y' (Concat) is not followed",
        ),
        (vec![node("Add", &["a", "x"], "y")], "'Add_y' (Add) joins the channels with others"),
        (
            vec![node("Max", &["a", "a", "a"], "y")],
            "'Max_y' (Max) has other outputs, or reads channels as something else",
        ),
        (
            vec![with(node("Conv", &["a", "grouped"], "y"), vec![integer("group", 2)])],
            "'Conv_y' (Conv) has groups of several channels",
        ),
        (vec![node("Conv", &["x", "A"], "y")], "its outputs are not followed"),
        (
            vec![node("MatMul", &["a", "square"], "y")],
            "'MatMul_y' (MatMul) reads the channels along another axis",
        ),
        (
            vec![with(node("Flatten", &["a"], "y"), vec![integer("axis", 2)])],
            "'Flatten_y' (Flatten) mixes the channels with another axis",
        ),
        (vec![node("Reshape", &["a", "mixed"], "y")], "'Reshape_y' (Reshape) mixes the channels"),
        (vec![with(node("If", &["first"], "y"), vec![then(), otherwise()])], "a body of 'If_y' reads it"),
    ];
    for (rest, reason) in cases {
        let folder = tempfile::tempdir().unwrap();
        let mut nodes = vec![node("Conv", &["x", "A"], "a")];
        nodes.extend(rest);
        let inputs = vec![value("x", &[1, 4, 4, 4]), typed("first", 9, Some(&[]))];
        let mixed = Tensor::from_slice(&[3], &[1_i64, 2, -1]).unwrap();
        let weights = vec![
            random("A", &[4, 4, 1, 1], 0, 1.0),
            random("grouped", &[4, 2, 1, 1], 100, 1.0),
            random("square", &[4, 4], 200, 1.0),
            tensor_to_proto("mixed", &mixed).unwrap(),
        ];
        let path = save(folder.path(), graph(nodes, inputs, weights));
        let pruner = ChannelPruner { share: 0.5, multiple: 1, only: Vec::new(), exclude: Vec::new() };
        let problem = format!("{:?}", pruner.prune(&source(&path)).err().unwrap());
        assert!(problem.contains(reason), "{reason}: {problem}");
    }
}

/// A layer that is excluded keeps its outputs; with two tied layers, both do.
#[test]
fn tied_layers_stay_together() {
    let folder = tempfile::tempdir().unwrap();
    let nodes = vec![
        node("MatMul", &["x", "A"], "a"),
        node("MatMul", &["x", "B"], "b"),
        node("Add", &["a", "b"], "s"),
        node("MatMul", &["s", "C"], "c"),
        node("Relu", &["c"], "r"),
        node("MatMul", &["r", "D"], "y"),
    ];
    let weights = ["A", "B", "C", "D"].map(|name| with_zeros(name, &[6, 6], 0, &[]));
    let path = save(folder.path(), graph(nodes, vec![value("x", &[2, 6])], weights.to_vec()));
    let shapes_of = |exclude: &[&str], (share, multiple): (f64, usize)| -> Vec<Vec<usize>> {
        let exclude = exclude.iter().map(|pattern| pattern.parse().unwrap()).collect();
        let source = source(&path);
        let pruner = ChannelPruner { share, multiple, only: Vec::new(), exclude };
        let layers = pruner.prune(&source).unwrap().layers().to_vec();
        let shape = |layer: &PrunedLayer| match &layer.outcome {
            PruneOutcome::Narrowed { shape, .. } => shape.clone(),
            _ => layer.shape.clone(),
        };
        layers.iter().map(shape).collect()
    };
    let shapes = |exclude: &[&str], share: f64| shapes_of(exclude, (share, 1));
    assert_eq!(shapes(&[], 0.5), [[6, 3], [6, 3], [3, 3], [3, 6]]);
    assert_eq!(shapes(&["MatMul_a"], 0.5), [[6, 6], [6, 6], [6, 3], [3, 6]]);
    assert_eq!(shapes(&["MatMul_c"], 0.5), [[6, 3], [6, 3], [3, 6], [6, 6]]);
    // At least one stays.
    assert_eq!(shapes(&[], 1.0), [[6, 1], [6, 1], [1, 1], [1, 6]]);
    // 3 of 6 become 4. 5 of 6 would become 8, and no number is a multiple of 0.
    assert_eq!(shapes_of(&[], (0.5, 2)), [[6, 4], [6, 4], [4, 4], [4, 6]]);
    for (share, multiple) in [(f64::NAN, 1), (-0.5, 1), (1.5, 1), (0.01, 1), (0.1, 4), (0.5, 0)] {
        let pruner = ChannelPruner { share, multiple, only: Vec::new(), exclude: Vec::new() };
        assert!(pruner.prune(&source(&path)).is_err(), "{share}");
    }
}
