//! `cargo xtask allocators`: memory and run time of `ort` with each heap that it can be built with.
//!
//! Each binary has its own target folder, so that switching heaps rebuilds nothing. The candidates
//! run in turn, each in its own process. Over several rounds, the highest memory and the lowest
//! time count.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::bench::mebibytes;
use crate::features::HEAPS;
use crate::soak::{SoakReport, parse};
use crate::table;
use crate::workspace::{Workspace, capture, run as run_command};

/// How long to measure.
#[derive(clap::Args)]
pub(crate) struct AllocatorsOptions {
    /// Measure each candidate this often, in turn with the others.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Load the model this often in one process, and run this many random shapes.
    #[arg(long, default_value_t = 30)]
    cycles: usize,
    /// Time runs for this many seconds in each round.
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
}

/// glibc's malloc tunables from OpenVINO's memory guide, set to values that hold little memory, and
/// a baseline with none. The `MALLOC_ARENA_MAX` family are older names for the same settings.
const TUNABLES: [(&str, &str); 5] = [
    ("glibc", ""),
    ("glibc, arena_max=1", "glibc.malloc.arena_max=1"),
    ("glibc, trim_threshold=128 KiB", "glibc.malloc.trim_threshold=131072"),
    ("glibc, mmap_threshold=64 KiB", "glibc.malloc.mmap_threshold=65536"),
    (
        "glibc, all three",
        "glibc.malloc.arena_max=1:glibc.malloc.trim_threshold=131072:glibc.malloc.mmap_threshold=65536",
    ),
];

/// The models and their sizes: one with small weights, one with large ones.
const SMALL: [&str; 3] = ["minilm_l6", "--dim", "seq=128"];
const LARGE: [&str; 3] = ["bert_base", "--dim", "seq=128"];

/// A binary with its environment, and its measurements.
struct Candidate {
    name: &'static str,
    ort: PathBuf,
    tunables: &'static str,
    found: Found,
}

/// Maximum bytes and minimum milliseconds over all rounds.
#[derive(Default)]
struct Found {
    left: Option<u64>,
    shapes: Option<u64>,
    trimmed: Option<u64>,
    callers: Option<u64>,
    load: Option<u64>,
    milliseconds: Option<f64>,
    load_milliseconds: Option<f64>,
}

/// The fields of `ort bench --json`.
#[derive(Deserialize)]
struct Times {
    load_ms: f64,
    min_ms: f64,
}

/// Builds the candidates, measures them and prints a table.
pub(crate) fn run(workspace: &Workspace, options: &AllocatorsOptions) -> Result<()> {
    let mut candidates = candidates(workspace)?;
    for round in 0..options.rounds.max(1) {
        for candidate in &mut candidates {
            // In turn, a slow spell of the machine hits all candidates alike.
            candidate.measure(workspace, options)?;
            eprintln!("round {}: {}", round + 1, candidate.name);
        }
    }
    let left = format!("left after {} loads", options.cycles);
    let mut rows = table::new(&[
        "heap",
        &left,
        "growth over random shapes",
        "then left by a trim",
        "left by a trim after 16 callers",
        "peak while bert_base is packed",
        "ms a run",
        "ms a load",
    ]);
    for Candidate { name, found, .. } in &candidates {
        let bytes = [found.left, found.shapes, found.trimmed, found.callers, found.load].map(mebibytes);
        let times = [found.milliseconds, found.load_milliseconds];
        let times = times.map(|time| time.map_or("-".to_owned(), |time| format!("{time:.2}")));
        rows.add_row(std::iter::once((*name).to_owned()).chain(bytes).chain(times));
    }
    println!("MiB of minilm_l6 with 128 tokens and 2 threads, where nothing else is said\n\n{rows}");
    Ok(())
}

/// Lists the candidates: the system's heap, with each set of tunables if it is glibc's, and each
/// heap that is a cargo feature.
fn candidates(workspace: &Workspace) -> Result<Vec<Candidate>> {
    let system = workspace.build_ort()?;
    // Only glibc reads `GLIBC_TUNABLES`.
    let count = if cfg!(all(target_os = "linux", target_env = "gnu")) { TUNABLES.len() } else { 1 };
    let of_system = |(name, tunables): &(&'static str, &'static str)| Candidate {
        name,
        ort: system.clone(),
        tunables,
        found: Found::default(),
    };
    let mut candidates: Vec<Candidate> = TUNABLES.iter().take(count).map(of_system).collect();
    for name in HEAPS {
        let target = workspace.target.join("allocators").join(name);
        let arguments = ["build", "--release", "--quiet", "--package", "ort-cli", "--features", name];
        run_command(workspace.cargo().args(arguments).arg("--target-dir").arg(&target))?;
        let ort = target.join("release").join(format!("ort{}", std::env::consts::EXE_SUFFIX));
        candidates.push(Candidate { name, ort, tunables: "", found: Found::default() });
    }
    Ok(candidates)
}

impl Candidate {
    /// Takes one round of all measurements.
    fn measure(&mut self, workspace: &Workspace, options: &AllocatorsOptions) -> Result<()> {
        let [cycles, seconds] = [options.cycles.to_string(), options.seconds.to_string()];
        let soak = |model: [&str; 3], arguments: &[&str]| -> Result<SoakReport> {
            parse(&capture(self.command(workspace, "soak", model).args(arguments))?)
        };
        let loads = soak(SMALL, &["--cycles", &cycles, "--runs", "2"])?;
        // Shapes that vary fragment a heap more than equal ones.
        let random = ["--random-dim", "batch=1..4", "--random-dim", "seq=8..256"];
        let shapes = soak(SMALL, &[&random[..], &["--runs", &cycles]].concat())?;
        let callers = soak(SMALL, &["--callers", "16", "--runs", "4"])?;
        // Loading packs the weights, which holds both forms for a moment.
        let large = soak(LARGE, &["--runs", "1"])?;
        let times = capture(self.command(workspace, "bench", SMALL).args(["--seconds", &seconds]))?;
        let Times { load_ms, min_ms } =
            serde_json::from_str(times.trim()).context("cannot read the times")?;
        let [_, load] = large.loading();
        let found = &mut self.found;
        // `None` is less than every `Some`, so a missing number replaces none.
        found.left = found.left.max(loads.left());
        found.shapes = found.shapes.max(shapes.growth());
        found.trimmed = found.trimmed.max(shapes.trimmed());
        found.callers = found.callers.max(callers.trimmed());
        found.load = found.load.max(load);
        found.milliseconds = Some(found.milliseconds.map_or(min_ms, |known| known.min(min_ms)));
        found.load_milliseconds = Some(found.load_milliseconds.map_or(load_ms, |known| known.min(load_ms)));
        Ok(())
    }

    fn command(&self, workspace: &Workspace, command: &str, [model, dim, size]: [&str; 3]) -> Command {
        let model = workspace.target.join("models").join(model).with_extension("onnx");
        let mut process = Command::new(&self.ort);
        process.arg(command).arg(model).args([dim, size, "--threads", "2", "--json"]);
        if !self.tunables.is_empty() {
            process.env("GLIBC_TUNABLES", self.tunables);
        }
        process
    }
}
