//! Steps that run a subgraph for each slice of what they are given: what is alive while it runs, and what it leaves.

#![allow(
    clippy::indexing_slicing,
    reason = "ids of slots and steps are made by the program and the planner, whose tables have an entry for each"
)]

use super::Place;
use super::resolve::Planner;
use crate::ep::OutputsFrom;
use crate::ir::Node;
use crate::session::SlotId;
use crate::spec::{Flow, Rounds};
use crate::tensor::byte_count;

impl Planner<'_> {
    /// Sets what such steps take beside their outputs, where they run the subgraph once or not at all. The state that a
    /// round begins with counts as the output that it becomes at last, but that of the first is an input.
    pub(super) fn settle_rounds(&mut self) {
        for index in 0..self.steps.len() {
            let taken = self.nested_own[index];
            self.nested_own[index] = match self.rounds(index) {
                Some(0) => 0,
                Some(1) => {
                    let outputs = self.schedule[index].outputs.iter().flatten();
                    let handed = outputs.map(|slot| self.own_bytes(*slot)).fold(0, usize::saturating_add);
                    taken.saturating_sub(handed).max(self.largest_item(index))
                }
                _ => taken,
            };
        }
    }

    /// Whether a slot is the state after the last of a step's rounds, in memory of no more than its size.
    pub(super) fn is_last_state(&self, index: usize, slot: SlotId) -> bool {
        if self.rounds(index) <= Some(0) {
            return false;
        }
        let (step, plan) = (self.schedule[index], &self.steps[index]);
        let place = step.outputs.iter().position(|output| *output == Some(slot));
        let place = place.filter(|place| *place < self.states(index));
        let body = step.nested.first().zip(plan.nested.first());
        let Some((place, (nested, plan))) = place.zip(body) else { return false };
        let Some(inner) = plan.outputs.get(place) else { return false };
        let mut steps = nested.program.steps.iter();
        let made = steps.find(|step| step.outputs.contains(&Some(*inner)));
        // What is elsewhere is copied to memory of its size.
        !matches!(plan.slots[inner.index()].place, Place::Own)
            || made.is_some_and(|step| step.claim.outputs == OutputsFrom::Plan)
    }

    /// How often a step runs its subgraph, if that is known.
    fn rounds(&self, index: usize) -> Option<usize> {
        self.scanning(index).filter(|(node, flow)| (flow.in_front)(&node.attrs))?;
        let scanned = self.schedule[index].inputs.last().copied().flatten();
        self.shape_of(scanned)?.first().copied()
    }

    /// The states of a step, which are its first outputs.
    fn states(&self, index: usize) -> usize {
        self.scanning(index).map_or(0, |(node, flow)| (flow.carried)(&node.attrs, node.inputs.len()))
    }

    /// The node of a step that runs its subgraph for each slice; none of one that does not run.
    fn scanning(&self, index: usize) -> Option<(&Node, Flow)> {
        let runs = self.steps.get(index).is_some_and(|step| !step.nested.is_empty());
        let step = self.schedule.get(index).filter(|_| runs)?;
        let node = self.graph.nodes.get(step.node?)?;
        Some((node, node.spec.flow.filter(|flow| flow.rounds == Rounds::Slices)?))
    }

    /// The bytes of the largest output that is put together of what rounds give: that is there beside it.
    fn largest_item(&self, index: usize) -> usize {
        let outputs = self.schedule[index].outputs.iter().skip(self.states(index)).flatten();
        let bytes = outputs.filter_map(|slot| {
            let (dtype, shape) = self.dtypes[slot.index()].zip(self.shapes[slot.index()].as_deref())?;
            byte_count(dtype, shape).ok()
        });
        bytes.max().unwrap_or(0)
    }
}
