//! Less memory for more time: values of the forward pass are computed again in the backward pass
//! instead of being kept for it.
//!
//!     cargo run -p ort-runtime --release --features train --example memory_optimizer

#[path = "support/stripes.rs"]
mod stripes;

use ort_runtime::Result;
use ort_runtime::train::{PlanRequest, Recompute, Trainer, TrainingOptions, memory_table};

const BATCH: usize = 32;

pub(crate) fn main() -> Result<()> {
    let model = stripes::model()?;
    let dims = [("batch", BATCH as i64)];
    // What there is to compute again, by name, as a configuration file names it.
    let mut trainer = Trainer::new(&model, TrainingOptions::default())?;
    let plans = trainer.recompute_plans(&dims)?;
    println!("{}", memory_table(&Recompute::AsLimited, &plans));
    let names: Vec<String> = plans.iter().take(1).map(ToString::to_string).collect();
    let named = Recompute::Plans(PlanRequest::parse_list(&names.join(","))?);
    let mut losses = Vec::new();
    for recompute in [Recompute::AsLimited, Recompute::Layers, Recompute::Most, named] {
        let options = TrainingOptions { recompute: recompute.clone(), ..Default::default() };
        let mut trainer = Trainer::new(&model, options)?;
        let report = trainer.optimize_memory(&dims)?;
        println!(
            "{recompute:?}: activations {} bytes instead of {}, {} values again, a step about {:.0} % longer",
            report.peak,
            report.peak_before,
            report.values,
            report.extra_time * 100.0
        );
        assert!(report.peak <= report.peak_before);
        let mut run = Vec::new();
        for step in 0..5 {
            run.push(trainer.train_step(&stripes::batch(step * BATCH, BATCH)?)?.to_bits());
        }
        losses.push(run);
    }
    // What is computed again has the same bits.
    assert!(losses.iter().all(|run| Some(run) == losses.first()));
    Ok(())
}
