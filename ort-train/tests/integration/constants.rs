//! Initializers that are no parameters: buffers and constants of exporters, which training leaves
//! as they are.

use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ir::GraphBuilder;
use ort_core::onnx::{ModelInfo, Weights, save};
use ort_core::session::Model;
use ort_core::tensor::{Tensor, Value};
use ort_ep_cpu as _;
use ort_train::{Loss, Trainer, TrainingGraph, TrainingOptions};

/// The initializers, and how the model reads them: `x * w + bias`, a mask and so on are added or
/// multiplied.
const NAMES: [(&str, &str); 8] = [
    ("w", "Mul"),
    ("bias", "Add"),
    ("mask", "Mul"),
    ("layer.lifted_tensor_0", "Add"),
    ("/layer/Constant_3_output_0", "Add"),
    ("onnx::Mul_12", "Mul"),
    ("val_7", "Add"),
    ("onnx::MatMul_5", "MatMul"),
];

/// What the file marks as a buffer.
const MARKED: &str = "mask";
const CONSTANTS: [&str; 3] = ["mask", "layer.lifted_tensor_0", "/layer/Constant_3_output_0"];
const DOUBTFUL: [&str; 2] = ["onnx::Mul_12", "val_7"];

/// The model as a file that an exporter wrote.
fn model(folder: &tempfile::TempDir) -> Result<Model> {
    let mut b = GraphBuilder::new("exported");
    let mut y = b.input("x", DType::F32, &["batch", "2"]);
    for (name, op) in NAMES {
        let shape: &[usize] = if op == "MatMul" { &[2, 2] } else { &[1, 2] };
        let numbers: Vec<f32> = (0..shape.iter().product()).map(|at| 0.5 + at as f32 / 4.0).collect();
        let weight = b.graph_mut().add_constant(name, Tensor::from_slice(shape, &numbers)?);
        y = b.node(op, &[y, weight], &[])?;
    }
    let graph = b.finish(&[y])?;
    let info = ModelInfo {
        initializers: NAMES.map(|(name, _)| name.to_string()).to_vec(),
        buffers: vec![MARKED.to_string()],
        ..ModelInfo::default()
    };
    let path = folder.path().join("exported.onnx");
    save(&graph, &info, &path, &Weights::Inside)?;
    Model::load(&path)
}

fn options(trainable: &[&str]) -> TrainingOptions {
    let trainable = trainable.iter().map(|name| name.to_string()).collect();
    TrainingOptions { loss: Loss::Mse, trainable, ..TrainingOptions::default() }
}

fn names(training: &TrainingGraph) -> Vec<&str> {
    training.parameters().iter().map(|parameter| parameter.name.as_str()).collect()
}

#[test]
fn buffers_and_constants_are_trained_only_if_they_are_named() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let model = model(&folder)?;
    let by_default = TrainingGraph::new(&model, &options(&[]))?;
    assert_eq!(names(&by_default), ["w", "bias", "onnx::Mul_12", "val_7", "onnx::MatMul_5"]);
    assert_eq!(by_default.untrained_constants(), CONSTANTS);
    assert_eq!(by_default.doubtful_weights(), DOUBTFUL);
    assert!(CONSTANTS.iter().all(|name| by_default.frozen().iter().any(|frozen| frozen == name)));

    let named = TrainingGraph::new(&model, &options(&["w", "mask", "/layer/Constant*"]))?;
    assert_eq!(names(&named), ["w", "mask", "/layer/Constant_3_output_0"]);
    assert!(named.untrained_constants().is_empty() && named.doubtful_weights().is_empty());
    let all = TrainingGraph::new(&model, &options(&["*"]))?;
    assert_eq!(names(&all), NAMES.map(|(name, _)| name));
    Ok(())
}

#[test]
fn a_trained_model_keeps_its_buffers_and_their_marks() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let model = model(&folder)?;
    let mut trainer = Trainer::new(&model, TrainingOptions { learning_rate: 0.125, ..options(&[]) })?;
    let (x, target): (Value, Value) = (
        Tensor::from_slice(&[2, 2], &[1.0f32, -2.0, 0.5, 3.0])?.into(),
        Tensor::from_slice(&[2, 2], &[0.0f32; 4])?.into(),
    );
    trainer.train_step(&[("x", x), ("target", target)])?;
    let path = folder.path().join("trained.onnx");
    trainer.export(&path)?;
    let trained = Model::load(&path)?;
    assert_eq!(trained.info().buffers, [MARKED]);
    let numbers = |model: &Model, name: &str| -> Result<Vec<f32>> {
        model.graph().constants[&model.graph().find_value(name).unwrap()].to_vec()
    };
    for (name, _) in NAMES {
        let is_kept = numbers(&trained, name)? == numbers(&model, name)?;
        assert_eq!(is_kept, CONSTANTS.contains(&name), "{name}");
    }
    assert_eq!(TrainingGraph::new(&trained, &options(&[]))?.untrained_constants(), CONSTANTS);
    Ok(())
}
