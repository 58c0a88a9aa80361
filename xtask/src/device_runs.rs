//! `cargo xtask device-runs`: runs each model many times on a GPU, with other inputs and shapes
//! each time, and compares the outputs with the CPU's.

use std::fs;
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::cuda_driver::cuda_driver;
use crate::models;
use crate::python::Python;
use crate::workspace::{Workspace, run as run_command};

const TABLE: &str = "data/device_runs.json";

/// What to run.
#[derive(clap::Args)]
pub(crate) struct DeviceRunsOptions {
    /// Run only these models.
    #[arg(long = "only", value_name = "NAME")]
    only: Vec<String>,
    /// Run each model this often.
    #[arg(long, default_value_t = 100)]
    runs: usize,
    /// Stay within the limits that every WebGPU implementation has.
    #[arg(long)]
    minimum_limits: bool,
    /// Run on the provider cuda instead of wgpu; without a GPU on a slow emulator.
    #[arg(long, conflicts_with = "minimum_limits")]
    cuda: bool,
}

#[derive(Deserialize)]
struct RunTable {
    runs: Vec<DeviceRow>,
}

/// A model with the inputs that its runs cycle through.
#[derive(Deserialize)]
struct DeviceRow {
    model: String,
    given: Vec<String>,
    /// The tolerance relative to the largest value; the example's default if absent.
    tolerance: Option<f64>,
    /// Whether the host may run only shape arithmetic.
    #[serde(default)]
    only_shapes_on_host: bool,
}

/// Runs the chosen models, a line for each; an error names those that differ.
pub(crate) fn run(workspace: &Workspace, options: &DeviceRunsOptions) -> Result<()> {
    let path = workspace.own(TABLE);
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let table: RunTable =
        serde_json::from_str(&text).with_context(|| format!("cannot read {}", path.display()))?;
    let is_wanted = |name: &str| options.only.is_empty() || options.only.iter().any(|only| only == name);
    let rows: Vec<&DeviceRow> = table.runs.iter().filter(|row| is_wanted(&row.model)).collect();
    if let Some(unknown) = options.only.iter().find(|only| !rows.iter().any(|row| row.model == **only)) {
        bail!("no model in {} is named `{unknown}`", path.display());
    }
    let converted = models::folder(workspace).join("converted");
    let python = Python::open_for_bench(workspace)?;
    models::make(workspace, &python, &[])?;
    models::convert(workspace, &python, &path, &converted, is_wanted)?;
    // The emulator stands in for NVIDIA's driver unless the environment names a library.
    let driver = if options.cuda { cuda_driver(workspace)? } else { None };
    let example = workspace.build_example(if options.cuda { "cuda_models" } else { "device_models" })?;
    // Run all models before failing, so that one error names every model that differs.
    let mut wrong = Vec::new();
    for row in rows {
        // A model of the table is either made or converted, and these are in different folders.
        let own = models::folder(workspace).join(format!("{}.onnx", row.model));
        let model = if own.exists() { own } else { converted.join(format!("{}.onnx", row.model)) };
        let mut command = Command::new(&example);
        if options.cuda {
            command.arg("runs").envs(driver.clone());
        } else {
            command.env("ORT_WGPU_LIMITS", if options.minimum_limits { "minimum" } else { "adapter" });
        }
        command.arg("--runs").arg(options.runs.to_string());
        command.args(row.only_shapes_on_host.then_some("--only-shapes-on-host"));
        if let Some(tolerance) = row.tolerance {
            command.arg("--tolerance").arg(tolerance.to_string());
        }
        if let Err(problem) = run_command(command.arg(model).args(&row.given)) {
            wrong.push(format!("{}: {problem:#}", row.model));
        }
    }
    if !wrong.is_empty() {
        bail!("not the CPU's answers:\n{}", wrong.join("\n"));
    }
    Ok(())
}
