//! Compiled programs. All sessions with the same settings share one.

use std::sync::{Arc, OnceLock};

use ort_alloc::fork::get_or_init;
use ort_alloc::{Budget, TrimOnDrop};

use super::deferred::DeferredWeights;
use super::streaming::Streams;
use crate::Result;
use crate::cache::Entry;
use crate::ep::{Device, Precision};
use crate::plan::{BatchProof, BatchRefusal, PlanCaches, batch_parallel};
use crate::program::Program;
use crate::rewrite::Report;

/// A program with its packed weights and the devices that it was compiled for.
pub(crate) struct Compiled {
    pub(crate) program: Program,
    /// Caches the run plans by the sizes of the inputs.
    pub(crate) plans: PlanCaches,
    pub(crate) streams: Streams,
    pub(crate) deferred: DeferredWeights,
    pub(crate) devices: Vec<Arc<dyn Device>>,
    /// The bytes of weights that were packed by the build.
    pub(crate) packed_bytes: usize,
    /// All bytes of the build that stay in the budget: packed weights that are never evicted,
    /// folded constants, copies.
    pub(crate) constant_bytes: usize,
    /// The entry of the compiled cache that contains the packed weights, if there is one.
    pub(crate) cache: Option<CacheUse>,
    pub(crate) rewrites: Report,
    /// The result of [`Self::batch()`], computed on first use.
    pub(crate) batch: OnceLock<Result<BatchProof, BatchRefusal>>,
    /// Counts the packed weights and the runs of every session on this program.
    pub(crate) budget: Arc<Budget>,
    /// The last field, because it must drop after the weights: it trims the heap. `None` for
    /// programs too small to matter: constant folding compiles hundreds of them.
    pub(crate) _trim: Option<TrimOnDrop>,
}

impl Compiled {
    /// The heap is trimmed for programs with at least this many bytes of packed weights.
    pub(crate) const WORTH_A_TRIM: usize = 1 << 20;

    /// Returns the proof that the result of an item is the same, bit for bit, in a batch of any
    /// size, or why there is no proof.
    pub(crate) fn batch(&self) -> Result<&BatchProof, &BatchRefusal> {
        let proof = get_or_init(&self.batch, || match self.streams.precision() {
            Precision::Fp32 => batch_parallel(&self.program.graph),
            // A part with few rows would be computed in float32, and the whole batch in bfloat16.
            _ => Err(BatchRefusal {
                symbol: None,
                place: "the precision".to_string(),
                why: "products of few rows are not computed in bfloat16".to_string(),
            }),
        });
        proof.as_ref()
    }
}

/// The part of a program that is stored in an entry of the compiled cache.
pub(crate) struct CacheUse {
    pub(crate) entry: Arc<Entry>,
    /// The bytes of packed weights in the entry.
    pub(crate) packed_bytes: usize,
}
