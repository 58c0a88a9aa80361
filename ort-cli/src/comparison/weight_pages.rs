//! Residency of mapped weights in comparing runs under a memory limit.
//!
//! Operators read weights in blocks and tables where they are in the file. Without this, the pages
//! of all of them would be resident at the end of a run.

use std::fmt;

use ort_runtime::tensor::TensorView;
use ort_runtime::{Model, Tensor, ValueObserver};

/// Weights below share their pages with others, and take little.
const LEAST: usize = 1 << 20;

/// Gives the pages of large weights back after each step. A step that reads one faults it in again.
pub(super) struct WeightPages<'m> {
    model: &'m Model,
    weights: Vec<&'m Tensor>,
}

impl<'m> WeightPages<'m> {
    pub(super) fn of(model: &'m Model) -> WeightPages<'m> {
        let constants = model.graph().constants.values();
        let is_large = |tensor: &&Tensor| tensor.bytes().is_some_and(|bytes| bytes.len() >= LEAST);
        WeightPages { model, weights: constants.filter(is_large).collect() }
    }
}

impl fmt::Debug for WeightPages<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("WeightPages").field("weights", &self.weights.len()).finish_non_exhaustive()
    }
}

impl ValueObserver for WeightPages<'_> {
    fn observe(&self, _name: &str, _tensor: TensorView<'_>) {
        self.weights.iter().for_each(|weight| self.model.release(weight));
    }
}
