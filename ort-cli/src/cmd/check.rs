//! `ort check`: lists all that is unsupported or broken in a model, without running it.

use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::Args;
use ort_runtime::onnx::{ModelWarning, unknown_operators};
use ort_runtime::{Error, Model};
use serde::Serialize;

use crate::args::{ModelArgs, table};
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

/// Nodes of one operator with the same problem, or a problem of the whole model.
#[derive(Serialize)]
struct Finding {
    operator: Option<String>,
    problem: String,
    count: usize,
    first_node: Option<String>,
}

/// A deviation from the standard that loading tolerated.
#[derive(Serialize)]
struct Warning {
    kind: &'static str,
    problem: String,
    count: usize,
    first_place: String,
}

/// All findings and warnings of a model.
struct CheckReport {
    findings: Vec<Finding>,
    warnings: Vec<Warning>,
}

pub(crate) fn run(args: &CheckArgs) -> Result<ExitCode> {
    let CheckReport { findings, warnings } = find(args)?;
    if args.json {
        let report = serde_json::json!({
            "ok": findings.is_empty(),
            "findings": findings,
            "warnings": warnings,
        });
        say_json(&report)?;
    } else if findings.is_empty() {
        say!("everything in {} is supported", args.model.model.display())?;
    } else {
        let mut rows = table(&["operator", "nodes", "first node", "problem"]);
        for finding in &findings {
            rows.add_row([
                finding.operator.clone().unwrap_or_default(),
                finding.count.to_string(),
                finding.first_node.clone().unwrap_or_default(),
                finding.problem.clone(),
            ]);
        }
        say!("{rows}")?;
    }
    if !args.json && !warnings.is_empty() {
        let mut rows = table(&["warning", "places", "first place", "problem"]);
        for Warning { kind, problem, count, first_place } in &warnings {
            rows.add_row([(*kind).to_string(), count.to_string(), first_place.clone(), problem.clone()]);
        }
        say!("{rows}")?;
    }
    let Some(first) = findings.first() else { return Ok(ExitCode::SUCCESS) };
    // A problem of the whole model has no node to name.
    let place = match (&first.first_node, &first.operator) {
        (Some(node), Some(operator)) => format!("node '{node}' ({operator}): "),
        _ => String::new(),
    };
    bail!(
        "{}: {} {}, the first is {place}{}; change the model where it comes from, or try another provider with --ep",
        args.model.model.display(),
        findings.len(),
        if findings.len() == 1 { "finding" } else { "findings" },
        first.problem,
    )
}

fn find(args: &CheckArgs) -> Result<CheckReport> {
    let source = args.model.source()?;
    let broken = |problem: &Error| Finding {
        operator: None,
        problem: problem.to_string(),
        count: 1,
        first_node: None,
    };
    // A file that cannot be decoded or loaded is a finding, not a failure of this command.
    let unknown = match source.decode().and_then(|proto| unknown_operators(&proto)) {
        Ok(unknown) => unknown,
        Err(problem) => return Ok(CheckReport::of(vec![broken(&problem)])),
    };
    let mut findings = Vec::new();
    for unknown in unknown {
        // The domain of ONNX itself is an empty string, which would read as a gap.
        let domain = if unknown.domain.is_empty() { "ai.onnx" } else { &unknown.domain };
        findings.push(Finding {
            operator: Some(format!("{domain}.{}", unknown.op)),
            problem: format!("the operator is not known; {}", unknown.advice()?),
            count: unknown.count,
            first_node: Some(unknown.first_node),
        });
    }
    // A model with unknown operators cannot be loaded, so the checks below are impossible.
    if !findings.is_empty() {
        return Ok(CheckReport::of(findings));
    }
    let model = match Model::from_source(source) {
        Ok(model) => model,
        Err(problem) => return Ok(CheckReport::of(vec![broken(&problem)])),
    };
    for unclaimed in ort_runtime::placement::unclaimed(model.graph(), &args.model.providers.devices()?)? {
        findings.push(Finding {
            operator: Some(unclaimed.operator),
            problem: unclaimed.reason,
            count: unclaimed.count,
            first_node: Some(unclaimed.first_node),
        });
    }
    // Building a session finds the remaining problems. With unclaimed nodes it would only repeat
    // them.
    if findings.is_empty()
        && let Err(problem) = args.model.session(&model)
    {
        findings.push(match problem.downcast_ref::<Error>() {
            // Errors of the runtime are about the model. Any other error is about the command line.
            Some(problem) => broken(problem),
            None => return Err(problem),
        });
    }
    let warning = |warning: &ModelWarning| Warning {
        kind: warning.kind.name(),
        problem: warning.text.clone(),
        count: warning.count,
        first_place: warning.place.clone(),
    };
    Ok(CheckReport { findings, warnings: model.warnings().iter().map(warning).collect() })
}

impl CheckReport {
    /// Returns the report of a model that cannot be loaded, and so has no warnings.
    fn of(findings: Vec<Finding>) -> CheckReport {
        CheckReport { findings, warnings: Vec::new() }
    }
}
