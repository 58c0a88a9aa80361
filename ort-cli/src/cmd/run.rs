//! `ort run`: one inference.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::Result;
use clap::Args;
use ort_runtime::{Tensor, Value};

use crate::args::{ModelArgs, table};
use crate::arrays::write_npz;
use crate::inputs::gather;
use crate::output::say;

/// Runs a model once.
#[derive(Args)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Write all outputs to this NumPy archive.
    #[arg(long, value_name = "FILE.npz")]
    outputs: Option<PathBuf>,
}

pub(crate) fn run(args: &RunArgs) -> Result<ExitCode> {
    let model = args.model.load()?;
    let inputs = gather(&args.model, &model)?;
    let session = args.model.session(&model)?;
    let given: Vec<(&str, Value)> =
        inputs.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    args.model.note_split(&session, &given)?;
    let start = Instant::now();
    let outputs = session.run(&given)?;
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
        write_npz(path, &outputs)?;
    }
    Ok(ExitCode::SUCCESS)
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

/// Least, mean and largest number, and the first few elements.
fn summary(tensor: &Tensor) -> String {
    if let Ok(strings) = tensor.strings() {
        let first: Vec<String> = strings.iter().take(4).map(|text| format!("{text:?}")).collect();
        return first.join(" ");
    }
    let (false, Ok(numbers)) = (tensor.dtype().is_complex(), tensor.to_doubles()) else {
        return String::new();
    };
    if numbers.is_empty() {
        return "empty".to_string();
    }
    let least = numbers.iter().copied().fold(f64::INFINITY, f64::min);
    let largest = numbers.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mean = numbers.iter().sum::<f64>() / numbers.len() as f64;
    let first: Vec<String> = numbers.iter().take(4).map(|number| format!("{number:.5}")).collect();
    let nan = numbers.iter().filter(|number| number.is_nan()).count();
    let nan = if nan > 0 { format!(", {nan} NaN") } else { String::new() };
    format!("min {least:.5}, mean {mean:.5}, max {largest:.5}{nan}: {} ..", first.join(" "))
}
