//! Mixed precision within a bound: a size of the file, the memory of a run, or an error.
//!
//! The error that each weight causes alone adds up to that of all, so the front of the best
//! assignments is known before any model is written. What the bound is about is then measured on
//! written models, which only get their name if they keep it.

use anyhow::{Context, Result, bail};
use ort_runtime::onnx::Source;
use ort_runtime::quant::{
    ErrorSearch, FileSize, Front, Layer, MixedWeight, MixedWeights, Quantization, Quantizer, WeightProbe,
    Written,
};
use ort_runtime::{Error, ErrorKind, Model};

use super::arguments::{Bound, QuantizeArgs};
use super::calibrate;
use super::report::{Calibrated, Report, Row};
use super::search::{Found, Round, Search};
use crate::comparison::{Checked, Inputs, OutputError, Progress, Ran, Sizes, compare, refuse_new_infinities};

/// The samples on which weights are replaced, at most.
const SAMPLES: usize = 16;
/// The bytes of their outputs, unless there is a limit.
const MEMORY_OF_OUTPUTS: usize = 256 << 20;
/// The models that are measured to meet an error, at most.
const ROUNDS: usize = 6;
/// The corrections of a size, at most: one is usual.
const CORRECTIONS: usize = 12;

/// The models of a search.
struct Bounded<'a> {
    args: &'a QuantizeArgs,
    source: &'a Source,
    quantizer: Quantizer,
    model: &'a Model,
    inputs: &'a Inputs,
    weights: Vec<MixedWeight>,
    front: Front,
    original: Ran,
    rounds: Vec<Round>,
    /// Of the last assignment.
    calibration: Option<Calibrated>,
}

/// What became of a model.
struct Finished {
    layers: Vec<Layer>,
    bytes_before: usize,
    written: Option<Written>,
    /// Absent from a dry run that measures nothing.
    checked: Option<Checked>,
    outputs: Vec<OutputError>,
}

pub(super) fn quantize(args: &QuantizeArgs, bound: Bound) -> Result<Report> {
    let quantizer = args.quantizer(args.mode_or_least())?;
    let source = args.model.source()?;
    args.check_outputs()?;
    let model = args.model.load()?;
    let inputs = Inputs::open(&args.samples, (&args.model, &model), true)?;
    let original = Ran::of(&args.model, &model, &inputs.compared(&args.model, &model)?)?;
    let mut mixed = quantizer.mixed_weights(&source)?;
    let samples = find_errors(args, &mut mixed, (&model, &inputs))?;
    let (weights, front) = (mixed.weights().to_vec(), mixed.front());
    drop(mixed);
    let (model, inputs, source) = (&model, &inputs, &source);
    let (rounds, calibration) = (Vec::new(), None);
    let mut bounded =
        Bounded { args, source, quantizer, model, inputs, weights, front, original, rounds, calibration };
    let least = bounded.size(0)?;
    let (point, finished) = match bound {
        Bound::File(budget) => bounded.within_file(budget, &least)?,
        Bound::Run(budget) => bounded.within_run(budget)?,
        Bound::Error(error) => bounded.within_error(error)?,
    };
    let random_samples = inputs.are_random();
    let mut report = Report { checked: finished.checked, random_samples, ..Report::default() };
    let noises = finished.written.as_ref().map(|written| written.noises.clone()).unwrap_or_default();
    report.layers = finished.layers.into_iter().map(|layer| Row::of(layer, &noises)).collect();
    report.outputs = finished.outputs;
    report.written = finished.written.map(|written| Sizes::of(finished.bytes_before, &written));
    let Bounded { weights, front, rounds, calibration, .. } = bounded;
    report.calibration = calibration;
    let chosen = front.choices(point);
    let error = front.points().get(point).map_or(0.0, |cost| cost.error);
    let found = Found { samples, least_bytes: total(&least), rounds, error };
    let search = Search::of(bound, found, weights.iter().zip(chosen));
    search.weights.iter().for_each(|weight| {
        let rows =
            weight.nodes.first().and_then(|node| report.layers.iter_mut().find(|row| row.node == *node));
        rows.into_iter().for_each(|row| row.error_share = Some(weight.error_share));
    });
    report.search = Some(search);
    Ok(report)
}

/// Finds the errors of all precisions. Returns the number of samples on which weights were
/// replaced.
fn find_errors(
    args: &QuantizeArgs,
    mixed: &mut MixedWeights<'_>,
    (model, inputs): (&Model, &Inputs),
) -> Result<usize> {
    let search = if args.bound.exact_errors { ErrorSearch::EachPrecision } else { ErrorSearch::FewBits };
    if !inputs.has_samples() {
        mixed.find_errors(search, None)?;
        return Ok(0);
    }
    let names = mixed.weights().iter().map(|weight| weight.name.as_str());
    let mut probe = WeightProbe::new(args.model.builder(&WeightProbe::model(model, names))?.build()?);
    let most = args.model.memory_limit.unwrap_or(MEMORY_OF_OUTPUTS);
    let mut held = 0;
    for sample in inputs.spread(SAMPLES)? {
        let bytes = probe.add(sample)?;
        held += bytes;
        if held + bytes > most {
            break;
        }
    }
    if args.model.memory_limit.is_some() {
        mixed.limit_memory(most.saturating_sub(held));
    }
    let progress = Progress::new("measuring weights", "replacements", mixed.replacements(search));
    mixed.find_errors(
        search,
        Some(&mut |weight, value| {
            if !probe.can_replace(weight) {
                return Ok(None);
            }
            let noise = probe.noise(&[(weight, value)])?;
            progress.step();
            Ok(Some(noise))
        }),
    )?;
    Ok(probe.samples())
}

/// The bytes of all files.
fn total(size: &FileSize) -> u64 {
    size.model + size.data
}

impl<'a> Bounded<'a> {
    /// The quantization of an assignment.
    fn quantization(&mut self, point: usize) -> Result<Quantization<'a>> {
        self.quantizer.set_precisions(&self.weights, &self.front.choices(point))?;
        self.calibration =
            calibrate::calibrate(self.args, (&mut self.quantizer, self.source), (self.model, self.inputs))?;
        Ok(self.quantizer.quantize(self.source)?)
    }

    /// The size of the file of an assignment.
    fn size(&mut self, point: usize) -> Result<FileSize> {
        Ok(self.quantization(point)?.size(&self.args.output, &self.args.weights())?)
    }

    fn predicted(&self, point: usize) -> f64 {
        self.front.points().get(point).map_or(0.0, |cost| cost.error.sqrt())
    }

    fn bytes(&self, point: usize) -> u64 {
        self.front.points().get(point).map_or(0, |cost| cost.bytes)
    }

    /// The last assignment that changes a weight.
    fn last(&self) -> usize {
        let last = self.front.points().len() - 1;
        let stays = |(weight, choice): (&MixedWeight, usize)| {
            weight.precisions.get(choice).is_none_or(|precision| precision.blocks.is_none())
        };
        let is_whole = self.weights.iter().zip(self.front.choices(last)).all(stays);
        if is_whole { last.saturating_sub(1) } else { last }
    }

    /// Writes the model of an assignment, and measures it. It gets its name if `keeps` says so and
    /// it is no dry run. The size is that of its files.
    fn attempt(
        &mut self,
        point: usize,
        keeps: &mut dyn FnMut(u64, &Checked) -> Result<bool>,
    ) -> Result<Option<Finished>> {
        let mut quantization = self.quantization(point)?;
        let (args, weights) = (self.args, self.args.weights());
        let size = total(&quantization.size(&args.output, &weights)?);
        let (layers, bytes_before) = (quantization.layers().to_vec(), quantization.bytes_before());
        let (mut verdict, mut measured) = (None, None);
        let written = quantization.write(&args.output, &weights, &mut |model: &Model| {
            let (checked, outputs) = compare(&args.model, &self.original, model)?;
            refuse_new_infinities(&outputs)?;
            let kept = keeps(size, &checked);
            let is_written = matches!(kept, Ok(true)) && !args.dry_run;
            (verdict, measured) = (Some(kept), Some((checked, outputs)));
            // Leaves no file.
            if is_written { Ok(()) } else { Err(Error::new(ErrorKind::Fail, "the model is not kept")) }
        });
        let written = match (verdict, written) {
            (Some(Ok(false)), _) => return Ok(None),
            (Some(Err(problem)), _) => return Err(problem),
            (Some(Ok(true)), Ok(written)) => Some(written),
            (Some(Ok(true)), Err(_)) if args.dry_run => None,
            (_, Err(problem)) => return Err(problem.into()),
            (None, Ok(_)) => bail!("the model was not checked"),
        };
        let (checked, outputs) = measured.context("the model was not checked")?;
        Ok(Some(Finished { layers, bytes_before, written, checked: Some(checked), outputs }))
    }

    /// Writes an assignment that was chosen.
    fn write(&mut self, point: usize) -> Result<(usize, Finished)> {
        let finished = self.attempt(point, &mut |_, _| Ok(true))?;
        Ok((point, finished.context("the model was not checked")?))
    }

    /// The most accurate model whose file has at most these bytes.
    fn within_file(&mut self, budget: u64, least: &FileSize) -> Result<(usize, Finished)> {
        let least_bytes = total(least);
        if least_bytes > budget {
            return Err(self.impossible_file(budget, least));
        }
        let mut allowed = self.bytes(0) + (budget - least_bytes);
        let mut point = 0;
        for _ in 0..CORRECTIONS {
            point = self.front.within(allowed).unwrap_or(0).min(self.last());
            let size = total(&self.size(point)?);
            if size <= budget {
                break;
            }
            // Names, attributes and added biases differ between assignments.
            allowed = self.bytes(point).saturating_sub(size - budget);
            point = 0;
        }
        if !self.args.dry_run {
            return self.write(point);
        }
        let quantization = self.quantization(point)?;
        let (layers, bytes_before) = (quantization.layers().to_vec(), quantization.bytes_before());
        Ok((point, Finished { layers, bytes_before, written: None, checked: None, outputs: Vec::new() }))
    }

    /// Why no file is that small.
    fn impossible_file(&self, budget: u64, least: &FileSize) -> anyhow::Error {
        let mut text = format!(
            "no model fits a file of {budget} bytes: with each weight at its fewest bits it has {} bytes",
            total(least)
        );
        if let Some((name, bytes)) = &least.largest {
            let is_of = |weight: &&MixedWeight| {
                name.strip_prefix(&weight.name).is_some_and(|rest| rest.is_empty() || rest.starts_with("_Q"))
            };
            let weight = self.weights.iter().find(is_of);
            let layer = weight.and_then(|weight| weight.nodes.first());
            let layer = layer.map_or(String::new(), |node| format!(" of layer '{node}'"));
            text += &format!(", of which '{name}'{layer} takes {bytes}");
        }
        let advice = "raise --budget, allow fewer bits with --mode int2, take larger blocks with --block, or exclude \
                      fewer layers";
        Error::new(ErrorKind::InvalidArgument, text).help(advice).into()
    }

    /// The most accurate model whose weights and planned peak are at most these bytes together.
    fn within_run(&mut self, budget: u64) -> Result<(usize, Finished)> {
        let mut allowed = budget;
        for _ in 0..CORRECTIONS {
            let point = self.front.within(allowed).unwrap_or(0).min(self.last());
            let (mut run, mut peak) = (0, 0);
            let mut file_bytes = 0;
            let finished = self.attempt(point, &mut |size, checked| {
                peak = checked.planned_peak.context("the peak of a run is not known before it runs")? as u64;
                (run, file_bytes) = (checked.weights as u64 + peak, size);
                Ok(run <= budget)
            })?;
            let predicted_error = self.predicted(point);
            let holds = finished.is_some();
            self.rounds.push(Round {
                file_bytes,
                predicted_error,
                measured_error: None,
                run_bytes: Some(run),
                holds,
            });
            if let Some(finished) = finished {
                return Ok((point, finished));
            }
            if point == 0 {
                let text = format!(
                    "no model fits a run of {budget} bytes: with each weight at its fewest bits, weights take {} \
                     bytes and the planned peak {peak}, {run} together",
                    run - peak
                );
                let advice = "raise --budget-run, allow fewer bits with --mode int2, or run smaller inputs";
                return Err(Error::new(ErrorKind::InvalidArgument, text).help(advice).into());
            }
            allowed = self.bytes(point).saturating_sub(run - budget);
        }
        bail!("found no model that fits a run of {budget} bytes; try a slightly larger bound")
    }

    /// The smallest model whose outputs differ by at most this.
    fn within_error(&mut self, limit: f64) -> Result<(usize, Finished)> {
        let (mut fails, mut holds, mut factor) = (None, None, 1.0);
        for _ in 0..ROUNDS {
            let Some(point) = self.next_point(limit * limit / factor, (fails, holds)) else { break };
            let measured = self.measure(point, limit)?;
            let predicted = self.predicted(point);
            if predicted > 0.0 && measured > 0.0 {
                factor = (measured / predicted).powi(2);
            }
            if measured <= limit { holds = Some(point) } else { fails = Some(point) }
        }
        let last = self.last();
        let point = match holds {
            Some(point) => point,
            None if fails == Some(last) => return Err(self.impossible_error(limit)),
            None if self.measure(last, limit)? <= limit => last,
            None => return Err(self.impossible_error(limit)),
        };
        self.write(point)
    }

    /// Where to measure next, given the sum of errors that would meet the bound and the assignments
    /// that are known to fail and to hold. `None` if they are within half a percent of the bytes.
    fn next_point(&self, error: f64, (fails, holds): (Option<usize>, Option<usize>)) -> Option<usize> {
        let wanted = self.front.below(error).unwrap_or(usize::MAX).min(self.last());
        // The bytes next to a known assignment, in case the prediction leads to one.
        let after = |point: usize| self.front.within(self.bytes(point) + self.bytes(point) / 200);
        let before = |point: usize| self.front.within(self.bytes(point) - self.bytes(point) / 200);
        let low = fails.map_or(0, |point| after(point).unwrap_or(0).max(point + 1));
        let high = match holds {
            Some(point) => before(point).unwrap_or(0).min(point.checked_sub(1)?),
            None => self.last(),
        };
        let is_open = low <= high && fails.is_none_or(|fails| fails < high);
        is_open.then(|| wanted.clamp(low, high))
    }

    /// The error of an assignment, whose model is not kept.
    fn measure(&mut self, point: usize, limit: f64) -> Result<f64> {
        let (mut file_bytes, mut measured) = (0, None);
        self.attempt(point, &mut |size, checked| {
            (file_bytes, measured) = (size, checked.relative_error);
            Ok(false)
        })?;
        let none = "the outputs are not floating point or all zero, so that they have no relative error";
        let error = measured.context(none)?;
        let (predicted_error, holds) = (self.predicted(point), error <= limit);
        let measured_error = Some(error);
        self.rounds.push(Round { file_bytes, predicted_error, measured_error, run_bytes: None, holds });
        Ok(error)
    }

    /// Why no model is that accurate.
    fn impossible_error(&self, limit: f64) -> anyhow::Error {
        let errors = self.rounds.iter().filter_map(|round| Some((round.measured_error?, round.file_bytes)));
        let best = errors.min_by(|(one, _), (other, _)| one.total_cmp(other));
        let best = best.map_or(String::new(), |(error, bytes)| {
            format!(
                ": the outputs of the most accurate one, of {bytes} bytes, differ by {:.4} %",
                100.0 * error
            )
        });
        let text = format!("no quantized model keeps an error of {} %{best}", 100.0 * limit);
        let advice = "raise --error, or take smaller blocks with --block 16";
        Error::new(ErrorKind::InvalidArgument, text).help(advice).into()
    }
}
