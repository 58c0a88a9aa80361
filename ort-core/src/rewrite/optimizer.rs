//! Options of the graph optimizer: its level, and which rules are left out.

use std::fmt;

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

impl fmt::Display for Optimizer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "optimization level {}", self.level.name())?;
        if !self.disabled.is_empty() {
            // Quoted, so that no name can forge a line of a key.
            write!(formatter, " without the rules {:?}", self.disabled)?;
        }
        self.stop_after.map_or(Ok(()), |count| write!(formatter, " and at most {count} rewrites"))
    }
}

impl Optimizer {
    /// Returns options that enable all rules of a level.
    pub fn at(level: Level) -> Optimizer {
        Optimizer { level, ..Optimizer::default() }
    }
}
