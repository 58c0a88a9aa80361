//! What a session holds, by what it is for, and giving it back.

use ort_alloc::{Allocator, Category, HostAllocator};
use rustc_hash::FxHashSet;

use super::Session;
use crate::ep::SharedBytes;
use crate::tensor::Tensor;

/// The memory of a session, by what it is for, in bytes. What sessions share that were built alike
/// on one model is in each of theirs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryUse {
    /// All weights of the model.
    pub weights: usize,
    /// Of those, what runs read straight from the mapped file.
    pub weights_mapped: usize,
    /// Constants in memory of their own: those of models that are not mapped, folded ones, and
    /// copies for alignment.
    pub weights_copied: usize,
    /// Weights packed for speed, in memory of this process.
    pub packed: usize,
    /// Of those, what sessions on other models, or built otherwise, hold as well: equal bytes are
    /// in this process once, and each session counts them.
    pub packed_shared: usize,
    /// Constants in the memory of devices; where not all of them stay there, those of the last run.
    pub device_constants: usize,
    /// Packed weights and folded constants in the mapped file of a compiled cache, which processes
    /// share.
    pub cached: usize,
    /// Planned activations: the slabs of runs, those that wait for the next ones included.
    pub slabs: usize,
    /// Scratch of kernels that the plan could not hold.
    pub workspace: usize,
    /// Outputs that somebody holds.
    pub outputs: usize,
    /// Values whose size only the run tells, with the arena's regions.
    pub dynamic: usize,
    /// Of those, the arena's regions, free ones included.
    pub arena: usize,
    /// Dropped outputs that wait for the next ones of their size. They are in no budget: with a
    /// limit there are none.
    pub outputs_waiting: usize,
    /// Of all that is above, what waits for the next run and a trim gives back: slabs, free
    /// regions, dropped outputs.
    pub idle: usize,
    /// The bound on what the session allocates.
    pub limit: usize,
    /// Activations, workspaces and outputs in use now.
    pub activations: usize,
    /// The most that was in use at once.
    pub activations_peak: usize,
}

impl MemoryUse {
    /// All bytes that the session holds once it has run: mapped weights, which runs have read by
    /// then, and everything that is allocated.
    ///
    /// The process holds a few MiB more, for its code, the graph and the threads' stacks.
    pub fn total(&self) -> usize {
        let weights =
            self.weights_mapped + self.weights_copied + self.packed + self.device_constants + self.cached;
        weights + self.slabs + self.workspace + self.outputs + self.dynamic + self.outputs_waiting
    }
}

/// Bytes of constants by where they lie. What sessions share counts once.
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
    /// The constants that sessions of one model hold now.
    pub(super) fn of(sessions: &[&Session]) -> ConstantBytes {
        let (mut sum, mut counted) = (ConstantBytes::default(), FxHashSet::default());
        for session in sessions {
            sum.add_read(session, &mut counted);
            sum.packed += session.packed_now();
            sum.on_devices += session.device_constants_now();
        }
        let owners: Vec<_> =
            sessions.iter().map(|session| session.executor.compiled.streams.owner()).collect();
        let shared = SharedBytes::of(&owners);
        sum.packed = sum.packed.saturating_sub(shared.among);
        sum.packed_shared = shared.with_others;
        // A model that is not mapped keeps all of its weights in memory.
        let model = sessions.first().map(|session| &session.model);
        if let Some(model) = model.filter(|model| !model.has_mapping()) {
            sum.copied = sum.copied.max(model.graph().weight_bytes());
        }
        sum
    }

    /// Adds the constants that runs read, except those in `counted`.
    fn add_read(&mut self, session: &Session, counted: &mut FxHashSet<(*const u8, usize)>) {
        let cache = session.executor.compiled.cache.as_ref();
        for bytes in
            session.executor.compiled.program.constants().into_iter().filter_map(|tensor| tensor.bytes())
        {
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
    /// The memory of the session. It includes the program compiled for runs that contradict the
    /// names of dimensions.
    pub fn memory(&self) -> MemoryUse {
        let held = |category| self.executor.budget.in_use_of(category);
        let constants = ConstantBytes::of(&self.parts());
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
    /// limit: folded ones, copies for alignment, packed weights, and of those that come and go the
    /// largest.
    pub fn constant_bytes(&self) -> usize {
        let constants = self.parts().into_iter().map(|part| part.executor.compiled.constant_bytes);
        constants.fold(self.executor.compiled.streams.least_bytes(), usize::saturating_add)
    }

    /// The bytes of this program's packed weights that are in memory now.
    pub(super) fn packed_now(&self) -> usize {
        self.executor.compiled.packed_bytes
            + self.executor.compiled.streams.resident_bytes(&self.executor.compiled.program)
    }

    pub(super) fn device_constants_now(&self) -> usize {
        self.fixed_device_constants() + self.executor.compiled.streams.windows.resident_bytes()
    }

    /// The bytes of constants that always stay in the memory of devices.
    pub(super) fn fixed_device_constants(&self) -> usize {
        let constants = self.executor.compiled.program.constants().into_iter();
        constants.filter(|tensor| !tensor.view().is_host()).map(Tensor::byte_count).sum()
    }

    /// Gives back the memory that finished runs left for the next ones, and kept plans.
    pub fn trim(&self) {
        self.executor.kept.release();
        self.executor.kept.evicted.store(0, std::sync::atomic::Ordering::Relaxed);
        self.parts().into_iter().for_each(|part| part.executor.compiled.plans.clear());
        HostAllocator::global().trim();
    }
}
