//! Whether a plan fits, and its JSON form.

use ort_core::plan::PlanReport;
use serde_json::{Map, Value, json};

/// Returns whether a run fits in the memory available, whole or with a split batch.
pub(crate) fn fits(report: &PlanReport) -> bool {
    fits_whole(report) || report.batch_split.is_some()
}

/// Returns whether a run fits without splitting the batch.
fn fits_whole(report: &PlanReport) -> bool {
    report.planned_bytes <= report.available_bytes
}

/// Returns a plan as the JSON object that `ort plan --json` prints.
pub fn plan_json(report: &PlanReport) -> Value {
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
