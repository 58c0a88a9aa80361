//! The plan of a run: where each value lives, decided before anything runs.
//!
//! For one binding of the symbolic dimensions every size is a number. Values whose elements follow
//! from the shapes alone are folded; views and in-place results share memory; the rest gets offsets
//! in one slab per memory by [`ort_alloc::plan`](fn@ort_alloc::plan). Values whose size depends on
//! data stay dynamic and are told apart.

mod aliasing;
mod batch;
mod batch_places;
mod bound;
mod boundary;
mod breakdown;
mod cache;
mod concat_in_place;
mod finish;
mod order;
mod output_reuse;
mod report;
mod resolve;
mod rounds;
mod scratch;
mod specialize;
mod updates;

use std::ops::Range;
use std::sync::Arc;

use ort_alloc::DeviceId;
use smallvec::SmallVec;

use crate::dtype::DType;
use crate::program::SlotId;
use crate::tensor::{Shape, Tensor};

pub use batch::{BatchProof, BatchRefusal, BatchSplit, batch_parallel, prove};
pub(crate) use bound::{BoundValues, GivenMemory, OutputMemory, Planning, WorkspaceRoom};
pub(crate) use boundary::Boundary;
pub use breakdown::{KindBytes, MemoryKind};
pub(crate) use cache::PlanCaches;
pub use order::{LiveBlock, LiveStep};
pub(crate) use order::{better_order, live_steps, order_of_updates};
pub use report::{PlanReport, PlannedStep, PlannedValue, ValueKind};
pub(crate) use report::{largest_at_peak, report};
pub(crate) use resolve::resolve_bound;
pub(crate) use specialize::{Known, specialize};

/// Where a slot's value lives during a run.
#[derive(Debug, Clone)]
pub(crate) enum Storage {
    /// With the caller, the enclosing run, or the weights.
    Outside,
    /// Where the given value at this position lies: it was given in the memory in which it is read.
    Given(usize),
    /// In a slab, or in the buffer of an output that is computed later, at these bytes.
    Slab { slab: usize, range: Range<usize> },
    /// In a buffer of its own, of known size: graph outputs, and values that kernels hand over.
    Own,
    /// In the buffer at this place of the run's binding.
    Bound(usize),
    /// Part of another slot's memory that is not a slab.
    View { of: SlotId, element_offset: usize },
    /// Known from the shapes.
    Folded(Tensor),
    /// Known only at run time.
    Dynamic,
    /// Nobody reads it.
    Unused,
}

/// One slot under one binding.
#[derive(Debug, Clone)]
pub(crate) struct SlotPlan {
    pub(crate) dtype: Option<DType>,
    pub(crate) shape: Option<Shape>,
    pub(crate) place: Storage,
    /// For values that share memory by design: how the report calls them.
    pub(crate) kind: ValueKind,
    /// First and last step at which the value is alive.
    pub(crate) life: (usize, usize),
    /// Whether it is one of the plan's outputs.
    pub(crate) is_output: bool,
}

/// What becomes of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    /// Nothing: its outputs are folded, views, or unused.
    Skip,
    /// It runs.
    Run,
}

/// One step under one binding.
#[derive(Debug, Clone)]
pub(crate) struct StepPlan {
    pub(crate) action: Action,
    /// Outputs that share the memory of an input, each with that input.
    pub(crate) in_place: SmallVec<[(u32, u32); 2]>,
    /// Scratch memory, and the slab that it is in.
    pub(crate) workspace: Range<usize>,
    pub(crate) workspace_slab: usize,
    /// What the kernel takes of the heap besides.
    pub(crate) heap: usize,
    /// The slabs of its subgraphs in the memories of devices, each as a part of one of this plan's.
    pub(crate) nested_slabs: SmallVec<[(usize, Range<usize>); 1]>,
    /// Slots with memory of their own that die after this step.
    pub(crate) release: Vec<SlotId>,
    /// The plans of its subgraphs.
    pub(crate) nested: Vec<Arc<RunPlan>>,
}

/// The plan of a run for one binding of the dimensions.
#[derive(Debug, Clone)]
pub(crate) struct RunPlan {
    pub(crate) slots: Vec<SlotPlan>,
    pub(crate) steps: Vec<StepPlan>,
    /// The bytes of each slab, the host's first.
    pub(crate) slabs: Vec<(DeviceId, usize)>,
    /// Outputs whose buffers are there from the beginning and hold other values until they are
    /// computed. As slabs they have the numbers behind those of `slabs`.
    pub(crate) homes: Vec<SlotId>,
    /// The most bytes of own buffers alive at once, where all are known.
    pub(crate) own_peak: usize,
    /// The most bytes alive at once in any schedule-respecting layout.
    pub(crate) lower_bound: usize,
    /// Bytes alive after each step, workspaces included.
    pub(crate) live: Vec<usize>,
    /// Of those, the bytes that begin to live with each step.
    pub(crate) begins: Vec<usize>,
    /// Of those, the bytes that outlive the last step: outputs.
    pub(crate) left: usize,
    /// The slots of the outputs, each in the memory that it is wanted in where a step computes it
    /// there.
    pub(crate) outputs: Vec<SlotId>,
    /// Whether some value is dynamic.
    pub(crate) has_dynamic: bool,
    /// Whether some workspace is larger than its kernel cannot do without.
    pub(crate) can_shrink: bool,
}

impl StepPlan {
    /// All bytes of scratch memory.
    pub(crate) fn scratch_bytes(&self) -> usize {
        // The heap's bytes are bounds from sizes that a model asks for: up to all that can be
        // counted.
        let nested = self.nested_slabs.iter().map(|(_, range)| range.len());
        nested.fold(self.workspace.len().saturating_add(self.heap), usize::saturating_add)
    }

    /// The input whose memory the output at `position` takes over.
    pub(crate) fn input_in_place_of(&self, position: usize) -> Option<usize> {
        let pair = self.in_place.iter().find(|(output, _)| *output as usize == position);
        pair.map(|(_, input)| *input as usize)
    }
}

impl RunPlan {
    /// The most bytes of activations that a run allocates; dynamic values not counted.
    pub(crate) fn peak(&self) -> usize {
        self.own_peak + self.slabs.iter().map(|slab| slab.1).sum::<usize>()
    }

    /// Which of the host's regions a slab is: 0 for its slab, then the homes; none for a slab of a
    /// device.
    pub(crate) fn host_region(&self, slab: usize) -> Option<usize> {
        match slab {
            0 => Some(0),
            _ => (slab + 1).checked_sub(self.slabs.len()).filter(|region| *region > 0),
        }
    }

    /// The bytes of the host's slab.
    pub(crate) fn host_slab(&self) -> usize {
        self.slabs.first().map_or(0, |slab| slab.1)
    }

    /// The planned bytes that live no longer than a step.
    pub(crate) fn ends(&self, step: usize) -> usize {
        let after = match (self.live.get(step + 1), self.begins.get(step + 1)) {
            (Some(live), Some(begins)) => live.saturating_sub(*begins),
            _ => self.left,
        };
        self.live.get(step).map_or(0, |live| live.saturating_sub(after))
    }

    /// The bytes that the plan itself takes, about.
    pub(crate) fn own_bytes(&self) -> usize {
        let nested = self.steps.iter().flat_map(|step| &step.nested).map(|plan| plan.own_bytes());
        self.slots.len() * size_of::<SlotPlan>()
            + self.steps.len() * (size_of::<StepPlan>() + 56)
            + nested.sum::<usize>()
    }
}
