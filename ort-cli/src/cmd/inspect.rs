//! `ort inspect`: inputs, outputs, operators and weights of a model, and its placement.

use std::collections::BTreeMap;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use ort_runtime::ir::Graph;
use ort_runtime::{Model, NAME_BYTES, NodePlacement, ValueSpec, shown};
use serde_json::json;

use crate::args::{ModelArgs, human_bytes, table};
use crate::output::{say, say_json};

/// Shows a model's inputs, outputs, opsets, operators, parameters and weights.
#[derive(Args)]
pub(crate) struct InspectArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    /// Print the canonical graph as text, with inferred types.
    #[arg(long)]
    graph: bool,
    /// Show which provider runs which operators, why, and why those before it in --ep do not.
    #[arg(long, conflicts_with = "graph")]
    claims: bool,
}

pub(crate) fn run(args: &InspectArgs) -> Result<ExitCode> {
    let model = args.model.load()?;
    if args.graph {
        crate::output::print(format_args!("{}", model.graph()))?;
        return Ok(ExitCode::SUCCESS);
    }
    if args.claims {
        print_claims(&args.model.session(&model)?.placement(), args.json)?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut operators = BTreeMap::new();
    let mut parameters = 0;
    count(model.graph(), &mut operators, &mut parameters);
    let outputs = outputs(&model);
    if args.json {
        print_json(&model, &outputs, &operators, parameters)?;
    } else {
        print_tables(&model, &outputs, &operators, parameters)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn outputs(model: &Model) -> Vec<ValueSpec> {
    let graph = model.graph();
    let spec = |&id: &ort_runtime::ir::ValueId| ValueSpec {
        name: graph.value(id).name.to_string(),
        ty: graph.value(id).ty.clone(),
        has_default: false,
    };
    graph.outputs.iter().map(spec).collect()
}

fn count(graph: &Graph, operators: &mut BTreeMap<String, usize>, parameters: &mut usize) {
    // Weights of subgraphs count as well, because branches and loop bodies have their own.
    *parameters += graph.constants.values().map(|tensor| tensor.element_count()).sum::<usize>();
    for node in &graph.nodes {
        let domain = node.spec.domain;
        let name = if domain.is_empty() {
            node.spec.name.to_string()
        } else {
            format!("{domain}.{}", node.spec.name)
        };
        *operators.entry(name).or_default() += 1;
        for subgraph in &node.subgraphs {
            count(&subgraph.graph, operators, parameters);
        }
    }
}

/// Prints the placement. The table has one row for all nodes of an operator that run on the same
/// provider for the same reasons.
fn print_claims(claims: &[NodePlacement], json: bool) -> Result<()> {
    if json {
        let claim = |claim: &NodePlacement| {
            let refusals: BTreeMap<&str, &str> =
                claim.refusals.iter().map(|(name, why)| (*name, why.as_str())).collect();
            json!({
                "node": claim.node,
                "operator": claim.operator,
                "provider": claim.provider,
                "reason": claim.reason.to_string(),
                "refusals": refusals,
            })
        };
        return say_json(&json!({"claims": claims.iter().map(claim).collect::<Vec<_>>()}));
    }
    // A sorted map keeps the order of rows the same from run to run.
    let mut groups: BTreeMap<(&str, &str, String, String), (usize, &str)> = BTreeMap::new();
    for claim in claims {
        let why = claim.refusals.iter().map(|(name, why)| format!("{name}: {why}"));
        let why = why.collect::<Vec<_>>().join("; ");
        let first = (0, claim.node.as_str());
        let here = claim.reason.to_string();
        groups.entry((claim.provider, &claim.operator, here, why)).or_insert(first).0 += 1;
    }
    let mut rows = table(&["provider", "operator", "nodes", "first node", "why", "why not before"]);
    for ((provider, operator, here, why), (nodes, first)) in &groups {
        rows.add_row([provider, operator, nodes.to_string().as_str(), first, here, why]);
    }
    say!("{rows}")
}

fn print_json(
    model: &Model,
    outputs: &[ValueSpec],
    operators: &BTreeMap<String, usize>,
    parameters: usize,
) -> Result<()> {
    let spec = |spec: &ValueSpec| json!({"name": spec.name, "type": spec.ty.to_string()});
    let info = model.info();
    let opsets: BTreeMap<&str, i64> =
        info.opsets.iter().map(|(domain, version)| (domain.as_str(), *version)).collect();
    let report = json!({
        "inputs": model.inputs().iter().map(spec).collect::<Vec<_>>(),
        "outputs": outputs.iter().map(spec).collect::<Vec<_>>(),
        "ir_version": info.ir_version,
        "opsets": opsets,
        // An empty version would leave a trailing space.
        "producer": format!("{} {}", info.producer_name, info.producer_version).trim(),
        "operators": operators,
        "nodes": operators.values().sum::<usize>(),
        "parameters": parameters,
        "weight_bytes": model.graph().weight_bytes(),
    });
    say_json(&report)
}

fn print_tables(
    model: &Model,
    outputs: &[ValueSpec],
    operators: &BTreeMap<String, usize>,
    parameters: usize,
) -> Result<()> {
    let info = model.info();
    let opsets: Vec<String> = info
        .opsets
        .iter()
        .map(|(domain, version)| format!("{} {version}", if domain.is_empty() { "ai.onnx" } else { domain }))
        .collect();
    let line = |text: &str| shown(text, NAME_BYTES).into_owned();
    say!("producer    {}", line(&format!("{} {}", info.producer_name, info.producer_version)))?;
    say!("opsets      {} (IR {})", line(&opsets.join(", ")), info.ir_version)?;
    say!("parameters  {parameters}, {} of weights", human_bytes(model.graph().weight_bytes()))?;
    let mut rows = table(&["", "name", "type"]);
    for (kind, specs) in [("input", model.inputs().as_slice()), ("output", outputs)] {
        for spec in specs {
            rows.add_row([kind.to_string(), spec.name.clone(), spec.ty.to_string()]);
        }
    }
    say!("\n{rows}")?;
    let mut rows = table(&["operator", "nodes"]);
    let mut sorted: Vec<_> = operators.iter().collect();
    // The sort is stable, so operators with equal counts stay in alphabetical order.
    sorted.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
    for (name, count) in sorted {
        rows.add_row([name.clone(), count.to_string()]);
    }
    say!("\n{rows}")
}
