//! Fine-tuning: the convolutions stay as they are, the layers behind them are trained. What is
//! frozen takes no gradient and no state.
//!
//!     cargo run -p ort-runtime --release --features train --example fine_tuning

#[path = "support/stripes.rs"]
mod stripes;

use ort_runtime::Result;
use ort_runtime::train::{Schedule, Trainer, TrainingOptions};

const BATCH: usize = 50;
const STEPS: u64 = 100;

pub(crate) fn main() -> Result<()> {
    let model = stripes::model()?;
    let options = TrainingOptions {
        frozen: vec!["conv*".to_string()],
        no_decay: vec!["*.bias".to_string()],
        learning_rate: 3e-3,
        schedule: Schedule::Linear { warmup: 10, total: STEPS },
        ..Default::default()
    };
    let dims = [("batch", BATCH as i64)];
    let all = Trainer::new(&model, TrainingOptions::default())?.memory(&dims)?;
    let mut trainer = Trainer::new(&model, options)?;
    let some = trainer.memory(&dims)?;
    println!("frozen: {}", trainer.training_graph().frozen().join(", "));
    println!("states: {} bytes instead of {}", some.states, all.states);
    println!("activations: {} bytes instead of {}", some.activations, all.activations);
    assert!(some.states < all.states && some.activations < all.activations);
    let before = trainer.eval_step(&stripes::batch(0, BATCH)?)?;
    for step in 0..STEPS as usize {
        trainer.train_step(&stripes::batch(step * BATCH, BATCH)?)?;
    }
    let after = trainer.eval_step(&stripes::batch(0, BATCH)?)?;
    println!("loss: {before:.4} before, {after:.4} after {} updates", trainer.updates());
    assert!(after < before / 2.0);
    Ok(())
}
