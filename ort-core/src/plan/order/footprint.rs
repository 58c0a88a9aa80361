//! Memory simulation of schedules: what each step allocates and frees under one binding.

#![allow(
    clippy::indexing_slicing,
    reason = "slots and steps are numbered by the program, and each table has an entry for each"
)]

use smallvec::SmallVec;

use super::dependencies::Csr;
use crate::dim::Bindings;
use crate::dtype::DType;
use crate::ep::OutputsFrom;
use crate::plan::Planning;
use crate::plan::resolve::Planner;
use crate::program::{Program, SlotId, Step};
use crate::tensor::byte_count;

/// A block that a step allocates: the memory of a value, numbered by its slot. A view is in the
/// block of the slot that it aliases.
pub(super) struct Allocation {
    pub(super) block: usize,
    pub(super) bytes: u64,
    /// The position of the output that is stored in the block.
    pub(super) output: usize,
    /// The blocks that the output may take over in place, if no later step reads them.
    pub(super) from: SmallVec<[usize; 2]>,
}

/// The memory effects of all steps.
pub(super) struct Footprint {
    /// For each step, the blocks it reads, each once.
    pub(super) reads: Csr,
    /// For each block, the steps that read it.
    pub(super) readers: Csr,
    /// The blocks that each step allocates.
    pub(super) makes: Vec<SmallVec<[Allocation; 1]>>,
    /// The scratch bytes that each step needs while it runs.
    pub(super) scratch: Vec<u64>,
    /// For each slot, the block it is in.
    block_of: Vec<usize>,
    blocks: usize,
}

impl Footprint {
    pub(super) fn new(program: &Program, bindings: &Bindings, threads: usize) -> Footprint {
        let bound = program.bound_values(Planning::Shared);
        let mut planner = Planner::new((program, &program.graph), bindings, threads, &bound);
        planner.find_shapes();
        planner.find_needed();
        let mut blocks: Vec<usize> = (0..program.slots.len()).collect();
        let mut makes = Vec::with_capacity(program.steps.len());
        let mut scratch = Vec::with_capacity(program.steps.len());
        for (index, step) in program.steps.iter().enumerate() {
            let mut made = SmallVec::new();
            let mut bytes = 0;
            match planner.needed[index].then(|| planner.view_of(step)) {
                None => {}
                // A view allocates nothing. Its readers keep the block of its root live.
                Some(Some((root, _))) => {
                    for slot in step.outputs.iter().flatten() {
                        blocks[slot.index()] = blocks[root.index()];
                    }
                }
                Some(None) => {
                    made = makes_of(&planner, step, &blocks);
                    // A kernel that rejects these sizes rejects them in every order.
                    bytes = planner.scratch_of(step, index, &mut Vec::new()).unwrap_or(0);
                }
            }
            makes.push(made);
            scratch.push(bytes as u64);
        }
        let reads = Csr::collect(program.steps.iter().zip(&planner.needed).map(|(step, needed)| {
            let reads = step.reads().filter(|_| *needed).map(|slot| blocks[slot.index()]);
            let mut reads: SmallVec<[usize; 8]> = reads.collect();
            reads.sort_unstable();
            reads.dedup();
            reads
        }));
        let readers = reads.inverted(blocks.len());
        Footprint { reads, readers, makes, scratch, blocks: blocks.len(), block_of: blocks }
    }

    /// Returns the block that a slot is in.
    pub(super) fn block_of(&self, slot: SlotId) -> Option<usize> {
        self.block_of.get(slot.index()).copied()
    }

    /// Returns the bytes live while each step of the order runs.
    pub(super) fn simulate(&self, order: &[usize]) -> Vec<u64> {
        let mut memory = ScheduleMemory::new(self);
        order.iter().map(|step| memory.run(*step)).collect()
    }
}

/// Returns the blocks that a step allocates.
fn makes_of(planner: &Planner<'_>, step: &Step, blocks: &[usize]) -> SmallVec<[Allocation; 1]> {
    let mut made = SmallVec::new();
    for (position, slot) in step.outputs.iter().enumerate() {
        let Some(slot) = *slot else { continue };
        // Outputs of the graph stay until the end in every order, and in-place updates are in bound
        // buffers.
        let stays = planner.is_output[slot.index()] || planner.buffers[slot.index()].is_some();
        let bytes = bytes_of(planner, slot).filter(|bytes| *bytes > 0 && !stays);
        let Some(bytes) = bytes else { continue };
        let shares = step.claim.outputs == OutputsFrom::Plan;
        let pairs = step.claim.in_place.iter().filter(|(_, output)| shares && *output == position);
        let from = pairs.filter_map(|(input, _)| {
            let input = step.inputs.get(*input).copied().flatten()?;
            let block = blocks[input.index()];
            // An input that is read twice is still needed while the output is written.
            let once = step.reads().filter(|read| blocks[read.index()] == block).count() == 1;
            (once && bytes_of(planner, input) == Some(bytes)).then_some(block)
        });
        made.push(Allocation { block: slot.index(), bytes, output: position, from: from.collect() });
    }
    made
}

/// Returns the bytes of a slot, if its size is known and a step has to compute it.
fn bytes_of(planner: &Planner<'_>, slot: SlotId) -> Option<u64> {
    let place = slot.index();
    match (planner.dtypes[place], &planner.shapes[place]) {
        _ if planner.exists_before_run(slot) => None,
        (Some(dtype), Some(shape)) if dtype != DType::String => Some(byte_count(dtype, shape).ok()? as u64),
        _ => None,
    }
}

/// The state of memory in the middle of a schedule.
pub(super) struct ScheduleMemory<'a> {
    footprint: &'a Footprint,
    /// For each block, the number of steps that have yet to read it.
    pending: Vec<usize>,
    /// The bytes that each block takes now.
    held: Vec<u64>,
    pub(super) live: u64,
}

impl<'a> ScheduleMemory<'a> {
    pub(super) fn new(footprint: &'a Footprint) -> ScheduleMemory<'a> {
        let pending = (0..footprint.blocks).map(|block| footprint.readers.of(block).len()).collect();
        ScheduleMemory { footprint, pending, held: vec![0; footprint.blocks], live: 0 }
    }

    /// Returns the number of steps that have yet to read a block.
    pub(super) fn pending(&self, block: usize) -> usize {
        self.pending[block]
    }

    /// Returns the bytes that a block takes now.
    pub(super) fn held(&self, block: usize) -> u64 {
        self.held[block]
    }

    /// Runs a step; returns the bytes live while it runs.
    pub(super) fn run(&mut self, step: usize) -> u64 {
        let footprint = self.footprint;
        // Reads are counted before outputs are placed, so that an output can take over an input
        // that dies at this step.
        for &block in footprint.reads.of(step) {
            self.pending[block] -= 1;
        }
        for made in &footprint.makes[step] {
            // In place: the block takes over one that this step was the last to read.
            let dead = |block: &&usize| self.pending[**block] == 0 && self.held[**block] > 0;
            let unread = self.pending[made.block] == 0;
            match made.from.iter().find(dead).filter(|_| !unread) {
                Some(&from) => self.held[made.block] = std::mem::take(&mut self.held[from]),
                None => {
                    self.held[made.block] = made.bytes;
                    self.live = self.live.saturating_add(made.bytes);
                }
            }
        }
        // Scratch memory is live only during the step, and reads that were the last free their
        // blocks.
        let alive = self.live.saturating_add(footprint.scratch[step]);
        let made = footprint.makes[step].iter().map(|made| made.block);
        for block in footprint.reads.of(step).iter().copied().chain(made) {
            if self.pending[block] == 0 {
                self.live = self.live.saturating_sub(std::mem::take(&mut self.held[block]));
            }
        }
        alive
    }
}
