//! `cargo xtask memory`: whether the plan told the truth, on every case.
//!
//! The predicted peak of the activations may not be below what was measured, nor much above it; and
//! where a case says how far, the process may not grow beyond what weights and plan account for.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::bench::{Report, mebibytes, parse};
use crate::compare::{self, Case, Cases, chosen_cases, prepare};
use crate::python::Python;
use crate::summary::Summary;
use crate::table;
use crate::workspace::{Workspace, capture};

/// How far over the measured peak the predicted one may be.
const MOST_OVER: f64 = 1.01;

/// Which cases to run, and beside what.
#[derive(clap::Args, Default)]
pub(crate) struct Options {
    #[command(flatten)]
    cases: compare::Chosen,
    /// Measure what a run takes in ONNX Runtime, too.
    #[arg(long)]
    reference: bool,
}

/// Runs the cases and prints a table; an error where a prediction is wrong or a process grows too
/// far.
pub(crate) fn run(workspace: &Workspace, options: &Options) -> Result<Summary> {
    let set = Cases::standard(workspace);
    let cases = chosen_cases(&set, &options.cases.only)?;
    let python = Python::open(workspace)?;
    prepare(workspace, &python, &set, &cases)?;
    let ort = workspace.build_ort()?;
    let mut rows = table::new(&[
        "case",
        "planned MiB",
        "measured",
        "planned/measured",
        "ONNX Runtime",
        "ours/ORT",
        "weights",
        "mapped",
        "growth",
        "verdict",
    ]);
    let mut failed = 0;
    for case in &cases {
        let inputs = set.folder.join(&case.name).join("inputs.npz");
        let verdict = match report_of(&ort, &set.model(case), &inputs) {
            Ok(report) => {
                let verdict = judge(case, &report);
                let reference = match options.reference {
                    true => Some(reference_of(&python, &set.model(case), &inputs)?),
                    false => None,
                };
                rows.add_row(row(case, &report, reference, verdict.as_ref().err()));
                verdict
            }
            Err(error) => {
                let why = format!("{error:#}");
                rows.add_row([&case.name, "-", "-", "-", "-", "-", "-", "-", "-", &why]);
                Err(why)
            }
        };
        failed += usize::from(verdict.is_err());
        eprintln!("ran {}", case.name);
    }
    println!("{rows}");
    if failed > 0 {
        bail!("the memory of {failed} of {} cases is not as planned", cases.len());
    }
    let summary = Summary { passed: cases.len(), ..Summary::default() };
    println!("{summary}");
    Ok(summary)
}

/// A few runs are enough: memory is counted, not timed.
fn report_of(ort: &Path, model: &Path, inputs: &Path) -> Result<Report> {
    let mut command = Command::new(ort);
    command.arg("bench").arg(model).args(["--json", "--threads", "1", "--seconds", "0.01", "--warmup", "1"]);
    parse(&capture(command.arg("--inputs").arg(inputs))?)
}

/// What a run takes in ONNX Runtime where nothing is held in advance, in bytes.
fn reference_of(python: &Python, model: &Path, inputs: &Path) -> Result<u64> {
    let mut command = python.script("activations_reference.py");
    command.arg(model).arg(inputs).env("MALLOC_MMAP_THRESHOLD_", "65536");
    capture(&mut command)?.trim().parse().context("the script prints bytes")
}

/// What is wrong with the memory of a run, if anything.
fn judge(case: &Case, report: &Report) -> Result<(), String> {
    if let (Some(planned), Some(measured)) = (report.planned_peak, report.arena_peak) {
        if planned < measured {
            return Err("plan is too low".to_owned());
        }
        if planned as f64 > measured as f64 * MOST_OVER {
            return Err("plan is too high".to_owned());
        }
    }
    if let (Some(most), Some(growth), Some(need)) = (case.most_growth, report.growth(), report.need()) {
        let growth = growth as f64 / need as f64;
        // Not `growth > most`: a NaN must fail.
        let fits = growth <= most;
        if !fits {
            return Err(format!("grows to {growth:.2} of weights and plan, over {most}"));
        }
    }
    Ok(())
}

fn row(case: &Case, report: &Report, reference: Option<u64>, problem: Option<&String>) -> Vec<String> {
    let ratio = |ours: Option<u64>, other: Option<u64>| {
        ours.zip(other).map_or("-".to_owned(), |(ours, other)| format!("{:.4}", ours as f64 / other as f64))
    };
    vec![
        case.name.clone(),
        mebibytes(report.planned_peak),
        mebibytes(report.arena_peak),
        ratio(report.planned_peak, report.arena_peak),
        mebibytes(reference),
        ratio(report.arena_peak, reference),
        mebibytes(report.weights),
        mebibytes(report.weights_mapped),
        mebibytes(report.growth()),
        problem.cloned().unwrap_or_else(|| "ok".to_owned()),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plans_must_be_right_and_growth_accounted_for() {
        let case = Case {
            name: "c".to_owned(),
            model: "m".to_owned(),
            bench: false,
            emulated: false,
            most_growth: Some(1.25),
        };
        let table = [
            ((Some(1000), Some(1000), 2500), true),
            ((Some(1010), Some(1000), 2500), true),
            ((Some(1011), Some(1000), 2500), false),
            ((Some(999), Some(1000), 2000), false),
            ((None, Some(1000), 2500), true),
            ((None, Some(1000), 2501), false),
            ((Some(1000), Some(1000), 2501), false),
        ];
        for ((planned, measured, growth), fine) in table {
            let report = Report {
                planned_peak: planned,
                arena_peak: measured,
                weights: Some(1000),
                baseline_rss: Some(500),
                peak_rss: Some(500 + growth),
                ..Report::default()
            };
            assert_eq!(judge(&case, &report).is_ok(), fine, "{planned:?} {measured:?} {growth}");
        }
    }
}
