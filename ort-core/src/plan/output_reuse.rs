//! Outputs whose buffers hold other values until they are computed themselves.
//!
//! An output owns its memory, so it cannot be in the slab, and the slab is there as long as the
//! run. Where an output is computed late, its buffer is taken at the beginning instead and serves
//! the values before it, so that the slab is smaller by them.

#![allow(
    clippy::indexing_slicing,
    reason = "ids of slots, steps and groups are made by the program and the planner, whose tables have an entry for each"
)]

use super::ValueKind;
use super::resolve::{Draft, InPlaceCandidate, Planner};
use crate::ep::OutputsFrom;
use crate::program::{Origin, SlotId};
use ort_alloc::DeviceId;

/// Outputs that are tried, the largest.
const MAX_OUTPUTS: usize = 4;

/// Values that are tried for each of them, the largest.
const MAX_TENANTS: usize = 256;

/// Smaller outputs are not worth it.
const LEAST_BYTES: usize = 4096;

/// A guest's extent in its home, and its life.
struct Tenant {
    start: usize,
    end: usize,
    life: (usize, usize),
}

impl Planner<'_> {
    /// Moves values to the buffers of outputs. The numbers of those buffers as slabs follow those
    /// of the memories.
    pub(super) fn find_reusable_outputs(&mut self) -> Vec<SlotId> {
        let mut homes: Vec<SlotId> = (0..self.drafts.len() as u32).map(SlotId).collect();
        homes.retain(|slot| self.can_be_reused(*slot));
        homes.sort_by_key(|slot| (std::cmp::Reverse(self.own_bytes(*slot)), *slot));
        homes.truncate(MAX_OUTPUTS);
        let mut found = Vec::new();
        for home in homes {
            if self.place_tenants(home, self.slabs.len() + found.len()) {
                found.push(home);
            }
        }
        found
    }

    fn can_be_reused(&self, slot: SlotId) -> bool {
        let index = slot.index();
        matches!(self.drafts[index], Draft::Own)
            && self.is_output[index]
            && self.program.slots[index].memory == DeviceId::HOST
            && matches!(self.program.slots[index].origin, Origin::Step)
            && self.own_bytes(slot) >= LEAST_BYTES
            && self.schedule[self.first[index]].claim.outputs == OutputsFrom::Plan
    }

    /// Finds room for tenants in a home, the largest first, each in the tightest gap; returns
    /// whether there are any.
    fn place_tenants(&mut self, home: SlotId, number: usize) -> bool {
        let (bytes, until) = (self.own_bytes(home), self.first[home.index()]);
        let mut is_scratch = vec![false; self.groups.len()];
        self.workspaces.iter().flatten().for_each(|group| is_scratch[*group] = true);
        let fits = |index: &usize| {
            let group = &self.groups[*index];
            group.slab == 0 && !is_scratch[*index] && (1..=bytes).contains(&group.bytes) && group.last < until
        };
        let mut candidates: Vec<usize> = (0..self.groups.len()).filter(fits).collect();
        candidates
            .sort_by_key(|index| (std::cmp::Reverse(self.groups[*index].bytes), self.groups[*index].first));
        let mut tenants: Vec<Tenant> = Vec::new();
        // What the output is computed in the place of begins where the output does.
        if let Some(group) = self.inheritance(home).map(|candidate| candidate.group) {
            let group = &mut self.groups[group];
            tenants.push(Tenant { start: 0, end: bytes, life: (group.first, group.last) });
            group.slab = number;
        }
        for index in candidates.into_iter().take(MAX_TENANTS) {
            let group = &mut self.groups[index];
            let life = (group.first, group.last);
            if let Some(start) = gap(&tenants, life, group.bytes, bytes) {
                tenants.push(Tenant { start, end: start + group.bytes, life });
                group.slab = number;
            }
        }
        !tenants.is_empty()
    }

    /// The input whose place an output takes, where both are equally long and nothing else wants
    /// it.
    fn inheritance(&self, home: SlotId) -> Option<&InPlaceCandidate> {
        let fits = |candidate: &&InPlaceCandidate| {
            let group = &self.groups[candidate.group];
            let alike = group.slab == 0 && group.bytes == self.own_bytes(home);
            candidate.output == home && alike && group.last == self.first[home.index()]
        };
        self.in_place_candidates.iter().find(fits)
    }

    /// Notes which outputs are computed in place, after values have moved to the buffers of
    /// outputs, and that both are the same bytes of those alive at each step.
    pub(super) fn inherit(&mut self, homes: &[SlotId], live: &mut [usize]) {
        for candidate in &self.in_place_candidates {
            let home = homes.iter().position(|home| *home == candidate.output);
            if home.is_some_and(|home| self.groups[candidate.group].slab == self.slabs.len() + home)
                && self.groups[candidate.group].last == self.first[candidate.output.index()]
            {
                let step = self.first[candidate.output.index()];
                self.steps[step].in_place.push(candidate.pair);
                live[step] = live[step].saturating_sub(self.groups[candidate.group].bytes);
                self.kinds[candidate.output.index()] = ValueKind::InPlace;
            }
        }
    }

    /// Takes all values back to the host's slab.
    pub(super) fn undo_output_reuse(&mut self) {
        let memories = self.slabs.len();
        self.groups.iter_mut().filter(|group| group.slab >= memories).for_each(|group| group.slab = 0);
    }
}

/// The start of the tightest gap below `end` that is free during a life.
fn gap(tenants: &[Tenant], life: (usize, usize), bytes: usize, end: usize) -> Option<usize> {
    let rivals = tenants.iter().filter(|guest| guest.life.0 <= life.1 && life.0 <= guest.life.1);
    let mut rivals: Vec<(usize, usize)> = rivals.map(|guest| (guest.start, guest.end)).collect();
    rivals.sort_unstable();
    rivals.push((end, end));
    let mut best: Option<(usize, usize)> = None;
    let mut top = 0usize;
    for (start, end) in rivals {
        let room = start.saturating_sub(top);
        if room >= bytes && best.is_none_or(|(least, _)| room < least) {
            best = Some((room, top));
        }
        top = top.max(end.next_multiple_of(64));
    }
    best.map(|(_, start)| start)
}
