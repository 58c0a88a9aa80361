//! `cargo xtask memory`: compares the planned memory of every case with the measured one.
//!
//! The predicted peak of the activations must not be below the measured peak, nor more than 1%
//! above it. If a case sets a bound, the process must not grow beyond that multiple of weights plus
//! plan.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::bench::{Report, mebibytes, parse};
use crate::compare::{self, Case, Cases, chosen_cases, prepare};
use crate::python::Python;
use crate::summary::Summary;
use crate::table;
use crate::workspace::{Workspace, capture};

/// How far the predicted peak may exceed the measured one, as a factor.
const MOST_OVER: f64 = 1.01;

/// Which cases to run, and whether to measure ONNX Runtime too.
#[derive(clap::Args, Default)]
pub(crate) struct MemoryOptions {
    #[command(flatten)]
    cases: compare::Chosen,
    /// Measure the memory of a run in ONNX Runtime, too.
    #[arg(long)]
    reference: bool,
}

/// Runs the cases and prints a table; an error if a prediction is wrong or a process grows too far.
pub(crate) fn run(workspace: &Workspace, options: &MemoryOptions) -> Result<Summary> {
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
        // All cases run before the command fails, so that the table is complete.
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

/// Returns the report of a few runs, which suffice because memory is counted, not timed.
fn report_of(ort: &Path, model: &Path, inputs: &Path) -> Result<Report> {
    let mut command = Command::new(ort);
    command.arg("bench").arg(model).args(["--json", "--threads", "1", "--seconds", "0.01", "--warmup", "1"]);
    parse(&capture(command.arg("--inputs").arg(inputs))?)
}

/// Returns the bytes that a run takes in ONNX Runtime without its arena.
fn reference_of(python: &Python, model: &Path, inputs: &Path) -> Result<u64> {
    let mut command = python.script("activations_reference.py");
    // A low mmap threshold makes glibc return large freed blocks to the system at once.
    command.arg(model).arg(inputs).env("MALLOC_MMAP_THRESHOLD_", "65536");
    capture(&mut command)?.trim().parse().context("the script prints bytes")
}

/// Returns what is wrong with the memory of a run, if anything.
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
        // Not `growth > most`, because a NaN must fail.
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
            wide_integers: false,
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
