//! Outputs in bound buffers: buffers that the caller provides, and buffers of inputs that are
//! updated in place.

#![allow(
    clippy::indexing_slicing,
    reason = "ids of slots are made by the program, and the planner's tables have an entry for each"
)]

use super::StepPlan;
use super::bound::OutputMemory;
use super::resolve::{DraftStorage, Planner};
use crate::dtype::DType;
use crate::ep::OutputsFrom;
use crate::program::{SlotId, Step};
use crate::tensor::{byte_count, in_words};
use crate::{Error, Result, error};

impl Planner<'_> {
    /// Gives an output of unknown shape the shape of the input whose buffer it takes over. The
    /// kernel must allow this before the length is known (`KernelDef::shared_buffers`).
    pub(super) fn find_shared_shapes(&mut self) {
        for step in &self.program.steps {
            for &(input, output) in step.claim.shared_buffers {
                let (Some(&Some(input)), Some(&Some(output))) =
                    (step.inputs.get(input), step.outputs.get(output))
                else {
                    continue;
                };
                if let Some((OutputMemory::Input(given), _)) = self.buffers[output.index()]
                    && self.ends.given.get(given) == Some(&input)
                    && self.shapes[output.index()].is_none()
                {
                    self.shapes[output.index()] = self.shapes[input.index()].clone();
                }
            }
        }
    }

    /// Places an output in its buffer if a binding has one; returns whether it is placed. The tuple
    /// is the step's index and the output's position.
    pub(super) fn place_bound_output(
        &mut self,
        step: &Step,
        (index, position): (usize, usize),
        bytes: Option<usize>,
        plan: &mut StepPlan,
    ) -> Result<bool> {
        let Some(slot) = step.outputs[position] else { return Ok(false) };
        let place = slot.index();
        // Kernels that allocate their outputs cannot write into a given buffer, and the bytes of
        // strings are unknown before the run. `Frame::deliver` copies such outputs at the end.
        let from_plan = step.claim.outputs == OutputsFrom::Plan && self.dtypes[place] != Some(DType::String);
        let Some((memory, buffer)) = self.buffers[place].filter(|_| from_plan) else { return Ok(false) };
        if let OutputMemory::Input(input) = memory {
            self.share_bound_input(step, (index, position), input, plan)?;
        }
        // A buffer that the caller does not provide needs a size known before the run.
        let exists_before_run = !matches!(memory, OutputMemory::Kept(_)) || bytes.is_some();
        if exists_before_run {
            self.drafts[place] = DraftStorage::Bound(buffer);
        }
        Ok(exists_before_run)
    }

    /// Lets an output be computed in place of a bound input, or returns why it cannot.
    fn share_bound_input(
        &self,
        step: &Step,
        (index, position): (usize, usize),
        input: usize,
        plan: &mut StepPlan,
    ) -> Result<()> {
        let (Some(&from), Some(to)) = (self.ends.given.get(input), step.outputs[position]) else {
            return Err(error!(Fail, "there is no input {input} to share a buffer with"));
        };
        let refuse = |why: String| self.not_shared(from, to, &why);
        let pairs = step.claim.in_place.iter().filter(|(_, output)| *output == position);
        let mut sources = pairs.filter_map(|(place, _)| Some((*place, step.inputs.get(*place).copied()??)));
        let is_in_buffer = |slot: SlotId| matches!(self.drafts[slot.index()], DraftStorage::Bound(buffer) if buffer == input);
        let Some((place, from)) = sources.find(|(_, slot)| is_in_buffer(*slot)) else {
            return Err(refuse(self.not_in_place(step, input)));
        };
        let is_like = |slot: SlotId| {
            let (dtype, shape) = (self.dtypes[slot.index()]?, self.shapes[slot.index()].clone()?);
            byte_count(dtype, &shape).ok()?;
            Some((dtype, shape))
        };
        match (is_like(from), is_like(to)) {
            (_, None) => return Err(refuse("its size is known only when it runs".to_string())),
            (input, output) if input != output => {
                return Err(refuse(format!("it is {}, the input {}", in_words(&output), in_words(&input))));
            }
            _ => {}
        }
        // A second read, directly or through a view, would see overwritten bytes.
        let reads = step.reads().filter(|slot| self.root(*slot) == from).count();
        if reads > 1 {
            return Err(refuse(format!("node '{}' ({}) reads it twice", step.name, step.op)));
        }
        // The caller keeps outputs, so no step may overwrite one.
        if self.is_output[from.index()] {
            return Err(refuse("it is an output itself".to_string()));
        }
        if self.last[from.index()] > index {
            let later = self.program.steps.iter().skip(index + 1);
            let reader = later.into_iter().find(|step| step.reads().any(|slot| self.root(slot) == from));
            let reader = reader.map_or_else(String::new, |step| format!(" by node '{}'", step.name));
            return Err(refuse(format!("the input is still read afterwards{reader}")));
        }
        plan.in_place.push((position as u32, place as u32));
        Ok(())
    }

    /// Describes why a step does not compute an output in place of the bound input.
    fn not_in_place(&self, step: &Step, input: usize) -> String {
        // A step without a node is a copy. It reads the value in the memory in which the value was
        // computed.
        let computed = step.inputs.first().copied().flatten().filter(|_| step.node.is_none());
        match computed {
            Some(slot) => format!(
                "it is computed in the memory of {}, the input is in that of {}, see `Session::input_memories`",
                self.program.slots[slot.index()].memory,
                self.bound.input(input).memory
            ),
            None => format!("node '{}' ({}) does not compute it in place", step.name, step.op),
        }
    }

    /// Checks that each output bound to the buffer of an input is computed in place of that input.
    pub(super) fn check_shared(&self) -> Result<()> {
        for (output, memory) in self.bound.outputs.iter().enumerate() {
            let OutputMemory::Input(input) = *memory else { continue };
            let (Some(&to), Some(&from)) = (self.ends.outputs.get(output), self.ends.given.get(input)) else {
                continue;
            };
            if !matches!(self.drafts[to.index()], DraftStorage::Bound(buffer) if buffer == input) {
                return Err(self.not_shared(from, to, "no node computes it from the input"));
            }
        }
        Ok(())
    }

    /// Returns the slot that a view refers to.
    fn root(&self, slot: SlotId) -> SlotId {
        match self.drafts[slot.index()] {
            DraftStorage::View { of, .. } => self.root(of),
            _ => slot,
        }
    }

    /// Returns the error for an output that cannot be in the memory of an input.
    fn not_shared(&self, from: SlotId, to: SlotId, why: &str) -> Error {
        let name = |slot: SlotId| &self.program.graph.value(self.program.slots[slot.index()].value).name;
        error!(
            InvalidArgument,
            "output '{}' cannot be in the memory of input '{}': {why}",
            name(to),
            name(from)
        )
        .help("bind it to a buffer of its own")
    }
}
