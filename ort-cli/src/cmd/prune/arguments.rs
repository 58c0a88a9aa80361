//! The flags of `ort prune`, and the pruner that they describe.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use anyhow::Result;
use clap::{Args, ValueEnum};
use ort_runtime::onnx::Weights;
use ort_runtime::quant::{
    ChannelPruner, NodePattern, PruneMethod, PruneScope, PruneTuning, Pruner, Sparsity,
};

use crate::args::ModelArgs;
use crate::comparison::SampleArgs;
use crate::numbers::positive;
use crate::usage::wrong_usage;

/// Writes a model with zeros among its weights or with fewer channels, checks it, and lists what
/// became of each layer.
#[derive(Args)]
pub(crate) struct PruneArgs {
    /// The inputs, with which both models run to compare their outputs.
    #[command(flatten)]
    pub(super) model: ModelArgs,
    /// Output file, written atomically.
    pub(super) output: PathBuf,
    /// How the elements to remove are chosen.
    #[arg(long, value_enum, default_value_t = MethodArg::Magnitude)]
    method: MethodArg,
    /// Make this share of each weight zero: above 0 and below 1.
    #[arg(long, value_name = "SHARE", required_unless_present_any = ["pattern", "channels"], conflicts_with = "pattern", value_parser = share)]
    sparsity: Option<f64>,
    /// Keep the N best of each M neighbouring input channels, such as 2:4. Layers whose channels
    /// are no multiple of M stay as they are.
    #[arg(long, value_name = "N:M", value_parser = pattern)]
    pattern: Option<(usize, usize)>,
    /// Remove this share of the outputs of each layer, those of least norm: smaller shapes, so
    /// fewer weights, activations and multiplications. Layers whose outputs are added to each other
    /// lose the same ones.
    #[arg(long, value_name = "SHARE", conflicts_with_all = ["sparsity", "pattern", "method", "scope"], value_parser = share)]
    channels: Option<f64>,
    /// With --channels: the outputs that stay are a multiple of N. Kernels are made for multiples
    /// of 8 or 16.
    #[arg(long, value_name = "N", default_value = "1", conflicts_with_all = ["sparsity", "pattern"], value_parser = positive::<NonZeroUsize>)]
    multiple: NonZeroUsize,
    /// Where the share holds [default: row for wanda, layer for other methods].
    #[arg(long, value_enum, conflicts_with = "pattern")]
    scope: Option<ScopeArg>,
    #[command(flatten)]
    pub(super) samples: SampleArgs,
    /// Prune these nodes alone: a name with * and ?, op:OPERATOR or #NUMBER (repeatable).
    #[arg(long, value_name = "PATTERN", value_parser = node_pattern)]
    only: Vec<NodePattern>,
    /// Keep these nodes as they are (repeatable).
    #[arg(long, value_name = "PATTERN", value_parser = node_pattern)]
    exclude: Vec<NodePattern>,
    /// Store the weights in OUTPUT.data beside the model; so are those of models above 2 GiB.
    #[arg(long)]
    external_data: bool,
    /// List what would become of each layer, and write no model.
    #[arg(long)]
    pub(super) dry_run: bool,
    /// Write the report as JSON to this file.
    #[arg(long, value_name = "FILE.json")]
    pub(super) report: Option<PathBuf>,
    /// Print the report as one JSON object instead of a table.
    #[arg(long)]
    pub(super) json: bool,
}

/// The values of `--method`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum MethodArg {
    /// The least magnitudes. Needs no samples.
    Magnitude,
    /// With --data: the least magnitudes times the norm of the input channel.
    Wanda,
    /// With --data: the least errors of the layer, which other weights of the output make up for.
    Sparsegpt,
}

/// The values of `--scope`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ScopeArg {
    /// In the whole weight.
    Layer,
    /// In the weights of each output.
    Row,
}

/// What is removed.
pub(super) enum Wanted {
    /// Single elements, without what samples say about them.
    Elements(Pruner),
    /// Whole channels.
    Channels(ChannelPruner),
}

impl PruneArgs {
    /// Where the weights go.
    pub(super) fn weights(&self) -> Weights {
        if self.external_data { Weights::Beside { least: 1024 } } else { Weights::Inside }
    }

    /// What is asked for.
    pub(super) fn wanted(&self) -> Result<Wanted> {
        if self.report.as_ref() == Some(&self.output) {
            wrong_usage!("--report and the output are the same file; name two");
        }
        let (only, exclude) = (self.only.clone(), self.exclude.clone());
        if let Some(share) = self.channels {
            return Ok(Wanted::Channels(ChannelPruner {
                share,
                multiple: self.multiple.get(),
                only,
                exclude,
            }));
        }
        if self.method != MethodArg::Magnitude && self.samples.data.is_none() {
            wrong_usage!(
                "--method wanda and sparsegpt need --data with samples; without any, take --method magnitude"
            );
        }
        let scope = match (self.scope, self.method) {
            (Some(ScopeArg::Row), _) | (None, MethodArg::Wanda) => PruneScope::Row,
            (Some(ScopeArg::Layer) | None, _) => PruneScope::Layer,
        };
        let sparsity = match (self.pattern, self.sparsity) {
            (Some((kept, of)), _) => Sparsity::Pattern { kept, of },
            (None, Some(share)) => Sparsity::Share { share, scope },
            (None, None) => wrong_usage!("give --sparsity, --pattern or --channels"),
        };
        let method = match self.method {
            MethodArg::Magnitude => PruneMethod::Magnitude,
            MethodArg::Wanda => PruneMethod::Wanda,
            MethodArg::Sparsegpt => PruneMethod::SparseGpt,
        };
        Ok(Wanted::Elements(Pruner { method, sparsity, only, exclude, tuning: PruneTuning::default() }))
    }
}

fn share(text: &str) -> Result<f64, String> {
    let share = text.parse().ok().filter(|share| *share > 0.0 && *share < 1.0);
    share.ok_or_else(|| format!("`{text}` is not a share above 0 and below 1, such as 0.5"))
}

fn pattern(text: &str) -> Result<(usize, usize), String> {
    let numbers = text.split_once(':').and_then(|(kept, of)| Some((kept.parse().ok()?, of.parse().ok()?)));
    let numbers = numbers.filter(|(kept, of)| 0 < *kept && kept < of && *of <= 64);
    numbers.ok_or_else(|| format!("`{text}` is not N:M with N from 1, N below M and M up to 64, such as 2:4"))
}

fn node_pattern(text: &str) -> Result<NodePattern, String> {
    text.parse().map_err(|problem: ort_runtime::Error| problem.to_string())
}
