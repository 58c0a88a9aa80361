//! Which activations the backward pass recomputes, as the user asks for it.

use ort_core::{Result, error};

use super::clusters::PlanRequest;

/// Which activations the backward pass recomputes instead of keeping them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Recompute {
    /// What the memory limit requires, in the least time. Nothing without a limit.
    #[default]
    AsLimited,
    /// Everything between layer boundaries, if that lowers the peak (level 1).
    Layers,
    /// The lowest peak that the search finds (level 2).
    Most,
    /// The named subgraphs.
    Plans(Vec<PlanRequest>),
}

impl Recompute {
    /// Returns the meaning of an `ORTMODULE_MEMORY_OPT_LEVEL`.
    pub fn of_level(level: u8) -> Result<Recompute> {
        match level {
            0 => Ok(Recompute::AsLimited),
            1 => Ok(Recompute::Layers),
            2 => Ok(Recompute::Most),
            other => Err(error!(InvalidArgument, "there is no level {other} of memory optimization")
                .help("levels are 0, 1 and 2")),
        }
    }

    /// Returns the name of the level in reports.
    pub fn level_name(&self) -> &'static str {
        match self {
            Recompute::AsLimited | Recompute::Plans(_) => "USER_SPECIFIED",
            Recompute::Layers => "TRANSFORMER_LAYERWISE_RECOMPUTE",
            Recompute::Most => "TRANSFORMER_LAYERWISE_RECOMPUTE_WITH_COMPROMISE",
        }
    }
}
