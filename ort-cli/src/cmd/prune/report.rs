//! The report of `ort prune`: layers, outputs, files and memory.

use std::collections::BTreeMap;

use anyhow::Result;
use ort_runtime::quant::{Noise, PruneOutcome, PrunedLayer, Zeros};
use serde::Serialize;

use super::arguments::PruneArgs;
use crate::args::{human_bytes, table};
use crate::comparison::{Checked, OutputError, Sizes, print_outputs};
use crate::output::say;

/// What `--json` prints.
#[derive(Default, Serialize)]
pub(super) struct Report {
    pub(super) layers: Vec<Row>,
    /// Absent without samples.
    pub(super) calibration: Option<Calibrated>,
    /// The zeros of all pruned weights.
    pub(super) zeros: usize,
    /// The elements of all pruned weights.
    pub(super) elements: usize,
    /// Their bytes.
    pub(super) bytes: usize,
    /// What they would take with a bit for each element that says whether it is zero, and the
    /// others.
    pub(super) bytes_as_bitmap: usize,
    /// How each output differs. Empty for a dry run.
    pub(super) outputs: Vec<OutputError>,
    /// Absent from a dry run.
    pub(super) checked: Option<Checked>,
    pub(super) written: Option<Sizes>,
}

/// The runs on samples.
#[derive(Default, Serialize)]
pub(super) struct Calibrated {
    pub(super) samples: usize,
    /// The weights for which the method had statistics.
    pub(super) tuned: usize,
}

/// A layer.
#[derive(Serialize)]
pub(super) struct Row {
    node: String,
    operator: String,
    shape: Vec<usize>,
    /// Without the channels that are removed; absent from other methods.
    shape_after: Option<Vec<usize>>,
    /// Why all outputs stay of a layer that loses inputs.
    outputs_kept: Option<String>,
    /// Absent from a layer that stays.
    method: Option<String>,
    /// Whether an earlier layer has the same weight.
    is_shared: bool,
    elements: usize,
    bytes: usize,
    /// The elements that the method removes.
    removed: usize,
    /// Absent from a dry run. Elements that were zero before and are not removed count, too.
    zeros: Option<u64>,
    zeros_before: Option<u64>,
    /// The share of elements that are not removed.
    kept_share: f64,
    /// The ratio of the weight to its change, in decibels.
    weight_decibels: Option<f64>,
    /// The relative error of the layer's outputs by itself, with the samples.
    output_error: Option<f64>,
    /// That of the same sparsity by magnitude.
    magnitude_output_error: Option<f64>,
    /// Why the layer stays.
    kept: Option<String>,
}

impl Row {
    pub(super) fn of(
        layer: PrunedLayer,
        noises: &BTreeMap<String, Noise>,
        all_zeros: &BTreeMap<String, Zeros>,
    ) -> Row {
        let PrunedLayer { node, operator, shape, outcome } = layer;
        let elements: usize = shape.iter().product();
        let mut row = Row {
            node,
            operator,
            shape,
            shape_after: None,
            outputs_kept: None,
            method: None,
            is_shared: false,
            elements: 0,
            bytes: 0,
            removed: 0,
            zeros: None,
            zeros_before: None,
            kept_share: 1.0,
            weight_decibels: None,
            output_error: None,
            magnitude_output_error: None,
            kept: None,
        };
        match outcome {
            PruneOutcome::Pruned { weight, is_shared, method, bytes, removed, errors } => {
                (row.method, row.is_shared) = (Some(method), is_shared);
                (row.elements, row.bytes, row.removed) = (elements, bytes, removed);
                row.kept_share = (elements - removed) as f64 / elements as f64;
                let zeros = all_zeros.get(&weight);
                row.zeros = zeros.map(|zeros| zeros.after);
                row.zeros_before = zeros.map(|zeros| zeros.before);
                // JSON has no infinity, which is the ratio of a weight that did not change.
                let decibels = noises.get(&weight).map(Noise::decibels);
                row.weight_decibels = decibels.filter(|decibels| decibels.is_finite());
                row.output_error = errors.map(|errors| errors.pruned);
                row.magnitude_output_error = errors.map(|errors| errors.magnitude);
            }
            PruneOutcome::Narrowed { shape, bytes, outputs } => {
                let after: usize = shape.iter().product();
                row.method = Some("channels".to_string());
                (row.bytes, row.outputs_kept) = (bytes, outputs);
                row.kept_share = after as f64 / elements as f64;
                row.shape_after = Some(shape);
            }
            PruneOutcome::Kept { reason } => row.kept = Some(reason),
        }
        row
    }
}

impl Report {
    /// Counts the zeros of all weights once.
    pub(super) fn total(&mut self) {
        let rows = self.layers.iter().filter(|row| row.elements > 0 && !row.is_shared);
        for row in rows {
            self.elements += row.elements;
            let zeros = row.zeros.map_or(row.removed, |zeros| zeros as usize);
            self.zeros += zeros;
            self.bytes += row.bytes;
            let size = row.bytes / row.elements.max(1);
            self.bytes_as_bitmap += row.elements.div_ceil(8) + size * row.elements.saturating_sub(zeros);
        }
    }

    pub(super) fn print(&self, args: &PruneArgs) -> Result<()> {
        self.print_layers()?;
        if let Some(Calibrated { samples, tuned }) = &self.calibration {
            say!("{tuned} weights were chosen from with the inputs of {samples} samples")?;
        }
        print_outputs(&self.outputs)?;
        // Layers that lose channels have no zeros to count.
        if self.elements > 0 {
            self.print_zeros()?;
        }
        if let Some(checked) = &self.checked {
            checked.print()?;
        }
        match &self.written {
            Some(sizes) => sizes.print(&args.output),
            None => say!("a dry run; nothing was written"),
        }
    }

    fn print_zeros(&self) -> Result<()> {
        let share = 100.0 * self.zeros as f64 / self.elements.max(1) as f64;
        say!("{} of {} elements of pruned weights are zero ({share:.2} %)", self.zeros, self.elements)?;
        say!(
            "zeros save no memory or time here; as a bitmap and the other values, {} of weights would take {}",
            human_bytes(self.bytes),
            human_bytes(self.bytes_as_bitmap)
        )
    }

    fn print_layers(&self) -> Result<()> {
        let mut rows = table(&[
            "layer",
            "operator",
            "weight",
            "becomes",
            "kept",
            "zeros",
            "weight dB",
            "output error",
            "by magnitude",
        ]);
        let percent =
            |share: Option<f64>| share.map_or(String::new(), |share| format!("{:.2} %", 100.0 * share));
        for row in &self.layers {
            let joined =
                |shape: &[usize]| shape.iter().map(ToString::to_string).collect::<Vec<_>>().join("x");
            let becomes = match (&row.method, &row.kept) {
                (Some(_), _) if row.shape_after.is_some() => {
                    let reason = row.outputs_kept.as_ref();
                    let reason =
                        reason.map_or(String::new(), |reason| format!("; all outputs, because {reason}"));
                    format!("{}{reason}", joined(row.shape_after.as_deref().unwrap_or_default()))
                }
                (Some(method), _) if row.is_shared => format!("{method}, the same weight"),
                (Some(method), _) => method.clone(),
                (None, reason) => format!("stays: {}", reason.as_deref().unwrap_or_default()),
            };
            let is_pruned = row.method.is_some();
            let zeros = row.zeros.map_or(row.removed, |zeros| zeros as usize);
            let has_zeros = row.elements > 0;
            rows.add_row([
                row.node.clone(),
                row.operator.clone(),
                joined(&row.shape),
                becomes,
                percent(Some(row.kept_share).filter(|_| is_pruned)),
                if has_zeros { zeros.to_string() } else { String::new() },
                row.weight_decibels.map_or(String::new(), |decibels| format!("{decibels:.1}")),
                percent(row.output_error),
                percent(row.magnitude_output_error),
            ]);
        }
        say!("{rows}")
    }
}
