//! The report of `ort quantize`: layers, outputs, files and memory.

use std::collections::BTreeMap;

use anyhow::Result;
use ort_runtime::quant::{Layer, Noise, Outcome, Written};
use serde::Serialize;

use super::arguments::QuantizeArgs;
use crate::args::{human_bytes, table};
use crate::output::{listed, say};

/// What `--json` prints.
#[derive(Default, Serialize)]
pub(super) struct Report {
    /// Empty for a comparison.
    pub(super) layers: Vec<Row>,
    /// Absent from modes that need none.
    pub(super) calibration: Option<Calibrated>,
    /// How each output differs. Empty for a dry run.
    pub(super) outputs: Vec<OutputError>,
    /// Absent from a dry run.
    pub(super) checked: Option<Checked>,
    pub(super) written: Option<Sizes>,
}

/// A calibration.
#[derive(Default, Serialize)]
pub(super) struct Calibrated {
    pub(super) samples: usize,
    /// The inputs of products that SmoothQuant or AWQ divide.
    pub(super) smoothed: usize,
    /// The weights that GPTQ quantized.
    pub(super) compensated: usize,
    /// The weights of other methods whose products got a bias.
    pub(super) corrected: usize,
    /// The values of which elements were NaN or infinite, which no range contains.
    pub(super) not_finite: Vec<String>,
}

/// A layer.
#[derive(Serialize)]
pub(super) struct Row {
    node: String,
    operator: String,
    shape: Vec<usize>,
    /// Absent from a layer that stays.
    precision: Option<String>,
    bytes_before: usize,
    bytes_after: usize,
    /// The ratio of the weight to its change, in decibels.
    weight_decibels: Option<f64>,
    /// Why the layer stays.
    kept: Option<String>,
}

/// The files.
#[derive(Serialize)]
pub(super) struct Sizes {
    /// With data files.
    bytes_before: usize,
    model_bytes: u64,
    data_bytes: u64,
}

/// Both models on the same inputs.
#[derive(Clone, Copy, Serialize)]
pub(super) struct Checked {
    /// How often both ran.
    pub(super) runs: usize,
    pub(super) planned_peak_before: Option<usize>,
    pub(super) planned_peak: Option<usize>,
    pub(super) weights_before: usize,
    pub(super) weights: usize,
    /// The norm of the difference of all outputs over that of the original's.
    pub(super) relative_error: Option<f64>,
}

/// How an output of the second model differs from that of the first, over all runs.
#[derive(Debug, Default, Serialize)]
pub(super) struct OutputError {
    pub(super) name: String,
    pub(super) elements: u64,
    /// The norm of the difference over that of the original, for floating point.
    pub(super) relative_error: Option<f64>,
    /// The same as a ratio of signal to noise.
    pub(super) decibels: Option<f64>,
    /// The largest difference of two elements, for floating point.
    pub(super) largest_difference: Option<f64>,
    /// The share of rows along the last axis whose largest element is at the same place.
    pub(super) same_largest: Option<f64>,
    /// The share of equal elements, for other types.
    pub(super) equal: Option<f64>,
    /// The elements that are NaN or infinite where the original's are not.
    pub(super) not_finite: u64,
}

impl Row {
    pub(super) fn of(layer: Layer, noises: &BTreeMap<String, Noise>) -> Row {
        let Layer { node, operator, shape, outcome } = layer;
        let mut row = Row {
            node,
            operator,
            shape,
            precision: None,
            bytes_before: 0,
            bytes_after: 0,
            weight_decibels: None,
            kept: None,
        };
        match outcome {
            Outcome::Quantized { precision, before, after, codes } => {
                (row.precision, row.bytes_before, row.bytes_after) = (Some(precision), before, after);
                // JSON has no infinity, which is the ratio of a weight that did not change.
                let decibels = noises.get(&codes).map(Noise::decibels);
                row.weight_decibels = decibels.filter(|decibels| decibels.is_finite());
            }
            Outcome::Kept { reason } => row.kept = Some(reason),
        }
        row
    }
}

impl Sizes {
    pub(super) fn of(bytes_before: usize, written: &Written) -> Sizes {
        Sizes { bytes_before, model_bytes: written.model, data_bytes: written.data }
    }
}

impl Report {
    pub(super) fn print(&self, args: &QuantizeArgs) -> Result<()> {
        if !args.compare {
            self.print_layers()?;
        }
        if let Some(calibration) = &self.calibration {
            calibration.print()?;
        }
        self.print_outputs()?;
        if let Some(checked) = &self.checked {
            let peak = |bytes: Option<usize>| bytes.map_or("unknown".to_string(), human_bytes);
            say!(
                "weights {} became {}; peak of the run {} became {}",
                human_bytes(checked.weights_before),
                human_bytes(checked.weights),
                peak(checked.planned_peak_before),
                peak(checked.planned_peak)
            )?;
            match checked.relative_error {
                Some(error) => say!("the outputs differ by {:.3} % in {} runs", 100.0 * error, checked.runs)?,
                None => say!("the outputs are not floating point, or all zero")?,
            }
        }
        match &self.written {
            Some(sizes) => say!(
                "a file of {} became {}; written to {}",
                human_bytes(sizes.bytes_before),
                human_bytes((sizes.model_bytes + sizes.data_bytes) as usize),
                args.output.display()
            ),
            None if args.compare => Ok(()),
            None => say!("a dry run; nothing was written"),
        }
    }

    fn print_layers(&self) -> Result<()> {
        let mut rows = table(&["layer", "operator", "weight", "becomes", "bytes", "after", "weight dB"]);
        for row in &self.layers {
            let shape: Vec<String> = row.shape.iter().map(ToString::to_string).collect();
            let becomes = match (&row.precision, &row.kept) {
                (Some(precision), _) => precision.clone(),
                (None, reason) => format!("stays: {}", reason.as_deref().unwrap_or_default()),
            };
            let bytes =
                |bytes: usize| if row.precision.is_some() { bytes.to_string() } else { String::new() };
            let (before, after) = (bytes(row.bytes_before), bytes(row.bytes_after));
            let decibels = row.weight_decibels.map_or(String::new(), |decibels| format!("{decibels:.1}"));
            let (node, operator) = (row.node.clone(), row.operator.clone());
            rows.add_row([node, operator, shape.join("x"), becomes, before, after, decibels]);
        }
        say!("{rows}")
    }

    fn print_outputs(&self) -> Result<()> {
        if self.outputs.is_empty() {
            return Ok(());
        }
        let mut rows = table(&["output", "elements", "differs by", "largest", "dB", "same largest", "equal"]);
        let percent =
            |share: Option<f64>| share.map_or(String::new(), |share| format!("{:.2} %", 100.0 * share));
        for output in &self.outputs {
            let difference = match output.not_finite {
                0 => percent(output.relative_error),
                count => format!("{}, {count} NaN or infinite", percent(output.relative_error)),
            };
            let largest = output.largest_difference.map_or(String::new(), |largest| format!("{largest:.3e}"));
            let decibels = output.decibels.map_or(String::new(), |decibels| format!("{decibels:.1}"));
            rows.add_row([
                output.name.clone(),
                output.elements.to_string(),
                difference,
                largest,
                decibels,
                percent(output.same_largest),
                percent(output.equal),
            ]);
        }
        say!("{rows}")
    }
}

impl Calibrated {
    fn print(&self) -> Result<()> {
        if self.smoothed > 0 {
            say!("{} inputs of products are smoothed", self.smoothed)?;
        }
        if self.compensated > 0 {
            say!("{} weights are quantized by GPTQ", self.compensated)?;
        }
        if self.corrected > 0 {
            say!("{} products have a bias that corrects their mean", self.corrected)?;
        }
        if !self.not_finite.is_empty() {
            say!("NaN or infinite elements of {} were left out of their ranges", listed(&self.not_finite))?;
        }
        Ok(())
    }
}
