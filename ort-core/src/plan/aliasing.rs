//! Aliasing: outputs that are views of an input, and outputs computed in place of one.
//!
//! `concat_in_place` and `output_reuse` implement the other ways to share memory.

#![allow(
    clippy::indexing_slicing,
    reason = "ids of slots, steps and groups are made by the program and the planner, whose tables have an entry for each"
)]

use super::ValueKind;
use super::resolve::{DraftStorage, Planner};
use crate::program::{Origin, SlotId, Step};
use crate::spec::{ViewCx, ViewOf};
use crate::tensor::{Shape, byte_count};

impl Planner<'_> {
    /// Returns the input that a step's outputs are views of. None if the outputs cannot be views
    /// for these shapes, or if the data must move.
    pub(super) fn view_of(&self, step: &Step) -> Option<(SlotId, ViewOf)> {
        let node = &self.program.graph.nodes[step.node?];
        let view = node.spec.view?;
        let outputs: Vec<SlotId> = step.outputs.iter().flatten().copied().collect();
        // An output of the graph owns its memory, so it cannot be a view.
        if outputs.iter().any(|slot| self.is_output[slot.index()] || self.shapes[slot.index()].is_none()) {
            return None;
        }
        let inputs: Vec<Option<Shape>> = step.inputs.iter().map(|slot| self.shape_of(*slot)).collect();
        let ints: Vec<Option<Vec<i64>>> = step.inputs.iter().map(|slot| self.ints_of(*slot)).collect();
        let output_shapes: Vec<Option<Shape>> =
            step.outputs.iter().map(|slot| self.shape_of(*slot)).collect();
        let of = view(&ViewCx { attrs: &node.attrs, inputs: &inputs, ints: &ints, outputs: &output_shapes })?;
        let root = step.inputs.get(of.input).copied().flatten()?;
        let (root_slot, output) =
            (&self.program.slots[root.index()], &self.program.slots[outputs.first()?.index()]);
        // A view of an unaligned weight could not be read as a slice. The kernel copies the weight
        // to aligned memory instead.
        let unaligned = matches!(&root_slot.origin, Origin::Constant(tensor) if !tensor.is_aligned());
        // If the shape of the root is known only at run time, the kernel must run to check it.
        let unknown =
            matches!(self.drafts[root.index()], DraftStorage::Dynamic) && self.shapes[root.index()].is_none();
        (root_slot.memory == output.memory && !unaligned && !unknown).then_some((root, of))
    }

    /// Makes a step's outputs views of an input; returns whether it did.
    pub(super) fn place_view(&mut self, step: &Step, index: usize) -> bool {
        let Some((root, of)) = self.view_of(step) else { return false };
        // All outputs become views or none does, so we apply the drafts once all are known.
        let mut drafts = Vec::new();
        for (position, slot) in step.outputs.iter().enumerate() {
            let Some(slot) = slot else { continue };
            let Some(&offset) = of.offsets.get(position) else { return false };
            let Some(draft) = self.part_of(root, offset) else { return false };
            drafts.push((*slot, draft));
        }
        for (slot, draft) in drafts {
            self.extend_life(root, self.last[slot.index()].max(index));
            self.drafts[slot.index()] = draft;
            self.kinds[slot.index()] = ValueKind::View;
        }
        true
    }

    /// Returns the draft of the part of `root` that begins at an element. None if the part does not
    /// begin at a whole byte, or if `root` has no memory.
    pub(super) fn part_of(&self, root: SlotId, element_offset: usize) -> Option<DraftStorage> {
        let bits = self.dtypes[root.index()]?.bits()? as usize;
        let bit_offset = element_offset.checked_mul(bits)?;
        if bit_offset % 8 != 0 {
            return None;
        }
        match &self.drafts[root.index()] {
            DraftStorage::Group { group, offset } => {
                Some(DraftStorage::Group { group: *group, offset: offset + bit_offset / 8 })
            }
            // A view of a view refers to the root of both, so there are no chains of views.
            DraftStorage::View { of, element_offset: base } => {
                Some(DraftStorage::View { of: *of, element_offset: base + element_offset })
            }
            DraftStorage::Outside
            | DraftStorage::Given(_)
            | DraftStorage::Bound(_)
            | DraftStorage::Own
            | DraftStorage::Folded(_)
            | DraftStorage::Dynamic => Some(DraftStorage::View { of: root, element_offset }),
            DraftStorage::Unused => None,
        }
    }

    /// Keeps the memory of `slot` live until the step `last`.
    pub(super) fn extend_life(&mut self, slot: SlotId, last: usize) {
        match self.drafts[slot.index()].clone() {
            DraftStorage::Group { group, .. } => self.groups[group].last = self.groups[group].last.max(last),
            DraftStorage::View { of, .. } => self.extend_life(of, last),
            _ => self.last[slot.index()] = self.last[slot.index()].max(last),
        }
    }

    /// Lets an output be computed in place of an input. Returns the position of the input and the
    /// draft of the output. `place` is the step's index and the output's position.
    pub(super) fn share_input(
        &mut self,
        step: &Step,
        place: (usize, usize),
        bytes: usize,
    ) -> Option<(usize, DraftStorage)> {
        let output = step.outputs[place.1]?;
        let (input, draft) = self.dying_input(step, place, bytes)?;
        if let DraftStorage::Group { group, .. } = draft {
            self.groups[group].last = self.last[output.index()];
        }
        Some((input, draft))
    }

    /// Returns an input in whose place the output can be computed. The input has the same size and
    /// memory, and dies at this step.
    pub(super) fn dying_input(
        &self,
        step: &Step,
        (index, position): (usize, usize),
        bytes: usize,
    ) -> Option<(usize, DraftStorage)> {
        let output = step.outputs[position]?;
        for &(input, _) in step.claim.in_place.iter().filter(|(_, output)| *output == position) {
            let Some(slot) = step.inputs.get(input).copied().flatten() else { continue };
            let DraftStorage::Group { group, .. } = self.drafts[slot.index()] else { continue };
            let same_bytes = match (self.dtypes[slot.index()], &self.shapes[slot.index()]) {
                (Some(dtype), Some(shape)) => byte_count(dtype, shape).ok() == Some(bytes),
                _ => false,
            };
            let dead = self.groups[group].last <= index && self.last[slot.index()] <= index;
            let same_memory =
                self.program.slots[slot.index()].memory == self.program.slots[output.index()].memory;
            // A second read of the memory, directly or through a view, would see overwritten bytes.
            let once = step.reads().filter(|other| self.group_of(*other) == Some(group)).count() == 1;
            // An earlier output of the step may already be in this memory.
            let taken = step.outputs.iter().take(position).flatten();
            let free = taken.clone().all(|other| self.group_of(*other) != Some(group));
            if same_bytes && dead && same_memory && once && free {
                return Some((input, self.drafts[slot.index()].clone()));
            }
        }
        None
    }

    /// Returns the group of a slot that is in a slab.
    pub(super) fn group_of(&self, slot: SlotId) -> Option<usize> {
        match self.drafts[slot.index()] {
            DraftStorage::Group { group, .. } => Some(group),
            _ => None,
        }
    }
}
