//! `ort train --check`: reports what prevents training a model.

use std::process::ExitCode;

use anyhow::{Result, bail};
use ort_report::Table;
use ort_runtime::pass::Blocking;
use ort_runtime::train::{Trainer, TrainingGraph};
use ort_runtime::{Model, Result as Outcome};
use serde_json::{Value as Json, json};

use super::arguments::TrainArgs;
use crate::args::table;
use crate::output::{say, say_json};

/// Lists all operators without a gradient on the way to the loss. If there are none, builds the
/// whole training graph.
pub(super) fn run(args: &TrainArgs, model: &Model) -> Result<ExitCode> {
    let path = args.model.display();
    // The number of updates is unknown without data, and no gradient depends on it.
    let options = args.options(args.update.warmup_at_least())?;
    // The trainer's constructor stops at the first problem. This call finds all operators at once.
    let findings = match TrainingGraph::blocking(model, &options) {
        Ok(findings) => findings,
        Err(problem) => return refuse(args, &Err(problem)),
    };
    if !findings.is_empty() {
        if !args.results.json {
            say!("{}", rows(&findings))?;
        }
        return refuse(args, &Ok(findings));
    }
    let trainer = match Trainer::new(model, options) {
        Ok(trainer) => trainer,
        Err(problem) => return refuse(args, &Err(problem)),
    };
    let training = trainer.training_graph();
    let (trained, frozen) = (training.parameters().len(), training.frozen().len());
    let inputs = training.inputs();
    if args.results.json {
        let object =
            json!({"ok": true, "findings": [], "trained": trained, "frozen": frozen, "inputs": inputs});
        say_json(&object)?;
    } else {
        say!(
            "{path} can be trained: {trained} weights, {frozen} more stay as they are; it takes {}",
            inputs.join(", ")
        )?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints the findings as JSON if asked, and fails with them.
fn refuse(args: &TrainArgs, found: &Outcome<Vec<Blocking>>) -> Result<ExitCode> {
    let path = args.model.display();
    if args.results.json {
        let findings: Vec<Json> = match found {
            Ok(findings) => findings.iter().map(of_operator).collect(),
            Err(problem) => vec![json!({"operator": null, "problem": problem.to_string(), "nodes": []})],
        };
        say_json(&json!({"ok": false, "findings": findings}))?;
    }
    match found {
        Ok(findings) => {
            let names: Vec<&str> = findings.iter().map(|finding| finding.operator.as_str()).collect();
            bail!(
                "{path}: no gradient goes through {}; train weights behind them only, with --train or --freeze, or take another output",
                names.join(", ")
            )
        }
        Err(problem) => bail!("{path}: {problem}"),
    }
}

fn of_operator(finding: &Blocking) -> Json {
    json!({"operator": finding.operator, "problem": finding.reason, "nodes": finding.nodes})
}

fn rows(findings: &[Blocking]) -> Table {
    let mut rows = table(&["operator", "nodes", "last node", "problem"]);
    for finding in findings {
        rows.add_row([
            finding.operator.clone(),
            finding.nodes.len().to_string(),
            finding.nodes.first().cloned().unwrap_or_default(),
            finding.reason.clone(),
        ]);
    }
    rows
}
