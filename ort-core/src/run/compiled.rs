//! A model compiled for devices: made once, and shared by all sessions that ask for the same.

use std::sync::{Arc, OnceLock};

use ort_alloc::{Budget, TrimOnDrop};

use super::streaming::Streams;
use crate::Result;
use crate::cache::Entry;
use crate::ep::{Device, Precision};
use crate::plan::{BatchProof, BatchRefusal, PlanCaches, batch_parallel};
use crate::program::Program;
use crate::rewrite::Report;

/// A program with its packed weights, and what it was made for.
pub(crate) struct Compiled {
    pub(crate) program: Program,
    /// The plans of its runs, by the sizes of inputs.
    pub(crate) plans: PlanCaches,
    pub(crate) streams: Streams,
    pub(crate) devices: Vec<Arc<dyn Device>>,
    /// The bytes of packed weights that always stay.
    pub(crate) packed_bytes: usize,
    /// All bytes that building left in the budget: packed weights that always stay, folded
    /// constants, copies.
    pub(crate) constant_bytes: usize,
    /// The entry of the compiled cache that packed weights lie in instead.
    pub(crate) cache: Option<CacheUse>,
    pub(crate) rewrites: Report,
    /// Whether runs may be split, once somebody has asked.
    pub(crate) batch: OnceLock<Result<BatchProof, BatchRefusal>>,
    /// What the packed weights count against, and the runs of every session on it.
    pub(crate) budget: Arc<Budget>,
    /// Last: the heap gives back what the weights leave. None for programs too small to matter, as
    /// folding makes by the hundred.
    pub(crate) _trim: Option<TrimOnDrop>,
}

impl Compiled {
    /// From this many bytes of packed weights on the heap is trimmed.
    pub(crate) const WORTH_A_TRIM: usize = 1 << 20;

    /// The proof that each item of a batch has the same bits in whatever batch it is, or why there
    /// is none.
    pub(crate) fn batch(&self) -> Result<&BatchProof, &BatchRefusal> {
        let proof = self.batch.get_or_init(|| match self.streams.precision() {
            Precision::Fp32 => batch_parallel(&self.program.graph),
            _ => Err(BatchRefusal {
                symbol: None,
                place: "the precision".to_string(),
                why: "products of few rows are not computed in bfloat16".to_string(),
            }),
        });
        proof.as_ref()
    }
}

/// What of a program lies in an entry of the compiled cache.
pub(crate) struct CacheUse {
    pub(crate) entry: Arc<Entry>,
    /// The bytes of packed weights.
    pub(crate) packed_bytes: usize,
}
