//! Losses and gradients of whole trainings against PyTorch's, from the same weights and batches.

use crate::support::{MODELS, Recording, given};
use ort_core::Result;
use ort_train::Trainer;

/// What curves of 50 steps may differ by, as a share of the loss.
const CURVE: f64 = 1e-4;
/// What the gradients of the first step may differ by, as a share of their norm.
const GRADIENT: f64 = 1e-5;

#[test]
fn losses_of_fifty_steps() -> Result<()> {
    let mut problems = Vec::new();
    for name in MODELS {
        let recording = Recording::load(name);
        let mut trainer = Trainer::new(&recording.model, recording.options())?;
        let expected: Vec<f64> = recording.reference["losses"]
            .as_array()
            .unwrap()
            .iter()
            .map(|loss| loss.as_f64().unwrap())
            .collect();
        let mut apart = Vec::new();
        for (step, expected) in expected.iter().enumerate() {
            let loss = f64::from(trainer.train_step(&given(&recording.batch(step)))?);
            apart.push(((loss - expected) / expected).abs());
        }
        // Unlike `f64::max`, `total_cmp` keeps a NaN. It must be positive, so `abs` comes last.
        let worst = apart.into_iter().max_by(f64::total_cmp).unwrap_or(0.0);
        println!("{name}: {worst:.1e}");
        if worst.is_nan() || worst > CURVE {
            problems.push(format!("{name}: the curve is {worst:.1e} off"));
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
    Ok(())
}

#[test]
fn gradients_of_the_first_step() -> Result<()> {
    let mut problems = Vec::new();
    for name in MODELS {
        let recording = Recording::load(name);
        let mut trainer = Trainer::new(&recording.model, recording.options())?;
        trainer.accumulate(&given(&recording.batch(0)))?;
        let gradients = trainer.grads()?;
        let known = recording.reference["parameters"].as_object().unwrap();
        assert_eq!(gradients.len(), known.len(), "{name}");
        let largest = known.values().map(|it| it["gradient_norm"].as_f64().unwrap()).fold(0.0, f64::max);
        for (parameter, gradient) in gradients {
            let expected = recording.arrays[&format!("gradient.{parameter}")].to_vec::<f32>()?;
            let pairs = gradient.to_vec::<f32>()?.into_iter().zip(expected);
            let off = pairs.map(|(one, other)| f64::from(one - other).powi(2)).sum::<f64>().sqrt();
            // What cancels out, as the gradient of a bias before a normalization does, is the
            // rounding of larger terms.
            let norm = known[&parameter]["gradient_norm"].as_f64().unwrap() + 0.05 * largest;
            if off.is_nan() || off > GRADIENT * norm {
                problems.push(format!("{name}: the gradient of {parameter} is {:.1e} off", off / norm));
            }
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
    Ok(())
}
