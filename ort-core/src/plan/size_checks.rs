//! Steps whose inputs contradict each other in size, found while a run is planned.

#![allow(
    clippy::indexing_slicing,
    reason = "ids of slots, steps and nodes are made with the program, and each table of a planner has an entry for each"
)]

use std::borrow::Cow;

use super::resolve::{DraftStorage, Planner};
use crate::Error;
use crate::dim::Dim;
use crate::ir::ValueType;
use crate::program::{SlotId, Step};
use crate::spec::{InputFacts, bound_facts, refusal};

impl Planner<'_> {
    /// Returns why a step cannot run with the sizes of its inputs.
    ///
    /// The plan keeps it for the run, which fails when it gets there: a branch that is not taken may
    /// contradict itself.
    pub(super) fn refused(&self, index: usize) -> Option<Error> {
        let step = self.schedule[index];
        if !step.depends_on_sizes || !self.needed[index] {
            return None;
        }
        let inputs: Vec<_> = (0..step.inputs.len()).map(|place| self.facts(step, place)).collect();
        let problem = refusal(&self.graph.nodes[step.node?], &inputs)?;
        Some(step.failed(problem.help("check its attributes and the shapes of its inputs")))
    }

    /// What the plan knows of an input of a step.
    fn facts(&self, step: &Step, place: usize) -> Option<InputFacts<'_>> {
        let (slot, id) = (step.inputs[place]?, self.graph.nodes[step.node?].inputs[place]?);
        let facts = bound_facts(self.graph, id, self.bindings);
        let known = match &self.drafts[slot.index()] {
            DraftStorage::Folded(tensor) => Some(tensor.view()),
            _ => facts.known,
        };
        Some(InputFacts { ty: self.bound_type(slot).map_or(facts.ty, Cow::Owned), known, ..facts })
    }

    /// The type of a slot whose shape the plan knows.
    fn bound_type(&self, slot: SlotId) -> Option<ValueType> {
        let (dtype, shape) = (self.dtypes[slot.index()]?, self.shapes[slot.index()].as_ref()?);
        let shape = shape.iter().map(|size| Dim::constant(i64::try_from(*size).unwrap_or(i64::MAX)));
        Some(ValueType::tensor(dtype, Some(shape.collect())))
    }
}
