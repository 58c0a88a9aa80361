//! `ort quantize`: writes a model whose weights are small integers, or compares two models.
//!
//! The static mode first runs the model on samples, to find the ranges of the inputs of products.
//! Before the file appears under its name, both models run on the same inputs, and the difference
//! of their outputs is reported.

mod arguments;
mod bounded;
mod calibrate;
mod ranges;
mod report;
mod score;
mod scratch;
mod search;
mod trials;

use std::collections::BTreeMap;
use std::process::ExitCode;

use anyhow::Result;
use ort_runtime::Model;
use ort_runtime::onnx::Source;
use ort_runtime::quant::Quantizer;

pub(crate) use self::arguments::QuantizeArgs;
use self::report::{Report, Row};
use self::scratch::Scratch;
use self::trials::{Kept, Trials};
use crate::args::ModelArgs;
use crate::comparison::{Inputs, Ran, Sizes, compare};
use crate::output::say_report;

pub(crate) fn run(args: &QuantizeArgs) -> Result<ExitCode> {
    let report = match args.bound.bound() {
        _ if args.compare => compare_models(args)?,
        Some(bound) => bounded::quantize(args, bound)?,
        None => quantize(args)?,
    };
    say_report(&report, args.report.as_deref(), args.json, |report| report.print(args))?;
    Ok(ExitCode::SUCCESS)
}

/// Compares two models on the same inputs.
fn compare_models(args: &QuantizeArgs) -> Result<Report> {
    let original = args.model.load()?;
    let other = ModelArgs { model: args.output.clone(), ..args.model.clone() }.load()?;
    args.check_outputs()?;
    let inputs = Inputs::open(&args.samples, (&args.model, &original), false)?;
    let random_samples = inputs.are_random();
    let inputs = inputs.compared(&args.model, &original)?;
    let ran = Ran::of(&args.model, &original, &inputs)?;
    let (checked, outputs) = compare(&args.model, &ran, &other)?;
    Ok(Report { outputs, checked: Some(checked), random_samples, ..Report::default() })
}

fn quantize(args: &QuantizeArgs) -> Result<Report> {
    let mut quantizer = args.quantizer(args.mode_or_least())?;
    let source = args.model.source()?;
    args.check_outputs()?;
    let model = args.model.load()?;
    let inputs = Inputs::open(&args.samples, (&args.model, &model), true)?;
    let even = if args.equalise { Even::of(args, &quantizer, &source)? } else { None };
    let (float_source, float_model) =
        even.as_ref().map_or((&source, &model), |even| (&even.source, &even.model));
    let calibration = calibrate::calibrate(args, (&mut quantizer, float_source), (float_model, &inputs))?;
    let random_samples = inputs.are_random();
    let mut report = Report { calibration, random_samples, ..Report::default() };
    if let Some(even) = &even {
        report.calibration.get_or_insert_default().equalised = even.pairs;
    }
    if args.dry_run {
        let quantization = quantizer.quantize(float_source)?;
        let layers = quantization.layers().iter().cloned();
        report.layers = layers.map(|layer| Row::of(layer, &BTreeMap::new())).collect();
        return Ok(report);
    }
    // Runs before anything is written: a model that does not run is not worth the time.
    let compared = inputs.compared(&args.model, &model)?;
    let original = match args.needs_error() {
        true => Ran::of(&args.model, &model, &compared)?,
        false => Ran::of_original(&args.model, &model, &compared)?,
    };
    drop((model, inputs));
    let trials = Trials { args, source: float_source, original: &original };
    if !trials.settle_bias(&mut quantizer)? {
        report.calibration.get_or_insert_default().corrected = 0;
    }
    if let Some(command) = &args.score {
        report.scores = Some(trials.settle_score(command, &mut quantizer)?);
    }
    let Kept { layers, bytes_before, written, checked, outputs } = trials.write(&quantizer, &args.output)?;
    report.layers = layers.into_iter().map(|layer| Row::of(layer, &written.noises)).collect();
    report.written = Some(Sizes::of(bytes_before, &written));
    (report.checked, report.outputs) = (Some(checked), outputs);
    Ok(report)
}

/// A model whose channels are equalised, in a folder of its own while it is read.
struct Even {
    source: Source,
    model: Model,
    pairs: usize,
    _folder: Scratch,
}

impl Even {
    /// `None` if no channels can be equalised.
    fn of(args: &QuantizeArgs, quantizer: &Quantizer, source: &Source) -> Result<Option<Even>> {
        let Some(equalised) = quantizer.equalise(source)? else { return Ok(None) };
        let (pairs, folder) = (equalised.pairs, Scratch::beside(&args.output)?);
        let path = folder.file("equalised.onnx");
        equalised.write(&path)?;
        let args = ModelArgs { model: path, ..args.model.clone() };
        Ok(Some(Even { source: args.source()?, model: args.load()?, pairs, _folder: folder }))
    }
}
