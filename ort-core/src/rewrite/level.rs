//! Optimization levels.

/// Optimization level. Each level includes those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Level {
    /// No rewrites: the graph runs as loaded.
    Disabled,
    /// Exact rewrites that need no special kernel: constant folding, common-subexpression
    /// elimination, dead-code elimination, algebraic identities.
    Basic,
    /// Fused operators.
    Extended,
    /// Everything, including layout changes.
    #[default]
    All,
}

impl Level {
    /// The levels with their names.
    pub const NAMES: [(&'static str, Level); 4] = [
        ("disabled", Level::Disabled),
        ("basic", Level::Basic),
        ("extended", Level::Extended),
        ("all", Level::All),
    ];

    /// Returns the level of this name.
    pub fn named(name: &str) -> Option<Level> {
        Level::NAMES.iter().find(|(known, _)| *known == name).map(|(_, level)| *level)
    }

    /// Returns the name of the level.
    pub fn name(self) -> &'static str {
        Level::NAMES.iter().find(|(_, level)| *level == self).map_or("", |(name, _)| name)
    }
}
