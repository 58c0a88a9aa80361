//! Bound buffers: the inputs and outputs of a plan in buffers that outlive the run.
//!
//! The buffers of a binding have one numbering: first one for each given value, then one for each
//! output.

#![allow(
    clippy::indexing_slicing,
    reason = "ids of slots are made by the program, and the planner's tables have an entry for each"
)]

use ort_alloc::DeviceId;

use super::StepPlan;
use super::boundary::Boundary;
use super::resolve::{Draft, Planner};
use crate::dtype::DType;
use crate::ep::OutputsFrom;
use crate::program::{Program, SlotId, Step};
use crate::tensor::in_words;
use crate::tensor::{ValueView, byte_count};
use crate::{Error, Result, error};

/// Where the memory of an output is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OutputMemory {
    /// Nowhere, because the caller does not want the output.
    Unwanted,
    /// Memory of its own, as without a binding.
    Own,
    /// The output's buffer in this memory if the plan knows its size; else the run allocates it.
    Kept(DeviceId),
    /// The caller's buffer in this memory.
    Given(DeviceId),
    /// The buffer of the given value at this position.
    Input(usize),
}

/// Where a given value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GivenMemory {
    pub(crate) memory: DeviceId,
    /// Whether it is in its buffer of the binding.
    pub(crate) in_buffer: bool,
}

impl GivenMemory {
    /// Memory of the caller on the host.
    pub(crate) const HOST: GivenMemory = GivenMemory { memory: DeviceId::HOST, in_buffer: false };

    /// Returns the memory of a value that is in no buffer of a binding.
    pub(crate) fn of(value: Option<ValueView<'_>>) -> GivenMemory {
        let tensor = value.and_then(|value| value.tensor().ok());
        GivenMemory { memory: tensor.map_or(DeviceId::HOST, |tensor| tensor.memory()), in_buffer: false }
    }
}

/// How much memory is planned before the run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Planning {
    /// Values that are not live at the same time share memory.
    #[default]
    Shared,
    /// Each value has memory of its own for the whole run.
    Apart,
    /// Nothing: the run allocates each value when it is computed.
    Off,
}

/// Limits on the slab of each memory. Kernels that can trade speed for workspace keep within them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SlabLimits {
    pub(crate) slabs: Vec<(DeviceId, usize)>,
    /// The limit of all other memories.
    pub(crate) others: usize,
}

impl SlabLimits {
    /// Kernels get the least workspace that they can run with.
    pub(crate) const LEAST: SlabLimits = SlabLimits { slabs: Vec::new(), others: 0 };
    /// Kernels get as much workspace as they want.
    pub(crate) const ANY: SlabLimits = SlabLimits { slabs: Vec::new(), others: usize::MAX };

    /// Returns the limit of a memory's slab, in bytes.
    pub(super) fn of(&self, memory: DeviceId) -> usize {
        let slab = self.slabs.iter().find(|(own, _)| *own == memory);
        slab.map_or(self.others, |(_, bytes)| *bytes)
    }
}

impl Default for SlabLimits {
    fn default() -> Self {
        SlabLimits::ANY
    }
}

/// The bound values of a program. Without a binding and without updates both lists are empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct BoundValues {
    pub(crate) planning: Planning,
    /// Where the given value at each position is. Positions past the end mean the caller's memory
    /// on the host.
    pub(crate) inputs: Vec<GivenMemory>,
    /// The memory of each output.
    pub(crate) outputs: Vec<OutputMemory>,
    /// The limits on slabs.
    pub(crate) room: SlabLimits,
}

impl BoundValues {
    /// Returns the values of a run without a binding.
    pub(crate) fn unbound(planning: Planning) -> BoundValues {
        BoundValues { planning, ..BoundValues::default() }
    }

    /// Whether the caller wants an output.
    pub(super) fn wants(&self, output: usize) -> bool {
        self.outputs.get(output) != Some(&OutputMemory::Unwanted)
    }

    /// Returns where the given value at a position is.
    pub(super) fn input(&self, position: usize) -> GivenMemory {
        self.inputs.get(position).copied().unwrap_or(GivenMemory::HOST)
    }

    /// Returns the memory in which an output is wanted.
    pub(super) fn memory_of_output(&self, output: usize) -> DeviceId {
        match self.outputs.get(output) {
            Some(OutputMemory::Kept(memory) | OutputMemory::Given(memory)) => *memory,
            Some(OutputMemory::Input(input)) => self.input(*input).memory,
            None | Some(OutputMemory::Unwanted | OutputMemory::Own) => DeviceId::HOST,
        }
    }

    /// Returns the index of the buffer of an output, if it has one.
    fn buffer_of(&self, output: usize) -> Option<usize> {
        match self.outputs.get(output)? {
            OutputMemory::Unwanted | OutputMemory::Own => None,
            OutputMemory::Kept(_) | OutputMemory::Given(_) => Some(self.inputs.len() + output),
            OutputMemory::Input(input) => Some(*input),
        }
    }

    /// Returns for each slot that is an output its memory and its buffer. If several outputs share
    /// a slot, the first one counts. The slots that an in-place update goes through are in the same
    /// buffer.
    pub(super) fn buffers(&self, program: &Program, ends: &Boundary) -> Vec<Option<(OutputMemory, usize)>> {
        let mut buffers = vec![None; program.slots.len()];
        let mut makers = None;
        // Reversed, so that the first output of a slot is written last and wins.
        for (output, (slot, memory)) in ends.outputs.iter().zip(&self.outputs).enumerate().rev() {
            // If no step computes an output in the memory of its buffer, the run copies it there at
            // the end.
            let exists_before_run = program.slots[slot.index()].memory == self.memory_of_output(output);
            let buffer = self.buffer_of(output).filter(|_| exists_before_run).map(|buffer| (*memory, buffer));
            buffers[slot.index()] = buffer;
            if let OutputMemory::Input(input) = memory
                && let Some(input) = ends.given.get(*input)
            {
                let makers = makers.get_or_insert_with(|| program.makers());
                for between in program.between(makers, *input, *slot) {
                    buffers[between.index()] = buffer;
                }
            }
        }
        buffers
    }
}

impl Planner<'_> {
    /// Gives an output of unknown shape the shape of the input whose buffer it takes over, if the
    /// kernel allows that for any length (`shared_buffers`).
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
        let from_plan = step.claim.outputs == OutputsFrom::Plan && self.dtypes[place] != Some(DType::String);
        let Some((memory, buffer)) = self.buffers[place].filter(|_| from_plan) else { return Ok(false) };
        if let OutputMemory::Input(input) = memory {
            self.share_bound_input(step, (index, position), input, plan)?;
        }
        // A buffer that the caller does not provide needs a size known before the run.
        let exists_before_run = !matches!(memory, OutputMemory::Kept(_)) || bytes.is_some();
        if exists_before_run {
            self.drafts[place] = Draft::Bound(buffer);
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
        let is_in_buffer =
            |slot: SlotId| matches!(self.drafts[slot.index()], Draft::Bound(buffer) if buffer == input);
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
        // A step without a node is a copy: it reads the value in the memory that computes it.
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
            if !matches!(self.drafts[to.index()], Draft::Bound(buffer) if buffer == input) {
                return Err(self.not_shared(from, to, "no node computes it from the input"));
            }
        }
        Ok(())
    }

    /// Returns the slot that a view refers to.
    fn root(&self, slot: SlotId) -> SlotId {
        match self.drafts[slot.index()] {
            Draft::View { of, .. } => self.root(of),
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
