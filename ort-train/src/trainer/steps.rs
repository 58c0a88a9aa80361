//! The training loop: forward and backward pass, gradient accumulation, update, evaluation.

use ort_core::session::{Model, RunOptions, Session, SessionBuilder};
use ort_core::tensor::{Tensor, Value};
use ort_core::{Result, advise, ensure, error};

use super::Trainer;
use super::stage_set::StageKind;
use crate::assemble::{FINITE, GRADIENT_SCALE, OVERWRITE};
use crate::optimizer::{LEARNING_RATE, STEP};
use crate::values::{COUNTER, LOSS, LOSS_SCALE, SEED};

impl Trainer {
    /// Runs one batch and returns its loss. It updates all parameters. With
    /// [`TrainingOptions::accumulate`](crate::TrainingOptions::accumulate) above 1 it updates them
    /// once after that many batches.
    ///
    /// # Errors
    ///
    /// An input is missing or does not fit, or the step exceeds the memory limit. In these cases
    /// nothing has changed. A run that hits a deadline may have updated some parameters. So may a
    /// run that exceeds the limit through values whose sizes depend on data.
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
        let loss = self.run(StageKind::Step, given)?;
        self.end_update(StageKind::Step)?;
        // Counted last: a batch that failed draws the same random numbers again.
        self.batches += 1;
        Ok(loss)
    }

    /// Runs one batch, adds its gradients to those accumulated since the last update, and returns
    /// its loss.
    pub fn accumulate(&mut self, inputs: &[(&str, Value)]) -> Result<f32> {
        self.accumulate_onto(inputs, self.pending == 0)
    }

    /// [`Self::accumulate`], but with `overwrite` the accumulators restart from this batch.
    pub(crate) fn accumulate_onto(&mut self, inputs: &[(&str, Value)], overwrite: bool) -> Result<f32> {
        let mut given = inputs.to_vec();
        // A flag of the graph, so that the first batch needs no pass that zeroes the accumulators.
        given.push((OVERWRITE, Tensor::from_bools(&[], &[overwrite])?.into()));
        let loss = self.run(StageKind::Accumulate, given)?;
        self.pending = if overwrite { 1 } else { self.pending + 1 };
        self.batches += 1;
        Ok(loss)
    }

    /// Updates the parameters with the mean of the gradients accumulated since the last update.
    pub fn apply(&mut self) -> Result<()> {
        self.apply_scaled(1.0 / self.pending as f32)?;
        self.pending = 0;
        Ok(())
    }

    /// Updates the parameters with the accumulated gradients times `scale`, and keeps the
    /// accumulators.
    pub(crate) fn apply_scaled(&mut self, scale: f32) -> Result<()> {
        ensure!(
            self.pending > 0,
            InvalidArgument,
            help = "accumulate a batch first",
            "there are no gradients"
        );
        let mut given = Vec::new();
        self.update_inputs(&mut given, scale)?;
        self.run(StageKind::Apply, given)?;
        self.end_update(StageKind::Apply)?;
        Ok(())
    }

    /// Computes the loss of a batch in evaluation mode: no dropout, and batch normalization by
    /// running statistics.
    pub fn eval_step(&mut self, inputs: &[(&str, Value)]) -> Result<f32> {
        self.run(StageKind::Evaluate, inputs.to_vec())
    }

    /// Computes the loss of [`Self::eval_step`], and returns it with the model output that it is
    /// computed from.
    pub fn evaluate(&mut self, inputs: &[(&str, Value)]) -> Result<(f32, Value)> {
        let loss = self.run(StageKind::Evaluate, inputs.to_vec())?;
        let output = self.training.output.clone();
        Ok((loss, self.ready(StageKind::Evaluate)?.output(&output)?))
    }

    /// Computes the model's outputs with the current parameters, in evaluation mode as in
    /// [`Self::eval_step`].
    pub fn predict(&mut self, inputs: &[(&str, Value)]) -> Result<Vec<(String, Value)>> {
        self.detach();
        let model = Model::from_graph(self.trained_graph()?);
        let devices = self.state.devices().iter().cloned();
        devices.fold(Session::builder(&model), SessionBuilder::device).build()?.run(inputs)
    }

    /// Returns one of
    /// [`TrainingOptions::additional_outputs`](crate::TrainingOptions::additional_outputs), from
    /// the last batch.
    ///
    /// # Errors
    ///
    /// `name` is not one of them, or no batch has run since the last update.
    pub fn output(&mut self, name: &str) -> Result<Value> {
        let known = &self.options.additional_outputs;
        ensure!(
            known.iter().any(|it| it == name),
            InvalidArgument,
            help = advise("additional outputs", name, known.iter().map(String::as_str)),
            "the training run has no additional output '{name}'"
        );
        // An update has no forward pass, and attaching it has taken the buffers of the batch.
        let kind = self.stages.attached.filter(|kind| *kind != StageKind::Apply);
        let kind = kind.ok_or_else(|| {
            error!(InvalidArgument, "output '{name}' is not available")
                .help("read it after a batch, before the next update")
        })?;
        self.ready(kind)?.output(name)
    }

    /// Runs a stage on those of the given inputs that it takes. Returns the loss, or 0 for an
    /// update.
    fn run(&mut self, kind: StageKind, mut given: Vec<(&str, Value)>) -> Result<f32> {
        given.push((SEED, Tensor::scalar(self.options.seed as i64)?.into()));
        given.push((COUNTER, Tensor::scalar(self.batches as i64)?.into()));
        given.push((LOSS_SCALE, Tensor::scalar(self.loss_scale().unwrap_or(1.0))?.into()));
        if self.stages.get(kind).is_none() {
            let sizes = self.sizes_of(&given);
            let sizes: Vec<(&str, i64)> = sizes.iter().map(|(name, size)| (name.as_str(), *size)).collect();
            self.ready_at(kind, &sizes)?;
        }
        self.attach(kind)?;
        let profile = self.profile.clone();
        let stage = self.ready(kind)?;
        // The caller's inputs stay: a wrong name among them must be an error. Ours are dropped if
        // the graph has no dropout, no update or no loss scale.
        let own = [SEED, COUNTER, LEARNING_RATE, STEP, LOSS_SCALE, GRADIENT_SCALE];
        given.retain(|(name, _)| !own.contains(name) || stage.takes(name));
        let options = RunOptions { profile: profile.as_deref(), ..RunOptions::default() };
        let (folded, done) = (stage.folded(), stage.run(&given, &options));
        done.map_err(|problem| self.in_all(kind, folded, problem))?;
        if kind == StageKind::Apply { Ok(0.0) } else { self.ready(kind)?.number(LOSS) }
    }

    /// Adds the scalar inputs of an update, which multiplies the gradients by `scale`.
    fn update_inputs(&self, given: &mut Vec<(&str, Value)>, scale: f32) -> Result<()> {
        // The gradients still contain the loss scale. One factor removes it and takes the mean.
        let scale = scale / self.loss_scale().unwrap_or(1.0);
        given.push((GRADIENT_SCALE, Tensor::scalar(scale)?.into()));
        given.push((LEARNING_RATE, Tensor::scalar(self.learning_rate())?.into()));
        // From 1, because bias correction divides by 1 - beta^step.
        given.push((STEP, Tensor::scalar(self.updates as i64 + 1)?.into()));
        Ok(())
    }

    /// Counts an update, or that it was skipped, and adapts the loss scale.
    fn end_update(&mut self, kind: StageKind) -> Result<()> {
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
}
