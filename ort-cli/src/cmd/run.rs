//! `ort run`: runs a model once and summarizes its outputs.

use std::collections::HashSet;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::Result;
use clap::Args;
use ort_runtime::{Tensor, Value};

use crate::args::{ModelArgs, table};
use crate::arrays::write_npz;
use crate::inputs::{explained, gather};
use crate::output::say;

/// Runs a model once.
#[derive(Args)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Write all outputs to this .npz archive.
    #[arg(long, value_name = "FILE.npz")]
    outputs: Option<PathBuf>,
}

pub(crate) fn run(args: &RunArgs) -> Result<ExitCode> {
    let model = args.model.load_for_output(args.outputs.as_deref())?;
    let inputs = gather(&args.model, &model)?;
    let session = args.model.session(&model)?;
    let given: Vec<(&str, Value)> =
        inputs.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    args.model.note_split(&session, &given)?;
    let start = Instant::now();
    let outputs = session.run(&given).map_err(|problem| explained(&args.model, &inputs, problem))?;
    tracing::info!("ran in {:.2} ms", start.elapsed().as_secs_f64() * 1e3);
    let mut rows = table(&["output", "type", "shape", "summary"]);
    for (name, value) in &outputs {
        match value {
            Value::Tensor(tensor) => {
                rows.add_row([
                    name.clone(),
                    tensor.dtype().name().to_string(),
                    format!("{:?}", tensor.shape()),
                    summary(tensor),
                ]);
            }
            other => {
                rows.add_row([name.clone(), other.value_type().to_string(), String::new(), count(other)]);
            }
        }
    }
    say!("{rows}")?;
    if let Some(path) = &args.outputs {
        write_npz(path, &distinct(outputs))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Removes repeated outputs: a graph may list a value twice, but names in an archive are unique.
fn distinct(mut outputs: Vec<(String, Value)>) -> Vec<(String, Value)> {
    let mut names = HashSet::new();
    outputs.retain(|(name, _)| names.insert(name.clone()));
    outputs
}

fn count(value: &Value) -> String {
    match value {
        Value::Sequence(sequence) => format!("{} elements", sequence.elements.len()),
        Value::Optional(optional) => {
            if optional.element.is_some() { "present" } else { "absent" }.to_string()
        }
        other => other.kind_name().to_string(),
    }
}

/// Returns the minimum, mean and maximum of a tensor, and its first elements.
fn summary(tensor: &Tensor) -> String {
    if let Ok(strings) = tensor.strings() {
        let first: Vec<String> = strings.iter().take(4).map(|text| format!("{text:?}")).collect();
        return first.join(" ");
    }
    // Visit the elements without a copy, because outputs may fill the memory.
    let (mut least, mut largest, mut sum) = (f64::INFINITY, f64::NEG_INFINITY, 0.0);
    let (mut count, mut nan, mut first) = (0u64, 0u64, Vec::new());
    let visited = tensor.for_each_double(|number| {
        // `min` and `max` skip NaN, so NaN is counted separately.
        (least, largest, sum) = (least.min(number), largest.max(number), sum + number);
        (count, nan) = (count + 1, nan + u64::from(number.is_nan()));
        if first.len() < 4 {
            first.push(format!("{number:.5}"));
        }
    });
    // Complex numbers have no order, so they have no minimum.
    if tensor.dtype().is_complex() || visited.is_err() {
        return String::new();
    }
    if count == 0 {
        return "empty".to_string();
    }
    let mean = sum / count as f64;
    let nan = if nan > 0 { format!(", {nan} NaN") } else { String::new() };
    format!("min {least:.5}, mean {mean:.5}, max {largest:.5}{nan}: {} ..", first.join(" "))
}
