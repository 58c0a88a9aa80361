//! Problem descriptors of attention: a node's attributes and shapes, read once.
//!
//! Every provider reads a node through these, so that all accept the same nodes. They hold sizes
//! and strides only; each provider renders and launches its own kernels.

mod attention;
mod grid;
mod group_query;
mod heads;
mod mask;
mod multi_head;
mod rotary;

pub use attention::{Attention, AttentionProblem, ScoreStage};
pub use grid::{GridAttention, GridProblem};
pub use group_query::{CacheQuantization, GroupQuery, GroupQueryProblem};
pub use heads::{HeadLayout, HeadRows};
pub use mask::{BroadcastMask, PaddingMask};
pub use multi_head::{MultiHead, MultiHeadProblem, QkvLayout};
pub use rotary::{Rotary, RotaryPositions, RotaryProblem};

use crate::ir::Attributes;
use crate::{Result, error};

/// The sizes of scaled dot-product attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SdpaSizes {
    /// The batches.
    pub batch: usize,
    /// The heads of queries.
    pub heads: usize,
    /// The heads of keys and values. Each serves `heads / key_heads` consecutive query heads.
    pub key_heads: usize,
    /// The queries of a head.
    pub queries: usize,
    /// The keys of a head.
    pub keys: usize,
    /// The elements of a query and of a key.
    pub size: usize,
    /// The elements of a value.
    pub value_size: usize,
}

impl SdpaSizes {
    /// The query rows that share a head of keys.
    pub fn rows(&self) -> usize {
        // A shape may have no key heads, and then there are no rows.
        self.heads.checked_div(self.key_heads).unwrap_or(0).saturating_mul(self.queries)
    }

    /// The heads of keys of all batches.
    pub fn groups(&self) -> usize {
        self.batch.saturating_mul(self.key_heads)
    }

    /// The scale of the scores: the one given, or `1 / sqrt(size)`.
    pub fn scale(&self, given: Option<f32>) -> f32 {
        given.unwrap_or(1.0 / (self.size as f32).sqrt())
    }
}

/// The causal mask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Causal {
    /// Queries see all keys.
    No,
    /// A query sees the keys up to its own position.
    Yes,
    /// Bottom-right aligned: the last query sees all keys, as in ONNX Runtime.
    BottomRight,
}

/// Reads the attribute `scale` of an operator of `com.microsoft`, where 0 selects the default.
fn scale_of(attrs: &Attributes) -> Option<f32> {
    attrs.find_float("scale").filter(|scale| *scale != 0.0)
}

/// Reads a head count that must be positive.
fn head_count(attrs: &Attributes, name: &str) -> Result<usize> {
    let count = attrs.int(name)?;
    let positive = usize::try_from(count).ok().filter(|count| *count > 0);
    positive.ok_or_else(|| error!(InvalidGraph, "{name} is {count}, expected at least 1"))
}
