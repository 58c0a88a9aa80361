//! Every operator of the registry on junk: attributes, types, shapes, constants and run-time inputs
//! drawn from what breaks arithmetic. Each node ends in an answer or a typed error: no panic, no
//! hang, no memory beyond the budget.
//!
//! Nodes that are right, edited until they are not, get further.
//!
//! `HOSTILE_ROUNDS` sets the cases per operator, `HOSTILE_ONLY` one operator, `HOSTILE_CASE` one
//! case, which is printed.
#![cfg(all(feature = "cpu", target_os = "linux"))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod hostile_support;
#[path = "hostile_support/seeds.rs"]
mod seeds;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hostile_support::{Dice, case, peak_above, reset_peak};
use ort_runtime::onnx::Source;
use ort_runtime::onnx::proto::ModelProto;
use ort_runtime::spec::Registry;
use ort_runtime::{Model, Result, RunOptions, Session, Value};
use prost::Message;
use seeds::Seed;

/// What a session may take for its buffers.
const BUDGET: usize = 64 << 20;
/// What a case may take besides.
const SLACK: usize = 64 << 20;
/// How long a case may take; endless loops are ended by the deadline of the run long before.
const PATIENCE: Duration = Duration::from_secs(2);
/// After this the test gives up.
const HANG: Duration = Duration::from_secs(15);
const DEADLINE: Duration = Duration::from_millis(250);

fn attempt(model: &[u8], inputs: &[(String, Value)]) -> Result<()> {
    let model = Model::from_source(Source::from_bytes(model.to_vec()))?;
    let session = Session::builder(&model).threads(2).memory_limit(BUDGET).build()?;
    let inputs: Vec<(&str, Value)> =
        inputs.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    let options = RunOptions { deadline: Some(Instant::now() + DEADLINE), ..RunOptions::default() };
    session.run_with(&inputs, &options).map(|_| ())
}

/// How many cases ended in an answer.
static ANSWERS: AtomicU64 = AtomicU64::new(0);

/// Runs one case; what is wrong with how it ended, if anything.
fn judge(model: &[u8], inputs: &[(String, Value)]) -> Option<String> {
    reset_peak();
    let start = Instant::now();
    let outcome = catch_unwind(AssertUnwindSafe(|| attempt(model, inputs)));
    let time = start.elapsed();
    let taken = peak_above();
    match outcome {
        Err(panic) => {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| text.to_string()));
            return Some(format!("panics: {}", text.unwrap_or_default()));
        }
        Ok(Err(problem)) if problem.to_string().contains("panicked") => return Some(problem.to_string()),
        Ok(Ok(())) => {
            ANSWERS.fetch_add(1, Ordering::Relaxed);
        }
        _ => {}
    }
    if time > PATIENCE {
        return Some(format!("takes {time:?}"));
    }
    (taken > BUDGET + SLACK).then(|| format!("takes {} MiB", taken >> 20))
}

/// The same on a thread of its own, which is given up where it does not end.
fn judge_apart(model: &Arc<Vec<u8>>, inputs: &[(String, Value)]) -> Option<String> {
    let (sender, receiver) = std::sync::mpsc::channel();
    let (model, inputs) = (model.clone(), inputs.to_vec());
    std::thread::spawn(move || sender.send(judge(&model, &inputs)));
    receiver.recv_timeout(HANG).unwrap_or_else(|_| Some("hangs".into()))
}

/// Memory is measured of the whole process, so one test runs at a time.
static ALONE: Mutex<()> = Mutex::new(());

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok())
}

/// Runs a case, a second time where it takes long, on a machine that does other work by chance;
/// what is wrong.
fn judge_named(name: &str, model: &ModelProto, inputs: &[(String, Value)]) -> Option<String> {
    // A process that dies tells here of what.
    let note = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("hostile_case");
    std::fs::write(&note, name).unwrap();
    let bytes = Arc::new(model.encode_to_vec());
    let problem = judge_apart(&bytes, inputs).and_then(|first| match first.starts_with("takes") {
        true => judge_apart(&bytes, inputs),
        false => Some(first),
    });
    problem.map(|problem| format!("{name} {problem}"))
}

/// Nodes that are right, made wrong in one or two places.
#[test]
fn known_nodes_survive_edits() {
    let _alone = ALONE.lock().unwrap_or_else(|poison| poison.into_inner());
    let rounds = number("HOSTILE_ROUNDS").unwrap_or(3);
    let only = std::env::var("HOSTILE_ONLY").ok();
    let single = number("HOSTILE_CASE");
    std::panic::set_hook(Box::new(|_| {}));
    let seeds: Vec<Seed> = seeds::all();
    let wanted = |seed: &&Seed| only.as_deref().is_none_or(|only| seed.name.starts_with(only));
    let (mut wrong, mut right, mut count) = (Vec::new(), 0, 0);
    for seed in seeds.iter().filter(wanted) {
        let (model, inputs) = seed.model();
        right += usize::from(attempt(&model.encode_to_vec(), &inputs).is_ok());
        count += 1;
        for round in (0..rounds).filter(|round| single.is_none_or(|single| single == *round)) {
            let mut dice = Dice::new(&seed.name, round);
            let mut edited = seed.clone();
            (0..1 + dice.below(2)).for_each(|_| edited.edit(&mut dice));
            let (model, inputs) = edited.model();
            if single.is_some() {
                println!("{model:#?}\n{inputs:#?}");
            }
            wrong.extend(judge_named(&format!("{} edit {round}", seed.name), &model, &inputs));
        }
    }
    let _ = std::panic::take_hook();
    println!("{right} of {count} nodes are right, {} edits", count as u64 * rounds);
    // Edits of what was wrong before would test little.
    assert!(right * 10 > count * 9, "{right} of {count} nodes are right");
    assert!(wrong.is_empty(), "{}:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn every_operator_survives_junk() {
    let _alone = ALONE.lock().unwrap_or_else(|poison| poison.into_inner());
    let rounds = number("HOSTILE_ROUNDS").unwrap_or(24);
    let only = std::env::var("HOSTILE_ONLY").ok();
    let single = number("HOSTILE_CASE");
    std::panic::set_hook(Box::new(|_| {}));
    let mut wrong = Vec::new();
    let mut cases = 0;
    ANSWERS.store(0, Ordering::Relaxed);
    let registry = Registry::global().unwrap();
    for spec in registry.records().iter().filter(|spec| only.as_deref().is_none_or(|only| only == spec.name))
    {
        for round in (0..rounds).filter(|round| single.is_none_or(|single| single == *round)) {
            let name = format!("{} case {round}", spec.name);
            let mut dice = Dice::new(spec.name, round);
            let (model, inputs) = case(spec, &mut dice);
            if single.is_some() {
                println!("{model:#?}\n{inputs:#?}");
            }
            cases += 1;
            wrong.extend(judge_named(&name, &model, &inputs));
        }
    }
    let _ = std::panic::take_hook();
    let answers = ANSWERS.load(Ordering::Relaxed);
    println!("{answers} answers in {cases} cases");
    // Junk that never gets past the door would test nothing behind it.
    assert!(only.is_some() || answers * 20 > cases, "{answers} answers in {cases} cases");
    assert!(wrong.is_empty(), "{} of {cases} cases:\n{}", wrong.len(), wrong.join("\n"));
}
