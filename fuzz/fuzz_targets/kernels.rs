//! One operator on inputs, attributes, types and shapes that the bytes choose: an answer or an
//! error.
#![no_main]

#[path = "../../ort-runtime/tests/hostile_support/mod.rs"]
mod hostile_support;

use std::time::{Duration, Instant};

use hostile_support::{Dice, case, spec};
use libfuzzer_sys::fuzz_target;
use ort_runtime::onnx::Source;
use ort_runtime::{Model, Result, RunOptions, Session, Value};
use prost::Message;

/// What a session may take for its buffers.
const BUDGET: usize = 64 << 20;
/// Loops without end are ended after this.
const DEADLINE: Duration = Duration::from_millis(250);

fn run(model: Vec<u8>, inputs: &[(String, Value)]) -> Result<()> {
    let model = Model::from_source(Source::from_bytes(model))?;
    let session = Session::builder(&model).threads(1).memory_limit(BUDGET).build()?;
    let inputs: Vec<(&str, Value)> =
        inputs.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    let options = RunOptions { deadline: Some(Instant::now() + DEADLINE), ..RunOptions::default() };
    session.run_with(&inputs, &options).map(drop)
}

fuzz_target!(|data: &[u8]| {
    let mut dice = Dice::of_bytes(data);
    let (model, inputs) = case(spec(&mut dice), &mut dice);
    if let Err(problem) = run(model.encode_to_vec(), &inputs) {
        // The session turns a kernel's panic into an error; here it is a finding.
        assert!(!problem.to_string().contains("panicked"), "{problem}");
    }
});
