//! Workspaces: scratch memory that kernels declare, and the slabs of subgraphs.
//!
//! The workspace of a step with subgraphs is their host slab. The device slabs of a subgraph are
//! ranges of the enclosing plan's slabs.

#![allow(
    clippy::indexing_slicing,
    reason = "ids of slots, steps and groups are made by the program and the planner, whose tables have an entry for each"
)]

use std::sync::Arc;

use ort_alloc::DeviceId;

use super::bound::SlabLimits;
use super::resolve::{Group, Planner, Surroundings, plan_that_fails, resolve_given};
use super::specialize::Known;
use super::{BoundValues, RunPlan};
use crate::ep::{IoShapes, OutputsFrom};
use crate::program::{SlotId, Step};
use crate::tensor::Shape;
use crate::{Error, ErrorKind, Result};

impl Planner<'_> {
    /// Plans the subgraphs of a step into `plan_nested`, and places its workspace.
    pub(super) fn place_workspace(
        &mut self,
        step: &Step,
        index: usize,
        plan_nested: &mut Vec<Arc<RunPlan>>,
    ) -> Result<()> {
        let bytes = self.scratch_of(step, index, plan_nested)?;
        self.place_nested_slabs(step, index, plan_nested);
        if bytes > 0 {
            let slab = self.slab_of_step(step);
            self.groups.push(Group { bytes, slab, first: index, last: index });
            self.workspaces[index] = Some(self.groups.len() - 1);
        }
        Ok(())
    }

    /// Reserves a range for the subgraphs' slabs in each device memory. The range is as large as
    /// the largest slab, because the subgraphs of a step run one at a time.
    fn place_nested_slabs(&mut self, step: &Step, index: usize, plans: &[Arc<RunPlan>]) {
        // Slab 0 is the host's. There, the slab of a subgraph is the workspace of its step.
        for slab in 1..self.slabs.len() {
            let memory = self.slabs[slab];
            let taken = plans.iter().enumerate().filter(|(position, _)| !self.is_broken(step, *position));
            let of_plan =
                |plan: &RunPlan| plan.slabs.iter().find(|slab| slab.0 == memory).map_or(0, |slab| slab.1);
            let bytes = taken.map(|(_, plan)| of_plan(plan)).max().unwrap_or(0);
            if bytes > 0 {
                self.groups.push(Group { bytes, slab, first: index, last: index });
                self.nested_slabs.push((index, self.groups.len() - 1));
            }
        }
    }

    /// Returns the slab of a step's workspace: the slab of the memory of its outputs, or the host's
    /// if the step runs subgraphs.
    fn slab_of_step(&self, step: &Step) -> usize {
        if !step.nested.is_empty() {
            return 0;
        }
        let output = step.outputs.iter().flatten().next();
        let memory = output.map(|slot| self.program.slots[slot.index()].memory);
        self.slabs.iter().position(|slab| Some(*slab) == memory).unwrap_or(0)
    }

    /// Returns the largest workspace that fits in the slab beside everything live at this step.
    fn workspace_limit(&self, step: &Step, index: usize) -> usize {
        let slab = self.slab_of_step(step);
        let alive = |group: &&Group| group.slab == slab && group.first <= index && index <= group.last;
        match self.bound.room.of(self.slabs[slab]) {
            usize::MAX => usize::MAX,
            room => {
                self.groups.iter().filter(alive).fold(room, |room, group| room.saturating_sub(group.bytes))
            }
        }
    }

    /// Returns the bytes of a step's workspace: the bytes that its kernel declares, or the largest
    /// host slab of its subgraphs. The subgraphs are planned into `plan_nested`.
    pub(super) fn scratch_of(
        &mut self,
        step: &Step,
        index: usize,
        plan_nested: &mut Vec<Arc<RunPlan>>,
    ) -> Result<usize> {
        let mut bytes = 0;
        for (position, nested) in step.nested.iter().enumerate() {
            let given = self.known_to(step, position);
            let mut bound = BoundValues::unbound(self.bound.planning);
            // The plan of a subgraph does not know what is live around the subgraph. So its kernels
            // get their smallest workspace if there is any limit.
            if self.bound.room != SlabLimits::ANY {
                bound.room = SlabLimits::LEAST;
            }
            let around = Surroundings { known: &given, bound: &bound };
            let (program, bindings, threads) = (&nested.program, self.bindings, self.threads);
            // Sizes that contradict each other may be in a branch that is not taken, or in a loop
            // without iterations. If not even an empty plan can be made, the first error is
            // reported.
            let plan = match resolve_given(program, bindings, threads, around) {
                Err(problem) if is_of_sizes(&problem) => {
                    plan_that_fails(program, bindings, threads, around, &problem).map_err(|_| problem)?
                }
                plan => plan?,
            };
            let plan = Arc::new(plan);
            plan_nested.push(plan.clone());
            self.can_shrink |= plan.can_shrink;
            if self.is_broken(step, position) {
                // Under these bindings the branch cannot be taken.
                continue;
            }
            bytes = bytes.max(plan.host_slab());
            // The maximum, because the subgraphs of a step run one at a time.
            self.nested_own[index] = self.nested_own[index].max(plan.own_peak);
            self.scratch_is_open |= plan.has_dynamic;
        }
        if step.claim.outputs == OutputsFrom::Subgraph {
            // Values that a subgraph returns already count as the step's own outputs.
            let handed = step.outputs.iter().flatten();
            let handed = handed.fold(0, |sum: usize, slot| sum.saturating_add(self.own_bytes(*slot)));
            self.nested_own[index] = self.nested_own[index].saturating_sub(handed);
        }
        if let Some(kernel) = step.work.kernel() {
            let inputs: Vec<Option<Shape>> = step.inputs.iter().map(|slot| self.shape_of(*slot)).collect();
            let outputs: Vec<Option<Shape>> = step.outputs.iter().map(|slot| self.shape_of(*slot)).collect();
            let missing = |slots: &[Option<SlotId>], shapes: &[Option<Shape>]| {
                slots.iter().zip(shapes).any(|(slot, shape)| slot.is_some() && shape.is_none())
            };
            // A kernel that allocates its outputs does not need their shapes in advance.
            let hands_over = step.claim.outputs != OutputsFrom::Plan;
            let is_known = !missing(&step.inputs, &inputs)
                && (hands_over || !missing(&step.outputs, &outputs))
                && step.nested.is_empty();
            // A workspace, too, may depend on sizes that are known only at run time.
            self.scratch_is_open |= !is_known && step.nested.is_empty();
            if is_known {
                let room = self.workspace_limit(step, index);
                let shapes = IoShapes { inputs: &inputs, outputs: &outputs, threads: self.threads, room };
                let wanted = kernel.workspace(&shapes)?;
                // A kernel that can trade speed for workspace declares less if it is asked again
                // with a limit of 0.
                if wanted > 0 && !self.can_shrink && self.slabs[self.slab_of_step(step)] != DeviceId::HOST {
                    self.can_shrink = kernel.workspace(&IoShapes { room: 0, ..shapes })? < wanted;
                }
                bytes = bytes.max(wanted);
                // Heap memory is not in a slab, so it counts like own buffers.
                let heap = kernel.heap(&shapes)?;
                self.nested_own[index] = self.nested_own[index].saturating_add(heap);
                self.heap = heap;
            }
        }
        Ok(bytes)
    }

    /// Returns the known types and elements of the subgraph's inputs and then of its captures.
    /// `position` is the index of the subgraph.
    pub(super) fn known_to(&self, step: &Step, position: usize) -> Vec<Known> {
        let nested = &step.nested[position];
        let inner = step.node.and_then(|node| self.graph.nodes[node].subgraphs.get(position));
        let inputs = inner.map(|inner| {
            let known = |&id| (inner.graph.value(id).ty.clone(), inner.graph.value(id).symbolic.clone());
            inner.graph.inputs.iter().map(known).collect::<Vec<Known>>()
        });
        let captured = nested.captures.iter().map(|slot| {
            let info = self.graph.value(self.program.slots[slot.index()].value);
            (info.ty.clone(), info.symbolic.clone())
        });
        inputs.unwrap_or_default().into_iter().chain(captured).collect()
    }

    /// Whether inference rejected the subgraph at `position`, so that the run cannot take it.
    pub(super) fn is_broken(&self, step: &Step, position: usize) -> bool {
        let inner = step.node.and_then(|node| self.graph.nodes[node].subgraphs.get(position));
        inner.is_some_and(|inner| inner.graph.broken.is_some())
    }
}

/// Whether the sizes of a run may have caused an error of planning. They do not cause errors about
/// memory, devices, deadlines or bugs: these must surface even if the branch is never taken.
fn is_of_sizes(problem: &Error) -> bool {
    use ErrorKind::{Cancelled, EpFail, OutOfMemory, RuntimeException};
    !matches!(problem.kind(), Cancelled | EpFail | OutOfMemory | RuntimeException)
}
