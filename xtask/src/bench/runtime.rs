//! The timed runtimes, each in its own process, and the reports that they print.

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use super::isa::Isa;
use crate::python::Python;
use crate::workspace::{Workspace, capture};

/// A timed runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::enum_variant_names, reason = "ONNX Runtime is called so")]
pub(crate) enum Runtime {
    Ours,
    OnnxRuntime,
    OpenVino,
}

/// The programs that run the runtimes.
pub(crate) struct Tools {
    /// Our binary.
    pub(crate) ort: PathBuf,
    /// Further arguments for it.
    pub(crate) arguments: Vec<String>,
    /// The environment of the other two.
    pub(crate) python: Python,
    /// The element type in which OpenVINO is asked to multiply.
    pub(crate) openvino_precision: &'static str,
}

impl Tools {
    /// Builds ours; all runtimes multiply in float32.
    pub(crate) fn new(workspace: &Workspace, python: Python) -> Result<Self> {
        let ort = workspace.build_ort()?;
        Ok(Self { ort, arguments: Vec::new(), python, openvino_precision: "f32" })
    }
}

/// The shown fields of `ort bench --json` and of time_reference.py. Times are in milliseconds,
/// memory in bytes; a field is null if the platform cannot tell.
#[derive(Clone, Default, Deserialize)]
pub(crate) struct Report {
    pub(crate) load_ms: Option<f64>,
    pub(crate) median_ms: f64,
    #[serde(default)]
    pub(crate) min_ms: f64,
    pub(crate) cpu_ms: Option<f64>,
    pub(crate) runs_per_second: Option<f64>,
    pub(crate) operations: Option<u64>,
    pub(crate) baseline_rss: Option<u64>,
    pub(crate) peak_rss: Option<u64>,
    pub(crate) planned_peak: Option<u64>,
    pub(crate) arena_peak: Option<u64>,
    pub(crate) weights: Option<u64>,
    pub(crate) weights_mapped: Option<u64>,
}

impl Report {
    /// Returns the bytes by which the peak exceeded the process's memory before it loaded the
    /// model.
    pub(crate) fn growth(&self) -> Option<u64> {
        self.peak_rss?.checked_sub(self.baseline_rss?)
    }

    /// Returns the bytes that weights and activations account for.
    pub(crate) fn need(&self) -> Option<u64> {
        self.weights?.checked_add(self.planned_peak.or(self.arena_peak)?)
    }
}

/// All rounds of one runtime. Other load on the machine only ever adds time, so the minimum is the
/// best estimate.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Side {
    /// The minimum of the rounds' medians.
    pub(crate) median_ms: f64,
    /// The minimum time of a run.
    pub(crate) min_ms: f64,
    /// The minimum CPU time of a run over all threads. Other load on the machine hardly changes it.
    pub(crate) cpu_ms: Option<f64>,
    /// The minimum time to load, of the timed processes and of those that only load.
    pub(crate) load_ms: Option<f64>,
    /// The maximum memory growth, in bytes.
    pub(crate) growth: Option<u64>,
    /// Multiplications and additions of a run, if the runtime reports them.
    pub(crate) operations: Option<u64>,
}

impl Side {
    /// Aggregates the rounds; `loads` are the reports of processes that only loaded.
    fn of(reports: &[Report], loads: &[Report]) -> Option<Self> {
        let median_ms = reports.iter().map(|report| report.median_ms).reduce(f64::min)?;
        let min_ms = reports.iter().map(|report| report.min_ms).reduce(f64::min)?;
        let cpu_ms = reports.iter().filter_map(|report| report.cpu_ms).reduce(f64::min);
        let load_ms = reports.iter().chain(loads).filter_map(|report| report.load_ms).reduce(f64::min);
        let growth = reports.iter().filter_map(Report::growth).max();
        Some(Self { median_ms, min_ms, cpu_ms, load_ms, growth, operations: reports.first()?.operations })
    }
}

/// One model on one set of inputs, as every runtime is asked to time it.
#[derive(Clone)]
pub(crate) struct Timing {
    pub(crate) model: PathBuf,
    pub(crate) inputs: PathBuf,
    /// The instruction set that the runtimes use at most.
    pub(crate) isa: Isa,
    pub(crate) threads: usize,
    pub(crate) seconds: f64,
    /// How many rows of the inputs a run takes; all of them if `None`.
    pub(crate) rows: Option<usize>,
    /// Processes that only load, run before each timed one. Memory that has been idle is slower to
    /// touch, and a runtime must not pay for what the previous one left idle.
    pub(crate) loads: usize,
}

/// The reports of one runtime.
#[derive(Default)]
struct Reports {
    timed: Vec<Report>,
    loads: Vec<Report>,
    failed: bool,
}

impl Timing {
    /// Runs the runtimes in turn for `rounds` rounds. A runtime that fails is not run again and has
    /// no [`Side`]; a failure of ours is an error.
    pub(crate) fn in_turn(
        &self,
        tools: &Tools,
        runtimes: &[Runtime],
        rounds: usize,
    ) -> Result<Vec<Option<Side>>> {
        let mut all: Vec<Reports> = runtimes.iter().map(|_| Reports::default()).collect();
        for _ in 0..rounds {
            for (&runtime, reports) in runtimes.iter().zip(&mut all).filter(|(_, reports)| !reports.failed) {
                match self.one_turn(tools, runtime, reports) {
                    // Without ours there is nothing to compare.
                    Err(error) if runtime == Runtime::Ours => return Err(error),
                    Err(error) => {
                        eprintln!("left out: {error:#}");
                        reports.failed = true;
                    }
                    Ok(()) => {}
                }
            }
        }
        // The earlier rounds of a runtime that failed do not count.
        let side = |reports: &Reports| Side::of(&reports.timed, &reports.loads).filter(|_| !reports.failed);
        Ok(all.iter().map(side).collect())
    }

    /// Runs the load-only processes, then the timed one.
    fn one_turn(&self, tools: &Tools, runtime: Runtime, reports: &mut Reports) -> Result<()> {
        // Reading the file first puts it into the page cache for every runtime; otherwise the first
        // would load from disk.
        io::copy(&mut File::open(&self.model)?, &mut io::sink())?;
        // A millisecond is over after the first run, so the process does little but load.
        let only_load = Self { seconds: 1e-3, ..self.clone() };
        for _ in 0..self.loads {
            let mut command = only_load.command(tools, runtime, &["--warmup", "0"]);
            reports.loads.push(parse(&capture(&mut command)?)?);
        }
        reports.timed.push(parse(&capture(&mut self.command(tools, runtime, &[]))?)?);
        Ok(())
    }

    /// Builds the command of one report; `extra` are arguments that both programs accept.
    pub(crate) fn command(&self, tools: &Tools, runtime: Runtime, extra: &[&str]) -> Command {
        let (threads, seconds) = (self.threads.to_string(), self.seconds.to_string());
        let mut command = match runtime {
            Runtime::Ours => {
                let mut command = Command::new(&tools.ort);
                command.arg("bench").arg(&self.model).arg("--json").arg("--inputs").arg(&self.inputs);
                command.args(["--threads", &threads, "--seconds", &seconds]).args(&tools.arguments);
                command
            }
            Runtime::OnnxRuntime => self.script(tools, "onnxruntime"),
            Runtime::OpenVino => {
                let mut command = self.script(tools, "openvino");
                command.args(["--precision", tools.openvino_precision]);
                command
            }
        };
        if let Some(rows) = self.rows {
            command.args(["--rows", &rows.to_string()]);
        }
        command.envs(self.isa.variables().iter().copied()).args(extra);
        command
    }

    fn script(&self, tools: &Tools, runtime: &str) -> Command {
        let mut command = tools.python.script("time_reference.py");
        command.arg(runtime).arg(&self.model).arg(&self.inputs);
        command.arg(self.threads.to_string()).arg(self.seconds.to_string());
        command
    }
}

/// Parses the one JSON object that each program prints.
pub(crate) fn parse(text: &str) -> Result<Report> {
    serde_json::from_str(text.trim()).context("cannot read a timing report")
}

/// Checks that the rounds and seconds are positive.
pub(crate) fn check(rounds: usize, seconds: f64) -> Result<()> {
    if rounds == 0 || seconds.is_nan() || seconds <= 0.0 {
        bail!("--rounds and --seconds must be over zero");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_may_have_nulls_and_further_fields() {
        let report =
            parse(r#"{"model":"m","median_ms":1.5,"load_ms":null,"peak_rss":30,"baseline_rss":10}"#).unwrap();
        assert_eq!((report.median_ms, report.load_ms, report.growth()), (1.5, None, Some(20)));
    }

    #[test]
    fn the_least_time_and_the_most_memory_count() {
        let report = |median_ms, load_ms, peak| Report {
            median_ms,
            load_ms: Some(load_ms),
            baseline_rss: Some(10),
            peak_rss: Some(peak),
            ..Report::default()
        };
        let side = Side::of(
            &[report(3.0, 5.0, 40), report(2.0, 7.0, 50), report(4.0, 6.0, 30)],
            &[report(1.0, 4.0, 90)],
        )
        .unwrap();
        assert_eq!((side.median_ms, side.load_ms, side.growth), (2.0, Some(4.0), Some(40)));
        assert_eq!(Side::of(&[], &[report(1.0, 4.0, 90)]), None);
    }
}
