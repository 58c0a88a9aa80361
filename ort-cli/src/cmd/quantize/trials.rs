//! Trials of quantizers: models that are written, measured and not kept, and the one that is.

use std::path::Path;

use anyhow::{Context, Result, bail};
use ort_runtime::onnx::Source;
use ort_runtime::quant::{Layer, LayerUnit, Mode, Quantizer, StaticBiases, Written};
use ort_runtime::{Error, ErrorKind, Model};

use super::arguments::{BiasArg, QuantizeArgs};
use super::report::Scores;
use super::score::score;
use super::scratch::Scratch;
use crate::comparison::{Checked, OutputError, Progress, Ran, compare, refuse_new_infinities};

/// Models of one original.
pub(super) struct Trials<'t> {
    pub(super) args: &'t QuantizeArgs,
    pub(super) source: &'t Source,
    pub(super) original: &'t Ran,
}

/// A model that got its name.
pub(super) struct Kept {
    pub(super) layers: Vec<Layer>,
    pub(super) bytes_before: usize,
    pub(super) written: Written,
    pub(super) checked: Checked,
    pub(super) outputs: Vec<OutputError>,
}

impl Trials<'_> {
    /// Writes a model, and compares it with the original.
    pub(super) fn write(&self, quantizer: &Quantizer, path: &Path) -> Result<Kept> {
        let mut compared = None;
        let quantization = quantizer.quantize(self.source)?;
        let (layers, bytes_before) = (quantization.layers().to_vec(), quantization.bytes_before());
        let written = quantization.write(path, &self.args.weights(), &mut |model: &Model| {
            let (checked, outputs) = compare(&self.args.model, self.original, model)?;
            refuse_new_infinities(&outputs)?;
            compared = Some((checked, outputs));
            Ok(())
        })?;
        let (checked, outputs) = compared.context("the model was not checked")?;
        Ok(Kept { layers, bytes_before, written, checked, outputs })
    }

    /// The relative error of the outputs of a model that is not kept.
    fn error(&self, quantizer: &Quantizer) -> Result<f64> {
        let mut measured = None;
        let quantization = quantizer.quantize(self.source)?;
        let written = quantization.write(&self.args.output, &self.args.weights(), &mut |model: &Model| {
            let (checked, _) = compare(&self.args.model, self.original, model)?;
            measured = Some(checked.relative_error.unwrap_or_default());
            // Leaves no file.
            Err(Error::new(ErrorKind::Fail, "the model is not kept"))
        });
        match (measured, written) {
            (Some(error), _) => Ok(error),
            (None, Err(problem)) => Err(problem.into()),
            (None, Ok(_)) => bail!("the model was not checked"),
        }
    }

    /// With `--bias-correction=auto`, takes the correction back unless it helps.
    pub(super) fn settle_bias(&self, quantizer: &mut Quantizer) -> Result<bool> {
        let mut plain = quantizer.clone();
        let has_biases = match &mut plain.mode {
            Mode::Static(options) => std::mem::take(&mut options.biases) != StaticBiases::default(),
            Mode::Blocks(_) | Mode::Dynamic(_) | Mode::Half(_) => false,
        };
        if !has_biases || self.args.bias_correction != BiasArg::Auto {
            return Ok(true);
        }
        let helps = self.error(quantizer)? < self.error(&plain)?;
        if !helps {
            *quantizer = plain;
        }
        Ok(helps)
    }

    /// Scores the models. With `--max-drop`, excludes layers from the quantizer until the score
    /// holds.
    pub(super) fn settle_score(&self, command: &str, quantizer: &mut Quantizer) -> Result<Scores> {
        let original = score(command, &self.args.model.model)?;
        let mut search = ScoreSearch { trials: self, command, count: 0 };
        let all = search.score(quantizer)?;
        let Some(least) = self.args.max_drop.map(|drop| original - drop).filter(|least| all < *least) else {
            return Ok(Scores { original, quantized: all, reverted: Vec::new(), trials: 1 });
        };
        let units = self.by_harm(quantizer)?;
        let (count, quantized) = search.fewest(quantizer, (&units, all), least)?;
        let reverted = units.iter().take(count);
        *quantizer = quantizer.without(reverted.clone());
        let reverted = reverted.flat_map(|unit| unit.layers.iter().cloned()).collect();
        Ok(Scores { original, quantized, reverted, trials: search.count })
    }

    /// The layers, of which those that change the outputs most come first.
    fn by_harm(&self, quantizer: &Quantizer) -> Result<Vec<LayerUnit>> {
        let units = quantizer.units(self.source)?;
        let progress = Progress::new("measuring layers", "layers", units.len());
        let mut harms = Vec::new();
        for (index, unit) in units.iter().enumerate() {
            let others = units.iter().enumerate().filter(|(other, _)| *other != index);
            let alone = quantizer.without(others.map(|(_, other)| other));
            harms.push((self.error(&alone)?, unit.clone()));
            progress.step();
        }
        harms.sort_by(|(one, _), (other, _)| other.total_cmp(one));
        Ok(harms.into_iter().map(|(_, unit)| unit).collect())
    }
}

/// A search for the fewest layers to leave in floating point.
struct ScoreSearch<'t> {
    trials: &'t Trials<'t>,
    command: &'t str,
    count: usize,
}

impl ScoreSearch<'_> {
    /// The score of a model, which is whole while the command runs.
    fn score(&mut self, quantizer: &Quantizer) -> Result<f64> {
        self.count += 1;
        let output = &self.trials.args.output;
        let folder = Scratch::beside(output)?;
        let path = folder.file(output.file_name().context("the output has no file name")?);
        self.trials.write(quantizer, &path)?;
        score(self.command, &path)
    }

    /// How many of the most harmful layers stay, and the score then: doubled until it holds, and
    /// halved as long as it does.
    fn fewest(
        &mut self,
        quantizer: &Quantizer,
        (units, all): (&[LayerUnit], f64),
        least: f64,
    ) -> Result<(usize, f64)> {
        // With every layer left out there is nothing to quantize.
        let most = units.len().saturating_sub(1);
        let (mut fails, mut best) = ((0, all), None);
        let mut count = 1.min(most);
        while best.is_none() && count > fails.0 {
            let found = self.score(&quantizer.without(units.iter().take(count)))?;
            if found >= least {
                best = Some((count, found));
            } else {
                fails = (count, found);
                count = (2 * count).min(most);
            }
        }
        let Some(mut best) = best else {
            let text = format!(
                "no quantized model has a score of {least}: with {} of {} groups of layers in floating point it is {}",
                fails.0,
                units.len(),
                fails.1
            );
            return Err(Error::new(ErrorKind::InvalidArgument, text)
                .help("raise --max-drop, or take a mode with more bits")
                .into());
        };
        while best.0 > fails.0 + 1 {
            let middle = fails.0.midpoint(best.0);
            let found = self.score(&quantizer.without(units.iter().take(middle)))?;
            if found >= least { best = (middle, found) } else { fails = (middle, found) }
        }
        Ok(best)
    }
}
