//! In-place updates of inputs: their memory, and the steps that read a value before it is
//! overwritten.
//!
//! An update is an output computed in the buffer of an input, as for the parameters of a training
//! step.

use ort_alloc::DeviceId;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::{BoundValues, Boundary, GivenMemory, OutputMemory, Planning};
use crate::ir::ValueId;
use crate::program::{Program, SlotId, Update, Work};

impl Program {
    /// Returns the bound values that a plan without a binding assumes: updated inputs are in
    /// buffers, and their outputs are computed there.
    pub(crate) fn bound_values(&self, planning: Planning) -> BoundValues {
        let mut bound = BoundValues::unbound(planning);
        if self.updates.is_empty() {
            return bound;
        }
        bound.inputs = vec![GivenMemory::HOST; self.given.len()];
        bound.outputs = vec![OutputMemory::Own; self.outputs.len()];
        for (update, memory) in self.updates.iter().zip(self.memories_of_updates()) {
            let place = bound.inputs.get_mut(update.input);
            place.into_iter().for_each(|input| *input = GivenMemory::buffer(memory));
            let output = bound.outputs.get_mut(update.output);
            output.into_iter().for_each(|output| *output = OutputMemory::Input(update.input));
        }
        bound
    }

    /// Returns for each update the memory in which its new value is computed.
    pub(crate) fn memories_of_updates(&self) -> Vec<DeviceId> {
        // A copy step moves a value but does not compute it.
        let computed = self.steps.iter().filter(|step| !matches!(step.work, Work::Copy));
        let slots = computed.flat_map(|step| step.outputs.iter().flatten());
        let slots = slots.filter_map(|slot| self.slots.get(slot.index()));
        let memories: FxHashMap<ValueId, DeviceId> = slots.map(|slot| (slot.value, slot.memory)).collect();
        let memory = |update: &Update| {
            let output = self.slots.get(self.outputs.get(update.output)?.index())?;
            memories.get(&output.value).copied()
        };
        self.updates.iter().map(|update| memory(update).unwrap_or(DeviceId::HOST)).collect()
    }

    /// Returns for each overwritten value the step that overwrites it, and all other readers of the
    /// value and of its views, in ascending order.
    pub(crate) fn readers_before_updates(&self) -> Vec<(usize, Vec<usize>)> {
        if self.updates.is_empty() {
            return Vec::new();
        }
        let mut part_of: FxHashMap<SlotId, usize> = FxHashMap::default();
        let mut written_in: FxHashMap<SlotId, usize> = FxHashMap::default();
        let mut count = 0;
        for way in self.update_chains() {
            // Each slot in the chain overwrites the one before it.
            for (from, to) in way.iter().zip(way.iter().skip(1)) {
                part_of.insert(*from, count);
                written_in.insert(*to, count);
                count += 1;
            }
        }
        let mut found: Vec<(Option<usize>, Vec<usize>)> = vec![(None, Vec::new()); count];
        for (place, step) in self.steps.iter().enumerate() {
            let node = step.node.and_then(|node| self.graph.nodes.get(node));
            let is_view = node.is_some_and(|node| node.spec.view.is_some());
            for slot in step.reads() {
                let Some(&index) = part_of.get(&slot) else { continue };
                found.get_mut(index).into_iter().for_each(|(_, readers)| readers.push(place));
                // Readers of a view also read the old value, so they have to come first, too.
                if is_view {
                    part_of.extend(step.outputs.iter().flatten().map(|output| (*output, index)));
                }
            }
            for slot in step.outputs.iter().flatten() {
                let found = written_in.get(slot).and_then(|index| found.get_mut(*index));
                found.into_iter().for_each(|(writer, _)| *writer = Some(place));
            }
        }
        let others = |(writer, mut readers): (Option<usize>, Vec<usize>)| {
            let writer = writer?;
            readers.retain(|reader| *reader != writer);
            readers.dedup();
            Some((writer, readers))
        };
        found.into_iter().filter_map(others).collect()
    }

    /// Returns the chain of slots of each update, from its input to its output.
    fn update_chains(&self) -> impl Iterator<Item = Vec<SlotId>> {
        let makers = self.makers();
        let bound = self.bound_values(Planning::Shared);
        let ends = Boundary::of(self, &bound);
        self.updates.iter().filter_map(move |update| {
            let (input, output) = (*ends.given.get(update.input)?, *ends.outputs.get(update.output)?);
            let mut way = vec![input];
            way.extend(self.between(&makers, input, output));
            way.push(output);
            Some(way)
        })
    }

    /// Maps each slot to the step that computes it and the position of the output there.
    pub(crate) fn makers(&self) -> FxHashMap<SlotId, (usize, usize)> {
        let outputs = self.steps.iter().enumerate().flat_map(|(index, step)| {
            let outputs = step.outputs.iter().enumerate();
            outputs.filter_map(move |(position, slot)| Some(((*slot)?, (index, position))))
        });
        outputs.collect()
    }

    /// Returns the slots between an input and an output that a chain of in-place steps computes
    /// from it. Empty if a single step does, or if no unique chain leads from the output back to
    /// the input.
    pub(crate) fn between(
        &self,
        makers: &FxHashMap<SlotId, (usize, usize)>,
        input: SlotId,
        output: SlotId,
    ) -> Vec<SlotId> {
        let value_of = |slot: SlotId| self.slots.get(slot.index()).map(|slot| slot.value);
        let is_output = |slot: SlotId| self.outputs.iter().any(|output| value_of(*output) == value_of(slot));
        let mut way = Vec::new();
        let mut at = output;
        while let Some(&(index, position)) = makers.get(&at) {
            let Some(step) = self.steps.get(index) else { break };
            let pairs = step.claim.in_place.iter().filter(|(_, output)| *output == position);
            let sources: SmallVec<[SlotId; 2]> =
                pairs.filter_map(|(place, _)| step.inputs.get(*place).copied().flatten()).collect();
            if sources.contains(&input) {
                way.reverse();
                return way;
            }
            // With several candidates we cannot tell which one the planner will take.
            let [source] = sources.as_slice() else { break };
            // The caller keeps an output, so no step may overwrite it.
            if is_output(*source) {
                break;
            }
            way.push(*source);
            at = *source;
        }
        Vec::new()
    }
}
