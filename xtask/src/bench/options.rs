//! What a benchmark times, and for how long.

use anyhow::Result;
use clap::ValueEnum;

use super::isa::Isa;
use super::runtime::{Runtime, Tools};
use super::tables::Style;
use crate::python::Python;
use crate::workspace::Workspace;

/// What to time, and for how long.
#[derive(clap::Args)]
pub(crate) struct BenchOptions {
    /// Time only cases, models or kernels with this name [default: the usual selection].
    #[arg(long = "only", value_name = "NAME")]
    pub(super) only: Vec<String>,
    /// Time each runtime for this many seconds.
    #[arg(long, default_value_t = 2.0)]
    pub(super) seconds: f64,
    /// Run this many rounds of one runtime after the other; the best round of each counts.
    #[arg(long, default_value_t = 3)]
    pub(super) rounds: usize,
    /// Use this many threads inside one operator.
    #[arg(long = "threads", value_name = "N", default_values_t = [1, 2])]
    pub(super) threads: Vec<usize>,
    /// Let the runtimes use this instruction set at most.
    #[arg(long = "isa", value_enum, default_values_t = [Isa::Native], conflicts_with_all = ["callers", "train"])]
    pub(super) isas: Vec<Isa>,
    /// Time ours and ONNX Runtime only.
    #[arg(long)]
    pub(super) skip_openvino: bool,
    /// Multiply floats in this type in ours and OpenVINO; ONNX Runtime always uses float32.
    #[arg(long, value_enum, default_value_t = Precision::F32)]
    pub(super) precision: Precision,
    /// Time models quantized by ONNX Runtime's tools instead of float32 ones.
    #[arg(long, conflicts_with_all = ["kernels", "callers"])]
    pub(super) quantized: bool,
    /// Time single operators, in the sizes that models use.
    #[arg(long, conflicts_with = "callers")]
    pub(super) kernels: bool,
    /// Measure the CPU time of a mostly idle session and the throughput of concurrent callers.
    #[arg(long)]
    pub(super) callers: bool,
    /// Time training steps of ours, PyTorch and ONNX Runtime.
    #[arg(long, conflicts_with_all = ["kernels", "callers", "quantized", "precision"])]
    pub(super) train: bool,
    /// Print a Markdown table for the README.
    #[arg(long, conflicts_with_all = ["json", "kernels", "callers"])]
    pub(super) markdown: bool,
    /// Print one JSON object instead of tables.
    #[arg(long, conflicts_with = "callers")]
    pub(super) json: bool,
    /// Pass a further argument to ours, such as `--arg=--no-mmap`.
    #[arg(long = "arg", value_name = "ARG", allow_hyphen_values = true)]
    pub(super) arguments: Vec<String>,
}

/// The values of `--precision`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Precision {
    /// float32 throughout.
    F32,
    /// bfloat16 multiplies with float32 accumulators: OpenVINO's default if the processor has bf16
    /// instructions.
    Bf16,
}

impl BenchOptions {
    /// The instruction sets and numbers of threads, in the order of the rows of a case.
    pub(super) fn settings(&self) -> Vec<(Isa, usize)> {
        self.isas.iter().flat_map(|&isa| self.threads.iter().map(move |&threads| (isa, threads))).collect()
    }

    /// The runtimes in the order of their columns.
    pub(super) fn runtimes(&self) -> &'static [Runtime] {
        let all = &[Runtime::Ours, Runtime::OnnxRuntime, Runtime::OpenVino];
        // OpenVINO is the last of all runtimes.
        if self.skip_openvino { &all[..2] } else { all }
    }

    pub(super) fn tools(&self, workspace: &Workspace, python: Python) -> Result<Tools> {
        let mut tools = Tools::new(workspace, python)?;
        // ONNX Runtime's column stays that of float32.
        if self.precision == Precision::Bf16 {
            tools.openvino_precision = "bf16";
            tools.arguments.push("--precision=bf16".to_owned());
        }
        tools.arguments.extend(self.arguments.iter().cloned());
        Ok(tools)
    }

    pub(super) fn style(&self) -> Style {
        match (self.json, self.markdown) {
            (true, _) => Style::Json,
            (_, true) => Style::Markdown,
            _ => Style::Aligned,
        }
    }
}
