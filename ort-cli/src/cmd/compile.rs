//! `ort compile`: writes a model with its packed weights into one file that loads by mapping.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use ort_runtime::onnx::{FileAccess, Source};
use ort_runtime::rewrite::{Level, Optimizer};
use ort_runtime::{Model, Session};

use crate::args::{PrecisionArg, human_bytes, level, threads};
use crate::output::say;
use crate::providers::ProviderArgs;

/// Compiles a model: packs its weights and folds its constants into one file that loads by mapping.
#[derive(Args)]
pub(crate) struct CompileArgs {
    /// The model file.
    input: PathBuf,
    /// Output file, written atomically.
    output: PathBuf,
    #[command(flatten)]
    providers: ProviderArgs,
    /// Threads that pack weights [default: the cores this process may use].
    #[arg(long, value_name = "N", value_parser = threads)]
    threads: Option<usize>,
    /// Precision of GEMM and convolution on the CPU; bf16 needs AVX512-BF16.
    #[arg(long, value_enum, default_value_t = PrecisionArg::Fp32)]
    precision: PrecisionArg,
    /// Graph optimization level: disabled, basic, extended or all.
    #[arg(long, value_name = "LEVEL", default_value = "all", value_parser = level)]
    opt_level: Level,
    /// Disable a rewrite rule.
    #[arg(long = "without-rule", value_name = "RULE")]
    without_rules: Vec<String>,
    /// Reject what ONNX forbids but ONNX Runtime accepts, instead of warning.
    #[arg(long)]
    strict: bool,
}

pub(crate) fn run(args: &CompileArgs) -> Result<ExitCode> {
    let source = Source::open(&args.input, FileAccess::default())?.strict(args.strict);
    source.check_outputs([args.output.as_path()])?;
    let model = Model::from_source(source)?;
    let optimizer =
        Optimizer { level: args.opt_level, disabled: args.without_rules.clone(), ..Optimizer::default() };
    let mut builder = Session::builder(&model).precision(args.precision.into()).optimizer(optimizer);
    builder = args.providers.request(builder)?;
    if let Some(threads) = args.threads {
        builder = builder.threads(threads);
    }
    builder.save_compiled(&args.output)?;
    // A device or a pipe has no length to report.
    let file = args.output.metadata().ok().filter(|metadata| metadata.is_file());
    let size = file.map_or_else(String::new, |file| format!("{} of ", human_bytes(file.len() as usize)));
    say!("{size}model and packed weights written to {}", args.output.display())?;
    Ok(ExitCode::SUCCESS)
}
