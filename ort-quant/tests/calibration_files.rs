//! Calibration files: those of onnxruntime.quantization are read, ours come back as they were, and
//! others are errors.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, missing_docs)]

use std::collections::BTreeMap;

use ort_quant::{RangeRule, ValueRange, read_ranges, write_ranges};

/// What `save_tensors_data` of onnxruntime.quantization 1.31.1 wrote: ends as scalars, as arrays of
/// one element, and as plain numbers.
const FOREIGN: &str = r#"{"CLS": "TensorsData", "data": {"x": {"lowest": {"data": -1.5, "dtype": "float32", "CLS":
"numpy.array"}, "highest": {"data": [2.25], "dtype": "float32", "CLS": "numpy.array"}, "CLS": "TensorData"}, "y":
{"lowest": 0.0, "highest": 3.0, "CLS": "TensorData"}}, "calibration_method": {"CLS": "CalibrationMethod", "value":
"CalibrationMethod.MinMax"}, "smooth_quant": false}"#;

#[test]
fn files_of_onnxruntime_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("foreign.json");
    std::fs::write(&path, FOREIGN).unwrap();
    let ranges = read_ranges(&path).unwrap();
    assert_eq!(ranges["x"], ValueRange { low: -1.5, high: 2.25 });
    assert_eq!(ranges["y"], ValueRange { low: 0.0, high: 3.0 });
    assert_eq!(ranges.len(), 2);
}

#[test]
fn ranges_come_back_as_they_were() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ranges.json");
    let range = |low: f32, high: f32| ValueRange { low: low.into(), high: high.into() };
    let ranges: BTreeMap<String, ValueRange> =
        [("a \"b\"".to_string(), range(-0.1, 0.3)), ("c".to_string(), range(0.0, f32::MAX))].into();
    for rule in [RangeRule::MinMax, RangeRule::Entropy, RangeRule::Percentile(0.999), RangeRule::SquaredError]
    {
        write_ranges(&path, &ranges, rule).unwrap();
        assert_eq!(read_ranges(&path).unwrap(), ranges);
    }
    assert!(write_ranges(&folder.path().join("missing/ranges.json"), &ranges, RangeRule::MinMax).is_err());
}

#[test]
fn other_files_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ranges.json");
    let with = |ends: &str| format!(r#"{{"CLS": "TensorsData", "data": {{"x": {ends}}}}}"#);
    let texts = [
        String::new(),
        "[]".to_string(),
        r#"{"CLS": "TensorsData"}"#.to_string(),
        r#"{"data": {}}"#.to_string(),
        with("{}"),
        with(r#"{"lowest": 1.0}"#),
        with(r#"{"lowest": 1.0, "highest": "2"}"#),
        with(r#"{"lowest": 2.0, "highest": 1.0}"#),
        with(r#"{"lowest": [], "highest": 1.0}"#),
    ];
    for text in texts {
        std::fs::write(&path, &text).unwrap();
        let problem = read_ranges(&path).unwrap_err().to_string();
        assert!(problem.contains("ranges.json"), "{text}: {problem}");
    }
    assert!(read_ranges(&folder.path().join("missing.json")).is_err());
}
