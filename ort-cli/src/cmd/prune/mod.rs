//! `ort prune`: writes a model with zeros among its weights, or with fewer channels.
//!
//! With samples, the model first runs on them, to see which weights matter. Before the file appears
//! under its name, both models run on the same inputs, and the difference of their outputs is
//! reported.

mod arguments;
mod report;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use ort_runtime::Model;
use ort_runtime::onnx::{Source, Weights};
use ort_runtime::quant::{PruneCalibration, Pruner};

pub(crate) use self::arguments::PruneArgs;
use self::arguments::Wanted;
use self::report::{Calibrated, Report, Row};
use crate::comparison::{
    Inputs, MEMORY_OF_HESSIANS, Ran, Sizes, calibration_session, compare, refuse_new_infinities,
};
use crate::output::{data_path, say_report};

pub(crate) fn run(args: &PruneArgs) -> Result<ExitCode> {
    let report = prune(args)?;
    say_report(&report, args.report.as_deref(), args.json, |report| report.print(args))?;
    Ok(ExitCode::SUCCESS)
}

fn prune(args: &PruneArgs) -> Result<Report> {
    let mut wanted = args.wanted()?;
    let has_calibration = matches!(wanted, Wanted::Elements(_));
    let source = args.model.source()?;
    check_outputs(args)?;
    let model = args.model.load()?;
    let inputs = Inputs::open(&args.samples, (&args.model, &model), has_calibration)?;
    let (calibration, pruning) = match &mut wanted {
        Wanted::Elements(pruner) => {
            (observe(args, (pruner, &source), (&model, &inputs))?, pruner.prune(&source)?)
        }
        Wanted::Channels(pruner) => (None, pruner.prune(&source)?),
    };
    let bytes_before = pruning.bytes_before();
    let layers = pruning.layers().to_vec();
    let mut report = Report { calibration, ..Report::default() };
    let (mut noises, mut zeros) = (BTreeMap::new(), BTreeMap::new());
    if !args.dry_run {
        // Runs before anything is written: a model that does not run is not worth the time.
        let original = Ran::of(&args.model, &model, &inputs.compared(&args.model, &model)?)?;
        drop((model, inputs));
        let mut compared = None;
        let written = pruning.write(&args.output, &args.weights(), &mut |model: &Model| {
            let (checked, outputs) = compare(&args.model, &original, model)?;
            refuse_new_infinities(&outputs)?;
            compared = Some((checked, outputs));
            Ok(())
        })?;
        let (checked, outputs) = compared.context("the model was not checked")?;
        (report.checked, report.outputs) = (Some(checked), outputs);
        report.written = Some(Sizes::of(bytes_before, &written));
        (noises, zeros) = (written.noises, written.zeros);
    }
    report.layers = layers.into_iter().map(|layer| Row::of(layer, &noises, &zeros)).collect();
    report.total();
    Ok(report)
}

/// Observes the inputs of layers. The samples run once for each part of the statistics that the
/// memory holds.
fn observe(
    args: &PruneArgs,
    (pruner, source): (&mut Pruner, &Source),
    (model, inputs): (&Model, &Inputs),
) -> Result<Option<Calibrated>> {
    if !inputs.has_samples() {
        return Ok(None);
    }
    let session = calibration_session(&args.model, model)?;
    let memory = args.model.memory_limit.unwrap_or(MEMORY_OF_HESSIANS);
    let mut report = Calibrated { samples: inputs.calibration(), ..Calibrated::default() };
    for part in pruner.inputs(source, memory)? {
        let calibration = PruneCalibration::new(&part);
        inputs.calibrate("observing inputs", |sample| calibration.run(&session, sample).map(drop))?;
        report.tuned += pruner.observe(source, &calibration.into_statistics())?;
    }
    Ok(Some(report))
}

/// Refuses to replace a file that is read, before hours of calibration.
fn check_outputs(args: &PruneArgs) -> Result<()> {
    let mut outputs: Vec<PathBuf> = args.report.iter().cloned().collect();
    outputs.push(args.output.clone());
    outputs.extend((args.weights() != Weights::Inside).then(|| data_path(&args.output)));
    Ok(args.model.source()?.check_outputs(outputs.iter().map(PathBuf::as_path))?)
}
