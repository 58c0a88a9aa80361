//! `ort check`: lists all that is unsupported or broken in a model, without running it.

use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::Args;

use crate::args::ModelArgs;
use crate::output::{say, say_json};

/// Lists everything unsupported or broken in a model; exit code 1 if there is anything. Warnings
/// about what runs nevertheless come after it.
#[derive(Args)]
pub(crate) struct CheckArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &CheckArgs) -> Result<ExitCode> {
    let devices = || args.model.providers.devices();
    let report = ort_report::check(args.model.source()?, devices, |model| args.model.builder(model))?;
    if args.json {
        say_json(&report.to_json())?;
    } else {
        if report.findings.is_empty() {
            say!("everything in {} is supported", args.model.model.display())?;
        }
        for rows in report.tables() {
            say!("{rows}")?;
        }
    }
    let Some(first) = report.findings.first() else { return Ok(ExitCode::SUCCESS) };
    let found = match report.findings.len() {
        1 => "1 finding:".to_string(),
        count => format!("{count} findings, the first is"),
    };
    // Another provider helps only for what the ones at hand do not run.
    let advice =
        if report.is_of_providers { "; try another provider with --ep, or change the model" } else { "" };
    bail!("{}: {found} {first}{advice}", args.model.model.display())
}
