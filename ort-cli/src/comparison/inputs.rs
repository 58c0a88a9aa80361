//! The inputs of the runs that compare two models: samples of files, of which the first are for a
//! calibration, or a single set of inputs.

use std::io::IsTerminal;
use std::num::NonZeroUsize;
use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use ort_runtime::quant::Calibration;
use ort_runtime::{Model, Session, Value};

use crate::args::ModelArgs;
use crate::inputs::gather;
use crate::numbers::{positive, whole};
use crate::providers::ProviderArgs;
use crate::samples::Samples;

/// The samples.
#[derive(Args, Clone)]
pub(crate) struct SampleArgs {
    /// Samples, for the calibration and for the comparison: an archive of arrays whose first axis
    /// counts them, or a folder with an archive for each. `random` makes some up, which say nothing
    /// about accuracy.
    #[arg(long, value_name = "FILE.npz|DIR|random", conflicts_with_all = ["input", "inputs"])]
    pub(crate) data: Option<PathBuf>,
    /// Use this many samples at most.
    #[arg(long, value_name = "N", default_value = "300", requires = "data", value_parser = positive::<NonZeroUsize>)]
    pub(crate) samples: NonZeroUsize,
    /// Of these, keep the last N out of the calibration, to compare the outputs with; a quarter at
    /// most.
    #[arg(long, value_name = "N", default_value_t = 32, requires = "data", value_parser = whole::<usize>)]
    pub(crate) held_out: usize,
}

/// The memory of the Hessians of a calibration, unless there is a limit.
pub(crate) const MEMORY_OF_HESSIANS: usize = 1 << 30;

/// The inputs of a run.
pub(crate) type Sample = Vec<(String, Value)>;

/// The value of `--data` for samples without a file.
const RANDOM: &str = "random";

/// Where samples come from.
enum Source {
    Files(Samples),
    /// Random values for the inputs of this model, of a seed for each sample.
    Random(Box<ModelArgs>, Model),
}

impl Source {
    fn get(&self, index: usize) -> Result<Sample> {
        match self {
            Source::Files(samples) => samples.get(index),
            Source::Random(args, model) => {
                let seed = args.seed.wrapping_add(index as u64);
                gather(&ModelArgs { seed, ..ModelArgs::clone(args) }, model)
            }
        }
    }
}

/// The inputs of the runs.
pub(crate) struct Inputs {
    samples: Option<Source>,
    /// The samples for the calibration come first.
    calibration: usize,
    used: usize,
}

impl Inputs {
    /// Opens the samples. Without a calibration no sample has to be held out.
    pub(crate) fn open(
        args: &SampleArgs,
        (model_args, model): (&ModelArgs, &Model),
        has_calibration: bool,
    ) -> Result<Inputs> {
        let Some(path) = &args.data else { return Ok(Inputs { samples: None, calibration: 0, used: 1 }) };
        let (samples, used) = if path.as_os_str() == RANDOM {
            (Source::Random(Box::new(model_args.clone()), model.clone()), args.samples.get())
        } else {
            let samples = Samples::open(path, &model.inputs(), model_args.memory_limit)?;
            let used = samples.count().min(args.samples.get());
            (Source::Files(samples), used)
        };
        let held_out = if has_calibration { args.held_out.min(used / 4) } else { used };
        Ok(Inputs { samples: Some(samples), calibration: used - held_out, used })
    }

    /// Whether there are samples.
    pub(crate) fn has_samples(&self) -> bool {
        self.samples.is_some()
    }

    /// Whether the samples are random.
    pub(crate) fn are_random(&self) -> bool {
        matches!(self.samples, Some(Source::Random(..)))
    }

    /// The number of samples for the calibration.
    pub(crate) fn calibration(&self) -> usize {
        self.calibration
    }

    /// Those that the outputs are compared with: held out, or the last one if there are too few.
    pub(crate) fn compared(&self, args: &ModelArgs, model: &Model) -> Result<Vec<Sample>> {
        let Some(samples) = &self.samples else { return Ok(vec![gather(args, model)?]) };
        (self.calibration.min(self.used - 1)..self.used).map(|index| samples.get(index)).collect()
    }

    /// Calls a function with each sample of the calibration.
    pub(crate) fn calibrate(
        &self,
        what: &str,
        mut run: impl FnMut(&[(&str, Value)]) -> ort_runtime::Result<()>,
    ) -> Result<()> {
        let Some(samples) = &self.samples else { return Ok(()) };
        let progress = Progress::new(what, "samples", self.calibration);
        for index in 0..self.calibration {
            let sample = samples.get(index)?;
            run(&named(&sample)).map_err(|problem| problem.within(format!("sample {index}")))?;
            progress.step();
        }
        Ok(())
    }
}

impl Inputs {
    /// Some of the samples of the calibration, spread over all of them.
    pub(crate) fn spread(&self, count: usize) -> Result<Vec<Sample>> {
        let Some(samples) = &self.samples else { return Ok(Vec::new()) };
        let all = self.calibration.max(1);
        let count = count.min(all);
        (0..count).map(|index| samples.get(index * all / count)).collect()
    }
}

pub(crate) fn named(sample: &Sample) -> Vec<(&str, Value)> {
    sample.iter().map(|(name, value)| (name.as_str(), value.clone())).collect()
}

/// The session of a calibration. It runs on the CPU, because values in device memory are not seen.
pub(crate) fn calibration_session(args: &ModelArgs, model: &Model) -> Result<Session> {
    let on_cpu = ModelArgs { providers: ProviderArgs::default(), ..args.clone() };
    Ok(Calibration::session(on_cpu.builder(model)?)?)
}

/// A progress bar on standard error, if that is a terminal.
pub(crate) struct Progress(Option<ProgressBar>);

impl Progress {
    pub(crate) fn new(what: &str, unit: &str, count: usize) -> Progress {
        let is_seen = std::io::stderr().is_terminal() && tracing::enabled!(tracing::Level::WARN);
        Progress(is_seen.then(|| {
            let bar = ProgressBar::new(count as u64);
            if let Ok(style) = ProgressStyle::with_template("{prefix} {bar:24} {pos}/{len} {msg}  {eta} left")
            {
                bar.set_style(style);
            }
            bar.set_prefix(what.to_string());
            bar.set_message(unit.to_string());
            bar
        }))
    }

    pub(crate) fn step(&self) {
        self.0.iter().for_each(|bar| bar.inc(1));
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.iter().for_each(ProgressBar::finish_and_clear);
    }
}
