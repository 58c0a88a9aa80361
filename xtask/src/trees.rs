//! `cargo xtask trees`: timings of tree ensembles, ours and ONNX Runtime in turn.
//!
//! Each run takes other rows than the previous one. On repeated rows the branch predictor learns
//! the paths through trees that are walked with branches, which no real workload allows. `--same`
//! times that case, too.

use std::fs;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::bench::{Isa, Runtime, Side, Timing, Tools, check, decimals, milliseconds};
use crate::python::Python;
use crate::table;
use crate::workspace::{Workspace, run as run_command};

/// The models, the batch sizes, and the data that the models are fitted to.
const TABLE: &str = "data/trees.json";

#[derive(Deserialize)]
struct Trees {
    batches: Vec<usize>,
    models: Vec<TreeModel>,
}

#[derive(Deserialize)]
struct TreeModel {
    name: String,
}

/// What to time, and for how long.
#[derive(clap::Args)]
pub(crate) struct TreesOptions {
    /// Time only these models.
    #[arg(long = "only", value_name = "NAME")]
    only: Vec<String>,
    /// Time only these batch sizes [default: those of the table].
    #[arg(long = "batch", value_name = "N")]
    batches: Vec<usize>,
    /// Time each runtime for this many seconds.
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// Run this many rounds of ours and then ONNX Runtime; the best round of each counts.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Use this many threads inside one operator.
    #[arg(long = "threads", value_name = "N", default_values_t = [1, 2])]
    threads: Vec<usize>,
    /// Take the same rows in each run.
    #[arg(long)]
    same: bool,
}

/// Fits the missing models, times them, and prints a table. A time is that of one call of a
/// session's `run`: from Rust for ours, from Python for ONNX Runtime. The model `identity` shows
/// the overhead of an empty call.
pub(crate) fn run(workspace: &Workspace, options: &TreesOptions) -> Result<()> {
    check(options.rounds, options.seconds)?;
    let path = workspace.own(TABLE);
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let trees: Trees =
        serde_json::from_str(&text).with_context(|| format!("cannot read {}", path.display()))?;
    if let Some(unknown) =
        options.only.iter().find(|name| !trees.models.iter().any(|model| model.name == **name))
    {
        bail!("no model is named `{unknown}` in {}", path.display());
    }
    let batches = if options.batches.is_empty() { &trees.batches } else { &options.batches };
    // The script writes the rows of the table's batches only.
    if let Some(batch) = batches.iter().find(|batch| !trees.batches.contains(batch)) {
        bail!("a batch of {batch} rows is not in {}", path.display());
    }
    let python = Python::open(workspace)?;
    let folder = workspace.target.join("trees");
    run_command(python.script("make_trees.py").arg(&path).arg(&folder).args(&options.only))?;
    let tools = Tools::new(workspace, python)?;
    // Two files for each batch: `same` has just its rows, and `rows` has more if these are few.
    let rows = if options.same { "same" } else { "rows" };

    let mut times =
        table::new(&["model", "batch", "threads", "ours us", "ORT us", "ratio", "load ms", "ORT load"]);
    for model in
        trees.models.iter().filter(|model| options.only.is_empty() || options.only.contains(&model.name))
    {
        for &batch in batches {
            for &threads in &options.threads {
                let timing = Timing {
                    model: folder.join(format!("{}.onnx", model.name)),
                    inputs: folder.join(format!("{rows}_{batch}.npz")),
                    isa: Isa::Native,
                    threads,
                    seconds: options.seconds,
                    rows: Some(batch),
                    loads: 0,
                };
                let runtimes = [Runtime::Ours, Runtime::OnnxRuntime];
                let sides = timing.in_turn(&tools, &runtimes, options.rounds)?;
                times.add_row(row(&model.name, [batch, threads], &sides));
                eprintln!("timed {} with batches of {batch} and {threads} threads", model.name);
            }
        }
    }
    println!("{times}");
    Ok(())
}

fn row(name: &str, [batch, threads]: [usize; 2], sides: &[Option<Side>]) -> Vec<String> {
    // The sides have the order of the runtimes: ours, then ONNX Runtime's.
    let side = |index: usize| sides.get(index).and_then(Option::as_ref);
    let median = |index: usize| side(index).map(|side| side.median_ms);
    let load = |index: usize| milliseconds(side(index).and_then(|side| side.load_ms));
    let microseconds = |index: usize| median(index).map_or("-".to_owned(), |ms| format!("{:.1}", ms * 1e3));
    vec![
        name.to_owned(),
        batch.to_string(),
        threads.to_string(),
        microseconds(0),
        microseconds(1),
        decimals(median(0).zip(median(1)).map(|(ours, other)| ours / other)),
        load(0),
        load(1),
    ]
}
