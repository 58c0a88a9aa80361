//! The memory plan as text tables.

use anyhow::Result;
use ort_runtime::plan::PlanReport;

use super::report::fits;
use crate::args::{human_bytes, split_in_words, table};
use crate::output::{Table, in_line, say};

/// The most rows of the table of values.
const MOST_ROWS: usize = 16;

pub(super) fn print(report: &PlanReport, limit: Option<usize>) -> Result<()> {
    let dims: Vec<String> = report.dims.iter().map(|(name, size)| format!("{name}={size}")).collect();
    if !dims.is_empty() {
        say!("dimensions        {}", in_line(&dims.join(" ")))?;
    }
    let open = if report.peak_bytes.is_none() { ", and what only the run can tell" } else { "" };
    say!("activations peak  {}{open}", bytes(report.planned_bytes))?;
    say!("in file order     {}", bytes(report.file_order_bytes))?;
    say!("lower bound       {}", bytes(report.lower_bound_bytes))?;
    say!("weights           {}", bytes(report.weights_bytes))?;
    if let Some(limit) = limit {
        let verdict = if fits(report) { "fits" } else { "does not fit" };
        say!(
            "memory limit      {}, of which {} are left for a run: it {verdict}",
            human_bytes(limit),
            human_bytes(report.available_bytes)
        )?;
    }
    if let Some(split) = &report.batch_split {
        say!("{}, which takes {}", split_in_words(split), bytes(split.planned_bytes))?;
    } else if let (Some(why), true) = (&report.unsplit, !fits(report)) {
        say!("{}", in_line(why))?;
    }
    if let Some(expression) = &report.symbolic_peak {
        say!("peak, symbolic    {}", in_line(expression))?;
    }
    let at = report.steps.get(report.peak_step);
    let at = at.map_or_else(String::new, |step| {
        format!(", the peak at {}: '{}' ({})", report.peak_step, in_line(&step.node), in_line(&step.op))
    });
    say!("steps             {}{at}", report.steps.len())?;
    say!("\n{}", kinds(report))?;
    say!("\n{}", largest(report))
}

fn bytes(bytes: usize) -> String {
    format!("{} ({bytes} bytes)", human_bytes(bytes))
}

fn kinds(report: &PlanReport) -> Table {
    let mut rows = table(&["kind", "bytes", "", "symbolic"]);
    for entry in &report.kinds {
        // An expression for a kind without bytes would only take space.
        let symbolic = entry.symbolic.clone().filter(|_| entry.bytes > 0).unwrap_or_default();
        rows.add_row([
            entry.kind.name().replace('_', " "),
            entry.bytes.to_string(),
            human_bytes(entry.bytes),
            symbolic,
        ]);
    }
    rows.align_right(1..3)
}

/// Returns the table of the values live at the peak, each with its share of the total.
pub(in crate::cmd) fn largest(report: &PlanReport) -> Table {
    let total: usize = report.largest.iter().map(|(_, bytes)| *bytes).sum();
    let share = |bytes: usize| format!("{:.1}%", bytes as f64 * 100.0 / total.max(1) as f64);
    let mut rows = table(&["alive at the peak", "bytes", "", "share"]);
    let mut add = |name: String, bytes: usize| {
        rows.add_row([name, bytes.to_string(), human_bytes(bytes), share(bytes)]);
    };
    for (name, bytes) in report.largest.iter().take(MOST_ROWS) {
        add(name.clone(), *bytes);
    }
    let rest = report.largest.get(MOST_ROWS..).unwrap_or(&[]);
    if !rest.is_empty() {
        add(format!("{} more", rest.len()), rest.iter().map(|(_, bytes)| bytes).sum());
    }
    rows.align_right(1..4)
}
