//! A model compiled for devices: made once, and shared by all sessions that ask for the same.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock, Weak};

use ort_alloc::{Budget, TrimOnDrop};
use parking_lot::Mutex;

use super::Program;
use super::providers::ProviderRequest;
use super::streamed::Streams;
use crate::Result;
use crate::cache::Entry;
use crate::ep::{Device, Precision};
use crate::plan::{BatchProof, BatchRefusal, batch_parallel};
use crate::rewrite::{Optimizer, Report};

/// A program with its packed weights, and what it was made for.
pub(crate) struct Compiled {
    pub(crate) program: Program,
    pub(crate) streams: Streams,
    pub(crate) devices: Vec<Arc<dyn Device>>,
    /// The bytes of packed weights that always stay.
    pub(crate) packed_bytes: usize,
    /// All bytes that building left in the budget: packed weights that always stay, folded constants,
    /// copies.
    pub(crate) constant_bytes: usize,
    /// The entry of the compiled cache that packed weights lie in instead.
    pub(crate) cache: Option<CacheUse>,
    pub(crate) rewrites: Report,
    /// Whether runs may be split, once somebody has asked.
    pub(super) batch: OnceLock<Result<BatchProof, BatchRefusal>>,
    /// What the packed weights count against, and the runs of every session on it.
    pub(crate) budget: Arc<Budget>,
    /// None where nobody else may have it.
    pub(super) key: Option<CompileKey>,
    /// Last: the heap gives back what the weights leave. None for programs too small to matter, as folding makes by the hundred.
    pub(super) _trim: Option<TrimOnDrop>,
}

impl Compiled {
    /// From this many bytes of packed weights on the heap is trimmed.
    pub(super) const WORTH_A_TRIM: usize = 1 << 20;

    /// The proof that each item of a batch has the same bits in whatever batch it is, or why there is none.
    pub(super) fn batch(&self) -> Result<&BatchProof, &BatchRefusal> {
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

/// What compiling depends on besides the model.
pub(super) struct CompileKey {
    pub(super) providers: Vec<ProviderRequest>,
    /// The devices that the caller opened.
    pub(super) devices: Vec<Arc<dyn Device>>,
    pub(super) threads: usize,
    pub(super) precision: Precision,
    pub(super) optimizer: Optimizer,
    /// The budget that the caller shares between sessions.
    pub(super) budget: Option<Arc<Budget>>,
    pub(super) cache_dir: Option<PathBuf>,
    /// Inputs and the outputs that are their new values.
    pub(super) updates: Vec<(String, String)>,
}

impl PartialEq for CompileKey {
    fn eq(&self, other: &CompileKey) -> bool {
        let devices = self.devices.iter().zip(&other.devices);
        let same_budget = match (&self.budget, &other.budget) {
            (None, None) => true,
            (Some(one), Some(other)) => Arc::ptr_eq(one, other),
            _ => false,
        };
        self.providers == other.providers
            && self.devices.len() == other.devices.len()
            && devices.into_iter().all(|(one, other)| std::ptr::addr_eq(Arc::as_ptr(one), Arc::as_ptr(other)))
            && (self.threads, self.precision) == (other.threads, other.precision)
            && self.optimizer == other.optimizer
            && self.cache_dir == other.cache_dir
            && self.updates == other.updates
            && same_budget
    }
}

/// What is compiled of one model, as long as some session has it.
#[derive(Default)]
pub(super) struct CompiledPrograms(Mutex<Vec<Weak<Compiled>>>);

impl CompiledPrograms {
    /// What was compiled for `key`, or what `make` compiles. Whoever asks meanwhile waits: two copies would take twice the memory.
    pub(super) fn get(
        &self,
        key: CompileKey,
        make: impl FnOnce(CompileKey) -> Result<Compiled>,
    ) -> Result<Arc<Compiled>> {
        let mut known = self.0.lock();
        known.retain(|compiled| compiled.strong_count() > 0);
        let mut alive = known.iter().filter_map(Weak::upgrade);
        if let Some(compiled) = alive.find(|compiled| compiled.key.as_ref() == Some(&key)) {
            return Ok(compiled);
        }
        let compiled = Arc::new(make(key)?);
        known.push(Arc::downgrade(&compiled));
        Ok(compiled)
    }
}
