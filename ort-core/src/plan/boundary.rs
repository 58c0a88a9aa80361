//! The boundary of a run: given values and outputs in the memories where the caller has them.
//!
//! A program takes given values (inputs and captures) from host memory and leaves its outputs
//! there. Copy steps move given values to devices, and outputs back to the host. A value given in
//! device memory needs no upload: the plan aliases the device's slot to it. If an output is to stay
//! on a device, the device's slot becomes the plan's output, and no download is needed.

#![allow(
    clippy::indexing_slicing,
    reason = "ids of slots are made by the program, and the planner's tables have an entry for each"
)]

use ort_alloc::DeviceId;

use super::resolve::{DraftStorage, Planner};
use crate::program::SlotId;
use crate::tensor::byte_count;

impl Planner<'_> {
    /// Returns the values given in device memory, each with its position and its host slot.
    fn given_on_devices(&self) -> impl Iterator<Item = (usize, SlotId)> {
        let given = self.program.given.iter().copied().enumerate();
        given.filter(|(index, _)| self.bound.input(*index).memory != DeviceId::HOST)
    }

    /// Aliases the device's slot of each value that is given in device memory to the caller's
    /// memory.
    pub(super) fn place_given(&mut self) {
        let given: Vec<(usize, SlotId)> = self.given_on_devices().collect();
        for (index, host) in given {
            let slot = self.ends.given[index];
            // Without a slot on that device only the host copy is read.
            if slot != host {
                let in_buffer = self.bound.input(index).in_buffer;
                self.drafts[slot.index()] =
                    if in_buffer { DraftStorage::Bound(index) } else { DraftStorage::Given(index) };
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
                _ if !wanted[place] => DraftStorage::Unused,
                Some(_) => DraftStorage::Own,
                None => DraftStorage::Dynamic,
            };
        }
    }
}
