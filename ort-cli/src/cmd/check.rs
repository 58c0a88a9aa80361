//! `ort check`: everything in a model that is unsupported or broken, all at once.

use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::Args;
use ort_runtime::onnx::unknown_operators;
use ort_runtime::{Error, Model};
use serde::Serialize;

use crate::args::{ModelArgs, table};
use crate::output::{say, say_json};

/// Lists everything in a model that is unsupported or broken; exit code 1 if there is anything.
#[derive(Args)]
pub(crate) struct CheckArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// One JSON object.
    #[arg(long)]
    json: bool,
}

/// One finding.
#[derive(Serialize)]
struct Finding {
    operator: Option<String>,
    problem: String,
    count: usize,
    first_node: Option<String>,
}

pub(crate) fn run(args: &CheckArgs) -> Result<ExitCode> {
    let findings = find(args)?;
    if args.json {
        say_json(&serde_json::json!({"ok": findings.is_empty(), "findings": findings}))?;
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
    let Some(first) = findings.first() else { return Ok(ExitCode::SUCCESS) };
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

fn find(args: &CheckArgs) -> Result<Vec<Finding>> {
    let source = args.model.source()?;
    let broken = |problem: &Error| Finding {
        operator: None,
        problem: problem.to_string(),
        count: 1,
        first_node: None,
    };
    let unknown = match source.decode().and_then(|proto| unknown_operators(&proto)) {
        Ok(unknown) => unknown,
        Err(problem) => return Ok(vec![broken(&problem)]),
    };
    let mut findings = Vec::new();
    for unknown in unknown {
        let domain = if unknown.domain.is_empty() { "ai.onnx" } else { &unknown.domain };
        findings.push(Finding {
            operator: Some(format!("{domain}.{}", unknown.op)),
            problem: format!("the operator is not known; {}", unknown.advice()?),
            count: unknown.count,
            first_node: Some(unknown.first_node),
        });
    }
    if !findings.is_empty() {
        return Ok(findings);
    }
    let model = match Model::from_source(source) {
        Ok(model) => model,
        Err(problem) => return Ok(vec![broken(&problem)]),
    };
    for unclaimed in ort_runtime::ep::unclaimed(model.graph(), &args.model.providers.devices()?)? {
        findings.push(Finding {
            operator: Some(unclaimed.operator),
            problem: unclaimed.reason,
            count: unclaimed.count,
            first_node: Some(unclaimed.first_node),
        });
    }
    if findings.is_empty()
        && let Err(problem) = args.model.session(&model)
    {
        findings.push(match problem.downcast_ref::<Error>() {
            Some(problem) => broken(problem),
            None => return Err(problem),
        });
    }
    Ok(findings)
}
