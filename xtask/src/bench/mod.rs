//! `cargo xtask bench`: timings of ours, ONNX Runtime and OpenVINO.
//!
//! The runtimes run in turn within one invocation, each in its own process, so that a noisy machine
//! disturbs all of them alike.

mod callers;
mod kernels;
mod limits;
mod runtime;
mod tables;
mod train;

use anyhow::{Result, bail};
use clap::ValueEnum;

use crate::compare::{Cases, chosen_cases, make_inputs, prepare};
use crate::models;
use crate::python::Python;
use crate::workspace::Workspace;

pub(crate) use runtime::{Report, Runtime, Side, Timing, Tools, check, parse};
pub(crate) use tables::{decimals, mebibytes, milliseconds};

use limits::Limits;
use tables::{Row, Style};

/// What to time, and for how long.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Time only cases, models or kernels with this name [default: the usual selection].
    #[arg(long = "only", value_name = "NAME")]
    only: Vec<String>,
    /// Time each runtime for this many seconds.
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// Run this many rounds of one runtime after the other; the best round of each counts.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Use this many threads inside one operator.
    #[arg(long = "threads", value_name = "N", default_values_t = [1, 2])]
    threads: Vec<usize>,
    /// Time ours and ONNX Runtime only.
    #[arg(long)]
    skip_openvino: bool,
    /// Multiply floats in this type in ours and OpenVINO; ONNX Runtime always uses float32.
    #[arg(long, value_enum, default_value_t = Precision::F32)]
    precision: Precision,
    /// Time models quantized by ONNX Runtime's tools instead of float32 ones.
    #[arg(long, conflicts_with_all = ["kernels", "callers"])]
    quantized: bool,
    /// Time single operators, in the sizes that models use.
    #[arg(long, conflicts_with = "callers")]
    kernels: bool,
    /// Measure the CPU time of a mostly idle session and the throughput of concurrent callers.
    #[arg(long)]
    callers: bool,
    /// Time training steps of ours, PyTorch and ONNX Runtime.
    #[arg(long, conflicts_with_all = ["kernels", "callers", "quantized", "precision"])]
    train: bool,
    /// Print a Markdown table for the README.
    #[arg(long, conflicts_with_all = ["json", "kernels", "callers"])]
    markdown: bool,
    /// Print one JSON object instead of tables.
    #[arg(long, conflicts_with = "callers")]
    json: bool,
    /// Pass a further argument to ours, such as `--arg=--no-mmap`.
    #[arg(long = "arg", value_name = "ARG", allow_hyphen_values = true)]
    arguments: Vec<String>,
}

/// The values of `--precision`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Precision {
    /// float32 throughout.
    F32,
    /// bfloat16 multiplies with float32 accumulators: OpenVINO's default if the processor has bf16
    /// instructions.
    Bf16,
}

impl Options {
    /// The runtimes in the order of their columns.
    fn runtimes(&self) -> &'static [Runtime] {
        let all = &[Runtime::Ours, Runtime::OnnxRuntime, Runtime::OpenVino];
        if self.skip_openvino { &all[..2] } else { all }
    }

    fn tools(&self, workspace: &Workspace, python: Python) -> Result<Tools> {
        let mut tools = Tools::new(workspace, python)?;
        if self.precision == Precision::Bf16 {
            tools.openvino_precision = "bf16";
            tools.arguments.push("--precision=bf16".to_owned());
        }
        tools.arguments.extend(self.arguments.iter().cloned());
        Ok(tools)
    }

    fn style(&self) -> Style {
        match (self.json, self.markdown) {
            (true, _) => Style::Json,
            (_, true) => Style::Markdown,
            _ => Style::Aligned,
        }
    }
}

/// Times what the options select and prints it.
pub(crate) fn run(workspace: &Workspace, options: &Options) -> Result<()> {
    check(options.rounds, options.seconds)?;
    if options.threads.contains(&0) {
        bail!("--threads must be over zero");
    }
    if options.train {
        return train::run(workspace, options);
    }
    // OpenVINO, and the tools that quantize models, are in the bench requirements only.
    let python = if options.skip_openvino && !options.quantized {
        Python::open(workspace)?
    } else {
        Python::open_for_bench(workspace)?
    };
    if options.callers {
        return callers::run(workspace, options, python);
    }
    if options.kernels {
        return kernels::run(workspace, options, python);
    }
    let cases = if options.quantized { quantized_cases(workspace) } else { Cases::standard(workspace) };
    let mut chosen = chosen_cases(&cases, &options.only)?;
    if options.only.is_empty() {
        chosen.retain(|case| case.bench);
    }
    if options.quantized {
        let wanted = |name: &str| chosen.iter().any(|case| case.model == name);
        models::convert(workspace, &python, &cases.table, &cases.models, wanted)?;
        make_inputs(&python, &cases, &chosen)?;
    } else {
        prepare(workspace, &python, &cases, &chosen)?;
    }
    let tools = options.tools(workspace, python)?;
    let limits = Limits::measure(&tools.ort, &options.threads)?;
    limits.iter().for_each(|limits| eprintln!("{}", limits.describe()));

    let skeletons = models::skeletons(workspace)?;
    let mut rows: Vec<Row> = Vec::new();
    for case in &chosen {
        for &threads in &options.threads {
            let timing = Timing {
                model: cases.model(case),
                inputs: cases.folder.join(&case.name).join("inputs.npz"),
                threads,
                seconds: options.seconds,
                rows: None,
                loads: 2,
            };
            let outcome = timing.in_turn(&tools, options.runtimes(), options.rounds);
            let (sides, problem) = match outcome {
                Ok(sides) => (sides, None),
                Err(error) => (Vec::new(), Some(format!("{error:#}"))),
            };
            let row = Row {
                name: case.name.clone(),
                threads,
                is_skeleton: skeletons.contains(&case.model),
                file_bytes: timing.model.metadata().map_or(0, |file| file.len()),
                flops: limits::at(&limits, threads)?.flops,
                sides,
                problem,
            };
            eprintln!("{}", row.describe());
            rows.push(row);
        }
    }
    tables::print(&rows, &limits, options.style())
}

/// The cases whose models are quantized.
fn quantized_cases(workspace: &Workspace) -> Cases {
    Cases {
        table: workspace.own("data/quantized.json"),
        models: models::folder(workspace).join("quantized"),
        folder: workspace.target.join("compare"),
    }
}
