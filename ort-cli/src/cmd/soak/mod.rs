//! `ort soak`: leak test of loading, running and dropping a model.
//!
//! The model is loaded, run and dropped repeatedly, optionally with random shapes and several
//! callers. The process's memory is measured after each stage. With random limits, each run must
//! keep to its memory limit, or name one that suffices.

mod arguments;
mod random_limits;

use std::ops::Range;
use std::process::ExitCode;
use std::sync::mpsc;

use anyhow::{Context, Result, bail};
use ort_runtime::{Model, Session, Value};
use serde::Serialize;

pub(crate) use arguments::SoakArgs;
use arguments::{bits_of, given, inputs_of};

use crate::args::{human_bytes, table};
use crate::output::{say, say_json};
use crate::resident;

/// The anonymous memory of the process after each stage of a cycle, in bytes; null if the platform
/// does not report it.
#[derive(Serialize)]
struct Cycle {
    loaded: Option<u64>,
    /// The peaks while the model was loaded and while the sessions were built.
    load_peak: Option<u64>,
    sessions_peak: Option<u64>,
    /// After the last session was built.
    sessions: Option<u64>,
    /// After each tenth of the runs.
    ran: Vec<Option<u64>>,
    trimmed: Option<u64>,
    dropped: Option<u64>,
}

/// The JSON report, in bytes; null if the platform does not report a value.
#[derive(Serialize)]
struct SoakReport {
    model: String,
    /// The anonymous memory before anything was loaded.
    baseline: Option<u64>,
    /// The resident set size at that time, and the high-water mark of the process.
    baseline_rss: Option<u64>,
    peak_rss: Option<u64>,
    /// The session's packed weights and peak of activations, in the last cycle.
    packed: usize,
    activations_peak: usize,
    /// Whether the first inputs produced bit-identical outputs again after all runs and a trim, in
    /// every cycle.
    same_bits: bool,
    cycles: Vec<Cycle>,
}

pub(crate) fn run(args: &SoakArgs) -> Result<ExitCode> {
    if let Some(trials) = args.random_limits {
        return random_limits::run(args, trials.get());
    }
    let before = resident::measure();
    let mut report = SoakReport {
        model: args.model.name(),
        baseline: before.anonymous,
        baseline_rss: before.now,
        peak_rss: None,
        packed: 0,
        activations_peak: 0,
        same_bits: true,
        cycles: Vec::with_capacity(args.cycles.get()),
    };
    for cycle in 0..args.cycles.get() {
        let last = cycle + 1 == args.cycles.get();
        let held = one_cycle(args, &mut report)?;
        if last && args.hold {
            show(args, &report)?;
            // An external tool keeps standard input open while it measures.
            std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink())
                .context("waiting for the end of standard input")?;
            return Ok(ExitCode::SUCCESS);
        }
        drop(held);
        if let Some(cycle) = report.cycles.last_mut() {
            cycle.dropped = resident::measure().anonymous;
        }
    }
    show(args, &report)?;
    Ok(ExitCode::SUCCESS)
}

fn show(args: &SoakArgs, report: &SoakReport) -> Result<()> {
    match args.json {
        true => say_json(report),
        false => print(report),
    }
}

/// Runs one cycle. Returns the model and the sessions, still open.
fn one_cycle(args: &SoakArgs, report: &mut SoakReport) -> Result<(Model, Vec<Session>)> {
    let anonymous = || resident::measure().anonymous;
    let (model, load_peak) = resident::most_anonymous(|| args.model.load());
    let model = model?;
    let loaded = anonymous();
    let make = || (0..args.sessions.get()).map(|_| args.model.session(&model)).collect();
    let (sessions, sessions_peak) = resident::most_anonymous::<Result<Vec<Session>>>(make);
    let sessions = sessions?;
    let session = sessions.last().context("there is a session")?;
    let mut cycle = Cycle {
        loaded,
        load_peak,
        sessions_peak,
        sessions: anonymous(),
        ran: Vec::new(),
        trimmed: None,
        dropped: None,
    };
    let first = inputs_of(args, &model, 0)?;
    let expected = bits(session, &first)?;
    let fixed = args.random_dims.is_empty().then_some(&first[..]);
    cycle.ran = run_callers(args, &model, session, fixed)?;
    let memory = session.memory();
    (report.packed, report.activations_peak) = (memory.packed, memory.activations_peak);
    report.peak_rss = resident::measure().peak;
    session.trim();
    cycle.trimmed = anonymous();
    report.same_bits &= bits(session, &first)? == expected;
    // The comparison run left memory behind again.
    session.trim();
    report.cycles.push(cycle);
    drop(first);
    Ok((model, sessions))
}

/// Runs all callers in ten parts, and measures the memory after each part.
///
/// Caller threads and `fixed` inputs live through all parts. New ones in between would look like
/// growth of the session.
fn run_callers(
    args: &SoakArgs,
    model: &Model,
    session: &Session,
    fixed: Option<&[(String, Value)]>,
) -> Result<Vec<Option<u64>>> {
    let runs = args.runs.get();
    // Fewer than ten runs cannot fill ten parts.
    let parts = runs.min(10);
    std::thread::scope(|scope| {
        let callers = (0..args.callers.get()).map(|caller| {
            let (give, parts) = mpsc::channel::<Range<usize>>();
            let (finish, finished) = mpsc::channel();
            let work = move || {
                for runs in parts {
                    let result = call(args, model, session, runs, caller, fixed);
                    // The send fails only if the receiver is gone, after the last part.
                    drop(finish.send(result));
                }
            };
            (give, finished, scope.spawn(work))
        });
        let callers: Vec<_> = callers.collect();
        let ran = (0..parts).map(|part| {
            // Rounding down at both ends gives every run to exactly one part.
            let runs = runs * part / parts..runs * (part + 1) / parts;
            for (give, ..) in &callers {
                give.send(runs.clone()).context("a caller has ended")?;
            }
            for (_, finished, _) in &callers {
                finished.recv().context("a caller has ended")??;
            }
            Ok(resident::measure().anonymous)
        });
        let ran: Result<Vec<Option<u64>>> = ran.collect();
        for (give, finished, thread) in callers {
            // A caller ends its loop as soon as its sender is dropped.
            drop((give, finished));
            thread.join().map_err(|_| anyhow::anyhow!("a caller panicked"))?;
        }
        ran
    })
}

/// Runs one caller on `fixed` inputs, or on random inputs for each run.
fn call(
    args: &SoakArgs,
    model: &Model,
    session: &Session,
    runs: Range<usize>,
    caller: usize,
    fixed: Option<&[(String, Value)]>,
) -> Result<()> {
    for index in runs {
        let drawn;
        let inputs = match fixed {
            Some(inputs) => inputs,
            None => {
                // Number 0 is the run whose outputs are compared.
                drawn = inputs_of(args, model, 1 + index * args.callers.get() + caller)?;
                &drawn
            }
        };
        drop(session.run(&given(inputs))?);
    }
    Ok(())
}

/// Runs the session and returns the bytes of its outputs.
fn bits(session: &Session, inputs: &[(String, Value)]) -> Result<Vec<Vec<u8>>> {
    bits_of(session.run(&given(inputs))?)
}

fn print(report: &SoakReport) -> Result<()> {
    let shown = |bytes: Option<u64>| bytes.map_or("-".to_owned(), |bytes| human_bytes(bytes as usize));
    let mut rows = table(&[
        "cycle",
        "loading",
        "loaded",
        "making sessions",
        "sessions made",
        "first runs",
        "all runs",
        "trimmed",
        "dropped",
    ]);
    for (index, cycle) in report.cycles.iter().enumerate() {
        let ran = |place: Option<&Option<u64>>| shown(place.copied().flatten());
        rows.add_row([
            (index + 1).to_string(),
            shown(cycle.load_peak),
            shown(cycle.loaded),
            shown(cycle.sessions_peak),
            shown(cycle.sessions),
            ran(cycle.ran.first()),
            ran(cycle.ran.last()),
            shown(cycle.trimmed),
            shown(cycle.dropped),
        ]);
    }
    say!("Anonymous memory of the process; {} before anything was loaded\n", shown(report.baseline))?;
    say!("{rows}\n")?;
    say!(
        "packed weights {}, activations at most {}",
        human_bytes(report.packed),
        human_bytes(report.activations_peak)
    )?;
    say!("resident at most {}, files included", shown(report.peak_rss))?;
    if !report.same_bits {
        bail!("the same inputs gave different results after a trim");
    }
    Ok(())
}
