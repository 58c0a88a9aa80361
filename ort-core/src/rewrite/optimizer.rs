//! Options of the graph optimizer: its level, and which rules are left out.

use super::level::Level;

/// Options of the graph optimizer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Optimizer {
    /// The optimization level.
    pub level: Level,
    /// The names of disabled rules.
    pub disabled: Vec<String>,
    /// Stop after this many rule applications, to find a harmful one by bisection.
    pub stop_after: Option<usize>,
}

impl Optimizer {
    /// Returns options that enable all rules of a level.
    pub fn at(level: Level) -> Optimizer {
        Optimizer { level, ..Optimizer::default() }
    }
}
