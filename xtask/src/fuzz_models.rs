//! `cargo xtask fuzz-models`: differential fuzzing with random models, in every session
//! configuration, against ONNX's reference evaluator.
//!
//! Python workers generate models and compute the expected outputs (`python/fuzz_models`). Each
//! worker has a child process that runs the models (the example `model_configurations` of
//! ort-testkit). A failing model is reduced to the smallest that still fails, and kept as a
//! test-case folder. A case depends only on the seed and its number, not on the number of workers.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, IsTerminal};
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;

use crate::python::Python;
use crate::summary::Summary;
use crate::table;
use crate::workspace::{Workspace, describe};

/// The maximum percentage of a family's cases that may be left out, because generation fails or
/// kernels are missing. Above it the family tests too little.
const MOST_LEFT_OUT: usize = 20;
/// The interval of progress output on a terminal.
const PROGRESS: Duration = Duration::from_millis(500);

/// What to run.
#[derive(clap::Args, Clone)]
pub(crate) struct FuzzModelsOptions {
    /// The seed of all cases.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// The number of the first case.
    #[arg(long, value_name = "N", default_value_t = 0)]
    first: usize,
    /// Run this many cases.
    #[arg(long, value_name = "N", default_value_t = 2000)]
    count: usize,
    /// Stop after this many seconds, even if cases are left.
    #[arg(long, value_name = "S")]
    seconds: Option<u64>,
    /// Run only these families of graphs.
    #[arg(long, value_name = "FAMILY")]
    only: Vec<String>,
    /// Keep reduced models here [default: target/fuzz_models].
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
    /// Reduce this many failing models per worker; only count the others.
    #[arg(long, value_name = "N", default_value_t = 10)]
    findings: usize,
    /// Run without memory limits.
    #[arg(long)]
    without_limits: bool,
    /// Run this many worker processes [default: the cores available].
    #[arg(long, value_name = "N")]
    workers: Option<usize>,
}

impl FuzzModelsOptions {
    /// The options of `cargo xtask test`, for a run of about two minutes on two cores.
    pub(crate) fn short() -> Self {
        Self {
            seed: 0,
            first: 0,
            count: SHORT,
            seconds: None,
            only: CLEAN.map(str::to_owned).to_vec(),
            keep: None,
            findings: 3,
            without_limits: true,
            workers: None,
        }
    }
}

/// The families without known failures, apart from memory limits.
const CLEAN: [&str; 11] = [
    "attention",
    "control",
    "convolution",
    "elementwise",
    "integer_codes",
    "linear",
    "movement",
    "quantized",
    "reduction",
    "spelled",
    "wide_elementwise",
];

/// How many cases `cargo xtask test` runs.
pub(crate) const SHORT: usize = 3000;

/// A worker's report of a case.
#[derive(Deserialize)]
struct FuzzReport {
    case: usize,
    family: String,
    outcome: String,
    #[serde(default)]
    options: String,
    #[serde(default)]
    problem: String,
    folder: Option<PathBuf>,
}

impl FuzzReport {
    fn is_failure(&self) -> bool {
        // Cases that were left out are limited by `MOST_LEFT_OUT` instead.
        !matches!(self.outcome.as_str(), "right" | "unsupported" | "undrawn")
    }
}

/// The counts of a family.
#[derive(Default)]
struct Counts {
    right: usize,
    unsupported: usize,
    undrawn: usize,
    failures: BTreeMap<String, usize>,
}

impl Counts {
    fn add(&mut self, outcome: &str) {
        match outcome {
            "right" => self.right += 1,
            "unsupported" => self.unsupported += 1,
            "undrawn" => self.undrawn += 1,
            other => *self.failures.entry(other.to_owned()).or_default() += 1,
        }
    }

    fn failed(&self) -> usize {
        self.failures.values().sum()
    }

    fn all(&self) -> usize {
        self.right + self.unsupported + self.undrawn + self.failed()
    }
}

/// Runs the cases; an error if one fails, or if too many are left out.
pub(crate) fn run(workspace: &Workspace, options: &FuzzModelsOptions) -> Result<Summary> {
    let python = Python::open(workspace)?;
    let runner = workspace.build_example("model_configurations")?;
    let workers = options.workers.unwrap_or_else(|| thread::available_parallelism().map_or(1, usize::from));
    let start = Instant::now();
    let (sender, reports) = channel();
    let mut children = Vec::new();
    for worker in 0..workers {
        let work = tempfile::tempdir().context("a folder for cases")?;
        let mut command = python.script("fuzz_models");
        command.arg("--runner").arg(&runner).arg("--work").arg(work.path());
        command
            .arg("--keep")
            .arg(options.keep.clone().unwrap_or_else(|| workspace.target.join("fuzz_models")));
        let numbers = [
            ("--seed", options.seed.to_string()),
            // Worker w of n takes the cases first + w, first + w + n, and so on. `--count` is the
            // end of the range, the same for all workers.
            ("--first", (options.first + worker).to_string()),
            ("--step", workers.to_string()),
            ("--count", (options.first + options.count).to_string()),
            ("--findings", options.findings.to_string()),
        ];
        command.args(numbers.iter().flat_map(|(flag, number)| [flag, number.as_str()]));
        if let Some(seconds) = options.seconds {
            command.arg("--seconds").arg(seconds.to_string());
        }
        command.args(options.only.iter().flat_map(|family| ["--only", family]));
        if options.without_limits {
            command.arg("--without-limits");
        }
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot run {}", describe(&command)))?;
        read_reports(&mut child, sender.clone())?;
        // Dropping `work` would delete the folder, so it lives as long as its worker.
        children.push((child, work));
    }
    // The reports end when the last sender is dropped, which must not be this one.
    drop(sender);
    let (families, left_out) = collect(&reports, options.count, start);
    for (mut child, _) in children {
        let status = child.wait()?;
        ensure!(status.success(), "a worker failed ({status})");
    }
    show(&families);
    for (problem, count) in &left_out {
        println!("left out {count} times: {problem}");
    }
    let reported: usize = families.values().map(Counts::all).sum();
    // Catches workers that died early and lines that did not parse.
    ensure!(
        options.seconds.is_some() || reported == options.count,
        "{reported} of {} models were reported",
        options.count
    );
    conclude(&families, start)
}

/// Forwards a worker's reports from a thread of its own.
fn read_reports(child: &mut Child, sender: Sender<FuzzReport>) -> Result<()> {
    let output = child.stdout.take().context("the output is piped")?;
    thread::spawn(move || {
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            match serde_json::from_str(&line) {
                Ok(report) => drop(sender.send(report)),
                // The lost report makes the count of reports too low, which fails the run.
                Err(problem) => eprintln!("a worker printed {line:?}: {problem}"),
            }
        }
    });
    Ok(())
}

/// The counts by family, and the reasons for leaving models out, each with its count.
type Collected = (BTreeMap<String, Counts>, BTreeMap<String, usize>);

/// Counts the reports as they arrive, and prints each failure at once.
fn collect(reports: &Receiver<FuzzReport>, count: usize, start: Instant) -> Collected {
    let mut families: BTreeMap<String, Counts> = BTreeMap::new();
    let mut left_out = BTreeMap::new();
    let (mut done, mut failed, mut shown) = (0, 0, Instant::now());
    let on_terminal = std::io::stderr().is_terminal();
    for report in reports {
        done += 1;
        families.entry(report.family.clone()).or_default().add(&report.outcome);
        if matches!(report.outcome.as_str(), "unsupported" | "undrawn") {
            *left_out.entry(without_names(&report.problem)).or_default() += 1;
        }
        if report.is_failure() {
            failed += 1;
            let options = if report.options.is_empty() { "" } else { " with " };
            println!(
                "{} case {} of {}{options}{}: {}",
                report.outcome.to_uppercase(),
                report.case,
                report.family,
                report.options,
                report.problem.lines().next().unwrap_or_default()
            );
            report.folder.iter().for_each(|folder| println!("    reduced in {}", folder.display()));
        }
        if on_terminal && shown.elapsed() > PROGRESS {
            shown = Instant::now();
            eprint!("\r{done} of {count} models, {failed} failed, {:.0} s ", start.elapsed().as_secs_f64());
        }
    }
    if on_terminal {
        eprintln!();
    }
    (families, left_out)
}

/// Removes the names of nodes and values from a message, so that the same problem in two models
/// counts as one.
fn without_names(problem: &str) -> String {
    // Messages quote names, so every second part is a name.
    let parts = problem.split('\'').enumerate();
    parts.map(|(index, part)| if index % 2 == 0 { part } else { ".." }).collect()
}

fn show(families: &BTreeMap<String, Counts>) {
    let mut table = table::new(&["family", "right", "failed", "how", "not supported", "not drawn"]);
    for (name, counts) in families {
        let how = counts.failures.iter().map(|(outcome, count)| format!("{count} {outcome}"));
        table.add_row([
            name.clone(),
            counts.right.to_string(),
            counts.failed().to_string(),
            how.collect::<Vec<_>>().join(", "),
            counts.unsupported.to_string(),
            counts.undrawn.to_string(),
        ]);
    }
    println!("{table}");
}

fn conclude(families: &BTreeMap<String, Counts>, start: Instant) -> Result<Summary> {
    let sum = |count: fn(&Counts) -> usize| families.values().map(count).sum::<usize>();
    let summary = Summary {
        passed: sum(|counts| counts.right),
        failed: sum(Counts::failed),
        skipped: sum(|counts| counts.unsupported + counts.undrawn),
        ..Summary::default()
    };
    println!("{summary} in {:.0} s", start.elapsed().as_secs_f64());
    // A run that left out every model tests nothing and must not pass.
    ensure!(summary.passed + summary.failed > 0, "no model ran");
    if summary.failed > 0 {
        bail!("{} models fail; each reduced one has a README.md in its folder", summary.failed);
    }
    for (name, counts) in families {
        let left_out = counts.unsupported + counts.undrawn;
        // A majority in a small sample may be chance.
        if counts.all() >= 50 && left_out * 100 > counts.all() * MOST_LEFT_OUT {
            bail!("{left_out} of {} models of '{name}' did not run: it tests little", counts.all());
        }
    }
    Ok(summary)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn families(outcomes: &[(&str, usize)]) -> BTreeMap<String, Counts> {
        let mut counts = Counts::default();
        for (outcome, count) in outcomes {
            (0..*count).for_each(|_| counts.add(outcome));
        }
        BTreeMap::from([("some".to_owned(), counts)])
    }

    #[test]
    fn a_failure_is_an_error_and_so_are_too_many_that_did_not_run() {
        let table: [(&[(&str, usize)], bool); 6] = [
            (&[("right", 90), ("unsupported", 10)], true),
            (&[("right", 99), ("wrong", 1)], false),
            (&[("right", 99), ("dies", 1)], false),
            (&[("right", 70), ("unsupported", 20), ("undrawn", 10)], false),
            (&[("right", 1), ("undrawn", 1)], true),
            (&[], false),
        ];
        for (outcomes, is_fine) in table {
            let result = conclude(&families(outcomes), Instant::now());
            assert_eq!(result.is_ok(), is_fine, "{outcomes:?}");
        }
    }
}
