//! The arguments of a soak test, the inputs that they ask for, and the bytes of outputs.

use std::num::NonZeroUsize;

use anyhow::{Result, ensure};
use clap::Args;
use ort_runtime::{Model, Tensor, Value};
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64;

use crate::args::ModelArgs;
use crate::inputs::gather;
use crate::numbers::positive;

/// Loads, runs and drops a model many times, and measures what memory remains.
#[derive(Args)]
pub(crate) struct SoakArgs {
    #[command(flatten)]
    pub(super) model: ModelArgs,
    /// How often to load and drop the model.
    #[arg(long, value_name = "N", default_value = "1", value_parser = positive::<NonZeroUsize>)]
    pub(super) cycles: NonZeroUsize,
    /// Runs per caller and cycle.
    #[arg(long, value_name = "N", default_value = "10", value_parser = positive::<NonZeroUsize>)]
    pub(super) runs: NonZeroUsize,
    /// Symbolic dimension to draw at random for each run, from LOW to HIGH inclusive.
    #[arg(long = "random-dim", value_name = "NAME=LOW..HIGH", value_parser = range)]
    pub(super) random_dims: Vec<(String, i64, i64)>,
    /// Concurrent callers on one session.
    #[arg(long, value_name = "N", default_value = "1", value_parser = positive::<NonZeroUsize>)]
    pub(super) callers: NonZeroUsize,
    /// Sessions on the model; all stay open, and the last one runs.
    #[arg(long, value_name = "N", default_value = "1", value_parser = positive::<NonZeroUsize>)]
    pub(super) sessions: NonZeroUsize,
    /// Test N sessions instead, each with a random memory limit and random dimensions.
    #[arg(long, value_name = "N", value_parser = positive::<NonZeroUsize>)]
    #[arg(conflicts_with_all = ["cycles", "runs", "callers", "sessions", "hold"])]
    pub(super) random_limits: Option<NonZeroUsize>,
    /// Print one JSON object.
    #[arg(long)]
    pub(super) json: bool,
    /// Keep the last session open until standard input ends, for external measurements.
    #[arg(long)]
    pub(super) hold: bool,
}

fn range(text: &str) -> Result<(String, i64, i64), String> {
    let parsed = text.split_once('=').and_then(|(name, range)| {
        let (low, high) = range.split_once("..")?;
        Some((name.to_owned(), low.parse().ok()?, high.parse().ok()?))
    });
    let parsed = parsed.filter(|(name, low, high)| !name.is_empty() && 0 <= *low && low <= high);
    parsed.ok_or_else(|| format!("`{text}` is not NAME=LOW..HIGH, such as batch=1..8: use 0 <= LOW <= HIGH"))
}

pub(super) fn given(inputs: &[(String, Value)]) -> Vec<(&str, Value)> {
    inputs.iter().map(|(name, value)| (name.as_str(), value.clone())).collect()
}

/// Returns the inputs of the run with this number. The number seeds their dimensions, so a run can
/// be repeated.
pub(super) fn inputs_of(args: &SoakArgs, model: &Model, number: usize) -> Result<Vec<(String, Value)>> {
    let mut random = Pcg64::seed_from_u64(args.model.seed.wrapping_add(number as u64));
    let mut model_args = args.model.clone();
    for (name, low, high) in &args.random_dims {
        // A size drawn for this run replaces the one of an earlier `--dim`.
        model_args.dims.retain(|(known, _)| known != name);
        model_args.dims.push((name.clone(), vec![random.random_range(*low..=*high)]));
    }
    gather(&model_args, model)
}

pub(super) fn bits_of(outputs: Vec<(String, Value)>) -> Result<Vec<Vec<u8>>> {
    let bytes = outputs.iter().filter_map(|(_, value)| value.tensor().ok().and_then(Tensor::bytes));
    let bytes: Vec<Vec<u8>> = bytes.map(|bytes| bytes.to_vec()).collect();
    // Without outputs to compare, the test would pass whatever the runs return.
    ensure!(
        !bytes.is_empty(),
        "the model has no output that is a tensor of numbers, so that results cannot be compared"
    );
    Ok(bytes)
}
