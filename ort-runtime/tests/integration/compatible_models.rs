//! Models that ONNX does not allow and ONNX Runtime runs: they run here with a warning, and are
//! refused by strict loading.
//!
//! The models and ONNX Runtime's results are cases of `data/cases`, which `case_folders.rs` runs.
#![allow(clippy::indexing_slicing)]

use std::path::PathBuf;

use ort_runtime::onnx::{FileAccess, Source, WarningKind};
use ort_runtime::{DType, DeviceId, Model, OutputTarget, Result, RunOptions, Session, Tensor, Value};

/// The cases that are warned of when they are loaded: the kind, a part of the text, and the place.
const WARNED: &[(&str, WarningKind, &str, &str)] = &[
    ("opset_of_standard_not_imported", WarningKind::OpsetImport, "'ai.onnx' is not imported", "node '"),
    (
        "opset_of_microsoft_not_imported",
        WarningKind::OpsetImport,
        "'com.microsoft' is not imported",
        "node '",
    ),
    ("opset_of_ml_not_imported", WarningKind::OpsetImport, "'ai.onnx.ml' is not imported", "node '"),
    ("opset_imported_twice_newer_first", WarningKind::OpsetImport, "the last import counts", ""),
    ("opset_imported_twice_older_first", WarningKind::OpsetImport, "the last import counts", ""),
    ("opset_imported_twice_by_both_names", WarningKind::OpsetImport, "the last import counts", ""),
    ("layer_norm_old_unknown_attribute", WarningKind::Attribute, "no attribute 'foo'", "node '"),
    ("layer_norm_old_unknown_attribute", WarningKind::OperatorVersion, "17 > 16", "node '"),
    ("simplified_layer_norm_unknown_attribute", WarningKind::Attribute, "no attribute 'foo'", "node '"),
    ("initializer_unread_without_data", WarningKind::Initializer, "data are missing", "initializer 'w'"),
    ("initializer_defined_twice", WarningKind::Initializer, "the last definition counts", "initializer 'w'"),
    ("initializer_without_name", WarningKind::Initializer, "no name", "initializer ''"),
    ("initializer_marked_as_segment", WarningKind::Initializer, "segment", "initializer 'w'"),
    ("constant_of_several_values", WarningKind::Attribute, "the first one counts", "node '"),
    ("function_unknown_attribute", WarningKind::Attribute, "no attribute 'foo'", "node '"),
    ("function_named_like_operator", WarningKind::Function, "function 'Relu' is ignored", ""),
    ("declared_shape_of_value_wrong", WarningKind::DeclaredType, "is ignored", "value 'a'"),
    ("declared_shape_of_output_wrong", WarningKind::DeclaredType, "is ignored", "value 'y'"),
];

fn folder(case: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/cases").join(case)
}

fn source(case: &str) -> Source {
    Source::open(folder(case).join("model.onnx"), FileAccess::default()).unwrap()
}

#[test]
fn each_is_warned_of_and_refused_if_loading_is_strict() {
    let mut wrong = Vec::new();
    for (case, kind, text, place) in WARNED {
        let warnings = Model::from_source(source(case)).unwrap().warnings().to_vec();
        let found = warnings.iter().any(|warning| {
            warning.kind == *kind && warning.text.contains(text) && warning.place.starts_with(place)
        });
        if !found {
            wrong.push(format!("{case}: expected {kind:?} '{text}', got {warnings:?}"));
        }
        match Model::from_source(source(case).strict(true)) {
            Ok(_) => wrong.push(format!("{case}: strict loading takes it")),
            Err(problem) if !problem.to_string().contains("strict loading") => {
                wrong.push(format!("{case}: strict loading says {problem}"));
            }
            Err(_) => {}
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn standard_models_have_no_warnings() -> Result<()> {
    for case in ["dim_name_of_two_sizes", "dim_names_reshape_to_other", "external_data_path_with_parents"] {
        let model = Model::from_source(source(case).strict(true))?;
        assert_eq!(model.warnings(), [], "{case}");
    }
    Ok(())
}

fn ones(shape: &[usize]) -> Result<Value> {
    Ok(Tensor::from_slice(shape, &vec![1.0f32; shape.iter().product()])?.into())
}

#[test]
fn strict_sessions_refuse_names_of_two_sizes() -> Result<()> {
    let inputs = [("x", ones(&[2, 3])?), ("u", ones(&[4, 3])?)];
    let model = Model::from_source(source("dim_name_of_two_sizes"))?;
    let strict = Model::from_source(source("dim_name_of_two_sizes").strict(true))?;
    for session in [Session::builder(&model).strict(true).build()?, Session::builder(&strict).build()?] {
        let problem = session.run(&inputs).expect_err("the sizes differ").to_string();
        assert!(problem.contains("axis 0 has size 4, expected N with N=2"), "{problem}");
    }
    Ok(())
}

#[test]
fn runs_before_and_after_a_contradiction_are_planned_by_names() -> Result<()> {
    let session = Session::builder(&Model::from_source(source("dim_name_of_two_sizes"))?).build()?;
    let agreeing = [("x", ones(&[2, 3])?), ("u", ones(&[2, 3])?)];
    let contradicting = [("x", ones(&[2, 3])?), ("u", ones(&[4, 3])?)];
    let peak = session.plan_for_inputs(&agreeing)?.peak_bytes;
    for _ in 0..2 {
        assert_eq!(session.run(&agreeing)?[0].1.tensor()?.shape(), [4, 3]);
        assert_eq!(session.run(&contradicting)?[0].1.tensor()?.shape(), [6, 3]);
        assert_eq!(session.plan_for_inputs(&agreeing)?.peak_bytes, peak);
        let other = session.plan_for_inputs(&contradicting)?.peak_bytes;
        assert!(other.is_some_and(|bytes| bytes >= 6 * 3 * size_of::<f32>()), "{other:?}");
    }
    // A size that is a number in the model stays an error, and so does a rank.
    for shape in [&[4, 5][..], &[4]] {
        assert!(session.run(&[("x", ones(&[2, 3])?), ("u", ones(shape)?)]).is_err(), "{shape:?}");
    }
    Ok(())
}

#[test]
fn bindings_may_contradict_names_too_and_within_a_limit() -> Result<()> {
    let model = Model::from_source(source("dim_name_of_two_sizes"))?;
    let session = Session::builder(&model).memory_limit(1 << 20).build()?;
    let mut binding = session.io_binding();
    binding.bind_output("y", OutputTarget::Device(DeviceId::HOST))?;
    for rows in [2, 4, 3] {
        binding.bind_input("x", ones(&[2, 3])?)?;
        binding.bind_input("u", ones(&[rows, 3])?)?;
        session.run_with_binding(&mut binding, &RunOptions::default())?;
        let output = binding.output("y")?;
        assert_eq!((output.tensor()?.shape(), output.tensor()?.dtype()), (&[2 + rows, 3][..], DType::F32));
    }
    Ok(())
}
