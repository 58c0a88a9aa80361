//! Output buffer reuse: earlier values are stored in the buffers of outputs that are computed
//! later.
//!
//! An output owns its memory, so it cannot be in the slab, which lives as long as the run. If an
//! output is computed late, its buffer is allocated at the start instead and holds earlier values.
//! These no longer count in the slab. Such an output is called a home, and the values in it are its
//! tenants.

#![allow(
    clippy::indexing_slicing,
    reason = "ids of slots, steps and groups are made by the program and the planner, whose tables have an entry for each"
)]

use super::ValueKind;
use super::resolve::{DraftStorage, InPlaceCandidate, Planner};
use crate::ep::OutputsFrom;
use crate::program::{Origin, SlotId};
use ort_alloc::DeviceId;

/// How many outputs are considered, the largest first.
const MAX_OUTPUTS: usize = 4;

/// How many values are considered for each output, the largest first.
const MAX_TENANTS: usize = 256;

/// Outputs below this size are not considered, because they save too little.
pub(super) const LEAST_BYTES: usize = 4096;

/// The byte range of a tenant in its home, and its lifetime.
pub(super) struct Tenant {
    pub(super) start: usize,
    pub(super) end: usize,
    pub(super) life: (usize, usize),
}

impl Planner<'_> {
    /// Moves values into the buffers of outputs and returns those outputs. Home `i` has the slab
    /// number `slabs.len() + donated.len() + i`.
    pub(super) fn find_reusable_outputs(&mut self) -> Vec<SlotId> {
        let mut homes: Vec<SlotId> = (0..self.drafts.len() as u32).map(SlotId).collect();
        homes.retain(|slot| self.can_be_reused(*slot));
        homes.sort_by_key(|slot| (std::cmp::Reverse(self.own_bytes(*slot)), *slot));
        homes.truncate(MAX_OUTPUTS);
        let mut found = Vec::new();
        for home in homes {
            if self.place_tenants(home, self.slabs.len() + self.donated.len() + found.len()) {
                found.push(home);
            }
        }
        found
    }

    /// Whether an output can be a home. It must have a large enough host buffer of known size, into
    /// which its kernel writes.
    fn can_be_reused(&self, slot: SlotId) -> bool {
        let index = slot.index();
        matches!(self.drafts[index], DraftStorage::Own)
            && self.is_output[index]
            && self.program.slots[index].memory == DeviceId::HOST
            && matches!(self.program.slots[index].origin, Origin::Step)
            && self.own_bytes(slot) >= LEAST_BYTES
            && self.schedule[self.first[index]].claim.outputs == OutputsFrom::Plan
    }

    /// Moves values from the host's slab into a home, the largest first, each into the tightest
    /// gap. Returns whether any fit. The gaps only decide what fits: `lay_out` assigns the final
    /// offsets.
    fn place_tenants(&mut self, home: SlotId, number: usize) -> bool {
        let (bytes, until) = (self.own_bytes(home), self.first[home.index()]);
        let mut is_scratch = vec![false; self.groups.len()];
        self.workspaces.iter().flatten().for_each(|group| is_scratch[*group] = true);
        // A tenant must be dead before the output is computed.
        let fits = |index: &usize| {
            let group = &self.groups[*index];
            // Slab 0 only: homes are host memory, and a value that has moved to another home is no
            // longer in the slab.
            group.slab == 0 && !is_scratch[*index] && (1..=bytes).contains(&group.bytes) && group.last < until
        };
        let mut candidates: Vec<usize> = (0..self.groups.len()).filter(fits).collect();
        candidates
            .sort_by_key(|index| (std::cmp::Reverse(self.groups[*index].bytes), self.groups[*index].first));
        let mut tenants: Vec<Tenant> = Vec::new();
        // An input that the output is computed in place of must begin where the output begins.
        if let Some(group) = self.in_place_input(home).map(|candidate| candidate.group) {
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

    /// Returns the input in whose place a home's output can be computed. The input has the same
    /// size and is still in the slab.
    fn in_place_input(&self, home: SlotId) -> Option<&InPlaceCandidate> {
        let fits = |candidate: &&InPlaceCandidate| {
            let group = &self.groups[candidate.group];
            let alike = group.slab == 0 && group.bytes == self.own_bytes(home);
            candidate.output == home && alike && group.last == self.first[home.index()]
        };
        self.in_place_candidates.iter().find(fits)
    }

    /// Records which homes are computed in place of a tenant, once the tenants are placed. Input
    /// and output then share memory, so the live bytes of the step count it once.
    pub(super) fn record_in_place(&mut self, homes: &[SlotId], live: &mut [usize]) {
        for candidate in &self.in_place_candidates {
            let home = homes.iter().position(|home| *home == candidate.output);
            // Only `in_place_input` moves a value that lives until this step into the home. The
            // value fills the home, so it begins at offset 0.
            if home.is_some_and(|home| {
                self.groups[candidate.group].slab == self.slabs.len() + self.donated.len() + home
            }) && self.groups[candidate.group].last == self.first[candidate.output.index()]
            {
                let step = self.first[candidate.output.index()];
                self.steps[step].in_place.push(candidate.pair);
                live[step] = live[step].saturating_sub(self.groups[candidate.group].bytes);
                self.kinds[candidate.output.index()] = ValueKind::InPlace;
            }
        }
    }

    /// Moves all tenants back to the host's slab.
    pub(super) fn undo_output_reuse(&mut self) {
        let first = self.slabs.len() + self.donated.len();
        self.groups.iter_mut().filter(|group| group.slab >= first).for_each(|group| group.slab = 0);
    }
}

/// Returns the start of the tightest gap below `end` that is free during `life`.
pub(super) fn gap(tenants: &[Tenant], life: (usize, usize), bytes: usize, end: usize) -> Option<usize> {
    let rivals = tenants.iter().filter(|tenant| tenant.life.0 <= life.1 && life.0 <= tenant.life.1);
    let mut rivals: Vec<(usize, usize)> = rivals.map(|tenant| (tenant.start, tenant.end)).collect();
    rivals.sort_unstable();
    // An empty range at the end closes the last gap.
    rivals.push((end, end));
    let mut best: Option<(usize, usize)> = None;
    let mut top = 0usize;
    for (start, end) in rivals {
        let room = start.saturating_sub(top);
        if room >= bytes && best.is_none_or(|(least, _)| room < least) {
            best = Some((room, top));
        }
        // Offsets are multiples of 64, as in `lay_out`.
        top = top.max(end.next_multiple_of(64));
    }
    best.map(|(_, start)| start)
}
