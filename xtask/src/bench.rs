//! `cargo xtask bench`: ours and ONNX Runtime in turn, in one run, so that a noisy machine disturbs both alike.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::compare::{Case, chosen_cases, prepare};
use crate::models;
use crate::python::Python;
use crate::table;
use crate::workspace::{Workspace, capture};

/// What to time, and for how long.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Only cases or models with this name; without it, the cases of the usual selection.
    #[arg(long = "only", value_name = "NAME")]
    only: Vec<String>,
    /// Seconds of each timing.
    #[arg(long, default_value_t = 3.0)]
    seconds: f64,
    /// Rounds of ours and then ONNX Runtime; the medians of all rounds are compared.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Threads inside one operator.
    #[arg(long = "threads", value_name = "N", default_values_t = [1, 2])]
    threads: Vec<usize>,
    /// Further arguments for our side, such as `--arg=--precision=bf16`.
    #[arg(long = "arg", value_name = "ARG", allow_hyphen_values = true)]
    arguments: Vec<String>,
}

/// The fields of `ort bench --json` and of time_reference.py that the tables show. Times in milliseconds, memory
/// in bytes; null where the platform cannot tell.
#[derive(Clone, Default, Deserialize)]
pub(crate) struct Report {
    pub(crate) load_ms: Option<f64>,
    pub(crate) first_ms: Option<f64>,
    pub(crate) median_ms: f64,
    pub(crate) baseline_rss: Option<u64>,
    pub(crate) peak_rss: Option<u64>,
    pub(crate) planned_peak: Option<u64>,
    pub(crate) arena_peak: Option<u64>,
    pub(crate) weights: Option<u64>,
    pub(crate) weights_mapped: Option<u64>,
}

impl Report {
    /// How far the peak went over what the process had before the model, in bytes.
    pub(crate) fn growth(&self) -> Option<u64> {
        self.peak_rss?.checked_sub(self.baseline_rss?)
    }

    /// What weights and activations account for, in bytes.
    pub(crate) fn need(&self) -> Option<u64> {
        self.weights?.checked_add(self.planned_peak.or(self.arena_peak)?)
    }
}

/// How long ours took of ONNX Runtime's time.
struct Ratio {
    threads: usize,
    is_skeleton: bool,
    value: f64,
}

/// All rounds of one side.
pub(crate) struct Side {
    pub(crate) median_ms: f64,
    pub(crate) last: Report,
}

/// One model on one set of inputs, as both sides are asked to time it.
pub(crate) struct Timing {
    pub(crate) model: PathBuf,
    pub(crate) inputs: PathBuf,
    pub(crate) threads: usize,
    pub(crate) seconds: f64,
    /// How many rows of the inputs a run takes; all without it.
    pub(crate) rows: Option<usize>,
}

/// Times all cases and prints two tables: times and memory.
pub(crate) fn run(workspace: &Workspace, options: &Options) -> Result<()> {
    if options.rounds == 0 || options.seconds.is_nan() || options.seconds <= 0.0 {
        bail!("--rounds and --seconds must be over zero");
    }
    let mut cases = chosen_cases(workspace, &options.only)?;
    if options.only.is_empty() {
        cases.retain(|case| case.bench);
    }
    let python = Python::open(workspace)?;
    let folder = prepare(workspace, &python, &cases)?;
    let ort = workspace.build_ort()?;

    let mut times = table::new(&[
        "case",
        "threads",
        "ours ms",
        "ORT ms",
        "ratio",
        "load",
        "ORT load",
        "first",
        "ORT first",
    ]);
    let mut memory = table::new(&[
        "case",
        "threads",
        "growth MiB",
        "ORT growth",
        "weights",
        "mapped",
        "planned",
        "arena",
        "growth/need",
    ]);
    let skeletons = models::skeletons(workspace)?;
    let mut ratios: Vec<Ratio> = Vec::new();
    for case in &cases {
        for &threads in &options.threads {
            let timing = Timing {
                model: models::folder(workspace).join(format!("{}.onnx", case.model)),
                inputs: folder.join(&case.name).join("inputs.npz"),
                threads,
                seconds: options.seconds,
                rows: None,
            };
            let pair = time_pair(
                options.rounds,
                || timing.ours(&ort, &options.arguments),
                || timing.reference(&python),
            );
            let (ours, reference) = match pair {
                Ok(pair) => pair,
                Err(error) => {
                    times.add_row([case.name.clone(), threads.to_string(), format!("{error:#}")]);
                    continue;
                }
            };
            let is_skeleton = skeletons.contains(&case.model);
            ratios.push(Ratio { threads, is_skeleton, value: ours.median_ms / reference.median_ms });
            times.add_row(time_row(case, threads, &ours, &reference));
            memory.add_row(memory_row(case, threads, &ours, &reference));
            eprintln!("timed {} with {threads} threads", case.name);
        }
    }
    println!("{times}\n\n{memory}\n");
    for &threads in &options.threads {
        for (group, is_in_group) in [("skeletons", [true].as_slice()), ("all", &[true, false])] {
            let of = ratios
                .iter()
                .filter(|ratio| ratio.threads == threads && is_in_group.contains(&ratio.is_skeleton));
            let of: Vec<f64> = of.map(|ratio| ratio.value).collect();
            if let Some(mean) = geometric_mean(&of) {
                println!(
                    "{threads} threads, {group}: geometric mean of ours / ORT {mean:.3} over {} cases",
                    of.len()
                );
            }
        }
    }
    Ok(())
}

/// Alternates the two sides, the one that begins changing each round.
pub(crate) fn time_pair(
    rounds: usize,
    ours: impl Fn() -> Result<Report>,
    reference: impl Fn() -> Result<Report>,
) -> Result<(Side, Side)> {
    let (mut left, mut right) = (Vec::new(), Vec::new());
    for round in 0..rounds {
        if round % 2 == 0 {
            left.push(ours()?);
            right.push(reference()?);
        } else {
            right.push(reference()?);
            left.push(ours()?);
        }
    }
    Ok((side(left)?, side(right)?))
}

fn side(reports: Vec<Report>) -> Result<Side> {
    let mut medians: Vec<f64> = reports.iter().map(|report| report.median_ms).collect();
    let median_ms = median(&mut medians).context("no rounds")?;
    let last = reports.last().context("no rounds")?.clone();
    Ok(Side { median_ms, last })
}

impl Timing {
    /// What our binary tells; it is given further `arguments`.
    pub(crate) fn ours(&self, ort: &Path, arguments: &[String]) -> Result<Report> {
        let mut command = Command::new(ort);
        command.arg("bench").arg(&self.model).arg("--json").arg("--inputs").arg(&self.inputs);
        command.args(["--threads", &self.threads.to_string(), "--seconds", &self.seconds.to_string()]);
        if let Some(rows) = self.rows {
            command.args(["--rows", &rows.to_string()]);
        }
        parse(&capture(command.args(arguments))?)
    }

    /// What ONNX Runtime needs.
    pub(crate) fn reference(&self, python: &Python) -> Result<Report> {
        let mut command = python.script("time_reference.py");
        command.arg(&self.model).arg(&self.inputs);
        command.arg(self.threads.to_string()).arg(self.seconds.to_string());
        parse(&capture(command.args(self.rows.map(|rows| rows.to_string())))?)
    }
}

/// Reads the one object that either side prints.
pub(crate) fn parse(text: &str) -> Result<Report> {
    serde_json::from_str(text.trim()).context("cannot read a timing report")
}

fn time_row(case: &Case, threads: usize, ours: &Side, reference: &Side) -> Vec<String> {
    let ms = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.1}"));
    vec![
        case.name.clone(),
        threads.to_string(),
        format!("{:.3}", ours.median_ms),
        format!("{:.3}", reference.median_ms),
        format!("{:.2}", ours.median_ms / reference.median_ms),
        ms(ours.last.load_ms),
        ms(reference.last.load_ms),
        ms(ours.last.first_ms),
        ms(reference.last.first_ms),
    ]
}

fn memory_row(case: &Case, threads: usize, ours: &Side, reference: &Side) -> Vec<String> {
    let over_need = ours.last.growth().zip(ours.last.need()).filter(|(_, need)| *need > 0);
    vec![
        case.name.clone(),
        threads.to_string(),
        mebibytes(ours.last.growth()),
        mebibytes(reference.last.growth()),
        mebibytes(ours.last.weights),
        mebibytes(ours.last.weights_mapped),
        mebibytes(ours.last.planned_peak),
        mebibytes(ours.last.arena_peak),
        over_need.map_or("-".to_owned(), |(growth, need)| format!("{:.2}", growth as f64 / need as f64)),
    ]
}

/// A number of bytes in MiB, or `-`.
pub(crate) fn mebibytes(bytes: Option<u64>) -> String {
    bytes.map_or("-".to_owned(), |bytes| format!("{:.1}", bytes as f64 / 1048576.0))
}

fn median(values: &mut [f64]) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    let upper = *values.get(middle)?;
    if values.len() % 2 == 1 {
        return Some(upper);
    }
    Some((*values.get(middle.checked_sub(1)?)? + upper) / 2.0)
}

fn geometric_mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty())
        .then(|| (values.iter().map(|value| value.ln()).sum::<f64>() / values.len() as f64).exp())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_means() {
        assert_eq!(median(&mut []), None);
        assert_eq!(median(&mut [3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&mut [4.0, 1.0]), Some(2.5));
        assert_eq!(geometric_mean(&[]), None);
        assert!((geometric_mean(&[1.0, 4.0]).unwrap() - 2.0).abs() < 1e-12);
    }

    #[test]
    fn a_report_may_have_nulls_and_further_fields() {
        let report =
            parse(r#"{"model":"m","median_ms":1.5,"load_ms":null,"peak_rss":30,"baseline_rss":10}"#).unwrap();
        assert_eq!((report.median_ms, report.load_ms, report.growth()), (1.5, None, Some(20)));
    }
}
