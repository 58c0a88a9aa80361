//! The part of a report that says how a bound was kept.

use anyhow::Result;
use ort_runtime::quant::MixedWeight;
use serde::Serialize;

use super::arguments::Bound;
use crate::args::human_bytes;
use crate::output::say;

/// How the precisions were chosen.
#[derive(Serialize)]
pub(super) struct Search {
    /// `file`, `run` or `error`.
    bound: &'static str,
    /// Bytes, or a relative error.
    limit: f64,
    /// The samples on which weights were replaced. Without any, errors are the noise of weights.
    samples: usize,
    /// The bytes of the file with each weight at its fewest bits.
    least_bytes: u64,
    /// The relative error of the outputs that the sum over all weights predicts.
    predicted_error: f64,
    /// The models that were measured.
    rounds: Vec<Round>,
    /// What each precision of each weight costs and harms.
    pub(super) weights: Vec<WeightRow>,
}

/// A model that was measured.
#[derive(Clone, Copy, Serialize)]
pub(super) struct Round {
    pub(super) file_bytes: u64,
    pub(super) predicted_error: f64,
    /// Of a search for an error.
    pub(super) measured_error: Option<f64>,
    /// The weights and the planned peak, of a search for a run.
    pub(super) run_bytes: Option<u64>,
    pub(super) holds: bool,
}

#[derive(Serialize)]
pub(super) struct WeightRow {
    weight: String,
    pub(super) nodes: Vec<String>,
    is_measured: bool,
    /// `null` if it stays in floating point.
    bits: Option<usize>,
    /// The weights of a block.
    block: Option<usize>,
    bytes: u64,
    /// Its part of the sum of all squared errors.
    pub(super) error_share: f64,
    precisions: Vec<PrecisionRow>,
}

#[derive(Serialize)]
struct PrecisionRow {
    bits: Option<usize>,
    block: Option<usize>,
    bytes: u64,
    /// What it alone changes in the outputs.
    relative_error: f64,
}

/// What a search found.
pub(super) struct Found {
    pub(super) samples: usize,
    pub(super) least_bytes: u64,
    pub(super) rounds: Vec<Round>,
    /// The sum of the squared errors of all weights.
    pub(super) error: f64,
}

impl Search {
    /// The report of weights, each with the index of its precision.
    pub(super) fn of<'w>(
        bound: Bound,
        found: Found,
        weights: impl Iterator<Item = (&'w MixedWeight, usize)>,
    ) -> Search {
        let (bound, limit) = match bound {
            Bound::File(bytes) => ("file", bytes as f64),
            Bound::Run(bytes) => ("run", bytes as f64),
            Bound::Error(error) => ("error", error),
        };
        let Found { samples, least_bytes, rounds, error } = found;
        let weights = weights.map(|(weight, choice)| WeightRow::of(weight, choice, error)).collect();
        Search { bound, limit, samples, least_bytes, predicted_error: error.sqrt(), rounds, weights }
    }

    pub(super) fn print(&self) -> Result<()> {
        for round in &self.rounds {
            let found = match (round.measured_error, round.run_bytes) {
                (Some(error), _) => format!("outputs differ by {:.3} %", 100.0 * error),
                (None, Some(bytes)) => format!("weights and peak {}", human_bytes(bytes as usize)),
                (None, None) => String::new(),
            };
            let verdict = if round.holds { "holds" } else { "too much" };
            say!("tried a file of {}: {found}, {verdict}", human_bytes(round.file_bytes as usize))?;
        }
        let predicted = 100.0 * self.predicted_error;
        match self.samples {
            0 => say!(
                "without --data, precisions follow from the noise of the weights, which says little about the outputs"
            ),
            samples => say!("{samples} samples predict that the outputs differ by {predicted:.3} %"),
        }
    }
}

impl WeightRow {
    fn of(weight: &MixedWeight, choice: usize, all: f64) -> WeightRow {
        let chosen = weight.precisions.get(choice);
        let blocks = chosen.and_then(|chosen| chosen.blocks);
        let precisions = weight.precisions.iter().map(|precision| PrecisionRow {
            bits: precision.blocks.map(|blocks| blocks.bits.count()),
            block: precision.blocks.map(|blocks| blocks.size),
            bytes: precision.bytes,
            relative_error: precision.error.sqrt(),
        });
        let error = chosen.map_or(0.0, |chosen| chosen.error);
        WeightRow {
            weight: weight.name.clone(),
            nodes: weight.nodes.clone(),
            is_measured: weight.is_measured,
            bits: blocks.map(|blocks| blocks.bits.count()),
            block: blocks.map(|blocks| blocks.size),
            bytes: chosen.map_or(0, |chosen| chosen.bytes),
            error_share: if all > 0.0 { error / all } else { 0.0 },
            precisions: precisions.collect(),
        }
    }
}
