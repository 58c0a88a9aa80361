//! The part of a report that compares two models: outputs, memory and files.

use std::path::Path;

use anyhow::Result;
use ort_runtime::quant::Written;
use serde::Serialize;

use crate::args::{human_bytes, table};
use crate::output::say;

/// The files.
#[derive(Serialize)]
pub(crate) struct Sizes {
    /// With data files.
    bytes_before: usize,
    model_bytes: u64,
    data_bytes: u64,
}

/// Both models on the same inputs.
#[derive(Clone, Copy, Serialize)]
pub(crate) struct Checked {
    /// How often both ran.
    pub(crate) runs: usize,
    /// Whether the original ran, too: a memory limit may have been too low for it.
    pub(crate) is_compared: bool,
    pub(crate) planned_peak_before: Option<usize>,
    pub(crate) planned_peak: Option<usize>,
    pub(crate) weights_before: usize,
    pub(crate) weights: usize,
    /// The norm of the difference of all outputs over that of the original's.
    pub(crate) relative_error: Option<f64>,
}

/// How an output of the second model differs from that of the first, over all runs.
#[derive(Debug, Default, Serialize)]
pub(crate) struct OutputError {
    pub(crate) name: String,
    pub(crate) elements: u64,
    /// The norm of the difference over that of the original, for floating point.
    pub(crate) relative_error: Option<f64>,
    /// The same as a ratio of signal to noise.
    pub(crate) decibels: Option<f64>,
    /// The largest difference of two elements, for floating point.
    pub(crate) largest_difference: Option<f64>,
    /// The share of rows along the last axis whose largest element is at the same place.
    pub(crate) same_largest: Option<f64>,
    /// The share of equal elements, for other types.
    pub(crate) equal: Option<f64>,
    /// The elements that are NaN or infinite where the original's are not.
    pub(crate) not_finite: u64,
}

impl Sizes {
    pub(crate) fn of(bytes_before: usize, written: &Written) -> Sizes {
        Sizes { bytes_before, model_bytes: written.model, data_bytes: written.data }
    }

    pub(crate) fn print(&self, path: &Path) -> Result<()> {
        say!(
            "a file of {} became {}; written to {}",
            human_bytes(self.bytes_before),
            human_bytes((self.model_bytes + self.data_bytes) as usize),
            path.display()
        )
    }
}

impl Checked {
    pub(crate) fn print(&self) -> Result<()> {
        let peak = |bytes: Option<usize>| bytes.map_or("unknown".to_string(), human_bytes);
        if !self.is_compared {
            return say!(
                "weights {}; peak of the run {}; the outputs are not compared: the memory limit is too low to run \
                 the original",
                human_bytes(self.weights),
                peak(self.planned_peak)
            );
        }
        say!(
            "weights {} became {}; peak of the run {} became {}",
            human_bytes(self.weights_before),
            human_bytes(self.weights),
            peak(self.planned_peak_before),
            peak(self.planned_peak)
        )?;
        match self.relative_error {
            Some(error) => say!("the outputs differ by {:.3} % in {} runs", 100.0 * error, self.runs),
            None => say!("the outputs are not floating point, or all zero"),
        }
    }
}

/// Prints how each output differs.
pub(crate) fn print_outputs(outputs: &[OutputError]) -> Result<()> {
    if outputs.is_empty() {
        return Ok(());
    }
    let mut rows = table(&["output", "elements", "differs by", "largest", "dB", "same largest", "equal"]);
    let percent = |share: Option<f64>| share.map_or(String::new(), |share| format!("{:.2} %", 100.0 * share));
    for output in outputs {
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
