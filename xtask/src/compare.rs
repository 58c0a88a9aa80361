//! `cargo xtask compare`: differential test of every model against ONNX Runtime.
//!
//! Three comparisons: our outputs, at 1 and 2 threads, against ONNX Runtime's; ours with rewrites
//! against ours without; and ONNX Runtime's outputs of the models that `ort optimize` writes
//! against its outputs of the originals.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use crate::cuda_driver::cuda_driver;
use crate::models;
use crate::python::Python;
use crate::summary::Summary;
use crate::table;
use crate::workspace::{Workspace, describe, prepare_with};

/// The maximum allowed |ours - reference|, relative to the maximum |reference| of an output.
const TOLERANCE: f64 = 1e-3;
/// The same bound for our outputs with rewrites against ours without.
const REWRITE_TOLERANCE: f64 = 1e-4;
/// Thread counts: each case runs once with each, and all runs must return the same bits.
const THREADS: [usize; 2] = [1, 2];

/// Which cases to run.
#[derive(clap::Args, Default)]
pub(crate) struct Chosen {
    /// Run only cases or models with this name.
    #[arg(long = "only", value_name = "NAME")]
    pub(crate) only: Vec<String>,
}

/// What to run.
#[derive(clap::Args, Default)]
pub(crate) struct CompareOptions {
    #[command(flatten)]
    pub(crate) cases: Chosen,
    /// Run on these execution providers, the first preferred, instead of the CPU; the binary is
    /// built with them.
    #[arg(long = "ep", value_name = "NAME")]
    pub(crate) providers: Vec<String>,
    /// Set an option of a provider.
    #[arg(long = "ep-option", value_name = "NAME.OPTION=VALUE")]
    pub(crate) provider_options: Vec<String>,
    /// Run one case of each model.
    #[arg(long)]
    pub(crate) quick: bool,
    /// Run only cases that a GPU emulator runs in seconds.
    #[arg(long)]
    pub(crate) emulated: bool,
}

/// A model with the shapes and values of its inputs. Only the scripts read the fields for those.
#[derive(Deserialize)]
pub(crate) struct Case {
    /// The case's name, also that of its folder.
    pub(crate) name: String,
    /// The model's name.
    pub(crate) model: String,
    /// Whether `bench` times it.
    #[serde(default)]
    pub(crate) bench: bool,
    /// Whether a GPU emulator runs it in seconds: some models of several kinds.
    #[serde(default)]
    pub(crate) emulated: bool,
    /// Whether integers of the model need 64 bits, which devices of wgpu do not have.
    #[serde(default)]
    pub(crate) wide_integers: bool,
    /// How far the process may grow, as a multiple of weights plus planned activations; unbounded
    /// if absent.
    pub(crate) most_growth: Option<f64>,
}

#[derive(Deserialize)]
struct Table {
    cases: Vec<Case>,
}

/// The paths of a set of cases.
pub(crate) struct Cases {
    /// The file that lists them.
    pub(crate) table: PathBuf,
    /// The folder of their models.
    pub(crate) models: PathBuf,
    /// The folder with one folder for each case, which holds its inputs and reference outputs.
    pub(crate) folder: PathBuf,
}

impl Cases {
    /// The standard set of cases.
    pub(crate) fn standard(workspace: &Workspace) -> Self {
        Self {
            table: workspace.own("data/cases.json"),
            models: models::folder(workspace),
            folder: workspace.target.join("compare"),
        }
    }

    /// Returns the file of a case's model.
    pub(crate) fn model(&self, case: &Case) -> PathBuf {
        self.models.join(format!("{}.onnx", case.model))
    }
}

#[derive(Serialize)]
struct Measurement<'a> {
    case: &'a str,
    reference: PathBuf,
    ours: Vec<PathBuf>,
    disabled: PathBuf,
    optimized: Option<PathBuf>,
}

/// A model that `ort optimize` wrote, for a run in ONNX Runtime.
#[derive(Serialize)]
struct OptimizedRun {
    model: PathBuf,
    inputs: PathBuf,
    outputs: PathBuf,
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
    disabled: Option<f64>,
    optimized: Option<f64>,
    problem: Option<String>,
}

impl OutputDifference {
    /// The relative difference, by which outputs are ranked: an output without one ranks worst.
    fn badness(&self) -> f64 {
        self.relative.unwrap_or(f64::INFINITY)
    }

    fn fails(&self) -> bool {
        // Not `> TOLERANCE`, because a NaN must fail.
        let close = self.badness() <= TOLERANCE
            && self.disabled.is_some_and(|relative| relative <= REWRITE_TOLERANCE)
            // Only the first case of a model has this comparison.
            && self.optimized.is_none_or(|relative| relative <= TOLERANCE);
        // A missing comparison of bits fails as well.
        !close || self.same_bits != Some(true)
    }
}

/// Returns the cases that `names` select, by case or by model; all cases if `names` is empty.
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

/// Makes the models of standard cases, then their inputs and reference outputs.
pub(crate) fn prepare(workspace: &Workspace, python: &Python, cases: &Cases, chosen: &[Case]) -> Result<()> {
    let names: BTreeSet<String> = chosen.iter().map(|case| case.model.clone()).collect();
    models::make(workspace, python, &names.into_iter().collect::<Vec<_>>())?;
    make_inputs(python, cases, chosen)
}

/// Makes the inputs and reference outputs of cases whose models exist.
pub(crate) fn make_inputs(python: &Python, cases: &Cases, chosen: &[Case]) -> Result<()> {
    let mut command = python.script("reference.py");
    command.arg(&cases.table).arg(&cases.models).arg(&cases.folder);
    prepare_with(command.args(chosen.iter().map(|case| &case.name)))
}

impl CompareOptions {
    /// The suite's name in `cargo xtask test`.
    pub(crate) fn suite(&self) -> String {
        let device = self.providers.iter().find(|provider| *provider != "cpu");
        let device = device.map(|device| format!(", {device}")).unwrap_or_default();
        let is_last = self.provider_options.iter().any(|option| option.ends_with("prefer_nhwc=1"));
        format!("compare{device}{}", if is_last { ", channels last" } else { "" })
    }

    /// One case of each model on the provider wgpu, with the CPU as fallback.
    pub(crate) fn on_wgpu() -> CompareOptions {
        let providers = ["wgpu", "cpu"].map(str::to_owned).into();
        CompareOptions { providers, quick: true, ..CompareOptions::default() }
    }

    /// Some cases on the provider cuda, with the CPU as fallback. Without a GPU, the kernels run on
    /// an emulator.
    pub(crate) fn on_cuda() -> CompareOptions {
        let providers = ["cuda", "cpu"].map(str::to_owned).into();
        CompareOptions { providers, emulated: true, ..CompareOptions::default() }
    }

    /// The image models among the CUDA cases, in NHWC.
    pub(crate) fn on_cuda_with_channels_last() -> CompareOptions {
        let only = ["mobilenet_v2", "ocr_cls", "ddddocr"].map(str::to_owned).into();
        let provider_options = vec!["cuda.prefer_nhwc=1".to_owned()];
        CompareOptions { cases: Chosen { only }, provider_options, ..CompareOptions::on_cuda() }
    }
}

/// Returns the cases that the options select.
pub(crate) fn cases_of(workspace: &Workspace, options: &CompareOptions) -> Result<Vec<Case>> {
    let mut cases = chosen_cases(&Cases::standard(workspace), &options.cases.only)?;
    cases.retain(|case| case.emulated || !options.emulated);
    let is_on_wgpu = options.providers.iter().any(|name| name == "wgpu");
    cases.retain(|case| !is_on_wgpu || !case.wide_integers);
    if options.quick {
        let mut models = BTreeSet::new();
        cases.retain(|case| models.insert(case.model.clone()));
    }
    Ok(cases)
}

/// Runs the cases and prints the table; an error if an output is out of tolerance.
pub(crate) fn run(workspace: &Workspace, options: &CompareOptions) -> Result<Summary> {
    let set = Cases::standard(workspace);
    let cases = cases_of(workspace, options)?;
    let python = Python::open(workspace)?;
    prepare(workspace, &python, &set, &cases)?;
    let ort = workspace.build_ort_with(&options.providers)?;
    let driver = match options.providers.iter().any(|name| name == "cuda") {
        true => cuda_driver(workspace)?,
        false => None,
    };
    let on = On {
        ort: &ort,
        providers: &options.providers,
        options: &options.provider_options,
        driver: driver.as_ref(),
    };
    if let Some(why) = options.providers.iter().find_map(|name| on.missing(name).transpose()).transpose()? {
        // An emulator that we built ourselves must work, so this is a failure, not a skip.
        if driver.is_some() {
            bail!("the emulator of the driver, which was built, shows no device: {why}");
        }
        let skipped = Summary::without(&options.suite(), cases.len(), &why);
        println!("{skipped}");
        return Ok(skipped);
    }

    let mut broken = Vec::new();
    let mut measurements = Vec::new();
    let mut models = BTreeSet::new();
    for case in &cases {
        let is_first = models.insert(case.model.as_str());
        match run_case(on, &python, &set, case, is_first) {
            Ok(measurement) => measurements.push(measurement),
            // One broken case must not hide the verdicts on the others.
            Err(error) => broken.push((case.name.as_str(), format!("{error:#}"))),
        }
        eprintln!("ran {}", case.name);
    }
    let differences: Vec<CaseDifference> = ask(&python, "difference.py", &measurements)?;
    let failed = print_table(&differences, &broken);
    let summary = Summary { passed: cases.len() - failed, failed, ..Summary::default() };
    if failed > 0 {
        bail!("{failed} of {} cases differ from ONNX Runtime", cases.len());
    }
    println!("{summary}");
    Ok(summary)
}

/// The output of `ort providers --json`.
#[derive(Deserialize)]
struct Providers {
    providers: Vec<FoundProvider>,
}

#[derive(Deserialize)]
struct FoundProvider {
    provider: String,
    error: Option<String>,
}

/// How a case runs: the binary and its execution providers; the CPU if there are none.
#[derive(Clone, Copy)]
struct On<'a> {
    ort: &'a Path,
    providers: &'a [String],
    options: &'a [String],
    /// The environment variable that names a driver, and its value, if one is needed.
    driver: Option<&'a (&'static str, PathBuf)>,
}

impl On<'_> {
    fn command(&self) -> Command {
        let mut command = Command::new(self.ort);
        command.envs(self.driver.map(|(variable, library)| (variable, library)));
        command
    }

    /// Returns why an execution provider has no device here, or `None` if it has one.
    fn missing(&self, provider: &str) -> Result<Option<String>> {
        let output = self.command().args(["providers", "--json"]).output();
        let output = output.with_context(|| format!("cannot run {}", self.ort.display()))?;
        let list: Providers =
            serde_json::from_slice(&output.stdout).context("cannot read the list of providers")?;
        let mut own = list.providers.into_iter().filter(|found| found.provider == provider);
        match own.next() {
            None => bail!("the binary has no provider {provider}"),
            Some(found) => Ok(found.error),
        }
    }
}

/// Runs our binary once per thread count, and once without rewrites. The first case of each model
/// also runs the optimized model in ONNX Runtime.
fn run_case<'a>(
    on: On<'_>,
    python: &Python,
    set: &Cases,
    case: &'a Case,
    is_first: bool,
) -> Result<Measurement<'a>> {
    let (model, folder) = (set.model(case), set.folder.join(&case.name));
    let run = |name: &str, options: &[&str]| {
        let file = folder.join(name);
        let mut command = on.command();
        command.arg("run").arg(&model).arg("--inputs").arg(folder.join("inputs.npz"));
        command.arg("--outputs").arg(&file).arg("-q").args(options);
        command.args(on.providers.iter().flat_map(|name| ["--ep", name]));
        command.args(on.options.iter().flat_map(|option| ["--ep-option", option]));
        if on.providers.iter().any(|name| name == "cuda") {
            // TF32 would exceed the tolerances, which are for float32.
            command.args(["--ep-option", "cuda.use_tf32=0"]);
        }
        output_of(&mut command).map(|_| file)
    };
    let ours = THREADS
        .iter()
        .map(|threads| run(&format!("ours_{threads}.npz"), &["--threads", &threads.to_string()]));
    Ok(Measurement {
        case: &case.name,
        reference: folder.join("reference.npz"),
        ours: ours.collect::<Result<_>>()?,
        disabled: run("disabled.npz", &["--opt-level", "disabled"])?,
        // With a provider, `ort optimize` would write the same model: only the CPU's runs check it.
        optimized: (is_first && on.providers.is_empty())
            .then(|| run_optimized(on.ort, python, &model, &folder))
            .transpose()?,
    })
}

/// Runs the model that `ort optimize` writes in ONNX Runtime; returns the file with the outputs.
fn run_optimized(ort: &Path, python: &Python, model: &Path, folder: &Path) -> Result<PathBuf> {
    let scratch = tempfile::tempdir_in(folder)?;
    let run = OptimizedRun {
        model: scratch.path().join("optimized.onnx"),
        inputs: folder.join("inputs.npz"),
        outputs: folder.join("optimized.npz"),
    };
    output_of(Command::new(ort).arg("optimize").arg(model).arg(&run.model).arg("--external-data"))?;
    let problems: Vec<Option<String>> = ask(python, "run_optimized.py", &[&run])?;
    match problems.into_iter().flatten().next() {
        Some(problem) => bail!("the optimized model in ONNX Runtime: {problem}"),
        None => Ok(run.outputs),
    }
}

/// Runs a command; the last line that it prints on standard error becomes the error.
fn output_of(command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("cannot run {}", describe(command)))?;
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr);
        bail!("{}: {}", output.status, errors.trim().lines().last().unwrap_or("no message"));
    }
    Ok(())
}

/// Sends JSON to a script's standard input and parses JSON from its output.
fn ask<T: serde::de::DeserializeOwned>(python: &Python, script: &str, given: &[impl Serialize]) -> Result<T> {
    let mut command = python.script(script);
    let spawned = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
    let mut child = spawned.with_context(|| format!("cannot run {script}"))?;
    // The scripts read all of their input before they print, so this write cannot deadlock. The
    // end of the scope closes the pipe, which ends their reading.
    if let Some(mut input) = child.stdin.take() {
        input.write_all(&serde_json::to_vec(given)?).with_context(|| format!("cannot write to {script}"))?;
    }
    let output = child.wait_with_output().with_context(|| format!("cannot read from {script}"))?;
    if !output.status.success() {
        bail!("{script} failed ({})", output.status);
    }
    serde_json::from_slice(&output.stdout).with_context(|| format!("cannot read what {script} printed"))
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
        "to no rewrites",
        "optimized in ONNX Runtime",
        "verdict",
    ]);
    let mut failed = broken.len();
    for case in differences {
        // A case without outputs compared nothing.
        let fails = case.outputs.is_empty() || case.outputs.iter().any(OutputDifference::fails);
        failed += usize::from(fails);
        let worst = case.outputs.iter().max_by(|a, b| a.badness().total_cmp(&b.badness()));
        let problem = case.outputs.iter().find_map(|output| output.problem.clone());
        let number = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.2e}"));
        let most = |of: fn(&OutputDifference) -> Option<f64>| {
            number(case.outputs.iter().filter_map(of).max_by(f64::total_cmp))
        };
        let same_bits = case.outputs.iter().all(|output| output.same_bits == Some(true));
        table.add_row([
            case.case.clone(),
            case.outputs.len().to_string(),
            worst.map_or("-".to_owned(), |output| output.name.clone()),
            number(worst.and_then(|output| output.absolute)),
            number(worst.and_then(|output| output.relative)),
            if same_bits { "yes" } else { "no" }.to_owned(),
            most(|output| output.disabled),
            most(|output| output.optimized),
            problem.unwrap_or_else(|| if fails { "FAIL" } else { "ok" }.to_owned()),
        ]);
    }
    for (case, why) in broken {
        table.add_row([*case, "-", "-", "-", "-", "-", "-", "-", why.as_str()]);
    }
    println!("{table}");
    failed
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Relative difference, same bits, to no rewrites, optimized in ONNX Runtime; whether it fails.
    type Row = (Option<f64>, Option<bool>, Option<f64>, Option<f64>, bool);

    #[test]
    fn an_output_fails_when_far_different_between_threads_or_unknown() {
        let table: [Row; 10] = [
            (Some(0.0), Some(true), Some(0.0), None, false),
            (Some(1e-3), Some(true), Some(1e-4), Some(1e-3), false),
            (Some(1.1e-3), Some(true), Some(0.0), None, true),
            (Some(0.0), Some(false), Some(0.0), None, true),
            (Some(f64::NAN), Some(true), Some(0.0), None, true),
            (None, None, None, None, true),
            (Some(0.0), Some(true), Some(1.1e-4), None, true),
            (Some(0.0), Some(true), None, None, true),
            (Some(0.0), Some(true), Some(0.0), Some(1.1e-3), true),
            (Some(0.0), Some(true), Some(0.0), Some(f64::NAN), true),
        ];
        for (relative, same_bits, disabled, optimized, fails) in table {
            let output = OutputDifference {
                name: "y".to_owned(),
                absolute: relative,
                relative,
                same_bits,
                disabled,
                optimized,
                problem: None,
            };
            assert_eq!(output.fails(), fails, "{relative:?} {same_bits:?} {disabled:?} {optimized:?}");
        }
    }
}
