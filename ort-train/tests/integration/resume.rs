//! A training that goes on is the one that did not stop; batches that are accumulated are one large
//! batch.

use crate::support::{MODELS, Recording, given};
use ort_core::session::Model;
use ort_core::tensor::{Tensor, Value};
use ort_core::{ErrorKind, Result};
use ort_train::{Optimizer, Trainer, TrainingOptions};
use serde_json::Map;

fn bits(trainer: &mut Trainer) -> Result<Vec<Vec<u8>>> {
    let names: Vec<String> =
        trainer.training_graph().parameters().iter().map(|parameter| parameter.name.clone()).collect();
    names.iter().map(|name| Ok(trainer.parameter(name)?.bytes().unwrap().to_vec())).collect()
}

#[test]
fn a_resumed_run_has_the_bits_of_one_that_went_on() -> Result<()> {
    for name in MODELS {
        for accumulate in [1, 2] {
            let recording = Recording::load(name);
            let options = TrainingOptions { accumulate, dropout: true, ..recording.options() };
            let folder = tempfile::tempdir().unwrap();
            let mut whole = Trainer::new(&recording.model, options.clone())?;
            let mut stopped = Trainer::new(&recording.model, options.clone())?;
            for step in 0..3 {
                whole.train_step(&given(&recording.batch(step)))?;
                stopped.train_step(&given(&recording.batch(step)))?;
            }
            let properties: Map<String, serde_json::Value> =
                [("epoch".to_string(), 7.into())].into_iter().collect();
            stopped.save_checkpoint(folder.path(), &properties)?;
            // Once more over it: the folder holds one checkpoint.
            stopped.save_checkpoint(folder.path(), &properties)?;
            assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2, "{name}");
            drop(stopped);
            let mut resumed = Trainer::new(&recording.model, options)?;
            assert_eq!(resumed.load_checkpoint(folder.path())?, properties);
            for step in 3..6 {
                let one = whole.train_step(&given(&recording.batch(step)))?;
                let other = resumed.train_step(&given(&recording.batch(step)))?;
                assert_eq!(one.to_bits(), other.to_bits(), "{name}, step {step}");
            }
            assert_eq!(bits(&mut whole)?, bits(&mut resumed)?, "{name}");
        }
    }
    Ok(())
}

#[test]
fn what_is_no_checkpoint_is_refused() -> Result<()> {
    let recording = Recording::load("unet");
    let folder = tempfile::tempdir().unwrap();
    let mut trainer = Trainer::new(&recording.model, recording.options())?;
    let problem = trainer.load_checkpoint(folder.path()).unwrap_err();
    assert_eq!(problem.kind(), ErrorKind::NoSuchFile, "{problem}");
    trainer.save_checkpoint(folder.path(), &Map::new())?;
    let options = TrainingOptions { optimizer: Optimizer::adamw(), ..recording.options() };
    let problem = Trainer::new(&recording.model, options)?.load_checkpoint(folder.path()).unwrap_err();
    assert!(problem.to_string().contains("optimizer"), "{problem}");
    let other = Recording::load("resnet18");
    let problem = Trainer::new(&other.model, other.options())?.load_checkpoint(folder.path()).unwrap_err();
    assert!(problem.to_string().contains("has no tensor"), "{problem}");
    let files = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path());
    let tensors = files.into_iter().find(|path| path.extension().unwrap() == "safetensors").unwrap();
    let bytes = std::fs::read(&tensors).unwrap();
    std::fs::write(&tensors, &bytes[..bytes.len() / 2]).unwrap();
    let before = bits(&mut trainer)?;
    assert!(trainer.load_checkpoint(folder.path()).is_err());
    assert_eq!(bits(&mut trainer)?, before);
    std::fs::write(folder.path().join("training.json"), "{").unwrap();
    let problem = trainer.load_checkpoint(folder.path()).unwrap_err();
    assert!(problem.to_string().contains("damaged"), "{problem}");
    Ok(())
}

/// The halves of a batch, along the first axis.
fn halves(batch: &[(String, Value)]) -> [Vec<(String, Value)>; 2] {
    let half = |value: &Value, index: usize| -> Value {
        let tensor = value.tensor().unwrap();
        let mut shape = tensor.shape().to_vec();
        shape[0] /= 2;
        let bytes = tensor.bytes().unwrap();
        let size = bytes.len() / 2;
        Tensor::from_bytes(tensor.dtype(), &shape, bytes.slice(index * size..(index + 1) * size))
            .unwrap()
            .into()
    };
    [0, 1].map(|index| batch.iter().map(|(name, value)| (name.clone(), half(value, index))).collect())
}

#[test]
fn accumulated_batches_are_one_large_batch() -> Result<()> {
    // Normalizations over the batch see another batch.
    for name in ["bert", "gpt", "lstm"] {
        let recording = Recording::load(name);
        let mut whole = Trainer::new(&recording.model, recording.options())?;
        let mut parts = Trainer::new(&recording.model, recording.options())?;
        for step in 0..3 {
            whole.accumulate(&given(&recording.batch(step)))?;
            for half in halves(&recording.batch(step)) {
                parts.accumulate(&given(&half))?;
            }
            let (one, other) = (whole.grads()?, parts.grads()?);
            let norm = |values: &[f32]| values.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
            let largest = one.iter().map(|(_, it)| norm(&it.to_vec().unwrap())).fold(0.0, f64::max);
            for ((parameter, one), (_, other)) in one.iter().zip(&other) {
                let (one, other) = (one.to_vec::<f32>()?, other.to_vec::<f32>()?);
                let off: Vec<f32> = one.iter().zip(&other).map(|(one, other)| one - other).collect();
                let bound = 1e-6 * (norm(&one) + 0.1 * largest);
                assert!(norm(&off) <= bound, "{name}, {parameter}: {} of {}", norm(&off), norm(&one));
            }
            whole.apply()?;
            parts.apply()?;
        }
    }
    Ok(())
}

#[test]
fn what_was_trained_is_a_model_again() -> Result<()> {
    for name in MODELS {
        let recording = Recording::load(name);
        let folder = tempfile::tempdir().unwrap();
        let mut trainer = Trainer::new(&recording.model, recording.options())?;
        for step in 0..2 {
            trainer.train_step(&given(&recording.batch(step)))?;
        }
        let file = folder.path().join("trained.onnx");
        trainer.export(&file)?;
        let inputs: Vec<(String, Value)> =
            recording.batch(0).into_iter().filter(|(name, _)| name != "labels" && name != "target").collect();
        let expected = trainer.predict(&given(&inputs))?;
        let session = ort_core::session::Session::builder(&Model::load(&file)?).build()?;
        let outputs = session.run(&given(&inputs))?;
        for ((name, one), (_, other)) in expected.iter().zip(&outputs) {
            assert_eq!(one.tensor()?.bytes(), other.tensor()?.bytes(), "{name}");
        }
    }
    Ok(())
}

#[cfg(unix)]
#[test]
fn saving_touches_nothing_outside_of_the_folder() -> Result<()> {
    let recording = Recording::load("unet");
    let mut trainer = Trainer::new(&recording.model, recording.options())?;
    let top = tempfile::tempdir().unwrap();
    let (good, victim) = (top.path().join("good"), top.path().join("victim"));
    trainer.save_checkpoint(&good, &Map::new())?;
    let manifest = std::fs::read_to_string(good.join("training.json")).unwrap();
    let own = manifest.lines().find(|line| line.contains("\"tensors\"")).unwrap();
    std::fs::write(&victim, "kept").unwrap();
    let absolute = victim.display().to_string();
    let others =
        ["../victim", &absolute, "kept", "tensors-.safetensors", "tensors-1.safetensors/../kept", ".", ""];
    for (index, name) in others.iter().enumerate() {
        let folder = top.path().join(format!("folder{index}"));
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(folder.join("kept"), "kept").unwrap();
        let hostile = manifest.replace(own, &format!("  \"tensors\": {},", serde_json::Value::from(*name)));
        std::fs::write(folder.join("training.json"), hostile).unwrap();
        // What is written next would be written through these.
        for tensors in 0..3 {
            std::os::unix::fs::symlink("../victim", folder.join(format!("tensors-{tensors}.safetensors")))
                .unwrap();
        }
        trainer.save_checkpoint(&folder, &Map::new())?;
        Trainer::new(&recording.model, recording.options())?.load_checkpoint(&folder)?;
        for kept in [&victim, &folder.join("kept")] {
            assert_eq!(std::fs::read_to_string(kept).unwrap(), "kept", "{name}: {}", kept.display());
        }
    }
    let linked = top.path().join("linked");
    std::fs::create_dir(&linked).unwrap();
    std::os::unix::fs::symlink("../victim", linked.join("training.json")).unwrap();
    trainer.save_checkpoint(&linked, &Map::new())?;
    trainer.load_checkpoint(&linked)?;
    assert_eq!(std::fs::read_to_string(&victim).unwrap(), "kept");
    Ok(())
}

#[test]
fn a_refused_checkpoint_changes_nothing() -> Result<()> {
    let recording = Recording::load("unet");
    let mut trainer = Trainer::new(&recording.model, recording.options())?;
    let folder = tempfile::tempdir().unwrap();
    trainer.save_checkpoint(folder.path(), &Map::new())?;
    let path = folder.path().join("training.json");
    let manifest = std::fs::read_to_string(&path).unwrap();
    let mut changed: serde_json::Value = serde_json::from_str(&manifest).unwrap();
    changed["pending"] = 1.into();
    std::fs::write(&path, changed.to_string()).unwrap();
    let problem = trainer.load_checkpoint(folder.path()).unwrap_err().to_string();
    assert!(problem.contains(".gradient'"), "{problem}");
    // Gradients that were left behind would be expected of this checkpoint, too.
    std::fs::write(&path, manifest).unwrap();
    trainer.load_checkpoint(folder.path())?;
    Ok(())
}

#[test]
fn numbers_that_no_training_has_are_refused() -> Result<()> {
    let recording = Recording::load("unet");
    let mut trainer = Trainer::new(&recording.model, recording.options())?;
    let folder = tempfile::tempdir().unwrap();
    trainer.save_checkpoint(folder.path(), &Map::new())?;
    let path = folder.path().join("training.json");
    let manifest: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    for (key, value, words) in [
        ("learning_rate", serde_json::json!(-1), "learning rate is -1"),
        ("learning_rate", serde_json::json!(1e300), "learning rate is inf"),
        ("learning_rate", serde_json::json!(1e20), "learning rate is 1"),
        ("updates", serde_json::json!(u64::MAX), "updates"),
        ("batches", serde_json::json!(u64::MAX), "batches"),
        ("pending", serde_json::json!(u64::MAX), "pending"),
    ] {
        let mut changed = manifest.clone();
        changed.as_object_mut().unwrap().insert(key.to_string(), value);
        std::fs::write(&path, changed.to_string()).unwrap();
        let problem = trainer.load_checkpoint(folder.path()).unwrap_err().to_string();
        assert!(problem.contains(words), "{key}: {problem}");
        // The training is as it was.
        trainer.train_step(&given(&recording.batch(0)))?;
    }
    Ok(())
}
