//! What a session holds, by what it is for, and giving it back.

use ort_alloc::{Allocator, Category, HostAllocator};

use super::Session;

/// The memory of a session, by what it is for, in bytes. What sessions share that were built alike on one model is in each of theirs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryUse {
    /// All weights of the model.
    pub weights: usize,
    /// Of those, what runs read straight from the mapped file.
    pub weights_mapped: usize,
    /// Constants in memory of their own: those of models that are not mapped, folded ones, and copies for alignment.
    pub weights_copied: usize,
    /// Weights packed for speed.
    pub packed: usize,
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
    /// Dropped outputs that wait for the next ones of their size. They are in no budget: with a limit there are none.
    pub outputs_waiting: usize,
    /// Of all that is above, what waits for the next run and a trim gives back: slabs, free regions, dropped outputs.
    pub idle: usize,
    /// The bound on what the session allocates.
    pub limit: usize,
    /// Activations, workspaces and outputs in use now.
    pub activations: usize,
    /// The most that was in use at once.
    pub activations_peak: usize,
}

impl MemoryUse {
    /// All bytes that the session holds once it has run: mapped weights, which runs have read by then, and everything that is allocated.
    ///
    /// The process holds a few MiB more, for its code, the graph and the threads' stacks.
    pub fn total(&self) -> usize {
        let weights = self.weights_mapped + self.weights_copied + self.packed;
        weights + self.slabs + self.workspace + self.outputs + self.dynamic + self.outputs_waiting
    }
}

impl Session {
    /// The memory of the session.
    pub fn memory(&self) -> MemoryUse {
        let held = |category| self.budget.in_use_of(category);
        let (weights_mapped, weights_copied) = self.constant_bytes();
        MemoryUse {
            weights: self.model.graph().weight_bytes(),
            weights_mapped,
            weights_copied,
            packed: self.compiled.packed_bytes + self.compiled.streams.resident_bytes(&self.compiled.program),
            slabs: held(Category::Slab),
            workspace: held(Category::Workspace),
            outputs: held(Category::Output),
            dynamic: held(Category::Dynamic),
            arena: self.kept.dynamic.held_bytes(),
            outputs_waiting: self.kept.waiting_outputs(),
            idle: self.kept.idle_bytes(),
            limit: self.budget.limit().unwrap_or(usize::MAX),
            activations: self.budget.activation_in_use(),
            activations_peak: self.budget.activation_peak(),
        }
    }

    /// Bytes of constants that runs read: those of mapped files, and the others. Of a model that is not mapped all weights stay in memory.
    fn constant_bytes(&self) -> (usize, usize) {
        let (mut mapped, mut copied) = (0, 0);
        for bytes in self.compiled.program.constants().into_iter().filter_map(|tensor| tensor.bytes()) {
            match self.model.is_mapped(bytes) {
                true => mapped += bytes.len(),
                false => copied += bytes.len(),
            }
        }
        let whole = if self.model.has_mapping() { 0 } else { self.model.graph().weight_bytes() };
        (mapped, copied.max(whole))
    }

    /// Gives back the memory that finished runs left for the next ones, and kept plans.
    pub fn trim(&self) {
        self.kept.release();
        self.compiled.program.plans.clear();
        HostAllocator::global().trim();
    }
}
