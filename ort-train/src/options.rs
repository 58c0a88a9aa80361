//! Options of a training run, and the wildcard patterns that select weights by name.

use std::collections::HashSet;

use ort_core::Result;
use ort_core::ensure;
use ort_core::ep::Precision;
use ort_core::session::ProviderRequest;
use wildmatch::WildMatch;

use crate::{Loss, LossScale, MixedPrecision, Optimizer, Recompute, Schedule};

/// The options of a training run. In patterns of names, `*` matches any characters and `?` matches
/// one.
#[derive(Clone, Debug)]
pub struct TrainingOptions {
    /// The loss to minimize.
    pub loss: Loss,
    /// The model output that the loss is computed from, or any value that a node of the model
    /// computes. By default the first output.
    pub output: Option<String>,
    /// The rule that updates parameters from their gradients.
    pub optimizer: Optimizer,
    /// The base learning rate, which the schedule scales.
    pub learning_rate: f32,
    /// The learning rate schedule, as a factor per update.
    pub schedule: Schedule,
    /// Patterns of the weights to train. By default these are all floats of rank 1 or more that
    /// have a gradient, except what an exporter marks as a buffer or names as a constant
    /// ([`TrainingGraph::untrained_constants`](crate::TrainingGraph::untrained_constants)). A
    /// pattern matches initializers only. The output of a `Constant` node is trained only if its
    /// full name is given.
    pub trainable: Vec<String>,
    /// Patterns of weights to freeze. They get no gradient and no optimizer state.
    pub frozen: Vec<String>,
    /// Patterns of parameters without weight decay, usually biases and normalization scales.
    pub no_decay: Vec<String>,
    /// Patterns of shared weights to untie: each node that reads such a weight trains a copy of its
    /// own.
    pub untied: Vec<String>,
    /// Patterns of weights to tie. Weights with equal values, or with values that are equal after a
    /// transpose, are trained as one parameter.
    pub tied: Vec<String>,
    /// The largest global gradient norm. If the norm over all gradients is larger, they are scaled
    /// down to it.
    pub clip_norm: Option<f32>,
    /// The number of batches per update (gradient accumulation). Their gradients are averaged.
    pub accumulate: usize,
    /// Whether `BatchNormalization` normalizes by its running statistics and leaves them unchanged,
    /// as in evaluation. Otherwise it normalizes by the statistics of the batch and updates the
    /// running ones.
    pub freeze_statistics: bool,
    /// Whether `Dropout` nodes drop elements in training steps.
    pub dropout: bool,
    /// The seed of the random number generator.
    pub seed: u64,
    /// The memory limit in bytes on parameters, optimizer state, gradients and activations
    /// together.
    pub memory_limit: Option<usize>,
    /// Which activations the backward pass recomputes instead of keeping them.
    pub recompute: Recompute,
    /// The execution providers for training steps, in order of preference. By default the CPU. A
    /// parameter and its optimizer state stay in the memory of the device that updates them.
    pub providers: Vec<ProviderRequest>,
    /// The intra-op threads. By default all cores that this process may use.
    pub threads: Option<usize>,
    /// The precision of matmuls on the CPU provider.
    pub precision: Precision,
    /// The 16-bit type of mixed precision for the forward and backward pass. By default everything
    /// is float32. Evaluation, prediction and the exported model always use float32.
    pub mixed_precision: Option<MixedPrecision>,
    /// The loss scale. By default [`LossScale::dynamic`] for float16, and none otherwise.
    pub loss_scale: Option<LossScale>,
    /// Values of the model to return next to the loss
    /// ([`Trainer::output`](crate::Trainer::output)).
    pub additional_outputs: Vec<String>,
}

impl Default for TrainingOptions {
    fn default() -> TrainingOptions {
        TrainingOptions {
            loss: Loss::cross_entropy(),
            output: None,
            optimizer: Optimizer::adamw(),
            learning_rate: 1e-3,
            schedule: Schedule::Constant,
            trainable: Vec::new(),
            frozen: Vec::new(),
            no_decay: Vec::new(),
            untied: Vec::new(),
            tied: Vec::new(),
            clip_norm: None,
            accumulate: 1,
            freeze_statistics: false,
            dropout: true,
            seed: 0,
            memory_limit: None,
            recompute: Recompute::default(),
            providers: Vec::new(),
            threads: None,
            precision: Precision::Fp32,
            mixed_precision: None,
            loss_scale: None,
            additional_outputs: Vec::new(),
        }
    }
}

impl TrainingOptions {
    /// Checks the ranges of all options that do not depend on the model.
    pub(crate) fn check(&self) -> Result<()> {
        self.optimizer.check()?;
        self.schedule.check()?;
        let rate = self.learning_rate;
        ensure!(
            rate.is_finite() && rate >= 0.0,
            InvalidArgument,
            "the learning rate is {rate}, expected 0 or more"
        );
        // Without clipping, any valid number passes the check.
        let norm = self.clip_norm.unwrap_or(1.0);
        ensure!(
            norm.is_finite() && norm > 0.0,
            InvalidArgument,
            "the norm to clip gradients to is {norm}, expected a number above 0"
        );
        ensure!(
            self.accumulate > 0,
            InvalidArgument,
            "the number of batches in an update is 0, expected 1 or more"
        );
        ensure!(
            self.loss_scale.is_none() || self.mixed_precision.is_some(),
            InvalidArgument,
            help = "ask for mixed precision, or leave the loss scale out",
            "a loss scale is set without mixed precision: gradients of type float need none"
        );
        self.scaling().map_or(Ok(()), LossScale::check)
    }

    /// Returns the loss scale in effect, or `None` without loss scaling.
    pub(crate) fn scaling(&self) -> Option<LossScale> {
        // bfloat16 has the exponent range of float32, so small gradients do not underflow in it.
        let by_default = match self.mixed_precision? {
            MixedPrecision::Fp16 => Some(LossScale::dynamic()),
            MixedPrecision::Bf16 => None,
        };
        self.loss_scale.or(by_default)
    }
}

/// Compiled wildcard patterns. Names without wildcards are looked up in a hash set, because a list
/// may name every weight of a model.
pub(crate) struct Patterns<'p> {
    names: HashSet<&'p str>,
    wild: Vec<WildMatch>,
}

impl<'p> Patterns<'p> {
    /// Compiles the patterns.
    pub(crate) fn new(patterns: &'p [String]) -> Patterns<'p> {
        // Compiled matchers are kept for real wildcards only: `matches` tries each of them in turn.
        let wild = patterns.iter().filter(|pattern| pattern.contains(['*', '?']));
        let wild = wild.map(|pattern| WildMatch::new(pattern)).collect();
        Patterns { names: patterns.iter().map(String::as_str).collect(), wild }
    }

    /// Whether one of the patterns is this name literally.
    pub(crate) fn names(&self, name: &str) -> bool {
        self.names.contains(name)
    }

    /// Whether one of the patterns matches the name.
    pub(crate) fn matches(&self, name: &str) -> bool {
        self.names(name) || self.wild.iter().any(|pattern| pattern.matches(name))
    }
}
