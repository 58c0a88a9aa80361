//! `ort plan`: the memory of a run before anything runs.

use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use ort_runtime::plan::PlanReport;
use serde_json::{Map, json};

use crate::args::{ModelArgs, human_bytes, table};
use crate::output::say;

/// Shows the memory of a run before anything runs.
#[derive(Args)]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// One JSON object.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &PlanArgs) -> Result<ExitCode> {
    let model = args.model.load()?;
    let session = args.model.session(&model)?;
    let no_inputs =
        args.model.shapes.is_empty() && args.model.input.is_empty() && args.model.inputs.is_none();
    let report = if no_inputs {
        let dims: Vec<(&str, i64)> =
            args.model.dims.iter().map(|(name, size)| (name.as_str(), *size)).collect();
        session.plan(&dims)?
    } else {
        // Inputs and whole shapes bind the dimensions as a run on them would.
        let inputs = crate::inputs::gather(&args.model, &model)?;
        let given: Vec<_> = inputs.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
        session.plan_for_inputs(&given)?
    };
    if args.json {
        say!("{}", to_json(&report))?;
    } else {
        print(&report)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn to_json(report: &PlanReport) -> serde_json::Value {
    let dims: Map<String, serde_json::Value> =
        report.dims.iter().map(|(name, size)| (name.clone(), json!(size))).collect();
    let steps: Vec<_> = report
        .steps
        .iter()
        .map(|step| json!({"node": step.node, "op": step.op, "live_bytes": step.live_bytes}))
        .collect();
    let values: Vec<_> = report
        .values
        .iter()
        .map(|value| {
            json!({
                "name": value.name,
                "bytes": value.bytes,
                "offset": value.offset,
                "first_step": value.first_step,
                "last_step": value.last_step,
                "kind": value.kind.name(),
            })
        })
        .collect();
    json!({
        "peak_bytes": report.peak_bytes,
        "weights_bytes": report.weights_bytes,
        "lower_bound_bytes": report.lower_bound_bytes,
        "dims": dims,
        "steps": steps,
        "values": values,
        "symbolic_peak": report.symbolic_peak,
    })
}

fn print(report: &PlanReport) -> Result<()> {
    let dims: Vec<String> = report.dims.iter().map(|(name, size)| format!("{name}={size}")).collect();
    if !dims.is_empty() {
        say!("dimensions        {}", dims.join(" "))?;
    }
    match report.peak_bytes {
        Some(peak) => say!("activations peak  {} ({peak} bytes)", human_bytes(peak))?,
        None => say!(
            "activations peak  {} ({} bytes), and what only the run can tell",
            human_bytes(report.planned_bytes),
            report.planned_bytes
        )?,
    }
    say!("lower bound       {} ({} bytes)", human_bytes(report.lower_bound_bytes), report.lower_bound_bytes)?;
    say!("weights           {} ({} bytes)", human_bytes(report.weights_bytes), report.weights_bytes)?;
    if let Some(expression) = &report.symbolic_peak {
        say!("peak, symbolic    {expression}")?;
    }
    say!("steps             {}", report.steps.len())?;
    let mut rows = table(&["alive at the peak", "bytes", ""]);
    for (name, bytes) in report.largest.iter().take(12) {
        rows.add_row([name.clone(), bytes.to_string(), human_bytes(*bytes)]);
    }
    say!("\n{rows}")
}
