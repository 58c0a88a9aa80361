//! `ort train`: trains a model on the arrays of a NumPy archive.

mod arguments;
mod check;
mod data;
mod evaluation;
mod fit;
mod plot;
mod progress;
mod report;
mod training;
mod warnings;

use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Result, bail, ensure};
pub(crate) use arguments::TrainArgs;
use ort_runtime::onnx::{FileAccess, Source};
use ort_runtime::train::{Recompute, Trainer, TrainingGraph, memory_insight, memory_table};
use ort_runtime::{ErrorKind, Model, Profile, exact_bytes};

use super::profile::print_tables;
use crate::output::{say_json, write_file};
use crate::resident;
use data::{DataSet, Pace};
use fit::Fit;
use report::{Facts, Prediction};
use training::{History, Position, Training};

pub(crate) fn run(args: &TrainArgs) -> Result<ExitCode> {
    args.check_places()?;
    let baseline = resident::measure();
    let source = Source::open(&args.model, FileAccess::default())?;
    source.check_outputs(args.results.plot.as_deref())?;
    let model = Model::from_source(source.strict(args.strict))?;
    if args.results.check {
        return check::run(args, &model);
    }
    let data = DataSet::open(args.data()?)?;
    let validation = args.validation.as_deref().map(DataSet::open).transpose()?;
    let (batch, is_fixed) = fit::batch_size(&model, args.update.batch, data.rows)?;
    let accumulate = args.update.accumulate as usize;
    let pace = Pace { rows: data.rows, batch, is_fixed, accumulate, epochs: args.update.epochs };
    let mut trainer = trainer(args, &model, &data, pace)?;
    let dims = check_data(args, &trainer, &data, validation.as_ref(), pace)?;
    warnings::warn(&model, trainer.training_graph(), &trainer.options().loss);
    warnings::warn_of_ignored_flags(&model, trainer.options());
    warnings::warn_of_class_axis(trainer.training_graph(), &trainer.options().loss, &data);
    let predicted = predict(&mut trainer, &model, &dims, (pace, args.run.memory_opt_config.as_deref()))?;
    let facts = Facts::new(&model, &mut trainer, predicted, baseline);
    let mut training = Training {
        args,
        trainer,
        data: &data,
        validation: validation.as_ref(),
        pace,
        position: Position::default(),
        history: History::default(),
        updates_before: 0,
        skipped_in_a_row: 0,
        profile: args.results.profile.map(|_| Arc::new(Profile::new())),
    };
    // A checkpoint is read before the report, which tells where training resumes.
    training.begin()?;
    if !args.results.json {
        report::before(&facts, &training)?;
    }
    training.run()?;
    if let Some(path) = &args.results.save {
        training.trainer.export(path)?;
    }
    if let Some(path) = &args.results.plot {
        let name = args.model.file_stem().unwrap_or_default().to_string_lossy();
        let drawing = plot::draw(&name, &training.history);
        write_file(path, |file| Ok(writeln!(file, "{drawing}")?))?;
    }
    match args.results.json {
        true => say_json(&report::json(&facts, &mut training)?)?,
        false => report::after(&facts, &mut training)?,
    }
    if let (Some(profile), Some(nodes)) = (&training.profile, args.results.profile) {
        // The first batch warms up and is not in the profile.
        let batches = training.history.losses.len().saturating_sub(1);
        ensure!(batches > 0, "--profile: there was one batch, and the first is not profiled");
        print_tables(&profile.events(), batches, nodes)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Builds the trainer. A memory limit too small for the parameters and the optimizer state is an
/// error that names the smallest limit for batches of this size.
fn trainer(args: &TrainArgs, model: &Model, data: &DataSet, pace: Pace) -> Result<Trainer> {
    let options = args.options(pace.updates())?;
    match Trainer::new(model, options.clone()) {
        Err(problem) if problem.kind() == ErrorKind::OutOfMemory => {
            // `Trainer::new` does not know the batch, and names a limit for dimensions of 1. Try
            // again with the sizes of the data.
            let training = TrainingGraph::new(model, &options)?;
            let fit = Fit::new(&training, &options.loss, args.ignored_label())?;
            let dims = fit.check(data, pace.batch)?;
            let dims: Vec<(&str, i64)> = dims.iter().map(|(name, size)| (name.as_str(), *size)).collect();
            Ok(Trainer::for_sizes(model, options, &dims)?)
        }
        made => Ok(made?),
    }
}

/// Checks the samples. Returns the sizes of the symbolic dimensions.
fn check_data(
    args: &TrainArgs,
    trainer: &Trainer,
    data: &DataSet,
    validation: Option<&DataSet>,
    pace: Pace,
) -> Result<Vec<(String, i64)>> {
    let fit = Fit::new(trainer.training_graph(), &trainer.options().loss, args.ignored_label())?;
    let dims = fit.check(data, pace.batch)?;
    for data in [Some(data), validation].into_iter().flatten() {
        let pace = Pace { rows: data.rows, ..pace };
        // The validation set may be smaller than a batch.
        fit.check(data, if pace.is_fixed { pace.batch } else { pace.batch.min(pace.rows) })?;
        let path = data.path.display();
        if pace.batches() == 0 {
            bail!("{path}: {} samples are fewer than the model's fixed batch of {}", pace.rows, pace.batch);
        }
        if pace.left_out() > 0 {
            tracing::warn!(
                "{path}: {} of {} samples do not fill a batch of {}, the model's fixed size: each epoch leaves them out",
                pace.left_out(),
                pace.rows,
                pace.batch
            );
        }
    }
    Ok(dims)
}

/// Predicts the memory of a step from its plan. If the limit cannot hold a step, the error names a
/// batch size that fits, or other advice if there is none.
fn predict(
    trainer: &mut Trainer,
    model: &Model,
    dims: &[(String, i64)],
    (pace, config): (Pace, Option<&str>),
) -> Result<Prediction> {
    let dims: Vec<(&str, i64)> = dims.iter().map(|(name, size)| (name.as_str(), *size)).collect();
    let options = trainer.options();
    // Without a limit or a request nothing is recomputed, so there is nothing to choose.
    let chooses = options.memory_limit.is_some() || options.recompute != Recompute::AsLimited;
    let limit = options.memory_limit.unwrap_or(usize::MAX);
    let is_verbose = tracing::enabled!(tracing::Level::INFO);
    let is_asked = options.recompute != Recompute::AsLimited || is_verbose;
    let recompute = options.recompute.clone();
    let plans = match is_asked {
        true => trainer.recompute_plans(&dims).ok().map(|rows| memory_table(&recompute, &rows)),
        false => None,
    };
    let patterns = if is_detailed() { trainer.activation_patterns(&dims).ok() } else { None };
    let insight = patterns.map(|patterns| memory_insight(&recompute, config, &patterns));
    let chosen = if chooses { trainer.optimize_memory(&dims).map(Some) } else { Ok(None) };
    let predicted = chosen.and_then(|recompute| {
        let plan = if is_verbose { Some(trainer.plan(&dims)?) } else { None };
        let memory = match trainer.memory(&dims) {
            // Sizes that depend on data have no plan.
            Err(problem) if problem.kind() == ErrorKind::NotImplemented => None,
            memory => Some(memory?),
        };
        Ok(Prediction { memory, recompute, plans, insight, plan })
    });
    match predicted {
        Ok(predicted) => {
            let takes = predicted.memory.map_or(0, |memory| memory.total());
            ensure!(
                takes <= limit,
                "out of memory: a training step needs {}, the memory limit is {}",
                exact_bytes(takes),
                exact_bytes(limit)
            );
            Ok(predicted)
        }
        Err(problem) if problem.kind() == ErrorKind::OutOfMemory => {
            let advice = smaller_batch(trainer, model, &dims, pace);
            bail!("{problem}; {advice}")
        }
        Err(problem) => Err(problem.into()),
    }
}

/// Returns whether to report every activation pattern: with `-vv`, or at the log level that ONNX
/// Runtime uses for it.
fn is_detailed() -> bool {
    let level = std::env::var("ORTMODULE_LOG_LEVEL");
    tracing::enabled!(tracing::Level::DEBUG)
        || level.is_ok_and(|level| ["DEVINFO", "VERBOSE"].contains(&&*level))
}

/// Returns advice for a step that does not fit in memory.
fn smaller_batch(trainer: &mut Trainer, model: &Model, dims: &[(&str, i64)], pace: Pace) -> String {
    let inputs = model.inputs();
    let given = inputs.iter().filter(|spec| !spec.has_default);
    let symbol = given.filter_map(|spec| spec.ty.shape()?.first()?.as_symbol()?.name()).next();
    let limit = trainer.options().memory_limit.unwrap_or(usize::MAX);
    let size = match symbol {
        // Only a symbolic batch can be made smaller.
        Some(symbol) if !pace.is_fixed => {
            let others: Vec<(&str, i64)> = dims.iter().copied().filter(|(name, _)| *name != symbol).collect();
            trainer.largest_batch(symbol, &others, limit).ok().flatten()
        }
        _ => None,
    };
    match size.filter(|size| *size < pace.batch as i64) {
        Some(size) => format!("--batch {size} fits; --accumulate makes updates of several batches"),
        None => "freeze weights with --freeze, or take an optimizer with smaller states".to_string(),
    }
}
