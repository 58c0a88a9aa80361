//! Weights in blocks that samples tune: GPTQ and AWQ on whole models, which load and run.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, missing_docs)]

use std::path::{Path, PathBuf};

use ort_core::onnx::Weights;
use ort_core::onnx::proto::tensor_shape_proto::{Dimension, dimension};
use ort_core::onnx::proto::{
    GraphProto, ModelProto, TensorShapeProto, TypeProto, ValueInfoProto, type_proto,
};
use ort_core::session::{Model, Session};
use ort_core::tensor::{Tensor, Value};
use ort_ep_cpu as _;
use ort_quant::{
    Bits, BlockMethod, BlockOptions, Calibration, DynamicOptions, GptqOptions, HessianCalibration,
    HessianInput, Hessians, LastProduct, Layer, Mode, Outcome, Quantizer, TunedWeights,
};
use prost::Message;

mod support;

use support::{floats, node, random, save, source, unit};

const CHANNELS: usize = 64;
const HIDDEN: usize = 96;

fn value(name: &str) -> ValueInfoProto {
    let dim = |value| Dimension { value: Some(value), ..Dimension::default() };
    let (rows, channels) =
        (dimension::Value::DimParam("n".into()), dimension::Value::DimValue(CHANNELS as i64));
    let shape = Some(TensorShapeProto { dim: vec![dim(rows), dim(channels)] });
    let tensor = type_proto::Tensor { elem_type: Some(1), shape };
    let ty = TypeProto { value: Some(type_proto::Value::TensorType(tensor)), ..TypeProto::default() };
    ValueInfoProto { name: Some(name.into()), r#type: Some(ty), ..ValueInfoProto::default() }
}

/// A normalization with a few large channels, two products that read it, a product behind an
/// activation, and two inputs of one weight.
fn layers(folder: &Path) -> PathBuf {
    let mut gamma: Vec<f32> = vec![1.0; CHANNELS];
    gamma.iter_mut().skip(5).step_by(13).for_each(|factor| *factor = 12.0);
    let graph = GraphProto {
        node: vec![
            node("LayerNormalization", &["x", "gamma", "beta"], "n"),
            node("MatMul", &["n", "Q"], "q"),
            node("MatMul", &["n", "U"], "u"),
            node("Relu", &["u"], "r"),
            node("MatMul", &["r", "D"], "d"),
            node("MatMul", &["x", "S"], "s"),
            node("MatMul", &["d", "S"], "t"),
        ],
        input: vec![value("x")],
        output: ["q", "d", "s", "t"].map(value).to_vec(),
        initializer: vec![
            floats("gamma", &[CHANNELS], &gamma),
            random("beta", &[CHANNELS], 3, 0.5),
            random("Q", &[CHANNELS, CHANNELS], 100, 1.0),
            random("U", &[CHANNELS, HIDDEN], 5000, 1.0),
            random("D", &[HIDDEN, CHANNELS], 700, 1.0),
            random("S", &[CHANNELS, CHANNELS], 1300, 1.0),
        ],
        ..GraphProto::default()
    };
    save(folder, graph)
}

/// Rows whose neighbouring channels are alike.
fn sample(index: usize) -> Value {
    let mut values = Vec::new();
    for row in 0..24 {
        let mut last = 0.0;
        for channel in 0..CHANNELS {
            last = 0.875 * last + unit((index * 24 + row) * CHANNELS + channel + 31);
            values.push(last);
        }
    }
    Tensor::from_slice(&[24, CHANNELS], &values).unwrap().into()
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

/// The Hessians of samples, in parts that take about this many bytes.
fn hessians(quantizer: &Quantizer, path: &Path, memory: usize) -> Vec<Hessians> {
    let model = Model::load(path).unwrap();
    let session = Calibration::session(Session::builder(&model)).unwrap();
    let parts = quantizer.hessian_inputs(&source(path), memory).unwrap();
    let observed = parts.iter().map(|inputs| {
        let calibration = HessianCalibration::new(inputs);
        for index in 0..10 {
            calibration.run(&session, &[("x", sample(index))]).unwrap();
        }
        calibration.into_hessians()
    });
    observed.collect()
}

/// Writes a model; returns its rows of the report, and the errors of its outputs on new samples.
fn written(quantizer: &Quantizer, path: &Path, out: &Path) -> (Vec<Layer>, Vec<f64>) {
    let source = source(path);
    let quantization = quantizer.quantize(&source).unwrap();
    let layers = quantization.layers().to_vec();
    let mut check = |model: &Model| Session::builder(model).build().map(drop);
    quantization.write(out, &Weights::Inside, &mut check).unwrap();
    let run = |path: &Path, index: usize| -> Vec<Vec<f32>> {
        let session = Session::builder(&Model::load(path).unwrap()).build().unwrap();
        let outputs = session.run(&[("x", sample(index))]).unwrap();
        outputs.into_iter().map(|(_, value)| value.tensor().unwrap().to_vec::<f32>().unwrap()).collect()
    };
    let (mut signals, mut errors) = (vec![0.0; 4], vec![0.0; 4]);
    for index in 10..14 {
        let (before, after) = (run(path, index), run(out, index));
        for (place, (before, after)) in before.iter().zip(&after).enumerate() {
            for (before, after) in before.iter().zip(after) {
                signals[place] += f64::from(*before).powi(2);
                errors[place] += (f64::from(*before) - f64::from(*after)).powi(2);
            }
        }
    }
    (layers, errors.iter().zip(signals).map(|(error, signal)| (error / signal).sqrt()).collect())
}

fn precisions(layers: &[Layer]) -> Vec<&str> {
    let precisions = layers.iter().map(|layer| match &layer.outcome {
        Outcome::Quantized { precision, .. } => precision.as_str(),
        Outcome::Kept { reason } => panic!("{reason}"),
    });
    precisions.collect()
}

#[test]
fn gptq_lowers_the_errors_of_the_outputs() {
    let folder = tempfile::tempdir().unwrap();
    let path = layers(folder.path());
    let (plain, out) = (folder.path().join("plain.onnx"), folder.path().join("out.onnx"));
    for (bits, share) in [(Bits::Four, 0.75), (Bits::Two, 0.9)] {
        let (_, expected) = written(&quantizer(bits), &path, &plain);
        for act_order in [false, true] {
            let sweeps = if bits == Bits::Two { 3 } else { 0 };
            let options = GptqOptions { act_order, sweeps, ..GptqOptions::default() };
            let mut files = Vec::new();
            // One input at a time, and all at once.
            for (memory, parts) in [(12 * HIDDEN * HIDDEN, 3), (usize::MAX, 1)] {
                let mut quantizer = quantizer(bits);
                let hessians = hessians(&quantizer, &path, memory);
                assert_eq!(hessians.len(), parts, "the inputs of a shared weight share a Hessian");
                let mut count = 0;
                for hessians in hessians {
                    count += quantizer.gptq(&source(&path), hessians, options).unwrap();
                }
                assert_eq!(count, 4);
                let (layers, errors) = written(&quantizer, &path, &out);
                assert!(
                    precisions(&layers).iter().all(|precision| precision.ends_with(", gptq")),
                    "{layers:?}"
                );
                // The weight of "s" serves "d", which is far larger than "x".
                for place in [0, 1, 3] {
                    let label = format!("{bits:?} {act_order}: {errors:?} of {expected:?}");
                    assert!(errors[place] < share * expected[place], "{label}");
                }
                files.push(std::fs::read(&out).unwrap());
            }
            assert_eq!(files[0], files[1]);
        }
    }
}

/// The input of the third product is never negative.
#[test]
fn biases_correct_the_means_of_the_outputs() {
    let folder = tempfile::tempdir().unwrap();
    let path = layers(folder.path());
    let (plain, out) = (folder.path().join("plain.onnx"), folder.path().join("out.onnx"));
    for is_symmetric in [false, true] {
        let of = |method: BlockMethod| {
            let Mode::Blocks(options) = quantizer(Bits::Two).mode else { panic!() };
            let mode = Mode::Blocks(BlockOptions { is_symmetric, method, ..options });
            Quantizer { mode, only: Vec::new(), exclude: Vec::new() }
        };
        let mut quantizer = of(BlockMethod::MinMax);
        let (_, expected) = written(&quantizer, &path, &plain);
        let found = hessians(&quantizer, &path, usize::MAX).remove(0);
        let count = quantizer.correct_bias(&source(&path), found).unwrap();
        let (layers, errors) = written(&quantizer, &path, &out);
        let corrected = precisions(&layers).iter().filter(|text| text.ends_with(", bias corrected")).count();
        assert!((1..=5).contains(&corrected) && count > 0, "{layers:?}");
        assert!(precisions(&layers)[2].ends_with(", bias corrected"), "{layers:?}");
        assert!(errors[1] < 0.98 * expected[1], "{is_symmetric}: {errors:?} of {expected:?}");
        let graph = ModelProto::decode(&*std::fs::read(&out).unwrap()).unwrap().graph.unwrap();
        let nodes = graph.node.iter().filter(|node| node.op_type() == "MatMulNBits");
        let lengths: Vec<usize> = nodes.map(|node| node.input.len()).collect();
        assert_eq!(lengths[2], 6, "{lengths:?}");
        // GPTQ without the mean to care for does better still.
        let mut quantizer = of(BlockMethod::SquaredError);
        let found = hessians(&quantizer, &path, usize::MAX).remove(0);
        let options = GptqOptions { corrects_bias: true, ..GptqOptions::default() };
        assert_eq!(quantizer.gptq(&source(&path), found, options).unwrap(), 4);
        let (layers, tuned) = written(&quantizer, &path, &out);
        assert!(precisions(&layers).iter().all(|text| text.contains(", gptq")), "{layers:?}");
        assert!(tuned[1] < errors[1], "{is_symmetric}: {tuned:?} of {errors:?}");
    }
}

#[test]
fn awq_scales_the_channels_that_matter() {
    let folder = tempfile::tempdir().unwrap();
    let path = layers(folder.path());
    let (plain, out) = (folder.path().join("plain.onnx"), folder.path().join("out.onnx"));
    let mut quantizer = quantizer(Bits::Four);
    let (_, expected) = written(&quantizer, &path, &plain);
    let hessians = hessians(&quantizer, &path, usize::MAX);
    // Of the inputs, the normalization alone has constants that can take the division.
    assert_eq!(quantizer.awq(&source(&path), &hessians[0]).unwrap(), 1);
    let (layers, errors) = written(&quantizer, &path, &out);
    let is_scaled: Vec<bool> =
        precisions(&layers).iter().map(|precision| precision.ends_with(", awq")).collect();
    assert_eq!(is_scaled, [true, true, false, false, false]);
    assert!(errors[0] < 0.8 * expected[0], "{errors:?} of {expected:?}");
    let written = ModelProto::decode(&*std::fs::read(&out).unwrap()).unwrap().graph.unwrap();
    let names: Vec<&str> = written.initializer.iter().map(|tensor| tensor.name()).collect();
    assert!(names.contains(&"gamma_smoothed") && names.contains(&"beta_smoothed"), "{names:?}");
    assert!(!names.contains(&"gamma") && !names.contains(&"beta"), "{names:?}");
}

/// Without samples, weights are what the method makes of them.
#[test]
fn hessians_of_no_rows_change_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = layers(folder.path());
    let (plain, out) = (folder.path().join("plain.onnx"), folder.path().join("out.onnx"));
    let mut quantizer = quantizer(Bits::Four);
    written(&quantizer, &path, &plain);
    // Hessians that do not fit are left out.
    assert_eq!(quantizer.hessian_inputs(&source(&path), 1).unwrap(), Vec::<Vec<HessianInput>>::new());
    let inputs = quantizer.hessian_inputs(&source(&path), usize::MAX).unwrap();
    assert_eq!(quantizer.awq(&source(&path), &Hessians::new(&inputs[0])).unwrap(), 0);
    let count = quantizer.gptq(&source(&path), Hessians::new(&inputs[0]), GptqOptions::default());
    assert_eq!(count.unwrap(), 0);
    assert_eq!(quantizer.correct_bias(&source(&path), Hessians::new(&inputs[0])).unwrap(), 0);
    let (layers, _) = written(&quantizer, &path, &out);
    assert!(precisions(&layers).iter().all(|precision| precision.ends_with("zero points")), "{layers:?}");
    assert_eq!(std::fs::read(&out).unwrap(), std::fs::read(&plain).unwrap());
}

#[test]
fn other_modes_have_no_blocks_to_tune() {
    let folder = tempfile::tempdir().unwrap();
    let path = layers(folder.path());
    let mode = Mode::Dynamic(DynamicOptions::default());
    let mut quantizer = Quantizer { mode, only: Vec::new(), exclude: Vec::new() };
    let problem = quantizer.hessian_inputs(&source(&path), usize::MAX).unwrap_err();
    assert!(problem.to_string().contains("the mode is another one"), "{problem}");
    assert!(quantizer.gptq(&source(&path), Hessians::default(), GptqOptions::default()).is_err());
    assert!(quantizer.awq(&source(&path), &Hessians::default()).is_err());
}
