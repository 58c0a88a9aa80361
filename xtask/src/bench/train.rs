//! `cargo xtask bench --train`: timings of training steps of ours, PyTorch and ONNX Runtime, in
//! turn, each in its own process.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, anyhow, bail};
use serde::Deserialize;
use serde_json::{Value as Json, json};

use super::options::BenchOptions;
use super::runtime;
use super::tables::{Style, decimals, mebibytes, milliseconds};
use crate::python::Python;
use crate::table;
use crate::workspace::{Workspace, capture, prepare_with};

/// A model of `python/train_modules.py`, and the extra arguments of `ort train` for it.
struct Model {
    name: &'static str,
    arguments: &'static [&'static str],
}

const MODELS: [Model; 4] = [
    Model { name: "bert", arguments: &[] },
    Model { name: "gpt", arguments: &["--ignore-index", "-100"] },
    Model { name: "resnet18", arguments: &[] },
    Model { name: "mobilenet_v3", arguments: &[] },
];

/// A table cell is cut to this many characters of an error; progress output prints all of it.
const SHOWN_OF_A_PROBLEM: usize = 60;

/// Samples of a step, and steps of an epoch. `train_models.py` makes the data to match.
const BATCH: usize = 16;
const BATCHES: usize = 3;

/// The minimum epochs of a process, for a median of nine steps.
const LEAST_EPOCHS: usize = 3;

/// The runtime, and how it saves memory.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Setting {
    /// Ours at a level of the memory optimizer.
    Level(u8),
    /// Ours under a limit that leaves this share of level 0's activations.
    Share(f64),
    /// Another runtime of `train_bench.py`, at a level if it has levels.
    Other(&'static str, u8),
}

/// The settings in the order of the rows. Level 0 comes first because the limits of
/// [`Setting::Share`] derive from its report.
const SETTINGS: [Setting; 10] = [
    Setting::Level(0),
    Setting::Other("torch", 0),
    Setting::Other("ortmodule", 0),
    Setting::Other("ortapi", 0),
    Setting::Level(1),
    Setting::Level(2),
    Setting::Share(0.5),
    Setting::Share(1.0 / 3.0),
    Setting::Other("ortmodule", 1),
    Setting::Other("ortmodule", 2),
];

impl Setting {
    fn describe(self) -> String {
        match self {
            Setting::Level(level) => format!("ours, level {level}"),
            Setting::Share(share) => format!("ours, within {share:.2} of the activations"),
            Setting::Other("torch", _) => "PyTorch, eager".to_owned(),
            Setting::Other("ortmodule", level) => format!("ORTModule, level {level}"),
            Setting::Other(..) => "ONNX Runtime's training API".to_owned(),
        }
    }
}

/// The shown fields of `ort train --json` and of train_bench.py. Times are in milliseconds, memory
/// in bytes.
#[derive(Clone, Debug, Deserialize)]
struct TrainReport {
    #[serde(alias = "step_median_ms")]
    median_ms: Option<f64>,
    #[serde(alias = "step_min_ms")]
    min_ms: Option<f64>,
    baseline_rss: Option<u64>,
    peak_rss: Option<u64>,
    memory_predicted: Option<Memory>,
    memory_measured: Option<Memory>,
    recompute: Option<Recompute>,
    error: Option<String>,
}

#[derive(Clone, Debug, Deserialize)]
struct Memory {
    activations: u64,
    total: u64,
}

#[derive(Clone, Debug, Deserialize)]
struct Recompute {
    extra_time: f64,
}

/// All rounds of one setting. Times are minima, because other load on the machine only ever adds
/// time.
#[derive(Clone, Debug, Default)]
struct TrainRow {
    median_ms: Option<f64>,
    min_ms: Option<f64>,
    growth: Option<u64>,
    last: Option<TrainReport>,
    problem: Option<String>,
}

impl TrainRow {
    fn add(&mut self, outcome: Result<TrainReport>) {
        match outcome {
            Err(error) => self.problem = Some(format!("{error:#}")),
            Ok(TrainReport { error: Some(error), .. }) => self.problem = Some(error),
            Ok(report) => {
                let least =
                    // A round that does not report a time keeps that of the others.
                    |one: Option<f64>, other: Option<f64>| one.into_iter().chain(other).reduce(f64::min);
                self.median_ms = least(self.median_ms, report.median_ms);
                self.min_ms = least(self.min_ms, report.min_ms);
                let growth = report.peak_rss.zip(report.baseline_rss);
                // Memory takes the maximum: a process must be given the largest of its peaks.
                self.growth = self.growth.max(growth.and_then(|(peak, base)| peak.checked_sub(base)));
                self.last = Some(report);
            }
        }
    }

    fn activations(&self) -> Option<u64> {
        Some(self.last.as_ref()?.memory_measured.as_ref()?.activations)
    }

    fn predicted(&self) -> Option<u64> {
        Some(self.last.as_ref()?.memory_predicted.as_ref()?.activations)
    }
}

/// Times all settings and prints a row for each.
pub(super) fn run(workspace: &Workspace, options: &BenchOptions) -> Result<()> {
    runtime::check(options.rounds, options.seconds)?;
    let chosen = chosen(&options.only)?;
    let bench = Bench {
        ort: workspace.build_ort()?,
        python: Python::open_for_train_bench(workspace)?,
        folder: workspace.target.join("train"),
        seconds: options.seconds,
        arguments: &options.arguments,
    };
    let mut all = Vec::new();
    for model in chosen {
        bench.make(model)?;
        for &threads in &options.threads {
            let rows = bench.in_turn(model, threads, options.rounds)?;
            all.push((model, threads, rows));
        }
    }
    print(&all, options.style())
}

fn chosen(only: &[String]) -> Result<Vec<&'static Model>> {
    let names = MODELS.map(|model| model.name);
    if let Some(name) = only.iter().find(|name| !names.contains(&name.as_str())) {
        bail!("there is no model '{name}' for training; there are {}", names.join(", "));
    }
    Ok(MODELS.iter().filter(|model| only.is_empty() || only.iter().any(|name| name == model.name)).collect())
}

struct Bench<'a> {
    ort: PathBuf,
    python: Python,
    folder: PathBuf,
    seconds: f64,
    arguments: &'a [String],
}

impl Bench<'_> {
    fn file(&self, model: &Model, extension: &str) -> PathBuf {
        self.folder.join(format!("{}.{extension}", model.name))
    }

    /// Exports the model and makes its batches, if they are missing.
    fn make(&self, model: &Model) -> Result<()> {
        if ["onnx", "npz"].iter().all(|extension| self.file(model, extension).exists()) {
            return Ok(());
        }
        let mut command = self.python.script("train_models.py");
        command.arg(&self.folder).args(["--size", "bench", "--batches", &BATCHES.to_string()]);
        prepare_with(command.args(["--only", model.name]))
    }

    fn in_turn(&self, model: &Model, threads: usize, rounds: usize) -> Result<Vec<TrainRow>> {
        let mut rows = vec![TrainRow::default(); SETTINGS.len()];
        for _ in 0..rounds {
            for (index, setting) in SETTINGS.into_iter().enumerate() {
                // Row 0 is level 0, from which `Setting::Share` computes its limit.
                let whole = rows.first().and_then(|row| row.last.clone());
                let row = &mut rows[index];
                // A setting that failed once is not retried in later rounds.
                if row.problem.is_some() {
                    continue;
                }
                row.add(self.one(model, threads, setting, whole.as_ref(), row.median_ms));
                eprintln!(
                    "{} with {threads} threads, {}: {}",
                    model.name,
                    setting.describe(),
                    row.problem.clone().unwrap_or_else(|| format!("{} ms", milliseconds(row.median_ms)))
                );
            }
        }
        // Level 0 is the reference of the other settings, so its failure ends the run.
        match rows.first().and_then(|row| row.problem.clone()) {
            Some(problem) => Err(anyhow!("{problem}")),
            None => Ok(rows),
        }
    }

    /// Runs one process. `whole` is level 0's report; `median` is the step time of an earlier
    /// round, from which the epochs for `seconds` follow.
    fn one(
        &self,
        model: &Model,
        threads: usize,
        setting: Setting,
        whole: Option<&TrainReport>,
        median: Option<f64>,
    ) -> Result<TrainReport> {
        // The first round knows no step time and runs the minimum.
        // Milliseconds that are asked for, divided by those of an epoch.
        let wanted = median.map_or(0.0, |median| self.seconds * 1e3 / (median * BATCHES as f64));
        let epochs = (wanted.ceil() as usize).max(LEAST_EPOCHS);
        let mut command = match setting {
            Setting::Level(level) => {
                let mut command = self.ours(model, threads, epochs);
                command.args(["--memory-opt-level", &level.to_string()]);
                command
            }
            Setting::Share(share) => {
                let memory = whole.and_then(|report| report.memory_predicted.as_ref());
                let memory = memory.context("level 0 did not say what it takes")?;
                let room = (memory.activations as f64 * share) as u64;
                // The limit covers all memory, of which only the activations may shrink.
                let limit = memory.total - memory.activations + room;
                let mut command = self.ours(model, threads, epochs);
                command.args(["--memory-limit", &limit.to_string()]);
                command
            }
            Setting::Other(name, level) => {
                let mut command = self.python.script("train_bench.py");
                command.args([name, model.name, &threads.to_string(), &self.seconds.to_string()]);
                command.args(["--level", &level.to_string()]);
                command
            }
        };
        read(&capture(&mut command)?)
    }

    fn ours(&self, model: &Model, threads: usize, epochs: usize) -> Command {
        let mut command = Command::new(&self.ort);
        command.arg("train").arg(self.file(model, "onnx")).arg("--data").arg(self.file(model, "npz"));
        command.args(["--batch", &BATCH.to_string(), "--epochs", &epochs.to_string()]);
        command
            .args(["--threads", &threads.to_string(), "--json"])
            .args(model.arguments)
            .args(self.arguments);
        command
    }
}

/// Parses the JSON object in the last line that a process printed.
fn read(text: &str) -> Result<TrainReport> {
    let line = text.lines().rfind(|line| !line.trim().is_empty()).context("nothing was reported")?;
    serde_json::from_str(line).context("cannot read a report of a training")
}

type Results<'a> = [(&'a Model, usize, Vec<TrainRow>)];

fn print(all: &Results<'_>, style: Style) -> Result<()> {
    if style == Style::Json {
        let models = all.iter().map(|(model, threads, rows)| {
            let rows: Vec<Json> =
                SETTINGS.iter().zip(rows).map(|(setting, row)| to_json(*setting, row)).collect();
            json!({"model": model.name, "threads": threads, "settings": rows})
        });
        println!("{}", serde_json::to_string_pretty(&models.collect::<Vec<_>>())?);
        return Ok(());
    }
    let mut table = table::new(&[
        "model",
        "threads",
        "runtime",
        "ms",
        "to PyTorch",
        "to ONNX Runtime",
        "resident MiB",
        "to PyTorch",
        "to ONNX Runtime",
        "activations MiB",
        "predicted",
        "of level 0",
        "extra time",
        "predicted",
    ]);
    for (model, threads, rows) in all {
        for (setting, row) in SETTINGS.iter().zip(rows) {
            table.add_row(cells(model, *threads, *setting, row, rows));
        }
    }
    println!("{table}");
    Ok(())
}

/// Finds a setting's row among its model's rows.
fn of(rows: &[TrainRow], setting: Setting) -> Option<&TrainRow> {
    SETTINGS.iter().position(|other| *other == setting).and_then(|index| rows.get(index))
}

fn cells(model: &Model, threads: usize, setting: Setting, row: &TrainRow, rows: &[TrainRow]) -> Vec<String> {
    let mut cells = vec![model.name.to_owned(), threads.to_string(), setting.describe()];
    if let Some(problem) = &row.problem {
        cells.push(problem.chars().take(SHOWN_OF_A_PROBLEM).collect());
        return cells;
    }
    let others = [Setting::Other("torch", 0), Setting::Other("ortmodule", 0)].map(|other| of(rows, other));
    let ratio =
        |one: Option<f64>, other: Option<f64>| decimals(one.zip(other).map(|(one, other)| one / other));
    let bytes = |row: &TrainRow| row.growth.map(|bytes| bytes as f64);
    cells.push(milliseconds(row.median_ms));
    cells.extend(others.map(|other| ratio(row.median_ms, other.and_then(|other| other.median_ms))));
    cells.push(mebibytes(row.growth));
    cells.extend(others.map(|other| ratio(bytes(row), other.and_then(bytes))));
    let whole = of(rows, Setting::Level(0));
    let activations = |row: &TrainRow| row.activations().map(|bytes| bytes as f64);
    cells.extend([mebibytes(row.activations()), mebibytes(row.predicted())]);
    // The columns relative to level 0 are about our memory optimizer.
    if !matches!(setting, Setting::Other(..)) {
        cells.push(ratio(activations(row), whole.and_then(activations)));
        cells.push(ratio(row.median_ms, whole.and_then(|whole| whole.median_ms)));
        cells.push(decimals(row.last.as_ref().map(|report| 1.0 + extra_time(report))));
    }
    cells
}

fn extra_time(report: &TrainReport) -> f64 {
    report.recompute.as_ref().map_or(0.0, |recompute| recompute.extra_time)
}

fn to_json(setting: Setting, row: &TrainRow) -> Json {
    let mut fields = BTreeMap::from([("setting", json!(setting.describe()))]);
    fields.insert("median_ms", json!(row.median_ms));
    fields.insert("min_ms", json!(row.min_ms));
    fields.insert("resident", json!(row.growth));
    fields.insert("activations", json!(row.activations()));
    fields.insert("activations_predicted", json!(row.predicted()));
    fields.insert("extra_time_predicted", json!(row.last.as_ref().map(extra_time)));
    fields.insert("error", json!(row.problem));
    json!(fields)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_programs_reports_are_read() {
        let ours = read(
            "{\"step_median_ms\": 2.5, \"step_min_ms\": 2.0, \"baseline_rss\": 10, \"peak_rss\": 30, \
             \"memory_predicted\": {\"activations\": 7, \"total\": 9}, \"recompute\": {\"extra_time\": 0.25}}\n",
        );
        let mut row = TrainRow::default();
        row.add(ours);
        row.add(read("{\"median_ms\": 3.0, \"min_ms\": 1.0, \"baseline_rss\": 10, \"peak_rss\": 50}"));
        assert_eq!((row.median_ms, row.min_ms, row.growth), (Some(2.5), Some(1.0), Some(40)));
        row.add(read("{\"runtime\": \"torch\", \"error\": \"no torch\"}"));
        assert_eq!(row.problem.as_deref(), Some("no torch"));
    }

    #[test]
    fn an_unknown_model_is_an_error_that_names_the_others() {
        let error = chosen(&["vgg".to_owned()]).err().unwrap();
        assert!(error.to_string().contains("bert, gpt"), "{error}");
    }
}
