//! Calibration: runs of the float model on samples, which give the ranges of the static mode, and
//! what GPTQ and AWQ need.

use anyhow::Result;
use ort_runtime::onnx::Source;
use ort_runtime::quant::{
    Calibration, ChannelCalibration, HalfOptions, HalfType, HessianCalibration, Mode, Quantizer, Smoothing,
    ValueRange, read_ranges, write_ranges,
};
use ort_runtime::{Model, Session};

use super::arguments::{MethodArg, QuantizeArgs, SmoothArg};
use super::report::Calibrated;
use crate::comparison::{Inputs, MEMORY_OF_HESSIANS, calibration_session};

/// Finds the ranges of the inputs of products, and how they are smoothed.
pub(super) fn calibrate(
    args: &QuantizeArgs,
    (quantizer, source): (&mut Quantizer, &Source),
    (model, inputs): (&Model, &Inputs),
) -> Result<Option<Calibrated>> {
    if args.method.is_tuned() || args.bias_correction {
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
    let session = calibration_session(&args.model, model)?;
    let smoothing = smoothing(args, (quantizer, source), (&session, inputs))?;
    let calibration = Calibration::new(names, args.ranges.wanted()).smoothed(&smoothing);
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
            for (name, observer) in observers {
                if let Some(range) = args.ranges.range(&observer, &grid)? {
                    options.ranges.insert(name, range);
                }
            }
            if let Some(path) = &args.calibration {
                write_ranges(path, &options.ranges, args.ranges)?;
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
    let session = calibration_session(&args.model, model)?;
    let memory = args.model.memory_limit.unwrap_or(MEMORY_OF_HESSIANS);
    let mut report = Calibrated { samples: inputs.calibration(), ..Calibrated::default() };
    for part in quantizer.hessian_inputs(source, memory)? {
        let calibration = HessianCalibration::new(&part);
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

/// Finds the scales of SmoothQuant in runs of their own.
fn smoothing(
    args: &QuantizeArgs,
    (quantizer, source): (&Quantizer, &Source),
    (session, inputs): (&Session, &Inputs),
) -> Result<Smoothing> {
    let SmoothArg::By(smooth) = args.smoothing() else { return Ok(Smoothing::new()) };
    let calibration = ChannelCalibration::new(quantizer.smoothable(source)?);
    inputs.calibrate("looking for outliers", |sample| calibration.run(session, sample).map(drop))?;
    Ok(quantizer.smoothing(source, &calibration.into_channels(), smooth)?)
}
