//! Recorded cases: every folder below `data/cases` holds a model, inputs and the outputs that a
//! reference computed, as ONNX's package stores its node tests. Each runs at every optimization
//! level, on one to three threads, and as it is saved when it is optimized.
//!
//! Outputs come from the standard's reference evaluator or from exact formulas, never from this
//! runtime. A folder is named by what it is a case of; `tol` holds the relative and the absolute
//! tolerance.

use std::path::{Path, PathBuf};

use ort_runtime::ir::ValueType;
use ort_runtime::rewrite::{Level, Optimizer};
use ort_runtime::tensor::{Tolerance, compare};
use ort_runtime::{Error, ErrorKind, Model, Result, Session, Value, Within, onnx};

/// The most threads that a case runs on.
const MOST_THREADS: usize = 3;

/// The folders of all cases.
fn folders() -> Vec<PathBuf> {
    folders_with("cases", "model.onnx")
}

/// The folders below `data/{root}` that hold this model.
fn folders_with(root: &str, model: &str) -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(root);
    let mut folders: Vec<PathBuf> = std::fs::read_dir(&root)
        .expect("the cases are there")
        .map(|entry| entry.expect("a folder can be read").path())
        .filter(|path| path.join(model).is_file())
        .collect();
    folders.sort();
    assert!(!folders.is_empty(), "{} holds no case", root.display());
    folders
}

#[test]
fn every_case_passes_at_every_level_and_on_any_threads() {
    let mut problems = Vec::new();
    for folder in folders() {
        for (name, level) in Level::NAMES {
            for threads in 1..=MOST_THREADS {
                let model = Model::load(folder.join("model.onnx"));
                if let Err(problem) = model.and_then(|model| check(&folder, &model, level, threads)) {
                    problems.push(format!("{}, {name}, {threads} threads: {problem}", folder.display()));
                }
            }
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

/// ONNX Runtime saved these models in its own format, and computed their outputs;
/// `data/ort_format.py` makes them.
#[test]
fn models_in_ort_format_give_what_onnx_runtime_gives() {
    let mut problems = Vec::new();
    let folders = folders_with("ort_format", "model.ort");
    assert!(folders.len() >= 14, "{} models", folders.len());
    for folder in folders {
        for (name, level) in Level::NAMES {
            let model = Model::load(folder.join("model.ort"));
            if let Err(problem) = model.and_then(|model| check(&folder, &model, level, 2)) {
                problems.push(format!("{}, {name}: {problem}", folder.display()));
            }
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

/// Cases that files cannot state at level `extended`: the standard's `Attention` has no attribute
/// for queries all of whose scores overflow. ONNX Runtime gives NaN there as the formula does, we
/// give 0.
const NOT_IN_FILES: &str = "attention_scores_overflow";

#[test]
fn every_case_passes_as_the_optimizer_writes_it() {
    let mut problems = Vec::new();
    for folder in folders() {
        let name = folder.file_name().unwrap_or_default().to_string_lossy();
        let most = if name.starts_with(NOT_IN_FILES) { Level::Basic } else { Level::All };
        for (name, level) in Level::NAMES.into_iter().filter(|(_, level)| *level <= most) {
            if let Err(problem) = check_written(&folder, level) {
                problems.push(format!("{}, {name}: {problem}", folder.display()));
            }
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

/// Runs what is saved of the case's model at a level, as it stands.
fn check_written(folder: &Path, level: Level) -> Result<()> {
    let model = Model::load(folder.join("model.onnx"))?;
    let (graph, _) = Session::builder(&model).optimizer(Optimizer::at(level)).optimized()?;
    let written = tempfile::tempdir().expect("a folder can be made");
    let path = written.path().join("model.onnx");
    onnx::save(&graph, model.info(), &path, &onnx::Weights::Inside)?;
    check(folder, &Model::load(path)?, Level::Disabled, 1)
}

/// ONNX Runtime loads what is written at level `extended`. Its kernels take no mask that broadcasts
/// over the queries, and no convolution whose input and output are of different 8-bit types.
#[test]
fn level_extended_makes_only_what_onnx_runtime_has_kernels_for() -> Result<()> {
    let cases =
        [("attention_mask_over_queries", "Attention"), ("qlinear_conv_of_mixed_types", "QLinearConv")];
    for (folder, operator) in cases {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/cases");
        let model = Model::load(root.join(folder).join("model.onnx"))?;
        let makes = |level| -> Result<bool> {
            let (graph, _) = Session::builder(&model).optimizer(Optimizer::at(level)).optimized()?;
            Ok(graph.nodes.iter().any(|node| node.spec.name == operator))
        };
        assert!(!makes(Level::Extended)?, "{folder}: {operator} at level extended");
        assert!(makes(Level::All)?, "{folder}: no {operator} at level all");
    }
    Ok(())
}

/// Runs one case and compares its outputs, shapes included.
fn check(folder: &Path, model: &Model, level: Level, threads: usize) -> Result<()> {
    let session = Session::builder(model).threads(threads).opt_level(level).build()?;
    let data = folder.join("test_data_set_0");
    let specs: Vec<_> = session.inputs().into_iter().filter(|spec| !spec.has_default).collect();
    let mut inputs = Vec::with_capacity(specs.len());
    for (index, spec) in specs.iter().enumerate() {
        let value = read(&data.join(format!("input_{index}.pb")), &spec.ty)?;
        inputs.push((spec.name.as_str(), value));
    }
    let outputs = session.run(&inputs)?;
    let graph = model.graph();
    let tolerance = tolerance(folder)?;
    let mut compared = 0;
    for (index, ((name, actual), id)) in outputs.iter().zip(&graph.outputs).enumerate() {
        // An output without a file is not compared, as in `ort test`.
        let file = data.join(format!("output_{index}.pb"));
        if !file.exists() {
            continue;
        }
        compared += 1;
        let expected = read(&file, &graph.value(*id).ty)?;
        compare(actual, &expected, tolerance).within(|| format!("output '{name}'"))?;
    }
    match compared {
        0 => Err(Error::new(ErrorKind::Fail, "no output has a file")),
        _ => Ok(()),
    }
}

fn read(path: &Path, ty: &ValueType) -> Result<Value> {
    let place = || path.display().to_string();
    let bytes = std::fs::read(path).map_err(|problem| Error::new(ErrorKind::NoSuchFile, problem.to_string()));
    onnx::value_from_bytes(bytes.within(place)?.into(), ty).within(place)
}

/// The relative and the absolute tolerance of the case.
fn tolerance(folder: &Path) -> Result<Tolerance> {
    let Ok(text) = std::fs::read_to_string(folder.join("tol")) else { return Ok(Tolerance::default()) };
    let numbers: Vec<f64> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    match numbers[..] {
        [relative, absolute] => Ok(Tolerance { relative, absolute }),
        _ => {
            Err(Error::new(ErrorKind::InvalidArgument, format!("'tol' holds '{text}', expected two numbers")))
        }
    }
}
