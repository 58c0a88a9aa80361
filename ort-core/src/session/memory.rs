//! Memory accounting: the memory that a session holds, by purpose, and trimming.
//!
//! The numbers come from the session's budget, its compiled program and its idle memory. For
//! the predicted memory of a run, see [`Session::plan`].

use ort_alloc::{Allocator, Category, HostAllocator};
use rustc_hash::FxHashSet;

use super::Session;
use crate::ep::SharedBytes;
use crate::plan::RunPlan;
use crate::run::deferred::DeferredBytes;
use crate::tensor::Tensor;

/// The memory of a session by purpose, in bytes. Memory that sessions with equal settings on one
/// model share counts in each of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryUse {
    /// All weights of the model.
    pub weights: usize,
    /// The part of `weights` that runs read straight from the mapped file.
    pub weights_mapped: usize,
    /// Constants in memory of their own: weights of models that are not mapped, folded constants
    /// until they are packed, and copies of small and of unaligned constants.
    pub weights_copied: usize,
    /// Packed weights in memory of this process. A run packs those that it needs and that no run
    /// has packed before; until then they count as mapped.
    pub packed: usize,
    /// The part of `packed` that sessions on other models, or with other settings, hold as well.
    /// Equal bytes exist once in the process, and each session counts them.
    pub packed_shared: usize,
    /// Constants in device memory. If they are streamed, these are the constants that the last run
    /// left there.
    pub device_constants: usize,
    /// Packed weights and folded constants in the mapped file of the compiled cache, whose pages
    /// processes share.
    pub cached: usize,
    /// Planned activations: the slabs of runs, including those that wait for the next run.
    pub slabs: usize,
    /// Kernel workspaces that are not in the plan.
    pub workspace: usize,
    /// Outputs that are still held.
    pub outputs: usize,
    /// Values whose size is known only at run time, including the arenas' regions.
    pub dynamic: usize,
    /// The part of `dynamic` that is arena regions, including free ones.
    pub arena: usize,
    /// Dropped outputs that are kept for the next outputs of their size. They count in no budget,
    /// so with a memory limit none are kept.
    pub outputs_waiting: usize,
    /// The part of the bytes above that is kept for the next run and that [`Session::trim`] frees:
    /// slabs, free regions and dropped outputs.
    pub idle: usize,
    /// The limit on what the session allocates.
    pub limit: usize,
    /// Activations, workspaces and outputs in use now.
    pub activations: usize,
    /// The peak of activations, workspaces and outputs.
    pub activations_peak: usize,
}

impl MemoryUse {
    /// All bytes that the session holds after a run: mapped weights, which the run has made
    /// resident, and everything that is allocated.
    ///
    /// The process needs a few MiB more, for code, the graph and the threads' stacks.
    pub fn total(&self) -> usize {
        let weights =
            self.weights_mapped + self.weights_copied + self.packed + self.device_constants + self.cached;
        weights + self.slabs + self.workspace + self.outputs + self.dynamic + self.outputs_waiting
    }
}

/// The bytes of constants by location. Memory that sessions share counts once.
#[derive(Default)]
pub(super) struct ConstantBytes {
    pub(super) mapped: usize,
    copied: usize,
    pub(super) cached: usize,
    pub(super) packed: usize,
    packed_shared: usize,
    pub(super) on_devices: usize,
}

impl ConstantBytes {
    /// Sums the constants that these sessions on one model hold now. With a plan, the first of them
    /// holds what it holds during a run with that plan.
    pub(super) fn of(sessions: &[&Session], mut plan: Option<&RunPlan>) -> ConstantBytes {
        let (mut sum, mut counted) = (ConstantBytes::default(), FxHashSet::default());
        for session in sessions {
            let deferred = DeferredBytes::of(&session.executor.compiled.program, plan.take());
            sum.add_read(session, &deferred.unpacked, &mut counted);
            sum.packed += session.packed_beside(deferred.packed);
            sum.on_devices += session.device_constants_now();
        }
        // Each owner counts a shared packed weight, so duplicates among these sessions are
        // subtracted.
        let owners: Vec<_> =
            sessions.iter().map(|session| session.executor.compiled.streams.owner()).collect();
        let shared = SharedBytes::of(&owners);
        sum.packed = sum.packed.saturating_sub(shared.among);
        sum.packed_shared = shared.with_others;
        // A model that is not mapped keeps all its weights in memory, even those that runs no
        // longer read.
        let model = sessions.first().map(|session| &session.model);
        if let Some(model) = model.filter(|model| !model.has_mapping()) {
            sum.copied = sum.copied.max(model.graph().weight_bytes());
        }
        sum
    }

    /// Adds the constants that runs read, `unpacked` weights included, except those in `counted`.
    fn add_read(
        &mut self,
        session: &Session,
        unpacked: &[Tensor],
        counted: &mut FxHashSet<(*const u8, usize)>,
    ) {
        let cache = session.executor.compiled.cache.as_ref();
        let constants = session.executor.compiled.program.constants().into_iter().chain(unpacked);
        for bytes in constants.filter_map(|tensor| tensor.bytes()) {
            // The entry of a compiled model is in the model's mapped file, so the entry is tested
            // first.
            let place = match bytes {
                bytes if cache.is_some_and(|cache| cache.entry.holds(bytes)) => &mut self.cached,
                bytes if session.model.is_mapped(bytes) => &mut self.mapped,
                _ => &mut self.copied,
            };
            *place += if counted.insert((bytes.as_ptr(), bytes.len())) { bytes.len() } else { 0 };
        }
        self.cached += cache.map_or(0, |cache| cache.packed_bytes);
    }
}

impl Session {
    /// The memory of the session, including the program for runs that contradict the dimension
    /// names.
    pub fn memory(&self) -> MemoryUse {
        let held = |category| self.executor.budget.in_use_of(category);
        let constants = ConstantBytes::of(&self.parts(), None);
        MemoryUse {
            weights: self.model.graph().weight_bytes(),
            weights_mapped: constants.mapped,
            weights_copied: constants.copied,
            packed: constants.packed,
            packed_shared: constants.packed_shared,
            device_constants: constants.on_devices,
            cached: constants.cached,
            slabs: held(Category::Slab),
            workspace: held(Category::Workspace),
            outputs: held(Category::Output),
            dynamic: held(Category::Dynamic),
            arena: self.executor.kept.dynamic.held_bytes(),
            outputs_waiting: self.executor.kept.waiting_outputs(),
            idle: self.executor.kept.idle_bytes(),
            limit: self.executor.budget.limit().unwrap_or(usize::MAX),
            activations: self.executor.budget.activation_in_use(),
            activations_peak: self.executor.budget.activation_peak(),
        }
    }

    /// The fewest bytes of constants that the session holds during a run and that count against its
    /// limit: folded constants, aligned copies, packed weights, and the windows for streamed
    /// constants.
    pub fn constant_bytes(&self) -> usize {
        let constants = self.parts().into_iter().map(|part| part.executor.compiled.constant_bytes);
        constants.fold(self.executor.compiled.streams.least_bytes(), usize::saturating_add)
    }

    /// The bytes of this program's packed weights that are in memory now, beside `deferred` ones.
    fn packed_beside(&self, deferred: usize) -> usize {
        let compiled = &self.executor.compiled;
        compiled.packed_bytes + deferred + compiled.streams.resident_bytes(&compiled.program)
    }

    /// The bytes of constants that are in device memory now.
    pub(super) fn device_constants_now(&self) -> usize {
        self.fixed_device_constants() + self.executor.compiled.streams.windows.resident_bytes()
    }

    /// The bytes of constants that always stay in device memory.
    pub(super) fn fixed_device_constants(&self) -> usize {
        let constants = self.executor.compiled.program.constants().into_iter();
        let mut counted = FxHashSet::default();
        // Programs of subgraphs share the copies of constants that they have in common.
        let is_new = |tensor: &&Tensor| {
            tensor.view().device_range().is_some_and(|range| {
                let place =
                    (range.buffer.device(), range.buffer.handle(), range.buffer.offset() + range.offset);
                place.1.is_none() || counted.insert(place)
            })
        };
        constants.filter(is_new).map(Tensor::byte_count).sum()
    }

    /// Frees the memory that finished runs left for later ones, and the cached plans.
    pub fn trim(&self) {
        self.executor.kept.release();
        // Later runs measure again how many bytes of packed weights dynamic values evict.
        self.executor.kept.evicted.store(0, std::sync::atomic::Ordering::Relaxed);
        self.parts().into_iter().for_each(|part| part.executor.compiled.plans.clear());
        HostAllocator::global().trim();
    }
}
