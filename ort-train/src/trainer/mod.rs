//! The trainer: a model's parameters, its optimizer's states, and the compiled graphs that update
//! them.

mod memory;
mod stages;
mod steps;
mod tensors;

use std::sync::Arc;

use ort_core::ir::Graph;
use ort_core::session::{Model, Profile, open_devices};
use ort_core::{Result, ensure};

use crate::graph::{Parameter, TrainingGraph};
use crate::mixed::LossScaler;
use crate::state::State;
use crate::{Optimizer, TrainingOptions};
pub use memory::StepMemory;
use stages::Stages;
pub(crate) use tensors::{gradient_name, state_name};

/// Trains a model: each step runs the forward pass, the loss, the backward pass and the update of
/// each parameter as one planned graph.
pub struct Trainer {
    pub(crate) model: Model,
    pub(crate) options: TrainingOptions,
    pub(crate) training: TrainingGraph,
    pub(crate) state: State,
    stages: Stages,
    /// Updates that were made.
    pub(crate) updates: u64,
    /// Batches that random numbers were drawn for: the counter of the random streams.
    pub(crate) batches: u64,
    /// Batches whose gradients are summed and not yet applied.
    pub(crate) pending: usize,
    /// The loss scaler, if the options have a loss scale.
    pub(crate) scaler: Option<LossScaler>,
    /// Whether the next stage that is compiled also makes the recomputation tables.
    tabulates: bool,
    profile: Option<Arc<Profile>>,
    /// The evaluation graph, if it comes from a file.
    pub(crate) evaluation: Option<Graph>,
}

impl Trainer {
    /// Starts a training run from the model's weights.
    ///
    /// # Errors
    ///
    /// An option is out of range, the model cannot be trained with these options
    /// ([`TrainingGraph::new`]), or parameters and states exceed the memory limit. That error names
    /// the least limit for a step with symbolic dimensions of 1.
    pub fn new(model: &Model, options: TrainingOptions) -> Result<Trainer> {
        Trainer::for_sizes(model, options, &[])
    }

    /// [`Self::new`], but an error names the least limit for a step with these sizes of symbolic
    /// dimensions. Those that are not named count as 1.
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

    /// The options of the training run.
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

    /// The factor on the loss of the next batch before it is differentiated. None if the options
    /// have no loss scale.
    pub fn loss_scale(&self) -> Option<f32> {
        self.scaler.map(|scaler| scaler.scale)
    }

    /// Updates that were skipped because gradients were not finite. They do not count as
    /// [`Self::updates`].
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

    /// Collects the time of each node of the following steps, or of none if `profile` is `None`.
    pub fn set_profile(&mut self, profile: Option<Arc<Profile>>) {
        self.profile = profile;
    }

    /// Replaces the optimizer. Its states begin with zeros.
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
}
