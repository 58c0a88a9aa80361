//! `cargo xtask compare`: our outputs against ONNX Runtime's, on every model, at 1 and 2 threads.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use crate::models;
use crate::python::Python;
use crate::summary::Summary;
use crate::table;
use crate::workspace::{Workspace, describe, prepare_with};

/// The largest allowed |ours - reference| as a part of the largest |reference| of an output.
const TOLERANCE: f64 = 1e-3;
/// Each case runs once with each of these; all runs must give the same bits.
const THREADS: [usize; 2] = [1, 2];

/// Which cases to run.
#[derive(clap::Args, Default)]
pub(crate) struct Options {
    /// Only cases or models with this name.
    #[arg(long = "only", value_name = "NAME")]
    pub(crate) only: Vec<String>,
}

/// A model with the shapes and values of its inputs; the fields for those are the scripts' business.
#[derive(Deserialize)]
pub(crate) struct Case {
    /// The case's name, also that of its folder.
    pub(crate) name: String,
    /// The model's name.
    pub(crate) model: String,
    /// Whether `bench` times it.
    #[serde(default)]
    pub(crate) bench: bool,
    /// How far the process may grow, as a multiple of weights and planned activations; no bound where absent.
    pub(crate) most_growth: Option<f64>,
}

#[derive(Deserialize)]
struct Table {
    cases: Vec<Case>,
}

/// Where a set of cases is.
pub(crate) struct Cases {
    /// The file that lists them.
    pub(crate) table: PathBuf,
    /// The folder of their models.
    pub(crate) models: PathBuf,
    /// The folder with one folder per case, for inputs and reference outputs.
    pub(crate) folder: PathBuf,
}

impl Cases {
    /// The cases that are compared.
    pub(crate) fn standard(workspace: &Workspace) -> Self {
        Self {
            table: workspace.own("data/cases.json"),
            models: models::folder(workspace),
            folder: workspace.target.join("compare"),
        }
    }

    /// The file of a case's model.
    pub(crate) fn model(&self, case: &Case) -> PathBuf {
        self.models.join(format!("{}.onnx", case.model))
    }
}

#[derive(Serialize)]
struct Measurement<'a> {
    case: &'a str,
    reference: PathBuf,
    ours: Vec<PathBuf>,
}

#[derive(Deserialize)]
struct CaseDifference {
    case: String,
    outputs: Vec<OutputDifference>,
}

#[derive(Deserialize)]
struct OutputDifference {
    name: String,
    absolute: Option<f64>,
    relative: Option<f64>,
    same_bits: Option<bool>,
    problem: Option<String>,
}

impl OutputDifference {
    /// How bad this output is: a problem is worse than any difference.
    fn badness(&self) -> f64 {
        self.relative.unwrap_or(f64::INFINITY)
    }

    fn fails(&self) -> bool {
        // Not `> TOLERANCE`: a NaN must fail.
        let close = self.badness() <= TOLERANCE;
        !close || self.same_bits != Some(true)
    }
}

/// The cases that the names choose, by case or by model; all where there are no names.
pub(crate) fn chosen_cases(cases: &Cases, names: &[String]) -> Result<Vec<Case>> {
    let path = &cases.table;
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let all: Table =
        serde_json::from_str(&text).with_context(|| format!("cannot read {}", path.display()))?;
    let known = |name: &String| all.cases.iter().any(|case| case.name == *name || case.model == *name);
    if let Some(unknown) = names.iter().find(|name| !known(name)) {
        bail!("no case and no model is named `{unknown}` in {}", path.display());
    }
    let chosen = |case: &Case| names.is_empty() || names.contains(&case.name) || names.contains(&case.model);
    Ok(all.cases.into_iter().filter(chosen).collect())
}

/// Makes the models of standard cases, and inputs and reference outputs.
pub(crate) fn prepare(workspace: &Workspace, python: &Python, cases: &Cases, chosen: &[Case]) -> Result<()> {
    let names: BTreeSet<String> = chosen.iter().map(|case| case.model.clone()).collect();
    models::make(workspace, python, &names.into_iter().collect::<Vec<_>>())?;
    make_inputs(python, cases, chosen)
}

/// Makes inputs and reference outputs of cases whose models are there.
pub(crate) fn make_inputs(python: &Python, cases: &Cases, chosen: &[Case]) -> Result<()> {
    let mut command = python.script("reference.py");
    command.arg(&cases.table).arg(&cases.models).arg(&cases.folder);
    prepare_with(command.args(chosen.iter().map(|case| &case.name)))
}

/// Runs the cases, prints the table; an error where one is out of tolerance.
pub(crate) fn run(workspace: &Workspace, options: &Options) -> Result<Summary> {
    let set = Cases::standard(workspace);
    let cases = chosen_cases(&set, &options.only)?;
    let python = Python::open(workspace)?;
    prepare(workspace, &python, &set, &cases)?;
    let ort = workspace.build_ort()?;

    let mut broken = Vec::new();
    let mut measurements = Vec::new();
    for case in &cases {
        match run_ours(&ort, &set.model(case), &set.folder.join(&case.name)) {
            Ok(ours) => {
                let reference = set.folder.join(&case.name).join("reference.npz");
                measurements.push(Measurement { case: &case.name, reference, ours });
            }
            Err(error) => broken.push((case.name.as_str(), format!("{error:#}"))),
        }
        eprintln!("ran {}", case.name);
    }
    let differences = measure(&python, &measurements)?;
    let failed = print_table(&differences, &broken);
    let summary = Summary { passed: cases.len() - failed, failed, skipped: 0 };
    if failed > 0 {
        bail!("{failed} of {} cases differ from ONNX Runtime", cases.len());
    }
    println!("{summary}");
    Ok(summary)
}

/// Runs our binary once per number of threads; returns the files with its outputs.
fn run_ours(ort: &Path, model: &Path, folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for threads in THREADS {
        let file = folder.join(format!("ours_{threads}.npz"));
        let mut command = Command::new(ort);
        command.arg("run").arg(model).arg("--inputs").arg(folder.join("inputs.npz"));
        command.arg("--outputs").arg(&file).args(["--threads", &threads.to_string(), "-q"]);
        let output = command.output().with_context(|| format!("cannot run {}", describe(&command)))?;
        if !output.status.success() {
            let errors = String::from_utf8_lossy(&output.stderr);
            bail!("{}: {}", output.status, errors.trim().lines().last().unwrap_or("no message"));
        }
        files.push(file);
    }
    Ok(files)
}

fn measure(python: &Python, measurements: &[Measurement<'_>]) -> Result<Vec<CaseDifference>> {
    let mut child = python
        .script("difference.py")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot run difference.py")?;
    if let Some(mut input) = child.stdin.take() {
        input.write_all(&serde_json::to_vec(measurements)?).context("cannot write to difference.py")?;
    }
    let output = child.wait_with_output().context("cannot read from difference.py")?;
    if !output.status.success() {
        bail!("difference.py failed ({})", output.status);
    }
    serde_json::from_slice(&output.stdout).context("cannot read what difference.py printed")
}

/// Prints a row per case with its worst output; returns how many cases fail.
fn print_table(differences: &[CaseDifference], broken: &[(&str, String)]) -> usize {
    let mut table = table::new(&[
        "case",
        "outputs",
        "worst output",
        "absolute",
        "relative",
        "same bits at 1 and 2",
        "verdict",
    ]);
    let mut failed = broken.len();
    for case in differences {
        let fails = case.outputs.is_empty() || case.outputs.iter().any(OutputDifference::fails);
        failed += usize::from(fails);
        let worst = case.outputs.iter().max_by(|a, b| a.badness().total_cmp(&b.badness()));
        let problem = case.outputs.iter().find_map(|output| output.problem.clone());
        let number = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.2e}"));
        let same_bits = case.outputs.iter().all(|output| output.same_bits == Some(true));
        table.add_row([
            case.case.clone(),
            case.outputs.len().to_string(),
            worst.map_or("-".to_owned(), |output| output.name.clone()),
            number(worst.and_then(|output| output.absolute)),
            number(worst.and_then(|output| output.relative)),
            if same_bits { "yes" } else { "no" }.to_owned(),
            problem.unwrap_or_else(|| if fails { "FAIL" } else { "ok" }.to_owned()),
        ]);
    }
    for (case, why) in broken {
        table.add_row([*case, "-", "-", "-", "-", "-", why.as_str()]);
    }
    println!("{table}");
    failed
}

#[cfg(test)]
mod tests {
    use super::*;

    fn output(relative: Option<f64>, same_bits: Option<bool>) -> OutputDifference {
        OutputDifference { name: "y".to_owned(), absolute: relative, relative, same_bits, problem: None }
    }

    #[test]
    fn an_output_fails_when_far_different_between_threads_or_unknown() {
        let table = [
            (Some(0.0), Some(true), false),
            (Some(1e-3), Some(true), false),
            (Some(1.1e-3), Some(true), true),
            (Some(0.0), Some(false), true),
            (Some(f64::NAN), Some(true), true),
            (None, None, true),
        ];
        for (relative, same_bits, fails) in table {
            assert_eq!(output(relative, same_bits).fails(), fails, "{relative:?} {same_bits:?}");
        }
    }
}
