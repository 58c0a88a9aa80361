//! Differential tests of operators on a device against the CPU: every provider runs the same cases,
//! as far as it claims them.

#![allow(
    clippy::panic,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "what differs fails the test"
)]

pub mod attention;
pub mod caches;
pub mod control;
pub mod formulas;
pub mod fp8_fp4;
pub mod gradients;
pub mod mma;
pub mod movement;
pub mod nhwc;
pub mod optimizers;
pub mod products;
pub mod quant;
pub mod recurrent;
pub mod rows;
pub mod select;
pub mod sums;
mod typed;
pub mod updates;
pub mod vision;
pub mod weights;
pub mod windows;

use std::sync::Arc;

use ort_core::Result;
use ort_core::ep::{Device, ProviderOptions, provider};
use ort_core::rewrite::Level;
use ort_core::session::{Model, Session};
use ort_core::tensor::Value;

/// Opens the CPU.
pub fn cpu() -> Result<Arc<dyn Device>> {
    provider("cpu")?.open(0, &ProviderOptions::new())
}

/// Pseudo-random numbers in (-1, 1).
pub fn numbers(count: usize, seed: usize) -> Vec<f32> {
    let mix = |index: usize| ((index * 7919 + seed * 104_729 + 17) as u32).wrapping_mul(2_654_435_761) >> 8;
    (0..count).map(|index| mix(index) as f32 / (1 << 23) as f32 - 1.0).collect()
}

/// Whether an element of a mask keeps its key: all except 3 of 17, never two in a row.
fn keeps_key(at: usize) -> bool {
    // No case has a multiple of 17 keys, so the rows of a mask differ.
    at * 7919 % 17 > 2
}

/// Returns the outputs of a model on one device alone.
pub fn outputs(model: &Model, device: Arc<dyn Device>, inputs: &[(String, Value)]) -> Result<Vec<Value>> {
    // Without rewrites, so that the operator that a case names is the one that runs.
    let session = Session::builder(model).threads(2).opt_level(Level::Disabled).device(device).build()?;
    let inputs: Vec<(&str, Value)> =
        inputs.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    Ok(session.run(&inputs)?.into_iter().map(|(_, value)| value).collect())
}

/// Fails unless all elements differ by at most `tolerance` times the largest expected one.
pub fn assert_close(actual: &Value, expected: &Value, tolerance: f32, what: &str) -> Result<()> {
    let (actual, expected) = (actual.tensor()?, expected.tensor()?);
    assert_eq!(actual.shape(), expected.shape(), "{what}");
    let (actual, expected) = (actual.to_vec::<f32>()?, expected.to_vec::<f32>()?);
    let largest = expected.iter().fold(1e-30f32, |largest, value| largest.max(value.abs()));
    for (index, (actual, expected)) in actual.iter().zip(&expected).enumerate() {
        // Not `>`, because a NaN must fail.
        let close = (actual - expected).abs() <= tolerance * largest;
        assert!(close, "{what}: element {index} is {actual}, expected {expected}");
    }
    Ok(())
}
