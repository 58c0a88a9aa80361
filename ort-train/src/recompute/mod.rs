//! Less memory for more time: activations that are computed again when the backward pass needs
//! them, instead of being kept for it.
//!
//! The graph of a step is edited before it is planned. A value that forward nodes make and backward
//! nodes read is *stashed*; a choice ([`choose`]) says which of them are not kept. Backward nodes
//! then read clones ([`mod@edit`]), which are computed from what is kept right before they are
//! needed. A liveness simulation ([`simulation`]) ranks choices. The plan of the edited graph
//! decides: a choice that does not lower the peak is never taken. Gradients of weights that are
//! larger than what else is alive are made and used in slices ([`slices`]).

mod choose;
mod clusters;
mod edit;
mod joint;
mod patterns;
mod plan;
mod seconds;
mod simulation;
mod slices;
mod table;

use choose::{cheapest, least};
pub use clusters::{PlanRequest, PlanRow, Strategy};
use edit::recomputed;
use joint::Joint;
pub use patterns::{ActivationPattern, PatternOption, StashedActivation, memory_insight};
pub(crate) use plan::{Planned, Request, planned};
pub use plan::{Recompute, RecomputeReport};
use slices::sliced;
pub use table::memory_table;
