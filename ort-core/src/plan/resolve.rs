//! The memory planner: makes the plan for one binding of the dimensions.
//!
//! It first finds shapes, folded values and the steps that must run. Then it drafts the storage of
//! each step's outputs and workspace, in schedule order. `finish` turns the drafts into offsets.

#![allow(
    clippy::indexing_slicing,
    reason = "ids of slots, steps and groups are made by the program and the planner, whose tables have an entry for each"
)]

use ort_alloc::DeviceId;
use smallvec::SmallVec;

use super::bound::{BoundValues, Boundary, OutputMemory, Planning};
use super::specialize::{Known, specialize};
use super::{Action, RunPlan, StepPlan, ValueKind};
use crate::dim::{Bindings, Dim};
use crate::dtype::DType;
use crate::ep::OutputsFrom;
use crate::ir::Graph;
use crate::program::{Origin, Program, SlotId, Step};
use crate::spec::{SymTensor, Traits};
use crate::tensor::{Shape, Tensor, byte_count};
use crate::{Error, Result};

/// Plans a program under `bindings`. Only in-place updates are bound to buffers.
pub(super) fn resolve(program: &Program, bindings: &Bindings, threads: usize) -> Result<RunPlan> {
    resolve_bound(program, bindings, threads, &program.bound_values(Planning::Shared))
}

/// Plans a program whose inputs and outputs may be bound to buffers.
pub(crate) fn resolve_bound(
    program: &Program,
    bindings: &Bindings,
    threads: usize,
    bound: &BoundValues,
) -> Result<RunPlan> {
    resolve_given(program, bindings, threads, Surroundings { known: &[], bound })
}

/// What a plan depends on besides the program and the bindings of the dimensions.
#[derive(Clone, Copy)]
pub(super) struct Surroundings<'a> {
    /// The types and elements of a subgraph's given values, from the plan of its node. They may be
    /// more precise than the results of the program's own inference. Empty for the outermost
    /// program.
    pub(super) known: &'a [Known],
    pub(super) bound: &'a BoundValues,
}

/// Plans the steps of a program in another order.
pub(super) fn resolve_in(
    program: &Program,
    schedule: Vec<&Step>,
    bindings: &Bindings,
    threads: usize,
) -> Result<RunPlan> {
    let bound = program.bound_values(Planning::Shared);
    let around = Surroundings { known: &[], bound: &bound };
    let specialized = specialize(program, bindings, around.known);
    let graph = specialized.as_ref().unwrap_or(&program.graph);
    let planner = || Planner::new((program, graph), bindings, threads, around.bound);
    plan(|| Planner { schedule: schedule.clone(), ..planner() })
}

/// Plans a program within its surroundings.
pub(super) fn resolve_given(
    program: &Program,
    bindings: &Bindings,
    threads: usize,
    around: Surroundings<'_>,
) -> Result<RunPlan> {
    let specialized = specialize(program, bindings, around.known);
    let graph = specialized.as_ref().unwrap_or(&program.graph);
    let plan = plan(|| Planner::new((program, graph), bindings, threads, around.bound));
    match contradiction(program, bindings) {
        // A kernel may fail to plan because sizes contradict each other. In this case the
        // contradiction is the error.
        Some(problem) => match plan {
            Ok(plan) => Ok(RunPlan { contradiction: Some(problem), ..plan }),
            Err(_) => Err(problem),
        },
        None => plan,
    }
}

/// Returns the plan of a subgraph that cannot be planned for these sizes: a plan without steps and
/// memory, whose run fails with `problem`. It is an error only if the subgraph runs.
pub(super) fn plan_that_fails(
    program: &Program,
    bindings: &Bindings,
    threads: usize,
    around: Surroundings<'_>,
    problem: &Error,
) -> Result<RunPlan> {
    let specialized = specialize(program, bindings, around.known);
    let graph = specialized.as_ref().unwrap_or(&program.graph);
    let mut planner = Planner::new((program, graph), bindings, threads, around.bound);
    // The shapes of the given values tell which runs the plan is for.
    planner.find_shapes();
    planner.needed.fill(false);
    planner.is_output.fill(false);
    Ok(RunPlan { contradiction: Some(problem.clone()), ..planner.place()? })
}

/// Returns the error of the first node whose requirements the sizes do not meet.
fn contradiction(program: &Program, bindings: &Bindings) -> Option<Error> {
    program.graph.requirements.iter().find_map(|requirement| requirement.check(bindings).err())
}

/// Plans with and without concat in place, and returns the plan with the lower peak. Concat in
/// place can raise the peak, because the whole output is live from its first part on.
fn plan<'a>(planner: impl Fn() -> Planner<'a>) -> Result<RunPlan> {
    let mut joining = planner();
    joining.find();
    if !joining.find_concats() {
        return joining.place();
    }
    let joined = joining.place()?;
    // Drafts and lifetimes depend on the choice, so we start over with a fresh planner.
    let mut apart = planner();
    apart.find();
    let apart = apart.place()?;
    // At equal peaks concat in place wins, because it saves the copies.
    Ok(if apart.peak() < joined.peak() { apart } else { joined })
}

/// A set of values that share memory: one interval of a slab.
pub(super) struct Group {
    pub(super) bytes: usize,
    pub(super) slab: usize,
    pub(super) first: usize,
    pub(super) last: usize,
}

/// An output of the graph that can be computed in place of an input of its step.
pub(super) struct InPlaceCandidate {
    pub(super) output: SlotId,
    /// The positions of the output and the input.
    pub(super) pair: (u32, u32),
    /// The group of the input, whose memory begins with the input.
    pub(super) group: usize,
}

/// The storage of a slot before offsets are assigned.
#[derive(Clone)]
pub(super) enum DraftStorage {
    Outside,
    /// The memory of the given value at this position, which belongs to another slot.
    Given(usize),
    Bound(usize),
    Group {
        group: usize,
        offset: usize,
    },
    Own,
    View {
        of: SlotId,
        element_offset: usize,
    },
    Folded(Tensor),
    Dynamic,
    Unused,
}

/// The state of the planner. Its tables have an entry for each slot, step or group.
pub(super) struct Planner<'a> {
    pub(super) program: &'a Program,
    pub(super) bound: &'a BoundValues,
    pub(super) ends: Boundary,
    /// By slot: the memory and the buffer of a bound output.
    pub(super) buffers: Vec<Option<(OutputMemory, usize)>>,
    /// The program's steps in the order to plan.
    pub(super) schedule: Vec<&'a Step>,
    /// The program's graph, specialized to the bindings if that resolves more shapes.
    pub(super) graph: &'a Graph,
    pub(super) bindings: &'a Bindings,
    pub(super) threads: usize,
    pub(super) shapes: Vec<Option<Shape>>,
    pub(super) dtypes: Vec<Option<DType>>,
    pub(super) drafts: Vec<DraftStorage>,
    pub(super) kinds: Vec<ValueKind>,
    /// The last step that reads each slot. A read of a view also counts for the slot behind it, or
    /// for that slot's group (`Group::last`).
    pub(super) last: Vec<usize>,
    /// The step that computes each slot; 0 if no step does.
    pub(super) first: Vec<usize>,
    pub(super) is_output: Vec<bool>,
    /// Whether each step must run.
    pub(super) needed: Vec<bool>,
    /// For each slot that is computed into a part of another slot: that other slot, and the byte
    /// offset in it.
    pub(super) joined: Vec<Option<(SlotId, usize)>>,
    /// Whether each step is a concatenation in place.
    pub(super) joins: Vec<bool>,
    pub(super) groups: Vec<Group>,
    pub(super) slabs: Vec<DeviceId>,
    /// The donated inputs whose memory is reused; that of input `i` has the slab number
    /// `slabs.len() + i`.
    pub(super) donated: Vec<SlotId>,
    pub(super) steps: Vec<StepPlan>,
    /// Outputs that can be computed in place of an input if the input moves into the output's
    /// buffer.
    pub(super) in_place_candidates: Vec<InPlaceCandidate>,
    /// For each step, the group of its workspace.
    pub(super) workspaces: Vec<Option<usize>>,
    /// The groups that hold the device slabs of subgraphs, as pairs (step, group).
    pub(super) nested_slabs: Vec<(usize, usize)>,
    /// For each step, the heap bytes of its kernel, plus the bytes that its subgraphs allocate
    /// outside slabs. The outputs that the subgraphs return to the step do not count here.
    pub(super) nested_own: Vec<usize>,
    /// The heap bytes of the kernel whose workspace was computed last.
    pub(super) heap: usize,
    /// Whether the size of some workspace, or of some value in a subgraph, is known only at run
    /// time.
    pub(super) scratch_is_open: bool,
    /// Whether some device kernel, in a subgraph as well, could run with a smaller workspace.
    pub(super) can_shrink: bool,
}

impl<'a> Planner<'a> {
    pub(super) fn new(
        (program, graph): (&'a Program, &'a Graph),
        bindings: &'a Bindings,
        threads: usize,
        bound: &'a BoundValues,
    ) -> Planner<'a> {
        let count = program.slots.len();
        let mut is_output = vec![false; count];
        let ends = Boundary::of(program, bound);
        for (index, output) in ends.outputs.iter().enumerate() {
            is_output[output.index()] |= bound.wants(index);
        }
        // The host's slab comes first, even if the program has no values there.
        let mut slabs = vec![DeviceId::HOST];
        find_memories(program, &mut slabs);
        Planner {
            program,
            bound,
            buffers: bound.buffers(program, &ends),
            ends,
            schedule: program.steps.iter().collect(),
            graph,
            bindings,
            threads,
            shapes: vec![None; count],
            dtypes: vec![None; count],
            drafts: vec![DraftStorage::Unused; count],
            kinds: vec![ValueKind::Planned; count],
            last: vec![0; count],
            first: vec![0; count],
            is_output,
            needed: vec![true; program.steps.len()],
            joined: vec![None; count],
            joins: vec![false; program.steps.len()],
            groups: Vec::new(),
            slabs,
            donated: Vec::new(),
            steps: Vec::with_capacity(program.steps.len()),
            in_place_candidates: Vec::new(),
            workspaces: vec![None; program.steps.len()],
            nested_slabs: Vec::new(),
            nested_own: vec![0; program.steps.len()],
            heap: 0,
            scratch_is_open: false,
            can_shrink: false,
        }
    }

    /// Finds shapes, folded values and needed steps, before any value is placed.
    fn find(&mut self) {
        self.find_shapes();
        self.place_donated();
        // Both passes below read the shapes and drafts of the first.
        self.find_shared_shapes();
        self.find_needed();
    }

    /// Places the values of all steps in schedule order, and assigns offsets.
    fn place(mut self) -> Result<RunPlan> {
        self.find_last_uses();
        for index in 0..self.schedule.len() {
            self.place_step(index)
                .map_err(|problem| problem.help("check its attributes and the shapes of its inputs"))
                .map_err(|problem| self.schedule[index].failed(problem))?;
        }
        self.check_shared()?;
        self.finish()
    }

    /// Finds the shapes of all slots, and folds values that follow from shapes alone.
    pub(super) fn find_shapes(&mut self) {
        for (index, slot) in self.program.slots.iter().enumerate() {
            let info = self.graph.value(slot.value);
            self.dtypes[index] = info.ty.dtype();
            // With planning off the values of steps have no shape here, which keeps them dynamic.
            if self.bound.planning == Planning::Off && matches!(slot.origin, Origin::Step) {
                continue;
            }
            self.shapes[index] = info.ty.shape().and_then(|shape| evaluate(shape, self.bindings));
            match &slot.origin {
                Origin::Given(given) if self.bound.input(*given).in_buffer => {
                    self.drafts[index] = DraftStorage::Bound(*given);
                }
                Origin::Given(_) | Origin::Consumed => self.drafts[index] = DraftStorage::Outside,
                Origin::Constant(tensor) | Origin::Streamed(tensor) => {
                    self.drafts[index] = DraftStorage::Outside;
                    self.shapes[index] = Some(tensor.shape().into());
                }
                Origin::Step => {
                    // Only host slots: a folded tensor is in host memory.
                    if let (Some(symbolic), Some(dtype), DeviceId::HOST) =
                        (&info.symbolic, info.ty.dtype(), slot.memory)
                        && let Some(tensor) = fold(symbolic, dtype, self.bindings)
                    {
                        self.drafts[index] = DraftStorage::Folded(tensor);
                    }
                }
            }
        }
        self.place_given();
    }

    /// Whether a slot needs no step, because its value exists before the run: it is folded, or
    /// given in the memory in which it is read.
    pub(super) fn exists_before_run(&self, slot: SlotId) -> bool {
        match self.drafts[slot.index()] {
            DraftStorage::Folded(_) | DraftStorage::Given(_) => true,
            // Before outputs are placed, only values given on a device are bound in a step's slot.
            DraftStorage::Bound(_) => matches!(self.program.slots[slot.index()].origin, Origin::Step),
            _ => false,
        }
    }

    /// Marks the steps that must run: those with effects, and those with a wanted output that does
    /// not exist before the run. This is a backward liveness pass.
    pub(super) fn find_needed(&mut self) {
        let mut wanted = self.is_output.clone();
        for (index, step) in self.schedule.iter().enumerate().rev() {
            let mut outputs = step.outputs.iter().flatten();
            let needed = has_effects(self.program, step)
                || outputs.any(|slot| wanted[slot.index()] && !self.exists_before_run(*slot));
            self.needed[index] = needed;
            if needed {
                for read in step.reads() {
                    wanted[read.index()] = true;
                }
            }
        }
        self.place_copies_of_given(&wanted);
    }

    /// Finds the last step that reads each slot. Wanted outputs live past the last step.
    pub(super) fn find_last_uses(&mut self) {
        for (index, step) in self.schedule.iter().enumerate() {
            if self.needed[index] {
                for read in step.reads() {
                    self.last[read.index()] = index;
                }
            }
        }
        let end = self.schedule.len();
        for output in self.ends.outputs.iter().filter(|output| self.is_output[output.index()]) {
            self.last[output.index()] = end;
        }
        self.find_lives_of_donated();
    }

    /// Places the outputs and the workspace of a step. Steps must come in schedule order.
    pub(super) fn place_step(&mut self, index: usize) -> Result<()> {
        let step = self.schedule[index];
        let mut plan = StepPlan {
            action: Action::Skip,
            in_place: SmallVec::new(),
            workspace: 0..0,
            workspace_slab: 0,
            heap: 0,
            nested_slabs: SmallVec::new(),
            release: Vec::new(),
            closes: SmallVec::new(),
            nested: Vec::new(),
        };
        // An output is live at its own step even if no later step reads it.
        for slot in step.outputs.iter().flatten() {
            self.first[slot.index()] = index;
            self.last[slot.index()] = self.last[slot.index()].max(index);
        }
        if self.needed[index] && !self.joins[index] && !self.place_view(step, index) {
            plan.action = Action::Run;
            // Outputs come before the workspace, because its limit is the part of the slab that
            // they leave.
            self.place_outputs(step, index, &mut plan)?;
            self.place_workspace(step, index, &mut plan.nested)?;
            plan.heap = std::mem::take(&mut self.heap);
        }
        self.steps.push(plan);
        Ok(())
    }

    /// Chooses the storage of each output of a step that runs.
    pub(super) fn place_outputs(&mut self, step: &Step, index: usize, plan: &mut StepPlan) -> Result<()> {
        for (position, slot) in step.outputs.iter().enumerate() {
            let Some(slot) = *slot else { continue };
            let place = slot.index();
            // A step that runs for one output also computes its folded outputs, so these get
            // memory, too.
            let bytes = match (self.dtypes[place], &self.shapes[place]) {
                (Some(DType::String) | None, _) | (_, None) => None,
                (Some(dtype), Some(shape)) => Some(byte_count(dtype, shape)?),
            };
            let unread = self.last[place] == index && !self.is_output[place];
            let host = self.program.slots[place].memory == DeviceId::HOST;
            if self.place_bound_output(step, (index, position), bytes, plan)? {
                continue;
            }
            self.drafts[place] = match bytes {
                None => {
                    self.kinds[place] = ValueKind::Dynamic;
                    DraftStorage::Dynamic
                }
                // The kernel or a subgraph allocates the output, so it cannot be in a slab.
                Some(_) if step.claim.outputs != OutputsFrom::Plan => DraftStorage::Own,
                Some(bytes) if self.is_output[place] => {
                    // The output owns its buffer. It can be computed in place of the input only if
                    // `output_reuse` moves the input into that buffer later.
                    if host
                        && let Some((input, DraftStorage::Group { group, offset: 0 })) =
                            self.dying_input(step, (index, position), bytes)
                    {
                        self.in_place_candidates.push(InPlaceCandidate {
                            output: slot,
                            pair: (position as u32, input as u32),
                            group,
                        });
                    }
                    DraftStorage::Own
                }
                Some(_) if let Some(part) = self.joined[place] => {
                    self.kinds[place] = ValueKind::InPlace;
                    self.place_part(part, index)?
                }
                Some(bytes) => {
                    let shared = if unread { None } else { self.share_input(step, (index, position), bytes) };
                    match shared {
                        Some((input, draft)) => {
                            plan.in_place.push((position as u32, input as u32));
                            self.kinds[place] = ValueKind::InPlace;
                            draft
                        }
                        None => self.new_group(slot, index, bytes),
                    }
                }
            };
        }
        Ok(())
    }

    /// Creates the group of an output, in the slab of its memory.
    pub(super) fn new_group(&mut self, slot: SlotId, index: usize, bytes: usize) -> DraftStorage {
        let memory = self.program.slots[slot.index()].memory;
        let slab = self.slabs.iter().position(|slab| *slab == memory).unwrap_or(0);
        self.groups.push(Group { bytes, slab, first: index, last: self.last[slot.index()] });
        DraftStorage::Group { group: self.groups.len() - 1, offset: 0 }
    }

    pub(super) fn shape_of(&self, slot: Option<SlotId>) -> Option<Shape> {
        slot.and_then(|slot| self.shapes[slot.index()].clone())
    }

    /// Returns the elements of a small integer tensor that is known before the run.
    pub(super) fn ints_of(&self, slot: Option<SlotId>) -> Option<Vec<i64>> {
        let slot = slot?;
        let tensor = match (&self.drafts[slot.index()], &self.program.slots[slot.index()].origin) {
            (DraftStorage::Folded(tensor), _) | (_, Origin::Constant(tensor) | Origin::Streamed(tensor)) => {
                tensor
            }
            _ => return None,
        };
        crate::spec::known_ints(Some(tensor.view()))
    }
}

/// Whether a step does more than compute its outputs.
fn has_effects(program: &Program, step: &Step) -> bool {
    let node = step.node.and_then(|node| program.graph.nodes.get(node));
    node.is_some_and(|node| node.spec.traits.has(Traits::EFFECTS))
}

/// Collects the memories in which a program and its subgraphs have values.
fn find_memories(program: &Program, found: &mut Vec<DeviceId>) {
    for slot in &program.slots {
        if !found.contains(&slot.memory) {
            found.push(slot.memory);
        }
    }
    for nested in program.steps.iter().flat_map(|step| &step.nested) {
        find_memories(&nested.program, found);
    }
}

/// Evaluates a shape under the bindings. None if a size is unbound or invalid.
pub(super) fn evaluate(shape: &[Dim], bindings: &Bindings) -> Option<Shape> {
    let size = |dim: &Dim| usize::try_from(dim.evaluate(bindings).ok()?).ok();
    shape.iter().map(size).collect::<Option<SmallVec<_>>>()
}

/// Evaluates a symbolic tensor under the bindings. None if an element is unbound or does not fit
/// `dtype`.
fn fold(symbolic: &SymTensor, dtype: DType, bindings: &Bindings) -> Option<Tensor> {
    let ints: Option<Vec<i64>> = symbolic.elements.iter().map(|dim| dim.evaluate(bindings).ok()).collect();
    symbolic.to_tensor(dtype, &ints?)
}
