//! Which keys a query of `Attention` may see by its position.

use std::ops::Range;

use ort_core::Result;
use ort_core::ep::RunCx;
use ort_core::ops::nn::attention::problem::{self, AttentionProblem, Causal};
use smallvec::SmallVec;

/// What determines by position which keys a query may see.
pub(super) struct Reach {
    /// How many keys of each batch are not padding.
    lengths: Option<SmallVec<[i64; 8]>>,
    past: usize,
    queries: usize,
    keys: usize,
    is_causal: bool,
    /// How many keys before and after its own position a query may see; negative if unbounded.
    windows: [i64; 2],
}

impl Reach {
    pub(super) fn new(
        cx: &RunCx<'_>,
        node: &problem::Attention,
        problem: &AttentionProblem,
    ) -> Result<Reach> {
        let lengths: Option<SmallVec<[i64; 8]>> =
            cx.find_input(6).map(|view| view.collect_ints()).transpose()?;
        if let Some(lengths) = &lengths {
            problem.check_lengths(lengths.len())?;
        }
        Ok(Reach {
            lengths,
            past: problem.past,
            queries: problem.q.rows,
            keys: problem.sizes().keys,
            is_causal: node.causal != Causal::No,
            windows: node.windows,
        })
    }

    /// Returns how many keys precede the first query.
    fn offset(&self, batch: usize) -> i64 {
        match &self.lengths {
            // Without a past, the queries are the last of the keys.
            Some(lengths) if self.past == 0 => lengths[batch].saturating_sub(self.queries as i64),
            _ => self.past as i64,
        }
    }

    /// Returns the keys that a query may see.
    pub(super) fn visible(&self, batch: usize, query: usize) -> Range<usize> {
        let place = query as i64 + self.offset(batch);
        let (mut start, mut end) = (0, self.keys as i64);
        if self.is_causal {
            end = end.min(place + 1);
        }
        let [left, right] = self.windows;
        if left >= 0 {
            start = start.max(place.saturating_sub(left));
        }
        if right >= 0 {
            end = end.min(place.saturating_add(right).saturating_add(1));
        }
        if let Some(lengths) = &self.lengths {
            end = end.min(lengths[batch]);
        }
        let end = end.max(0);
        start.clamp(0, end) as usize..end as usize
    }
}
