//! Comparison of the outputs of two models on the same inputs, for commands that write a model.

mod inputs;
mod report;
mod weight_pages;

use std::collections::BTreeMap;

use half::{bf16, f16};
use ort_runtime::{
    DType, Error, ErrorKind, MemoryShortage, Model, Result, RunOptions, Tensor, Value, ValueObserver,
};

use self::inputs::named;
pub(crate) use self::inputs::{
    Inputs, MEMORY_OF_HESSIANS, Progress, Sample, SampleArgs, calibration_session,
};
pub(crate) use self::report::{Checked, OutputError, Sizes, print_outputs};
use self::weight_pages::WeightPages;
use crate::args::ModelArgs;

/// Runs of a model.
pub(crate) struct Ran {
    inputs: Vec<Sample>,
    outputs: Vec<Sample>,
    /// The largest planned peak.
    peak: Option<usize>,
    weights: usize,
    /// Whether the memory limit was too low for a run, so that there are no outputs.
    is_refused: bool,
}

/// The memory of a single comparing run, unless it needs more. Under a limit, weights are packed
/// for the step that reads them, so that a large model does not take its size in memory.
const MEMORY_OF_ONE_RUN: usize = 64 << 20;

impl Ran {
    /// The outputs of each run.
    pub(crate) fn outputs(&self) -> &[Sample] {
        &self.outputs
    }

    /// Runs a model on each of the inputs.
    pub(crate) fn of(args: &ModelArgs, model: &Model, inputs: &[Sample]) -> anyhow::Result<Ran> {
        let own = args.memory_limit.unwrap_or(usize::MAX);
        // A quarter of the caller's limit: weights that are packed again have pages of the file,
        // too, as many at most as the packed ones have bytes.
        let most = MEMORY_OF_ONE_RUN.min(own / 4);
        let mut limit = (inputs.len() == 1).then_some(most);
        for _ in 0..2 {
            let problem = match Ran::within(args, model, (inputs, limit)) {
                Err(problem) if limit.is_some() => problem,
                done => return done,
            };
            let shortage = problem.downcast_ref::<Error>().and_then(|problem| problem.shortage());
            let needed = shortage.map(MemoryShortage::sufficient_limit).ok_or(problem)?;
            limit = Some(needed).filter(|needed| *needed < own);
        }
        Ran::within(args, model, (inputs, None))
    }

    fn within(
        args: &ModelArgs,
        model: &Model,
        (inputs, limit): (&[Sample], Option<usize>),
    ) -> anyhow::Result<Ran> {
        let mut builder = args.builder(model)?;
        if let Some(limit) = limit {
            builder = builder.memory_limit(limit);
        }
        let session = builder.build()?;
        let pages = args.memory_limit.map(|_| WeightPages::of(model));
        let observer = pages.as_ref().map(|pages| pages as &dyn ValueObserver);
        let options = RunOptions { observer, ..RunOptions::default() };
        if args.memory_limit.is_some() {
            // What was quantized before has left free pages in the heap.
            session.trim();
        }
        let (mut peak, mut weights, mut outputs) = (Some(0), 0, Vec::new());
        for sample in inputs {
            let plan = session.plan_for_inputs(&named(sample))?;
            peak = peak.and_then(|peak: usize| Some(peak.max(plan.peak_bytes?)));
            weights = plan.weights_bytes;
            outputs.push(session.run_with(&named(sample), &options)?);
        }
        Ok(Ran { inputs: inputs.to_vec(), outputs, peak, weights, is_refused: false })
    }

    /// [`Ran::of`] for an original that a memory limit may refuse to run. The other model then only
    /// has to run.
    pub(crate) fn of_original(args: &ModelArgs, model: &Model, inputs: &[Sample]) -> anyhow::Result<Ran> {
        let problem = match Ran::of(args, model, inputs) {
            Err(problem) if args.memory_limit.is_some() => problem,
            done => return done,
        };
        if problem.downcast_ref::<Error>().is_none_or(|problem| problem.shortage().is_none()) {
            return Err(problem);
        }
        tracing::warn!("the memory limit is too low to run the original, so the outputs are not compared");
        let inputs = inputs.to_vec();
        Ok(Ran { inputs, outputs: Vec::new(), peak: None, weights: 0, is_refused: true })
    }
}

/// The differences of an output so far.
#[derive(Default)]
struct Tally {
    elements: u64,
    /// Whether it has elements of floating point.
    is_float: bool,
    signal: f64,
    error: f64,
    largest: f64,
    rows: u64,
    same_rows: u64,
    equal: u64,
    not_finite: u64,
}

impl Tally {
    fn add(&mut self, before: &Tensor, after: &Tensor) -> Result<()> {
        self.elements += before.shape().iter().product::<usize>() as u64;
        if let (Some(before_numbers), Some(after_numbers)) = (numbers(before)?, numbers(after)?) {
            self.is_float = true;
            self.add_floats(&before_numbers, &after_numbers);
            // A vector of one element has the largest at the same place whatever it is.
            if let Some(row) = before.shape().last().copied().filter(|row| *row > 1) {
                let rows = before_numbers.chunks(row).zip(after_numbers.chunks(row));
                for (before, after) in rows {
                    self.rows += 1;
                    self.same_rows += u64::from(place_of_largest(before) == place_of_largest(after));
                }
            }
            return Ok(());
        }
        if let (Some(size), Some(one), Some(other)) =
            (before.dtype().byte_size(), before.bytes(), after.bytes())
            && before.dtype() == after.dtype()
        {
            let pairs = one.chunks(size.max(1)).zip(other.chunks(size.max(1)));
            self.equal += pairs.filter(|(one, other)| one == other).count() as u64;
        }
        Ok(())
    }

    fn add_floats(&mut self, before: &[f64], after: &[f64]) {
        for (before, after) in before.iter().zip(after) {
            if before.is_finite() && after.is_finite() {
                let difference = before - after;
                self.signal += before * before;
                self.error += difference * difference;
                self.largest = self.largest.max(difference.abs());
            } else if before.is_finite() {
                self.not_finite += 1;
            }
        }
    }

    fn result(&self, name: &str) -> OutputError {
        let share = |part: u64, all: u64| (all > 0).then(|| part as f64 / all as f64);
        let is_measured = self.is_float && self.signal > 0.0;
        let decibels = 10.0 * (self.signal / self.error).log10();
        OutputError {
            name: name.to_string(),
            elements: self.elements,
            relative_error: is_measured.then(|| (self.error / self.signal).sqrt()),
            // JSON has no infinity, which is the ratio of an output that did not change.
            decibels: Some(decibels).filter(|decibels| is_measured && decibels.is_finite()),
            largest_difference: self.is_float.then_some(self.largest),
            same_largest: share(self.same_rows, self.rows),
            equal: share(self.equal, self.elements).filter(|_| !self.is_float),
            not_finite: self.not_finite,
        }
    }
}

/// The position of the largest element. NaN is never the largest.
fn place_of_largest(values: &[f64]) -> Option<usize> {
    let numbered = values.iter().enumerate().filter(|(_, value)| !value.is_nan());
    // Of equal elements the first, as ArgMax has it.
    let best = numbered.reduce(|best, next| if next.1 > best.1 { next } else { best });
    best.map(|(place, _)| place)
}

/// Runs a model on the inputs of another, and compares their outputs.
pub(crate) fn compare(
    args: &ModelArgs,
    original: &Ran,
    model: &Model,
) -> Result<(Checked, Vec<OutputError>)> {
    let fail = |text: String| Error::new(ErrorKind::Fail, text);
    let inputs: Vec<Sample> =
        original.inputs.iter().map(|sample| fitted(model, sample)).collect::<Result<_>>()?;
    let ran = Ran::of(args, model, &inputs).map_err(|problem| fail(format!("{problem:#}")))?;
    if original.is_refused {
        refuse_infinities(&ran.outputs)?;
    }
    let mut tallies: BTreeMap<&str, Tally> = BTreeMap::new();
    for (before, after) in original.outputs.iter().zip(&ran.outputs) {
        for (name, before) in before {
            let after = after.iter().find(|(other, _)| other == name);
            let (_, after) = after.ok_or_else(|| fail(format!("the other model has no output '{name}'")))?;
            let (Value::Tensor(before), Value::Tensor(after)) = (before, after) else { continue };
            let (shape, other) = (before.shape(), after.shape());
            if shape != other {
                return Err(fail(format!("output '{name}' is {shape:?} and {other:?} in the other model")));
            }
            tallies.entry(name).or_default().add(before, after)?;
        }
    }
    let sum = |of: fn(&Tally) -> f64| tallies.values().map(of).sum::<f64>();
    let (signal, error) = (sum(|tally| tally.signal), sum(|tally| tally.error));
    let checked = Checked {
        runs: ran.outputs.len(),
        is_compared: !original.is_refused,
        planned_peak_before: original.peak,
        planned_peak: ran.peak,
        weights_before: original.weights,
        weights: ran.weights,
        relative_error: (signal > 0.0).then(|| (error / signal).sqrt()),
    };
    // In the order of the model.
    let names = original.outputs.first().into_iter().flatten().map(|(name, _)| name.as_str());
    let results = names.filter_map(|name| Some(tallies.get(name)?.result(name)));
    Ok((checked, results.collect()))
}

/// Refuses a model that computes NaN or infinities where the original has numbers.
pub(crate) fn refuse_new_infinities(outputs: &[OutputError]) -> Result<()> {
    let not_finite: u64 = outputs.iter().map(|output| output.not_finite).sum();
    if not_finite == 0 {
        return Ok(());
    }
    let text = format!("{not_finite} elements of the outputs are NaN or infinite, but not the original's");
    Err(Error::new(ErrorKind::Fail, text).help(
        "keep the nodes that overflow as they are with --exclude, or give real inputs with --inputs or --data",
    ))
}

/// Refuses NaN and infinities where the original's outputs are not known.
fn refuse_infinities(outputs: &[Sample]) -> Result<()> {
    let mut not_finite = 0;
    for (_, value) in outputs.iter().flatten() {
        let Value::Tensor(tensor) = value else { continue };
        let numbers = numbers(tensor)?.unwrap_or_default();
        not_finite += numbers.iter().filter(|number| !number.is_finite()).count();
    }
    if not_finite == 0 {
        return Ok(());
    }
    let text = format!(
        "{not_finite} elements of the outputs are NaN or infinite, and the memory limit is too low to run the \
         original, which may have them, too"
    );
    Err(Error::new(ErrorKind::Fail, text).help(
        "raise --memory-limit to compare with the original, or keep the nodes that overflow as they are with \
         --exclude",
    ))
}

/// A sample in the types of the model, which may have other types of floating point.
fn fitted(model: &Model, sample: &Sample) -> Result<Sample> {
    let specs = model.inputs();
    let fit = |(name, value): &(String, Value)| -> Result<(String, Value)> {
        let wanted = specs.iter().find(|spec| spec.name == *name).and_then(|spec| spec.ty.dtype());
        let fitted = match (value, wanted) {
            (Value::Tensor(tensor), Some(wanted)) if tensor.dtype() != wanted => converted(tensor, wanted)?,
            _ => None,
        };
        Ok((name.clone(), fitted.map_or_else(|| value.clone(), Value::from)))
    };
    sample.iter().map(fit).collect()
}

/// A tensor as another type of floating point; `None` if one of the types is none.
fn converted(tensor: &Tensor, wanted: DType) -> Result<Option<Tensor>> {
    let Some(numbers) = numbers(tensor)? else { return Ok(None) };
    let (shape, numbers) = (tensor.shape(), numbers.into_iter());
    Ok(Some(match wanted {
        DType::F16 => Tensor::from_vec::<f16>(shape, numbers.map(f16::from_f64).collect())?,
        DType::BF16 => Tensor::from_vec::<bf16>(shape, numbers.map(bf16::from_f64).collect())?,
        DType::F32 => Tensor::from_vec::<f32>(shape, numbers.map(|number| number as f32).collect())?,
        _ => return Ok(None),
    }))
}

/// The elements of a tensor of floating-point numbers.
fn numbers(tensor: &Tensor) -> Result<Option<Vec<f64>>> {
    Ok(match tensor.dtype() {
        DType::F32 => Some(tensor.to_vec::<f32>()?.into_iter().map(f64::from).collect()),
        DType::F16 => Some(tensor.to_vec::<f16>()?.into_iter().map(f64::from).collect()),
        DType::BF16 => Some(tensor.to_vec::<bf16>()?.into_iter().map(f64::from).collect()),
        DType::F64 => Some(tensor.to_vec::<f64>()?),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tally_has_the_errors_of_all_runs() -> Result<()> {
        let tensor = |values: &[f32]| Tensor::from_slice(&[2, 2], values);
        let mut tally = Tally::default();
        tally.add(&tensor(&[3.0, 4.0, 0.0, 0.0])?, &tensor(&[3.0, 4.5, 0.0, 0.0])?)?;
        tally.add(&tensor(&[0.0, 0.0, 1.0, 2.0])?, &tensor(&[0.0, 0.0, 2.0, f32::NAN])?)?;
        let found = tally.result("y");
        assert_eq!((found.elements, found.not_finite, found.largest_difference), (8, 1, Some(1.0)));
        // 1.25 of 26: the element without a number counts in neither.
        assert!((found.relative_error.unwrap_or_default() - (1.25_f64 / 26.0).sqrt()).abs() < 1e-12);
        assert!((found.decibels.unwrap_or_default() - 10.0 * (26.0_f64 / 1.25).log10()).abs() < 1e-9);
        // The last row has its largest element at another place.
        assert_eq!((found.same_largest, found.equal), (Some(0.75), None));
        let mut tally = Tally::default();
        let ids = |values: &[i64]| Tensor::from_slice(&[4], values);
        tally.add(&ids(&[1, 2, 3, 4])?, &ids(&[1, 2, 3, 5])?)?;
        let found = tally.result("ids");
        assert_eq!((found.equal, found.relative_error, found.largest_difference), (Some(0.75), None, None));
        Ok(())
    }
}
