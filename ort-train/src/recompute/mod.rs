//! Activation checkpointing: activations are recomputed in the backward pass, not kept for it.
//!
//! This trades time for memory.
//!
//! The graph of a step is edited before it is planned. A value that forward nodes produce and
//! backward nodes read is *stashed*. A search ([`choose`]) selects the stashed values to drop.
//! Backward nodes then read clones ([`mod@edit`]), which are computed from kept values right before
//! they are needed.
//!
//! A liveness simulation ([`simulation`]) ranks the choices, but the plan of the edited graph
//! decides: a choice that does not lower the peak is never applied. Weight gradients that are large
//! compared to everything else alive are computed and applied in slices ([`slices`]).

mod choose;
mod clusters;
mod cost_model;
mod edit;
mod level;
mod liveness;
mod patterns;
mod plan;
mod simulation;
mod slices;
mod table;

use choose::{cheapest, least};
pub use clusters::{PlanRequest, PlanRow, Strategy};
use edit::recomputed;
pub use level::Recompute;
use liveness::Joint;
pub use patterns::{ActivationPattern, PatternOption, StashedActivation, memory_insight};
pub use plan::RecomputeReport;
pub(crate) use plan::{Planned, Request, planned};
use slices::sliced;
pub use table::memory_table;
