//! The command line of ort-runtime.

mod cmd;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// An ONNX runtime that knows its memory before it runs.
#[derive(Parser)]
#[command(name = "ort", version, about, arg_required_else_help = false)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    /// Runs ONNX test-case folders, recursively.
    Test(cmd::test::TestArgs),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let outcome = match cli.command {
        Some(Command::Test(args)) => cmd::test::run(&args),
        None => Ok(ExitCode::SUCCESS),
    };
    outcome.unwrap_or_else(|problem| {
        eprintln!("error: {problem:#}");
        ExitCode::FAILURE
    })
}
