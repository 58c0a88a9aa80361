//! Many shapes within a limit of device memory.

use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use ort_core::session::{Model, Session};
use ort_core::tensor::Value;
use ort_core::{ErrorKind, Result, error};
use ort_ep_cuda::CudaDevice;

use ort_testkit::made_up::{Given, inputs};

use crate::{Arguments, number};

/// How often the arena is asked what it holds while runs are under way.
const PERIOD: Duration = Duration::from_micros(200);

/// A size with its bounds, both of which it may have.
struct Range {
    name: String,
    low: usize,
    high: usize,
}

/// What became of the runs.
#[derive(Default)]
struct Outcome {
    ran: usize,
    refused: usize,
}

/// Runs in shapes drawn at random, and prints the most that the arena held.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let ranges: Vec<Range> = arguments.sizes.iter().map(range).collect::<Result<_>>()?;
    let model = Model::load(&arguments.model)?;
    let device = arguments.open()?;
    if arguments.is_waiting {
        println!("open");
        // The line is flushed, as whoever waits for it answers.
        std::io::stdout().flush().ok();
        std::io::stdin().read_line(&mut String::new()).ok();
    }
    let is_done = AtomicBool::new(false);
    let (outcome, peak) = thread::scope(|scope| {
        let watcher = scope.spawn(|| watch(&device, &is_done));
        let outcome = arguments
            .session(&model, &device)
            .and_then(|session| run_all(&session, &model, &ranges, arguments.runs));
        is_done.store(true, Ordering::Relaxed);
        let peak = watcher.join().map_err(|_| error!(Fail, "the watching thread panicked"))?;
        Ok::<_, ort_core::Error>((outcome?, peak))
    })?;
    let stats = device.stats();
    println!(
        r#"{{"ran": {}, "refused": {}, "peak_bytes": {}, "peak_in_use": {}, "limit": {}, "regions": {}}}"#,
        outcome.ran,
        outcome.refused,
        peak.max(stats.total_allocated),
        stats.max_in_use,
        stats.limit.map_or("null".to_owned(), |limit| limit.to_string()),
        stats.num_arena_extensions,
    );
    Ok(())
}

fn range((name, text): &(String, String)) -> Result<Range> {
    let (low, high) = text.split_once("..").unwrap_or((text, text));
    let (low, high) = (number::<usize>(low)?, number::<usize>(high)?);
    if high < low {
        return Err(error!(InvalidArgument, "{name}={text}: nothing is from {low} to {high}"));
    }
    Ok(Range { name: name.clone(), low, high })
}

/// The most that the arena holds until the runs are done.
fn watch(device: &CudaDevice, is_done: &AtomicBool) -> usize {
    let mut peak = 0;
    while !is_done.load(Ordering::Relaxed) {
        peak = peak.max(device.stats().total_allocated);
        thread::sleep(PERIOD);
    }
    peak
}

fn run_all(session: &Session, model: &Model, ranges: &[Range], runs: usize) -> Result<Outcome> {
    let (mut outcome, mut state) = (Outcome::default(), 1u64);
    for run in 0..runs {
        let mut draw = |range: &Range| {
            // Knuth's constants for 64 bits; the low ones are poor.
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            range.low + (state >> 33) as usize % (range.high - range.low + 1)
        };
        let sizes: Given =
            ranges.iter().map(|range| (range.name.clone(), vec![draw(range).to_string()])).collect();
        let given = inputs(model, &sizes, run)?;
        let given: Vec<(&str, Value)> =
            given.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
        match session.run(&given) {
            Ok(_) => outcome.ran += 1,
            Err(problem) if problem.kind() == ErrorKind::OutOfMemory => outcome.refused += 1,
            Err(problem) => return Err(problem),
        }
    }
    Ok(outcome)
}
