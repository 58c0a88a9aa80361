//! Donated inputs: the memory of inputs that the caller gives away holds later values.
//!
//! A donated input is the first value of a region of its own, so in-place results and views of it
//! are planned as for any value in a slab. Once it is dead, values of the host's slab move there.
//! The run frees the region after its last value. Regions are memory of the caller: they count
//! neither in the slab nor in the live bytes.

#![allow(
    clippy::indexing_slicing,
    reason = "ids of slots, steps and groups are made by the program and the planner, whose tables have an entry for each"
)]

use ort_alloc::DeviceId;

use super::Planning;
use super::output_reuse::{LEAST_BYTES, Tenant, gap};
use super::resolve::{DraftStorage, Group, Planner};
use crate::Result;
use crate::program::SlotId;
use crate::tensor::byte_count;

/// How many values are considered, the largest first.
const MAX_TENANTS: usize = 1024;

impl Planner<'_> {
    /// Gives each donated input a region. One of unknown size, and one that is an output as well,
    /// stays in its buffer.
    pub(super) fn place_donated(&mut self) {
        if self.bound.planning != Planning::Shared {
            return;
        }
        for (index, slot) in self.program.given.iter().enumerate() {
            let place = slot.index();
            let bytes = match (self.dtypes[place], &self.shapes[place]) {
                (Some(dtype), Some(shape)) => byte_count(dtype, shape).unwrap_or(0),
                _ => 0,
            };
            let is_on_host = self.program.slots[place].memory == DeviceId::HOST;
            if !self.bound.input(index).donated || self.is_output[place] || !is_on_host || bytes == 0 {
                continue;
            }
            let slab = self.slabs.len() + self.donated.len();
            self.groups.push(Group { bytes, slab, first: 0, last: 0 });
            self.drafts[place] = DraftStorage::Group { group: self.groups.len() - 1, offset: 0 };
            self.donated.push(*slot);
        }
    }

    /// Sets until when each donated input is read.
    pub(super) fn find_lives_of_donated(&mut self) {
        for slot in self.donated.clone() {
            self.extend_life(slot, self.last[slot.index()]);
        }
    }

    /// Whether a group is in the region of a donated input.
    pub(super) fn is_in_donated(&self, group: &Group) -> bool {
        (self.slabs.len()..self.slabs.len() + self.donated.len()).contains(&group.slab)
    }

    /// Moves values from the host's slab into dead donated inputs, the largest first, each into the
    /// tightest gap. Returns the layout if that makes the slabs smaller than in `before`.
    pub(super) fn reuse_donated(&mut self, before: &ort_alloc::Plan) -> Result<Option<ort_alloc::Plan>> {
        if self.donated.is_empty() {
            return Ok(None);
        }
        let moved = self.move_to_donated();
        let after = self.lay_out()?;
        let first = self.slabs.len();
        // The gaps only estimate the fit, as `lay_out` assigns the offsets.
        let fits = self.donated.iter().enumerate().all(|(index, slot)| {
            let lane = after.lane((first + index) as u32);
            lane.is_none_or(|lane| lane.bytes <= self.region_bytes(*slot))
        });
        if fits && self.slab_bytes(&after) < self.slab_bytes(before) {
            return Ok(Some(after));
        }
        moved.into_iter().for_each(|group| self.groups[group].slab = 0);
        Ok(None)
    }

    /// Chooses the values that move, and returns their groups.
    fn move_to_donated(&mut self) -> Vec<usize> {
        let mut is_scratch = vec![false; self.groups.len()];
        self.workspaces.iter().flatten().for_each(|group| is_scratch[*group] = true);
        self.nested_slabs.iter().for_each(|(_, group)| is_scratch[*group] = true);
        let may = |index: &usize| {
            let group = &self.groups[*index];
            group.slab == 0 && !is_scratch[*index] && group.bytes >= LEAST_BYTES
        };
        let mut candidates: Vec<usize> = (0..self.groups.len()).filter(may).collect();
        candidates
            .sort_by_key(|index| (std::cmp::Reverse(self.groups[*index].bytes), self.groups[*index].first));
        let first = self.slabs.len();
        let mut regions: Vec<(usize, Vec<Tenant>)> =
            self.donated.iter().map(|slot| (self.region_bytes(*slot), Vec::new())).collect();
        for group in self.groups.iter().filter(|group| self.is_in_donated(group)) {
            let life = (group.first, group.last);
            regions[group.slab - first].1.push(Tenant { start: 0, end: group.bytes, life });
        }
        let mut moved = Vec::new();
        for index in candidates.into_iter().take(MAX_TENANTS) {
            let Group { bytes, first: from, last, .. } = self.groups[index];
            let gaps = regions.iter().enumerate().filter_map(|(region, (size, tenants))| {
                let start = gap(tenants, (from, last), bytes, *size)?;
                Some((*size, region, start))
            });
            let Some((_, region, start)) = gaps.min() else { continue };
            regions[region].1.push(Tenant { start, end: start + bytes, life: (from, last) });
            self.groups[index].slab = first + region;
            moved.push(index);
        }
        moved
    }

    /// The bytes of the region of a donated input.
    fn region_bytes(&self, slot: SlotId) -> usize {
        match (self.dtypes[slot.index()], &self.shapes[slot.index()]) {
            (Some(dtype), Some(shape)) => byte_count(dtype, shape).unwrap_or(0),
            _ => 0,
        }
    }

    /// Finds the step after which each region is freed.
    pub(super) fn find_closes(&mut self) {
        let first = self.slabs.len();
        let mut last = vec![0; self.donated.len()];
        for group in self.groups.iter().filter(|group| self.is_in_donated(group)) {
            let last = &mut last[group.slab - first];
            *last = group.last.max(*last);
        }
        let end = self.steps.len().saturating_sub(1);
        for (region, last) in last.into_iter().enumerate() {
            let step = self.steps.get_mut(last.min(end));
            step.into_iter().for_each(|step| step.closes.push(region as u32));
        }
    }
}
