//! Calibration files: the ranges of values, in the format of onnxruntime.quantization's
//! `save_tensors_data`, so that calibrations can be exchanged.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use ort_core::files::{read_text, write_whole};
use ort_core::{Error, ErrorKind, Result, Within};
use serde_json::{Map, Value, json};

use crate::range::{RangeRule, ValueRange};

/// The most bytes of a file that are read: some 100,000 values.
const MOST_BYTES: usize = 64 << 20;

/// Reads the ranges of a file.
///
/// # Errors
///
/// The file cannot be read, is no such file, or has a range that is not finite or that ends before
/// it begins.
pub fn read_ranges(path: &Path) -> Result<BTreeMap<String, ValueRange>> {
    let read = || -> Result<BTreeMap<String, ValueRange>> {
        let text = read_text(path, MOST_BYTES).map_err(|problem| invalid(problem.to_string()))?;
        let file: Value = serde_json::from_str(&text).map_err(|problem| invalid(problem.to_string()))?;
        let data = file.get("data").and_then(Value::as_object);
        let is_expected = file.get("CLS").and_then(Value::as_str) == Some("TensorsData");
        let data = data.filter(|_| is_expected).ok_or_else(|| {
            invalid("it is not the JSON of a calibration, with CLS, TensorsData and data".to_string())
        })?;
        data.iter().map(|(name, ends)| Ok((name.clone(), range(name, ends)?))).collect()
    };
    read().within(|| format!("calibration '{}'", path.display()))
}

/// Writes the ranges that a rule found. Rules that onnxruntime.quantization does not have are
/// called `MinMax`, which its reader expects unless it is told otherwise.
///
/// # Errors
///
/// The file cannot be written.
pub fn write_ranges(path: &Path, ranges: &BTreeMap<String, ValueRange>, rule: RangeRule) -> Result<()> {
    let number =
        |value: f64| json!({"data": f64::from(value as f32), "dtype": "float32", "CLS": "numpy.array"});
    let ends = |range: &ValueRange| json!({"lowest": number(range.low), "highest": number(range.high), "CLS": "TensorData"});
    let data: Map<String, Value> = ranges.iter().map(|(name, range)| (name.clone(), ends(range))).collect();
    let method = match rule {
        RangeRule::Percentile(_) => "CalibrationMethod.Percentile",
        RangeRule::Entropy => "CalibrationMethod.Entropy",
        RangeRule::MinMax | RangeRule::Average | RangeRule::SquaredError => "CalibrationMethod.MinMax",
    };
    let file = json!({
        "CLS": "TensorsData",
        "data": data,
        "calibration_method": {"CLS": "CalibrationMethod", "value": method},
        "smooth_quant": false,
    });
    let written = write_whole(path, |out| out.write_all(file.to_string().as_bytes()));
    written.map_err(|problem| {
        Error::new(ErrorKind::Fail, format!("cannot write '{}': {problem}", path.display()))
            .help("check that its folder exists, its permissions, and the free disk space")
    })
}

/// A range: both ends are a number, or an array with one.
fn range(name: &str, ends: &Value) -> Result<ValueRange> {
    let end = |key: &str| {
        let value = ends.get(key)?;
        let value = value.get("data").unwrap_or(value);
        let value = value.as_array().and_then(|list| list.first()).unwrap_or(value);
        // The numbers were float32, and the parser may miss the last place of a float64.
        value.as_f64().map(|value| f64::from(value as f32)).filter(|value| value.is_finite())
    };
    match (end("lowest"), end("highest")) {
        (Some(low), Some(high)) if low <= high => Ok(ValueRange { low, high }),
        _ => Err(invalid(format!("value '{name}' has no range of two numbers, lowest and highest"))),
    }
}

fn invalid(text: String) -> Error {
    Error::new(ErrorKind::InvalidArgument, text)
}
