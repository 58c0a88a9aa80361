//! `ort test`: runs ONNX test-case folders and compares what comes out with what should.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::Args;
use ort_runtime::tensor::{Tolerance, compare};
use ort_runtime::{ErrorKind, Model, Session, Value, onnx};
use walkdir::WalkDir;

/// Runs every folder that holds `model.onnx` and `test_data_set_*`, at any depth below DIR.
///
/// Prints a line per case, `PASS name`, `FAIL name: why` or `SKIP name: why`, and the sums.
#[derive(Args)]
pub(crate) struct TestArgs {
    /// Folders of test cases.
    #[arg(required = true, value_name = "DIR")]
    dirs: Vec<PathBuf>,
    /// Relative tolerance, instead of the case's own.
    #[arg(long)]
    rtol: Option<f64>,
    /// Absolute tolerance, instead of the case's own.
    #[arg(long)]
    atol: Option<f64>,
    /// Execution providers in order of preference.
    #[arg(long = "ep", value_name = "NAME")]
    providers: Vec<String>,
    /// Threads inside one operator.
    #[arg(long)]
    threads: Option<usize>,
}

enum Outcome {
    Pass,
    Fail(String),
    Skip(String),
}

pub(crate) fn run(args: &TestArgs) -> Result<ExitCode> {
    let mut counts = [0usize; 3];
    for case in find_cases(&args.dirs)? {
        let name =
            case.file_name().map_or_else(|| case.display().to_string(), |n| n.to_string_lossy().into());
        // A panic is a defect of the runtime, but must not end the other cases.
        let outcome = std::panic::catch_unwind(|| run_case(args, &case));
        match outcome.unwrap_or_else(|_| Ok(Outcome::Fail("panic".to_string()))) {
            Ok(Outcome::Pass) => {
                counts[0] += 1;
                println!("PASS {name}");
            }
            Ok(Outcome::Skip(why)) => {
                counts[2] += 1;
                println!("SKIP {name}: {why}");
            }
            Ok(Outcome::Fail(why)) => {
                counts[1] += 1;
                println!("FAIL {name}: {why}");
            }
            Err(problem) => {
                counts[1] += 1;
                println!("FAIL {name}: {problem:#}");
            }
        }
    }
    println!("{} passed, {} failed, {} skipped", counts[0], counts[1], counts[2]);
    Ok(if counts[1] == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn find_cases(dirs: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let mut cases = Vec::new();
    for dir in dirs {
        for entry in WalkDir::new(dir).sort_by_file_name() {
            let entry = entry.with_context(|| format!("reading {}", dir.display()))?;
            if entry.file_name() == "model.onnx"
                && let Some(folder) = entry.path().parent()
            {
                cases.push(folder.to_path_buf());
            }
        }
    }
    if cases.is_empty() {
        bail!("no folder below {} holds a model.onnx", dirs[0].display());
    }
    Ok(cases)
}

fn run_case(args: &TestArgs, case: &Path) -> Result<Outcome> {
    let sets = numbered(case, "test_data_set_")?;
    if sets.is_empty() {
        return Ok(Outcome::Skip("it has no test data".to_string()));
    }
    let tolerance = tolerance(args, case)?;
    let model = Model::load(case.join("model.onnx"))?;
    let mut builder = Session::builder(&model);
    for name in &args.providers {
        builder = builder.provider(name);
    }
    if let Some(threads) = args.threads {
        builder = builder.threads(threads);
    }
    let session = builder.build()?;
    for set in sets {
        if let Some(why) = run_set(&session, &set, tolerance)? {
            return Ok(Outcome::Fail(why));
        }
    }
    Ok(Outcome::Pass)
}

/// Runs one set of inputs; returns why its outputs are wrong.
fn run_set(session: &Session, set: &Path, tolerance: Tolerance) -> Result<Option<String>> {
    let specs = session.inputs();
    let mut inputs: Vec<(&str, Value)> = Vec::new();
    for (file, spec) in numbered(set, "input_")?.into_iter().zip(&specs) {
        let bytes = std::fs::read(&file).with_context(|| format!("reading {}", file.display()))?;
        let value = onnx::value_from_bytes(bytes.into(), &spec.ty);
        inputs.push((&spec.name, value.with_context(|| format!("reading {}", file.display()))?));
    }
    let outputs = session.run(&inputs)?;
    let types = session.model().graph();
    for (index, file) in numbered(set, "output_")?.into_iter().enumerate() {
        let bytes = std::fs::read(&file).with_context(|| format!("reading {}", file.display()))?;
        let (name, actual) = outputs.get(index).context("the model has fewer outputs than the case")?;
        let declared = types.outputs.get(index).map(|&id| types.value(id).ty.clone()).unwrap_or_default();
        let expected = onnx::value_from_bytes(bytes.into(), &declared)
            .with_context(|| format!("reading {}", file.display()))?;
        if let Err(problem) = compare(actual, &expected, tolerance) {
            debug_assert_eq!(problem.kind(), ErrorKind::Fail);
            return Ok(Some(format!("output '{name}': {}", problem.message())));
        }
    }
    Ok(None)
}

/// Entries of a folder called PREFIX and a number, in the order of the numbers.
fn numbered(folder: &Path, prefix: &str) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).with_context(|| format!("reading {}", folder.display()))? {
        let path = entry?.path();
        let stem = path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
        if let Some(number) = stem.strip_prefix(prefix).and_then(|rest| rest.parse::<u32>().ok()) {
            found.push((number, path));
        }
    }
    found.sort();
    Ok(found.into_iter().map(|(_, path)| path).collect())
}

/// The tolerance of a case: the command line's, else its file `tol` with `RTOL ATOL`, else the default.
fn tolerance(args: &TestArgs, case: &Path) -> Result<Tolerance> {
    let mut tolerance = Tolerance::default();
    let file = case.join("tol");
    if file.exists() {
        let text = std::fs::read_to_string(&file)?;
        let numbers: Vec<f64> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        let [relative, absolute] = numbers[..] else { bail!("{} is not `RTOL ATOL`", file.display()) };
        tolerance = Tolerance { relative, absolute };
    }
    tolerance.relative = args.rtol.unwrap_or(tolerance.relative);
    tolerance.absolute = args.atol.unwrap_or(tolerance.absolute);
    Ok(tolerance)
}
