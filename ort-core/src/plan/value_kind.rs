//! How a value gets its memory.

/// How a value gets its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ValueKind {
    /// Memory of its own: in a slab, or in a buffer of known size.
    Planned,
    /// An alias of part of another value.
    View,
    /// Computed in place of an input that dies at this step, or inside the output of a
    /// concatenation.
    InPlace,
    /// Memory whose size is known only at run time.
    Dynamic,
}

impl ValueKind {
    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            ValueKind::Planned => "planned",
            ValueKind::View => "view",
            ValueKind::InPlace => "in_place",
            ValueKind::Dynamic => "dynamic",
        }
    }
}
