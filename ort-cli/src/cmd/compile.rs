//! `ort compile`: writes the ready-to-map form of a model for this machine's providers.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::Args;
use ort_runtime::onnx::{FileAccess, Source};
use ort_runtime::rewrite::{Level, Optimizer};
use ort_runtime::{Model, Session};

use crate::args::{PrecisionArg, human_bytes, level, threads};
use crate::output::say;
use crate::providers::ProviderArgs;

/// Writes the model with its packed weights and folded constants into one file, which is mapped
/// when it is loaded.
#[derive(Args)]
pub(crate) struct CompileArgs {
    /// The model file.
    input: PathBuf,
    /// The file to write; it appears whole or not at all.
    output: PathBuf,
    #[command(flatten)]
    providers: ProviderArgs,
    /// Threads that pack [default: the cores this process may use].
    #[arg(long, value_name = "N", value_parser = threads)]
    threads: Option<usize>,
    /// How the CPU provider multiplies float matrices; bf16 needs a CPU with AVX512-BF16.
    #[arg(long, value_enum, default_value_t = PrecisionArg::Fp32)]
    precision: PrecisionArg,
    /// How much of the graph may be rewritten.
    #[arg(long, value_name = "LEVEL", default_value = "all", value_parser = level)]
    opt_level: Level,
    /// A rewrite rule that is left out.
    #[arg(long = "without-rule", value_name = "RULE")]
    without_rules: Vec<String>,
    /// Refuse what ONNX does not allow but ONNX Runtime runs, instead of warning of it.
    #[arg(long)]
    strict: bool,
}

pub(crate) fn run(args: &CompileArgs) -> Result<ExitCode> {
    if args.input.canonicalize().ok() == args.output.canonicalize().ok() && args.output.exists() {
        bail!("{} would replace the model that is read; give another file to write", args.output.display());
    }
    let model = Model::from_source(Source::open(&args.input, FileAccess::default())?.strict(args.strict))?;
    let optimizer =
        Optimizer { level: args.opt_level, disabled: args.without_rules.clone(), ..Optimizer::default() };
    let mut builder = Session::builder(&model).precision(args.precision.into()).optimizer(optimizer);
    builder = args.providers.request(builder)?;
    if let Some(threads) = args.threads {
        builder = builder.threads(threads);
    }
    builder.save_compiled(&args.output)?;
    // A device or a pipe does not tell what was written into it.
    let file = args.output.metadata().ok().filter(|metadata| metadata.is_file());
    let size = file.map_or_else(String::new, |file| format!("{} of ", human_bytes(file.len() as usize)));
    say!("{size}model and packed weights written to {}", args.output.display())?;
    Ok(ExitCode::SUCCESS)
}
