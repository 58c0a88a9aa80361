//! Trainings on the device: every node of a step is the device's, and its gradients are those of
//! the CPU.

#![allow(clippy::unwrap_used, clippy::panic, reason = "what is not as it should be fails the test")]

mod support;

use std::sync::Arc;

use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ep::{Device, ProviderOptions, provider};
use ort_core::ir::Graph;
use ort_core::session::{Model, NodePlacement, Session};
use ort_core::tensor::{Tensor, Value};
use ort_ep_cuda::CudaDevice;
use ort_testkit::on_device::numbers;
use ort_train::{
    ArtifactOptions, Loss, MixedPrecision, Optimizer, TrainingGraph, TrainingOptions, generate_artifacts,
};
use support::{options, with_device};

/// A model, and what its recorded training was. Tests run where there is no repository, so that
/// they hold what they read.
struct Recording {
    name: &'static str,
    model: &'static [u8],
    reference: &'static str,
}

macro_rules! recordings {
    ($($name:literal),*) => {
        [$(Recording {
            name: $name,
            model: include_bytes!(concat!("../../ort-train/tests/data/", $name, "/model.onnx")),
            reference: include_str!(concat!("../../ort-train/tests/data/", $name, "/reference.json")),
        }),*]
    };
}

const RECORDINGS: [Recording; 6] = recordings!["bert", "gpt", "lstm", "mobilenet_v3", "resnet18", "unet"];
const DIGITS: &[u8] = include_bytes!("../../ort-train/tests/data/digits.onnx");
/// The model whose recurrent layers have control flow as their backward pass, which the host
/// conducts.
const WITH_CONTROL_FLOW: &str = "lstm";
const CONTROL_FLOW: &str = "Scan";
/// How far gradients of float32 may be from the CPU's, as a part of the largest of a tensor: sums
/// of some thousands of terms in another order, through as many layers as the models have.
const NEAR: f64 = 1e-3;
/// Below this part of the largest of all gradients a tensor's are what is left where terms cancel
/// out, as of a bias before a normalization.
const NOTHING: f64 = 1e-5;

impl Recording {
    fn options(&self) -> TrainingOptions {
        let reference: serde_json::Value = serde_json::from_str(self.reference).unwrap();
        let loss = match reference["loss"]["kind"].as_str().unwrap() {
            "cross_entropy" => Loss::CrossEntropy {
                label_smoothing: 0.0,
                ignore_index: reference["loss"]["ignore_index"].as_i64(),
                class_axis: None,
            },
            _ => Loss::BceWithLogits,
        };
        let output = reference["output"].as_str().map(str::to_owned);
        TrainingOptions { loss, output, ..TrainingOptions::default() }
    }
}

/// The graph of a step up to its gradients, which are outputs: what no node reads.
fn with_gradients(training: &TrainingGraph) -> Graph {
    let mut graph = training.graph().clone();
    let read = graph.consumers();
    let made = graph.nodes.iter().flat_map(|node| node.outputs.iter().flatten().copied());
    let is_end = |id: &_| !graph.outputs.contains(id);
    let ends: Vec<_> =
        made.filter(|id| read.get(id.index()).is_some_and(Vec::is_empty)).filter(is_end).collect();
    graph.outputs.extend(ends);
    graph
}

fn session(model: &Model, device: Option<&Arc<dyn Device>>) -> Result<Session> {
    let builder = match device {
        Some(device) => Session::builder(model).device(device.clone()),
        None => Session::builder(model),
    };
    builder.device(provider("cpu")?.open(0, &ProviderOptions::new())?).build()
}

/// The operators that do not run on the device though they read more than shapes, each with why.
fn elsewhere(session: &Session) -> Vec<NodePlacement> {
    let placed = session.placement().into_iter();
    placed.filter(|placed| placed.provider != "cuda" && !placed.of_shapes).collect()
}

fn described(others: &[NodePlacement]) -> String {
    let others = others.iter();
    others.map(|placed| format!("\n    {} {}: {:?}", placed.node, placed.operator, placed.refusals)).collect()
}

/// What a run is given: parameters as they are, and numbers without a pattern; sequences are so
/// long.
fn inputs(session: &Session, training: &TrainingGraph, length: usize) -> Result<Vec<(String, Value)>> {
    let mut values: Vec<(String, Value)> = Vec::new();
    for (index, input) in session.inputs().iter().enumerate() {
        let known = training.parameters().iter().find(|parameter| parameter.name == input.name);
        if let Some(parameter) = known {
            values.push((input.name.clone(), parameter.tensor.clone().into()));
            continue;
        }
        let size = |dim: &ort_core::dim::Dim| {
            dim.as_constant()
                .map_or(if dim.to_string().contains("seq") { length } else { 2 }, |size| size as usize)
        };
        let shape: Vec<usize> = input.ty.shape().unwrap_or_default().iter().map(size).collect();
        let count = shape.iter().product();
        let tensor = match input.ty.dtype() {
            Some(DType::I64) => {
                Tensor::from_slice(&shape, &(0..count).map(|at| (at * 5 % 3) as i64).collect::<Vec<i64>>())?
            }
            // Variances and scales are no less than 0.
            _ => Tensor::from_slice(
                &shape,
                &numbers(count, index).into_iter().map(f32::abs).collect::<Vec<f32>>(),
            )?,
        };
        values.push((input.name.clone(), tensor.into()));
    }
    Ok(values)
}

fn run(session: &Session, values: &[(String, Value)]) -> Result<Vec<(String, Vec<f64>)>> {
    let values: Vec<(&str, Value)> =
        values.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    session
        .run(&values)?
        .into_iter()
        .map(|(name, value)| Ok((name.to_string(), value.tensor()?.to_doubles()?)))
        .collect()
}

fn largest(values: &[f64]) -> f64 {
    values.iter().fold(0.0, |most, value| value.abs().max(most))
}

#[test]
fn all_of_a_step_is_the_devices() -> Result<()> {
    let Some(device) = with_device("all_of_a_step_is_the_devices")? else { return Ok(()) };
    let mut problems = Vec::new();
    for recording in &RECORDINGS {
        let name = recording.name;
        for mixed_precision in [None, Some(MixedPrecision::Fp16), Some(MixedPrecision::Bf16)] {
            let model = Model::from_bytes(recording.model)?;
            let training =
                TrainingGraph::new(&model, &TrainingOptions { mixed_precision, ..recording.options() })?;
            let model = Model::from_graph(with_gradients(&training));
            let session = session(&model, Some(&device))?;
            let others = elsewhere(&session);
            let has_control_flow = session.placement().iter().any(|placed| placed.operator == CONTROL_FLOW);
            assert_eq!(has_control_flow, name == WITH_CONTROL_FLOW, "{name}");
            if !others.is_empty() {
                problems.push(format!("{name} {mixed_precision:?}:{}", described(&others)));
            }
        }
    }
    assert!(problems.is_empty(), "{}:\n{}", problems.len(), problems.join("\n"));
    Ok(())
}

#[test]
fn all_of_an_update_is_the_devices() -> Result<()> {
    let Some(device) = with_device("all_of_an_update_is_the_devices")? else { return Ok(()) };
    let folder = std::env::temp_dir().join(format!("ort-cuda-update-{}", std::process::id()));
    let sgd = Optimizer::Sgd { momentum: 0.9, nesterov: false, weight_decay: 0.1 };
    let all = [
        sgd,
        Optimizer::adamw(),
        Optimizer::AdamW8bit { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.01 },
        Optimizer::Lamb { beta1: 0.9, beta2: 0.999, epsilon: 1e-6, weight_decay: 0.01 },
        Optimizer::Adafactor { beta2_decay: -0.8, clip_threshold: 1.0, weight_decay: 0.0 },
    ];
    let mut problems = Vec::new();
    let model = Model::from_bytes(DIGITS)?;
    let parameters = TrainingGraph::new(&model, &TrainingOptions::default())?;
    for optimizer in all {
        let written = generate_artifacts(
            &model,
            &ArtifactOptions {
                requires_grad: parameters
                    .parameters()
                    .iter()
                    .map(|parameter| parameter.name.clone())
                    .collect(),
                loss: Some(Loss::cross_entropy()),
                optimizer: Some(optimizer),
                clip_grad: Some(1.0),
                artifact_directory: Some(folder.clone()),
                ..ArtifactOptions::default()
            },
        )?;
        let update = Model::load(written.optimizer_model.unwrap())?;
        let others = elsewhere(&session(&update, Some(&device))?);
        if !others.is_empty() {
            problems.push(format!("{optimizer:?}:{}", described(&others)));
        }
    }
    std::fs::remove_dir_all(&folder).unwrap();
    assert!(problems.is_empty(), "{}:\n{}", problems.len(), problems.join("\n"));
    Ok(())
}

#[test]
fn a_backward_pass_through_time_waits_no_longer_for_long_sequences() -> Result<()> {
    let test = "a_backward_pass_through_time_waits_no_longer_for_long_sequences";
    if with_device(test)?.is_none() {
        return Ok(());
    }
    let device = CudaDevice::open(0, &options(&[("use_tf32", "0")]))?;
    let recording = RECORDINGS.iter().find(|recording| recording.name == WITH_CONTROL_FLOW).unwrap();
    let model = Model::from_bytes(recording.model)?;
    let training = TrainingGraph::new(&model, &recording.options())?;
    let shared: Arc<dyn Device> = device.clone();
    let session = session(&Model::from_graph(with_gradients(&training)), Some(&shared))?;
    let mut counted = Vec::new();
    for length in [3, 7] {
        let values = inputs(&session, &training, length)?;
        run(&session, &values)?;
        let before = device.counters();
        run(&session, &values)?;
        let after = device.counters();
        counted.push((after.waits - before.waits, after.launches - before.launches));
    }
    let [short, long] = [counted[0], counted[1]];
    assert_eq!(short.0, long.0, "waits: {counted:?}");
    // Each step of the sequence is launched.
    assert!(short.1 < long.1, "launches: {counted:?}");
    Ok(())
}

#[test]
fn gradients_of_models_are_those_of_the_cpu() -> Result<()> {
    let Some(device) = with_device("gradients_of_models_are_those_of_the_cpu")? else { return Ok(()) };
    let mut problems = Vec::new();
    for recording in &RECORDINGS {
        let name = recording.name;
        let begin = std::time::Instant::now();
        let model = Model::from_bytes(recording.model)?;
        let training = TrainingGraph::new(&model, &recording.options())?;
        let model = Model::from_graph(with_gradients(&training));
        let (own, cpu) = (session(&model, Some(&device))?, session(&model, None)?);
        let values = inputs(&cpu, &training, 7)?;
        let (found, expected) = (run(&own, &values)?, run(&cpu, &values)?);
        let most = expected.iter().map(|(_, values)| largest(values)).fold(0.0, f64::max);
        for ((output, found), (_, expected)) in found.iter().zip(&expected) {
            let bound = NEAR * largest(expected).max(NOTHING * most);
            let apart = found.iter().zip(expected).map(|(found, expected)| (found - expected).abs());
            let worst = apart
                .fold(0.0, |worst: f64, apart| if apart > worst || apart.is_nan() { apart } else { worst });
            if found.len() != expected.len() || worst > bound || worst.is_nan() {
                problems.push(format!("{name}: {output} is {worst:e} off, expected at most {bound:e}"));
            }
        }
        println!("{name}: {} outputs, {:.1} s", found.len(), begin.elapsed().as_secs_f64());
    }
    assert!(problems.is_empty(), "{}:\n{}", problems.len(), problems.join("\n"));
    Ok(())
}
