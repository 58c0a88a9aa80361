//! The repository's own commands: `cargo xtask help` lists them.
//!
//! Each command is a module with one public `run`. What they work on is data beside this crate:
//! `data/` (models, comparison cases), `python/` (the scripts that need the ONNX packages) and
//! `conformance.ignore`.
#![forbid(unsafe_code)]

mod allocators;
mod artifacts;
mod bench;
mod chart;
mod compare;
mod conformance;
mod cuda_driver;
mod cuda_kernels;
mod device_runs;
mod features;
mod fuzz;
mod fuzz_models;
mod gpu;
mod header;
mod memory;
mod models;
mod ops;
mod python;
mod reference;
mod soak;
mod summary;
mod table;
mod test;
mod tidy;
mod train_reference;
mod trees;
mod workspace;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

use crate::workspace::Workspace;

/// Repository commands of ort-runtime.
#[derive(Parser)]
#[command(bin_name = "cargo xtask")]
struct Arguments {
    /// Use this binary `ort` instead of building one, for example that of an older commit.
    #[arg(long, global = true, value_name = "FILE")]
    ort: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Everything that must hold, what fails early first: format, style, lints, tests, models,
    /// conformance, comparison, memory.
    Test(test::Options),
    /// Make the models that the other commands run, in target/models.
    Models(models::Options),
    /// Run the models in ONNX Runtime and in ours on the same inputs, and measure the difference.
    Compare(compare::Options),
    /// Hold the planned memory of each model against the measured one.
    Memory(memory::Options),
    /// Run the onnx package's test cases and hold the failures against conformance.ignore.
    Conformance(conformance::Options),
    /// Compile the CUDA kernels of ort-ep-cuda to PTX, or hold the PTX to their sources.
    CudaKernels(cuda_kernels::Options),
    /// Pack what runs on a machine with an NVIDIA GPU and nothing else, tests and measurements,
    /// into one folder.
    Gpu(gpu::Options),
    /// Run each model many times on a GPU, with other inputs and shapes each time, and compare with
    /// the CPU.
    DeviceRuns(device_runs::Options),
    /// Run operators on our own cases, and models of scikit-learn, and compare with ONNX Runtime,
    /// the onnx package, NumPy or scikit-learn.
    Reference(reference::Options),
    /// Check each combination of the facade's cargo features, test some of them, and check each
    /// crate alone.
    Features,
    /// Write docs/OPS.md: operator by type by provider, from the registry.
    Ops(ops::Options),
    /// Draw docs/performance.svg from the table of docs/performance.md.
    Chart(chart::Options),
    /// Write ort-core/include/ort_provider.h, the C header of provider libraries, from the records
    /// of the interface.
    Header(header::Options),
    /// Run the fuzz targets on a nightly compiler, each for a while.
    Fuzz(fuzz::Options),
    /// Run random models at every optimisation level, with several threads and under memory limits,
    /// and compare with the onnx package's reference evaluator; models that fail are reduced.
    FuzzModels(fuzz_models::Options),
    /// Load, run and drop models many times, in many shapes, from many callers, and hold what stays
    /// against bounds.
    Soak(soak::Options),
    /// Build `ort` with each heap that it can have, and measure what stays, the peaks and the times
    /// with each.
    Allocators(allocators::Options),
    /// Check the style rules that no compiler checks.
    Tidy,
    /// Time ours and ONNX Runtime in turn on the same models.
    Bench(bench::Options),
    /// Time ours and ONNX Runtime in turn on ensembles of trees that scikit-learn fits.
    Trees(trees::Options),
    /// Write the tests' models of training and what PyTorch's training of them comes to, in
    /// ort-train/tests/data.
    TrainReference,
}

fn dispatch(arguments: Arguments) -> Result<()> {
    let workspace = Workspace { ort: arguments.ort, ..Workspace::discover()? };
    match arguments.command {
        Command::Test(options) => test::run(&workspace, &options),
        Command::Models(options) => models::run(&workspace, &options),
        Command::Compare(options) => compare::run(&workspace, &options).map(drop),
        Command::Memory(options) => memory::run(&workspace, &options).map(drop),
        Command::Conformance(options) => conformance::run(&workspace, &options).map(drop),
        Command::CudaKernels(options) => cuda_kernels::run(&workspace, &options),
        Command::Gpu(options) => gpu::run(&workspace, &options),
        Command::DeviceRuns(options) => device_runs::run(&workspace, &options),
        Command::Reference(options) => reference::run(&workspace, &options).map(drop),
        Command::Features => features::run(&workspace),
        Command::Chart(options) => chart::run(&workspace, &options),
        Command::Header(options) => header::run(&workspace, &options),
        Command::Ops(options) => ops::run(&workspace, &options),
        Command::Fuzz(options) => fuzz::run(&workspace, &options),
        Command::FuzzModels(options) => fuzz_models::run(&workspace, &options).map(drop),
        Command::Soak(options) => soak::run(&workspace, &options).map(drop),
        Command::Allocators(options) => allocators::run(&workspace, &options),
        Command::Tidy => tidy::run(&workspace),
        Command::Bench(options) => bench::run(&workspace, &options),
        Command::Trees(options) => trees::run(&workspace, &options),
        Command::TrainReference => train_reference::run(&workspace),
    }
}

fn main() -> ExitCode {
    match dispatch(Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
