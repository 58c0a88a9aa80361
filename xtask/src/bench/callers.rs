//! `cargo xtask bench --callers`: what a session costs that is called now and then, and what several callers get out of one session.

use std::process::Stdio;

use anyhow::{Context, Result, bail};

use super::Options;
use super::runtime::{Report, Runtime, Timing, Tools, parse};
use super::tables::{decimals, milliseconds};
use crate::compare::{Cases, chosen_cases, prepare};
use crate::python::Python;
use crate::table;
use crate::workspace::{Workspace, capture, describe};

/// The models where none is named: a short run, a middle one of products, a longer one of convolutions.
const USUAL: [&str; 3] = ["mobilenet_v2_b1", "minilm_l6_b1_s128", "resnet50_b1"];
/// Calls per second of a session that is called now and then, and its threads.
const RATE: &str = "6";
const THREADS: usize = 2;
/// Callers at the same time.
const CALLERS: usize = 8;

/// Measures and prints both tables.
pub(super) fn run(workspace: &Workspace, options: &Options, python: Python) -> Result<()> {
    let cases = Cases::standard(workspace);
    let usual: Vec<String> = USUAL.iter().map(|name| (*name).to_owned()).collect();
    let names = if options.only.is_empty() { &usual } else { &options.only };
    let chosen = chosen_cases(&cases, names)?;
    prepare(workspace, &python, &cases, &chosen)?;
    let tools = options.tools(workspace, python)?;
    let mut calls = table::new(&[
        "case",
        "ours: work ms",
        "called",
        "called/work",
        "ORT: work ms",
        "called",
        "called/work",
    ]);
    let mut throughput = table::new(&[
        "case",
        "8 processes, runs/s",
        "8 callers, 1 thread",
        "to processes",
        "8 callers, 2 threads",
        "to processes",
    ]);
    for case in &chosen {
        let timing = |threads: usize| Timing {
            model: cases.model(case),
            inputs: cases.folder.join(&case.name).join("inputs.npz"),
            threads,
            seconds: options.seconds,
            rows: None,
        };
        let mut cells = vec![case.name.clone()];
        for runtime in [Runtime::Ours, Runtime::OnnxRuntime] {
            let (work, called) = processor_times(&timing, &tools, runtime, options.rounds)?;
            cells.extend([
                milliseconds(Some(work)),
                milliseconds(Some(called)),
                decimals(Some(called / work)),
            ]);
        }
        calls.add_row(cells);
        let mut cells = vec![case.name.clone()];
        let [apart, together @ ..] = throughputs(&timing, &tools, options.rounds)?;
        cells.push(format!("{apart:.1}"));
        cells.extend(together.iter().flat_map(|rate| [format!("{rate:.1}"), decimals(Some(rate / apart))]));
        throughput.add_row(cells);
        eprintln!("measured {}", case.name);
    }
    println!(
        "Processor time of a run: of runs one after the other with 1 thread (work), and of {RATE} calls a second with {THREADS} threads\n"
    );
    println!("{calls}\n\nThroughput of all callers together\n\n{throughput}");
    Ok(())
}

/// The processor time of a run, in milliseconds: back to back with one thread, and called now and then; the least of the rounds.
fn processor_times(
    timing: &impl Fn(usize) -> Timing,
    tools: &Tools,
    runtime: Runtime,
    rounds: usize,
) -> Result<(f64, f64)> {
    let (mut work, mut called) = (f64::INFINITY, f64::INFINITY);
    for _ in 0..rounds {
        let back_to_back = report(&timing(1), tools, runtime, &[])?;
        let now_and_then = report(&timing(THREADS), tools, runtime, &["--rate", RATE])?;
        work = work.min(back_to_back.cpu_ms.context("no processor time")?);
        called = called.min(now_and_then.cpu_ms.context("no processor time")?);
    }
    Ok((work, called))
}

/// Runs per second of separate processes with one thread each, of callers on a session with one thread, and of callers on one with two; the most of the
/// rounds.
fn throughputs(timing: &impl Fn(usize) -> Timing, tools: &Tools, rounds: usize) -> Result<[f64; 3]> {
    let callers = CALLERS.to_string();
    let mut best = [0.0_f64; 3];
    for _ in 0..rounds {
        let on_one = |threads: usize| -> Result<f64> {
            let report = report(&timing(threads), tools, Runtime::Ours, &["--concurrency", &callers])?;
            report.runs_per_second.context("no runs per second")
        };
        let round = [apart(&timing(1), tools)?, on_one(1)?, on_one(THREADS)?];
        for (best, rate) in best.iter_mut().zip(round) {
            *best = best.max(rate);
        }
    }
    Ok(best)
}

fn report(timing: &Timing, tools: &Tools, runtime: Runtime, extra: &[&str]) -> Result<Report> {
    parse(&capture(&mut timing.command(tools, runtime, extra))?)
}

/// Runs per second of processes of our own at the same time. Each counts its own seconds; they begin within a moment of each other, as loading is short.
fn apart(timing: &Timing, tools: &Tools) -> Result<f64> {
    let mut children = Vec::new();
    for _ in 0..CALLERS {
        let mut command = timing.command(tools, Runtime::Ours, &[]);
        let child = command.stdout(Stdio::piped()).spawn();
        children.push(child.with_context(|| format!("cannot run {}", describe(&command)))?);
    }
    let mut sum = 0.0;
    for child in children {
        let output = child.wait_with_output()?;
        if !output.status.success() {
            bail!("one of {CALLERS} processes failed ({})", output.status);
        }
        let report = parse(&String::from_utf8_lossy(&output.stdout))?;
        sum += report.runs_per_second.context("no runs per second")?;
    }
    Ok(sum)
}
