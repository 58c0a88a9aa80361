//! Parameter updates and learning rate schedules of the on-device training API.

use std::path::Path;

use ort_core::{Result, Within, ensure};

use super::module::{is_another, load};
use super::shared::{OptimizerState, Shared};
use super::{CheckpointState, Module};
use crate::artifacts::Description;
use crate::{Schedule, Trainer};

/// The initial learning rate of an optimizer.
const INITIAL_LEARNING_RATE: f32 = 1e-3;

/// Updates the parameters of a [`Module`]. Clones share the same optimizer.
#[derive(Clone)]
pub struct Optimizer {
    state: CheckpointState,
}

impl Optimizer {
    /// Creates the optimizer of an optimizer model. Its state comes from the module's checkpoint if
    /// that has any, and is zero otherwise.
    ///
    /// # Errors
    ///
    /// The file is not an optimizer model, it belongs to another training run, the checkpoint has
    /// the state of another optimizer, or the state does not fit into the memory limit.
    pub fn new(optimizer_model: impl AsRef<Path>, module: &Module) -> Result<Optimizer> {
        let path = optimizer_model.as_ref();
        let (_, described) = load(path)?;
        let Description::Optimizer(description) = described else {
            return Err(is_another(path, &described, "an optimizer model"));
        };
        let state = module.state().clone();
        let mut shared = state.lock();
        ensure!(
            description.parameters == module.trained(),
            InvalidArgument,
            help = "use models that were generated together",
            "'{}' does not belong to the module",
            path.display()
        );
        if let Some(states) = &shared.optimizer {
            ensure!(
                states.optimizer == description.optimizer,
                InvalidArgument,
                help = "use the optimizer of the checkpoint, or a checkpoint without optimizer state",
                "the optimizer state of the checkpoint is of {}, expected {}",
                states.optimizer,
                description.optimizer
            );
        }
        let trainer = shared.trainer()?;
        trainer.set_optimizer(description.optimizer, description.clip_norm)?;
        // `restore` overwrites it if the checkpoint has a rate.
        trainer.set_learning_rate(INITIAL_LEARNING_RATE)?;
        restore(&mut shared).within(|| "the checkpoint's optimizer".to_string())?;
        shared.has_optimizer = true;
        // The guard borrows `state`, which moves into the result.
        drop(shared);
        Ok(Optimizer { state })
    }

    /// Updates the parameters with the gradients summed since [`Module::lazy_reset_grad`], and
    /// keeps the sums.
    ///
    /// # Errors
    ///
    /// There are no gradients yet, or the update does not fit into the memory limit.
    pub fn step(&self) -> Result<()> {
        self.state.lock().trainer()?.apply_scaled(1.0)
    }

    /// Returns the learning rate, which is 0.001 at first.
    pub fn get_learning_rate(&self) -> Result<f32> {
        Ok(self.state.lock().trainer()?.options.learning_rate)
    }

    /// Sets the learning rate.
    ///
    /// # Errors
    ///
    /// It is below 0 or not finite.
    pub fn set_learning_rate(&self, learning_rate: f32) -> Result<()> {
        self.state.lock().trainer()?.set_learning_rate(learning_rate)
    }

    /// The number of updates so far.
    fn updates(&self) -> Result<u64> {
        Ok(self.state.lock().trainer()?.updates)
    }
}

/// Restores the optimizer state of a checkpoint, once.
fn restore(shared: &mut Shared) -> Result<()> {
    let Some(OptimizerState { updates, learning_rate, tensors, .. }) = shared.optimizer.take() else {
        return Ok(());
    };
    let trainer: &mut Trainer = shared.trainer()?;
    trainer.detach();
    for (name, tensor) in &tensors {
        trainer.state.write(name, tensor).within(|| format!("state '{name}'"))?;
    }
    trainer.updates = updates;
    trainer.set_learning_rate(learning_rate)
}

/// A schedule with linear warmup from 0 over `warmup_step_count` updates, then linear decay to 0 at
/// `total_step_count`.
#[derive(Clone)]
pub struct LinearLRScheduler {
    optimizer: Optimizer,
    schedule: Schedule,
    initial_lr: f32,
}

impl LinearLRScheduler {
    /// Creates the scheduler, and sets the learning rate of the optimizer's next update.
    ///
    /// # Errors
    ///
    /// There are more warmup updates than updates in total, or the rate is below 0 or not finite.
    pub fn new(
        optimizer: &Optimizer,
        warmup_step_count: u64,
        total_step_count: u64,
        initial_lr: f32,
    ) -> Result<LinearLRScheduler> {
        let schedule = Schedule::Linear { warmup: warmup_step_count, total: total_step_count };
        schedule.check()?;
        let scheduler = LinearLRScheduler { optimizer: optimizer.clone(), schedule, initial_lr };
        scheduler.step()?;
        Ok(scheduler)
    }

    /// Sets the learning rate of the next update. Call it after each [`Optimizer::step`].
    pub fn step(&self) -> Result<()> {
        let share = self.schedule.factor(self.optimizer.updates()?);
        self.optimizer.set_learning_rate((f64::from(self.initial_lr) * share) as f32)
    }
}
