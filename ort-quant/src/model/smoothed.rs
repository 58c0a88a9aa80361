//! What SmoothQuant does with the values of a model.

use std::collections::BTreeMap;
use std::sync::Arc;

/// The values that are smoothed, by name.
pub type Smoothing = BTreeMap<String, Smoothed>;

/// How a value is smoothed.
#[derive(Clone, Debug, PartialEq)]
pub struct Smoothed {
    /// What each channel is divided by, and the rows of the weights are multiplied by.
    pub scales: Arc<[f32]>,
    /// Constants that take the division; empty if a node does it.
    pub(super) folded: Vec<Folded>,
}

/// A constant that takes the division.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Folded {
    /// The node that reads it.
    pub(super) node: usize,
    /// The position among the inputs.
    pub(super) place: usize,
    /// Its elements after the division.
    pub(super) values: Vec<f32>,
}

impl Smoothed {
    /// What each channel is multiplied by.
    pub(crate) fn factors(&self) -> Vec<f32> {
        self.scales.iter().map(|scale| 1.0 / scale).collect()
    }

    /// Whether the division takes no node.
    pub(super) fn is_folded(&self) -> bool {
        !self.folded.is_empty()
    }
}
