//! Reports of `ort train` before, during and after a training run, as text and as JSON.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::Result;
use ort_report::{Table, largest_values};
use ort_runtime::plan::PlanReport;
use ort_runtime::train::{OperatorPrecision, RecomputeReport, StepMemory, Trainer, TrainingGraph};
use ort_runtime::{Model, NodePlacement};
use serde_json::{Value as Json, json};

use super::arguments::TrainArgs;
use super::training::{Epoch, History, Training, short};
use crate::args::{human_bytes, table};
use crate::output::say;
use crate::resident::{self, Resident};

/// The predicted memory of a training step, and what is recomputed to reduce it.
pub(super) struct Prediction {
    /// `None` if sizes depend on data.
    pub(super) memory: Option<StepMemory>,
    pub(super) recompute: Option<RecomputeReport>,
    /// The table of what can be recomputed, if requested.
    pub(super) plans: Option<String>,
    /// The activations kept for the backward pass, by pattern, if requested.
    pub(super) insight: Option<String>,
    /// The memory plan, if details are requested.
    pub(super) plan: Option<PlanReport>,
}

/// The number, elements and bytes of some weights.
#[derive(Default)]
struct Weights {
    count: usize,
    numbers: usize,
    bytes: usize,
}

/// What is known before the first step.
pub(super) struct Facts {
    trained: Weights,
    frozen: Weights,
    predicted: Prediction,
    placement: Placement,
    baseline: Resident,
}

/// The nodes of a step, grouped by execution provider.
struct Placement(BTreeMap<&'static str, Nodes>);

/// The nodes that one provider runs.
#[derive(Default)]
struct Nodes {
    count: usize,
    operators: BTreeSet<String>,
}

impl Placement {
    fn of(nodes: Vec<NodePlacement>) -> Placement {
        let mut by_provider: BTreeMap<&'static str, Nodes> = BTreeMap::new();
        for node in nodes {
            let of = by_provider.entry(node.provider).or_default();
            of.count += 1;
            of.operators.insert(node.operator);
        }
        Placement(by_provider)
    }

    /// Formats the placement. The provider with the most nodes comes first; the others are listed
    /// with their operators, because those are the exceptions.
    fn words(&self) -> String {
        let mut providers: Vec<_> = self.0.iter().collect();
        providers.sort_by_key(|(_, nodes)| std::cmp::Reverse(nodes.count));
        let words = providers.iter().enumerate().map(|(place, (provider, nodes))| {
            let operators: Vec<&str> = nodes.operators.iter().map(String::as_str).collect();
            match place {
                0 => format!("{} nodes on {provider}", nodes.count),
                _ => format!("{} on {provider} ({})", nodes.count, operators.join(", ")),
            }
        });
        words.collect::<Vec<_>>().join(", ")
    }

    fn json(&self) -> Json {
        self.0.iter().map(|(provider, nodes)| (provider.to_string(), Json::from(nodes.count))).collect()
    }
}

impl Facts {
    pub(super) fn new(
        model: &Model,
        trainer: &mut Trainer,
        predicted: Prediction,
        baseline: Resident,
    ) -> Facts {
        let graph = model.graph();
        let mut trained = Weights::default();
        for parameter in trainer.training_graph().parameters() {
            trained.add(parameter.tensor.element_count(), parameter.tensor.byte_count());
        }
        let mut frozen = Weights::default();
        for name in trainer.training_graph().frozen() {
            let value = graph.find_value(name);
            let tensor =
                value.and_then(|value| graph.constants.get(&value).or(graph.input_defaults.get(&value)));
            if let Some(tensor) = tensor {
                frozen.add(tensor.element_count(), tensor.byte_count());
            }
        }
        let placement = Placement::of(trainer.placement());
        Facts { trained, frozen, predicted, placement, baseline }
    }
}

impl Weights {
    fn add(&mut self, numbers: usize, bytes: usize) {
        self.count += 1;
        self.numbers += numbers;
        self.bytes += bytes;
    }

    fn words(&self) -> String {
        format!("{} weights of {} numbers, {}", self.count, self.numbers, human_bytes(self.bytes))
    }

    fn json(&self) -> Json {
        json!({"weights": self.count, "numbers": self.numbers, "bytes": self.bytes})
    }
}

/// Prints what is trained, how, and the memory of a step.
pub(super) fn before(facts: &Facts, training: &Training<'_>) -> Result<()> {
    let (args, pace) = (training.args, training.pace);
    let (loss, optimizer) = args.names();
    say!("loss         {loss} of '{}', {optimizer}", training.trainer.training_graph().output())?;
    say!("trained      {}", facts.trained.words())?;
    say!("frozen       {}", facts.frozen.words())?;
    say!(
        "samples      {} in batches of {}: {} batches and {} updates in each of {} epochs",
        pace.rows,
        pace.batch,
        pace.batches(),
        pace.batches().div_ceil(pace.accumulate),
        pace.epochs
    )?;
    mixed_precision(training)?;
    if facts.placement.0.len() > 1 {
        say!("runs         {}", facts.placement.words())?;
    }
    match &facts.predicted.memory {
        Some(memory) => say!(
            "a step takes {}: parameters {}, states {}, gradients {}, activations {}, constants {}",
            human_bytes(memory.total()),
            human_bytes(memory.parameters),
            human_bytes(memory.states),
            human_bytes(memory.gradients),
            human_bytes(memory.activations),
            human_bytes(memory.constants)
        )?,
        None => say!("the memory of a step is not known: some value sizes depend on data")?,
    }
    if let Some(plans) = &facts.predicted.plans {
        say!("\n{}\n", plans.trim_end())?;
    }
    if let Some(insight) = &facts.predicted.insight {
        say!("{insight}")?;
    }
    let recompute = facts.predicted.recompute.as_ref();
    if let Some(recompute) = recompute.filter(|report| report.values > 0) {
        say!(
            "recomputes   {} values: activations {} instead of {}, a step about {:.0} % longer",
            recompute.values,
            human_bytes(recompute.peak),
            human_bytes(recompute.peak_before),
            recompute.extra_time * 100.0
        )?;
    }
    if let Some(recompute) = recompute.filter(|report| report.sliced > 0) {
        say!("slices       {} weights are updated by rows of their gradients", recompute.sliced)?;
    }
    if let Some(plan) = &facts.predicted.plan {
        let step = plan.steps.get(plan.peak_step);
        say!("the peak     at {}\n\n{}\n", step.map_or("", |step| step.node.as_str()), largest_values(plan))?;
    }
    if let Some(limit) = args.run.memory_limit {
        say!("memory limit {}", human_bytes(limit))?;
    }
    let before = training.updates_before;
    if args.run.resume {
        say!("goes on after {before} updates")?;
    }
    say!()
}

/// Prints which operators compute in 16 bits, and which in float32.
fn mixed_precision(training: &Training<'_>) -> Result<()> {
    let options = training.trainer.options();
    let Some(precision) = options.mixed_precision else { return Ok(()) };
    let scale = match training.trainer.loss_scale() {
        Some(scale) => format!("loss scale {scale}"),
        None => "no loss scale".to_string(),
    };
    let graph = training.trainer.training_graph();
    say!("in {:<9} {}; {scale}", precision.dtype().name(), operators(graph, |row| row.half))?;
    say!("in float     {}", operators(graph, |row| row.single))
}

/// Prints the results of a training run.
pub(super) fn after(facts: &Facts, training: &mut Training<'_>) -> Result<()> {
    let measured = training.trainer.measured();
    let history = &training.history;
    // A resumed training run may already be complete.
    if history.losses.is_empty() {
        say!(
            "nothing was left to do: {} updates in {} epochs are made",
            training.trainer.updates(),
            training.pace.epochs
        )?;
        return results(training.args);
    }
    say!("\n{}", losses(history))?;
    if let Some(scale) = training.trainer.loss_scale() {
        say!("loss scale   {scale} now, {} updates skipped", training.trainer.skipped())?;
    }
    let times = Times::of(history);
    say!(
        "step         median {:.3} ms, least {:.3}, over {} batches; {:.0} samples a second",
        times.median,
        times.least,
        history.times.len(),
        times.samples_per_second
    )?;
    say!("\n{}", memory(facts.predicted.memory.as_ref(), &measured))?;
    let now = resident::measure();
    if let (Some(before), Some(peak)) = (facts.baseline.now, now.peak) {
        say!(
            "resident     {} at most, {} of it before the model was opened",
            human_bytes(peak as usize),
            human_bytes(before as usize)
        )?;
    }
    results(training.args)
}

fn results(args: &TrainArgs) -> Result<()> {
    let files = [("model", &args.results.save), ("drawing", &args.results.plot)];
    for (what, path) in files {
        if let Some(path) = path {
            say!("{what:<12} {}", path.display())?;
        }
    }
    if let Some(folder) = &args.run.checkpoint {
        say!("checkpoint   {}", folder.display())?;
    }
    Ok(())
}

/// Returns the table of the first and last losses: of batches, epochs and validation.
fn losses(history: &History) -> Table {
    let number = |number: Option<f64>| number.map_or("-".to_string(), short);
    let mut rows = table(&["", "first", "last"]);
    let ends = |pick: &dyn Fn(&Epoch) -> Option<f64>| {
        (history.epochs.first().and_then(pick), history.epochs.last().and_then(pick))
    };
    let batch = |loss: Option<&f32>| loss.map(|loss| f64::from(*loss));
    let mut add = |name: &str, (first, last): (Option<f64>, Option<f64>)| {
        if first.is_some() || last.is_some() {
            rows.add_row([name.to_string(), number(first), number(last)]);
        }
    };
    add("loss of a batch", (batch(history.losses.first()), batch(history.losses.last())));
    add("loss of an epoch", ends(&|epoch| Some(epoch.loss)));
    add("validation loss", ends(&|epoch| epoch.validation.loss));
    add("accuracy", ends(&|epoch| epoch.validation.accuracy));
    rows.align_right(1..3)
}

fn memory(predicted: Option<&StepMemory>, measured: &StepMemory) -> Table {
    let mut rows = table(&["memory", "predicted", "measured"]);
    let parts: [(&str, fn(&StepMemory) -> usize); 6] = [
        ("parameters", |it| it.parameters),
        ("states", |it| it.states),
        ("gradients", |it| it.gradients),
        ("activations", |it| it.activations),
        ("constants", |it| it.constants),
        ("together", StepMemory::total),
    ];
    for (name, part) in parts {
        let predicted = predicted.map_or("unknown".to_string(), |memory| human_bytes(part(memory)));
        rows.add_row([name.to_string(), predicted, human_bytes(part(measured))]);
    }
    rows.align_right(1..3)
}

/// Step times in milliseconds.
struct Times {
    median: f64,
    least: f64,
    samples_per_second: f64,
}

impl Times {
    fn of(history: &History) -> Times {
        let mut sorted = history.times.clone();
        sorted.sort_unstable();
        let milliseconds = |time: Option<&Duration>| time.map_or(0.0, |time| time.as_secs_f64() * 1e3);
        let total: Duration = sorted.iter().sum();
        Times {
            median: milliseconds(sorted.get(sorted.len() / 2)),
            least: milliseconds(sorted.first()),
            samples_per_second: history.samples as f64 / total.as_secs_f64().max(1e-9),
        }
    }
}

/// Returns the JSON report. Times are in milliseconds, memory in bytes.
pub(super) fn json(facts: &Facts, training: &mut Training<'_>) -> Result<Json> {
    let measured = training.trainer.measured();
    let now = resident::measure();
    let (history, args, pace) = (&training.history, training.args, training.pace);
    let times = Times::of(history);
    let (loss, optimizer) = args.names();
    Ok(json!({
        "model": args.model,
        "loss": loss,
        "optimizer": optimizer,
        "samples": pace.rows,
        "batch": pace.batch,
        "trained": facts.trained.json(),
        "frozen": facts.frozen.json(),
        "updates": training.trainer.updates(),
        "skipped_updates": training.trainer.skipped(),
        "loss_scale": training.trainer.loss_scale(),
        "precisions": precisions_json(training.trainer.training_graph()),
        "losses": history.losses,
        "epochs": history.epochs,
        "step_median_ms": times.median,
        "step_min_ms": times.least,
        "samples_per_second": times.samples_per_second,
        "nodes": facts.placement.json(),
        "memory_predicted": facts.predicted.memory.as_ref().map(memory_json),
        "recompute": facts.predicted.recompute.as_ref().map(recompute_json),
        "memory_measured": memory_json(&measured),
        "memory_limit": args.run.memory_limit,
        "baseline_rss": facts.baseline.now,
        "peak_rss": now.peak,
        "saved": args.results.save,
        "checkpoint": args.run.checkpoint,
    }))
}

/// Returns the number of nodes per operator in 16 bits and in float32, or `None` without mixed
/// precision.
fn precisions_json(graph: &TrainingGraph) -> Option<Json> {
    let rows = graph.precisions().iter();
    let row =
        |row: &OperatorPrecision| (row.operator.clone(), json!({"half": row.half, "single": row.single}));
    let rows: serde_json::Map<String, Json> = rows.map(row).collect();
    (!rows.is_empty()).then_some(Json::Object(rows))
}

/// Formats the operators with nodes in one of the two precisions, each with its count.
fn operators(graph: &TrainingGraph, count: fn(&OperatorPrecision) -> usize) -> String {
    let rows = graph.precisions().iter().filter(|row| count(row) > 0);
    rows.map(|row| format!("{} {}", count(row), row.operator)).collect::<Vec<_>>().join(", ")
}

fn recompute_json(report: &RecomputeReport) -> Json {
    json!({
        "values": report.values,
        "activations": report.peak,
        "activations_without": report.peak_before,
        "extra_time": report.extra_time,
        "sliced": report.sliced,
    })
}

fn memory_json(memory: &StepMemory) -> Json {
    json!({
        "parameters": memory.parameters,
        "states": memory.states,
        "gradients": memory.gradients,
        "activations": memory.activations,
        "constants": memory.constants,
        "total": memory.total(),
    })
}
