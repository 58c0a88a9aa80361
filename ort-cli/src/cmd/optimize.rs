//! `ort optimize`: writes the optimized graph as standard ONNX.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use ort_report::in_line;
use ort_runtime::ir::Graph;
use ort_runtime::onnx::{FileAccess, Source, Weights, save};
use ort_runtime::rewrite::{Level, Optimizer, Report};
use ort_runtime::{Model, Session};

use crate::args::{level, table};
use crate::numbers::whole;
use crate::output::{data_path, listed, say};

/// Writes the optimized model as standard ONNX, and lists the rewrites.
#[derive(Args)]
pub(crate) struct OptimizeArgs {
    /// The model file.
    input: PathBuf,
    /// Output file, written atomically.
    output: PathBuf,
    /// Optimization level. Any runtime loads `basic`; ONNX Runtime also loads `extended`.
    #[arg(long, value_name = "LEVEL", default_value = "extended", value_parser = level)]
    level: Level,
    /// Disable a rewrite rule.
    #[arg(long = "without-rule", value_name = "RULE")]
    without_rules: Vec<String>,
    /// Stop after N rewrites (for bisecting).
    #[arg(long, value_name = "N", value_parser = whole::<usize>)]
    rewrites: Option<usize>,
    /// Store the weights in OUTPUT.data beside the model; required above 2 GiB.
    #[arg(long)]
    external_data: bool,
    /// Assume that dimensions of equal name have equal size, which ONNX does not guarantee: fewer
    /// nodes, but wrong results for runs that break the assumption.
    #[arg(long)]
    trust_dimension_names: bool,
    /// Reject what ONNX forbids but ONNX Runtime accepts, instead of warning.
    #[arg(long)]
    strict: bool,
}

pub(crate) fn run(args: &OptimizeArgs) -> Result<ExitCode> {
    let source = Source::open(&args.input, FileAccess::default())?.strict(args.strict);
    let beside = args.external_data.then(|| data_path(&args.output));
    source.check_outputs([&args.output].into_iter().chain(&beside).map(PathBuf::as_path))?;
    let model = Model::from_source(source)?;
    let optimizer =
        Optimizer { level: args.level, disabled: args.without_rules.clone(), stop_after: args.rewrites };
    let builder = Session::builder(&model).trust_dimension_names(args.trust_dimension_names);
    let (graph, report) = builder.optimizer(optimizer).optimized()?;
    // Small tensors stay in the model file, where other readers need them to infer shapes.
    let weights = if args.external_data { Weights::Beside { least: 1024 } } else { Weights::Inside };
    save(&graph, model.info(), &args.output, &weights)?;
    print_report(&report)?;
    say!(
        "{} nodes became {}; written to {}",
        model.graph().nodes.len(),
        graph.nodes.len(),
        args.output.display()
    )?;
    let repeated = repeated_names(model.graph());
    if !args.trust_dimension_names && !repeated.is_empty() {
        say!(
            "dimensions of the same name ({}) were not assumed to have equal sizes; if they do in every \
             run, --trust-dimension-names may leave fewer nodes",
            listed(&repeated)
        )?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the names that several dimensions of the inputs share, sorted.
fn repeated_names(graph: &Graph) -> Vec<String> {
    let shapes = graph.inputs.iter().filter_map(|id| graph.value(*id).ty.shape());
    let mut counts = BTreeMap::<&str, usize>::new();
    for name in shapes.flatten().filter_map(|dim| dim.as_symbol()?.name()) {
        *counts.entry(name).or_default() += 1;
    }
    // A name with one dimension makes no claim about equal sizes.
    counts.retain(|_, count| *count > 1);
    counts.into_keys().map(|name| in_line(name).into_owned()).collect()
}

fn print_report(report: &Report) -> Result<()> {
    let mut rows = table(&["rewrite", "nodes"]);
    let passes = [
        ("constants folded", report.folded),
        ("common subexpressions removed", report.common),
        ("dead nodes removed", report.unread),
    ];
    let rules = report.hits().iter().copied();
    for (name, count) in rules.chain(passes).filter(|(_, count)| *count > 0) {
        rows.add_row([name.to_string(), count.to_string()]);
    }
    say!("{rows}")?;
    Ok(())
}
