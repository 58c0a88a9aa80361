//! Any bytes as a model file, and each operator on junk: types and shapes are inferred, the model
//! is compiled and planned with sizes of 1 for its symbols, or that is an error. Nothing runs.
#![no_main]

#[path = "../../ort-runtime/tests/hostile_support/mod.rs"]
mod hostile_support;

use hostile_support::{Dice, case, spec};
use libfuzzer_sys::fuzz_target;
use ort_runtime::onnx::Source;
use ort_runtime::{Model, Result, Session};
use prost::Message;

/// What a session may take for its buffers.
const BUDGET: usize = 64 << 20;

fn plan(model: Vec<u8>) -> Result<()> {
    let model = Model::from_source(Source::from_bytes(model))?;
    let session = Session::builder(&model).threads(1).memory_limit(BUDGET).build()?;
    session.plan(&[]).map(drop)
}

fuzz_target!(|data: &[u8]| {
    let _ = plan(data.to_vec());
    let mut dice = Dice::of_bytes(data);
    let (model, _) = case(spec(&mut dice), &mut dice);
    let _ = plan(model.encode_to_vec());
});
