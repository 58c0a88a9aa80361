//! `ort plan`: the memory plan of a run, without running it.

mod chart;
mod sweep;
mod text;

pub(super) use text::largest;

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, ensure};
use clap::Args;
use ort_runtime::Session;
use ort_runtime::plan::PlanReport;
use serde_json::{Map, Value, json};

use crate::args::ModelArgs;
use crate::output::{say_json, write_file};

/// Shows the memory plan of a run without running it.
#[derive(Args)]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    /// Draw the bytes over the schedule as SVG.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

pub(crate) fn run(args: &PlanArgs) -> Result<ExitCode> {
    let sweeps = args.model.dims.iter().any(|(_, sizes)| sizes.len() > 1);
    ensure!(!sweeps || args.svg.is_none(), "--svg draws one plan: give each --dim one size");
    let model = args.model.load()?;
    let session = args.model.session(&model)?;
    let no_inputs =
        args.model.shapes.is_empty() && args.model.input.is_empty() && args.model.inputs.is_none();
    if sweeps {
        ensure!(
            no_inputs,
            "several sizes of --dim cannot be combined with --input, --inputs or --shape; leave those out"
        );
        return sweep::run(&session, &args.model, args.json);
    }
    let dims = args.model.single_dims()?;
    let report = if no_inputs {
        plan(&session, &dims)?
    } else {
        // Bind the dimensions to the inputs and shapes given, as a run does.
        let inputs = crate::inputs::gather(&args.model, &model)?;
        let given: Vec<_> = inputs.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
        session.plan_for_inputs(&given)?
    };
    if let Some(path) = &args.svg {
        let drawing = chart::draw(&args.model.name(), &report);
        write_file(path, |file| Ok(writeln!(file, "{drawing}")?))?;
    }
    if args.json {
        say_json(&to_json(&report))?;
    } else {
        text::print(&report, args.model.memory_limit)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn plan(session: &Session, dims: &[(String, i64)]) -> Result<PlanReport> {
    let dims: Vec<(&str, i64)> = dims.iter().map(|(name, size)| (name.as_str(), *size)).collect();
    Ok(session.plan(&dims)?)
}

/// Returns whether a run fits in the memory available, whole or with a split batch.
fn fits(report: &PlanReport) -> bool {
    fits_whole(report) || report.batch_split.is_some()
}

/// Returns whether a run fits without splitting the batch.
fn fits_whole(report: &PlanReport) -> bool {
    report.planned_bytes <= report.available_bytes
}

fn to_json(report: &PlanReport) -> Value {
    let dims: Map<String, Value> =
        report.dims.iter().map(|(name, size)| (name.clone(), json!(size))).collect();
    let kinds = report.kinds.iter().map(|entry| {
        (entry.kind.name().to_string(), json!({"bytes": entry.bytes, "symbolic": entry.symbolic}))
    });
    let steps: Vec<Value> = report
        .steps
        .iter()
        .map(|step| json!({"node": step.node, "op": step.op, "live_bytes": step.live_bytes}))
        .collect();
    let values: Vec<Value> = report
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
    let split = report.batch_split.as_ref();
    let split = split
        .map(|split| json!({"dim": split.dim, "parts": split.parts, "planned_bytes": split.planned_bytes}));
    json!({
        "peak_bytes": report.peak_bytes,
        "planned_bytes": report.planned_bytes,
        "file_order_peak_bytes": report.file_order_bytes,
        "weights_bytes": report.weights_bytes,
        "lower_bound_bytes": report.lower_bound_bytes,
        "fits": fits(report),
        "batch_split": split,
        "unsplit": report.unsplit,
        "dims": dims,
        "kinds": kinds.collect::<Map<String, Value>>(),
        "peak_step": report.peak_step,
        "steps": steps,
        "values": values,
        "symbolic_peak": report.symbolic_peak,
    })
}
