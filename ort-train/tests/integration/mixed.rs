//! Mixed precision: curves beside those of PyTorch's autocast, updates that are left out, and bits
//! that follow from nothing else.

use crate::support::{MODELS, Recording, given, json};
use ort_core::dtype::DType;
use ort_core::ir::GraphBuilder;
use ort_core::session::Model;
use ort_core::tensor::Tensor;
use ort_core::{ErrorKind, Result};
use ort_train::{Loss, LossScale, MixedPrecision, Recompute, Trainer, TrainingGraph, TrainingOptions};
use serde_json::{Map, Value as Json};

const BOTH: [(&str, MixedPrecision); 2] = [("bf16", MixedPrecision::Bf16), ("fp16", MixedPrecision::Fp16)];

/// How much farther a curve may be from that in float32 than PyTorch's own is. Both have roundings
/// of the same size, in other places: what one of them comes to is one draw of such roundings, and
/// so is the other.
const FARTHER: f64 = 3.0;

fn mixed(recording: &Recording, precision: MixedPrecision) -> TrainingOptions {
    TrainingOptions { mixed_precision: Some(precision), ..recording.options() }
}

fn dynamic(initial: f32, growth_interval: u32) -> Option<LossScale> {
    Some(LossScale::Dynamic { initial, growth_factor: 2.0, backoff_factor: 0.5, growth_interval })
}

/// The losses of some steps.
fn losses(recording: &Recording, trainer: &mut Trainer, steps: std::ops::Range<usize>) -> Result<Vec<f32>> {
    steps.map(|step| trainer.train_step(&given(&recording.batch(step)))).collect()
}

/// All that the training keeps, bit by bit.
fn state(trainer: &mut Trainer) -> Result<Vec<u8>> {
    let folder = tempfile::tempdir().unwrap();
    trainer.save_checkpoint(folder.path(), &Map::new())?;
    let files = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path());
    let tensors = files.into_iter().find(|path| path.extension().unwrap() == "safetensors").unwrap();
    Ok(std::fs::read(tensors).unwrap())
}

/// The root of the mean squared relative difference of two curves.
fn distance(curve: &[f64], expected: &[f64]) -> f64 {
    let squares = curve.iter().zip(expected).map(|(loss, expected)| ((loss - expected) / expected).powi(2));
    (squares.sum::<f64>() / expected.len() as f64).sqrt()
}

#[test]
fn curves_are_as_near_to_float32_as_autocast_is() -> Result<()> {
    let mut problems = Vec::new();
    for name in MODELS {
        let (recording, reference) = (Recording::load(name), json(&format!("{name}/mixed.json")));
        for (key, precision) in BOTH {
            let reference = &reference[key];
            let numbers = |key: &str| -> Vec<f64> {
                reference[key].as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
            };
            let scales = reference.get("scales").map(|_| numbers("scales"));
            let interval = reference["growth_interval"].as_u64().unwrap_or(1) as u32;
            let loss_scale = scales.as_ref().and_then(|scales| dynamic(scales[0] as f32, interval));
            let options = TrainingOptions { loss_scale, ..mixed(&recording, precision) };
            let mut trainer = Trainer::new(&recording.model, options)?;
            let expected = numbers("float32_losses");
            let mut losses = Vec::new();
            for step in 0..expected.len() {
                let scale = scales.as_ref().map(|scales| scales[step] as f32);
                assert_eq!(trainer.loss_scale(), scale, "{name}, {key}, step {step}");
                losses.push(f64::from(trainer.train_step(&given(&recording.batch(step)))?));
            }
            let (ours, theirs) = (distance(&losses, &expected), distance(&numbers("losses"), &expected));
            println!("{name} {key}: {ours:.1e}, autocast {theirs:.1e}");
            if ours.is_nan() || ours > FARTHER * theirs {
                problems.push(format!("{name}, {key}: {ours:.1e} off, autocast {theirs:.1e}"));
            }
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
    Ok(())
}

#[test]
fn an_update_that_overflows_is_left_out() -> Result<()> {
    for accumulate in [1, 2] {
        let recording = Recording::load("bert");
        let initial = 2.0f32.powi(40);
        let options = TrainingOptions {
            loss_scale: dynamic(initial, 2000),
            accumulate,
            ..mixed(&recording, MixedPrecision::Fp16)
        };
        let mut trainer = Trainer::new(&recording.model, options)?;
        let before: Vec<Vec<f32>> = parameters(&mut trainer)?;
        losses(&recording, &mut trainer, 0..2)?;
        let skipped = 2 / accumulate as u64;
        assert_eq!((trainer.updates(), trainer.skipped()), (0, skipped));
        assert_eq!(trainer.loss_scale(), Some(initial * 0.5f32.powi(skipped as i32)));
        assert_eq!(parameters(&mut trainer)?, before);
        if accumulate == 1 {
            let untouched = state(&mut Trainer::new(&recording.model, recording.options())?)?;
            assert_eq!(state(&mut trainer)?, untouched);
        }
        // In the end the scale is small enough.
        losses(&recording, &mut trainer, 0..60)?;
        assert!(trainer.updates() > 0);
        assert_ne!(parameters(&mut trainer)?, before);
    }
    // A constant scale stays, and what overflows is left out all the same.
    let recording = Recording::load("bert");
    let loss_scale = Some(LossScale::Constant(2.0f32.powi(40)));
    let options = TrainingOptions { loss_scale, ..mixed(&recording, MixedPrecision::Fp16) };
    let mut trainer = Trainer::new(&recording.model, options)?;
    losses(&recording, &mut trainer, 0..2)?;
    assert_eq!((trainer.updates(), trainer.skipped()), (0, 2));
    assert_eq!(trainer.loss_scale(), Some(2.0f32.powi(40)));
    Ok(())
}

fn parameters(trainer: &mut Trainer) -> Result<Vec<Vec<f32>>> {
    let names: Vec<String> =
        trainer.training_graph().parameters().iter().map(|parameter| parameter.name.clone()).collect();
    // Masters are of float32.
    names.iter().map(|name| trainer.parameter(name)?.to_vec::<f32>()).collect()
}

/// Multiplying by powers of two rounds nothing in bfloat16: what differs is wrong.
#[test]
fn updates_and_clipping_see_gradients_without_the_scale() -> Result<()> {
    for (clip_norm, accumulate) in [(None, 1), (Some(0.05), 1), (Some(0.05), 2)] {
        let recording = Recording::load("bert");
        let train = |loss_scale: Option<LossScale>| {
            let precision = mixed(&recording, MixedPrecision::Bf16);
            let options = TrainingOptions { loss_scale, clip_norm, accumulate, ..precision };
            let mut trainer = Trainer::new(&recording.model, options)?;
            let losses = losses(&recording, &mut trainer, 0..6)?;
            Ok::<_, ort_core::Error>((losses, parameters(&mut trainer)?))
        };
        let expected = train(None)?;
        for scale in [1.0, 1024.0] {
            let found = train(Some(LossScale::Constant(scale)))?;
            assert_eq!(found, expected, "scale {scale}, clipped to {clip_norm:?}, {accumulate} batches");
        }
        let mut trainer = Trainer::new(&recording.model, {
            let loss_scale = Some(LossScale::Constant(1024.0));
            TrainingOptions { loss_scale, ..mixed(&recording, MixedPrecision::Bf16) }
        })?;
        let mut plain = Trainer::new(&recording.model, mixed(&recording, MixedPrecision::Bf16))?;
        for trainer in [&mut trainer, &mut plain] {
            trainer.accumulate(&given(&recording.batch(0)))?;
        }
        for ((name, one), (_, other)) in trainer.grads()?.iter().zip(&plain.grads()?) {
            assert_eq!(one.bytes(), other.bytes(), "{name}");
        }
    }
    Ok(())
}

#[test]
fn a_resumed_run_has_the_bits_of_one_that_went_on() -> Result<()> {
    for name in MODELS {
        for accumulate in [1, 2] {
            let recording = Recording::load(name);
            // It falls and grows before and after the checkpoint, which is written between two
            // changes.
            let options = TrainingOptions {
                accumulate,
                dropout: true,
                loss_scale: dynamic(2.0f32.powi(19), 3),
                ..mixed(&recording, MixedPrecision::Fp16)
            };
            let mut whole = Trainer::new(&recording.model, options.clone())?;
            let mut stopped = Trainer::new(&recording.model, options.clone())?;
            let steps = 7;
            losses(&recording, &mut whole, 0..steps)?;
            losses(&recording, &mut stopped, 0..steps)?;
            let folder = tempfile::tempdir().unwrap();
            stopped.save_checkpoint(folder.path(), &Map::new())?;
            drop(stopped);
            let mut resumed = Trainer::new(&recording.model, options.clone())?;
            resumed.load_checkpoint(folder.path())?;
            for step in steps..2 * steps {
                let one = losses(&recording, &mut whole, step..step + 1)?;
                let other = losses(&recording, &mut resumed, step..step + 1)?;
                assert_eq!(one[0].to_bits(), other[0].to_bits(), "{name}, step {step}");
                assert_eq!(whole.loss_scale(), resumed.loss_scale(), "{name}, step {step}");
            }
            assert_eq!(whole.skipped(), resumed.skipped());
            assert_eq!(state(&mut whole)?, state(&mut resumed)?, "{name}");
            // In another precision it is another training.
            for other in [recording.options(), mixed(&recording, MixedPrecision::Bf16)] {
                let other = TrainingOptions { accumulate, ..other };
                let problem =
                    Trainer::new(&recording.model, other)?.load_checkpoint(folder.path()).unwrap_err();
                assert!(problem.to_string().contains("precision"), "{problem}");
            }
        }
    }
    Ok(())
}

#[test]
fn the_same_bits_with_any_recomputation_and_threads() -> Result<()> {
    for name in MODELS {
        let recording = Recording::load(name);
        for (key, precision) in BOTH {
            let train = |recompute: Recompute, threads: usize| {
                let threads = Some(threads);
                let options = TrainingOptions { recompute, threads, ..mixed(&recording, precision) };
                let mut trainer = Trainer::new(&recording.model, options)?;
                let losses = losses(&recording, &mut trainer, 0..6)?;
                let bits: Vec<u32> = losses.into_iter().map(f32::to_bits).collect();
                Ok::<_, ort_core::Error>((bits, state(&mut trainer)?))
            };
            let expected = train(Recompute::AsLimited, 1)?;
            for (recompute, threads) in
                [(Recompute::AsLimited, 2), (Recompute::Layers, 1), (Recompute::Most, 2)]
            {
                let found = train(recompute.clone(), threads)?;
                assert!(found == expected, "{name}, {key}: {recompute:?}, {threads} threads");
            }
        }
    }
    Ok(())
}

#[test]
fn activations_are_smaller_and_masters_are_not() -> Result<()> {
    for (name, most) in [("bert", 0.85), ("gpt", 0.85)] {
        let recording = Recording::load(name);
        let dims = [("batch", 8), ("sequence", 12)];
        let single = Trainer::new(&recording.model, recording.options())?.memory(&dims)?;
        for (key, precision) in BOTH {
            let memory = Trainer::new(&recording.model, mixed(&recording, precision))?.memory(&dims)?;
            let share = memory.activations as f64 / single.activations as f64;
            println!("{name} {key}: {share:.2} of {}", single.activations);
            assert!(share < most, "{name}, {key}: {share}");
            assert_eq!((memory.parameters, memory.states), (single.parameters, single.states));
        }
    }
    Ok(())
}

#[test]
fn what_computes_in_which_type_is_told() -> Result<()> {
    let recording = Recording::load("bert");
    let trainer = Trainer::new(&recording.model, mixed(&recording, MixedPrecision::Bf16))?;
    let graph = trainer.training_graph();
    let count = |operator: &str| {
        let row = graph.precisions().iter().find(|row| row.operator == operator);
        row.map_or((0, 0), |row| (row.half, row.single))
    };
    assert_eq!(count("MatMul").1, 0);
    assert!(count("MatMul").0 > 0);
    assert_eq!((count("TrainingAttention").1, count("Softmax")), (0, (0, 0)));
    for operator in ["LayerNormalization", "Gather"] {
        assert_eq!(count(operator).0, 0, "{operator}");
        assert!(count(operator).1 > 0, "{operator}");
    }
    let dtypes: Vec<DType> = graph.parameters().iter().map(|it| it.tensor.dtype()).collect();
    assert!(dtypes.iter().all(|dtype| *dtype == DType::F32));
    let plain = Trainer::new(&recording.model, recording.options())?;
    assert!(plain.training_graph().precisions().is_empty());
    assert_eq!((plain.loss_scale(), plain.skipped()), (None, 0));
    Ok(())
}

/// The numbers are what a mask adds to hide a score.
#[test]
fn constants_that_16_bits_cannot_hold_stay_in_float32() -> Result<()> {
    for (key, precision, largest) in
        [("bf16", MixedPrecision::Bf16, 3.389_531_4e38), ("fp16", MixedPrecision::Fp16, 65504.0f32)]
    {
        for (number, expected) in [(-largest, (1, 0)), (f32::NEG_INFINITY, (1, 0)), (f32::MIN, (0, 1))] {
            let mut b = GraphBuilder::new("masked");
            let x = b.input("x", DType::F32, &["batch", "2"]);
            let weight = b.graph_mut().add_constant("w", Tensor::from_slice(&[2, 2], &[0.5f32; 4])?);
            let product = b.node("MatMul", &[x, weight], &[])?;
            let mask = b.constant(Tensor::scalar(number)?);
            let y = b.node("Add", &[product, mask], &[])?;
            let model = Model::from_graph(b.finish(&[y])?);
            let mixed_precision = Some(precision);
            let options = TrainingOptions { loss: Loss::Mse, mixed_precision, ..TrainingOptions::default() };
            let training = TrainingGraph::new(&model, &options)?;
            let row = training.precisions().iter().find(|row| row.operator == "Add");
            let counts = row.map(|row| (row.half, row.single));
            assert_eq!(counts, Some(expected), "{number:e} in {key}");
        }
    }
    Ok(())
}

#[test]
fn options_that_make_no_sense_are_refused() -> Result<()> {
    let recording = Recording::load("unet");
    let half = mixed(&recording, MixedPrecision::Fp16);
    let with = |loss_scale: LossScale, options: &TrainingOptions| {
        let options = TrainingOptions { loss_scale: Some(loss_scale), ..options.clone() };
        Trainer::new(&recording.model, options).map(drop).unwrap_err()
    };
    let dynamic = |initial, growth_factor, backoff_factor, growth_interval| LossScale::Dynamic {
        initial,
        growth_factor,
        backoff_factor,
        growth_interval,
    };
    let problem = with(LossScale::dynamic(), &recording.options());
    assert!(problem.to_string().contains("mixed precision"), "{problem}");
    for scale in [
        LossScale::Constant(0.0),
        LossScale::Constant(-2.0),
        LossScale::Constant(f32::NAN),
        LossScale::Constant(f32::INFINITY),
        LossScale::Constant(f32::MAX),
        dynamic(65536.0, 1.0, 0.5, 2000),
        dynamic(65536.0, f32::INFINITY, 0.5, 2000),
        dynamic(65536.0, 2.0, 1.0, 2000),
        dynamic(65536.0, 2.0, 0.0, 2000),
        dynamic(65536.0, 2.0, 0.5, 0),
    ] {
        let problem = with(scale, &half);
        assert_eq!(problem.kind(), ErrorKind::InvalidArgument, "{scale:?}: {problem}");
    }
    let mut trainer = Trainer::new(&recording.model, half)?;
    let folder = tempfile::tempdir().unwrap();
    trainer.save_checkpoint(folder.path(), &Map::new())?;
    let path = folder.path().join("training.json");
    let manifest: Json = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    for (key, value, words) in
        [("scale", Json::from(0.0), "loss scale"), ("skipped", Json::from(u64::MAX), "skipped updates")]
    {
        let mut changed = manifest.clone();
        changed["loss_scale"][key] = value;
        std::fs::write(&path, changed.to_string()).unwrap();
        let problem = trainer.load_checkpoint(folder.path()).unwrap_err();
        assert!(problem.to_string().contains(words), "{problem}");
    }
    Ok(())
}
