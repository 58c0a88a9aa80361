//! Static models: corrected biases, equalised channels, chosen ranges, masked padding.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, missing_docs)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ort_core::onnx::Weights;
use ort_core::onnx::proto::tensor_shape_proto::{Dimension, dimension};
use ort_core::onnx::proto::{
    AttributeProto, GraphProto, ModelProto, NodeProto, TensorShapeProto, TypeProto, ValueInfoProto,
    attribute_proto, type_proto,
};
use ort_core::session::{Model, Session};
use ort_core::tensor::{Tensor, Value};
use ort_ep_cpu as _;
use ort_quant::{
    Calibration, GridOptions, HessianCalibration, HessianInput, MeanCalibration, Mode, Outcome, QuantType,
    Quantizer, RangeRule, Scope, StaticFormat, StaticOptions, StaticType, TokenMask, ValueRange, Wanted,
    WeightProbe, choose_ranges,
};
use prost::Message;

mod support;

use support::{floats, node, random, save, source, unit};

fn random_values(count: usize, from: usize) -> Vec<f32> {
    (from..from + count).map(unit).collect()
}

fn with(mut node: NodeProto, name: &str, value: i64) -> NodeProto {
    node.attribute.push(AttributeProto {
        name: Some(name.into()),
        i: Some(value),
        r#type: Some(attribute_proto::AttributeType::Int as i32),
        ..AttributeProto::default()
    });
    node
}

/// A value of these sizes; 0 is a symbol of its place.
fn value(name: &str, elem_type: i32, shape: &[i64]) -> ValueInfoProto {
    let symbols = ["batch", "seq"];
    let dims = shape.iter().enumerate().map(|(place, size)| {
        let value = match size {
            0 => dimension::Value::DimParam(symbols[place].into()),
            size => dimension::Value::DimValue(*size),
        };
        Dimension { value: Some(value), ..Dimension::default() }
    });
    let shape = Some(TensorShapeProto { dim: dims.collect() });
    let tensor = type_proto::Tensor { elem_type: Some(elem_type), shape };
    let ty = TypeProto { value: Some(type_proto::Value::TensorType(tensor)), ..TypeProto::default() };
    ValueInfoProto { name: Some(name.into()), r#type: Some(ty), ..ValueInfoProto::default() }
}

/// Products with every home of a bias: that of a convolution, none, one in groups, that of a Gemm,
/// an Add behind a MatMul, and nothing behind another.
fn homes_of_biases(folder: &Path) -> PathBuf {
    let graph = GraphProto {
        node: vec![
            node("Conv", &["x", "K", "KB"], "a"),
            node("Relu", &["a"], "b"),
            node("Conv", &["b", "L"], "c"),
            node("Relu", &["c"], "d"),
            with(node("Conv", &["d", "G", "GB"], "e"), "group", 4),
            node("Relu", &["e"], "f"),
            node("GlobalAveragePool", &["f"], "g"),
            node("Flatten", &["g"], "h"),
            with(node("Gemm", &["h", "W", "WB"], "i"), "transB", 1),
            node("Relu", &["i"], "j"),
            node("MatMul", &["j", "M"], "k"),
            node("Add", &["k", "MB"], "l"),
            node("Relu", &["l"], "m"),
            node("MatMul", &["m", "N"], "y"),
        ],
        input: vec![value("x", 1, &[0, 3, 9, 9])],
        output: vec![value("y", 1, &[0, 24])],
        initializer: vec![
            random("K", &[16, 3, 3, 3], 1, 1.0),
            random("KB", &[16], 700, 1.0),
            random("L", &[16, 16, 3, 3], 900, 1.0),
            random("G", &[32, 4, 1, 1], 5000, 1.0),
            random("GB", &[32], 5300, 1.0),
            random("W", &[40, 32], 6000, 1.0),
            random("WB", &[40], 8000, 1.0),
            random("M", &[40, 32], 9000, 1.0),
            random("MB", &[32], 11000, 1.0),
            random("N", &[32, 24], 12000, 1.0),
        ],
        ..GraphProto::default()
    };
    save(folder, graph)
}

fn picture(index: usize) -> Value {
    let values: Vec<f32> =
        random_values(2 * 243, 40_000 + index * 486).iter().map(|value| value + 0.6).collect();
    Tensor::from_slice(&[2, 3, 9, 9], &values).unwrap().into()
}

fn quantizer(options: StaticOptions) -> Quantizer {
    Quantizer { mode: Mode::Static(options), only: Vec::new(), exclude: Vec::new() }
}

fn options_of(quantizer: &mut Quantizer) -> &mut StaticOptions {
    let Mode::Static(options) = &mut quantizer.mode else { panic!("the mode is static") };
    options
}

/// The ranges that a rule makes of ten pictures.
fn ranges(quantizer: &Quantizer, path: &Path, rule: RangeRule) -> BTreeMap<String, ValueRange> {
    let session = Calibration::session(Session::builder(&Model::load(path).unwrap())).unwrap();
    let calibration = Calibration::new(quantizer.activations(&source(path)).unwrap(), rule.wanted());
    (0..10).for_each(|index| drop(calibration.run(&session, &[("x", picture(index))]).unwrap()));
    let grid = GridOptions::new(QuantType::UInt8, false);
    let observers = calibration.into_observers().into_iter();
    observers.map(|(name, seen)| (name, rule.range(&seen, &grid).unwrap().unwrap())).collect()
}

fn outputs(path: &Path, index: usize) -> Vec<f32> {
    let session = Session::builder(&Model::load(path).unwrap()).build().unwrap();
    let outputs = session.run(&[("x", picture(index))]).unwrap();
    outputs[0].1.tensor().unwrap().to_vec::<f32>().unwrap()
}

/// The norms, relative to the outputs, of their change and of the change of their mean over new
/// pictures.
fn errors(path: &Path, other: &Path) -> (f64, f64) {
    let (mut signal, mut error, mut means) = (0.0, 0.0, vec![0.0; 24]);
    for index in 10..30 {
        for (place, (before, after)) in outputs(path, index).iter().zip(outputs(other, index)).enumerate() {
            let (before, after) = (f64::from(*before), f64::from(after));
            signal += before * before;
            error += (after - before) * (after - before);
            means[place % 24] += (after - before) / 40.0;
        }
    }
    let mean: f64 = means.iter().map(|mean| mean * mean).sum();
    ((error / signal).sqrt(), (40.0 * mean / signal).sqrt())
}

fn write(quantizer: &Quantizer, path: &Path, out: &Path) -> Vec<String> {
    let source = source(path);
    let quantization = quantizer.quantize(&source).unwrap();
    let texts = quantization.layers().iter().map(|layer| match &layer.outcome {
        Outcome::Quantized { precision, .. } => precision.clone(),
        Outcome::Kept { reason } => panic!("{}: {reason}", layer.node),
    });
    let texts = texts.collect();
    let mut check = |model: &Model| Session::builder(model).build().map(drop);
    quantization.write(out, &Weights::Inside, &mut check).unwrap();
    texts
}

/// Coarse weights, of one scale, shift the mean of the outputs; corrected biases take most of it
/// back, wherever they are.
#[test]
fn corrected_biases_keep_the_means_of_the_outputs() {
    let folder = tempfile::tempdir().unwrap();
    let path = homes_of_biases(folder.path());
    let (plain, out) = (folder.path().join("plain.onnx"), folder.path().join("out.onnx"));
    // All of one magnitude, but for a large one: most weights become 0 or one step.
    let mut model = ModelProto::decode(&*std::fs::read(&path).unwrap()).unwrap();
    for tensor in &mut model.graph.as_mut().unwrap().initializer {
        if tensor.dims.len() > 1 {
            let shape: Vec<usize> = tensor.dims.iter().map(|size| *size as usize).collect();
            let mut values = random_values(shape.iter().product(), tensor.name().len() + shape[0] * 77);
            values.iter_mut().for_each(|value| *value *= 0.1);
            values[0] = 4.0;
            *tensor = floats(tensor.name(), &shape, &values);
        }
    }
    std::fs::write(&path, model.encode_to_vec()).unwrap();
    for (format, ty, least) in [
        (StaticFormat::Qdq, StaticType::Int8, 6),
        (StaticFormat::QOperator, StaticType::Int8, 4),
        (StaticFormat::Qdq, StaticType::Float8, 1),
    ] {
        let options = StaticOptions { format, ty, per_tensor: true, ..StaticOptions::default() };
        let mut quantizer = quantizer(options);
        let ranges = ranges(&quantizer, &path, RangeRule::MinMax);
        options_of(&mut quantizer).ranges = ranges;
        let texts = write(&quantizer, &path, &plain);
        assert!(texts.iter().all(|text| !text.contains("bias")), "{texts:?}");
        let before = errors(&path, &plain);
        let session = Calibration::session(Session::builder(&Model::load(&path).unwrap())).unwrap();
        let calibration = MeanCalibration::new(quantizer.bias_inputs(&source(&path)).unwrap());
        (0..10).for_each(|index| drop(calibration.run(&session, &[("x", picture(index))]).unwrap()));
        let count = quantizer.correct_static_bias(&source(&path), &calibration.into_means()).unwrap();
        let texts = write(&quantizer, &path, &out);
        let corrected = texts.iter().filter(|text| text.ends_with(", bias corrected")).count();
        assert!(count >= least && corrected == count, "{format:?} {ty:?}: {count} {texts:?}");
        let after = errors(&path, &out);
        // The inputs of float8 have three bits, and shift the means more than the weights do.
        let share = if ty == StaticType::Float8 { 1.5 } else { 0.6 };
        assert!(after.1 < share * before.1, "{format:?} {ty:?}: {after:?} of {before:?}");
        assert!(after.0 < 1.1 * before.0, "{format:?} {ty:?}: {after:?} of {before:?}");
    }
}

/// What has seen nothing corrects nothing.
#[test]
fn means_of_no_rows_correct_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = homes_of_biases(folder.path());
    let mut quantizer = quantizer(StaticOptions::default());
    let ranges = ranges(&quantizer, &path, RangeRule::MinMax);
    options_of(&mut quantizer).ranges = ranges;
    let means = MeanCalibration::new(quantizer.bias_inputs(&source(&path)).unwrap()).into_means();
    assert_eq!(quantizer.correct_static_bias(&source(&path), &means).unwrap(), 0);
    let mut other = Quantizer { mode: Mode::Dynamic(ort_quant::DynamicOptions::default()), ..quantizer };
    assert!(
        other.correct_static_bias(&source(&path), &means).is_err()
            && other.bias_inputs(&source(&path)).is_err()
    );
}

/// A chain of a convolution, a depthwise one and a pointwise one, whose channels have very
/// different ranges, and of matrices with the bias of an Add.
fn uneven(folder: &Path) -> PathBuf {
    let scaled = |shape: &[usize], from: usize, axis: usize| {
        let inner: usize = shape[axis + 1..].iter().product();
        let values = random_values(shape.iter().product(), from).into_iter().enumerate();
        let factor = |place: usize| (1.7_f32).powi((place / inner % shape[axis] % 9) as i32 - 4);
        values.map(|(place, value)| value * factor(place)).collect::<Vec<f32>>()
    };
    let graph = GraphProto {
        node: vec![
            node("Conv", &["x", "K", "KB"], "a"),
            node("Relu", &["a"], "b"),
            with(node("Conv", &["b", "D"], "c"), "group", 16),
            node("LeakyRelu", &["c"], "d"),
            node("Conv", &["d", "P"], "e"),
            node("GlobalAveragePool", &["e"], "g"),
            node("Flatten", &["g"], "h"),
            node("MatMul", &["h", "M"], "k"),
            node("Add", &["MB", "k"], "l"),
            node("PRelu", &["l", "slope"], "m"),
            with(node("Gemm", &["m", "N"], "y"), "transB", 1),
        ],
        input: vec![value("x", 1, &[0, 3, 9, 9])],
        output: vec![value("y", 1, &[0, 24])],
        initializer: vec![
            floats("K", &[16, 3, 3, 3], &scaled(&[16, 3, 3, 3], 1, 0)),
            random("KB", &[16], 700, 1.0),
            floats("D", &[32, 1, 3, 3], &scaled(&[32, 1, 3, 3], 900, 0)),
            floats("P", &[20, 32, 1, 1], &scaled(&[20, 32, 1, 1], 1400, 1)),
            floats("M", &[20, 32], &scaled(&[20, 32], 9000, 1)),
            random("MB", &[32], 11000, 1.0),
            floats("slope", &[1], &[0.25]),
            floats("N", &[24, 32], &scaled(&[24, 32], 12000, 1)),
        ],
        ..GraphProto::default()
    };
    save(folder, graph)
}

#[test]
fn equalised_layers_compute_the_same_and_quantize_better() {
    let folder = tempfile::tempdir().unwrap();
    let path = uneven(folder.path());
    let (even, out) = (folder.path().join("even.onnx"), folder.path().join("out.onnx"));
    let whole = quantizer(StaticOptions { per_tensor: true, ..StaticOptions::default() });
    let source = source(&path);
    let equalised = whole.equalise(&source).unwrap().unwrap();
    assert_eq!(equalised.pairs, 3);
    assert!((2..=20).contains(&equalised.sweeps), "{}", equalised.sweeps);
    equalised.write(&even).unwrap();
    assert!(errors(&path, &even).0 < 1e-6);
    // Names and shapes are those of before, and both ranges of a channel are equal.
    let decoded = |path: &Path| ModelProto::decode(&*std::fs::read(path).unwrap()).unwrap().graph.unwrap();
    let (before, after) = (decoded(&path), decoded(&even));
    let names =
        |graph: &GraphProto| graph.node.iter().map(|node| node.name().to_string()).collect::<Vec<_>>();
    assert_eq!(names(&before), names(&after));
    let weight = |graph: &GraphProto, name: &str| -> Vec<f32> {
        let found = graph.initializer.iter().find(|tensor| tensor.name() == name).unwrap();
        let bytes = found.raw_data.clone().unwrap();
        bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    };
    let most =
        |values: &mut dyn Iterator<Item = f32>| values.fold(0.0, |most: f32, value| most.max(value.abs()));
    let (matrix, other) = (weight(&after, "M"), weight(&after, "N"));
    for channel in 0..32 {
        let column = most(&mut matrix.iter().skip(channel).step_by(32).copied());
        let row = most(&mut other.iter().skip(channel).step_by(32).copied());
        assert!((column / row - 1.0).abs() < 0.03, "channel {channel}: {column} {row}");
    }
    // With one scale for a weight, small channels were lost.
    let error_of = |path: &Path| {
        let mut quantizer = whole.clone();
        let ranges = ranges(&quantizer, path, RangeRule::MinMax);
        options_of(&mut quantizer).ranges = ranges;
        write(&quantizer, path, &out);
        errors(&uneven(folder.path()), &out).0
    };
    let (uneven, even) = (error_of(&path), error_of(&even));
    assert!(even < 0.6 * uneven, "{even} of {uneven}");
    // A layer left out is in no pair.
    let one = Quantizer { exclude: vec!["last".parse().unwrap(), "op:Conv".parse().unwrap()], ..whole };
    assert!(one.equalise(&source).unwrap().is_none());
}

/// Of an input with a few huge outliers and one without, each gets the rule that serves it.
#[test]
fn ranges_are_chosen_by_the_outputs() {
    let folder = tempfile::tempdir().unwrap();
    let path = homes_of_biases(folder.path());
    let (plain, out) = (folder.path().join("plain.onnx"), folder.path().join("out.onnx"));
    let mut quantizer = quantizer(StaticOptions::default());
    let minmax = ranges(&quantizer, &path, RangeRule::MinMax);
    // Of the second candidate, two ranges are better than those of the first, and one is ruinous.
    let mut first = minmax.clone();
    let mut second = minmax.clone();
    for name in ["b", "j"] {
        first.get_mut(name).unwrap().high *= 20.0;
    }
    second.get_mut("d").unwrap().high /= 10.0;
    options_of(&mut quantizer).ranges = first.clone();
    write(&quantizer, &path, &plain);
    let source = source(&path);
    let quantization = quantizer.quantize(&source).unwrap();
    let grids = quantization.grids().clone();
    let names = grids.values().flatten().flat_map(|grid| [grid.scale.clone(), grid.zero_point.clone()]);
    let names: Vec<String> = names.collect();
    let model = WeightProbe::model(&Model::load(&plain).unwrap(), names.iter().map(String::as_str));
    let mut probe = WeightProbe::new(Session::builder(&model).build().unwrap());
    let floats = Session::builder(&Model::load(&path).unwrap()).build().unwrap();
    for index in 0..4 {
        let outputs = floats.run(&[("x", picture(index))]).unwrap();
        probe.add_reference(vec![("x".to_string(), picture(index))], outputs);
    }
    let mut trials = 0;
    let grid = options_of(&mut quantizer).activations();
    let candidates = [first.clone(), second.clone()];
    let chosen = choose_ranges(&probe, &grids, &candidates, &grid, &mut || trials += 1).unwrap();
    assert_eq!((chosen.ranges["b"], chosen.ranges["j"]), (second["b"], second["j"]));
    assert_eq!(chosen.ranges["d"], first["d"]);
    assert_eq!(chosen.counts.iter().sum::<usize>(), grids.len());
    // One for each range that differs, three for all together, and the first.
    assert_eq!(trials, 1 + 3 + 3);
    options_of(&mut quantizer).ranges = chosen.ranges;
    write(&quantizer, &path, &out);
    assert!(errors(&path, &out).0 < 0.5 * errors(&path, &plain).0);
}

/// A residual branch, a gate, and a sum with a constant.
#[test]
fn scopes_say_which_nodes_read_codes() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out.onnx");
    let graph = GraphProto {
        node: vec![
            node("Conv", &["x", "K"], "a"),
            node("Relu", &["a"], "b"),
            node("Conv", &["b", "L"], "c"),
            node("Add", &["b", "c"], "d"),
            node("GlobalAveragePool", &["d"], "g"),
            node("Sigmoid", &["g"], "s"),
            node("Mul", &["d", "s"], "m"),
            node("GlobalAveragePool", &["m"], "h"),
            node("Flatten", &["h"], "i"),
            node("MatMul", &["i", "M"], "j"),
            node("Add", &["j", "one"], "y"),
        ],
        input: vec![value("x", 1, &[0, 3, 9, 9])],
        output: vec![value("y", 1, &[0, 24])],
        initializer: vec![
            random("K", &[16, 3, 3, 3], 1, 1.0),
            random("L", &[16, 16, 1, 1], 900, 1.0),
            random("M", &[16, 24], 9000, 1.0),
            random("one", &[24], 11000, 1.0),
        ],
        ..GraphProto::default()
    };
    let path = save(folder.path(), graph);
    for (scope, expected) in [
        (Scope::Heavy, &["Conv_a", "Conv_c", "MatMul_j"][..]),
        // The mean of a gated value has seen a function of floats.
        (Scope::All, &["Conv_a", "Conv_c", "Add_d", "GlobalAveragePool_g", "MatMul_j"]),
        (
            Scope::Default,
            &[
                "Conv_a",
                "Relu_b",
                "Conv_c",
                "Add_d",
                "GlobalAveragePool_g",
                "Sigmoid_s",
                "Mul_m",
                "GlobalAveragePool_h",
                "Flatten_i",
                "MatMul_j",
                "Add_y",
            ],
        ),
    ] {
        let mut quantizer = quantizer(StaticOptions { scope, ..StaticOptions::default() });
        let ranges = ranges(&quantizer, &path, RangeRule::MinMax);
        options_of(&mut quantizer).ranges = ranges;
        write(&quantizer, &path, &out);
        let written = ModelProto::decode(&*std::fs::read(&out).unwrap()).unwrap().graph.unwrap();
        let reads_codes = |node: &&NodeProto| {
            let is_code = |name: &String| name.ends_with("_DequantizeLinear_Output");
            node.op_type() != "DequantizeLinear" && node.input.first().is_some_and(is_code)
        };
        let found: Vec<&str> = written.node.iter().filter(reads_codes).map(|node| node.name()).collect();
        assert_eq!(found, expected, "{scope:?}");
        assert!(errors(&path, &out).0 < 0.05, "{scope:?}: {:?}", errors(&path, &out));
        let mut other = quantizer.clone();
        options_of(&mut other).format = StaticFormat::QOperator;
        assert_eq!(other.quantize(&source(&path)).is_err(), scope != Scope::Heavy);
    }
}

/// Padding has values that no real token has; with the mask nothing sees them.
#[test]
fn padding_is_in_no_statistic() {
    let folder = tempfile::tempdir().unwrap();
    // As wide as a sequence is long, so that only symbols tell the axes apart.
    let graph = GraphProto {
        node: vec![node("MatMul", &["x", "W"], "y"), node("Cast", &["mask"], "m")],
        input: vec![value("x", 1, &[0, 0, 6]), value("mask", 7, &[0, 0])],
        output: vec![value("y", 1, &[0, 0, 5]), value("m", 1, &[0, 0])],
        initializer: vec![random("W", &[6, 5], 3, 1.0)],
        ..GraphProto::default()
    };
    let mut graph = graph;
    graph.node[1] = with(graph.node[1].clone(), "to", 1);
    let path = save(folder.path(), graph);
    let model = Model::load(&path).unwrap();
    let mut values = random_values(2 * 6 * 6, 100);
    values[9 * 6..].iter_mut().for_each(|value| *value = 1000.0);
    let x: Value = Tensor::from_slice(&[2, 6, 6], &values).unwrap().into();
    let kept = [1_i64, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0];
    let sample = [("x", x), ("mask", Tensor::from_slice(&[2, 6], &kept).unwrap().into())];
    let session = Calibration::session(Session::builder(&model)).unwrap();
    let mask = Some(Arc::new(TokenMask::new(&model, "mask").unwrap()));
    let calibration = Calibration::new(["x", "y"], Wanted::default()).masked(mask.clone());
    calibration.run(&session, &sample).unwrap();
    let (x, y) = (calibration.observer("x").unwrap(), calibration.observer("y").unwrap());
    assert!(x.extremes().unwrap().high < 1.0 && y.extremes().unwrap().high < 10.0);
    assert_eq!((x.counts().elements, y.counts().elements), (9 * 6, 9 * 5));
    let inputs = [HessianInput { names: vec!["x".to_string()], channels: 6 }];
    let calibration = HessianCalibration::new(&inputs).masked(mask.clone());
    calibration.run(&session, &sample).unwrap();
    calibration.with_hessian("x", |hessian| assert_eq!(hessian.unwrap().rows(), 9));
    // Without a mask, or one of other sizes.
    let calibration = Calibration::new(["x"], Wanted::default());
    calibration.run(&session, &sample).unwrap();
    assert_eq!(calibration.observer("x").unwrap().extremes().unwrap().high, 1000.0);
    for (name, wrong) in [("masks", "did you mean 'mask'?"), ("x", "not of shape [batch, tokens]")] {
        let problem = TokenMask::new(&model, name).unwrap_err();
        assert!(format!("{problem} {problem:?}").contains(wrong), "{problem:?}");
    }
    let calibration = Calibration::new(["x"], Wanted::default()).masked(mask);
    assert!(calibration.run(&session, &sample[..1]).is_err());
}
