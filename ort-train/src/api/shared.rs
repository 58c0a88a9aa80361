//! The state behind the objects of this interface: parameters, properties, optimizer, trainer.

use std::collections::BTreeMap;

use ort_core::dtype::DType;
use ort_core::tensor::Tensor;
use serde::{Deserialize, Serialize};

use crate::Trainer;

/// A user-defined property of a state, such as the epoch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Property {
    /// An integer.
    Int(i64),
    /// A finite number.
    Float(f64),
    /// Text.
    String(String),
}

impl From<i64> for Property {
    fn from(value: i64) -> Property {
        Property::Int(value)
    }
}

impl From<f64> for Property {
    fn from(value: f64) -> Property {
        Property::Float(value)
    }
}

impl From<&str> for Property {
    fn from(value: &str) -> Property {
        Property::String(value.to_string())
    }
}

/// The state that [`CheckpointState`], [`Module`](super::Module) and
/// [`Optimizer`](super::Optimizer) share.
#[derive(Default)]
pub(super) struct Shared {
    /// The parameters, sorted by name.
    pub(super) parameters: BTreeMap<String, Kept>,
    pub(super) properties: BTreeMap<String, Property>,
    /// Optimizer state from a checkpoint, until an optimizer takes it.
    pub(super) optimizer: Option<OptimizerState>,
    pub(super) trainer: Option<Trainer>,
    /// Whether the user created an optimizer. Otherwise the trainer has a placeholder.
    pub(super) has_optimizer: bool,
    /// Whether the next batch overwrites the gradient accumulators.
    pub(super) resets: bool,
}

/// A parameter in the checkpoint. Once there is a trainer, it has the current values of everything
/// that it updates.
#[derive(Clone, Debug)]
pub(super) struct Kept {
    pub(super) dtype: DType,
    pub(super) shape: Vec<usize>,
    pub(super) requires_grad: bool,
    /// `None` in a nominal checkpoint, until the value is set.
    pub(super) tensor: Option<Tensor>,
}

/// The state of an optimizer.
#[derive(Clone, Debug)]
pub(super) struct OptimizerState {
    pub(super) optimizer: crate::Optimizer,
    pub(super) updates: u64,
    pub(super) learning_rate: f32,
    pub(super) tensors: BTreeMap<String, Tensor>,
}
