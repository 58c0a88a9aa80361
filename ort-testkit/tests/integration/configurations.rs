//! Differential testing over configurations finds what it is for: wrong elements, wrong shapes,
//! models that do not load.

use std::path::Path;

use ort_core::dtype::DType;
use ort_core::ir::{GraphBuilder, ValueId};
use ort_core::onnx::{ModelInfo, Weights, save, value_to_bytes};
use ort_core::tensor::{Tensor, Value};
use ort_core::{Result, error};
use ort_ep_cpu as _;
use ort_testkit::{Outcome, check_configurations};

type Build = fn(&mut GraphBuilder, ValueId) -> Result<ValueId>;

/// A case of one input and one output, with a slack for each element of the output.
struct Row {
    build: Build,
    expected: (&'static [usize], &'static [f32]),
    slack: &'static [f64],
    outcome: Outcome,
}

fn write(folder: &Path, file: &str, bytes: &[u8]) -> Result<()> {
    std::fs::write(folder.join(file), bytes).map_err(|problem| error!(Fail, "{problem}"))
}

fn outcome(row: &Row, limit: &str) -> Result<Outcome> {
    let folder = tempfile::tempdir().map_err(|problem| error!(Fail, "{problem}"))?;
    let data = folder.path().join("test_data_set_0");
    std::fs::create_dir(&data).map_err(|problem| error!(Fail, "{problem}"))?;
    let mut builder = GraphBuilder::new("case");
    let x = builder.input("x", DType::F32, &["n"]);
    let y = (row.build)(&mut builder, x)?;
    let graph = builder.finish(&[y])?;
    save(&graph, &ModelInfo::default(), folder.path().join("model.onnx"), &Weights::Inside)?;
    let value = |tensor| value_to_bytes("", &Value::Tensor(tensor));
    write(&data, "input_0.pb", &value(Tensor::from_slice(&[3], &[1.0f32, -2.0, 4.0])?)?)?;
    write(&data, "output_0.pb", &value(Tensor::from_slice(row.expected.0, row.expected.1)?)?)?;
    write(&data, "slack_0.pb", &value(Tensor::from_slice(row.expected.0, row.slack)?)?)?;
    write(folder.path(), "limit", limit.as_bytes())?;
    Ok(check_configurations(folder.path())?.outcome)
}

#[test]
fn each_difference_is_an_outcome() -> Result<()> {
    const RELU: Build = |b, x| b.node("Relu", &[x], &[]);
    const HALF: Build = |b, x| {
        let two = b.constant(Tensor::scalar(2.0f32)?);
        b.node("Div", &[x, two], &[])
    };
    let table = [
        Row { build: RELU, expected: (&[3], &[1.0, 0.0, 4.0]), slack: &[0.0; 3], outcome: Outcome::Right },
        Row { build: RELU, expected: (&[3], &[1.0, 0.5, 4.0]), slack: &[0.1; 3], outcome: Outcome::Wrong },
        Row {
            build: RELU,
            expected: (&[3], &[1.0, 0.5, 4.0]),
            slack: &[0.0, 0.5, 0.0],
            outcome: Outcome::Right,
        },
        Row {
            build: RELU,
            expected: (&[3], &[1.0, f32::NAN, 4.0]),
            slack: &[0.0, f64::INFINITY, 0.0],
            outcome: Outcome::Right,
        },
        Row { build: RELU, expected: (&[1, 3], &[1.0, 0.0, 4.0]), slack: &[0.0; 3], outcome: Outcome::Wrong },
        Row { build: HALF, expected: (&[3], &[0.5, -1.0, 2.0]), slack: &[0.0; 3], outcome: Outcome::Right },
        Row {
            build: HALF,
            expected: (&[3], &[0.5, -1.0, f32::NAN]),
            slack: &[0.0; 3],
            outcome: Outcome::Wrong,
        },
    ];
    for (index, row) in table.iter().enumerate() {
        assert_eq!(outcome(row, "0.4\n")?, row.outcome, "row {index}");
    }
    let [row, ..] = &table;
    for limit in ["", "half", "1.5", "-0.1", "nan"] {
        assert!(outcome(row, limit).is_err(), "limit '{limit}'");
    }
    Ok(())
}
