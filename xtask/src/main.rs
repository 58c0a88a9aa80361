//! The repository's own commands; `cargo xtask help` lists them.
//!
//! Each command is a module with one public `run`. Their data is beside this crate: `data/`
//! (models, comparison cases), `python/` (the scripts that need the ONNX packages) and
//! `conformance.ignore`.
#![forbid(unsafe_code)]

mod allocators;
mod arm;
mod artifacts;
mod bench;
mod capi;
mod cargo_tests;
mod chart;
mod cluster;
mod compare;
mod conformance;
mod cuda_driver;
mod cuda_kernels;
mod device_runs;
mod dist;
mod features;
mod fuzz;
mod fuzz_models;
mod gpu;
mod header;
mod memory;
mod models;
mod ops;
mod package;
mod python;
mod python_package;
mod quantize_bench;
mod quick;
mod reference;
mod shared_build;
mod soak;
mod summary;
mod table;
mod test;
mod tidy;
mod torch;
mod train_reference;
mod trees;
mod vector_loops;
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
    /// Use this `ort` binary instead of building one, for example that of an older commit.
    #[arg(long, global = true, value_name = "FILE")]
    ort: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run every check, the quick ones first: format, lints, tests, models, conformance, memory.
    Test(test::TestOptions),
    /// Make the models that the other commands run, in target/models.
    Models(models::ModelsOptions),
    /// Compare our outputs with ONNX Runtime's on every model.
    Compare(compare::CompareOptions),
    /// Compare the planned memory of each model with the measured one.
    Memory(memory::MemoryOptions),
    /// Run the onnx package's test cases and compare the failures with conformance.ignore.
    Conformance(conformance::ConformanceOptions),
    /// Compile the CUDA kernels of ort-ep-cuda to PTX, or check that the PTX is up to date.
    CudaKernels(cuda_kernels::CudaKernelsOptions),
    /// Package the CUDA tests and benchmarks for a machine with an NVIDIA GPU.
    Gpu(gpu::GpuOptions),
    /// Run models many times on a GPU with varying inputs, and compare with the CPU.
    DeviceRuns(device_runs::DeviceRunsOptions),
    /// Compare operators and scikit-learn models with other implementations, on cases from tables.
    Reference(reference::ReferenceOptions),
    /// Check each combination of the facade's cargo features, and each crate alone.
    Features,
    /// Run the tests of the CPU kernels for AArch64, under emulation.
    Arm(arm::ArmOptions),
    /// Write docs/OPS.md, the operators with their types by provider, from the registry.
    Ops(ops::OpsOptions),
    /// Draw docs/performance.svg from the table of docs/performance.md.
    Chart(chart::ChartOptions),
    /// Generate ort-core/include/ort_provider.h, the C header of provider libraries.
    Header(header::HeaderOptions),
    /// Package the crates as `cargo publish` would, and check what is in the packages.
    Package,
    /// Build, check and test the Python package `ort_runtime`.
    Python(python_package::PythonOptions),
    /// Run the Python package on Ray and Spark, with two nodes each on this machine.
    Cluster(cluster::ClusterOptions),
    /// Test the backend of `torch.compile` and `ORTModule` with PyTorch.
    Torch(torch::TorchOptions),
    /// Build the wheels of the Python package to target/dist, and check their sizes and tags.
    Dist(dist::DistOptions),
    /// Run the fuzz targets on a nightly compiler, each for a while.
    Fuzz(fuzz::FuzzOptions),
    /// Fuzz with random models against ONNX's reference evaluator, and reduce those that fail.
    FuzzModels(fuzz_models::FuzzModelsOptions),
    /// Load, run and drop models many times and check that memory stays within bounds.
    Soak(soak::SoakOptions),
    /// Measure memory and run time of `ort` with each heap.
    Allocators(allocators::AllocatorsOptions),
    /// Check the style rules that no compiler checks.
    Tidy,
    /// Build the C API library, check it, run its clients and time its calls.
    Capi,
    /// Time ours and other runtimes in turn on the same models.
    Bench(bench::BenchOptions),
    /// Measure quantized models against the bars of accuracy, memory and time.
    QuantizeBench(quantize_bench::QuantizeBenchOptions),
    /// Time ours and ONNX Runtime in turn on tree ensembles fitted by scikit-learn.
    Trees(trees::TreesOptions),
    /// Write the reference models and results of the training tests to ort-train/tests/data.
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
        Command::Arm(options) => arm::run(&workspace, &options),
        Command::Chart(options) => chart::run(&workspace, &options),
        Command::Header(options) => header::run(&workspace, &options),
        Command::Ops(options) => ops::run(&workspace, &options),
        Command::Package => package::run(&workspace),
        Command::Python(options) => python_package::run(&workspace, &options).map(drop),
        Command::Cluster(options) => cluster::run(&workspace, &options),
        Command::Torch(options) => torch::run(&workspace, options),
        Command::Dist(options) => dist::run(&workspace, &options),
        Command::Fuzz(options) => fuzz::run(&workspace, &options),
        Command::FuzzModels(options) => fuzz_models::run(&workspace, &options).map(drop),
        Command::Soak(options) => soak::run(&workspace, &options).map(drop),
        Command::Allocators(options) => allocators::run(&workspace, &options),
        Command::Tidy => tidy::run(&workspace),
        Command::Capi => capi::run(&workspace),
        Command::Bench(options) => bench::run(&workspace, &options),
        Command::QuantizeBench(options) => quantize_bench::run(&workspace, &options),
        Command::Trees(options) => trees::run(&workspace, &options),
        Command::TrainReference => train_reference::run(&workspace),
    }
}

fn main() -> ExitCode {
    match dispatch(Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // The alternate form prints the chain of causes on one line.
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
