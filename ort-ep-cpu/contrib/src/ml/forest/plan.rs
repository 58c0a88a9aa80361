//! The slots of a forest's nodes, before they are packed.

use bytemuck::Pod;

/// A type of features.
pub(super) trait Number: Pod + PartialOrd + ort_core::dtype::Element + Send + Sync {
    /// The largest value that is not above `x`, so that `x <= split` stays exact in this type.
    fn floor(x: f64) -> Self;
    const NAN: Self;
    const LEAST: Self;
    fn from_single(x: f32) -> Self;
    fn to_single(self) -> f32;
}

impl Number for f32 {
    fn floor(x: f64) -> f32 {
        // The cast rounds to nearest, so the result may be one step above `x`.
        let rounded = x as f32;
        if f64::from(rounded) > x { rounded.next_down() } else { rounded }
    }
    const NAN: f32 = f32::NAN;
    const LEAST: f32 = f32::NEG_INFINITY;
    fn from_single(x: f32) -> f32 {
        x
    }
    fn to_single(self) -> f32 {
        self
    }
}

impl Number for f64 {
    fn floor(x: f64) -> f64 {
        x
    }
    const NAN: f64 = f64::NAN;
    const LEAST: f64 = f64::NEG_INFINITY;
    fn from_single(x: f32) -> f64 {
        f64::from(x)
    }
    fn to_single(self) -> f32 {
        self as f32
    }
}

/// One tree.
#[derive(Clone, Copy)]
pub(super) struct Tree {
    pub(super) root: u32,
    /// The number of steps after which every traversal has reached a leaf.
    pub(super) depth: u32,
    /// The target of all its leaves, if they share one.
    pub(super) target: Option<u32>,
}

/// The meaning of one node slot.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Place {
    /// Goes left if `x <= split`: the left child, the column, the split, and whether NaN goes left.
    Split {
        child: u32,
        column: usize,
        split: f64,
        missing_left: bool,
    },
    Leaf(u32),
    /// Leads on to another slot. It lets the splits of one test share a subtree.
    Jump(u32),
}

/// All slots, before the widths of their bit fields are known.
pub(super) struct Plan {
    pub(super) places: Vec<Place>,
    pub(super) trees: Vec<Tree>,
    pub(super) features: usize,
}
