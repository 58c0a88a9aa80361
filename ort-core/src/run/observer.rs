//! Observation of the values of a run, for calibration.

use std::fmt::Debug;

use crate::tensor::TensorView;

/// Sees each tensor of a run when it is complete, and before its memory is reused.
///
/// Statistics of all values thus take no more memory than the run itself. A run without an observer
/// only checks after each step that there is none.
///
/// The names are those of the graph that runs. Fusion removes values, so a session that shows every
/// value of its model has the optimization level `disabled`. A value in a subgraph is shown each
/// time that it is computed. If a memory limit splits the batch, the observer sees the parts one
/// after the other, and a value that does not depend on the batch once for each part.
pub trait ValueObserver: Debug + Sync {
    /// Sees the inputs of the model and of its subgraphs, and the outputs of nodes, in the order of
    /// execution. Not seen are constants, values in device memory, and values other than tensors.
    fn observe(&self, name: &str, tensor: TensorView<'_>);
}
