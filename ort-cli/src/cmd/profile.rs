//! `ort profile`: time and memory per operator and node.

use std::collections::BTreeMap;
use std::io::Write;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use ort_runtime::{EventMemory, Profile, ProfileEvent, RunOptions, Value};
use serde_json::json;

use crate::args::{ModelArgs, human_bytes, parts, table};
use crate::inputs::{explained, gather};
use crate::numbers::{positive, whole};
use crate::output::{say, write_file};

/// Profiles a model: time per operator.
#[derive(Args)]
pub(crate) struct ProfileArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Runs to average over, after as many warm-up runs.
    #[arg(long, value_name = "N", default_value = "10", value_parser = positive::<NonZeroUsize>)]
    runs: NonZeroUsize,
    /// Number of nodes to list, slowest first.
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = whole::<usize>)]
    nodes: usize,
    /// Write the events of the last run in Chrome's trace format.
    #[arg(long, value_name = "FILE.json")]
    trace: Option<PathBuf>,
}

pub(crate) fn run(args: &ProfileArgs) -> Result<ExitCode> {
    let model = args.model.load_for_output(args.trace.as_deref())?;
    let session = args.model.session(&model)?;
    let inputs = gather(&args.model, &model)?;
    let given: Vec<(&str, Value)> =
        inputs.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    let runs = args.runs.get();
    // The warm-up also allocates the memory that the measured runs reuse.
    for _ in 0..runs {
        session.run(&given).map_err(|problem| explained(&args.model, &inputs, problem))?;
    }
    let profile = Profile::new();
    let options = RunOptions { profile: Some(&profile), ..RunOptions::default() };
    for _ in 0..runs {
        session.run_with(&given, &options)?;
    }
    let events = profile.events();
    print_tables(&events, runs, args.nodes)?;
    say!("\n{}", parts(&session.memory()))?;
    if let Some(path) = &args.trace {
        // Every run records the same number of events.
        let last = events.get(events.len() - events.len() / runs..).unwrap_or(&events);
        let trace: Vec<_> = last.iter().flat_map(trace_events).collect();
        let text = json!({ "traceEvents": trace, "displayTimeUnit": "ms" }).to_string();
        write_file(path, |file| Ok(file.write_all(text.as_bytes())?))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the trace events of a node: its time as a span, and its live bytes as a counter.
fn trace_events(event: &ProfileEvent) -> Vec<serde_json::Value> {
    let microseconds = event.start.as_secs_f64() * 1e6;
    let EventMemory { allocated, freed, live } = event.memory;
    // In Chrome's format `X` is a complete event, and `C` a counter; times are microseconds.
    let mut events = vec![json!({
        "name": event.node,
        "cat": event.op,
        "ph": "X",
        "pid": 1,
        "tid": 1,
        "ts": microseconds,
        "dur": event.duration.as_secs_f64() * 1e6,
        "args": { "allocated": allocated, "freed": freed, "live": live, "kernels": event.kernels },
    })];
    // The memory of a subgraph is part of the memory of its node. A counter for both would jump.
    if event.depth == 0 {
        let counter =
            json!({ "name": "memory", "ph": "C", "pid": 1, "ts": microseconds, "args": { "live": live } });
        events.push(counter);
    }
    events
}

/// Returns the self time of each event: its duration without the nodes of its subgraphs, which have
/// events of their own.
fn own_times(events: &[ProfileEvent]) -> Vec<Duration> {
    // The time at each depth since the last event of a smaller depth. Events are in the order in
    // which they ended, so the nodes of a body come before the node that it belongs to.
    let mut depths: Vec<Duration> = Vec::new();
    let own = |event: &ProfileEvent| {
        depths.resize(depths.len().max(event.depth + 1), Duration::ZERO);
        let inner: Duration = depths.drain(event.depth + 1..).sum();
        depths.last_mut().into_iter().for_each(|sum| *sum += event.duration);
        event.duration.saturating_sub(inner)
    };
    events.iter().map(own).collect()
}

/// Prints the time per operator, and the slowest `nodes` nodes. Times are self times, and means
/// over `runs`.
pub(super) fn print_tables(events: &[ProfileEvent], runs: usize, nodes: usize) -> Result<()> {
    let mut by_op: BTreeMap<&str, (usize, f64)> = BTreeMap::new();
    let mut by_node: BTreeMap<(&str, &str), (f64, &ProfileEvent)> = BTreeMap::new();
    for (event, time) in events.iter().zip(own_times(events)) {
        let milliseconds = time.as_secs_f64() * 1e3 / runs as f64;
        let entry = by_op.entry(event.op).or_default();
        entry.0 += 1;
        entry.1 += milliseconds;
        let (time, last) = by_node.entry((&event.node, event.op)).or_insert((0.0, event));
        // Times add up; memory and kernels are those of the last run.
        (*time, *last) = (*time + milliseconds, event);
    }
    let total: f64 = by_op.values().map(|(_, time)| time).sum();
    let mut sorted: Vec<_> = by_op.into_iter().collect();
    sorted.sort_by(|a, b| b.1.1.total_cmp(&a.1.1));
    let mut rows = table(&["operator", "nodes", "ms", "share"]);
    for (op, (count, time)) in sorted {
        rows.add_row([
            op.to_string(),
            // The profile holds the events of all runs.
            (count / runs).to_string(),
            format!("{time:.3}"),
            // All times may be 0 on a coarse clock.
            format!("{:.1} %", 100.0 * time / total.max(f64::MIN_POSITIVE)),
        ]);
    }
    rows.add_row(["total".to_string(), String::new(), format!("{total:.3}"), String::new()]);
    say!("{rows}\n")?;
    let mut sorted: Vec<_> = by_node.into_iter().collect();
    sorted.sort_by(|a, b| b.1.0.total_cmp(&a.1.0));
    // Not every provider reports its kernels. Without any, drop the column.
    let has_kernels = events.iter().any(|event| event.kernels.is_some());
    let headings = ["node", "operator", "ms", "allocated", "freed", "alive", "kernels"];
    let shown = headings.len() - usize::from(!has_kernels);
    let mut rows = table(headings.get(..shown).unwrap_or(&headings));
    for ((node, op), (time, event)) in sorted.into_iter().take(nodes) {
        let EventMemory { allocated, freed, live } = event.memory;
        let [allocated, freed, live] = [allocated, freed, live].map(human_bytes);
        let kernels = event.kernels.clone().unwrap_or_default();
        let row = [node.to_string(), op.to_string(), format!("{time:.3}"), allocated, freed, live, kernels];
        rows.add_row(row.into_iter().take(shown));
    }
    say!("{rows}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nodes_of_a_body_count_once() {
        let nodes = [("Add", 2, 1), ("If", 1, 4), ("Mul", 1, 2), ("Loop", 0, 10), ("Relu", 0, 5)];
        let event = |(op, depth, milliseconds): (&'static str, usize, u64)| ProfileEvent {
            node: op.to_lowercase(),
            op,
            provider: "cpu",
            inputs: Vec::new(),
            outputs: Vec::new(),
            start: Duration::ZERO,
            duration: Duration::from_millis(milliseconds),
            memory: EventMemory::default(),
            depth,
            kernels: None,
        };
        let own = own_times(&nodes.map(event));
        assert_eq!(own, [1, 3, 2, 4, 5].map(Duration::from_millis));
    }
}
