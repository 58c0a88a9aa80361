//! `ort providers`: the execution providers of this binary and the state of their devices.

use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use ort_runtime::ep::{ExecutionProvider, provider_libraries, providers};
use serde_json::json;

use crate::args::table;
use crate::output::{say, say_json};

/// Lists the execution providers of this binary and of the libraries in ORT_PROVIDER_PATH, and
/// whether they work here.
#[derive(Args)]
pub(crate) struct ProvidersArgs {
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &ProvidersArgs) -> Result<ExitCode> {
    let mut rows = table(&["provider", "device", "facts"]);
    let mut list = Vec::new();
    let mut found: Vec<(String, ort_runtime::Result<&dyn ExecutionProvider>)> =
        providers().into_iter().map(|provider| (provider.name().to_string(), Ok(provider))).collect();
    found.extend(provider_libraries().into_iter().map(|(path, provider)| {
        let name =
            provider.as_ref().map_or_else(|_| path.display().to_string(), |own| own.name().to_string());
        (name, provider)
    }));
    for (name, provider) in found {
        match provider.and_then(|provider| provider.devices()) {
            Ok(devices) => {
                for device in devices {
                    let facts: Vec<String> =
                        device.facts.iter().map(|(name, value)| format!("{name}: {value}")).collect();
                    list.push(json!({"provider": name, "device": device.name, "facts": facts}));
                    rows.add_row([name.clone(), device.name, facts.join("; ")]);
                }
            }
            // A provider that does not work here is listed with the reason.
            Err(problem) => {
                list.push(json!({"provider": name, "error": problem.to_string()}));
                rows.add_row([name, "none".to_string(), problem.to_string()]);
            }
        }
    }
    if args.json {
        say_json(&json!({ "providers": list }))?;
    } else {
        say!("{rows}")?;
    }
    Ok(ExitCode::SUCCESS)
}
