//! Concat in place: inputs of a concatenation are computed directly into its output.
//!
//! The concatenation then copies nothing, and its step is skipped. Every input must qualify,
//! because a single input that must be copied would make the step run.

#![allow(
    clippy::indexing_slicing,
    reason = "ids of slots and steps are made by the program, and the planner's tables have an entry for each"
)]

use super::resolve::{DraftStorage, Planner};
use crate::ep::OutputsFrom;
use crate::program::{Origin, SlotId, Step};
use crate::spec::ViewCx;
use crate::tensor::{Shape, byte_count};
use crate::{Result, error};

/// The alignment of a value's address that kernels may rely on.
const ALIGNMENT: usize = 64;

impl Planner<'_> {
    /// Marks the concatenations whose inputs can all be parts of the output; returns whether there
    /// are any.
    pub(super) fn find_concats(&mut self) -> bool {
        let mut reads = vec![0usize; self.drafts.len()];
        let mut producer = vec![None; self.drafts.len()];
        for (index, step) in self.schedule.iter().enumerate().filter(|(index, _)| self.needed[*index]) {
            step.reads().for_each(|slot| reads[slot.index()] += 1);
            step.outputs.iter().flatten().for_each(|slot| producer[slot.index()] = Some(index));
        }
        let mut found = false;
        for index in 0..self.schedule.len() {
            let Some((whole, offsets)) = self.parts(self.schedule[index]).filter(|_| self.needed[index])
            else {
                continue;
            };
            let inputs: Vec<SlotId> = self.schedule[index].inputs.iter().flatten().copied().collect();
            // A part lives only as long as the whole, so it must not have another reader.
            let parts = inputs.len() == offsets.len()
                && inputs.iter().all(|slot| {
                    reads[slot.index()] == 1 && self.can_be_part(*slot, whole, producer[slot.index()])
                });
            if parts {
                for (slot, offset) in inputs.into_iter().zip(offsets) {
                    self.joined[slot.index()] = Some((whole, offset));
                }
                self.joins[index] = true;
                found = true;
            }
        }
        found
    }

    /// Returns the output into which a step concatenates its inputs, and the byte offset of each
    /// input. None if the output is not planned, or if the inputs are not contiguous, aligned parts
    /// of it.
    fn parts(&self, step: &Step) -> Option<(SlotId, Vec<usize>)> {
        let node = &self.program.graph.nodes[step.node?];
        let join = node.spec.join?;
        let [Some(whole)] = step.outputs.as_slice() else { return None };
        // A part is a range of a slab. An output of the graph is in a buffer of its own instead.
        let planned = step.claim.outputs == OutputsFrom::Plan && !self.is_output[whole.index()];
        if !planned || self.exists_before_run(*whole) || self.view_of(step).is_some() {
            return None;
        }
        let inputs: Vec<Option<Shape>> = step.inputs.iter().map(|slot| self.shape_of(*slot)).collect();
        let outputs = [self.shape_of(Some(*whole))];
        let offsets = join(&ViewCx { attrs: &node.attrs, inputs: &inputs, ints: &[], outputs: &outputs })?;
        let bits = self.dtypes[whole.index()]?.bits()? as usize;
        let bytes =
            |elements: usize| elements.checked_mul(bits).filter(|bits| bits % 8 == 0).map(|bits| bits / 8);
        let offsets: Option<Vec<usize>> = offsets.into_iter().map(bytes).collect();
        // Kernels rely on aligned addresses, for parts as well.
        Some((*whole, offsets.filter(|offsets| offsets.iter().all(|offset| offset % ALIGNMENT == 0))?))
    }

    /// Whether a value with one reader can be computed into a part of that reader's output `whole`.
    /// Concatenations in place do not nest.
    fn can_be_part(&self, slot: SlotId, whole: SlotId, producer: Option<usize>) -> bool {
        let (own, other) = (&self.program.slots[slot.index()], &self.program.slots[whole.index()]);
        let Some(producer) = producer else { return false };
        let step = self.schedule[producer];
        matches!(own.origin, Origin::Step)
            && own.memory == other.memory
            && self.shapes[slot.index()].is_some()
            && self.dtypes[slot.index()] == self.dtypes[whole.index()]
            && !self.is_output[slot.index()]
            && !self.exists_before_run(slot)
            && step.claim.outputs == OutputsFrom::Plan
            && !self.joins[producer]
            && self.view_of(step).is_none()
    }

    /// Returns the draft of a part inside `whole`. The first part allocates `whole`, which is live
    /// from that step on.
    pub(super) fn place_part(
        &mut self,
        (whole, offset): (SlotId, usize),
        index: usize,
    ) -> Result<DraftStorage> {
        if let (DraftStorage::Unused, Some(dtype), Some(shape)) =
            (&self.drafts[whole.index()], self.dtypes[whole.index()], &self.shapes[whole.index()])
        {
            let bytes = byte_count(dtype, shape)?;
            self.drafts[whole.index()] = self.new_group(whole, index, bytes);
        }
        match self.drafts[whole.index()] {
            DraftStorage::Group { group, offset: start } => {
                Ok(DraftStorage::Group { group, offset: start + offset })
            }
            _ => Err(error!(Fail, "the output of a concatenation in place has no memory")),
        }
    }
}
