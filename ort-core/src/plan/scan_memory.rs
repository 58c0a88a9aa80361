//! Memory of `Scan` steps: the bytes that are live during an iteration, and the bytes that remain
//! after the last one.
//!
//! A step with [`TripCount::Slices`] runs its subgraph once for each slice of its scanned inputs.

#![allow(
    clippy::indexing_slicing,
    reason = "ids of slots and steps are made by the program and the planner, whose tables have an entry for each"
)]

use super::Storage;
use super::resolve::Planner;
use crate::ep::{LEAST_TENSOR, OutputsFrom};
use crate::ir::Node;
use crate::program::SlotId;
use crate::spec::{Flow, TripCount};
use crate::tensor::byte_count;

impl Planner<'_> {
    /// Corrects `nested_own` of scanning steps that run no iteration or a single one.
    ///
    /// In general, old and new states are live at once. The new states count as buffers of the
    /// body. The old ones count as the step's outputs, which have the same sizes. With a single
    /// iteration the old states are the step's inputs, and the body's buffers become the outputs.
    /// We subtract these buffers, because they would count twice. Without iterations the body does
    /// not run.
    pub(super) fn correct_scan_memory(&mut self) {
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

    /// Whether a slot is a final state of a scanning step, in memory of exactly its size. The
    /// minimum for tensors that kernels allocate ([`LEAST_TENSOR`](crate::ep::LEAST_TENSOR)) does
    /// not apply then.
    pub(super) fn is_last_state(&self, index: usize, slot: SlotId) -> bool {
        // An unknown trip count (`None`) compares less than 0 iterations, so it returns here, too.
        if self.rounds(index) <= Some(0) {
            return false;
        }
        let mut outputs = self.schedule[index].outputs.iter();
        let place = outputs.position(|output| *output == Some(slot));
        place.is_some_and(|place| place < self.states(index) && self.is_exact(index, place))
    }

    /// Whether the body leaves an output in memory of exactly its size.
    fn is_exact(&self, index: usize, place: usize) -> bool {
        let body = self.schedule[index].nested.first().zip(self.steps[index].nested.first());
        let Some((nested, plan)) = body else { return false };
        let Some(inner) = plan.outputs.get(place) else { return false };
        let mut steps = nested.program.steps.iter();
        let made = steps.find(|step| step.outputs.contains(&Some(*inner)));
        // An output without a buffer of its own is copied into a buffer of exactly its size.
        !matches!(plan.slots[inner.index()].storage, Storage::Own)
            || made.is_some_and(|step| step.claim.outputs == OutputsFrom::Plan)
    }

    /// Returns the trip count of a scanning step: the leading dimension of its last input. None if
    /// it is unknown, or if not all slices are contiguous.
    fn rounds(&self, index: usize) -> Option<usize> {
        self.scanning(index).filter(|(node, flow)| (flow.in_front)(&node.attrs))?;
        let scanned = self.schedule[index].inputs.last().copied().flatten();
        self.shape_of(scanned)?.first().copied()
    }

    /// Returns the number of states of a scanning step. They are its first outputs.
    fn states(&self, index: usize) -> usize {
        self.scanning(index).map_or(0, |(node, flow)| (flow.carried)(&node.attrs, node.inputs.len()))
    }

    /// Returns the node of a scanning step. None for other steps, and for steps that do not run.
    fn scanning(&self, index: usize) -> Option<(&Node, Flow)> {
        let runs = self.steps.get(index).is_some_and(|step| !step.nested.is_empty());
        let step = self.schedule.get(index).filter(|_| runs)?;
        let node = self.graph.nodes.get(step.node?)?;
        Some((node, node.spec.flow.filter(|flow| flow.rounds == TripCount::Slices)?))
    }

    /// Returns the bytes of the largest stacked output. With a single iteration, the body's item
    /// has that size and is live beside the output into which it is copied.
    fn largest_item(&self, index: usize) -> usize {
        let outputs = self.schedule[index].outputs.iter().enumerate().skip(self.states(index));
        let bytes = outputs.filter_map(|(place, slot)| {
            let slot = slot.as_ref()?.index();
            let (dtype, shape) = self.dtypes[slot].zip(self.shapes[slot].as_deref())?;
            let bytes = byte_count(dtype, shape).ok()?;
            Some(if self.is_exact(index, place) { bytes } else { bytes.max(LEAST_TENSOR) })
        });
        bytes.max().unwrap_or(0)
    }
}
