//! The trainer: parameters, optimizer state, and the compiled graphs that update them.
//!
//! The graphs themselves are built in `assemble` and `graph`.

mod memory;
mod stage_set;
mod stages;
mod steps;
mod tensors;

use std::sync::Arc;

use ort_core::ir::Graph;
use ort_core::session::{Model, Profile, open_devices};
use ort_core::{Result, ensure};

use crate::graph::{Parameter, TrainingGraph};
use crate::mixed::LossScaler;
use crate::state::{State, state_name};
use crate::{Optimizer, TrainingOptions};
pub use memory::StepMemory;
use stage_set::Stages;

/// A training run of a model. Each step runs the forward pass, the loss, the backward pass and the
/// update of each parameter as one planned graph.
pub struct Trainer {
    pub(crate) model: Model,
    pub(crate) options: TrainingOptions,
    pub(crate) training: TrainingGraph,
    pub(crate) state: State,
    stages: Stages,
    /// The number of updates so far.
    pub(crate) updates: u64,
    /// The number of batches so far, which is the counter of the random streams.
    pub(crate) batches: u64,
    /// The number of batches whose gradients are accumulated but not yet applied.
    pub(crate) pending: usize,
    /// The loss scaler, if the options use loss scaling.
    pub(crate) scaler: Option<LossScaler>,
    /// Whether the next compiled stage also computes the recomputation tables.
    tabulates: bool,
    profile: Option<Arc<Profile>>,
    /// The evaluation graph, if it was loaded from a file.
    pub(crate) evaluation: Option<Graph>,
}

impl Trainer {
    /// Starts a training run from the model's weights.
    ///
    /// # Errors
    ///
    /// An option is out of range, the model cannot be trained with these options
    /// ([`TrainingGraph::new`]), or parameters and optimizer state exceed the memory limit. The
    /// memory error names the smallest limit for a step with symbolic dimensions of 1.
    pub fn new(model: &Model, options: TrainingOptions) -> Result<Trainer> {
        Trainer::for_sizes(model, options, &[])
    }

    /// [`Self::new`], but a memory error names the smallest limit for a step with these sizes of
    /// symbolic dimensions. A dimension that is not named counts as 1.
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
        // Checked before `fill_state` allocates what would not fit.
        trainer.check_state_fits(dims)?;
        trainer.fill_state()?;
        // Without recomputation the step's graph does not depend on sizes, so we compile it now and
        // report its errors here instead of at the first batch.
        if !trainer.waits_for_sizes() {
            trainer.ready(trainer.main_kind())?;
        }
        Ok(trainer)
    }

    /// Returns the graph of a step without its update.
    pub fn training_graph(&self) -> &TrainingGraph {
        &self.training
    }

    /// Returns the options of the training run.
    pub fn options(&self) -> &TrainingOptions {
        &self.options
    }

    /// Returns the number of updates so far.
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// Returns the number of batches whose gradients are accumulated but not yet applied.
    pub fn pending(&self) -> usize {
        self.pending
    }

    /// Returns the loss scale of the next batch, or `None` if the options have no loss scaling.
    pub fn loss_scale(&self) -> Option<f32> {
        self.scaler.map(|scaler| scaler.scale)
    }

    /// Returns the number of updates that were skipped because gradients were not finite.
    /// [`Self::updates`] does not count them.
    pub fn skipped(&self) -> u64 {
        self.scaler.map_or(0, |scaler| scaler.skipped)
    }

    /// Returns the learning rate of the next update.
    pub fn learning_rate(&self) -> f32 {
        // In doubles, so that the product is rounded once.
        (f64::from(self.options.learning_rate) * self.options.schedule.factor(self.updates)) as f32
    }

    /// Sets the base learning rate, which the schedule scales.
    pub fn set_learning_rate(&mut self, rate: f32) -> Result<()> {
        ensure!(
            rate.is_finite() && rate >= 0.0,
            InvalidArgument,
            "the learning rate is {rate}, expected 0 or more"
        );
        self.options.learning_rate = rate;
        Ok(())
    }

    /// Records the time of each node in the following steps. `None` stops recording.
    pub fn set_profile(&mut self, profile: Option<Arc<Profile>>) {
        self.profile = profile;
    }

    /// Replaces the optimizer. The new optimizer state starts at zero.
    pub(crate) fn set_optimizer(&mut self, optimizer: Optimizer, clip_norm: Option<f32>) -> Result<()> {
        self.detach();
        let options = TrainingOptions { optimizer, clip_norm, ..self.options.clone() };
        options.check()?;
        let before = std::mem::replace(&mut self.options, options);
        // Checked before the old state is dropped, so that a refusal changes nothing.
        if let Err(problem) = self.check_state_fits(&[]) {
            self.options = before;
            return Err(problem);
        }
        for Parameter { name, tensor, .. } in &self.training.parameters {
            for state in before.optimizer.states(tensor.dtype(), tensor.shape()) {
                drop(self.state.take(&state_name(name, state.kind))?);
            }
        }
        // Only these two stages contain updates.
        (self.stages.step, self.stages.apply) = (None, None);
        // Under a limit, the size of the optimizer state changes what is left for every other
        // stage.
        if self.options.memory_limit.is_some() {
            self.stages = Stages::default();
        }
        self.updates = 0;
        self.fill_states()
    }
}
