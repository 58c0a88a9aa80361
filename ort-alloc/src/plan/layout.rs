//! What the planner takes and returns: intervals, and the layout of each lane.

/// The memory demand of one value: size, lifetime in steps, and lane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interval {
    /// The size in bytes; may be 0.
    pub bytes: usize,
    /// The step that writes it first.
    pub first: usize,
    /// The last step that reads it, inclusive.
    pub last: usize,
    /// The slab it belongs to. Lanes share nothing.
    pub lane: u32,
    /// The alignment of its offset, a power of two.
    pub alignment: usize,
    /// Set if it has no memory of its own but is part of another interval.
    pub alias: Option<Alias>,
}

impl Default for Interval {
    /// Returns an interval of 0 bytes at step 0 of lane 0, aligned to 64.
    fn default() -> Self {
        Self { bytes: 0, first: 0, last: 0, lane: 0, alignment: 64, alias: None }
    }
}

/// Storage shared with another interval: a view, or the result of an in-place operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alias {
    /// The index of the other interval, which may be an alias itself.
    pub of: usize,
    /// The offset in bytes from the start of the other interval.
    pub offset: usize,
}

/// The slab of one lane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LanePlan {
    /// The lane.
    pub lane: u32,
    /// The size of the slab in bytes.
    pub bytes: usize,
    /// The alignment that the slab's start must have, so that every offset is aligned.
    pub alignment: usize,
    /// The largest sum of bytes live at one step, with aliases counted once. No plan can be
    /// smaller.
    pub lower_bound: usize,
    /// The strategy that found this layout.
    pub strategy: Strategy,
}

/// The strategy by which a layout was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Strategy {
    /// Largest first, each in the tightest gap.
    GreedyBySize,
    /// Most bytes times steps first, each in the tightest gap.
    GreedyByArea,
    /// In time order, from a free list.
    BestFit,
    /// Largest first, then repeatedly those first that ended too high.
    GreedyByTrouble,
}

/// An interval with its own memory, with lifetime and alignment extended to those of all its
/// aliases.
#[derive(Clone, Debug)]
pub(super) struct Root {
    pub(super) index: usize,
    pub(super) bytes: usize,
    pub(super) first: usize,
    pub(super) last: usize,
    pub(super) lane: u32,
    pub(super) alignment: usize,
}
