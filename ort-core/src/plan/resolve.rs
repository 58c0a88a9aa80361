//! Makes the plan for one binding of the dimensions.

#![allow(
    clippy::indexing_slicing,
    reason = "ids of slots, steps and groups are made by the program and the planner, whose tables have an entry for each"
)]

use ort_alloc::DeviceId;
use smallvec::SmallVec;

use super::bound::{BoundValues, OutputMemory, Planning, WorkspaceRoom};
use super::boundary::Boundary;
use super::specialize::{Known, specialize};
use super::{Action, RunPlan, StepPlan, ValueKind};
use crate::dim::{Bindings, Dim};
use crate::dtype::DType;
use crate::ep::OutputsFrom;
use crate::ir::Graph;
use crate::program::{Origin, Program, SlotId, Step};
use crate::spec::SymTensor;
use crate::tensor::{Shape, Tensor, byte_count};
use crate::{Result, Within};

/// Plans one program under `bindings`.
pub(super) fn resolve(program: &Program, bindings: &Bindings, threads: usize) -> Result<RunPlan> {
    resolve_bound(program, bindings, threads, &program.bound_values(Planning::Shared))
}

/// Plans a program some of whose inputs and outputs lie in buffers of a binding.
pub(crate) fn resolve_bound(
    program: &Program,
    bindings: &Bindings,
    threads: usize,
    bound: &BoundValues,
) -> Result<RunPlan> {
    resolve_given(program, bindings, threads, Surroundings { known: &[], bound })
}

/// What a plan knows besides the program and the sizes.
#[derive(Clone, Copy)]
pub(super) struct Surroundings<'a> {
    /// Given values that are known better than the program's own inference knew them: those of a
    /// subgraph, from the plan of its node.
    pub(super) known: &'a [Known],
    pub(super) bound: &'a BoundValues,
}

impl Default for Surroundings<'_> {
    fn default() -> Self {
        static NOTHING: BoundValues = BoundValues {
            planning: Planning::Shared,
            inputs: Vec::new(),
            outputs: Vec::new(),
            room: WorkspaceRoom::ANY,
        };
        Surroundings { known: &[], bound: &NOTHING }
    }
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

/// Plans a program with what is known around it.
pub(super) fn resolve_given(
    program: &Program,
    bindings: &Bindings,
    threads: usize,
    around: Surroundings<'_>,
) -> Result<RunPlan> {
    let specialized = specialize(program, bindings, around.known);
    let graph = specialized.as_ref().unwrap_or(&program.graph);
    plan(|| Planner::new((program, graph), bindings, threads, around.bound))
}

/// The plan with joined values in the place of their parts, or without, where that takes less: what
/// is joined may live long before all its parts do.
fn plan<'a>(planner: impl Fn() -> Planner<'a>) -> Result<RunPlan> {
    let mut joining = planner();
    joining.find();
    if !joining.find_joins() {
        return joining.place();
    }
    let joined = joining.place()?;
    let mut apart = planner();
    apart.find();
    let apart = apart.place()?;
    Ok(if apart.peak() < joined.peak() { apart } else { joined })
}

/// Values that share memory: one interval of a slab.
pub(super) struct Group {
    pub(super) bytes: usize,
    pub(super) slab: usize,
    pub(super) first: usize,
    pub(super) last: usize,
}

/// An output of the graph that can be computed in the place of an input of its step.
pub(super) struct InPlaceCandidate {
    pub(super) output: SlotId,
    /// The positions of output and input.
    pub(super) pair: (u32, u32),
    /// The input's memory, which begins with it.
    pub(super) group: usize,
}

/// Where a slot will live, as far as decided.
#[derive(Clone)]
pub(super) enum Draft {
    Outside,
    /// Where the given value at this position lies, which is another slot's.
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

pub(super) struct Planner<'a> {
    pub(super) program: &'a Program,
    pub(super) bound: &'a BoundValues,
    pub(super) ends: Boundary,
    /// The buffers of bound outputs, by slot.
    pub(super) buffers: Vec<Option<(OutputMemory, usize)>>,
    /// The program's steps in the order that is planned.
    pub(super) schedule: Vec<&'a Step>,
    /// The program's graph, as far as it is inferred under the bindings.
    pub(super) graph: &'a Graph,
    pub(super) bindings: &'a Bindings,
    pub(super) threads: usize,
    pub(super) shapes: Vec<Option<Shape>>,
    pub(super) dtypes: Vec<Option<DType>>,
    pub(super) drafts: Vec<Draft>,
    pub(super) kinds: Vec<ValueKind>,
    /// The last step that reads each slot, views of it included.
    pub(super) last: Vec<usize>,
    pub(super) first: Vec<usize>,
    pub(super) is_output: Vec<bool>,
    pub(super) needed: Vec<bool>,
    /// For each slot that is computed in a part of another: that one, and the byte at which it
    /// begins there.
    pub(super) joined: Vec<Option<(SlotId, usize)>>,
    /// The steps whose inputs are parts of their output.
    pub(super) joins: Vec<bool>,
    pub(super) groups: Vec<Group>,
    pub(super) slabs: Vec<DeviceId>,
    pub(super) steps: Vec<StepPlan>,
    /// Outputs that can be computed in the place of an input, if that is in their buffer.
    pub(super) in_place_candidates: Vec<InPlaceCandidate>,
    /// For each step, the group that is its workspace.
    pub(super) workspaces: Vec<Option<usize>>,
    /// The groups that are the slabs of subgraphs on devices, each with its step.
    pub(super) nested_slabs: Vec<(usize, usize)>,
    /// For each step, the bytes that its subgraphs own, slabs not included, beyond the outputs they
    /// hand over.
    pub(super) nested_own: Vec<usize>,
    /// What the kernel whose scratch memory was last asked for takes of the heap.
    pub(super) heap: usize,
    /// Whether some workspace, or value of a subgraph, has a size that only the run tells.
    pub(super) scratch_is_open: bool,
    /// Whether some workspace is larger than its kernel cannot do without.
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
            drafts: vec![Draft::Unused; count],
            kinds: vec![ValueKind::Planned; count],
            last: vec![0; count],
            first: vec![0; count],
            is_output,
            needed: vec![true; program.steps.len()],
            joined: vec![None; count],
            joins: vec![false; program.steps.len()],
            groups: Vec::new(),
            slabs,
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

    /// What is known before anything has a place.
    fn find(&mut self) {
        self.find_shapes();
        self.find_shared_shapes();
        self.find_needed();
    }

    /// Gives everything its place.
    fn place(mut self) -> Result<RunPlan> {
        self.find_last_uses();
        for index in 0..self.schedule.len() {
            self.place_step(index)
                .map_err(|problem| problem.help("check its attributes and the shapes of its inputs"))
                .within(|| self.schedule[index].place())?;
        }
        self.check_shared()?;
        self.finish()
    }

    /// Shapes of all slots, and the values that follow from the shapes alone.
    pub(super) fn find_shapes(&mut self) {
        for (index, slot) in self.program.slots.iter().enumerate() {
            let info = self.graph.value(slot.value);
            self.dtypes[index] = info.ty.dtype();
            if self.bound.planning == Planning::Off && matches!(slot.origin, Origin::Step) {
                continue;
            }
            self.shapes[index] = info.ty.shape().and_then(|shape| evaluate(shape, self.bindings));
            match &slot.origin {
                Origin::Given(given) if self.bound.input(*given).in_buffer => {
                    self.drafts[index] = Draft::Bound(*given);
                }
                Origin::Given(_) | Origin::Consumed => self.drafts[index] = Draft::Outside,
                Origin::Constant(tensor) | Origin::Streamed(tensor) => {
                    self.drafts[index] = Draft::Outside;
                    self.shapes[index] = Some(tensor.shape().into());
                }
                Origin::Step => {
                    if let (Some(symbolic), Some(dtype), DeviceId::HOST) =
                        (&info.symbolic, info.ty.dtype(), slot.memory)
                        && let Some(tensor) = fold(symbolic, dtype, self.bindings)
                    {
                        self.drafts[index] = Draft::Folded(tensor);
                    }
                }
            }
        }
        self.place_given();
    }

    /// Whether what a step would compute is there before anything runs: known from the shapes, or
    /// given where it is read.
    pub(super) fn is_there(&self, slot: SlotId) -> bool {
        match self.drafts[slot.index()] {
            Draft::Folded(_) | Draft::Given(_) => true,
            Draft::Bound(_) => matches!(self.program.slots[slot.index()].origin, Origin::Step),
            _ => false,
        }
    }

    /// Which steps must run: those whose outputs somebody reads and that are not folded.
    pub(super) fn find_needed(&mut self) {
        let mut wanted = self.is_output.clone();
        for (index, step) in self.schedule.iter().enumerate().rev() {
            let mut outputs = step.outputs.iter().flatten();
            let needed = outputs.any(|slot| wanted[slot.index()] && !self.is_there(*slot));
            self.needed[index] = needed;
            if needed {
                for read in step.reads() {
                    wanted[read.index()] = true;
                }
            }
        }
        self.place_copies_of_given(&wanted);
    }

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
    }

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
            nested: Vec::new(),
        };
        for slot in step.outputs.iter().flatten() {
            self.first[slot.index()] = index;
            self.last[slot.index()] = self.last[slot.index()].max(index);
        }
        if self.needed[index] && !self.joins[index] && !self.place_view(step, index) {
            plan.action = Action::Run;
            self.place_outputs(step, index, &mut plan)?;
            self.place_workspace(step, index, &mut plan.nested)?;
            plan.heap = std::mem::take(&mut self.heap);
        }
        self.steps.push(plan);
        Ok(())
    }

    pub(super) fn place_outputs(&mut self, step: &Step, index: usize, plan: &mut StepPlan) -> Result<()> {
        for (position, slot) in step.outputs.iter().enumerate() {
            let Some(slot) = *slot else { continue };
            let place = slot.index();
            // A step that runs for one output also computes those that are folded.
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
                    Draft::Dynamic
                }
                Some(_) if step.claim.outputs != OutputsFrom::Plan => Draft::Own,
                Some(bytes) if self.is_output[place] => {
                    if host
                        && let Some((input, Draft::Group { group, offset: 0 })) =
                            self.dying_input(step, (index, position), bytes)
                    {
                        self.in_place_candidates.push(InPlaceCandidate {
                            output: slot,
                            pair: (position as u32, input as u32),
                            group,
                        });
                    }
                    Draft::Own
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

    pub(super) fn new_group(&mut self, slot: SlotId, index: usize, bytes: usize) -> Draft {
        let memory = self.program.slots[slot.index()].memory;
        let slab = self.slabs.iter().position(|slab| *slab == memory).unwrap_or(0);
        self.groups.push(Group { bytes, slab, first: index, last: self.last[slot.index()] });
        Draft::Group { group: self.groups.len() - 1, offset: 0 }
    }

    pub(super) fn shape_of(&self, slot: Option<SlotId>) -> Option<Shape> {
        slot.and_then(|slot| self.shapes[slot.index()].clone())
    }

    pub(super) fn ints_of(&self, slot: Option<SlotId>) -> Option<Vec<i64>> {
        let slot = slot?;
        let tensor = match (&self.drafts[slot.index()], &self.program.slots[slot.index()].origin) {
            (Draft::Folded(tensor), _) | (_, Origin::Constant(tensor) | Origin::Streamed(tensor)) => tensor,
            _ => return None,
        };
        crate::spec::known_ints(Some(tensor.view()))
    }
}

/// Adds the memories that a program and its subgraphs have values in.
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

/// A shape as numbers; none where a size is not bound or not valid.
pub(super) fn evaluate(shape: &[Dim], bindings: &Bindings) -> Option<Shape> {
    let size = |dim: &Dim| usize::try_from(dim.evaluate(bindings).ok()?).ok();
    shape.iter().map(size).collect::<Option<SmallVec<_>>>()
}

fn fold(symbolic: &SymTensor, dtype: DType, bindings: &Bindings) -> Option<Tensor> {
    let ints: Option<Vec<i64>> = symbolic.elements.iter().map(|dim| dim.evaluate(bindings).ok()).collect();
    symbolic.to_tensor(dtype, &ints?)
}
