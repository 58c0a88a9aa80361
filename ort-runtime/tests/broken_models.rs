//! Broken and hostile models, and what is said of each, word for word: `tests/golden/broken_models.txt`.
//!
//! A case is `## name`, the lines of a model (see `hostile_support/text.rs`), and `=> ` with the error, or `=> an answer`.
//! `GOLDEN_UPDATE=1` writes what is said now into the file, to be read before it is kept.
#![cfg(all(feature = "cpu", target_os = "linux"))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod hostile_support;

use std::time::{Duration, Instant};

use hostile_support::{made_up, peak_above, reset_peak, text};
use ort_runtime::onnx::Source;
use ort_runtime::{Limits, Model, Result, Session, Value};
use prost::Message;

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/broken_models.txt");
const BUDGET: usize = 32 << 20;
const SLACK: usize = 64 << 20;

/// Loads, compiles and runs a model on inputs of ones.
fn attempt(bytes: Vec<u8>) -> Result<()> {
    // Few nodes, so that what runs out first does not depend on the machine.
    let deadline = Some(Duration::from_millis(500));
    let limits = Limits { deadline, function_nodes: 2_000, ..Limits::default() };
    let model = Model::from_source(Source::from_bytes(bytes).limits(limits))?;
    let session = Session::builder(&model).threads(2).memory_limit(BUDGET).build()?;
    let inputs = made_up(&session)?;
    let inputs: Vec<(&str, Value)> =
        inputs.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    session.run(&inputs).map(|_| ())
}

#[test]
fn each_is_told_what_is_wrong() {
    let file = std::fs::read_to_string(FILE).unwrap();
    let (mut wrong, mut written, mut count) = (Vec::new(), String::new(), 0);
    for case in file.split("## ").skip(1) {
        let (name, rest) = case.split_once('\n').unwrap();
        let (lines, expected) = rest.split_once("=> ").unwrap();
        let bytes = text::model(lines).encode_to_vec();
        count += 1;
        reset_peak();
        let start = Instant::now();
        let outcome = std::panic::catch_unwind(|| attempt(bytes));
        let (time, taken) = (start.elapsed(), peak_above());
        let said = match outcome {
            Ok(Ok(())) => "an answer".to_string(),
            Ok(Err(problem)) => problem.to_string(),
            Err(_) => "a panic".to_string(),
        };
        written += &format!("## {name}\n{lines}=> {said}\n\n");
        if said != expected.trim() {
            wrong.push(format!("{name}\n  says     {said}\n  expected {}", expected.trim()));
        }
        if time > Duration::from_secs(2) || taken > BUDGET + SLACK || said.contains("panic") {
            wrong.push(format!("{name} takes {time:?} and {} MiB: {said}", taken >> 20));
        }
    }
    if std::env::var_os("GOLDEN_UPDATE").is_some() {
        let head = file.split("## ").next().unwrap();
        std::fs::write(FILE, format!("{head}{}\n", written.trim_end())).unwrap();
    }
    assert!(count >= 40, "{count} cases");
    assert!(wrong.is_empty(), "{} of {count}:\n{}", wrong.len(), wrong.join("\n"));
}
