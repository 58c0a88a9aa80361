//! An attention: its operands, and which keys a query sees.

use std::ops::Range;

use ort_core::ops::nn::attention::problem::SdpaSizes;
use ort_core::{Result, ensure};
use ort_cpu_matmul::real::Real;

use super::rows::Rows;
use super::scores::{HiddenKeys, ScoreMask};

/// One attention: `softmax(scale * query * keys + mask) * values` for each query.
#[derive(Clone, Copy)]
pub struct Attention<'a, T: Real = f32> {
    /// The sizes.
    pub sizes: SdpaSizes,
    /// (batch, heads, queries), in `T`. If `None`, the output buffer holds the queries, and the
    /// results replace them in place. Only streamed scores allow that.
    pub queries: Option<Rows<'a, T>>,
    /// (batch, key heads, keys). Narrow elements need streamed scores.
    pub keys: Rows<'a, T>,
    /// (batch, key heads, keys). Narrow elements need streamed scores.
    pub values: Rows<'a, T>,
    /// Scales the dot products.
    pub scale: f64,
    /// If positive, scores become `softcap * tanh(score / softcap)`.
    pub softcap: f32,
    /// The keys that a query (batch, query) can see by its position.
    pub visible: &'a (dyn Fn([usize; 2]) -> Range<usize> + Sync),
    /// Changes the scores before the softmax.
    pub mask: Option<&'a dyn ScoreMask<T>>,
    /// For each head, the logarithm of a term added to the softmax's sum (attention sink).
    pub sinks: Option<&'a [T]>,
    /// What becomes of keys that a query does not see.
    pub hidden: HiddenKeys,
}

impl<T: Real> Attention<'_, T> {
    /// Checks that the operands match and are inside their slices.
    pub(crate) fn check(&self) -> Result<()> {
        let SdpaSizes { batch, heads, key_heads, queries, keys, size, value_size } = self.sizes;
        ensure!(
            heads.checked_rem(key_heads) == Some(0),
            InvalidArgument,
            "{heads} query heads are not a multiple of {key_heads} key heads"
        );
        let is_inside = self.queries.is_none_or(|rows| rows.holds([batch, heads, queries], size))
            && self.keys.holds([batch, key_heads, keys], size)
            && self.values.holds([batch, key_heads, keys], value_size)
            && self.sinks.is_none_or(|sinks| sinks.len() >= heads);
        ensure!(
            is_inside && self.queries.is_none_or(|rows| !rows.elements.is_narrow()),
            InvalidArgument,
            "queries, keys or values lie outside their tensors"
        );
        ensure!(
            self.queries.is_some() || size == value_size,
            InvalidArgument,
            "results in the place of queries are not of their size"
        );
        Ok(())
    }

    /// Returns the keys that a query sees by its position.
    pub(crate) fn span(&self, batch: usize, query: usize) -> Range<usize> {
        let Range { start, end } = (self.visible)([batch, query]);
        let end = end.min(self.sizes.keys);
        start.min(end)..end
    }

    /// Returns the query heads that share a key head.
    pub(crate) fn group(&self) -> usize {
        group(&self.sizes)
    }

    /// Returns the values of the queries from one on, or `None` if the output buffer holds them.
    pub(crate) fn queries_from(&self, place: [usize; 3]) -> Option<&[T]> {
        self.queries.and_then(|rows| rows.from(place))
    }
}

/// Returns the query heads that share a key head.
pub(crate) fn group(sizes: &SdpaSizes) -> usize {
    sizes.heads / sizes.key_heads.max(1)
}

impl Attention<'_> {
    /// Returns the scale of the scores before the softcap.
    pub(crate) fn factor(&self) -> f32 {
        let scale = self.scale as f32;
        if self.softcap > 0.0 { scale / self.softcap } else { scale }
    }

    /// Returns the final scale of a result. The sum is 0 only if all scores are -inf, because a
    /// finite maximum has a weight of 1. A softmax over no keys yields 0 in either mode.
    pub(crate) fn final_factor(&self, sum: f32) -> f32 {
        match sum == 0.0 {
            true if self.hidden == HiddenKeys::ExcludedOrNan && self.sizes.keys > 0 => f32::NAN,
            true => 0.0,
            false => 1.0 / sum,
        }
    }
}
