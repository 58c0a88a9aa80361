//! Where the libraries are, and a model for them.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use ort_runtime::ir::GraphBuilder;
use ort_runtime::{DType, Model, Tensor, Value};

/// A library that cargo built beside this test.
pub(crate) fn built(name: &str) -> PathBuf {
    let (prefix, suffix) = (std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    let test = std::env::current_exe().expect("the test has a path");
    let folder = test.parent().expect("the test is in a folder");
    let file = folder.join(format!("{prefix}{name}{suffix}"));
    assert!(file.is_file(), "{} is not there", file.display());
    file
}

/// A library out of a C file of this repository, compiled once for each set of definitions.
pub(crate) fn compiled(source: &str, name: &str, definitions: &[String]) -> PathBuf {
    static FOLDER: OnceLock<tempfile::TempDir> = OnceLock::new();
    let folder = FOLDER.get_or_init(|| tempfile::tempdir().expect("a temporary folder"));
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let library = folder.path().join(format!("lib{name}{}", std::env::consts::DLL_SUFFIX));
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let mut command = Command::new(compiler);
    command.args(["-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]);
    command.arg("-I").arg(root.join("ort-core/include"));
    command.arg("-I").arg(root.join("examples/provider-template-c"));
    command.args(definitions).arg("-o").arg(&library).arg(root.join(source));
    let output = command.output().expect("a C compiler: the variable CC, or cc");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    library
}

/// `Relu(x * w + x * w) - x`: three operators that the templates have, one that they do not.
pub(crate) fn model() -> Model {
    let mut builder = GraphBuilder::new("parts");
    let x = builder.input("x", DType::F32, &["rows", "3"]);
    let weights: Vec<f32> = (0..9).map(|index| index as f32 / 4.0 - 1.0).collect();
    let weights = builder.constant(Tensor::from_slice(&[3, 3], &weights).expect("nine elements"));
    let bias = builder.input("bias", DType::F32, &["rows", "3"]);
    let product = builder.node("MatMul", &[x, weights], &[]).expect("a product");
    let sum = builder.node("Add", &[product, bias], &[]).expect("a sum");
    let positive = builder.node("Relu", &[sum], &[]).expect("a cut");
    let y = builder.node("Sub", &[positive, x], &[]).expect("a difference");
    Model::from_graph(builder.finish(&[y]).expect("a graph"))
}

/// Inputs of `rows` rows.
pub(crate) fn inputs(rows: usize) -> Vec<(&'static str, Value)> {
    let tensor = |scale: f32| {
        let elements: Vec<f32> = (0..rows * 3).map(|index| (index as f32 * scale).sin()).collect();
        Value::from(Tensor::from_slice(&[rows, 3], &elements).expect("as many elements"))
    };
    vec![("x", tensor(0.7)), ("bias", tensor(1.3))]
}
