//! Locations of given values (inputs and captures) and of outputs: in memory of the caller, or in
//! buffers of a binding, which outlive the run.
//!
//! The buffers of a binding have one numbering: first one for each given value, then one for each
//! output.

#![allow(
    clippy::indexing_slicing,
    reason = "ids of slots are made by the program, and the planner's tables have an entry for each"
)]

use ort_alloc::DeviceId;
use rustc_hash::FxHashMap;

use crate::program::{Program, SlotId};
use crate::tensor::ValueView;

/// Where the memory of an output is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OutputMemory {
    /// Nowhere, because the caller does not want the output.
    Unwanted,
    /// Memory of its own, as without a binding.
    Own,
    /// A buffer in this memory: the binding's if the plan knows the size, else one that the run
    /// allocates.
    Kept(DeviceId),
    /// The caller's buffer in this memory.
    Given(DeviceId),
    /// The buffer of the given value at this position.
    Input(usize),
}

/// Where a given value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GivenMemory {
    pub(crate) memory: DeviceId,
    /// Whether the value is in its buffer of the binding.
    pub(crate) in_buffer: bool,
    /// Whether the run may overwrite and free that buffer once the value is dead.
    pub(crate) donated: bool,
}

impl GivenMemory {
    /// Memory of the caller on the host.
    pub(crate) const HOST: GivenMemory = GivenMemory::lent(DeviceId::HOST);

    /// Memory of the caller.
    const fn lent(memory: DeviceId) -> GivenMemory {
        GivenMemory { memory, in_buffer: false, donated: false }
    }

    /// A buffer that the run updates at most in place.
    pub(crate) const fn buffer(memory: DeviceId) -> GivenMemory {
        GivenMemory { memory, in_buffer: true, donated: false }
    }

    /// A buffer on the host that the run takes over.
    pub(crate) const DONATED: GivenMemory =
        GivenMemory { donated: true, ..GivenMemory::buffer(DeviceId::HOST) };

    /// Returns the memory of a value that is in no buffer of a binding.
    pub(crate) fn of(value: Option<ValueView<'_>>) -> GivenMemory {
        let tensor = value.and_then(|value| value.tensor().ok());
        GivenMemory::lent(tensor.map_or(DeviceId::HOST, |tensor| tensor.memory()))
    }
}

/// How much memory is planned before the run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Planning {
    /// Values that are not live at the same time share memory.
    #[default]
    Shared,
    /// Each value has memory of its own for the whole run.
    Apart,
    /// Nothing: the run allocates each value when it is computed.
    Off,
}

/// Limits on the slab of each memory. Kernels that can trade speed for workspace keep within them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SlabLimits {
    pub(crate) slabs: Vec<(DeviceId, usize)>,
    /// The limit of all other memories.
    pub(crate) others: usize,
}

impl SlabLimits {
    /// Kernels get the least workspace that they can run with.
    pub(crate) const LEAST: SlabLimits = SlabLimits { slabs: Vec::new(), others: 0 };
    /// Kernels get as much workspace as they want.
    pub(crate) const ANY: SlabLimits = SlabLimits { slabs: Vec::new(), others: usize::MAX };

    /// Returns the limit of a memory's slab, in bytes.
    pub(super) fn of(&self, memory: DeviceId) -> usize {
        let slab = self.slabs.iter().find(|(own, _)| *own == memory);
        slab.map_or(self.others, |(_, bytes)| *bytes)
    }
}

impl Default for SlabLimits {
    fn default() -> Self {
        SlabLimits::ANY
    }
}

/// The bound values of a program. In a run on host memory without a binding and without updates,
/// both lists are empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct BoundValues {
    pub(crate) planning: Planning,
    /// The memory of the given value at each position. Values past the end of the list are in the
    /// caller's host memory.
    pub(crate) inputs: Vec<GivenMemory>,
    /// The memory of each output.
    pub(crate) outputs: Vec<OutputMemory>,
    /// The limits on slabs.
    pub(crate) room: SlabLimits,
}

impl BoundValues {
    /// Returns the values of a run without a binding.
    pub(crate) fn unbound(planning: Planning) -> BoundValues {
        BoundValues { planning, ..BoundValues::default() }
    }

    /// Whether the caller wants an output.
    pub(super) fn wants(&self, output: usize) -> bool {
        self.outputs.get(output) != Some(&OutputMemory::Unwanted)
    }

    /// Returns where the given value at a position is.
    pub(super) fn input(&self, position: usize) -> GivenMemory {
        self.inputs.get(position).copied().unwrap_or(GivenMemory::HOST)
    }

    /// Returns the memory in which an output is wanted.
    pub(super) fn memory_of_output(&self, output: usize) -> DeviceId {
        match self.outputs.get(output) {
            Some(OutputMemory::Kept(memory) | OutputMemory::Given(memory)) => *memory,
            Some(OutputMemory::Input(input)) => self.input(*input).memory,
            None | Some(OutputMemory::Unwanted | OutputMemory::Own) => DeviceId::HOST,
        }
    }

    /// Returns the index of the buffer of an output, if it has one.
    fn buffer_of(&self, output: usize) -> Option<usize> {
        match self.outputs.get(output)? {
            OutputMemory::Unwanted | OutputMemory::Own => None,
            OutputMemory::Kept(_) | OutputMemory::Given(_) => Some(self.inputs.len() + output),
            OutputMemory::Input(input) => Some(*input),
        }
    }

    /// Returns for each output slot its memory and its buffer. If several outputs share a slot, the
    /// first one counts. All slots in the chain of an in-place update are in the same buffer.
    pub(super) fn buffers(&self, program: &Program, ends: &Boundary) -> Vec<Option<(OutputMemory, usize)>> {
        let mut buffers = vec![None; program.slots.len()];
        let mut makers = None;
        // Reversed, so that the first output of a slot is written last and wins.
        for (output, (slot, memory)) in ends.outputs.iter().zip(&self.outputs).enumerate().rev() {
            // If no step computes an output in the memory of its buffer, the run copies the output
            // there at the end.
            let exists_before_run = program.slots[slot.index()].memory == self.memory_of_output(output);
            let buffer = self.buffer_of(output).filter(|_| exists_before_run).map(|buffer| (*memory, buffer));
            buffers[slot.index()] = buffer;
            if let OutputMemory::Input(input) = memory
                && let Some(input) = ends.given.get(*input)
            {
                let makers = makers.get_or_insert_with(|| program.makers());
                for between in program.between(makers, *input, *slot) {
                    buffers[between.index()] = buffer;
                }
            }
        }
        buffers
    }
}

/// The slots at the boundary of a run.
pub(crate) struct Boundary {
    /// The slot of each given value in the memory that holds it, or its host slot if no step reads
    /// the value there.
    pub(crate) given: Vec<SlotId>,
    /// The slot of each output in the memory where the caller wants it, or its host slot if no step
    /// computes the output there.
    pub(crate) outputs: Vec<SlotId>,
}

impl Boundary {
    /// Finds the boundary slots of a program for the memories in `bound`.
    pub(crate) fn of(program: &Program, bound: &BoundValues) -> Boundary {
        let given = |index| bound.input(index).memory;
        let output = |index| bound.memory_of_output(index);
        let is_on_device = |memory: DeviceId| memory != DeviceId::HOST;
        // Without device memory at the boundary the table stays empty: every slot is a host slot.
        let mut by_memory = FxHashMap::default();
        if (0..bound.inputs.len()).map(given).any(is_on_device)
            || (0..bound.outputs.len()).map(output).any(is_on_device)
        {
            let slots = program.slots.iter().enumerate().filter(|(_, slot)| is_on_device(slot.memory));
            by_memory.extend(slots.map(|(index, slot)| ((slot.value, slot.memory), SlotId(index as u32))));
        }
        let there = |slot: SlotId, memory: DeviceId| {
            let value = program.slots[slot.index()].value;
            by_memory.get(&(value, memory)).copied().unwrap_or(slot)
        };
        let place = |slots: &[SlotId], memory: &dyn Fn(usize) -> DeviceId| {
            slots.iter().enumerate().map(|(index, slot)| there(*slot, memory(index))).collect()
        };
        Boundary { given: place(&program.given, &given), outputs: place(&program.outputs, &output) }
    }
}
