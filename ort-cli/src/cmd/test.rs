//! `ort test`: runs ONNX test-case folders and compares actual with expected outputs.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use crate::args::threads;
use crate::distribution::Bernoulli;
use crate::numbers::from_zero;
use crate::output::{LINE_BYTES, say};
use crate::panics::guard;
use crate::providers::ProviderArgs;
use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use ort_runtime::files::read_text;
use ort_runtime::tensor::{Tolerance, compare};
use ort_runtime::{MappedFile, Model, NAME_BYTES, Session, Value, ValueSpec, onnx, open_regular, shown};
use walkdir::WalkDir;

/// The most bytes of a case's files `tol` and `check`.
const MOST_TEXT: usize = 1 << 12;

/// Runs every folder that holds `model.onnx` and `test_data_set_*`, at any depth below DIR.
///
/// Prints a line per case, `PASS name`, `FAIL name: why` or `SKIP name: why`, and then the totals.
#[derive(Args)]
pub(crate) struct TestArgs {
    /// Folders of test cases, searched recursively.
    #[arg(required = true, value_name = "DIR")]
    dirs: Vec<PathBuf>,
    /// Relative tolerance, overriding the case's own.
    #[arg(long, value_name = "X", value_parser = from_zero::<f64>)]
    rtol: Option<f64>,
    /// Absolute tolerance, overriding the case's own.
    #[arg(long, value_name = "X", value_parser = from_zero::<f64>)]
    atol: Option<f64>,
    #[command(flatten)]
    providers: ProviderArgs,
    /// Intra-op threads: threads inside one operator.
    #[arg(long, value_name = "N", value_parser = threads)]
    threads: Option<usize>,
}

enum Outcome {
    Pass,
    Fail(String),
    Skip(String),
}

pub(crate) fn run(args: &TestArgs) -> Result<ExitCode> {
    let (mut passed, mut skipped) = (0, 0);
    let mut failed: Vec<String> = Vec::new();
    let folders = find_cases(&args.dirs)?;
    for folder in &folders {
        let name = shown(&case_name(folder), NAME_BYTES).into_owned();
        // A panic is a bug of the runtime, but the other cases must still run.
        let why = match guard(|| run_case(args, folder)) {
            Ok(Outcome::Pass) => {
                passed += 1;
                say!("PASS {name}")?;
                continue;
            }
            Ok(Outcome::Skip(why)) => {
                skipped += 1;
                say!("SKIP {name}: {}", one_line(&why))?;
                continue;
            }
            Ok(Outcome::Fail(why)) => why,
            Err(problem) => format!("{problem:#}"),
        };
        let line = format!("{name}: {}", one_line(&why));
        say!("FAIL {line}")?;
        failed.push(line);
    }
    say!("{passed} passed, {} failed, {skipped} skipped", failed.len())?;
    let Some(first) = failed.first() else { return Ok(ExitCode::SUCCESS) };
    bail!(
        "{} of {} cases failed, the first is {first}; run `ort test` on that folder alone, with -v",
        failed.len(),
        folders.len()
    )
}

fn case_name(folder: &Path) -> String {
    // Resolve `.` and `..`, which have no name.
    let folder = folder.canonicalize().unwrap_or_else(|_| folder.to_path_buf());
    folder.file_name().map_or_else(|| folder.display().to_string(), |name| name.to_string_lossy().into())
}

fn one_line(text: &str) -> String {
    // Half of a line leaves room for the name of the case.
    shown(&text.lines().map(str::trim).collect::<Vec<_>>().join(" "), LINE_BYTES / 2).into_owned()
}

/// Returns the folders at any depth below `dirs` that hold a model, without duplicates.
fn find_cases(dirs: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let mut cases = Vec::new();
    for dir in dirs {
        ensure!(dir.is_dir(), "there is no folder {}; name the folder of the cases", dir.display());
        let before = cases.len();
        // Following links may loop, which the walk reports as an error.
        for entry in WalkDir::new(dir).follow_links(true).sort_by_file_name() {
            let entry = entry.with_context(|| format!("reading {}", dir.display()))?;
            if entry.file_name() == "model.onnx"
                && let Some(folder) = entry.path().parent()
            {
                cases.push(folder.to_path_buf());
            }
        }
        // Otherwise a mistyped folder would pass.
        if cases.len() == before {
            bail!("no folder below {} holds a model.onnx; name the folder of the cases", dir.display());
        }
    }
    let mut seen = std::collections::HashSet::new();
    // A folder may be listed on the command line twice, or below another one.
    cases.retain(|case| seen.insert(case.clone()));
    Ok(cases)
}

fn run_case(args: &TestArgs, case: &Path) -> Result<Outcome> {
    let sets = numbered(case, "test_data_set_")?;
    if sets.is_empty() {
        return Ok(Outcome::Skip("it has no test data".to_string()));
    }
    let tolerance = tolerance(args, case)?;
    let model = Model::load(case.join("model.onnx"))?;
    let mut builder = args.providers.request(Session::builder(&model))?;
    if let Some(threads) = args.threads {
        builder = builder.threads(threads);
    }
    let session = builder.build()?;
    let check = distribution(case)?;
    for (_, set) in sets {
        let problem = match check {
            Some(check) => draw_set(&session, &set, check)?,
            None => run_set(&session, &set, tolerance)?,
        };
        if let Some(why) = problem {
            return Ok(Outcome::Fail(why));
        }
    }
    Ok(Outcome::Pass)
}

/// Runs one data set. Returns why its outputs are wrong, or `None`.
fn run_set(session: &Session, set: &Path, tolerance: Tolerance) -> Result<Option<String>> {
    let inputs = read_inputs(&session.inputs(), set)?;
    let given: Vec<(&str, Value)> =
        inputs.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    let outputs = session.run(&given)?;
    for (number, file) in numbered(set, "output_")? {
        let (name, actual) = outputs
            .get(number)
            .with_context(|| format!("{}: the model has only {} outputs", file.display(), outputs.len()))?;
        let expected = read_output(session, number, &file)?;
        if let Err(problem) = compare(actual, &expected, tolerance) {
            return Ok(Some(format!("output '{name}': {}", problem.message())));
        }
    }
    Ok(None)
}

/// Runs a data set as often as the check needs. Returns why the draws in the only output do not
/// match the probabilities in the only input, or `None`.
fn draw_set(session: &Session, set: &Path, check: Bernoulli) -> Result<Option<String>> {
    let inputs = read_inputs(&session.inputs(), set)?;
    let files = numbered(set, "output_")?;
    let ([(name, input)], [(number, file)]) = (&inputs[..], &files[..]) else {
        bail!("{}: a `check` file needs a model with one input and one output", set.display());
    };
    let expected = read_output(session, *number, file)?;
    let mut draws = Vec::with_capacity(check.runs());
    for _ in 0..check.runs() {
        let outputs = session.run(&[(name.as_str(), input.clone())])?;
        let output = outputs.into_iter().nth(*number).context("the model has no such output")?;
        draws.push(output.1.tensor()?.clone());
    }
    check.problem(input.tensor()?, &draws, expected.tensor()?)
}

/// Maps a regular file. Of a large one, only the pages that are read take memory.
fn mapped(file: &Path) -> Result<bytes::Bytes> {
    let open = || -> Result<MappedFile> { Ok(MappedFile::open_file(open_regular(file)?)?) };
    Ok(open().with_context(|| format!("reading {}", file.display()))?.bytes())
}

/// Reads an expected output, as the type that the model declares for it.
fn read_output(session: &Session, number: usize, file: &Path) -> Result<Value> {
    let graph = session.model().graph();
    // A sequence is a SequenceProto and a tensor a TensorProto, and the bytes do not say which.
    let declared = graph.outputs.get(number).map(|&id| graph.value(id).ty.clone()).unwrap_or_default();
    onnx::value_from_bytes(mapped(file)?, &declared).with_context(|| format!("reading {}", file.display()))
}

/// Reads the file `check` of a case, if it exists.
fn distribution(case: &Path) -> Result<Option<Bernoulli>> {
    let file = case.join("check");
    if !file.exists() {
        return Ok(None);
    }
    let check = read_text(&file, MOST_TEXT).map_err(Into::into).and_then(|text| Bernoulli::parse(&text));
    check.map(Some).with_context(|| format!("reading {}", file.display()))
}

/// Reads the inputs of a data set. A tensor is bound by its own name if an input has that name,
/// otherwise by the number of its file.
fn read_inputs(specs: &[ValueSpec], set: &Path) -> Result<Vec<(String, Value)>> {
    let files = numbered(set, "input_")?;
    let required: Vec<&ValueSpec> = specs.iter().filter(|spec| !spec.has_default).collect();
    let all: Vec<&ValueSpec> = specs.iter().collect();
    // Numbers count the inputs without a default, because old models list their weights among the
    // inputs. If the set has more files than that, it has one for every input.
    let by_number = if files.len() > required.len() { &all } else { &required };
    let mut inputs: Vec<(String, Value)> = Vec::new();
    for (number, file) in files {
        let bytes = mapped(&file)?;
        let own_name = onnx::tensor_name(bytes.clone()).filter(|name| specs.iter().any(|s| s.name == *name));
        let spec = match own_name {
            Some(name) => specs.iter().find(|spec| spec.name == name),
            None => by_number.get(number).copied(),
        };
        let spec = spec
            .with_context(|| format!("{}: the model has only {} inputs", file.display(), by_number.len()))?;
        let value = onnx::value_from_bytes(bytes, &spec.ty)
            .with_context(|| format!("reading {} for input '{}'", file.display(), spec.name))?;
        inputs.push((spec.name.clone(), value));
    }
    Ok(inputs)
}

/// Returns the entries of a folder named PREFIX and a number, sorted by the number.
fn numbered(folder: &Path, prefix: &str) -> Result<Vec<(usize, PathBuf)>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).with_context(|| format!("reading {}", folder.display()))? {
        let path = entry?.path();
        let stem = path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
        // Other files, such as notes beside the data, are ignored.
        if let Some(number) = stem.strip_prefix(prefix).and_then(|rest| rest.parse::<usize>().ok()) {
            found.push((number, path));
        }
    }
    // Folders list their entries in any order, and names would put 10 before 2.
    found.sort();
    Ok(found)
}

/// Returns the tolerance of a case: the command line's, else that of its file `tol` (`RTOL ATOL`),
/// else the default.
fn tolerance(args: &TestArgs, case: &Path) -> Result<Tolerance> {
    let mut tolerance = Tolerance::default();
    let file = case.join("tol");
    if file.exists() {
        let text = read_text(&file, MOST_TEXT).with_context(|| format!("reading {}", file.display()))?;
        let numbers: Vec<f64> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        let [relative, absolute] = numbers[..] else {
            bail!("{} holds {text:?}, expected `RTOL ATOL`", file.display())
        };
        tolerance = Tolerance { relative, absolute };
    }
    tolerance.relative = args.rtol.unwrap_or(tolerance.relative);
    tolerance.absolute = args.atol.unwrap_or(tolerance.absolute);
    Ok(tolerance)
}
