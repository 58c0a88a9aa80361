//! Calibration: runs of the float model on samples, which give the ranges of the static mode, and
//! what GPTQ and AWQ need.

use std::io::IsTerminal;

use anyhow::Result;
use indicatif::{ProgressBar, ProgressStyle};
use ort_runtime::onnx::Source;
use ort_runtime::quant::{
    Calibration, ChannelCalibration, HessianCalibration, Mode, Quantizer, Smoothing, StaticOptions,
    read_ranges, write_ranges,
};
use ort_runtime::{Model, Session, Value};

use super::arguments::{MethodArg, QuantizeArgs, SmoothArg};
use super::report::Calibrated;
use crate::args::ModelArgs;
use crate::inputs::gather;
use crate::providers::ProviderArgs;
use crate::samples::Samples;

/// The inputs of a run.
pub(super) type Sample = Vec<(String, Value)>;

/// The inputs of the runs.
pub(super) struct Inputs {
    samples: Option<Samples>,
    /// The samples for the calibration come first.
    calibration: usize,
    used: usize,
}

impl Inputs {
    pub(super) fn open(args: &QuantizeArgs, model: &Model) -> Result<Inputs> {
        let Some(path) = &args.data else { return Ok(Inputs { samples: None, calibration: 0, used: 1 }) };
        let samples = Samples::open(path, &model.inputs(), args.model.memory_limit)?;
        let used = samples.count().min(args.samples.get());
        // Without a calibration no sample has to be held out.
        let held_out = if args.compare { used } else { args.held_out.min(used / 4) };
        Ok(Inputs { samples: Some(samples), calibration: used - held_out, used })
    }

    /// Those that the outputs are compared with: held out, or the last one if there are too few.
    pub(super) fn compared(&self, args: &QuantizeArgs, model: &Model) -> Result<Vec<Sample>> {
        let Some(samples) = &self.samples else { return Ok(vec![gather(&args.model, model)?]) };
        (self.calibration.min(self.used - 1)..self.used).map(|index| samples.get(index)).collect()
    }

    /// Calls a function with each sample of the calibration.
    fn calibrate(
        &self,
        what: &str,
        mut run: impl FnMut(&[(&str, Value)]) -> ort_runtime::Result<()>,
    ) -> Result<()> {
        let Some(samples) = &self.samples else { return Ok(()) };
        let progress = Progress::new(what, self.calibration);
        for index in 0..self.calibration {
            let sample = samples.get(index)?;
            run(&named(&sample)).map_err(|problem| problem.within(format!("sample {index}")))?;
            progress.step();
        }
        Ok(())
    }
}

pub(super) fn named(sample: &Sample) -> Vec<(&str, Value)> {
    sample.iter().map(|(name, value)| (name.as_str(), value.clone())).collect()
}

/// The memory of Hessians, unless there is a limit.
const MEMORY_OF_HESSIANS: usize = 1 << 30;

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
        Mode::Static(_) => quantizer.activations(source)?,
        _ => return Ok(None),
    };
    if let Some(path) = args.calibration.as_deref().filter(|path| path.exists()) {
        static_options(quantizer, |options| {
            options.ranges = read_ranges(path)?;
            Ok(())
        })?;
        return Ok(None);
    }
    if inputs.samples.is_none() {
        return Ok(None);
    }
    let session = session(args, model)?;
    let smoothing = smoothing(args, (quantizer, source), (&session, inputs))?;
    let calibration = Calibration::new(names, args.ranges.wanted()).smoothed(&smoothing);
    inputs.calibrate("calibrating", |sample| calibration.run(&session, sample).map(drop))?;
    let mut report =
        Calibrated { samples: inputs.calibration, smoothed: smoothing.len(), ..Calibrated::default() };
    static_options(quantizer, |options| {
        options.smoothing = smoothing;
        let grid = options.activations();
        for (name, observer) in calibration.into_observers() {
            let counts = observer.counts();
            if counts.nan + counts.infinite > 0 {
                report.not_finite.push(name.clone());
            }
            if let Some(range) = args.ranges.range(&observer, &grid)? {
                options.ranges.insert(name, range);
            }
        }
        if let Some(path) = &args.calibration {
            write_ranges(path, &options.ranges, args.ranges)?;
        }
        Ok(())
    })?;
    Ok(Some(report))
}

/// Finds what GPTQ, AWQ or a bias correction make of the weights. The samples run once for each
/// part of the Hessians that the memory holds.
fn tune(
    args: &QuantizeArgs,
    (quantizer, source): (&mut Quantizer, &Source),
    (model, inputs): (&Model, &Inputs),
) -> Result<Calibrated> {
    let session = session(args, model)?;
    let memory = args.model.memory_limit.unwrap_or(MEMORY_OF_HESSIANS);
    let mut report = Calibrated { samples: inputs.calibration, ..Calibrated::default() };
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

/// The session of a calibration. It runs on the CPU, because values in device memory are not seen.
fn session(args: &QuantizeArgs, model: &Model) -> Result<Session> {
    let on_cpu = ModelArgs { providers: ProviderArgs::default(), ..args.model.clone() };
    Ok(Calibration::session(on_cpu.builder(model)?)?)
}

/// Finds the scales of SmoothQuant in runs of their own.
fn smoothing(
    args: &QuantizeArgs,
    (quantizer, source): (&Quantizer, &Source),
    (session, inputs): (&Session, &Inputs),
) -> Result<Smoothing> {
    let SmoothArg::By(smooth) = args.smooth else { return Ok(Smoothing::new()) };
    let calibration = ChannelCalibration::new(quantizer.smoothable(source)?);
    inputs.calibrate("looking for outliers", |sample| calibration.run(session, sample).map(drop))?;
    Ok(quantizer.smoothing(source, &calibration.into_channels(), smooth)?)
}

fn static_options(
    quantizer: &mut Quantizer,
    change: impl FnOnce(&mut StaticOptions) -> Result<()>,
) -> Result<()> {
    match &mut quantizer.mode {
        Mode::Static(options) => change(options),
        _ => Ok(()),
    }
}

/// A progress bar on standard error, if that is a terminal.
struct Progress(Option<ProgressBar>);

impl Progress {
    fn new(what: &str, samples: usize) -> Progress {
        let is_seen = std::io::stderr().is_terminal() && tracing::enabled!(tracing::Level::WARN);
        Progress(is_seen.then(|| {
            let bar = ProgressBar::new(samples as u64);
            if let Ok(style) =
                ProgressStyle::with_template("{prefix} {bar:24} {pos}/{len} samples  {eta} left")
            {
                bar.set_style(style);
            }
            bar.set_prefix(what.to_string());
            bar
        }))
    }

    fn step(&self) {
        self.0.iter().for_each(|bar| bar.inc(1));
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.iter().for_each(ProgressBar::finish_and_clear);
    }
}
