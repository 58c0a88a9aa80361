//! `ort profile`: the time per operator.

use std::collections::BTreeMap;
use std::io::Write;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use ort_runtime::{Profile, ProfileEvent, RunOptions, Value};
use serde_json::json;

use crate::args::{ModelArgs, table};
use crate::inputs::gather;
use crate::output::{say, write_file};

/// Shows the time per operator.
#[derive(Args)]
pub(crate) struct ProfileArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Runs to average over, after as many to warm up.
    #[arg(long, value_name = "N", default_value = "10")]
    runs: NonZeroUsize,
    /// How many single nodes to list.
    #[arg(long, value_name = "N", default_value_t = 10)]
    nodes: usize,
    /// Write every event of the last run in Chrome's trace format.
    #[arg(long, value_name = "FILE.json")]
    trace: Option<PathBuf>,
}

pub(crate) fn run(args: &ProfileArgs) -> Result<ExitCode> {
    let model = args.model.load()?;
    let session = args.model.session(&model)?;
    let inputs = gather(&args.model, &model)?;
    let given: Vec<(&str, Value)> =
        inputs.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    let runs = args.runs.get();
    for _ in 0..runs {
        session.run(&given)?;
    }
    let profile = Profile::new();
    let options = RunOptions { profile: Some(&profile), ..RunOptions::default() };
    for _ in 0..runs {
        session.run_with(&given, &options)?;
    }
    let events = profile.events();
    print_tables(&events, runs, args.nodes)?;
    if let Some(path) = &args.trace {
        let last = events.get(events.len() - events.len() / runs..).unwrap_or(&events);
        let trace: Vec<_> = last.iter().map(trace_event).collect();
        let text = json!({ "traceEvents": trace, "displayTimeUnit": "ms" }).to_string();
        write_file(path, |file| Ok(file.write_all(text.as_bytes())?))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn trace_event(event: &ProfileEvent) -> serde_json::Value {
    json!({
        "name": event.node,
        "cat": event.op,
        "ph": "X",
        "pid": 1,
        "tid": 1,
        "ts": event.start.as_secs_f64() * 1e6,
        "dur": event.duration.as_secs_f64() * 1e6,
    })
}

fn print_tables(events: &[ProfileEvent], runs: usize, nodes: usize) -> Result<()> {
    let mut by_op: BTreeMap<&str, (usize, f64)> = BTreeMap::new();
    let mut by_node: BTreeMap<(&str, &str), f64> = BTreeMap::new();
    for event in events {
        let milliseconds = event.duration.as_secs_f64() * 1e3 / runs as f64;
        let entry = by_op.entry(event.op).or_default();
        entry.0 += 1;
        entry.1 += milliseconds;
        *by_node.entry((&event.node, event.op)).or_default() += milliseconds;
    }
    let total: f64 = by_op.values().map(|(_, time)| time).sum();
    let mut sorted: Vec<_> = by_op.into_iter().collect();
    sorted.sort_by(|a, b| b.1.1.total_cmp(&a.1.1));
    let mut rows = table(&["operator", "nodes", "ms", "share"]);
    for (op, (count, time)) in sorted {
        rows.add_row([
            op.to_string(),
            (count / runs).to_string(),
            format!("{time:.3}"),
            format!("{:.1} %", 100.0 * time / total.max(f64::MIN_POSITIVE)),
        ]);
    }
    rows.add_row(["total".to_string(), String::new(), format!("{total:.3}"), String::new()]);
    say!("{rows}\n")?;
    let mut sorted: Vec<_> = by_node.into_iter().collect();
    sorted.sort_by(|a, b| b.1.total_cmp(&a.1));
    let mut rows = table(&["node", "operator", "ms"]);
    for ((node, op), time) in sorted.into_iter().take(nodes) {
        rows.add_row([node.to_string(), op.to_string(), format!("{time:.3}")]);
    }
    say!("{rows}")
}
