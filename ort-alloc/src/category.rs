//! The purposes of memory.

use std::fmt;

/// The purpose of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Category {
    /// Weights in allocated memory. Weights in a mapped file do not count.
    Weights,
    /// Weights in a kernel's packed layout.
    PackedWeights,
    /// Planned activations.
    Slab,
    /// Kernel workspaces.
    Workspace,
    /// Values returned to the caller.
    Output,
    /// Values whose size is known only during the run.
    Dynamic,
}

impl Category {
    /// All categories, in declaration order.
    pub const ALL: [Self; 6] =
        [Self::Weights, Self::PackedWeights, Self::Slab, Self::Workspace, Self::Output, Self::Dynamic];

    /// Returns whether a run holds this memory, rather than the model.
    pub fn is_activation(self) -> bool {
        !matches!(self, Self::Weights | Self::PackedWeights)
    }
}

impl fmt::Display for Category {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Weights => "weights",
            Self::PackedWeights => "packed weights",
            Self::Slab => "planned activations",
            Self::Workspace => "workspace",
            Self::Output => "outputs",
            Self::Dynamic => "dynamic values",
        })
    }
}
