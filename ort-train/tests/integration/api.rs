//! Training by the calls of ONNX Runtime's on-device training: the same losses, rates and
//! parameters as ONNX Runtime itself.

use std::collections::BTreeMap;
use std::path::Path;

use crate::support::{data, json, part, read_npz};
use ort_core::session::{Model, Session};
use ort_core::tensor::{Tensor, Value};
use ort_core::{ErrorKind, Result};
use ort_train::api::{CheckpointState, LinearLRScheduler, Module, ModuleOptions, Optimizer, Property};
use ort_train::{ArtifactOptions, Artifacts, Loss, generate_artifacts};
use serde_json::Value as Json;

/// What losses and parameters may differ by, as a share of the largest.
const BOUND: f64 = 2e-5;
const BATCHES: usize = 3;
const TRAINED: [&str; 4] = ["first.weight", "first.bias", "second.weight", "second.bias"];

fn strings(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_string()).collect()
}

fn numbers(json: &Json) -> Vec<f64> {
    json.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

fn worst(actual: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(actual.len(), expected.len());
    let largest = expected.iter().fold(0.0f64, |most, number| most.max(number.abs()));
    // Unlike `f64::max`, `total_cmp` keeps a NaN. It must be positive, so `abs` comes last.
    let apart = actual.iter().zip(expected).map(|(one, other)| ((one - other) / largest).abs());
    apart.max_by(f64::total_cmp).unwrap_or(0.0)
}

fn doubles(tensor: &Tensor) -> Vec<f64> {
    tensor.to_vec::<f32>().unwrap().into_iter().map(f64::from).collect()
}

fn perceptron() -> Model {
    Model::load(data("api/model.onnx")).unwrap()
}

/// The options of a recorded case.
fn options(case: &Json, folder: &Path) -> ArtifactOptions {
    let frozen: Vec<String> =
        case["frozen"].as_array().unwrap().iter().map(|name| name.as_str().unwrap().to_string()).collect();
    ArtifactOptions {
        requires_grad: strings(&TRAINED).into_iter().filter(|name| !frozen.contains(name)).collect(),
        frozen_params: frozen,
        loss: Some(match case["loss"].as_str().unwrap() {
            "cross_entropy" => Loss::cross_entropy(),
            "mse" => Loss::Mse,
            "bce_with_logits" => Loss::BceWithLogits,
            "l1" => Loss::L1,
            other => panic!("no loss {other}"),
        }),
        optimizer: Some(match case["optimizer"].as_str().unwrap() {
            "adamw" => ort_train::Optimizer::onnxruntime_adamw(),
            "sgd" => ort_train::Optimizer::sgd(),
            other => panic!("no optimizer {other}"),
        }),
        clip_grad: case["clip"].as_f64().map(|norm| norm as f32),
        artifact_directory: Some(folder.to_path_buf()),
        additional_output_names: strings(&["scores"]),
        ..ArtifactOptions::default()
    }
}

/// A module and an optimizer of a case.
fn begin(files: &Artifacts) -> Result<(CheckpointState, Module, Optimizer)> {
    let state = CheckpointState::load_checkpoint(&files.checkpoint)?;
    let eval = Some(files.eval_model.as_path());
    let module = Module::new(&files.training_model, &state, eval, ModuleOptions::default())?;
    let optimizer = Optimizer::new(files.optimizer_model.as_ref().unwrap(), &module)?;
    Ok((state, module, optimizer))
}

fn batch(arrays: &BTreeMap<String, Tensor>, names: &[String], step: usize) -> Vec<Value> {
    names.iter().map(|name| part(&arrays[name], step % BATCHES).into()).collect()
}

fn case_holds(name: &str, case: &Json, arrays: &BTreeMap<String, Tensor>) -> Result<Vec<String>> {
    let folder = tempfile::tempdir().unwrap();
    let files = generate_artifacts(&perceptron(), &options(case, folder.path()))?;
    let (state, mut module, optimizer) = begin(&files)?;
    let scheduler = case["linear"].as_array().map(|it| {
        let count = |place: usize| it[place].as_u64().unwrap();
        LinearLRScheduler::new(&optimizer, count(0), count(1), it[2].as_f64().unwrap() as f32).unwrap()
    });
    if let Some(rate) = case["rate"].as_f64() {
        optimizer.set_learning_rate(rate as f32)?;
    }
    let inputs = module.input_names()?;
    assert_eq!(Json::from(inputs.clone()), case["train_inputs"], "{name}");
    assert_eq!(module.output_names()?, ["loss", "scores"]);
    let every = case["every"].as_u64().unwrap() as usize;
    let expected = numbers(&case["losses"]);
    let (mut losses, mut rates) = (Vec::new(), Vec::new());
    for step in 0..expected.len() {
        losses.push(f64::from(module.call(&batch(arrays, &inputs, step))?));
        rates.push(f64::from(optimizer.get_learning_rate()?));
        if (step + 1) % every.max(1) != 0 {
            continue;
        }
        optimizer.step()?;
        scheduler.iter().try_for_each(LinearLRScheduler::step)?;
        if every > 0 {
            module.lazy_reset_grad();
        }
    }
    let evaluated = module.eval().call(&batch(arrays, &inputs, 0))?;
    let scores = doubles(module.output("scores")?.tensor()?);
    let mut off = vec![
        ("losses", worst(&losses, &expected)),
        ("rates", worst(&rates, &numbers(&case["rates"]))),
        ("evaluation", worst(&[f64::from(evaluated)], &[case["evaluated"].as_f64().unwrap()])),
        ("scores", worst(&scores, &numbers(&case["scores"]))),
    ];
    for (parameter, expected) in case["parameters"].as_object().unwrap() {
        let found = state.parameter(parameter)?;
        assert_eq!(found.requires_grad, found.grad.is_some(), "{name}, {parameter}");
        off.push((parameter, worst(&doubles(&found.data), &numbers(expected))));
    }
    let sizes = [true, false].map(|trained| module.get_parameters_size(trained).unwrap());
    assert_eq!(Json::from(sizes.to_vec()), case["sizes"], "{name}");
    println!("{name}: {:.1e}", off.iter().map(|(_, off)| *off).max_by(f64::total_cmp).unwrap_or(0.0));
    let wrong = off.into_iter().filter(|(_, off)| off.is_nan() || *off > BOUND);
    Ok(wrong.map(|(what, off)| format!("{name}: {what} {off:.1e} off")).collect())
}

#[test]
fn numbers_are_those_of_onnx_runtime() -> Result<()> {
    let (reference, arrays) = (json("api/reference.json"), read_npz("api/data.npz"));
    let mut problems = Vec::new();
    for (name, case) in reference.as_object().unwrap() {
        problems.extend(case_holds(name, case, &arrays)?);
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
    Ok(())
}

#[test]
fn a_checkpoint_with_states_goes_on_with_the_same_bits() -> Result<()> {
    let (reference, arrays) = (json("api/reference.json"), read_npz("api/data.npz"));
    let folder = tempfile::tempdir().unwrap();
    let case = &reference["cross_entropy_adamw"];
    let mut files = generate_artifacts(&perceptron(), &options(case, folder.path()))?;
    let (state, mut module, optimizer) = begin(&files)?;
    optimizer.set_learning_rate(0.02)?;
    let inputs = module.input_names()?;
    let step = |module: &mut Module, optimizer: &Optimizer, step: usize| {
        let loss = module.call(&batch(&arrays, &inputs, step))?;
        optimizer.step()?;
        module.lazy_reset_grad();
        Ok::<u32, ort_core::Error>(loss.to_bits())
    };
    for index in 0..4 {
        step(&mut module, &optimizer, index)?;
    }
    state.set_property("epoch", 7)?;
    state.set_property("best", 0.5)?;
    state.set_property("name", "seven")?;
    assert!(state.set_property("bad", f64::NAN).is_err());
    files.checkpoint = folder.path().join("later");
    state.save_checkpoint(&files.checkpoint, true)?;
    let (again, mut other, other_optimizer) = begin(&files)?;
    assert_eq!(again.property_names(), ["best", "epoch", "name"]);
    assert_eq!(again.property("epoch"), Some(Property::Int(7)));
    assert_eq!(again.property("best"), Some(Property::Float(0.5)));
    assert_eq!(other_optimizer.get_learning_rate()?, 0.02);
    for index in 4..8 {
        assert_eq!(step(&mut module, &optimizer, index)?, step(&mut other, &other_optimizer, index)?);
    }
    let all = [&module, &other].map(|it| it.get_contiguous_parameters(false).unwrap());
    assert_eq!(all[0].bytes(), all[1].bytes());
    Ok(())
}

#[test]
fn nominal_checkpoints_are_completed() -> Result<()> {
    let (reference, arrays) = (json("api/reference.json"), read_npz("api/data.npz"));
    let folder = tempfile::tempdir().unwrap();
    let options = options(&reference["frozen"], folder.path());
    let options = ArtifactOptions { nominal_checkpoint: true, prefix: "small_".into(), ..options };
    let files = generate_artifacts(&perceptron(), &options)?;
    assert_eq!(files.checkpoint, folder.path().join("small_checkpoint"));
    let (_, mut whole, _) = begin(&files)?;
    let nominal = files.nominal_checkpoint.clone().unwrap();
    let (state, mut module, _) = begin(&Artifacts { checkpoint: nominal, ..files })?;
    let inputs = batch(&arrays, &module.input_names()?, 0);
    let problem = module.call(&inputs).unwrap_err();
    assert!(problem.to_string().contains("nominal"), "{problem}");
    let short = Tensor::from_slice(&[2], &[0.0f32; 2])?;
    assert!(module.copy_buffer_to_parameters(&short, true).is_err());
    module.copy_buffer_to_parameters(&whole.get_contiguous_parameters(true)?, true)?;
    assert_eq!(module.call(&inputs)?.to_bits(), whole.call(&inputs)?.to_bits());
    let frozen = Tensor::from_slice(&[16], &[1.0f32; 16])?;
    assert_eq!(state.set_parameter("first.bias", &frozen).unwrap_err().kind(), ErrorKind::NotImplemented);
    Ok(())
}

#[test]
fn what_was_trained_is_exported() -> Result<()> {
    let (reference, arrays) = (json("api/reference.json"), read_npz("api/data.npz"));
    let folder = tempfile::tempdir().unwrap();
    let case = &reference["mse_sgd"];
    let (_, mut module, optimizer) =
        begin(&generate_artifacts(&perceptron(), &options(case, folder.path()))?)?;
    let inputs = batch(&arrays, &module.input_names()?, 0);
    module.call(&inputs)?;
    optimizer.step()?;
    module.eval().call(&inputs)?;
    let expected = module.output("scores")?;
    let file = folder.path().join("trained.onnx");
    assert!(module.export_model_for_inferencing(&file, &["score"]).is_err());
    module.export_model_for_inferencing(&file, &["scores"])?;
    let session = Session::builder(&Model::load(&file)?).build()?;
    let found = session.run(&[("input", inputs[0].clone())])?;
    let (found, expected) = (doubles(found[0].1.tensor()?), doubles(expected.tensor()?));
    assert!(worst(&found, &expected) < 1e-6);
    // Up to the middle of the model: what is behind it is left out.
    module.export_model_for_inferencing(&file, &["active"])?;
    let model = Model::load(&file)?;
    assert!(model.graph().find_value("second.weight").is_none());
    Ok(())
}

#[test]
fn numbers_that_no_training_has_are_refused() -> Result<()> {
    let reference = json("api/reference.json");
    let folder = tempfile::tempdir().unwrap();
    let files =
        generate_artifacts(&perceptron(), &options(&reference["cross_entropy_adamw"], folder.path()))?;
    let (state, _module, _optimizer) = begin(&files)?;
    let (saved, changed) = (folder.path().join("saved"), folder.path().join("changed"));
    state.save_checkpoint(&saved, true)?;
    // In a safetensors file the length of the header comes first, then the header, then the data.
    let bytes = std::fs::read(&saved).unwrap();
    let (length, rest) = bytes.split_at(8);
    let (header, tensors) = rest.split_at(u64::from_le_bytes(length.try_into().unwrap()) as usize);
    let header: Json = serde_json::from_slice(header).unwrap();
    for (key, value, words) in [
        ("updates", Json::from(u64::MAX), "updates"),
        ("learning_rate", Json::from(-1), "learning rate is -1"),
    ] {
        let mut header = header.clone();
        let text = &mut header["__metadata__"]["ort-runtime.checkpoint"];
        let mut manifest: Json = serde_json::from_str(text.as_str().unwrap()).unwrap();
        manifest["optimizer"][key] = value;
        *text = manifest.to_string().into();
        let header = header.to_string();
        let length = (header.len() as u64).to_le_bytes();
        std::fs::write(&changed, [&length[..], header.as_bytes(), tensors].concat()).unwrap();
        let problem = CheckpointState::load_checkpoint(&changed).err().unwrap().to_string();
        assert!(problem.contains(words), "{key}: {problem}");
    }
    Ok(())
}

#[test]
fn what_does_not_suit_is_refused() -> Result<()> {
    let reference = json("api/reference.json");
    let folder = tempfile::tempdir().unwrap();
    let good = options(&reference["mse_adamw"], folder.path());
    let some = |names: &[&str]| ArtifactOptions { requires_grad: strings(names), ..good.clone() };
    let table = [
        (some(&[]), "no parameter requires a gradient"),
        (some(&["first.weigth"]), "no weight 'first.weigth'"),
        (some(&["first*"]), "'first*' is not a float parameter"),
        (ArtifactOptions { frozen_params: strings(&["first.bias"]), ..good.clone() }, "frozen and require"),
        (ArtifactOptions { additional_output_names: strings(&["nothing"]), ..good.clone() }, "'nothing'"),
        (ArtifactOptions { loss_input_names: strings(&["nothing"]), ..good.clone() }, "no output 'nothing'"),
        (
            ArtifactOptions { loss_input_names: strings(&["scores", "x"]), ..good.clone() },
            "and 'target' or nothing",
        ),
        (ArtifactOptions { loss: None, ..good.clone() }, "expected one element as the loss"),
        (ArtifactOptions { clip_grad: Some(0.0), ..good.clone() }, "to clip gradients to is 0"),
    ];
    for (options, expected) in table {
        let problem = generate_artifacts(&perceptron(), &options).unwrap_err().to_string();
        assert!(problem.contains(expected), "{problem} has no '{expected}'");
    }
    let files = generate_artifacts(&perceptron(), &good)?;
    let (state, mut module, optimizer) = begin(&files)?;
    assert!(optimizer.step().unwrap_err().to_string().contains("no gradients"));
    assert!(module.call(&[]).unwrap_err().to_string().contains("input, target"));
    assert!(state.parameter("none").is_err());
    let options = ModuleOptions::default;
    let of = |path: &Path, state: &CheckpointState| Module::new(path, state, None, options()).err().unwrap();
    assert!(of(&files.training_model, &state).to_string().contains("module already"));
    let fresh = CheckpointState::load_checkpoint(&files.checkpoint)?;
    assert!(fresh.save_checkpoint(folder.path().join("other"), true).is_err());
    assert!(of(&files.eval_model, &fresh).to_string().contains("an evaluation model, expected"));
    assert!(of(&data("api/model.onnx"), &fresh).to_string().contains("not a training artifact"));
    let mut module = Module::new(&files.training_model, &fresh, None, options())?;
    let arrays = read_npz("api/data.npz");
    let inputs = batch(&arrays, &module.input_names()?, 0);
    assert!(module.eval().call(&inputs).unwrap_err().to_string().contains("no evaluation model"));
    let bytes = std::fs::read(&files.checkpoint).unwrap();
    for length in [0, 4, bytes.len() / 2, bytes.len() - 1] {
        let path = folder.path().join(format!("cut{length}"));
        std::fs::write(&path, &bytes[..length]).unwrap();
        assert!(CheckpointState::load_checkpoint(&path).is_err(), "{length} bytes");
    }
    Ok(())
}
