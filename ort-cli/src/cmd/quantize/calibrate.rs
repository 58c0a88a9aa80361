//! Calibration: runs of the float model on samples, which give the ranges of the static mode, and
//! what GPTQ and AWQ need.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::Result;
use ort_runtime::onnx::Source;
use ort_runtime::quant::{
    Calibration, ChannelCalibration, GridOptions, HalfOptions, HalfType, HessianCalibration, MeanCalibration,
    Mode, Observer, Quantizer, RangeRule, Smoothing, TokenMask, ValueRange, read_ranges, write_ranges,
};
use ort_runtime::{Model, Session};

use super::arguments::{MethodArg, QuantizeArgs, RangesArg, SmoothArg};
use super::ranges::search_ranges;
use super::report::Calibrated;
use crate::args::ModelArgs;
use crate::comparison::{Inputs, MEMORY_OF_HESSIANS, calibration_session};

/// Finds the ranges of the inputs of products, and how they are smoothed.
pub(super) fn calibrate(
    args: &QuantizeArgs,
    (quantizer, source): (&mut Quantizer, &Source),
    (model, inputs): (&Model, &Inputs),
) -> Result<Option<Calibrated>> {
    let is_blocks = matches!(quantizer.mode, Mode::Blocks(_));
    if is_blocks && (args.method.is_tuned() || args.corrects_bias()) {
        return tune(args, (quantizer, source), (model, inputs)).map(Some);
    }
    let names = match &quantizer.mode {
        Mode::Static(_) | Mode::Half(HalfOptions { ty: HalfType::Float16, .. }) => {
            quantizer.activations(source)?
        }
        _ => return Ok(None),
    };
    if let Some(path) = args.calibration.as_deref().filter(|path| path.exists()) {
        if let Mode::Static(options) = &mut quantizer.mode {
            options.ranges = read_ranges(path)?;
        }
        return Ok(None);
    }
    if !inputs.has_samples() {
        return Ok(None);
    }
    let mask = args.mask(model)?;
    let session = calibration_session(&whole(&args.model, mask.as_deref()), model)?;
    let smoothing = smoothing(args, (quantizer, source), (&session, inputs, &mask))?;
    let calibration = Calibration::new(names, args.ranges.wanted()).smoothed(&smoothing).masked(mask.clone());
    inputs.calibrate("calibrating", |sample| calibration.run(&session, sample).map(drop))?;
    let mut report =
        Calibrated { samples: inputs.calibration(), smoothed: smoothing.len(), ..Calibrated::default() };
    let observers = calibration.into_observers();
    for (name, observer) in &observers {
        let counts = observer.counts();
        if counts.nan + counts.infinite > 0 {
            report.not_finite.push(name.clone());
        }
    }
    match &mut quantizer.mode {
        Mode::Static(options) => {
            options.smoothing = smoothing;
            let grid = options.activations();
            let mut candidates = Vec::new();
            for rule in args.ranges.rules() {
                candidates.push(ranges_of(&observers, rule, &grid)?);
            }
            options.ranges = candidates.first().cloned().unwrap_or_default();
            if args.ranges == RangesArg::Auto {
                report.rules = search_ranges(args, (quantizer, source), (model, inputs), &candidates)?;
            }
            if args.corrects_bias() {
                let inputs_of_biases = quantizer.bias_inputs(source)?;
                let calibration = MeanCalibration::new(inputs_of_biases).masked(mask);
                inputs.calibrate("observing means", |sample| calibration.run(&session, sample).map(drop))?;
                report.corrected = quantizer.correct_static_bias(source, &calibration.into_means())?;
            }
            if let (Some(path), Mode::Static(options)) = (&args.calibration, &quantizer.mode) {
                let rule = args.ranges.rules().first().copied().unwrap_or(RangeRule::MinMax);
                write_ranges(path, &options.ranges, rule)?;
            }
        }
        Mode::Half(options) => {
            let extremes = observers.iter().filter_map(|(name, seen)| Some((name, seen.extremes()?)));
            options.ranges = extremes.map(|(name, ends)| (name.clone(), ValueRange::from(ends))).collect();
        }
        _ => {}
    }
    Ok(Some(report))
}

/// Finds what GPTQ, AWQ or a bias correction make of the weights. The samples run once for each
/// part of the Hessians that the memory holds.
fn tune(
    args: &QuantizeArgs,
    (quantizer, source): (&mut Quantizer, &Source),
    (model, inputs): (&Model, &Inputs),
) -> Result<Calibrated> {
    let mask = args.mask(model)?;
    let session = calibration_session(&whole(&args.model, mask.as_deref()), model)?;
    let memory = args.model.memory_limit.unwrap_or(MEMORY_OF_HESSIANS);
    let mut report = Calibrated { samples: inputs.calibration(), ..Calibrated::default() };
    for part in quantizer.hessian_inputs(source, memory)? {
        let calibration = HessianCalibration::new(&part).masked(mask.clone());
        inputs.calibrate("observing inputs", |sample| calibration.run(&session, sample).map(drop))?;
        let hessians = calibration.into_hessians();
        match args.method {
            MethodArg::Awq => report.smoothed += quantizer.awq(source, &hessians)?,
            MethodArg::Gptq => report.compensated += quantizer.gptq(source, hessians, args.gptq())?,
            _ => report.corrected += quantizer.correct_bias(source, hessians)?,
        }
    }
    Ok(report)
}

/// The arguments of a calibration: under a mask, a sample runs as a whole, so that its values have
/// the sizes of the mask.
fn whole(args: &ModelArgs, mask: Option<&TokenMask>) -> ModelArgs {
    ModelArgs { no_batch_split: args.no_batch_split || mask.is_some(), ..args.clone() }
}

/// The ranges that a rule makes.
fn ranges_of(
    observers: &BTreeMap<String, Observer>,
    rule: RangeRule,
    grid: &GridOptions,
) -> Result<BTreeMap<String, ValueRange>> {
    let mut ranges = BTreeMap::new();
    for (name, observer) in observers {
        if let Some(range) = rule.range(observer, grid)? {
            ranges.insert(name.clone(), range);
        }
    }
    Ok(ranges)
}

/// Finds the scales of SmoothQuant in runs of their own.
fn smoothing(
    args: &QuantizeArgs,
    (quantizer, source): (&Quantizer, &Source),
    (session, inputs, mask): (&Session, &Inputs, &Option<Arc<TokenMask>>),
) -> Result<Smoothing> {
    let SmoothArg::By(smooth) = args.smoothing() else { return Ok(Smoothing::new()) };
    let calibration = ChannelCalibration::new(quantizer.smoothable(source)?).masked(mask.clone());
    inputs.calibrate("looking for outliers", |sample| calibration.run(session, sample).map(drop))?;
    Ok(quantizer.smoothing(source, &calibration.into_channels(), smooth)?)
}
