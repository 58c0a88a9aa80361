//! Mixed precision: errors of weights and best assignments are those of NumPy, and files have the
//! size and the error that were predicted.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, missing_docs)]

use std::path::{Path, PathBuf};

use ort_core::onnx::Weights;
use ort_core::onnx::proto::attribute_proto::AttributeType;
use ort_core::onnx::proto::tensor_shape_proto::{Dimension, dimension};
use ort_core::onnx::proto::{
    AttributeProto, GraphProto, ModelProto, TensorShapeProto, TypeProto, ValueInfoProto, type_proto,
};
use ort_core::session::{Model, Session};
use ort_core::tensor::{Tensor, Value};
use ort_ep_cpu as _;
use ort_quant::{
    Bits, BlockMethod, BlockOptions, Blocks, Cost, DynamicOptions, ErrorSearch, Front, LastProduct,
    MixedWeight, MixedWeights, Mode, Outcome, Quantizer, TunedWeights, WeightProbe,
};
use prost::Message;
use serde_json::Value as Json;

mod support;

use support::{node, random, save, source, unit};

/// What NumPy computes for the network.
const REFERENCE: &str = include_str!("data/mixed.json");
const CHANNELS: usize = 64;
const HIDDEN: usize = 96;
const ROWS: usize = 24;
/// The precisions of the reference: 2, 4 and 8 bits in blocks of 32, and float32.
const USUAL: [usize; 4] = [0, 3, 6, 8];

fn value(name: &str, ty: i32, shape: &[Option<i64>]) -> ValueInfoProto {
    let dim = |size: &Option<i64>| {
        let value = match size {
            Some(size) => dimension::Value::DimValue(*size),
            None => dimension::Value::DimParam("n".into()),
        };
        Dimension { value: Some(value), ..Dimension::default() }
    };
    let shape = Some(TensorShapeProto { dim: shape.iter().map(dim).collect() });
    let tensor = type_proto::Tensor { elem_type: Some(ty), shape };
    let ty = TypeProto { value: Some(type_proto::Value::TensorType(tensor)), ..TypeProto::default() };
    ValueInfoProto { name: Some(name.into()), r#type: Some(ty), ..ValueInfoProto::default() }
}

/// The network of the reference: two residual blocks of two products.
fn network(folder: &Path) -> PathBuf {
    let rows = [None, Some(CHANNELS as i64)];
    let graph = GraphProto {
        node: vec![
            node("MatMul", &["x", "A"], "a"),
            node("Relu", &["a"], "ra"),
            node("MatMul", &["ra", "B"], "b"),
            node("Add", &["x", "b"], "h"),
            node("MatMul", &["h", "C"], "c"),
            node("Relu", &["c"], "rc"),
            node("MatMul", &["rc", "D"], "d"),
            node("Add", &["h", "d"], "y"),
        ],
        input: vec![value("x", 1, &rows)],
        output: vec![value("y", 1, &rows)],
        initializer: vec![
            random("A", &[CHANNELS, HIDDEN], 100, 1.0),
            random("B", &[HIDDEN, CHANNELS], 9000, 0.25),
            random("C", &[CHANNELS, HIDDEN], 20000, 0.5),
            random("D", &[HIDDEN, CHANNELS], 30000, 0.0625),
        ],
        ..GraphProto::default()
    };
    save(folder, graph)
}

/// Rows whose neighbouring channels are alike.
fn sample(index: usize) -> Vec<(String, Value)> {
    let mut values = Vec::new();
    for row in index * ROWS..(index + 1) * ROWS {
        let mut last = 0.0;
        for channel in 0..CHANNELS {
            last = 0.875 * last + unit(row * CHANNELS + channel + 31);
            values.push(last);
        }
    }
    vec![("x".into(), Tensor::from_slice(&[ROWS, CHANNELS], &values).unwrap().into())]
}

fn quantizer(bits: Bits) -> Quantizer {
    let options = BlockOptions {
        bits,
        block_size: 32,
        is_symmetric: false,
        method: BlockMethod::SquaredError,
        last: LastProduct::AsOthers,
        tuned: TunedWeights::default(),
    };
    Quantizer { mode: Mode::Blocks(options), only: Vec::new(), exclude: Vec::new() }
}

/// Finds the errors of all precisions on these samples. Returns how often a weight was replaced.
fn measure(
    mixed: &mut MixedWeights<'_>,
    path: &Path,
    (samples, search): (Vec<Vec<(String, Value)>>, ErrorSearch),
) -> usize {
    let model = Model::load(path).unwrap();
    let names = mixed.weights().iter().map(|weight| weight.name.as_str());
    let session = Session::builder(&WeightProbe::model(&model, names)).build().unwrap();
    let mut probe = WeightProbe::new(session);
    samples.into_iter().for_each(|sample| assert!(probe.add(sample).unwrap() > 0));
    let mut replaced = 0;
    mixed
        .find_errors(
            search,
            Some(&mut |weight, value| {
                if !probe.can_replace(weight) {
                    return Ok(None);
                }
                replaced += 1;
                probe.noise(&[(weight, value)]).map(Some)
            }),
        )
        .unwrap();
    replaced
}

fn is_close(found: f64, expected: f64, tolerance: f64) -> bool {
    (found - expected).abs() <= tolerance * expected
}

/// The squared relative error of the outputs of a written model.
fn error_of(path: &Path, out: &Path, samples: &[Vec<(String, Value)>]) -> f64 {
    let (mut signal, mut error) = (0.0, 0.0);
    for sample in samples {
        let inputs: Vec<(&str, Value)> =
            sample.iter().map(|(name, value)| (&**name, value.clone())).collect();
        let run = |path: &Path| -> Vec<f32> {
            let session = Session::builder(&Model::load(path).unwrap()).build().unwrap();
            session.run(&inputs).unwrap()[0].1.tensor().unwrap().to_vec().unwrap()
        };
        for (before, after) in run(path).into_iter().zip(run(out)) {
            signal += f64::from(before).powi(2);
            error += (f64::from(before) - f64::from(after)).powi(2);
        }
    }
    error / signal
}

#[test]
fn errors_and_best_assignments_are_those_of_numpy() {
    let reference: Json = serde_json::from_str(REFERENCE).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let (path, out) = (network(folder.path()), folder.path().join("out.onnx"));
    let source = source(&path);
    let samples: Vec<_> = (0..6).map(sample).collect();
    let mut exact = quantizer(Bits::Two).mixed_weights(&source).unwrap();
    assert_eq!(measure(&mut exact, &path, (samples.clone(), ErrorSearch::EachPrecision)), 32);
    let mut few = quantizer(Bits::Two).mixed_weights(&source).unwrap();
    assert_eq!(measure(&mut few, &path, (samples.clone(), ErrorSearch::FewBits)), 8);
    assert_eq!(exact.weights().len(), 4);
    let replacements =
        [ErrorSearch::EachPrecision, ErrorSearch::FewBits].map(|search| exact.replacements(search));
    assert_eq!(replacements, [32, 8]);
    for (exact, few) in exact.weights().iter().zip(few.weights()) {
        assert!(exact.is_measured && few.is_measured);
        // 2, 4 and 8 bits in blocks of 32, as the reference has them.
        for (place, index) in USUAL.into_iter().take(3).enumerate() {
            let (exact_one, few) = (&exact.precisions[index], &few.precisions[index]);
            let expected = reference["errors"][&exact.name][place].as_f64().unwrap();
            let label = format!("{} {place}: {exact_one:?} {few:?} {expected}", exact.name);
            assert!(is_close(exact_one.error, expected, 0.01), "{label}");
            // 8 bits follow from 4 by the noise of the weight.
            assert!(is_close(few.error, expected, [0.01, 0.01, 0.2][place]), "{label}");
        }
    }
    // Sizes that follow from the noise of the weight are close to what they are measured to be.
    for (exact, few) in exact.weights().iter().zip(few.weights()) {
        for (exact, few) in exact.precisions.iter().zip(&few.precisions).take(8) {
            assert!(is_close(few.error, exact.error, 0.4), "{exact:?} {few:?}");
        }
    }
    let costs = |weight: &MixedWeight| -> Vec<Cost> {
        let usual = USUAL.map(|index| weight.precisions[index]);
        usual.iter().map(|precision| Cost { bytes: precision.bytes, error: precision.error }).collect()
    };
    let front = Front::of(&exact.weights().iter().map(costs).collect::<Vec<_>>());
    let finer = exact.front();
    let budgets = reference["budgets"].as_array().unwrap();
    for budget in budgets {
        let (bytes, expected) = (budget[0].as_u64().unwrap(), budget[1].as_f64().unwrap());
        let point = front.within(bytes).unwrap();
        assert!(is_close(front.points()[point].error, expected, 0.01), "{bytes} {expected}");
        // Blocks of other sizes are more choices.
        assert!(finer.points()[finer.within(bytes).unwrap()].error <= front.points()[point].error, "{bytes}");
    }
    assert_eq!(front.points()[0].bytes, budgets[0][0].as_u64().unwrap());
    assert_eq!(front.within(front.points()[0].bytes - 1), None);
    // All weights in one precision: the file has the error of NumPy, which the sum predicts.
    for (place, least) in [0.05, 0.05, 0.05].into_iter().enumerate() {
        let mut quantizer = quantizer(Bits::Two);
        quantizer.set_precisions(exact.weights(), &[USUAL[place]; 4]).unwrap();
        let quantization = quantizer.quantize(&source).unwrap();
        quantization.write(&out, &Weights::Inside, &mut |_| Ok(())).unwrap();
        let found = error_of(&path, &out, &samples);
        let expected = reference["together"][place].as_f64().unwrap();
        assert!(is_close(found, expected, 0.01), "{place}: {found} {expected}");
        let sum: f64 = exact.weights().iter().map(|weight| weight.precisions[USUAL[place]].error).sum();
        assert!(is_close(sum, expected, least), "{place}: {sum} {expected}");
    }
}

#[test]
fn files_have_the_predicted_size() {
    let folder = tempfile::tempdir().unwrap();
    let (path, out) = (network(folder.path()), folder.path().join("out.onnx"));
    let source = source(&path);
    let mut mixed = quantizer(Bits::Two).mixed_weights(&source).unwrap();
    // Without samples, the errors are the noise of the weights.
    mixed.find_errors(ErrorSearch::default(), None).unwrap();
    let front = mixed.front();
    let whole = front.points().len() - 1;
    for point in [0, whole / 3, whole - 1] {
        let choices = front.choices(point);
        for weights in [Weights::Inside, Weights::Beside { least: 1024 }] {
            let mut quantizer = quantizer(Bits::Two);
            quantizer.set_precisions(mixed.weights(), &choices).unwrap();
            let mut quantization = quantizer.quantize(&source).unwrap();
            let size = quantization.size(&out, &weights).unwrap();
            for (layer, (weight, choice)) in
                quantization.layers().iter().zip(mixed.weights().iter().zip(&choices))
            {
                let precision = weight.precisions[*choice];
                match (&layer.outcome, precision.blocks) {
                    (Outcome::Quantized { precision: text, after, .. }, Some(Blocks { bits, size })) => {
                        let expected = format!("int{}, blocks of {size}", bits.count());
                        assert!(text.starts_with(&expected), "{text}");
                        assert_eq!(*after as u64, precision.bytes);
                    }
                    (Outcome::Kept { reason }, None) => {
                        assert!(reason.contains("within the bound"), "{reason}")
                    }
                    other => panic!("{other:?}"),
                }
            }
            let written = quantization.write(&out, &weights, &mut |_| Ok(())).unwrap();
            assert_eq!((size.model, size.data), (written.model, written.data));
            assert_eq!(size.model, std::fs::metadata(&out).unwrap().len());
            assert!(size.largest.is_some_and(|(_, bytes)| bytes > 1000));
        }
    }
    // Choosing all of the float weights leaves nothing to write.
    let mut all_float = quantizer(Bits::Two);
    all_float.set_precisions(mixed.weights(), &front.choices(whole)).unwrap();
    let problem = all_float.quantize(&source).err().unwrap().to_string();
    assert!(problem.contains("no node of the model can be quantized"), "{problem}");
}

/// A table with 4 bits; a weight with a reader that needs it in floating point; a weight in a body.
#[test]
fn tables_shared_weights_and_bodies_have_their_rules() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out.onnx");
    let rows = [None, Some(64)];
    let body = GraphProto {
        name: Some("body".into()),
        node: vec![node("MatMul", &["p", "W"], "z")],
        output: vec![value("z", 1, &rows)],
        initializer: vec![random("W", &[64, 64], 70, 1.0)],
        ..GraphProto::default()
    };
    let attribute = |name: &str| AttributeProto {
        name: Some(name.into()),
        r#type: Some(AttributeType::Graph as i32),
        g: Some(Box::new(body.clone())),
        ..AttributeProto::default()
    };
    let mut choice = node("If", &["is_first"], "y");
    choice.attribute = vec![attribute("then_branch"), attribute("else_branch")];
    let graph = GraphProto {
        node: vec![
            node("Gather", &["E", "ids"], "e"),
            node("MatMul", &["e", "S"], "s"),
            node("Transpose", &["S"], "st"),
            node("MatMul", &["s", "st"], "p"),
            choice,
        ],
        input: vec![value("ids", 7, &[None]), value("is_first", 9, &[])],
        output: vec![value("y", 1, &rows)],
        initializer: vec![random("E", &[100, 64], 5, 1.0), random("S", &[64, 64], 9000, 1.0)],
        ..GraphProto::default()
    };
    let path = save(folder.path(), graph);
    let ids: Vec<i64> = (0..40).map(|step| step * 7 % 100).collect();
    let samples = vec![vec![
        ("ids".to_string(), Tensor::from_slice(&[40], &ids).unwrap().into()),
        ("is_first".to_string(), Tensor::from_bools(&[], &[true]).unwrap().into()),
    ]];
    let source = source(&path);
    let mut mixed = quantizer(Bits::Two).mixed_weights(&source).unwrap();
    assert_eq!(measure(&mut mixed, &path, (samples.clone(), ErrorSearch::EachPrecision)), 4 + 8);
    let names: Vec<_> =
        mixed.weights().iter().map(|weight| (weight.name.as_str(), weight.is_measured)).collect();
    // Those of both branches, under new names.
    assert_eq!(names, [("W_2", false), ("W_3", false), ("E", true), ("S", true)]);
    let bits = |index: usize| -> Vec<_> {
        let precisions = mixed.weights()[index].precisions.iter();
        precisions
            .map(|precision| precision.blocks.map(|blocks| (blocks.bits.count(), blocks.size)))
            .collect()
    };
    // Blocks of a table fill its rows of 64.
    assert_eq!(bits(2), [Some((4, 32)), Some((4, 16)), Some((4, 64)), Some((8, 32)), None]);
    assert_eq!(bits(0).len(), 9);
    // The float weight stays beside its codes, so that codes save nothing.
    let shared = &mixed.weights()[3].precisions;
    assert!(shared.iter().take(8).all(|precision| precision.bytes > shared[8].bytes), "{shared:?}");
    let front = mixed.front();
    assert!((0..front.points().len()).all(|point| front.choices(point)[3] == 8));
    let body = &mixed.weights()[0].precisions;
    assert!(body[0].error > 4.0 * body[3].error && body[3].error > 0.0, "{body:?}");
    // The kernel reads a table of 4 bits as the replaced weight was.
    let mut quantizer = quantizer(Bits::Two);
    quantizer.set_precisions(mixed.weights(), &[8, 8, 0, 8]).unwrap();
    quantizer.quantize(&source).unwrap().write(&out, &Weights::Inside, &mut |_| Ok(())).unwrap();
    let found = error_of(&path, &out, &samples);
    assert!(
        is_close(found, mixed.weights()[2].precisions[0].error, 1e-3),
        "{found} {:?}",
        mixed.weights()[2]
    );
    let graph = ModelProto::decode(&*std::fs::read(&out).unwrap()).unwrap().graph.unwrap();
    let codes = graph.initializer.iter().find(|tensor| tensor.name() == "E_Q4").unwrap();
    assert_eq!(codes.dims, [100, 32]);
}

#[test]
fn other_modes_and_models_have_no_mixed_weights() {
    let folder = tempfile::tempdir().unwrap();
    let path = network(folder.path());
    let mut dynamic = Quantizer { mode: Mode::Dynamic(DynamicOptions::default()), ..quantizer(Bits::Two) };
    let problem = dynamic.mixed_weights(&source(&path)).err().unwrap().to_string();
    assert!(problem.contains("the mode is another one"), "{problem}");
    assert!(dynamic.set_precisions(&[], &[]).is_err());
    let excluded = Quantizer { exclude: vec!["op:MatMul".parse().unwrap()], ..quantizer(Bits::Two) };
    let problem = excluded.mixed_weights(&source(&path)).err().unwrap().to_string();
    assert!(problem.contains("no weight of the model can become blocks"), "{problem}");
}
