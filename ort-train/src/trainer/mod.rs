//! The trainer: a model's parameters, its optimizer's states, and the compiled graphs that update them.

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

impl Trainer {
    /// A training of a model from its weights on.
    ///
    /// # Errors
    ///
    /// An option is out of its range, the model cannot be trained as they say
    /// ([`TrainingGraph::new`]), or parameters and states do not fit into the memory limit: then
    /// the least limit of a step with symbolic dimensions of 1 is named.
    pub fn new(model: &Model, options: TrainingOptions) -> Result<Trainer> {
        Trainer::for_sizes(model, options, &[])
    }

    /// The same, where the least limit that a refusal names is that of a step with these sizes of
    /// symbolic dimensions; those that are not named count as 1.
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

    /// What the loss of the next batch is multiplied by before it is differentiated; none where the
    /// options have no loss scale.
    pub fn loss_scale(&self) -> Option<f32> {
        self.scaler.map(|scaler| scaler.scale)
    }

    /// Updates that were left out, as gradients were not finite. They do not count as
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

    /// Collects the time of each node of the steps to come; none from then on where there is no
    /// profile.
    pub fn set_profile(&mut self, profile: Option<Arc<Profile>>) {
        self.profile = profile;
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
}
