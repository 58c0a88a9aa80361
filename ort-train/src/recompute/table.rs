//! Report of the memory optimizer, in ONNX Runtime's layout.

use super::clusters::PlanRow;
use super::level::Recompute;

/// The columns of a row.
type Row = [String; 8];

/// Formats the table: a line for the feature, and a row per plan with its name, whether it is
/// enabled, its frequency and its savings.
///
/// ```
/// use ort_train::{PlanRow, Recompute, Strategy, memory_table};
///
/// let row = PlanRow {
///     cluster: "Gelu+".to_string(),
///     strategy: Strategy::Recompute,
///     is_on: true,
///     frequency: 4,
///     max_saving: 67_043_328,
///     symbolic_saving: "65536*batch".to_string(),
/// };
/// let table = memory_table(&Recompute::Layers, &[row]);
/// assert!(table.contains("[TRANSFORMER_LAYERWISE_RECOMPUTE]"));
/// assert!(table.contains("Gelu+:1:-1  4     67,043,328"));
/// ```
pub fn memory_table(recompute: &Recompute, plans: &[PlanRow]) -> String {
    let empty = String::new;
    let mut rows: Vec<Row> = vec![[
        empty(),
        empty(),
        empty(),
        empty(),
        "Configs".to_string(),
        "Freq".to_string(),
        "Max Saving(Bytes)".to_string(),
        "Saving Symbolic(Bytes)".to_string(),
    ]];
    for (index, plan) in plans.iter().enumerate() {
        rows.push([
            format!(" - Plan {}", index + 1),
            ":".to_string(),
            on_or_off(plan.is_on),
            ":".to_string(),
            plan.to_string(),
            plan.frequency.to_string(),
            with_thousands(plan.max_saving),
            plan.symbolic_saving.clone(),
        ]);
    }
    let is_on = plans.iter().any(|plan| plan.is_on);
    let text = match (is_on, recompute) {
        (false, recompute) if *recompute != Recompute::AsLimited => {
            format!("Memory Optimization Level: [{}], which does not lower the peak and is not applied", recompute.level_name())
        }
        (false, _) => {
            "Enable with --memory-opt-level 1 or 2, or --memory-opt-config FILE; also with env ORTMODULE_MEMORY_OPT_LEVEL=1/2 or ORTMODULE_MEMORY_OPT_CONFIG=<config.json>"
                .to_string()
        }
        (true, recompute) => format!("Memory Optimization Level: [{}]", recompute.level_name()),
    };
    // The last of the eight columns needs no width, because lines are not padded at their end.
    let widths: Vec<usize> = (0..7)
        .map(|column| {
            // The feature's own line shares the columns, and its title may be the widest.
            let least = if column == 0 { "Memory Optimizer".len() } else { 0 };
            let cells = rows.iter().filter_map(|row| row.get(column)).map(String::len);
            cells.max().unwrap_or(0).max(least) + 2
        })
        .collect();
    let feature = ["Memory Optimizer".to_string(), ":".to_string(), on_or_off(is_on), ":".to_string(), text];
    let mut lines = vec![line(&feature, &widths)];
    lines.extend(rows.iter().map(|row| line(row, &widths)));
    lines.concat()
}

/// Formats cells, each padded to the width of its column.
fn line(cells: &[String], widths: &[usize]) -> String {
    let last = cells.len().saturating_sub(1);
    let cell = |(index, cell): (usize, &String)| match widths.get(index) {
        Some(width) if index < last => format!("{cell:<width$}"),
        _ => cell.clone(),
    };
    let text: String = cells.iter().enumerate().map(cell).collect();
    format!("{}\n", text.trim_end())
}

/// The status as the table shows it.
fn on_or_off(is_on: bool) -> String {
    if is_on { "ON" } else { "OFF" }.to_string()
}

/// A number with thousands separators.
fn with_thousands(number: u64) -> String {
    let digits = number.to_string();
    let grouped = digits.char_indices().map(|(place, digit)| {
        let behind = digits.len() - place;
        let separator = if place > 0 && behind.is_multiple_of(3) { "," } else { "" };
        format!("{separator}{digit}")
    });
    grouped.collect()
}
