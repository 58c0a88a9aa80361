//! Trainings on a CUDA device: their losses are the CPU's, their tensors lie on the device, and
//! they go on where they were saved.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails where it cannot go on")]

#[path = "../../ort-train/tests/integration/support/mod.rs"]
mod recordings;
mod support;

use ort_core::session::ProviderRequest;
use ort_core::{ErrorKind, Result};
use ort_train::{Recompute, Trainer, TrainingOptions};
use recordings::{Recording, given};
use serde_json::Map;
use support::with_device;

/// The device first, with products of float32 as the CPU has them, and the CPU for what it does not
/// claim.
fn on_device(options: TrainingOptions) -> TrainingOptions {
    let providers = vec![ProviderRequest::new("cuda").option("use_tf32", "0"), ProviderRequest::new("cpu")];
    TrainingOptions { providers, ..options }
}

/// Sums of another order: losses differ by some units in the last place of float32, which each
/// update carries on.
const TOLERANCE: f32 = 1e-4;

fn assert_near(actual: f32, expected: f32, what: &str) {
    assert!((actual - expected).abs() <= TOLERANCE * expected.abs(), "{what}: {actual}, expected {expected}");
}

fn losses(trainer: &mut Trainer, recording: &Recording, steps: std::ops::Range<usize>) -> Result<Vec<f32>> {
    steps.map(|step| trainer.train_step(&given(&recording.batch(step)))).collect()
}

#[test]
fn losses_are_those_of_the_cpu() -> Result<()> {
    let Some(_device) = with_device("losses_are_those_of_the_cpu")? else { return Ok(()) };
    for name in ["bert", "gpt", "lstm", "resnet18"] {
        let recording = Recording::load(name);
        let expected = losses(&mut Trainer::new(&recording.model, recording.options())?, &recording, 0..3)?;
        let mut trainer = Trainer::new(&recording.model, on_device(recording.options()))?;
        let actual = losses(&mut trainer, &recording, 0..3)?;
        for (step, (actual, expected)) in actual.iter().zip(&expected).enumerate() {
            assert_near(*actual, *expected, &format!("{name}, step {step}"));
        }
        // Statistics of normalizations count where nothing is trained.
        let mut host = Trainer::new(&recording.model, recording.options())?;
        losses(&mut host, &recording, 0..3)?;
        let batch = recording.batch(3);
        let (actual, expected) = (trainer.eval_step(&given(&batch))?, host.eval_step(&given(&batch))?);
        assert_near(actual, expected, &format!("{name}, evaluation"));
    }
    Ok(())
}

#[test]
fn a_training_goes_on_on_the_other_side() -> Result<()> {
    let Some(_device) = with_device("a_training_goes_on_on_the_other_side")? else { return Ok(()) };
    let recording = Recording::load("gpt");
    let expected = losses(&mut Trainer::new(&recording.model, recording.options())?, &recording, 0..4)?;
    for begins_on_device in [true, false] {
        let there = |is_on_device| match is_on_device {
            true => on_device(recording.options()),
            false => recording.options(),
        };
        let folder = tempfile::tempdir().unwrap();
        let mut first = Trainer::new(&recording.model, there(begins_on_device))?;
        losses(&mut first, &recording, 0..2)?;
        first.save_checkpoint(folder.path(), &Map::new())?;
        let mut second = Trainer::new(&recording.model, there(!begins_on_device))?;
        second.load_checkpoint(folder.path())?;
        for (actual, expected) in losses(&mut second, &recording, 2..4)?.iter().zip(&expected[2..]) {
            assert_near(*actual, *expected, &format!("begun on the device: {begins_on_device}"));
        }
        // What a training was is what its checkpoint is.
        let name = first.training_graph().parameters().first().unwrap().name.clone();
        let mut again = Trainer::new(&recording.model, there(begins_on_device))?;
        again.load_checkpoint(folder.path())?;
        assert_eq!(first.parameter(&name)?.bytes(), again.parameter(&name)?.bytes());
    }
    Ok(())
}

#[test]
fn batches_are_accumulated() -> Result<()> {
    let Some(_device) = with_device("batches_are_accumulated")? else { return Ok(()) };
    let recording = Recording::load("gpt");
    let options = || TrainingOptions { accumulate: 2, clip_norm: Some(1.0), ..recording.options() };
    let mut host = Trainer::new(&recording.model, options())?;
    let mut device = Trainer::new(&recording.model, on_device(options()))?;
    for step in 0..4 {
        let batch = recording.batch(step);
        let (expected, actual) = (host.train_step(&given(&batch))?, device.train_step(&given(&batch))?);
        assert_near(actual, expected, &format!("step {step}"));
    }
    assert_eq!((device.updates(), device.pending()), (2, 0));
    Ok(())
}

#[test]
fn recomputation_keeps_the_bits_and_the_limit() -> Result<()> {
    let Some(_device) = with_device("recomputation_keeps_the_bits_and_the_limit")? else { return Ok(()) };
    let recording = Recording::load("bert");
    let sizes = recording.sizes();
    let mut whole = Trainer::new(&recording.model, on_device(recording.options()))?;
    let memory = whole.memory(&sizes)?;
    let expected = losses(&mut whole, &recording, 0..2)?;
    assert!(whole.measured().activations <= memory.activations);
    let options = TrainingOptions { recompute: Recompute::Layers, ..on_device(recording.options()) };
    let mut layers = Trainer::new(&recording.model, options)?;
    let report = layers.optimize_memory(&sizes)?;
    // About half, as on the CPU: copies between memories hide no boundary of layers.
    assert!(report.peak < report.peak_before / 10 * 6, "{report:?}");
    assert_eq!(losses(&mut layers, &recording, 0..2)?, expected);
    // What that takes suffices as a limit, too.
    let limit = memory.total() - report.peak_before + report.peak;
    let options = TrainingOptions { memory_limit: Some(limit), ..on_device(recording.options()) };
    let mut bounded = Trainer::new(&recording.model, options)?;
    assert_eq!(losses(&mut bounded, &recording, 0..2)?, expected);
    assert!(bounded.measured().total() <= limit, "{:?}, the limit is {limit}", bounded.measured());
    Ok(())
}

#[test]
fn a_training_without_room_on_the_device_loses_nothing() -> Result<()> {
    let Some(_device) = with_device("a_training_without_room_on_the_device_loses_nothing")? else {
        return Ok(());
    };
    let recording = Recording::load("gpt");
    let mut trainer = Trainer::new(&recording.model, recording.options())?;
    let held = trainer.memory(&recording.sizes())?;
    let small = ProviderRequest::new("cuda")
        .option("gpu_mem_limit", &(held.parameters / 2).to_string())
        .option("arena_extend_strategy", "kSameAsRequested");
    let options =
        TrainingOptions { providers: vec![small, ProviderRequest::new("cpu")], ..recording.options() };
    let mut bounded = Trainer::new(&recording.model, options)?;
    // The second step tries again: the first gave back what it had taken.
    for _ in 0..2 {
        let problem = bounded.train_step(&given(&recording.batch(0))).unwrap_err();
        assert_eq!(problem.kind(), ErrorKind::OutOfMemory, "{problem}");
    }
    let name = trainer.training_graph().parameters().first().unwrap().name.clone();
    assert_eq!(bounded.parameter(&name)?.bytes(), trainer.parameter(&name)?.bytes());
    Ok(())
}
