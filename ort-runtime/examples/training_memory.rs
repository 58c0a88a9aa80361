//! The memory of training: what the plan says before the first step, by what it is for, and what
//! the steps took.
//!
//!     cargo run -p ort-runtime --release --features train --example training_memory

#[path = "support/stripes.rs"]
mod stripes;

use ort_runtime::Result;
use ort_runtime::train::{Optimizer, Trainer, TrainingOptions};

const BATCH: usize = 32;

pub(crate) fn main() -> Result<()> {
    let model = stripes::model()?;
    let momentum = Optimizer::Sgd { momentum: 0.9, nesterov: false, weight_decay: 0.0 };
    let optimizers = [("sgd", Optimizer::sgd()), ("momentum", momentum), ("adamw", Optimizer::adamw())];
    for (name, optimizer) in optimizers {
        let mut trainer = Trainer::new(&model, TrainingOptions { optimizer, ..Default::default() })?;
        let predicted = trainer.memory(&[("batch", BATCH as i64)])?;
        for step in 0..10 {
            trainer.train_step(&stripes::batch(step * BATCH, BATCH)?)?;
        }
        let measured = trainer.measured();
        println!(
            "{name}: parameters {}, states {}, gradients {}, activations {} planned and {} measured",
            measured.parameters,
            measured.states,
            measured.gradients,
            predicted.activations,
            measured.activations
        );
        assert!(measured.total() <= predicted.total());
    }
    let mut trainer = Trainer::new(&model, TrainingOptions::default())?;
    let plan = trainer.plan(&[("batch", BATCH as i64)])?;
    println!("alive at the peak, largest first:");
    for (value, bytes) in plan.largest.iter().take(5) {
        println!("    {value}: {bytes} bytes");
    }
    Ok(())
}
