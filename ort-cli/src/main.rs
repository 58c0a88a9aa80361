//! The command line of ort-runtime: one file per command under `cmd`, what they share beside them.

#![forbid(unsafe_code)]
// What nobody reads any more is no reason to panic: results are printed with `say!`.
#![warn(clippy::print_stdout, clippy::print_stderr)]
// In tests such a panic is a failure like any other; here it would be a defect.
#![warn(
    clippy::exit,
    clippy::indexing_slicing,
    clippy::mem_forget,
    clippy::string_slice,
    clippy::unchecked_time_subtraction,
    clippy::unreachable
)]

mod args;
mod arrays;
mod cmd;
mod distribution;
mod drawing;
mod help;
mod inputs;
mod logging;
mod operations;
mod output;
mod processor;
mod providers;
mod resident;

use std::any::Any;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

use anyhow::{Result, anyhow};
use clap::{Parser, Subcommand};
use tracing_subscriber::filter::LevelFilter;

/// The system's, or that of the cargo feature `mimalloc` or `jemalloc`.
#[global_allocator]
static HEAP: ort_runtime::Heap = ort_runtime::Heap;

/// An ONNX runtime that knows its memory before it runs.
///
/// Without a command it runs the demo: a small model and a few pictures that ship inside the
/// program.
#[derive(Parser)]
#[command(name = "ort", version, about, after_help = help::ALL, max_term_width = 100)]
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
    #[command(after_help = help::DEMO)]
    Demo,
    /// Run a model once; print each output's name, type, shape and a summary.
    #[command(after_help = help::RUN)]
    Run(cmd::run::RunArgs),
    /// Load, warm up and time a model.
    #[command(after_help = help::BENCH)]
    Bench(cmd::bench::BenchArgs),
    /// Show a model's inputs, outputs, opsets, operators, parameters and weights.
    #[command(after_help = help::INSPECT)]
    Inspect(cmd::inspect::InspectArgs),
    /// List everything in a model that is unsupported or broken.
    #[command(after_help = help::CHECK)]
    Check(cmd::check::CheckArgs),
    /// Show the memory of a run before anything runs.
    #[command(after_help = help::PLAN)]
    Plan(cmd::plan::PlanArgs),
    /// Write the optimized model as standard ONNX.
    #[command(after_help = help::OPTIMIZE)]
    Optimize(cmd::optimize::OptimizeArgs),
    /// Write a model with its packed weights, ready to map.
    #[command(after_help = help::COMPILE)]
    Compile(cmd::compile::CompileArgs),
    /// Show the time per operator.
    #[command(after_help = help::PROFILE)]
    Profile(cmd::profile::ProfileArgs),
    /// Load, run and drop a model many times, and measure what memory stays.
    #[command(after_help = help::SOAK)]
    Soak(cmd::soak::SoakArgs),
    /// Train a model on the arrays of a NumPy archive.
    #[command(after_help = help::TRAIN)]
    Train(Box<cmd::train::TrainArgs>),
    /// Run ONNX test-case folders.
    #[command(after_help = help::TEST)]
    Test(cmd::test::TestArgs),
    /// List the execution providers of this program, and which of them work here.
    #[command(after_help = help::PROVIDERS)]
    Providers(cmd::providers::ProvidersArgs),
    /// Measure what this processor can do at the most.
    #[command(hide = true)]
    Limits(cmd::limits::LimitsArgs),
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(problem) => return refuse(&problem),
    };
    let level = match (cli.quiet, cli.verbose) {
        (true, _) => LevelFilter::ERROR,
        (false, 0) => LevelFilter::WARN,
        (false, 1) => LevelFilter::INFO,
        (false, _) => LevelFilter::DEBUG,
    };
    logging::start(level);
    // A limit on the size of files is an error of the file that meets it.
    ort_runtime::fail_writes_beyond_file_size_limit();
    // What a panic says is part of the error; where it happened is for those who look for it.
    std::panic::set_hook(Box::new(|panic| tracing::debug!("{panic}")));
    let outcome = guard(|| run(cli.command.unwrap_or(Command::Demo)));
    outcome.unwrap_or_else(|problem| {
        if problem.is::<output::ReaderLeft>() {
            return ExitCode::SUCCESS;
        }
        // One line, whatever the message holds. Where standard error is closed nobody can be told.
        let text = format!("{problem:#}");
        let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        let line = format!("error: {}", ort_runtime::shown(&lines.join("; "), output::LINE_BYTES - 64));
        let _ = writeln!(std::io::stderr(), "{line}");
        ExitCode::FAILURE
    })
}

/// What clap says of arguments, and the status to end with. It shows them as they are, so those
/// that steer a terminal are spelled out.
fn refuse(problem: &clap::Error) -> ExitCode {
    let text = problem.render().to_string();
    // A closed stream has no reader to tell.
    let _ = if text.chars().any(|character| character != '\n' && ort_runtime::steers(character)) {
        let lines = text.lines().map(|line| ort_runtime::shown(line, output::LINE_BYTES));
        writeln!(std::io::stderr(), "{}", lines.collect::<Vec<_>>().join("\n"))
    } else {
        problem.print()
    };
    u8::try_from(problem.exit_code()).map_or(ExitCode::FAILURE, ExitCode::from)
}

fn run(command: Command) -> Result<ExitCode> {
    match command {
        Command::Demo => cmd::demo::run(),
        Command::Run(args) => cmd::run::run(&args),
        Command::Bench(args) => cmd::bench::run(&args),
        Command::Inspect(args) => cmd::inspect::run(&args),
        Command::Check(args) => cmd::check::run(&args),
        Command::Plan(args) => cmd::plan::run(&args),
        Command::Optimize(args) => cmd::optimize::run(&args),
        Command::Compile(args) => cmd::compile::run(&args),
        Command::Profile(args) => cmd::profile::run(&args),
        Command::Soak(args) => cmd::soak::run(&args),
        Command::Train(args) => cmd::train::run(&args),
        Command::Test(args) => cmd::test::run(&args),
        Command::Providers(args) => cmd::providers::run(&args),
        Command::Limits(args) => cmd::limits::run(&args),
    }
}

/// Does some work; a panic, which is a defect of this program, becomes an error.
pub(crate) fn guard<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| Err(defect(&*panic)))
}

fn defect(panic: &(dyn Any + Send)) -> anyhow::Error {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
    anyhow!("a defect of this program: {text}; please report it with what `-vv` prints")
}
