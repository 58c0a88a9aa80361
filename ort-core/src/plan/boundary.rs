//! Where a run begins and ends: the slots of given values and outputs in the memories that they lie
//! in.
//!
//! A program takes what is given from the host's memory and leaves its outputs there, with copies
//! to and from the devices. What is given in a device's memory takes the place of such a copy, and
//! an output that is to stay there is what would have been copied.

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

/// The slots at both ends of a run.
pub(crate) struct Boundary {
    /// For each given value its slot in the memory that it lies in; that of the host where no step
    /// reads it there.
    pub(crate) given: Vec<SlotId>,
    /// For each output its slot in the memory that it is to be in; that of the host where no step
    /// computes it there.
    pub(crate) outputs: Vec<SlotId>,
}

impl Boundary {
    pub(crate) fn of(program: &Program, bound: &BoundValues) -> Boundary {
        let given = |index| bound.input(index).memory;
        let output = |index| bound.memory_of_output(index);
        let is_on_device = |memory: DeviceId| memory != DeviceId::HOST;
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
    /// The given values that are in the memory of a device: their position, and their slot on the
    /// host.
    fn given_on_devices(&self) -> impl Iterator<Item = (usize, SlotId)> {
        let given = self.program.given.iter().copied().enumerate();
        given.filter(|(index, _)| self.bound.input(*index).memory != DeviceId::HOST)
    }

    /// Steps on the device read what is given there where it lies.
    pub(super) fn place_given(&mut self) {
        let given: Vec<(usize, SlotId)> = self.given_on_devices().collect();
        for (index, host) in given {
            let slot = self.ends.given[index];
            if slot != host {
                let in_buffer = self.bound.input(index).in_buffer;
                self.drafts[slot.index()] = if in_buffer { Draft::Bound(index) } else { Draft::Given(index) };
            }
        }
    }

    /// Who else reads what is given on a device reads a copy in memory of the host, made before the
    /// first step.
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
