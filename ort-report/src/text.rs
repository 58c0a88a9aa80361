//! The memory plan as text: its numbers, then tables of the peak by kind and by value.

use std::fmt::Display;

use ort_alloc::human_bytes;
use ort_core::MemoryShortage;
use ort_core::plan::PlanReport;
use ort_core::session::BatchSplit;

use crate::plan::fits;
use crate::table::{Table, in_line};

/// What a plan leaves out, if its peak is not known.
pub(crate) const OPEN: &str = "some value sizes depend on data and are not included";

/// The most rows of the table of values.
const MOST_ROWS: usize = 16;

/// Returns a plan as text, without a newline at the end. With a memory limit it says whether the
/// run fits.
pub fn plan_text(report: &PlanReport, limit: Option<usize>) -> String {
    let mut lines = Vec::new();
    if !report.dims.is_empty() {
        lines.push(format!("dimensions        {}", in_line(&sizes_text(&report.dims))));
    }
    let open = if report.peak_bytes.is_none() { format!(" known; {OPEN}") } else { String::new() };
    lines.push(format!("activations peak  {}{open}", bytes(report.planned_bytes)));
    lines.push(format!("in file order     {}", bytes(report.file_order_bytes)));
    lines.push(format!("lower bound       {}", bytes(report.lower_bound_bytes)));
    lines.push(format!("weights           {}", bytes(report.weights_bytes)));
    if let Some(limit) = limit {
        lines.push(format!(
            "memory limit      {}, of which {} are left for a run: {}",
            human_bytes(limit),
            human_bytes(report.available_bytes),
            verdict(report)
        ));
    }
    if let Some(split) = &report.batch_split {
        let words = split_in_words(split);
        lines.push(format!("{}, which takes {}", in_line(&words), bytes(split.planned_bytes)));
    } else if let (Some(why), true) = (&report.unsplit, !fits(report)) {
        lines.push(in_line(why).into_owned());
    }
    if let Some(expression) = &report.symbolic_peak {
        lines.push(format!("peak, symbolic    {}", in_line(expression)));
    }
    let at = report.steps.get(report.peak_step);
    let at = at.map_or_else(String::new, |step| {
        format!(", the peak at {}: '{}' ({})", report.peak_step, in_line(&step.node), in_line(&step.op))
    });
    lines.push(format!("steps             {}{at}", report.steps.len()));
    lines.push(format!("\n{}", kinds(report)));
    lines.push(format!("\n{}", largest_values(report)));
    lines.join("\n")
}

/// Returns whether the run fits, and otherwise the smallest limit for it.
fn verdict(report: &PlanReport) -> String {
    if let Some(split) = &report.batch_split {
        return format!("it fits only as {} items", parts_text(split));
    }
    if fits(report) {
        return "it fits".to_owned();
    }
    let least = report.shortage.as_ref().map(MemoryShortage::sufficient_limit);
    let at_least = if report.peak_bytes.is_none() { "at least " } else { "" };
    // The smallest need that was found is below the peak of the whole batch only if it is split.
    let is_split =
        report.shortage.as_ref().zip(report.peak_bytes).is_some_and(|(short, peak)| short.needed < peak);
    let (parts, splits) =
        if is_split { (", even in parts", ", which suffices for the smallest parts") } else { ("", "") };
    match least {
        None => "it does not fit".to_owned(),
        Some(least) => {
            format!("it does not fit{parts}; raise the limit to {at_least}{}{splits}", bytes(least))
        }
    }
}

fn bytes(bytes: usize) -> String {
    format!("{} ({bytes} bytes)", human_bytes(bytes))
}

fn kinds(report: &PlanReport) -> Table {
    let mut rows = Table::new(&["kind", "bytes", "", "symbolic"]);
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
pub fn largest_values(report: &PlanReport) -> Table {
    let total: usize = report.largest.iter().map(|(_, bytes)| *bytes).sum();
    let share = |bytes: usize| format!("{:.1}%", bytes as f64 * 100.0 / total.max(1) as f64);
    let mut rows = Table::new(&["alive at the peak", "bytes", "", "share"]);
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

/// Formats sizes of dimensions: `batch=8 sequence=128`. The names are not escaped.
pub fn sizes_text<N: Display>(sizes: &[(N, i64)]) -> String {
    sizes.iter().map(|(name, size)| format!("{name}={size}")).collect::<Vec<_>>().join(" ")
}

/// Formats a batch split: `batch split: 'batch' of 8 runs as 3 + 3 + 2`. The name is not escaped.
pub fn split_in_words(split: &BatchSplit) -> String {
    let count: usize = split.parts.iter().sum();
    format!("batch split: '{}' of {count} runs as {}", split.dim, parts_text(split))
}

/// Formats the items of each part: `3 + 3 + 2`.
pub(crate) fn parts_text(split: &BatchSplit) -> String {
    // A large batch may run as hundreds of parts, so only the first few are listed.
    const MOST: usize = 8;
    let parts: Vec<String> = split.parts.iter().take(MOST).map(ToString::to_string).collect();
    let more = split.parts.len().saturating_sub(MOST);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("{}{more}", parts.join(" + "))
}
