//! Trains a model, step by step.

use std::path::Path;
use std::sync::Arc;

use ort_core::dtype::DType;
use ort_core::ir::Graph;
use ort_core::onnx::{Weights, save};
use ort_core::plan::PlanReport;
use ort_core::session::{Model, NodePlacement, Profile, RunOptions, Session, SessionBuilder, open_devices};
use ort_core::tensor::{Tensor, TensorBuffer, Value};
use ort_core::{Error, MemoryShortage, Result, advise, ensure, error};

use crate::assemble::{FINITE, GRADIENT_SCALE, OVERWRITE};
use crate::graph::{COUNTER, LOSS, LOSS_SCALE, Parameter, SEED, TrainingGraph};
use crate::mixed::LossScaler;
use crate::optimizer::{LEARNING_RATE, STEP};
use crate::recompute::Request;
use crate::stage::{Settings, Stage};
use crate::state::State;
use crate::weights::TrainableGraph;
use crate::{ActivationPattern, Optimizer, PlanRow, Recompute, RecomputeReport, TrainingOptions};

/// Trains a model: each step runs the forward pass, the loss, the backward pass and the update of each parameter as one planned graph.
pub struct Trainer {
    pub(crate) model: Model,
    pub(crate) options: TrainingOptions,
    pub(crate) training: TrainingGraph,
    pub(crate) state: State,
    stages: Stages,
    /// Updates that were made.
    pub(crate) updates: u64,
    /// Batches that random numbers were drawn for.
    pub(crate) batches: u64,
    /// Batches whose gradients are summed and not yet applied.
    pub(crate) pending: usize,
    /// The loss scale, where there is one.
    pub(crate) scaler: Option<LossScaler>,
    /// Whether the table of plans is made with the next graph.
    tabulates: bool,
    profile: Option<Arc<Profile>>,
    /// The graph of evaluation where it comes from a file.
    pub(crate) evaluation: Option<Graph>,
}

/// The bytes of a training step at some sizes of its batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepMemory {
    /// Of parameters and statistics.
    pub parameters: usize,
    /// Of the optimizer's states.
    pub states: usize,
    /// Of sums of gradients over batches.
    pub gradients: usize,
    /// Of activations, gradients within a step, and workspaces: the peak of the plan.
    pub activations: usize,
    /// Of constants beside the model's own: folded ones, copies for alignment, packed weights.
    pub constants: usize,
}

impl StepMemory {
    /// All of it.
    pub fn total(&self) -> usize {
        self.parameters + self.states + self.gradients + self.activations + self.constants
    }
}

/// The parts of a training; at most one has the tensors.
#[derive(Default)]
struct Stages {
    step: Option<Stage>,
    accumulate: Option<Stage>,
    apply: Option<Stage>,
    evaluate: Option<Stage>,
    entered: Option<Kind>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Step,
    Accumulate,
    Apply,
    Evaluate,
}

impl Stages {
    fn get(&mut self, kind: Kind) -> &mut Option<Stage> {
        match kind {
            Kind::Step => &mut self.step,
            Kind::Accumulate => &mut self.accumulate,
            Kind::Apply => &mut self.apply,
            Kind::Evaluate => &mut self.evaluate,
        }
    }
}

impl Trainer {
    /// A training of a model from its weights on.
    ///
    /// # Errors
    ///
    /// An option is out of its range, the model cannot be trained as they say ([`TrainingGraph::new`]), or parameters and states do not fit into the memory
    /// limit: then the least limit of a step with symbolic dimensions of 1 is named.
    pub fn new(model: &Model, options: TrainingOptions) -> Result<Trainer> {
        Trainer::for_sizes(model, options, &[])
    }

    /// The same, where the least limit that a refusal names is that of a step with these sizes of symbolic dimensions; those that
    /// are not named count as 1.
    ///
    /// # Errors
    ///
    /// Those of [`Self::new`].
    pub fn for_sizes(model: &Model, options: TrainingOptions, dims: &[(&str, i64)]) -> Result<Trainer> {
        options.check()?;
        let training = TrainingGraph::new(model, &options)?;
        let (updates, batches, pending) = (0, 0, 0);
        let scaler = options.scaling().map(LossScaler::new);
        let state = State::new(&open_devices(&options.providers)?);
        let stages = Stages::default();
        let mut trainer = Trainer {
            model: model.clone(),
            options,
            training,
            state,
            stages,
            updates,
            batches,
            pending,
            scaler,
            tabulates: false,
            profile: None,
            evaluation: None,
        };
        trainer.check_state_fits(dims)?;
        trainer.fill_state()?;
        if !trainer.waits_for_sizes() {
            trainer.ready(trainer.main_kind())?;
        }
        Ok(trainer)
    }

    /// The graph of the step, without its update.
    pub fn training_graph(&self) -> &TrainingGraph {
        &self.training
    }

    /// What the training is to be.
    pub fn options(&self) -> &TrainingOptions {
        &self.options
    }

    /// Updates that were made.
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// Batches whose gradients are summed and not yet applied.
    pub fn pending(&self) -> usize {
        self.pending
    }

    /// What the loss of the next batch is multiplied by before it is differentiated; none where the options have no loss scale.
    pub fn loss_scale(&self) -> Option<f32> {
        self.scaler.map(|scaler| scaler.scale)
    }

    /// Updates that were left out, as gradients were not finite. They do not count as [`Self::updates`].
    pub fn skipped(&self) -> u64 {
        self.scaler.map_or(0, |scaler| scaler.skipped)
    }

    /// The learning rate of the next update.
    pub fn learning_rate(&self) -> f32 {
        (f64::from(self.options.learning_rate) * self.options.schedule.factor(self.updates)) as f32
    }

    /// Sets the learning rate that the schedule scales.
    pub fn set_learning_rate(&mut self, rate: f32) -> Result<()> {
        ensure!(
            rate.is_finite() && rate >= 0.0,
            InvalidArgument,
            "a learning rate of {rate}, expected 0 or more"
        );
        self.options.learning_rate = rate;
        Ok(())
    }

    /// Collects the time of each node of the steps to come; none from then on where there is no profile.
    pub fn set_profile(&mut self, profile: Option<Arc<Profile>>) {
        self.profile = profile;
    }

    /// One batch: its loss is returned and, with [`TrainingOptions::accumulate`] of 1, all parameters are updated; otherwise after so many batches.
    ///
    /// # Errors
    ///
    /// An input is missing or does not fit, or the step does not fit into the memory limit: then nothing has changed. A run that is ended by a
    /// deadline may have updated some parameters, as may one whose values of unknown size do not fit.
    pub fn train_step(&mut self, inputs: &[(&str, Value)]) -> Result<f32> {
        if self.options.accumulate > 1 {
            let loss = self.accumulate(inputs)?;
            if self.pending >= self.options.accumulate {
                self.apply()?;
            }
            return Ok(loss);
        }
        ensure!(
            self.pending == 0,
            InvalidArgument,
            help = "apply them first",
            "gradients of {} batches are not applied",
            self.pending
        );
        let mut given = inputs.to_vec();
        self.update_inputs(&mut given, 1.0)?;
        let loss = self.run(Kind::Step, given)?;
        self.end_update(Kind::Step)?;
        self.batches += 1;
        Ok(loss)
    }

    /// The loss of a batch, whose gradients are added to those of the batches since the last update.
    pub fn accumulate(&mut self, inputs: &[(&str, Value)]) -> Result<f32> {
        self.accumulate_onto(inputs, self.pending == 0)
    }

    /// The same; with `overwrite` sums of gradients begin anew.
    pub(crate) fn accumulate_onto(&mut self, inputs: &[(&str, Value)], overwrite: bool) -> Result<f32> {
        let mut given = inputs.to_vec();
        given.push((OVERWRITE, Tensor::from_bools(&[], &[overwrite])?.into()));
        let loss = self.run(Kind::Accumulate, given)?;
        self.pending = if overwrite { 1 } else { self.pending + 1 };
        self.batches += 1;
        Ok(loss)
    }

    /// Updates the parameters by the mean of the gradients since the last update.
    pub fn apply(&mut self) -> Result<()> {
        self.apply_scaled(1.0 / self.pending as f32)?;
        self.pending = 0;
        Ok(())
    }

    /// Updates the parameters by the sums of gradients times `scale`, and keeps the sums.
    pub(crate) fn apply_scaled(&mut self, scale: f32) -> Result<()> {
        ensure!(
            self.pending > 0,
            InvalidArgument,
            help = "accumulate a batch first",
            "there are no gradients"
        );
        let mut given = Vec::new();
        self.update_inputs(&mut given, scale)?;
        self.run(Kind::Apply, given)?;
        self.end_update(Kind::Apply)?;
        Ok(())
    }

    /// One of [`TrainingOptions::additional_outputs`], of the last batch.
    ///
    /// # Errors
    ///
    /// It is none of them, or no batch has run yet.
    pub fn output(&mut self, name: &str) -> Result<Value> {
        let known = &self.options.additional_outputs;
        ensure!(
            known.iter().any(|it| it == name),
            InvalidArgument,
            help = advise("additional outputs", name, known.iter().map(String::as_str)),
            "the training has no additional output '{name}'"
        );
        let kind = self.stages.entered.filter(|kind| *kind != Kind::Apply);
        let kind = kind.ok_or_else(|| {
            error!(InvalidArgument, "output '{name}' is gone").help("ask for it right after a batch")
        })?;
        self.ready(kind)?.output(name)
    }

    /// Has another optimizer update the parameters, from states of zeros on.
    pub(crate) fn set_optimizer(&mut self, optimizer: Optimizer, clip_norm: Option<f32>) -> Result<()> {
        self.leave();
        let options = TrainingOptions { optimizer, clip_norm, ..self.options.clone() };
        options.check()?;
        let before = std::mem::replace(&mut self.options, options);
        if let Err(problem) = self.check_state_fits(&[]) {
            self.options = before;
            return Err(problem);
        }
        for Parameter { name, tensor, .. } in &self.training.parameters {
            for state in before.optimizer.states(tensor.dtype(), tensor.shape()) {
                drop(self.state.take(&state_name(name, state.kind))?);
            }
        }
        (self.stages.step, self.stages.apply) = (None, None);
        if self.options.memory_limit.is_some() {
            self.stages = Stages::default();
        }
        self.updates = 0;
        self.fill_states()
    }

    /// The loss of a batch with the parameters as they are: nothing drops, normalizations take their running statistics.
    pub fn eval_step(&mut self, inputs: &[(&str, Value)]) -> Result<f32> {
        self.run(Kind::Evaluate, inputs.to_vec())
    }

    /// The loss of a batch as [`Self::eval_step`] has it, with the output that it is of.
    pub fn evaluate(&mut self, inputs: &[(&str, Value)]) -> Result<(f32, Value)> {
        let loss = self.run(Kind::Evaluate, inputs.to_vec())?;
        let output = self.training.output.clone();
        Ok((loss, self.ready(Kind::Evaluate)?.output(&output)?))
    }

    /// The model's outputs with the parameters as they are, as [`Self::eval_step`] computes them.
    pub fn predict(&mut self, inputs: &[(&str, Value)]) -> Result<Vec<(String, Value)>> {
        self.leave();
        let model = Model::from_graph(self.trained_graph()?);
        let devices = self.state.devices().iter().cloned();
        devices.fold(Session::builder(&model), SessionBuilder::device).build()?.run(inputs)
    }

    /// A trained parameter as it is now.
    pub fn parameter(&mut self, name: &str) -> Result<Tensor> {
        self.leave();
        self.state.tensor(name)
    }

    /// The mean of each parameter's gradients over the batches since the last update.
    pub fn grads(&mut self) -> Result<Vec<(String, Tensor)>> {
        ensure!(
            self.pending > 0,
            InvalidArgument,
            help = "accumulate a batch first",
            "there are no gradients"
        );
        self.leave();
        let scale = 1.0 / (self.pending as f64 * f64::from(self.loss_scale().unwrap_or(1.0)));
        let mut found = Vec::with_capacity(self.training.parameters.len());
        for Parameter { name, .. } in &self.training.parameters {
            let mut sum = self.state.on_host(self.state.get(&gradient_name(name))?)?;
            match sum.dtype() {
                DType::F64 => sum.as_mut_slice::<f64>()?.iter_mut().for_each(|each| *each *= scale),
                _ => sum.as_mut_slice::<f32>()?.iter_mut().for_each(|each| *each *= scale as f32),
            }
            found.push((name.clone(), sum.tensor()?));
        }
        Ok(found)
    }

    /// The memory of a step at these sizes of symbolic dimensions; those that are not named count as 1.
    pub fn memory(&mut self, dims: &[(&str, i64)]) -> Result<StepMemory> {
        let kind = self.main_kind();
        let stage = self.ready_at(kind, dims)?;
        let constants = stage.constants();
        let activations = stage.plan(dims)?.peak_bytes.ok_or_else(|| {
            error!(NotImplemented, "sizes of values depend on data, so that no plan tells the peak")
        })?;
        Ok(StepMemory { activations, constants, ..self.held() })
    }

    /// The memory of the steps so far as it was counted while they ran: activations are the most that one of them had in use at once.
    pub fn measured(&mut self) -> StepMemory {
        let kind = if self.options.accumulate == 1 { Kind::Step } else { Kind::Accumulate };
        let stage = self.stages.get(kind).as_ref();
        let activations = stage.map_or(0, |stage| stage.session().memory().activations_peak);
        let constants = stage.map_or(0, Stage::constants);
        StepMemory { activations, constants, ..self.held() }
    }

    /// What stays from step to step.
    fn held(&self) -> StepMemory {
        let parameters = self.training.parameters.iter();
        let sizes: usize = parameters.clone().map(|parameter| parameter.tensor.byte_count()).sum();
        let statistics: usize = self.training.statistics.iter().map(|it| it.tensor.byte_count()).sum();
        let states: usize = parameters.map(|parameter| self.state_bytes_of(parameter)).sum();
        let gradients = if self.options.accumulate > 1 || self.pending > 0 { sizes } else { 0 };
        StepMemory { parameters: sizes + statistics, states, gradients, ..StepMemory::default() }
    }

    /// The plan of a step at these sizes.
    pub fn plan(&mut self, dims: &[(&str, i64)]) -> Result<PlanReport> {
        let kind = self.main_kind();
        self.ready_at(kind, dims)?.plan(dims)
    }

    /// Where each node of a step runs; nothing before the step is compiled, which a plan of it or the first batch does.
    pub fn placement(&mut self) -> Vec<NodePlacement> {
        let kind = self.main_kind();
        self.stages.get(kind).as_ref().map_or_else(Vec::new, |stage| stage.session().placement())
    }

    /// The largest size of the dimension `dim`, as of a batch, whose step keeps to `bytes`; computed from plans, not tried. None where 1 does not fit.
    /// Before recomputation is chosen for a size it is the largest without any.
    pub fn largest_batch(&mut self, dim: &str, others: &[(&str, i64)], bytes: usize) -> Result<Option<i64>> {
        let kind = self.main_kind();
        self.leave();
        let Some(rest) = bytes.checked_sub(self.kept_bytes()) else { return Ok(None) };
        // The steps to come have recomputation for their sizes, which this one is without; and its limit is `bytes`.
        let is_there = self.stages.get(kind).is_some();
        let is_to_come = !is_there && self.waits_for_sizes();
        let made = if is_to_come { Some(self.made(kind, None)?) } else { None };
        let stage = match &made {
            Some(stage) => stage,
            None => self.ready(kind)?,
        };
        let Some(rest) = rest.checked_sub(stage.folded()) else { return Ok(None) };
        stage.session().largest_size(dim, others, rest)
    }

    /// Writes the model with its trained weights as ONNX, whole or not at all.
    pub fn export(&mut self, path: impl AsRef<Path>) -> Result<()> {
        let graph = self.trained_graph()?;
        let weights = Weights::Inside;
        save(&graph, self.model.info(), path, &weights)
    }

    /// The inference graph with the weights as they are now.
    pub(crate) fn trained_graph(&mut self) -> Result<Graph> {
        self.leave();
        let mut graph = TrainableGraph::of(&self.model, &self.options)?.graph;
        let trained = self.training.parameters.iter().map(|it| &it.name);
        let names: Vec<String> =
            trained.chain(self.training.statistics.iter().map(|it| &it.name)).cloned().collect();
        for name in names {
            let value = graph.find_value(&name).ok_or_else(|| error!(Fail, "weight '{name}' is gone"))?;
            let tensor = self.state.tensor(&name)?;
            match graph.input_defaults.get_mut(&value) {
                Some(default) => *default = tensor,
                None => drop(graph.constants.insert(value, tensor)),
            }
        }
        Ok(graph)
    }

    /// Chooses what is computed again ([`TrainingOptions::recompute`]) for these sizes of symbolic dimensions, those of the steps to come; the others count
    /// as 1. Without it the sizes of the first step count. Steps of other sizes run all the same, but may then not fit.
    ///
    /// # Errors
    ///
    /// No choice keeps to the memory limit: the smallest limit that one keeps to is named.
    pub fn optimize_memory(&mut self, dims: &[(&str, i64)]) -> Result<RecomputeReport> {
        self.leave();
        let kind = self.main_kind();
        *self.stages.get(kind) = None;
        let report = self.ready_at(kind, dims)?.recompute();
        match report {
            Some(report) => Ok(report),
            None => {
                let peak = self.plan(dims)?.planned_bytes;
                Ok(RecomputeReport { peak_before: peak, peak, ..RecomputeReport::default() })
            }
        }
    }

    /// What may be computed again at these sizes, and by how many bytes the peak falls with it: the rows of [`memory_table`](crate::memory_table).
    pub fn recompute_plans(&mut self, dims: &[(&str, i64)]) -> Result<Vec<PlanRow>> {
        self.tabulated(dims).map(|stage| stage.rows().to_vec())
    }

    /// What is kept for the backward pass at these sizes, node by node: what [`memory_insight`](crate::memory_insight) prints.
    pub fn activation_patterns(&mut self, dims: &[(&str, i64)]) -> Result<Vec<ActivationPattern>> {
        self.tabulated(dims).map(|stage| stage.patterns().to_vec())
    }

    /// The part that runs for each batch, made anew with the tables of what may be computed again.
    fn tabulated(&mut self, dims: &[(&str, i64)]) -> Result<&mut Stage> {
        self.leave();
        let kind = self.main_kind();
        *self.stages.get(kind) = None;
        self.tabulates = true;
        let made = self.ready_at(kind, dims).map(|_| ());
        self.tabulates = false;
        made?;
        self.ready(kind)
    }

    /// The part that runs for each batch.
    fn main_kind(&self) -> Kind {
        if self.options.accumulate == 1 { Kind::Step } else { Kind::Accumulate }
    }

    /// Whether the graph of a batch follows from its sizes.
    fn waits_for_sizes(&self) -> bool {
        self.options.memory_limit.is_some() || self.options.recompute != Recompute::AsLimited
    }

    /// A stage, compiled for these sizes where it follows from them.
    fn ready_at(&mut self, kind: Kind, dims: &[(&str, i64)]) -> Result<&mut Stage> {
        let is_asked = self.waits_for_sizes() || self.tabulates;
        let recomputes = matches!(kind, Kind::Step | Kind::Accumulate) && is_asked;
        if !recomputes || self.stages.get(kind).is_some() {
            return self.ready(kind);
        }
        let stage = self.recomputing(kind, dims)?;
        *self.stages.get(kind) = Some(stage);
        self.ready(kind)
    }

    /// A stage with recomputation as asked, within the memory limit.
    fn recomputing(&self, kind: Kind, dims: &[(&str, i64)]) -> Result<Stage> {
        let graph = if kind == Kind::Step { self.step_graph()? } else { self.accumulate_graph()? };
        let (recompute, tabulate) = (&self.options.recompute, self.tabulates);
        let (kept, limit) = (self.kept_bytes(), self.options.memory_limit);
        Stage::recomputing(graph, &self.settings(limit), &Request { recompute, tabulate, kept, limit, dims })
    }

    /// What sessions of stages are built with, within a limit in bytes.
    fn settings(&self, limit: Option<usize>) -> Settings<'_> {
        let own = limit.map(|limit| limit.saturating_sub(self.kept_bytes()));
        Settings { devices: self.state.devices(), options: &self.options, own }
    }

    /// The sizes of symbolic dimensions that inputs have.
    fn sizes_of(&self, inputs: &[(&str, Value)]) -> Vec<(String, i64)> {
        let graph = &self.training.graph;
        let mut sizes: Vec<(String, i64)> = Vec::new();
        for (name, value) in inputs {
            let formal = graph.inputs.iter().find(|&&id| *graph.value(id).name == **name);
            let formal = formal.and_then(|&id| graph.value(id).ty.shape());
            let (Some(formal), Ok(actual)) = (formal, value.tensor()) else { continue };
            for (dim, size) in formal.iter().zip(actual.shape()) {
                let symbol = dim.as_symbol().map(ToString::to_string);
                sizes.extend(symbol.map(|symbol| (symbol, *size as i64)));
            }
        }
        sizes.sort();
        sizes.dedup_by(|one, other| one.0 == other.0);
        sizes
    }

    /// The numbers that an update by sums of gradients reads; these are multiplied by `scale`.
    fn update_inputs(&self, given: &mut Vec<(&str, Value)>, scale: f32) -> Result<()> {
        let scale = scale / self.loss_scale().unwrap_or(1.0);
        given.push((GRADIENT_SCALE, Tensor::scalar(scale)?.into()));
        given.push((LEARNING_RATE, Tensor::scalar(self.learning_rate())?.into()));
        given.push((STEP, Tensor::scalar(self.updates as i64 + 1)?.into()));
        Ok(())
    }

    /// Counts an update that has run, or that it was left out.
    fn end_update(&mut self, kind: Kind) -> Result<()> {
        let is_updated = match self.scaler {
            Some(_) => self.ready(kind)?.is_true(FINITE)?,
            None => true,
        };
        self.updates += u64::from(is_updated);
        if let (Some(scaler), Some(rule)) = (&mut self.scaler, self.options.scaling()) {
            scaler.follow(rule, is_updated);
        }
        Ok(())
    }

    /// Runs a stage on what it takes of the given inputs; returns the loss, where it has one.
    fn run(&mut self, kind: Kind, mut given: Vec<(&str, Value)>) -> Result<f32> {
        given.push((SEED, Tensor::scalar(self.options.seed as i64)?.into()));
        given.push((COUNTER, Tensor::scalar(self.batches as i64)?.into()));
        given.push((LOSS_SCALE, Tensor::scalar(self.loss_scale().unwrap_or(1.0))?.into()));
        if self.stages.get(kind).is_none() {
            let sizes = self.sizes_of(&given);
            let sizes: Vec<(&str, i64)> = sizes.iter().map(|(name, size)| (name.as_str(), *size)).collect();
            self.ready_at(kind, &sizes)?;
        }
        self.enter(kind)?;
        let profile = self.profile.clone();
        let stage = self.ready(kind)?;
        let own = [SEED, COUNTER, LEARNING_RATE, STEP, LOSS_SCALE, GRADIENT_SCALE];
        given.retain(|(name, _)| !own.contains(name) || stage.takes(name));
        let options = RunOptions { profile: profile.as_deref(), ..RunOptions::default() };
        let (folded, done) = (stage.folded(), stage.run(&given, &options));
        done.map_err(|problem| self.in_all(kind, folded, problem))?;
        if kind == Kind::Apply { Ok(0.0) } else { self.ready(kind)?.number(LOSS) }
    }

    /// Has a stage hold the tensors that it needs.
    fn enter(&mut self, kind: Kind) -> Result<()> {
        if self.stages.entered == Some(kind) {
            return Ok(());
        }
        self.leave();
        self.trim_others(kind);
        self.ready(kind)?;
        self.hold_gradients(matches!(kind, Kind::Accumulate | Kind::Apply))?;
        self.stages.entered = Some(kind);
        let state = &mut self.state;
        match self.stages.get(kind) {
            Some(stage) => stage.enter(state),
            None => Err(error!(Fail, "a part of the training is gone")),
        }
    }

    /// Under a limit, has evaluation let go of what it keeps for its next run, or the others of theirs: together it could be more than the limit.
    fn trim_others(&mut self, kind: Kind) {
        if self.options.memory_limit.is_none() {
            return;
        }
        for other in [Kind::Step, Kind::Accumulate, Kind::Apply, Kind::Evaluate] {
            let is_apart = (other == Kind::Evaluate) != (kind == Kind::Evaluate);
            if let Some(stage) = self.stages.get(other).as_ref().filter(|_| is_apart) {
                stage.session().trim();
            }
        }
    }

    /// Takes the tensors back from whatever stage holds them.
    pub(crate) fn leave(&mut self) {
        let Some(kind) = self.stages.entered.take() else { return };
        let state = &mut self.state;
        if let Some(stage) = self.stages.get(kind) {
            stage.leave(state);
        }
    }

    /// A stage, compiled when it is needed for the first time.
    fn ready(&mut self, kind: Kind) -> Result<&mut Stage> {
        if self.stages.get(kind).is_none() {
            let stage = self.made(kind, self.options.memory_limit);
            let stage = stage.map_err(|problem| self.in_all(kind, 0, problem))?;
            *self.stages.get(kind) = Some(stage);
        }
        self.stages.get(kind).as_mut().ok_or_else(|| error!(Fail, "a part of the training is gone"))
    }

    /// A stage's refusal in bytes of the training's limit, of which its session has what the rest leaves.
    fn in_all(&self, kind: Kind, folded: usize, problem: Error) -> Error {
        let limit = self.options.memory_limit.zip(problem.shortage());
        let Some((limit, shortage)) = limit else { return problem };
        let held = self.kept_bytes().saturating_add(folded);
        let needed = held.saturating_add(shortage.sufficient_limit());
        let subject = match kind {
            Kind::Step | Kind::Accumulate => "a training step",
            Kind::Apply => "an update",
            Kind::Evaluate => "an evaluation",
        };
        let largest = shortage.largest.clone();
        let shortage = MemoryShortage { needed, available: limit, limit, largest };
        let advice = format!("raise the memory limit to at least {needed} bytes, or make the batch smaller");
        Error::out_of_memory(subject, shortage).help(advice)
    }

    /// A stage without recomputation, within a limit in bytes.
    fn made(&self, kind: Kind, limit: Option<usize>) -> Result<Stage> {
        let graph = match kind {
            Kind::Step => self.step_graph()?,
            Kind::Accumulate => self.accumulate_graph()?,
            Kind::Apply => self.apply_graph()?,
            Kind::Evaluate => self.evaluate_graph()?,
        };
        let settings = self.settings(limit);
        match self.options.mixed_precision {
            Some(_) if matches!(kind, Kind::Step | Kind::Accumulate) => Stage::recasting(graph, &settings),
            _ => Stage::new(graph, &settings),
        }
    }

    fn state_bytes_of(&self, parameter: &Parameter) -> usize {
        let (dtype, shape) = (parameter.tensor.dtype(), parameter.tensor.shape());
        let states = self.options.optimizer.states(dtype, shape);
        let bytes =
            |dtype: DType, shape: &[usize]| ort_core::tensor::byte_count(dtype, shape).unwrap_or(usize::MAX);
        states.iter().fold(0, |sum: usize, state| sum.saturating_add(bytes(state.dtype, &state.shape)))
    }

    /// The bytes that stay from step to step.
    fn kept_bytes(&self) -> usize {
        let of = |parameter: &Parameter| {
            let own = parameter.tensor.byte_count();
            let sum = if self.options.accumulate > 1 { own } else { 0 };
            own.saturating_add(sum).saturating_add(self.state_bytes_of(parameter))
        };
        let parameters = self.training.parameters.iter().map(of);
        let statistics = self.training.statistics.iter().map(|it| it.tensor.byte_count());
        parameters.chain(statistics).fold(0, usize::saturating_add)
    }

    /// Refuses a limit that what stays from step to step is beyond, and names the least for a step of these sizes.
    fn check_state_fits(&self, dims: &[(&str, i64)]) -> Result<()> {
        let (kept, limit) = (self.kept_bytes(), self.options.memory_limit.unwrap_or(usize::MAX));
        if kept <= limit {
            return Ok(());
        }
        let needed = match self.recomputing(self.main_kind(), dims) {
            Err(problem) => problem.shortage().map(|shortage| shortage.needed),
            Ok(_) => None,
        };
        let largest = vec![("parameters and the optimizer's states".to_string(), kept)];
        let sizes: Vec<String> = dims.iter().map(|(name, size)| format!("{name} of {size}")).collect();
        let sizes = if sizes.is_empty() { "symbolic sizes of 1".to_string() } else { sizes.join(", ") };
        let others = "freeze weights, or take an optimizer with smaller states";
        let advice = match needed {
            Some(needed) => format!("raise the memory limit to {needed} bytes (for {sizes}), {others}"),
            None => format!("raise the memory limit, {others}"),
        };
        let needed = needed.unwrap_or(kept);
        let shortage = MemoryShortage { needed, available: limit, limit, largest };
        Err(Error::out_of_memory("a training step", shortage).help(advice))
    }

    /// Parameters and statistics as in the model, states of zeros.
    fn fill_state(&mut self) -> Result<()> {
        for Parameter { name, tensor, .. } in &self.training.parameters {
            self.state.insert(name.clone(), TensorBuffer::copy_of(tensor)?);
            // Nobody reads it in the file any more.
            self.model.release(tensor);
        }
        for statistic in &self.training.statistics {
            self.state.insert(statistic.name.clone(), TensorBuffer::copy_of(&statistic.tensor)?);
            self.model.release(&statistic.tensor);
        }
        self.fill_states()?;
        self.hold_gradients(self.options.accumulate > 1)
    }

    /// States of zeros.
    fn fill_states(&mut self) -> Result<()> {
        for Parameter { name, tensor, .. } in &self.training.parameters {
            for state in self.options.optimizer.states(tensor.dtype(), tensor.shape()) {
                let buffer = TensorBuffer::new(state.dtype, &state.shape)?;
                self.state.insert(state_name(name, state.kind), buffer);
            }
        }
        Ok(())
    }

    /// Makes memory for sums of gradients, where there is to be some and is none.
    pub(crate) fn hold_gradients(&mut self, holds: bool) -> Result<()> {
        if !holds {
            return Ok(());
        }
        for Parameter { name, tensor, .. } in &self.training.parameters {
            let sum = gradient_name(name);
            if self.state.get(&sum).is_err() {
                self.state.insert(sum, TensorBuffer::new(tensor.dtype(), tensor.shape())?);
            }
        }
        Ok(())
    }
}

pub(crate) fn state_name(parameter: &str, kind: &str) -> String {
    format!("{parameter}.{kind}")
}

pub(crate) fn gradient_name(parameter: &str) -> String {
    format!("{parameter}.gradient")
}
