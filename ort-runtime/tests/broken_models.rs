//! Broken and hostile models and inputs, and what is said of each, word for word:
//! `tests/golden/broken_models.txt` and `tests/golden/hostile_inputs.txt`.
//!
//! A case is `## name`, the lines of a model (see `hostile_support/text.rs`), and `=> ` with the
//! error, `=> an answer`, or `=> any end`. `GOLDEN_UPDATE=1` writes what is said now into the
//! files, to be read before it is kept; `GOLDEN_ONLY=words` tries the cases whose names have these
//! words, and writes nothing.
#![cfg(all(feature = "cpu", target_os = "linux"))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod hostile_support;

use std::time::{Duration, Instant};

use hostile_support::{made_up, peak_above, reset_peak, text};
use ort_runtime::onnx::Source;
use ort_runtime::{Limits, Model, Result, RunOptions, Session, Value};
use prost::Message;

const FILES: [&str; 2] = [
    concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/broken_models.txt"),
    concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/hostile_inputs.txt"),
];
const BUDGET: usize = 32 << 20;
const SLACK: usize = 64 << 20;
/// How long a case may take.
const PATIENCE: Duration = Duration::from_secs(2);
/// Of operators that are not the standard's any answer or typed error will do.
const ANY_END: &str = "any end";
/// After this the test gives up.
const HANG: Duration = Duration::from_secs(15);

/// Loads, compiles and runs a model on what its lines feed, and ones.
fn attempt(lines: &str) -> Result<()> {
    let bytes = text::model(lines).encode_to_vec();
    // Few nodes, and a deadline only where nothing else ends the run, so that what runs out first
    // does not depend on the machine.
    let limits = Limits { deadline: None, function_nodes: 2_000, ..Limits::default() };
    let model = Model::from_source(Source::from_bytes(bytes).limits(limits))?;
    let session = Session::builder(&model).threads(2).memory_limit(BUDGET).build()?;
    let mut inputs = text::feeds(lines);
    inputs
        .extend(made_up(&session)?.into_iter().filter(|(name, _)| !lines.contains(&format!("feed {name} "))));
    let inputs: Vec<(&str, Value)> =
        inputs.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    let deadline = text::deadline(lines).map(|time| Instant::now() + time);
    session.run_with(&inputs, &RunOptions { deadline, ..RunOptions::default() }).map(|_| ())
}

/// One case on a thread of its own: how it ended, after what time; `None` if it does not end.
fn judge(lines: &str) -> Option<(String, Duration)> {
    let (sender, receiver) = std::sync::mpsc::channel();
    let lines = lines.to_string();
    std::thread::spawn(move || {
        let start = Instant::now();
        let said = match std::panic::catch_unwind(|| attempt(&lines)) {
            Ok(Ok(())) => "an answer".to_string(),
            Ok(Err(problem)) => problem.to_string(),
            Err(_) => "a panic".to_string(),
        };
        sender.send((said, start.elapsed()))
    });
    receiver.recv_timeout(HANG).ok()
}

/// What was said without the inner node: a deadline passes in a node of a body, or between two.
fn without_inner_node(said: String) -> String {
    match said.split_once(" > node '").map(|(outer, inner)| (outer, inner.split_once("): "))) {
        Some((outer, Some((_, rest)))) if said.starts_with("cancelled: ") => format!("{outer}: {rest}"),
        _ => said,
    }
}

/// What a file says of its cases that is not so, with what would be right, and the number of cases.
fn wrong_in(file: &str) -> (Vec<String>, usize) {
    let text = std::fs::read_to_string(file).unwrap();
    let only = std::env::var("GOLDEN_ONLY").ok();
    let (mut wrong, mut written, mut count) = (Vec::new(), String::new(), 0);
    for case in text.split("## ").skip(1) {
        let (name, rest) = case.split_once('\n').unwrap();
        let (lines, expected) = rest.split_once("=> ").unwrap();
        if only.as_ref().is_some_and(|only| !name.contains(only)) {
            continue;
        }
        count += 1;
        reset_peak();
        let never = || ("nothing".to_string(), HANG);
        let (said, mut time) = judge(lines).unwrap_or_else(never);
        let taken = peak_above();
        if (PATIENCE..HANG).contains(&time) {
            // What takes long once, on a machine that does other work, may do so by chance.
            time = judge(lines).map_or(HANG, |(_, time)| time);
        }
        let said = without_inner_node(said);
        let loose = expected.trim() == ANY_END;
        written += &format!("## {name}\n{lines}=> {}\n\n", if loose { ANY_END } else { &said });
        if said != expected.trim() && !loose {
            wrong.push(format!("{name}\n  says     {said}\n  expected {}", expected.trim()));
        }
        // Each refusal says what to try.
        let advised = said == "an answer" || said.contains("; ") || said.contains(". Try ");
        if time > PATIENCE || taken > BUDGET + SLACK || said.contains("panic") || !advised {
            wrong.push(format!("{name} takes {time:?} and {} MiB: {said}", taken >> 20));
        }
    }
    if std::env::var_os("GOLDEN_UPDATE").is_some() && only.is_none() {
        let head = text.split("## ").next().unwrap();
        std::fs::write(file, format!("{head}{}\n", written.trim_end())).unwrap();
    }
    (wrong, count)
}

#[test]
fn each_is_told_what_is_wrong() {
    let (wrong, counts): (Vec<_>, Vec<_>) = FILES.iter().map(|file| wrong_in(file)).unzip();
    let (wrong, count) = (wrong.concat(), counts.iter().sum::<usize>());
    assert!(count >= 40 || std::env::var_os("GOLDEN_ONLY").is_some(), "{count} cases");
    assert!(wrong.is_empty(), "{} of {count}:\n{}", wrong.len(), wrong.join("\n"));
}
