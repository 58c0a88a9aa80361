//! Gradient accumulation: four batches of 8 make the update that one batch of 32 makes, with the
//! activations of 8.
//!
//!     cargo run -p ort-runtime --release --features train --example gradient_accumulation

#[path = "support/stripes.rs"]
mod stripes;

use ort_runtime::Result;
use ort_runtime::train::{Optimizer, Trainer, TrainingOptions};

const STEPS: usize = 5;
const PARTS: usize = 4;
const PART: usize = 8;

pub(crate) fn main() -> Result<()> {
    let model = stripes::model()?;
    // Gradients themselves, not their signs as with Adam: what differs would show.
    let options = TrainingOptions { optimizer: Optimizer::sgd(), learning_rate: 0.05, ..Default::default() };
    let mut whole = Trainer::new(&model, options.clone())?;
    let mut parts = Trainer::new(&model, TrainingOptions { accumulate: PARTS, ..options })?;
    for step in 0..STEPS {
        let first = step * PARTS * PART;
        let loss = whole.train_step(&stripes::batch(first, PARTS * PART)?)?;
        let mut sum = 0.0;
        for part in 0..PARTS {
            // Divided by their number, gradients of parts are those of the whole; the last batch
            // applies them.
            sum += parts.train_step(&stripes::batch(first + part * PART, PART)?)?;
        }
        println!("update {}: loss {loss:.5} at once, {:.5} in parts", whole.updates(), sum / PARTS as f32);
    }
    assert_eq!(whole.updates(), parts.updates());
    let mut apart: Vec<f32> = Vec::new();
    for name in ["conv1.weight", "hidden.weight", "classifier.bias"] {
        let (one, other) = (whole.parameter(name)?.to_vec::<f32>()?, parts.parameter(name)?.to_vec::<f32>()?);
        apart.extend(one.iter().zip(&other).map(|(one, other)| (one - other).abs()));
    }
    // Unlike `f32::max`, `total_cmp` keeps a NaN.
    let furthest = apart.into_iter().max_by(f32::total_cmp).unwrap_or(0.0);
    println!("weights differ by {furthest:e} at most");
    assert!(furthest < 1e-5, "rounding alone is less");
    let (whole, parts) = (whole.measured(), parts.measured());
    println!("activations: {} bytes at once, {} in parts", whole.activations, parts.activations);
    println!("sums of gradients: {} bytes", parts.gradients);
    assert!(parts.activations < whole.activations / 2);
    Ok(())
}
