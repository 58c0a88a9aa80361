//! `ort optimize`: writes the optimized model as standard ONNX.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::Args;
use ort_runtime::Model;
use ort_runtime::Session;
use ort_runtime::onnx::{FileAccess, Source, Weights, save};
use ort_runtime::rewrite::{Level, Optimizer, Report};

use crate::args::{level, table};
use crate::output::say;

/// Writes the optimized model as standard ONNX, and lists what was rewritten.
#[derive(Args)]
pub(crate) struct OptimizeArgs {
    /// The model file.
    input: PathBuf,
    /// The file to write; it appears whole or not at all.
    output: PathBuf,
    /// How much may be rewritten. Other runtimes load what `basic` writes, ONNX Runtime what `extended` writes, too.
    #[arg(long, value_name = "LEVEL", default_value = "extended", value_parser = level)]
    level: Level,
    /// A rewrite rule that is left out.
    #[arg(long = "without-rule", value_name = "RULE")]
    without_rules: Vec<String>,
    /// Rewrite rules apply this often at most: to find the one that does harm.
    #[arg(long, value_name = "N")]
    rewrites: Option<usize>,
    /// Puts the weights into OUTPUT.data beside the model; needed beyond 2 GiB.
    #[arg(long)]
    external_data: bool,
    /// Refuse what ONNX does not allow but ONNX Runtime runs, instead of warning of it.
    #[arg(long)]
    strict: bool,
}

pub(crate) fn run(args: &OptimizeArgs) -> Result<ExitCode> {
    if args.input.canonicalize().ok() == args.output.canonicalize().ok() && args.output.exists() {
        bail!("{} would replace the model that is read; give another file to write", args.output.display());
    }
    let model = Model::from_source(Source::open(&args.input, FileAccess::default())?.strict(args.strict))?;
    let optimizer =
        Optimizer { level: args.level, disabled: args.without_rules.clone(), stop_after: args.rewrites };
    let (graph, report) = Session::builder(&model).optimizer(optimizer).optimized()?;
    let weights = if args.external_data { Weights::Beside { least: 1024 } } else { Weights::Inside };
    save(&graph, model.info(), &args.output, &weights)?;
    print_report(&report)?;
    say!(
        "{} nodes became {}; written to {}",
        model.graph().nodes.len(),
        graph.nodes.len(),
        args.output.display()
    )?;
    Ok(ExitCode::SUCCESS)
}

fn print_report(report: &Report) -> Result<()> {
    let mut rows = table(&["rewrite", "nodes"]);
    let passes = [
        ("constants folded", report.folded),
        ("computed already", report.common),
        ("read by nobody", report.unread),
    ];
    let rules = report.hits().iter().copied();
    for (name, count) in rules.chain(passes).filter(|(_, count)| *count > 0) {
        rows.add_row([name.to_string(), count.to_string()]);
    }
    say!("{rows}")?;
    Ok(())
}
