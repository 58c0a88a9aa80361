//! `cargo xtask bench --callers`: the cost of a session that is called only now and then, and the
//! throughput of concurrent callers on one session.

use std::process::Stdio;

use anyhow::{Context, Result, bail};

use super::isa::Isa;
use super::options::BenchOptions;
use super::runtime::{Report, Runtime, Timing, Tools, parse};
use super::tables::{decimals, milliseconds};
use crate::compare::{Cases, chosen_cases, prepare};
use crate::python::Python;
use crate::table;
use crate::workspace::{Workspace, capture, describe};

/// The models if none is named: a short run, a medium one of GEMMs, and a longer one of
/// convolutions.
const USUAL: [&str; 3] = ["mobilenet_v2_b1", "minilm_l6_b1_s128", "resnet50_b1"];
/// The call rate of the mostly idle session, in calls per second, and its threads.
const RATE: &str = "6";
const THREADS: usize = 2;
/// Concurrent callers.
const CALLERS: usize = 8;

/// Measures and prints both tables.
pub(super) fn run(workspace: &Workspace, options: &BenchOptions, python: Python) -> Result<()> {
    let cases = Cases::standard(workspace);
    let usual: Vec<String> = USUAL.iter().map(|name| (*name).to_owned()).collect();
    let names = if options.only.is_empty() { &usual } else { &options.only };
    let chosen = chosen_cases(&cases, names)?;
    prepare(workspace, &python, &cases, &chosen)?;
    let tools = options.tools(workspace, python)?;
    let mut calls = table::new(&[
        "case",
        "ours: work ms",
        "with caches cold",
        "called",
        "called/cold",
        "called/work",
        "ORT: work ms",
        "with caches cold",
        "called",
        "called/cold",
        "called/work",
    ]);
    let mut throughput = table::new(&[
        "case",
        "8 processes, runs/s",
        "CPU ms",
        "8 callers, 1 thread",
        "to processes",
        "CPU ms",
        "8 callers, 2 threads",
        "to processes",
        "CPU ms",
    ]);
    for case in &chosen {
        let timing = |threads: usize| Timing {
            model: cases.model(case),
            inputs: cases.folder.join(&case.name).join("inputs.npz"),
            isa: Isa::Native,
            threads,
            seconds: options.seconds,
            rows: None,
            // These tables have no column for loading.
            loads: 0,
        };
        let mut cells = vec![case.name.clone()];
        for runtime in [Runtime::Ours, Runtime::OnnxRuntime] {
            let [work, cold, called] = processor_times(&timing, &tools, runtime, options.rounds)?;
            cells.extend([work, cold, called].map(|time| milliseconds(Some(time))));
            cells.extend([called / cold, called / work].map(|ratio| decimals(Some(ratio))));
        }
        calls.add_row(cells);
        let [apart, together @ ..] = throughputs(&timing, &tools, options.rounds)?;
        let mut cells = vec![
            case.name.clone(),
            format!("{:.1}", apart.runs_per_second),
            milliseconds(Some(apart.cpu_ms)),
        ];
        for caller in together {
            let share = caller.runs_per_second / apart.runs_per_second;
            cells.extend([
                format!("{:.1}", caller.runs_per_second),
                decimals(Some(share)),
                milliseconds(Some(caller.cpu_ms)),
            ]);
        }
        throughput.add_row(cells);
        eprintln!("measured {}", case.name);
    }
    println!(
        "Processor time of a run: of runs one after the other with 1 thread (work), of {RATE} calls a second with 1 thread, which find the \
         processor's caches cold, and of as many calls with {THREADS} threads\n"
    );
    println!("{calls}\n\nThroughput of all callers together\n\n{throughput}");
    Ok(())
}

/// Returns the CPU time of a run in milliseconds, the minimum over the rounds: back to back with
/// one thread, then at [`RATE`] with one thread and with [`THREADS`].
fn processor_times(
    timing: &impl Fn(usize) -> Timing,
    tools: &Tools,
    runtime: Runtime,
    rounds: usize,
) -> Result<[f64; 3]> {
    let mut least = [f64::INFINITY; 3];
    let ways: [(usize, &[&str]); 3] = [(1, &[]), (1, &["--rate", RATE]), (THREADS, &["--rate", RATE])];
    for _ in 0..rounds {
        for (least, (threads, arguments)) in least.iter_mut().zip(ways) {
            let report = report(&timing(threads), tools, runtime, arguments)?;
            *least = least.min(report.cpu_ms.context("no processor time")?);
        }
    }
    Ok(least)
}

/// The combined throughput of all callers.
#[derive(Clone, Copy)]
struct Throughput {
    runs_per_second: f64,
    /// CPU time of a run.
    cpu_ms: f64,
}

impl Throughput {
    fn of(report: &Report) -> Result<Self> {
        let runs_per_second = report.runs_per_second.context("no runs per second")?;
        Ok(Self { runs_per_second, cpu_ms: report.cpu_ms.context("no processor time")? })
    }

    /// Returns the better value of the two for each field.
    fn best(self, other: Self) -> Self {
        Self {
            runs_per_second: self.runs_per_second.max(other.runs_per_second),
            cpu_ms: self.cpu_ms.min(other.cpu_ms),
        }
    }
}

/// How much longer throughput is measured than the time of one runtime. The processes do not start
/// at the same moment, so the tail that the last ones run alone must weigh little.
const LONGER: f64 = 3.0;

/// Returns the best throughput over the rounds: of separate processes with one thread each, of
/// callers on one session with one thread, and of callers on one with [`THREADS`].
fn throughputs(timing: &impl Fn(usize) -> Timing, tools: &Tools, rounds: usize) -> Result<[Throughput; 3]> {
    let callers = CALLERS.to_string();
    let longer = |threads: usize| Timing { seconds: timing(threads).seconds * LONGER, ..timing(threads) };
    let on_one = |threads: usize| -> Result<Throughput> {
        Throughput::of(&report(&longer(threads), tools, Runtime::Ours, &["--concurrency", &callers])?)
    };
    let mut best = [Throughput { runs_per_second: 0.0, cpu_ms: f64::INFINITY }; 3];
    for _ in 0..rounds {
        let round = [apart(&longer(1), tools)?, on_one(1)?, on_one(THREADS)?];
        for (best, found) in best.iter_mut().zip(round) {
            *best = best.best(found);
        }
    }
    Ok(best)
}

fn report(timing: &Timing, tools: &Tools, runtime: Runtime, extra: &[&str]) -> Result<Report> {
    parse(&capture(&mut timing.command(tools, runtime, extra))?)
}

/// Runs [`CALLERS`] processes concurrently and sums their throughput. Each measures its own
/// interval; loading is short, so the intervals overlap.
fn apart(timing: &Timing, tools: &Tools) -> Result<Throughput> {
    let mut children = Vec::new();
    // All processes start before the first is waited for, because they must overlap.
    for _ in 0..CALLERS {
        let mut command = timing.command(tools, Runtime::Ours, &[]);
        let child = command.stdout(Stdio::piped()).spawn();
        children.push(child.with_context(|| format!("cannot run {}", describe(&command)))?);
    }
    let mut sum = Throughput { runs_per_second: 0.0, cpu_ms: 0.0 };
    for child in children {
        // A report fits in the buffer of its pipe, so the processes that wait here do not block.
        let output = child.wait_with_output()?;
        if !output.status.success() {
            bail!("one of {CALLERS} processes failed ({})", output.status);
        }
        let one = Throughput::of(&parse(&String::from_utf8_lossy(&output.stdout))?)?;
        sum.runs_per_second += one.runs_per_second;
        // Runs per second add up over the processes; the CPU time of a run is their mean.
        sum.cpu_ms += one.cpu_ms / CALLERS as f64;
    }
    Ok(sum)
}
