//! Observation of the values of a run, for calibration.

use std::fmt::Debug;

use crate::tensor::TensorView;

/// Sees each tensor of a run when it is complete, and before its memory is used again.
///
/// So statistics of all values take no more memory than the run itself. Without an observer a run
/// does no work for it.
///
/// The names are those of the graph that runs. Fusion removes values, so a session that shows each
/// value of its model has the optimization level `disabled`. A value in a subgraph is shown each
/// time that it is computed. If a memory limit splits the batch, the parts are shown one after the
/// other.
pub trait ValueObserver: Debug + Sync {
    /// Sees the inputs of the model and the outputs of nodes, in the order of execution. Not seen
    /// are constants, values in the memory of a device, and values other than tensors.
    fn observe(&self, name: &str, tensor: TensorView<'_>);
}
