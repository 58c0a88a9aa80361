//! The boundary of a run: given values and outputs in the memories where the caller has them.
//!
//! A program takes given values (inputs and captures) from host memory and leaves its outputs
//! there. Copy steps move both to and from the devices. A value given in device memory replaces the
//! upload: the plan aliases the device's slot to it. If an output is to stay on a device, the
//! device's slot becomes the plan's output, and the download is not needed.

#![allow(
    clippy::indexing_slicing,
    reason = "ids of slots are made by the program, and the planner's tables have an entry for each"
)]

use ort_alloc::DeviceId;
use rustc_hash::FxHashMap;

use super::bound::BoundValues;
use super::resolve::{Draft, Planner};
use crate::program::{Program, SlotId};
use crate::tensor::byte_count;

/// The slots at the boundary of a run.
pub(crate) struct Boundary {
    /// The slot of each given value in the memory that holds it; the host's slot if no step reads
    /// the value there.
    pub(crate) given: Vec<SlotId>,
    /// The slot of each output in the memory where it is wanted; the host's slot if no step
    /// computes the output there.
    pub(crate) outputs: Vec<SlotId>,
}

impl Boundary {
    /// Finds the boundary slots of a program for the memories in `bound`.
    pub(crate) fn of(program: &Program, bound: &BoundValues) -> Boundary {
        let given = |index| bound.input(index).memory;
        let output = |index| bound.memory_of_output(index);
        let is_on_device = |memory: DeviceId| memory != DeviceId::HOST;
        // Without device memory at the boundary the table stays empty: every slot is the host's.
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

impl Planner<'_> {
    /// Returns the values given in device memory, each with its position and its host slot.
    fn given_on_devices(&self) -> impl Iterator<Item = (usize, SlotId)> {
        let given = self.program.given.iter().copied().enumerate();
        given.filter(|(index, _)| self.bound.input(*index).memory != DeviceId::HOST)
    }

    /// Aliases the device's slot of each value given in device memory to that memory.
    pub(super) fn place_given(&mut self) {
        let given: Vec<(usize, SlotId)> = self.given_on_devices().collect();
        for (index, host) in given {
            let slot = self.ends.given[index];
            // Without a slot on that device only the host copy is read.
            if slot != host {
                let in_buffer = self.bound.input(index).in_buffer;
                self.drafts[slot.index()] = if in_buffer { Draft::Bound(index) } else { Draft::Given(index) };
            }
        }
    }

    /// Plans a host copy of each value given in device memory, if the host's slot is `wanted`. The
    /// run makes these copies before the first step.
    pub(super) fn place_copies_of_given(&mut self, wanted: &[bool]) {
        let given: Vec<(usize, SlotId)> = self.given_on_devices().collect();
        for (_, slot) in given {
            let place = slot.index();
            let bytes = match (self.dtypes[place], &self.shapes[place]) {
                (Some(dtype), Some(shape)) => byte_count(dtype, shape).ok(),
                _ => None,
            };
            self.drafts[place] = match bytes {
                _ if !wanted[place] => Draft::Unused,
                Some(_) => Draft::Own,
                None => Draft::Dynamic,
            };
        }
    }
}
