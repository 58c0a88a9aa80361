//! `cargo xtask quantize-bench`: accuracy, memory and time of quantized models, ours and those of
//! onnxruntime.quantization, against the bars of a table.
//!
//! The script makes the data, with seeds of its own and from what the machine has; a bar whose data
//! or model is missing is left out with the reason. Only trained models say something about
//! accuracy; those with random weights are for memory and time.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use comfy_table::Table;
use serde::Deserialize;

use crate::models;
use crate::python::Python;
use crate::table;
use crate::workspace::{Workspace, describe};

/// The bars.
const BARS: &str = "data/quantize_bars.json";
/// The models that only this command needs, and the packages that they come in.
const MODELS: &str = "data/quantize_models.json";
const WHEELS: &str = "python/quantize_wheels.txt";

/// What to measure.
#[derive(clap::Args)]
pub(crate) struct QuantizeBenchOptions {
    /// Measure only these bars, such as A1.
    #[arg(long = "only", value_name = "BAR")]
    only: Vec<String>,
    /// Do not run onnxruntime.quantization, which takes most of the time.
    #[arg(long)]
    without_other: bool,
}

/// A bar of the table. Only the script reads the other fields.
#[derive(Deserialize)]
struct Bar {
    bar: String,
    model: String,
}

/// A row of the script's output.
#[derive(Deserialize)]
struct Row {
    bar: String,
    what: String,
    limit: String,
    ours: Option<String>,
    other: Option<String>,
    /// Absent from a bar that was left out.
    met: Option<bool>,
    note: String,
}

/// Measures and prints the table.
pub(crate) fn run(workspace: &Workspace, options: &QuantizeBenchOptions) -> Result<()> {
    let bars: Vec<Bar> = read(&workspace.own(BARS))?;
    if let Some(unknown) = options.only.iter().find(|name| !bars.iter().any(|bar| bar.bar == **name)) {
        bail!("no bar is named `{unknown}` in {BARS}");
    }
    let is_chosen = |bar: &&Bar| options.only.is_empty() || options.only.contains(&bar.bar);
    let names = bars.iter().filter(is_chosen).map(|bar| bar.model.as_str());
    let python = Python::open_for_quantize_bench(workspace)?;
    make_models(workspace, &python, names.collect())?;
    let ort = workspace.build_ort()?;
    let mut command = python.script("quantize_bench.py");
    command.arg(workspace.own(BARS)).arg(ort).arg(models::folder(workspace));
    command.arg(workspace.target.join("quantize"));
    if !options.only.is_empty() {
        command.arg("--only").args(&options.only);
    }
    if options.without_other {
        command.arg("--without-other");
    }
    let rows = rows(&mut command)?;
    print(&rows);
    Ok(())
}

/// Makes the models of the chosen bars, those of the common table and our own.
fn make_models(workspace: &Workspace, python: &Python, names: BTreeSet<&str>) -> Result<()> {
    #[derive(Deserialize)]
    struct Model {
        name: String,
    }
    let own: Vec<Model> = read(&workspace.own(MODELS))?;
    let is_own = |name: &str| own.iter().any(|model| model.name == name);
    // Products of a single operator are made in place.
    let is_trained = |name: &str| ["digits", "gpt"].contains(&name);
    let others = names.iter().filter(|name| !name.is_empty() && !is_trained(name) && !is_own(name));
    let others: Vec<String> = others.map(|name| (*name).to_owned()).collect();
    if !others.is_empty() {
        models::make(workspace, python, &others)?;
    }
    if names.into_iter().any(is_own) {
        models::make_of(workspace, python, &workspace.own(MODELS), &workspace.own(WHEELS), &[])?;
    }
    Ok(())
}

fn read<T: serde::de::DeserializeOwned>(path: &Path) -> Result<T> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    serde_json::from_str(&text).with_context(|| format!("cannot read {}", path.display()))
}

/// Runs the script, and reports each row as it comes.
fn rows(command: &mut Command) -> Result<Vec<Row>> {
    eprintln!("$ {}", describe(command));
    let mut child = command
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {}", describe(command)))?;
    let output = child.stdout.take().context("the script has no output")?;
    let mut rows = Vec::new();
    for line in BufReader::new(output).lines() {
        let line = line.context("cannot read the script's output")?;
        let row: Row = serde_json::from_str(&line).with_context(|| format!("no row of a table: {line}"))?;
        eprintln!("{} {}: {} {}", row.bar, row.what, row.ours.as_deref().unwrap_or("-"), verdict(&row));
        rows.push(row);
    }
    let status = child.wait().context("cannot wait for the script")?;
    if !status.success() {
        bail!("`{}` failed ({status})", describe(command));
    }
    Ok(rows)
}

fn verdict(row: &Row) -> &'static str {
    match row.met {
        Some(true) => "met",
        Some(false) => "MISSED",
        None => "left out",
    }
}

fn print(rows: &[Row]) {
    let mut bars: Table =
        table::new(&["bar", "what", "limit", "ours", "onnxruntime.quantization", "verdict", "note"]);
    for row in rows {
        let cell = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".to_owned());
        bars.add_row([
            row.bar.clone(),
            row.what.clone(),
            row.limit.clone(),
            cell(&row.ours),
            cell(&row.other),
            verdict(row).to_owned(),
            row.note.clone(),
        ]);
    }
    println!("{bars}");
    let count = |met: Option<bool>| rows.iter().filter(|row| row.met == met).count();
    println!("{} met, {} missed, {} left out", count(Some(true)), count(Some(false)), count(None));
}
