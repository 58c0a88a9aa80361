//! The command line of ort-runtime.
//!
//! Each command is a file under `cmd`. The modules beside it are shared by the commands.

#![forbid(unsafe_code)]
// `println!` panics if the reader of a pipe has left. Results are printed with `say!` instead.
#![warn(clippy::print_stdout, clippy::print_stderr)]
// Tests may panic: there a panic is an ordinary failure. In the program it would be a bug.
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
mod comparison;
mod distribution;
mod help;
mod inputs;
mod logging;
mod numbers;
mod operations;
mod output;
mod panics;
mod processor;
mod providers;
mod resident;
mod samples;
mod usage;

use std::io::Write;
use std::process::ExitCode;

use anyhow::Result;
use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, CommandFactory, FromArgMatches, Parser, Subcommand};
use tracing_subscriber::filter::LevelFilter;

use crate::panics::guard;

/// The system allocator, or that of the cargo feature `mimalloc` or `jemalloc`.
#[global_allocator]
static HEAP: ort_runtime::Heap = ort_runtime::Heap;

/// An ONNX runtime that computes the peak memory of a run before it starts.
///
/// Without a command, run the demo: a small model and a few images embedded in the binary.
#[derive(Parser)]
#[command(name = "ort", version, about, after_help = help::ALL, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    /// Log more to standard error (-vv for debug messages).
    #[arg(short, long, action = clap::ArgAction::Count, global = true)]
    verbose: u8,
    /// Log only errors to standard error.
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    quiet: bool,
}

#[derive(Subcommand)]
enum Command {
    /// Classify the embedded digit images with the embedded model.
    #[command(after_help = help::DEMO)]
    Demo,
    /// Run a model once and print each output's name, type, shape and a summary.
    #[command(after_help = help::RUN)]
    Run(cmd::run::RunArgs),
    /// Benchmark a model: load, warm up, measure.
    #[command(after_help = help::BENCH)]
    Bench(cmd::bench::BenchArgs),
    /// Show a model's inputs, outputs, opsets, operators, parameters and weights.
    #[command(after_help = help::INSPECT)]
    Inspect(cmd::inspect::InspectArgs),
    /// Check a model without running it: list everything unsupported or broken.
    #[command(after_help = help::CHECK)]
    Check(cmd::check::CheckArgs),
    /// Show the memory plan of a run without running it.
    #[command(after_help = help::PLAN)]
    Plan(cmd::plan::PlanArgs),
    /// Generate text with a language model.
    #[command(after_help = help::GENERATE)]
    Generate(Box<cmd::generate::GenerateArgs>),
    /// Write the optimized model as standard ONNX.
    #[command(after_help = help::OPTIMIZE)]
    Optimize(cmd::optimize::OptimizeArgs),
    /// Write a model with smaller weights: integers of 8, 4 or 2 bits, or 16-bit floats.
    #[command(after_help = help::QUANTIZE)]
    Quantize(Box<cmd::quantize::QuantizeArgs>),
    /// Write a model with zeros among its weights, or without some of its channels.
    #[command(after_help = help::PRUNE)]
    Prune(Box<cmd::prune::PruneArgs>),
    /// Compile a model: pack its weights into one file that loads by mapping.
    #[command(after_help = help::COMPILE)]
    Compile(cmd::compile::CompileArgs),
    /// Profile a model: time per operator.
    #[command(after_help = help::PROFILE)]
    Profile(cmd::profile::ProfileArgs),
    /// Soak-test a model: load, run and drop it many times, and measure what memory remains.
    #[command(after_help = help::SOAK)]
    Soak(cmd::soak::SoakArgs),
    /// Train a model on the arrays of a NumPy archive.
    #[command(after_help = help::TRAIN)]
    Train(Box<cmd::train::TrainArgs>),
    /// Run ONNX test-case folders and compare the outputs.
    #[command(after_help = help::TEST)]
    Test(cmd::test::TestArgs),
    /// List the execution providers of this binary and whether they work here.
    #[command(after_help = help::PROVIDERS)]
    Providers(cmd::providers::ProvidersArgs),
    /// Measure this CPU's peak FLOP/s and copy bandwidth.
    #[command(hide = true)]
    Limits(cmd::limits::LimitsArgs),
}

fn main() -> ExitCode {
    let cli = match parse() {
        Ok(cli) => cli,
        Err(problem) => return refuse(&with_right_tip(problem)),
    };
    // Warnings are shown by default, because they mean that a result may be unexpected.
    let level = match (cli.quiet, cli.verbose) {
        (true, _) => LevelFilter::ERROR,
        (false, 0) => LevelFilter::WARN,
        (false, 1) => LevelFilter::INFO,
        (false, _) => LevelFilter::DEBUG,
    };
    // Logging starts before the command, so that warnings from loading are not lost.
    logging::start(level);
    // Turn `SIGXFSZ` into an I/O error: `ulimit -f` must fail the write, not kill the process.
    ort_runtime::fail_writes_beyond_file_size_limit();
    // `guard` puts the panic's message into the error. Its location only matters for debugging.
    std::panic::set_hook(Box::new(|panic| tracing::debug!("{panic}")));
    let outcome = guard(|| run(cli.command.unwrap_or(Command::Demo)));
    outcome.unwrap_or_else(|problem| {
        // A pipe such as `ort .. | head` is not a failure.
        if problem.is::<output::ReaderLeft>() {
            return ExitCode::SUCCESS;
        }
        // Scripts read the last line, so the error must be one line. If standard error is closed,
        // there is no way to report anything.
        let text = format!("{problem:#}");
        let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        // 64 bytes remain for the prefix `error: ` within the bound of a line.
        let line = format!("error: {}", ort_runtime::shown(&lines.join("; "), output::LINE_BYTES - 64));
        let _ = writeln!(std::io::stderr(), "{line}");
        if problem.is::<usage::WrongUsage>() { ExitCode::from(2) } else { ExitCode::FAILURE }
    })
}

/// Parses the command line.
fn parse() -> Result<Cli, clap::Error> {
    // The parsers of the values say what is wrong with a negative number. clap would take it for a
    // flag that does not exist.
    let with_negatives = |arg: Arg| {
        let takes_value = !arg.is_positional() && arg.get_action().takes_values();
        if takes_value { arg.allow_negative_numbers(true) } else { arg }
    };
    let mut command = Cli::command().mut_subcommands(|command| command.mut_args(with_negatives));
    let mut matches = command.try_get_matches_from_mut(std::env::args_os())?;
    Cli::from_arg_matches_mut(&mut matches).map_err(|problem| problem.format(&mut command))
}

/// Replaces clap's tip for an unknown flag, to pass it as a value after `--`: no command has a use
/// for such a value.
fn with_right_tip(mut problem: clap::Error) -> clap::Error {
    if problem.kind() != ErrorKind::UnknownArgument {
        return problem;
    }
    problem.remove(ContextKind::Suggested);
    let tip = match problem.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(flag)) if ["-o", "--output"].contains(&flag.as_str()) => {
            "`ort optimize IN OUT` and `ort compile IN OUT` take the output file as the second argument, \
             `ort run` takes --outputs FILE.npz"
        }
        Some(ContextValue::String(flag)) if is_number(flag) => "a value must not be negative",
        _ => return problem,
    };
    problem.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![StyledStr::from(tip)]));
    problem
}

/// Whether an unknown flag is the begin of a negative number, such as `-3` of `-3MiB`.
fn is_number(flag: &str) -> bool {
    flag.strip_prefix('-').and_then(|rest| rest.chars().next()).is_some_and(|first| first.is_ascii_digit())
}

/// Prints clap's error and returns its exit code. clap echoes arguments unchanged, so terminal
/// control characters are escaped here.
fn refuse(problem: &clap::Error) -> ExitCode {
    let text = problem.render().to_string();
    // Ignore write errors: if standard error is closed, no one reads it.
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
        Command::Generate(args) => cmd::generate::run(&args),
        Command::Optimize(args) => cmd::optimize::run(&args),
        Command::Quantize(args) => cmd::quantize::run(&args),
        Command::Prune(args) => cmd::prune::run(&args),
        Command::Compile(args) => cmd::compile::run(&args),
        Command::Profile(args) => cmd::profile::run(&args),
        Command::Soak(args) => cmd::soak::run(&args),
        Command::Train(args) => cmd::train::run(&args),
        Command::Test(args) => cmd::test::run(&args),
        Command::Providers(args) => cmd::providers::run(&args),
        Command::Limits(args) => cmd::limits::run(&args),
    }
}
