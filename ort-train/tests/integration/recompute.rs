//! Recomputation: fewer bytes, the same bits.

use crate::support::{MODELS, Recording, given};
use ort_core::Result;
use ort_train::{Recompute, Trainer, TrainingOptions};

const STEPS: usize = 6;

/// The losses of some steps, and the bits of all parameters behind them.
fn train(recording: &Recording, options: TrainingOptions) -> Result<(Vec<u32>, Vec<Vec<u32>>)> {
    let mut trainer = Trainer::new(&recording.model, options)?;
    let steps = (0..STEPS).map(|step| trainer.train_step(&given(&recording.batch(step))));
    let losses = steps.map(|loss| loss.map(f32::to_bits)).collect::<Result<Vec<u32>>>()?;
    let names: Vec<String> =
        trainer.training_graph().parameters().iter().map(|parameter| parameter.name.clone()).collect();
    let bits = |name: &String| {
        let elements = trainer.parameter(name)?.to_vec::<f32>()?;
        Ok(elements.into_iter().map(f32::to_bits).collect())
    };
    let parameters = names.iter().map(bits).collect::<Result<Vec<Vec<u32>>>>()?;
    Ok((losses, parameters))
}

#[test]
fn the_same_bits_with_any_recomputation() -> Result<()> {
    for name in MODELS {
        let recording = Recording::load(name);
        let expected = train(&recording, recording.options())?;
        for recompute in [Recompute::Layers, Recompute::Most] {
            for threads in [1, 2] {
                let options = TrainingOptions {
                    recompute: recompute.clone(),
                    threads: Some(threads),
                    ..recording.options()
                };
                assert_eq!(train(&recording, options)?, expected, "{name}: {recompute:?}, {threads} threads");
            }
        }
    }
    Ok(())
}

#[test]
fn less_is_alive_at_the_peak() -> Result<()> {
    let mut problems = Vec::new();
    for name in MODELS {
        let recording = Recording::load(name);
        // One step of these small nets takes what there is at the peak: a convolution, a whole
        // sequence of an LSTM.
        let most = if ["lstm", "resnet18"].contains(&name) { 1.0 } else { 0.8 };
        for recompute in [Recompute::Layers, Recompute::Most] {
            let options = TrainingOptions { recompute: recompute.clone(), ..recording.options() };
            let mut trainer = Trainer::new(&recording.model, options)?;
            let report = trainer.optimize_memory(&recording.sizes())?;
            let share = report.peak as f64 / report.peak_before as f64;
            println!(
                "{name} {recompute:?}: {share:.2} of {}, {:.2} longer",
                report.peak_before, report.extra_time
            );
            if share > most {
                problems.push(format!("{name}: {recompute:?} leaves {share:.2} of the peak"));
            }
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
    Ok(())
}

#[test]
fn asking_for_the_largest_batch_takes_no_recomputation_away() -> Result<()> {
    let recording = Recording::load("bert");
    let options = TrainingOptions { recompute: Recompute::Layers, ..recording.options() };
    let mut asked = Trainer::new(&recording.model, options.clone())?;
    assert!(asked.largest_batch("batch", &[("sequence", 12)], 1 << 30)?.is_some());
    let mut other = Trainer::new(&recording.model, options)?;
    assert_eq!(asked.memory(&recording.sizes())?, other.memory(&recording.sizes())?);
    Ok(())
}
