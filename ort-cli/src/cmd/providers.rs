//! `ort providers`: what this program can run on.

use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use ort_runtime::ep::providers;
use serde_json::json;

use crate::args::table;
use crate::output::say;

/// Lists the execution providers of this program, and which of them work here.
#[derive(Args)]
pub(crate) struct ProvidersArgs {
    /// One JSON object.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &ProvidersArgs) -> Result<ExitCode> {
    let mut rows = table(&["provider", "device", "facts"]);
    let mut list = Vec::new();
    for provider in providers() {
        match provider.devices() {
            Ok(devices) => {
                for device in devices {
                    let facts: Vec<String> =
                        device.facts.iter().map(|(name, value)| format!("{name}: {value}")).collect();
                    list.push(json!({"provider": provider.name(), "device": device.name, "facts": facts}));
                    rows.add_row([provider.name().to_string(), device.name, facts.join("; ")]);
                }
            }
            Err(problem) => {
                list.push(json!({"provider": provider.name(), "error": problem.to_string()}));
                rows.add_row([provider.name().to_string(), "none".to_string(), problem.to_string()]);
            }
        }
    }
    if args.json {
        say!("{}", json!({ "providers": list }))?;
    } else {
        say!("{rows}")?;
    }
    Ok(ExitCode::SUCCESS)
}
