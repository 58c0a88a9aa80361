//! The report of `ort quantize`: layers, outputs, files and memory.

use std::collections::BTreeMap;

use anyhow::Result;
use ort_runtime::quant::{Layer, Noise, Outcome};
use serde::Serialize;

use super::arguments::QuantizeArgs;
use super::search::Search;
use crate::args::table;
use crate::comparison::{Checked, OutputError, Sizes, print_outputs};
use crate::output::{listed, say};

/// What `--json` prints.
#[derive(Default, Serialize)]
pub(super) struct Report {
    /// Empty for a comparison.
    pub(super) layers: Vec<Row>,
    /// Absent from modes that need none.
    pub(super) calibration: Option<Calibrated>,
    /// Whether the samples of the calibration and of the comparison are random.
    pub(super) random_samples: bool,
    /// How each output differs. Empty for a dry run.
    pub(super) outputs: Vec<OutputError>,
    /// Absent from a dry run.
    pub(super) checked: Option<Checked>,
    pub(super) written: Option<Sizes>,
    /// How a bound was kept; absent without one.
    pub(super) search: Option<Search>,
    /// What the caller's command says of the models.
    pub(super) scores: Option<Scores>,
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
    /// The pairs of layers whose channels were equalised.
    pub(super) equalised: usize,
    /// With `--ranges auto`: how many values have each rule.
    pub(super) rules: BTreeMap<String, usize>,
    /// The values of which elements were NaN or infinite, which no range contains.
    pub(super) not_finite: Vec<String>,
}

/// The scores of the models.
#[derive(Serialize)]
pub(super) struct Scores {
    pub(super) original: f64,
    pub(super) quantized: f64,
    /// The layers that stay in floating point for the sake of the score.
    pub(super) reverted: Vec<String>,
    /// How many models were scored.
    pub(super) trials: usize,
}

/// A layer.
#[derive(Serialize)]
pub(super) struct Row {
    pub(super) node: String,
    operator: String,
    shape: Vec<usize>,
    /// Absent from a layer that stays.
    precision: Option<String>,
    bytes_before: usize,
    bytes_after: usize,
    /// The ratio of the weight to its change, in decibels.
    weight_decibels: Option<f64>,
    /// With a bound: the part of the weight in the sum of all squared errors.
    pub(super) error_share: Option<f64>,
    /// Why the layer stays.
    kept: Option<String>,
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
            error_share: None,
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

impl Report {
    pub(super) fn print(&self, args: &QuantizeArgs) -> Result<()> {
        if !args.compare {
            self.print_layers()?;
        }
        if let Some(calibration) = &self.calibration {
            calibration.print()?;
        }
        if self.random_samples {
            say!("the samples are random, so that ranges and errors say nothing about real inputs")?;
        }
        if let Some(search) = &self.search {
            search.print()?;
        }
        if let Some(Scores { original, quantized, reverted, trials }) = &self.scores {
            say!("the score {original} became {quantized}, in {trials} trials")?;
            if !reverted.is_empty() {
                say!("for it, {} stay in floating point", listed(reverted))?;
            }
        }
        print_outputs(&self.outputs)?;
        if let Some(checked) = &self.checked {
            checked.print()?;
        }
        match &self.written {
            Some(sizes) => sizes.print(&args.output),
            None if args.compare => Ok(()),
            None => say!("a dry run; nothing was written"),
        }
    }

    fn print_layers(&self) -> Result<()> {
        let mut titles = vec!["layer", "operator", "weight", "becomes", "bytes", "after", "weight dB"];
        titles.extend(self.search.as_ref().map(|_| "error share"));
        let mut rows = table(&titles);
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
            let mut cells = vec![node, operator, shape.join("x"), becomes, before, after, decibels];
            let share = |share: f64| format!("{:.2} %", 100.0 * share);
            cells.extend(self.search.as_ref().map(|_| row.error_share.map_or(String::new(), share)));
            rows.add_row(cells);
        }
        say!("{rows}")
    }
}

impl Calibrated {
    fn print(&self) -> Result<()> {
        if self.equalised > 0 {
            say!("the channels between {} pairs of layers are equalised", self.equalised)?;
        }
        if !self.rules.is_empty() {
            let rules = self.rules.iter().map(|(rule, count)| format!("{count} by {rule}"));
            say!("ranges: {}", rules.collect::<Vec<_>>().join(", "))?;
        }
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
