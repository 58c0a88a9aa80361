//! `cargo xtask memory`: whether the plan told the truth, on every case.
//!
//! The predicted peak of the activations may not be below what was measured, nor much above it; and where a case says
//! how far, the process may not grow beyond what weights and plan account for.

use std::path::Path;
use std::process::Command;

use anyhow::{Result, bail};

use crate::bench::{Report, mebibytes, parse};
use crate::compare::{Case, Cases, Options, chosen_cases, prepare};
use crate::python::Python;
use crate::summary::Summary;
use crate::table;
use crate::workspace::{Workspace, capture};

/// How far over the measured peak the predicted one may be.
const MOST_OVER: f64 = 1.02;

/// Runs the cases and prints a table; an error where a prediction is wrong or a process grows too far.
pub(crate) fn run(workspace: &Workspace, options: &Options) -> Result<Summary> {
    let set = Cases::standard(workspace);
    let cases = chosen_cases(&set, &options.only)?;
    prepare(workspace, &Python::open(workspace)?, &set, &cases)?;
    let ort = workspace.build_ort()?;
    let mut rows = table::new(&[
        "case",
        "planned MiB",
        "measured",
        "planned/measured",
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
                rows.add_row(row(case, &report, verdict.as_ref().err()));
                verdict
            }
            Err(error) => {
                let why = format!("{error:#}");
                rows.add_row([&case.name, "-", "-", "-", "-", "-", "-", &why]);
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

fn row(case: &Case, report: &Report, problem: Option<&String>) -> Vec<String> {
    let ratio = report.planned_peak.zip(report.arena_peak);
    vec![
        case.name.clone(),
        mebibytes(report.planned_peak),
        mebibytes(report.arena_peak),
        ratio
            .map_or("-".to_owned(), |(planned, measured)| format!("{:.4}", planned as f64 / measured as f64)),
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
        let case =
            Case { name: "c".to_owned(), model: "m".to_owned(), bench: false, most_growth: Some(1.25) };
        let table = [
            ((Some(1000), Some(1000), 2500), true),
            ((Some(1020), Some(1000), 2500), true),
            ((Some(1021), Some(1000), 2500), false),
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
