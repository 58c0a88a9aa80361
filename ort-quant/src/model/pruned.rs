//! A pruned model that is not written yet, and what became of its layers.

use std::path::Path;

use ort_core::Result;
use ort_core::onnx::{Source, Weights};
use ort_core::session::Model;

use super::draft::Draft;
use super::write::{self, Written};

/// A pruned model that is not written yet.
pub struct Pruning<'s> {
    pub(super) source: &'s Source,
    pub(super) draft: Draft,
    pub(super) layers: Vec<PrunedLayer>,
    pub(super) bytes_before: usize,
}

/// A node with a weight, and what became of it.
#[derive(Clone, Debug, PartialEq)]
pub struct PrunedLayer {
    /// The name of the node, or its operator and first output.
    pub node: String,
    /// The operator.
    pub operator: String,
    /// The shape of the weight, if it is a constant.
    pub shape: Vec<usize>,
    /// Whether it is pruned.
    pub outcome: PruneOutcome,
}

/// What became of a layer.
#[derive(Clone, Debug, PartialEq)]
pub enum PruneOutcome {
    /// It is pruned.
    Pruned {
        /// The name of the weight, by which [`Written::zeros`] lists its zeros.
        weight: String,
        /// Whether an earlier layer has the same weight.
        is_shared: bool,
        /// How the elements were chosen.
        method: String,
        /// The bytes of the weight.
        bytes: usize,
        /// The elements that are removed.
        removed: usize,
        /// What this changes in the outputs of the layer, if samples said so.
        errors: Option<OutputErrors>,
    },
    /// Some of its channels are removed.
    Narrowed {
        /// The shape of the weight after.
        shape: Vec<usize>,
        /// The bytes of the weight before.
        bytes: usize,
        /// Why its outputs stay, if they do: then layers before have fewer outputs.
        outputs: Option<String>,
    },
    /// It stays as it is.
    Kept {
        /// Why.
        reason: String,
    },
}

/// The relative errors of a layer's outputs if its inputs are those of the original model, by the
/// inputs of samples. Of layers with many outputs, 64 of them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OutputErrors {
    /// That of the written weight.
    pub pruned: f64,
    /// That of the same sparsity by magnitude.
    pub magnitude: f64,
}

impl Pruning<'_> {
    /// The nodes with weights, in the order of the file.
    pub fn layers(&self) -> &[PrunedLayer] {
        &self.layers
    }

    /// The bytes of the original model, with its data files.
    pub fn bytes_before(&self) -> usize {
        self.bytes_before
    }

    /// Writes the model, as [`Quantization::write`](crate::Quantization::write).
    ///
    /// # Errors
    ///
    /// As [`Quantization::write`](crate::Quantization::write).
    pub fn write(
        self,
        path: &Path,
        weights: &Weights,
        check: &mut dyn FnMut(&Model) -> Result<()>,
    ) -> Result<Written> {
        write::write(self.draft, self.source, (path, weights), check)
    }
}
