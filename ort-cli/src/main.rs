//! The command line of ort-runtime: one file per command under `cmd`, what they share beside them.

#![forbid(unsafe_code)]
#![forbid(unsafe_code)]

mod args;
mod arrays;
mod cmd;
mod inputs;
mod resident;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tracing_subscriber::filter::LevelFilter;

/// An ONNX runtime that knows its memory before it runs.
///
/// Without a command it runs the demo: a small model and a few pictures that ship inside the program.
#[derive(Parser)]
#[command(name = "ort", version, about, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    /// More on standard error; twice for debugging.
    #[arg(short, long, action = clap::ArgAction::Count, global = true)]
    verbose: u8,
    /// Less on standard error.
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    quiet: bool,
}

#[derive(Subcommand)]
enum Command {
    /// Classify the embedded pictures of digits with the embedded model.
    Demo,
    /// Run a model once; print each output's name, type, shape and a summary.
    Run(cmd::run::RunArgs),
    /// Load, warm up and time a model.
    Bench(cmd::bench::BenchArgs),
    /// Show a model's inputs, outputs, opsets, operators, parameters and weights.
    Inspect(cmd::inspect::InspectArgs),
    /// List everything in a model that is unsupported or broken.
    Check(cmd::check::CheckArgs),
    /// Show the memory of a run before anything runs.
    Plan(cmd::plan::PlanArgs),
    /// Show the time per operator.
    Profile(cmd::profile::ProfileArgs),
    /// Run ONNX test-case folders.
    Test(cmd::test::TestArgs),
    /// List the execution providers of this program, and which of them work here.
    Providers(cmd::providers::ProvidersArgs),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let level = match (cli.quiet, cli.verbose) {
        (true, _) => LevelFilter::ERROR,
        (false, 0) => LevelFilter::WARN,
        (false, 1) => LevelFilter::INFO,
        (false, _) => LevelFilter::DEBUG,
    };
    tracing_subscriber::fmt().with_max_level(level).with_writer(std::io::stderr).without_time().init();
    let outcome = match cli.command.unwrap_or(Command::Demo) {
        Command::Demo => cmd::demo::run(),
        Command::Run(args) => cmd::run::run(&args),
        Command::Bench(args) => cmd::bench::run(&args),
        Command::Inspect(args) => cmd::inspect::run(&args),
        Command::Check(args) => cmd::check::run(&args),
        Command::Plan(args) => cmd::plan::run(&args),
        Command::Profile(args) => cmd::profile::run(&args),
        Command::Test(args) => cmd::test::run(&args),
        Command::Providers(args) => cmd::providers::run(&args),
    };
    outcome.unwrap_or_else(|problem| {
        eprintln!("error: {problem:#}");
        ExitCode::FAILURE
    })
}
