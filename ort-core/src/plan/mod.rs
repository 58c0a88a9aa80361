//! The memory plan of a run: where each value is stored, decided before the first step.
//!
//! With the symbolic dimensions bound, every size that does not depend on data is a number. The
//! planner folds values that follow from shapes alone. Views and in-place results alias the memory
//! of an input. The other values of known size become intervals, to which
//! [`ort_alloc::plan`](fn@ort_alloc::plan) assigns offsets in one slab per memory. Graph outputs
//! get buffers of their own, because the caller keeps them. Values whose size depends on data stay
//! dynamic: the run allocates them, and the planned peak leaves them out.

mod aliasing;
mod batch;
mod batch_places;
mod bound;
mod bound_outputs;
mod boundary;
mod breakdown;
mod cache;
mod concat_in_place;
mod donated;
mod finish;
mod order;
mod output_reuse;
mod report;
mod resolve;
mod scan_memory;
mod scratch;
mod specialize;
mod updates;
mod value_kind;

use std::ops::Range;
use std::sync::Arc;

use ort_alloc::DeviceId;
use smallvec::SmallVec;

use crate::Error;
use crate::dtype::DType;
use crate::program::SlotId;
use crate::tensor::{Shape, Tensor};

pub use batch::{BatchProof, BatchRefusal, BatchSplit, batch_parallel, prove};
pub(crate) use bound::{BoundValues, Boundary, GivenMemory, OutputMemory, Planning, SlabLimits};
pub use breakdown::{KindBytes, MemoryKind};
pub(crate) use cache::PlanCaches;
pub use order::{LiveBlock, LiveStep};
pub(crate) use order::{better_order, live_steps, order_of_updates};
pub use report::{PlanReport, PlannedStep, PlannedValue};
pub(crate) use report::{largest_at_peak, report};
pub(crate) use resolve::resolve_bound;
pub(crate) use specialize::{Known, specialize};
pub use value_kind::ValueKind;

/// Where the value of a slot is stored during a run.
#[derive(Debug, Clone)]
pub(crate) enum Storage {
    /// Memory of the caller, of the enclosing run, or of weights: the plan allocates nothing.
    Outside,
    /// The memory of the given value at this position, on the device that reads it.
    Given(usize),
    /// A byte range of a slab, or of a reused output buffer ([`RunPlan::homes`]).
    Slab { slab: usize, range: Range<usize> },
    /// A buffer of its own, of known size: graph outputs, values that kernels allocate, and host
    /// copies of values given on a device.
    Own,
    /// The buffer at this index of the run's binding.
    Bound(usize),
    /// An alias of part of another slot whose memory is not in a slab. An alias of a slot in a slab
    /// is a [`Storage::Slab`].
    View { of: SlotId, element_offset: usize },
    /// A constant that follows from the shapes, computed by the planner.
    Folded(Tensor),
    /// A buffer whose size is known only at run time.
    Dynamic,
    /// No memory, because the value has no reader.
    Unused,
}

/// The plan of one slot under one binding of the dimensions.
#[derive(Debug, Clone)]
pub(crate) struct SlotPlan {
    pub(crate) dtype: Option<DType>,
    pub(crate) shape: Option<Shape>,
    pub(crate) storage: Storage,
    /// How the value gets its memory, as the report labels it.
    pub(crate) kind: ValueKind,
    /// The first and last step at which the value is live.
    pub(crate) life: (usize, usize),
    /// Whether it is an output of the plan.
    pub(crate) is_output: bool,
}

/// What a run does with a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    /// Skips the step: its outputs are folded, aliases, parts of a concatenation in place, or
    /// unused.
    Skip,
    /// Runs it.
    Run,
}

/// The plan of one step under one binding of the dimensions.
#[derive(Debug, Clone)]
pub(crate) struct StepPlan {
    pub(crate) action: Action,
    /// Pairs (output, input) of positions: the output is computed in place of the input.
    pub(crate) in_place: SmallVec<[(u32, u32); 2]>,
    /// The workspace, as a range of the slab `workspace_slab`.
    pub(crate) workspace: Range<usize>,
    pub(crate) workspace_slab: usize,
    /// The most bytes that the kernel allocates on the heap besides its workspace.
    pub(crate) heap: usize,
    /// The device slabs of its subgraphs, each as a range of one of this plan's slabs.
    pub(crate) nested_slabs: SmallVec<[(usize, Range<usize>); 1]>,
    /// Slots that own their memory and die after this step.
    pub(crate) release: Vec<SlotId>,
    /// Donated inputs ([`RunPlan::homes`]) whose memory is freed after this step.
    pub(crate) closes: SmallVec<[u32; 2]>,
    /// The plans of its subgraphs.
    pub(crate) nested: Vec<Arc<RunPlan>>,
}

/// The memory plan of a run for one binding of the dimensions.
#[derive(Debug, Clone)]
pub(crate) struct RunPlan {
    pub(crate) slots: Vec<SlotPlan>,
    pub(crate) steps: Vec<StepPlan>,
    /// The memory and size of each slab, the host's first.
    pub(crate) slabs: Vec<(DeviceId, usize)>,
    /// Buffers that hold other values: first those of donated inputs (see `donated`), then those of
    /// outputs (see `output_reuse`), which are allocated before the first step and hold other
    /// values until the output is computed. Home `i` has the slab number `slabs.len() + i`.
    pub(crate) homes: Vec<SlotId>,
    /// The most bytes of own buffers live at once; dynamic values do not count.
    pub(crate) own_peak: usize,
    /// The most bytes live at once: no layout of this schedule needs less.
    pub(crate) lower_bound: usize,
    /// Bytes live while each step runs, workspaces included.
    pub(crate) live: Vec<usize>,
    /// The part of `live` whose lifetime begins with each step.
    pub(crate) begins: Vec<usize>,
    /// The part of `live` that outlives the last step: the outputs.
    pub(crate) left: usize,
    /// The slots of the outputs. A slot is in the memory where the caller wants the output if the
    /// program has a slot there, else on the host.
    pub(crate) outputs: Vec<SlotId>,
    /// Whether the size of some value or workspace is known only at run time.
    pub(crate) has_dynamic: bool,
    /// Whether the shapes of all values are known.
    pub(crate) has_all_shapes: bool,
    /// Whether some device kernel, in a subgraph as well, could run with a smaller workspace.
    pub(crate) can_shrink: bool,
    /// The error of a run if the sizes violate a requirement of an operator, or a kernel cannot
    /// plan for them. Planning does not fail, because the branch with this operator may never be
    /// taken.
    pub(crate) contradiction: Option<Error>,
}

impl StepPlan {
    /// Returns the bytes of workspace, heap and nested slabs together.
    pub(crate) fn scratch_bytes(&self) -> usize {
        // Saturating, because the upper bounds of heap memory follow from sizes in the model, so
        // their sum may overflow.
        let nested = self.nested_slabs.iter().map(|(_, range)| range.len());
        nested.fold(self.workspace.len().saturating_add(self.heap), usize::saturating_add)
    }

    /// Returns the input that the output at `position` is computed in place of.
    pub(crate) fn input_in_place_of(&self, position: usize) -> Option<usize> {
        let pair = self.in_place.iter().find(|(output, _)| *output as usize == position);
        pair.map(|(_, input)| *input as usize)
    }
}

impl RunPlan {
    /// Returns the peak of a run: all slabs plus the peak of own buffers. Dynamic values do not
    /// count.
    pub(crate) fn peak(&self) -> usize {
        self.own_peak + self.slabs.iter().map(|slab| slab.1).sum::<usize>()
    }

    /// Returns the host region of a slab: 0 for the host's slab, `i + 1` for reused output buffer
    /// `i`, none for the slab of a device.
    pub(crate) fn host_region(&self, slab: usize) -> Option<usize> {
        match slab {
            0 => Some(0),
            _ => (slab + 1).checked_sub(self.slabs.len()).filter(|region| *region > 0),
        }
    }

    /// Returns the bytes of the host's slab.
    pub(crate) fn host_slab(&self) -> usize {
        self.slabs.first().map_or(0, |slab| slab.1)
    }

    /// Returns the planned bytes that are freed after a step.
    pub(crate) fn ends(&self, step: usize) -> usize {
        // The bytes that stay live are those live at the next step, less those that it allocates.
        let after = match (self.live.get(step + 1), self.begins.get(step + 1)) {
            (Some(live), Some(begins)) => live.saturating_sub(*begins),
            _ => self.left,
        };
        self.live.get(step).map_or(0, |live| live.saturating_sub(after))
    }

    /// Estimates the bytes of the plan itself, which count against the limit of the plan cache.
    pub(crate) fn own_bytes(&self) -> usize {
        let nested = self.steps.iter().flat_map(|step| &step.nested).map(|plan| plan.own_bytes());
        self.slots.len() * size_of::<SlotPlan>()
            + self.steps.len() * (size_of::<StepPlan>() + 56)
            + nested.sum::<usize>()
    }
}
