//! The largest batch that fits into so much memory is computed, not tried until training fails.
//!
//!     cargo run -p ort-runtime --release --features train --example largest_batch

#[path = "support/stripes.rs"]
mod stripes;

use ort_runtime::Result;
use ort_runtime::train::{Trainer, TrainingOptions};

pub(crate) fn main() -> Result<()> {
    let model = stripes::model()?;
    let mut trainer = Trainer::new(&model, TrainingOptions::default())?;
    for batch in [1, 2, 4, 8, 16, 32] {
        let memory = trainer.memory(&[("batch", batch)])?;
        println!(
            "batch of {batch:>2}: {:>9} bytes, {:>9} of them activations",
            memory.total(),
            memory.activations
        );
    }
    let budget = 1 << 20;
    let Some(largest) = trainer.largest_batch("batch", &[], budget)? else {
        println!("no batch fits into {budget} bytes");
        return Ok(());
    };
    println!("the largest batch in {budget} bytes is {largest}");
    let loss = trainer.train_step(&stripes::batch(0, largest as usize)?)?;
    println!("a step with it: loss {loss:.4}, {} bytes", trainer.measured().total());
    assert!(trainer.measured().total() <= budget);
    assert!(trainer.memory(&[("batch", largest + 1)])?.total() > budget);
    Ok(())
}
