//! What a training is to be.

use std::collections::HashSet;

use ort_core::Result;
use ort_core::ensure;
use ort_core::ep::Precision;
use ort_core::session::ProviderRequest;
use wildmatch::WildMatch;

use crate::{Loss, LossScale, MixedPrecision, Optimizer, Recompute, Schedule};

/// What a training is to be. Patterns of names have `*` for any characters and `?` for one.
#[derive(Clone, Debug)]
pub struct TrainingOptions {
    /// What becomes smaller.
    pub loss: Loss,
    /// The model's output that the loss is of, or any value that one of its nodes computes; by
    /// default the first output.
    pub output: Option<String>,
    /// How parameters follow their gradients.
    pub optimizer: Optimizer,
    /// The learning rate that the schedule scales.
    pub learning_rate: f32,
    /// The learning rate over the updates.
    pub schedule: Schedule,
    /// Patterns of the weights that are trained; by default all floats of rank 1 or more that have
    /// gradients, but what an exporter marks as a buffer or names as a constant
    /// ([`TrainingGraph::untrained_constants`](crate::TrainingGraph::untrained_constants)). A
    /// pattern matches initializers; a constant that a node gives is trained only if it is named in
    /// full.
    pub trainable: Vec<String>,
    /// Patterns of weights that stay as they are. They take no gradient and no state.
    pub frozen: Vec<String>,
    /// Patterns of parameters without weight decay.
    pub no_decay: Vec<String>,
    /// Patterns of weights that several nodes read, each of which then trains a copy of its own.
    pub untied: Vec<String>,
    /// Patterns of weights that hold the same numbers, transposed ones included, and then train as
    /// one.
    pub tied: Vec<String>,
    /// The largest norm of all gradients together; what is longer is scaled down.
    pub clip_norm: Option<f32>,
    /// How many batches make one update. Their gradients are averaged.
    pub accumulate: usize,
    /// Whether `BatchNormalization` keeps its running statistics and normalizes by them, as in
    /// evaluation; otherwise it takes those of each batch and updates the running ones.
    pub freeze_statistics: bool,
    /// Whether `Dropout` nodes drop.
    pub dropout: bool,
    /// Where random numbers begin.
    pub seed: u64,
    /// A bound in bytes on parameters, states, gradients and activations together.
    pub memory_limit: Option<usize>,
    /// What is computed again in the backward pass instead of being kept.
    pub recompute: Recompute,
    /// The execution providers that steps run on, in order of preference; by default the CPU. A
    /// tensor of the training lies in the memory of the device that updates it.
    pub providers: Vec<ProviderRequest>,
    /// The threads inside one operator; by default the cores that this process may use.
    pub threads: Option<usize>,
    /// How the CPU provider multiplies matrices.
    pub precision: Precision,
    /// The type of 16 bits that forward and backward passes are partly computed in; by default all
    /// is float32. Evaluation and prediction are in float32, as the model that is exported is.
    pub mixed_precision: Option<MixedPrecision>,
    /// What the loss is multiplied by before it is differentiated; by default
    /// [`LossScale::dynamic`] for float16, and nothing otherwise.
    pub loss_scale: Option<LossScale>,
    /// Values of the model that a batch gives beside its loss
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
    pub(crate) fn check(&self) -> Result<()> {
        self.optimizer.check()?;
        self.schedule.check()?;
        let rate = self.learning_rate;
        ensure!(
            rate.is_finite() && rate >= 0.0,
            InvalidArgument,
            "a learning rate of {rate}, expected 0 or more"
        );
        let norm = self.clip_norm.unwrap_or(1.0);
        ensure!(
            norm.is_finite() && norm > 0.0,
            InvalidArgument,
            "gradients clipped to {norm}, expected a norm above 0"
        );
        ensure!(self.accumulate > 0, InvalidArgument, "0 batches make no update, expected 1 or more");
        ensure!(
            self.loss_scale.is_none() || self.mixed_precision.is_some(),
            InvalidArgument,
            help = "ask for mixed precision, or leave the loss scale out",
            "a loss scale without mixed precision: gradients in float32 need none"
        );
        self.scaling().map_or(Ok(()), LossScale::check)
    }

    /// The loss scale, where there is one.
    pub(crate) fn scaling(&self) -> Option<LossScale> {
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
    pub(crate) fn new(patterns: &'p [String]) -> Patterns<'p> {
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
