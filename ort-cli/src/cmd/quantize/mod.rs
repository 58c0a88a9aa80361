//! `ort quantize`: writes a model whose weights are small integers, or compares two models.
//!
//! The static mode first runs the model on samples, to find the ranges of the inputs of products.
//! Before the file appears under its name, both models run on the same inputs, and the difference
//! of their outputs is reported.

mod arguments;
mod bounded;
mod calibrate;
mod report;
mod search;

use std::collections::BTreeMap;
use std::process::ExitCode;

use anyhow::{Context, Result};
use ort_runtime::Model;

pub(crate) use self::arguments::QuantizeArgs;
use self::report::{Report, Row};
use crate::args::ModelArgs;
use crate::comparison::{Inputs, Ran, Sizes, compare, refuse_new_infinities};
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
    let inputs = inputs.compared(&args.model, &original)?;
    let ran = Ran::of(&args.model, &original, &inputs)?;
    let (checked, outputs) = compare(&args.model, &ran, &other)?;
    Ok(Report { outputs, checked: Some(checked), ..Report::default() })
}

fn quantize(args: &QuantizeArgs) -> Result<Report> {
    let mut quantizer = args.quantizer(args.mode_or_least())?;
    let source = args.model.source()?;
    args.check_outputs()?;
    let model = args.model.load()?;
    let inputs = Inputs::open(&args.samples, (&args.model, &model), true)?;
    let calibration = calibrate::calibrate(args, (&mut quantizer, &source), (&model, &inputs))?;
    let quantization = quantizer.quantize(&source)?;
    let bytes_before = quantization.bytes_before();
    let layers = quantization.layers().to_vec();
    let mut report = Report { calibration, ..Report::default() };
    let mut noises = BTreeMap::new();
    if !args.dry_run {
        // Runs before anything is written: a model that does not run is not worth the time.
        let original = Ran::of(&args.model, &model, &inputs.compared(&args.model, &model)?)?;
        drop((model, inputs));
        let mut compared = None;
        let written = quantization.write(&args.output, &args.weights(), &mut |model: &Model| {
            let (checked, outputs) = compare(&args.model, &original, model)?;
            refuse_new_infinities(&outputs)?;
            compared = Some((checked, outputs));
            Ok(())
        })?;
        let (checked, outputs) = compared.context("the model was not checked")?;
        (report.checked, report.outputs) = (Some(checked), outputs);
        report.written = Some(Sizes::of(bytes_before, &written));
        noises = written.noises;
    }
    report.layers = layers.into_iter().map(|layer| Row::of(layer, &noises)).collect();
    Ok(report)
}
