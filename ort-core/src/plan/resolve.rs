//! Makes the plan for one binding of the dimensions.

#![allow(
    clippy::indexing_slicing,
    reason = "ids of slots, steps and groups are made by the program and the planner, whose tables have an entry for each"
)]

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use ort_alloc::{DeviceId, Interval};
use smallvec::SmallVec;

use super::bound::{BoundValues, OutputMemory};
use super::specialize::{Known, specialize};
use super::{Action, Place, RunPlan, SlotPlan, StepPlan, ValueKind};
use crate::dim::{Bindings, Dim};
use crate::dtype::DType;
use crate::ep::{IoShapes, OutputsFrom};
use crate::ir::Graph;
use crate::session::{Origin, Program, SlotId, Step, Work};
use crate::spec::{SymTensor, ViewCx};
use crate::tensor::{Shape, Tensor, byte_count};
use crate::{Result, Within, error};

/// Plans one program under `bindings`.
pub(crate) fn resolve(program: &Program, bindings: &Bindings, threads: usize) -> Result<RunPlan> {
    resolve_given(program, bindings, threads, Surroundings::default())
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
struct Surroundings<'a> {
    /// Given values that are known better than the program's own inference knew them: those of a subgraph, from the
    /// plan of its node.
    known: &'a [Known],
    bound: &'a BoundValues,
}

impl Default for Surroundings<'_> {
    fn default() -> Self {
        static NOTHING: BoundValues = BoundValues { inputs: Vec::new(), outputs: Vec::new() };
        Surroundings { known: &[], bound: &NOTHING }
    }
}

fn resolve_given(
    program: &Program,
    bindings: &Bindings,
    threads: usize,
    around: Surroundings<'_>,
) -> Result<RunPlan> {
    let specialized = specialize(program, bindings, around.known);
    let graph = specialized.as_ref().unwrap_or(&program.graph);
    let mut planner = Planner::new((program, graph), bindings, threads, around.bound);
    planner.find_shapes()?;
    planner.find_shared_shapes();
    planner.find_needed();
    planner.find_last_uses();
    for index in 0..program.steps.len() {
        planner
            .place_step(index)
            .map_err(|problem| problem.help("check its attributes and the shapes of its inputs"))
            .within(|| program.steps[index].place())?;
    }
    planner.check_shared()?;
    planner.finish()
}

/// Values that share memory: one interval of a slab.
struct Group {
    bytes: usize,
    slab: usize,
    first: usize,
    last: usize,
}

/// Where a slot will live, as far as decided.
#[derive(Clone)]
pub(super) enum Draft {
    Outside,
    Bound(usize),
    Group { group: usize, offset: usize },
    Own,
    View { of: SlotId, element_offset: usize },
    Folded(Tensor),
    Dynamic,
    Unused,
}

pub(super) struct Planner<'a> {
    pub(super) program: &'a Program,
    pub(super) bound: &'a BoundValues,
    /// The buffers of bound outputs, by slot.
    pub(super) buffers: Vec<Option<(OutputMemory, usize)>>,
    /// The program's graph, as far as it is inferred under the bindings.
    graph: &'a Graph,
    bindings: &'a Bindings,
    threads: usize,
    pub(super) shapes: Vec<Option<Shape>>,
    pub(super) dtypes: Vec<Option<DType>>,
    pub(super) drafts: Vec<Draft>,
    kinds: Vec<ValueKind>,
    /// The last step that reads each slot, views of it included.
    pub(super) last: Vec<usize>,
    first: Vec<usize>,
    pub(super) is_output: Vec<bool>,
    needed: Vec<bool>,
    groups: Vec<Group>,
    slabs: Vec<DeviceId>,
    steps: Vec<StepPlan>,
    /// For each step, the group that is its workspace.
    workspaces: Vec<Option<usize>>,
    /// For each step, the bytes that its subgraphs own, device slabs included, beyond the outputs they hand over.
    nested_own: Vec<usize>,
    /// Whether some subgraph has values whose size only the run tells.
    nested_dynamic: bool,
}

impl<'a> Planner<'a> {
    fn new(
        (program, graph): (&'a Program, &'a Graph),
        bindings: &'a Bindings,
        threads: usize,
        bound: &'a BoundValues,
    ) -> Planner<'a> {
        let count = program.slots.len();
        let mut is_output = vec![false; count];
        for (index, output) in program.outputs.iter().enumerate() {
            is_output[output.index()] |= bound.wants(index);
        }
        let mut slabs = vec![DeviceId::HOST];
        for slot in &program.slots {
            if !slabs.contains(&slot.memory) {
                slabs.push(slot.memory);
            }
        }
        Planner {
            program,
            bound,
            buffers: bound.buffers(program),
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
            groups: Vec::new(),
            slabs,
            steps: Vec::with_capacity(program.steps.len()),
            workspaces: vec![None; program.steps.len()],
            nested_own: vec![0; program.steps.len()],
            nested_dynamic: false,
        }
    }

    /// Shapes of all slots, and the values that follow from the shapes alone.
    fn find_shapes(&mut self) -> Result<()> {
        for (index, slot) in self.program.slots.iter().enumerate() {
            let info = self.graph.value(slot.value);
            self.dtypes[index] = info.ty.dtype();
            self.shapes[index] = info.ty.shape().and_then(|shape| evaluate(shape, self.bindings));
            match &slot.origin {
                Origin::Given(given) if self.bound.inputs.get(*given) == Some(&true) => {
                    self.drafts[index] = Draft::Bound(*given);
                }
                Origin::Given(_) | Origin::Consumed => self.drafts[index] = Draft::Outside,
                Origin::Constant(tensor) => {
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
        Ok(())
    }

    fn is_folded(&self, slot: SlotId) -> bool {
        matches!(self.drafts[slot.index()], Draft::Folded(_))
    }

    /// Which steps must run: those whose outputs somebody reads and that are not folded.
    fn find_needed(&mut self) {
        let mut wanted = self.is_output.clone();
        for (index, step) in self.program.steps.iter().enumerate().rev() {
            let mut outputs = step.outputs.iter().flatten();
            let needed = outputs.any(|slot| wanted[slot.index()] && !self.is_folded(*slot));
            self.needed[index] = needed;
            if needed {
                for read in step.reads() {
                    wanted[read.index()] = true;
                }
            }
        }
    }

    fn find_last_uses(&mut self) {
        for (index, step) in self.program.steps.iter().enumerate() {
            if self.needed[index] {
                for read in step.reads() {
                    self.last[read.index()] = index;
                }
            }
        }
        let end = self.program.steps.len();
        for output in self.program.outputs.iter().filter(|output| self.is_output[output.index()]) {
            self.last[output.index()] = end;
        }
    }

    fn place_step(&mut self, index: usize) -> Result<()> {
        let step = &self.program.steps[index];
        let mut plan = StepPlan {
            action: Action::Skip,
            in_place: SmallVec::new(),
            workspace: 0..0,
            release: Vec::new(),
            nested: Vec::new(),
        };
        for slot in step.outputs.iter().flatten() {
            self.first[slot.index()] = index;
            self.last[slot.index()] = self.last[slot.index()].max(index);
        }
        if self.needed[index] && !self.place_view(step, index) {
            plan.action = Action::Run;
            self.place_outputs(step, index, &mut plan)?;
            self.place_workspace(step, index, &mut plan.nested)?;
        }
        self.steps.push(plan);
        Ok(())
    }

    /// Makes the outputs parts of an input where the operator's record says they are.
    fn place_view(&mut self, step: &Step, index: usize) -> bool {
        let Some(node) = step.node.map(|node| &self.program.graph.nodes[node]) else { return false };
        let Some(view) = node.spec.view else { return false };
        let outputs: Vec<SlotId> = step.outputs.iter().flatten().copied().collect();
        // An output of the graph owns its memory, so it is copied rather than a view.
        if outputs.iter().any(|slot| self.is_output[slot.index()] || self.shapes[slot.index()].is_none()) {
            return false;
        }
        let inputs: Vec<Option<Shape>> = step.inputs.iter().map(|slot| self.shape_of(*slot)).collect();
        let ints: Vec<Option<Vec<i64>>> = step.inputs.iter().map(|slot| self.ints_of(*slot)).collect();
        let output_shapes: Vec<Option<Shape>> =
            step.outputs.iter().map(|slot| self.shape_of(*slot)).collect();
        let cx = ViewCx { attrs: &node.attrs, inputs: &inputs, ints: &ints, outputs: &output_shapes };
        let Some(of) = view(&cx) else { return false };
        let Some(root) = step.inputs.get(of.input).copied().flatten() else { return false };
        if self.program.slots[root.index()].memory != self.program.slots[outputs[0].index()].memory {
            return false;
        }
        // A view of an unaligned weight could not be read as a slice; the kernel copies it to aligned memory.
        if matches!(&self.program.slots[root.index()].origin, Origin::Constant(tensor) if !tensor.is_aligned())
        {
            return false;
        }
        if matches!(self.drafts[root.index()], Draft::Dynamic) && self.shapes[root.index()].is_none() {
            return false;
        }
        let mut drafts = Vec::new();
        for (position, slot) in step.outputs.iter().enumerate() {
            let Some(slot) = slot else { continue };
            let Some(&offset) = of.offsets.get(position) else { return false };
            let Some(draft) = self.part_of(root, offset) else { return false };
            drafts.push((*slot, draft));
        }
        for (slot, draft) in drafts {
            self.extend_life(root, self.last[slot.index()].max(index));
            self.drafts[slot.index()] = draft;
            self.kinds[slot.index()] = ValueKind::View;
        }
        true
    }

    fn part_of(&self, root: SlotId, element_offset: usize) -> Option<Draft> {
        let bits = self.dtypes[root.index()]?.bits()? as usize;
        let bit_offset = element_offset.checked_mul(bits)?;
        if bit_offset % 8 != 0 {
            return None;
        }
        match &self.drafts[root.index()] {
            Draft::Group { group, offset } => {
                Some(Draft::Group { group: *group, offset: offset + bit_offset / 8 })
            }
            Draft::View { of, element_offset: base } => {
                Some(Draft::View { of: *of, element_offset: base + element_offset })
            }
            Draft::Outside | Draft::Bound(_) | Draft::Own | Draft::Folded(_) | Draft::Dynamic => {
                Some(Draft::View { of: root, element_offset })
            }
            Draft::Unused => None,
        }
    }

    /// Keeps the memory that `slot` lives in alive until `last`.
    fn extend_life(&mut self, slot: SlotId, last: usize) {
        match self.drafts[slot.index()].clone() {
            Draft::Group { group, .. } => self.groups[group].last = self.groups[group].last.max(last),
            Draft::View { of, .. } => self.extend_life(of, last),
            _ => self.last[slot.index()] = self.last[slot.index()].max(last),
        }
    }

    fn place_outputs(&mut self, step: &Step, index: usize, plan: &mut StepPlan) -> Result<()> {
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
            let from_plan =
                step.claim.outputs == OutputsFrom::Plan && self.dtypes[place] != Some(DType::String);
            let buffer = self.buffers[place].filter(|_| from_plan);
            if let Some((OutputMemory::Input(input), _)) = buffer {
                self.share_bound_input(step, (index, position), input, plan)?;
            }
            let is_kept = |memory: OutputMemory| memory != OutputMemory::Kept || bytes.is_some();
            if let Some((_, buffer)) = buffer.filter(|(memory, _)| is_kept(*memory)) {
                self.drafts[place] = Draft::Bound(buffer);
                continue;
            }
            self.drafts[place] = match bytes {
                None => {
                    self.kinds[place] = ValueKind::Dynamic;
                    Draft::Dynamic
                }
                Some(_) if step.claim.outputs == OutputsFrom::Kernel => Draft::Own,
                Some(_) if self.is_output[place] && host => Draft::Own,
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

    fn new_group(&mut self, slot: SlotId, index: usize, bytes: usize) -> Draft {
        let memory = self.program.slots[slot.index()].memory;
        let slab = self.slabs.iter().position(|slab| *slab == memory).unwrap_or(0);
        self.groups.push(Group { bytes, slab, first: index, last: self.last[slot.index()] });
        Draft::Group { group: self.groups.len() - 1, offset: 0 }
    }

    /// An input whose memory the output may take over: equally long, and dead after this step.
    fn share_input(
        &mut self,
        step: &Step,
        (index, position): (usize, usize),
        bytes: usize,
    ) -> Option<(usize, Draft)> {
        let output = step.outputs[position]?;
        for &(input, _) in step.claim.in_place.iter().filter(|(_, output)| *output == position) {
            let Some(slot) = step.inputs.get(input).copied().flatten() else { continue };
            let Draft::Group { group, .. } = self.drafts[slot.index()] else { continue };
            let same_bytes = match (self.dtypes[slot.index()], &self.shapes[slot.index()]) {
                (Some(dtype), Some(shape)) => byte_count(dtype, shape).ok() == Some(bytes),
                _ => false,
            };
            let dead = self.groups[group].last <= index && self.last[slot.index()] <= index;
            let same_memory =
                self.program.slots[slot.index()].memory == self.program.slots[output.index()].memory;
            let once = step.reads().filter(|other| self.group_of(*other) == Some(group)).count() == 1;
            let taken = step.outputs.iter().take(position).flatten();
            let free = taken.clone().all(|other| self.group_of(*other) != Some(group));
            if same_bytes && dead && same_memory && once && free {
                self.groups[group].last = self.last[output.index()];
                return Some((input, self.drafts[slot.index()].clone()));
            }
        }
        None
    }

    fn group_of(&self, slot: SlotId) -> Option<usize> {
        match self.drafts[slot.index()] {
            Draft::Group { group, .. } => Some(group),
            _ => None,
        }
    }

    /// Scratch memory: what the kernel declares, or the slab of the largest subgraph.
    fn place_workspace(
        &mut self,
        step: &Step,
        index: usize,
        plan_nested: &mut Vec<Arc<RunPlan>>,
    ) -> Result<()> {
        let mut bytes = 0;
        for (position, nested) in step.nested.iter().enumerate() {
            let given = self.known_to(step, position);
            let around = Surroundings { known: &given, ..Surroundings::default() };
            let plan = resolve_given(&nested.program, self.bindings, self.threads, around)?;
            let plan = Arc::new(plan);
            plan_nested.push(plan.clone());
            if self.is_broken(step, position) {
                // Under these bindings it cannot be taken.
                continue;
            }
            bytes = bytes.max(plan.host_slab());
            let devices: usize = plan.slabs.iter().skip(1).map(|slab| slab.1).sum();
            self.nested_own[index] = self.nested_own[index].max(plan.own_peak + devices);
            self.nested_dynamic |= plan.has_dynamic;
        }
        let handed: usize = step.outputs.iter().flatten().map(|slot| self.own_bytes(*slot)).sum();
        self.nested_own[index] = self.nested_own[index].saturating_sub(handed);
        if let Work::Kernel(kernel) = &step.work {
            let inputs: Vec<Option<Shape>> = step.inputs.iter().map(|slot| self.shape_of(*slot)).collect();
            let outputs: Vec<Option<Shape>> = step.outputs.iter().map(|slot| self.shape_of(*slot)).collect();
            let missing = |slots: &[Option<SlotId>], shapes: &[Option<Shape>]| {
                slots.iter().zip(shapes).any(|(slot, shape)| slot.is_some() && shape.is_none())
            };
            if !missing(&step.inputs, &inputs) && !missing(&step.outputs, &outputs) && step.nested.is_empty()
            {
                let shapes = IoShapes { inputs: &inputs, outputs: &outputs, threads: self.threads };
                bytes = bytes.max(kernel.workspace(&shapes)?);
            }
        }
        if bytes > 0 {
            self.groups.push(Group { bytes, slab: 0, first: index, last: index });
            self.workspaces[index] = Some(self.groups.len() - 1);
        }
        Ok(())
    }

    /// What the subgraph at `position` is given, as far as it is known here.
    fn known_to(&self, step: &Step, position: usize) -> Vec<Known> {
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

    fn is_broken(&self, step: &Step, position: usize) -> bool {
        let inner = step.node.and_then(|node| self.graph.nodes[node].subgraphs.get(position));
        inner.is_some_and(|inner| inner.graph.broken.is_some())
    }

    fn shape_of(&self, slot: Option<SlotId>) -> Option<Shape> {
        slot.and_then(|slot| self.shapes[slot.index()].clone())
    }

    fn ints_of(&self, slot: Option<SlotId>) -> Option<Vec<i64>> {
        let slot = slot?;
        let tensor = match (&self.drafts[slot.index()], &self.program.slots[slot.index()].origin) {
            (Draft::Folded(tensor), _) | (_, Origin::Constant(tensor)) => tensor,
            _ => return None,
        };
        crate::spec::known_ints(Some(tensor.view()))
    }

    fn finish(mut self) -> Result<RunPlan> {
        let intervals: Vec<Interval> = self
            .groups
            .iter()
            .map(|group| Interval {
                bytes: group.bytes,
                first: group.first,
                last: group.last,
                lane: group.slab as u32,
                alignment: 64,
                alias: None,
            })
            .collect();
        let plan = ort_alloc::plan(&intervals)
            .map_err(|problem| error!(OutOfMemory, "the memory plan does not work out: {problem}"))?;
        let slab_bytes = |slab: usize| plan.lane(slab as u32).map_or(0, |lane| lane.bytes);
        let slabs = self.slabs.iter().enumerate().map(|(slab, id)| (*id, slab_bytes(slab))).collect();
        for (step, group) in self.steps.iter_mut().zip(&self.workspaces) {
            if let Some(group) = *group {
                step.workspace = plan.offsets[group]..plan.offsets[group] + self.groups[group].bytes;
            }
        }
        self.find_releases();
        let (own_peak, live) = self.measure();
        let (copied, unknown) = self.copied_outputs();
        let has_dynamic =
            unknown || self.nested_dynamic || self.drafts.iter().any(|draft| matches!(draft, Draft::Dynamic));
        let outputs = self.own_outputs() + copied;
        let own_peak = own_peak.max(outputs);
        let slots = (0..self.drafts.len()).map(|index| self.slot_plan(index, &plan.offsets)).collect();
        let lower_bound = live.iter().copied().max().unwrap_or(0).max(outputs);
        Ok(RunPlan { slots, steps: self.steps, slabs, own_peak, lower_bound, live, has_dynamic })
    }

    /// The bytes of a slot that has a buffer of its own, else 0.
    fn own_bytes(&self, slot: SlotId) -> usize {
        match (&self.drafts[slot.index()], self.dtypes[slot.index()], &self.shapes[slot.index()]) {
            (Draft::Own, Some(dtype), Some(shape)) => byte_count(dtype, shape).unwrap_or(0),
            _ => 0,
        }
    }

    /// The bytes of the outputs that steps write into buffers of their own.
    fn own_outputs(&self) -> usize {
        let outputs = (0..self.is_output.len()).filter(|index| self.is_output[*index]);
        outputs.map(|index| self.own_bytes(SlotId(index as u32))).sum()
    }

    /// The bytes of the outputs that are inputs, constants or folded: the end of a run copies them, because an
    /// output owns its memory. Also whether the size of one is not known.
    fn copied_outputs(&self) -> (usize, bool) {
        let mut copied = 0;
        let mut unknown = false;
        for (output, slot) in self.program.outputs.iter().enumerate() {
            let index = slot.index();
            // A bound output has a buffer to be copied to.
            let bound = self.bound.outputs.get(output).is_some();
            if bound || !matches!(self.drafts[index], Draft::Outside | Draft::Folded(_)) {
                continue;
            }
            match (self.dtypes[index], &self.shapes[index]) {
                (Some(dtype), Some(shape)) => copied += byte_count(dtype, shape).unwrap_or(0),
                _ => unknown = true,
            }
        }
        (copied, unknown)
    }

    fn slot_plan(&self, index: usize, offsets: &[usize]) -> SlotPlan {
        let shape = self.shapes[index].clone();
        let bytes = match (self.dtypes[index], &shape) {
            (Some(dtype), Some(shape)) => byte_count(dtype, shape).unwrap_or(0),
            _ => 0,
        };
        let place = match self.drafts[index].clone() {
            Draft::Outside => Place::Outside,
            Draft::Bound(buffer) => Place::Bound(buffer),
            Draft::Group { group, offset } => {
                let start = offsets[group] + offset;
                Place::Slab { slab: self.groups[group].slab, range: start..start + bytes }
            }
            Draft::Own => Place::Own,
            Draft::View { of, element_offset } => Place::View { of, element_offset },
            Draft::Folded(tensor) => Place::Folded(tensor),
            Draft::Dynamic => Place::Dynamic,
            Draft::Unused => Place::Unused,
        };
        let life = (self.first[index], self.last[index]);
        SlotPlan { dtype: self.dtypes[index], shape, place, kind: self.kinds[index], life }
    }

    /// Values with memory of their own go after their last use.
    fn find_releases(&mut self) {
        for (index, draft) in self.drafts.iter().enumerate() {
            let owned = matches!(draft, Draft::Own | Draft::Dynamic);
            let from_step = matches!(self.program.slots[index].origin, Origin::Step);
            if owned && from_step && !self.is_output[index] {
                let last = self.last[index].min(self.steps.len() - 1);
                self.steps[last].release.push(SlotId(index as u32));
            }
        }
    }

    /// The most bytes of own buffers at once, and the bytes alive after each step.
    fn measure(&self) -> (usize, Vec<usize>) {
        let count = self.steps.len();
        let mut own = vec![0i128; count + 1];
        let mut all = vec![0i128; count + 1];
        for (index, draft) in self.drafts.iter().enumerate() {
            if matches!(draft, Draft::Own) {
                let bytes = self.own_bytes(SlotId(index as u32)) as i128;
                let last = (self.last[index] + 1).min(count);
                for changes in [&mut own, &mut all] {
                    changes[self.first[index]] += bytes;
                    changes[last] -= bytes;
                }
            }
        }
        for (index, bytes) in self.nested_own.iter().enumerate() {
            for changes in [&mut own, &mut all] {
                changes[index] += *bytes as i128;
                changes[index + 1] -= *bytes as i128;
            }
        }
        for group in &self.groups {
            all[group.first] += group.bytes as i128;
            all[(group.last + 1).min(count)] -= group.bytes as i128;
        }
        let sums = |changes: &[i128]| -> Vec<usize> {
            let running = changes.iter().take(count).scan(0i128, |sum, change| {
                *sum += change;
                Some(*sum as usize)
            });
            running.collect()
        };
        (sums(&own).into_iter().max().unwrap_or(0), sums(&all))
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

/// The bytes of workspaces and values by name at the step with the most bytes alive.
pub(crate) fn largest_at_peak(plan: &RunPlan, program: &Program) -> Vec<(String, usize)> {
    let peak = plan.live.iter().enumerate().max_by_key(|(_, bytes)| **bytes).map_or(0, |(step, _)| step);
    let mut by_name: BTreeMap<String, usize> = BTreeMap::new();
    // What is in place of something else takes no further bytes.
    let mut counted = HashSet::new();
    for (slot, planned) in program.slots.iter().zip(&plan.slots) {
        let alive = planned.life.0 <= peak && peak <= planned.life.1;
        let takes = match &planned.place {
            _ if !alive => false,
            Place::Slab { slab, range } => counted.insert((*slab, range.clone())),
            Place::Own => true,
            _ => false,
        };
        if let (true, Some(dtype), Some(shape)) = (takes, planned.dtype, &planned.shape) {
            let bytes = byte_count(dtype, shape).unwrap_or(0);
            *by_name.entry(program.graph.value(slot.value).name.to_string()).or_default() += bytes;
        }
    }
    let mut largest: Vec<(String, usize)> = by_name.into_iter().collect();
    largest.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
    largest
}
