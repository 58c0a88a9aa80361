//! Kernel invocation: binds one step's inputs, outputs and scratch memory, and runs its kernel.

#![allow(
    clippy::indexing_slicing,
    reason = "ids of slots and steps are made with the program, and each table of a frame and plan has an entry for each"
)]

use ort_alloc::{Buffer, Category, DeviceId, Part, Reservation, emptied};

use super::frame::{Frame, RunEnv};
use super::nested::NestedFrames;
use super::poison::poison;
use super::tables::StepTables;
use super::target::{HandedOver, Target};
use super::views::DeviceSlab;
use super::views::{Sources, device_view, output_slot, split_regions, view_of};
use crate::dtype::DType;
use crate::ep::dynamic::{ExtraScratch, Source, ValueMemory, ask_heap};
use crate::ep::{
    InputViews, IoShapes, NodeView, OutputSlot, OutputSlots, OutputsFrom, RunCx, guard, interrupt,
};
use crate::ir::Graph;
use crate::plan::{StepPlan, Storage};
use crate::program::{Origin, SlotId, Step, Work};
use crate::tensor::{DeviceRange, Shape, Tensor, ValueView};
use crate::{Result, error};

impl Frame<'_> {
    /// Runs the kernel or transfer of a step. Afterwards the outputs that the kernel allocated
    /// itself (handed over) are in the tables.
    pub(super) fn execute(&mut self, index: usize, tables: &mut StepTables) -> Result<()> {
        let StepTables { targets, shapes, handed, call } = tables;
        let step = &self.program.steps[index];
        let outlives_run = self.outlives_run(step);
        let source = self.source(step, outlives_run);
        let extra = self.extra_scratch(index, shapes)?;
        let (mut scratch, device_scratch) = (extra.host, extra.device);
        let plan = &self.plan.steps[index];
        let heap = plan.heap.saturating_add(extra.heap);
        // Kernels allocate this memory themselves. The reservation counts it until the kernel
        // returns.
        let _heap = if heap > 0 { Some(self.reserve_heap(heap)?) } else { None };

        // Split the host memory into disjoint borrows: the inputs that the step reads, and the
        // memory that it writes.
        self.find_reads(step, plan, &mut call.reads);
        find_writes(plan, targets, &mut call.writes);
        let sources = Sources {
            program: self.program,
            plan: self.plan,
            owned: self.owned,
            given: self.given,
            bound: self.bound,
        };
        let parts = (&call.reads[..], &call.writes[..]);
        let mut slices =
            split_regions(self.slabs.host, &mut self.homes, parts, std::mem::take(&mut call.slices))?;
        if self.env.poison {
            poison(targets, &mut slices.writes, scratch.as_mut().and_then(Buffer::bytes_mut));
        }
        // Declared first, because the views borrow from it.
        let copies: Vec<(usize, Tensor)>;
        let mut inputs: InputViews<'_> = emptied(std::mem::take(&mut call.inputs));
        view_inputs(&sources, (step, plan), &slices.reads, self.slabs.devices, &mut inputs)?;
        if self.program.aligns {
            copies = aligned_copies(step, &inputs, self.env)?;
            for (index, copy) in &copies {
                inputs[*index] = Some(ValueView::Tensor(copy.view()));
            }
        }
        let mut outputs: OutputSlots<'_> = emptied(std::mem::take(&mut call.outputs));
        let mut writes = slices.writes.drain(..);
        for (target, shape) in targets.iter_mut().zip(&*shapes) {
            outputs.push(output_slot(target, shape, &mut writes, self.slabs.devices)?);
        }
        // An empty workspace is not among the parts. It must still be aligned for all types,
        // because kernels read it as elements.
        let planned_scratch = match plan.workspace.is_empty() && plan.workspace_slab == 0 {
            true => Some(bytemuck::cast_slice_mut::<u128, u8>(&mut [])),
            false => writes.next(),
        };
        drop(writes);
        let workspace = match &mut scratch {
            Some(buffer) => buffer.bytes_mut(),
            None => planned_scratch,
        };
        let device_workspace = match &device_scratch {
            Some(buffer) => Some(DeviceRange { buffer, offset: 0, len: buffer.len() }),
            None => planned_device_workspace(plan, self.slabs.devices),
        };
        // The captures of subgraphs come after the step's own inputs.
        let captures: Vec<Option<ValueView<'_>>> = inputs.drain(step.inputs.len()..).collect();
        let mut nested = (!step.nested.is_empty()).then(|| NestedFrames {
            plans: &plan.nested,
            nested: &step.nested,
            captures,
            bindings: self.bindings,
            env: RunEnv { outlives_run, depth: self.env.depth + 1, ..*self.env },
            workspace: None,
            slabs: planned_slabs(plan, self.slabs.devices),
        });
        let mut cx = RunCx {
            inputs,
            outputs,
            workspace: None,
            device_workspace,
            control: self.env.control,
            nested: None,
            memory: Some(ValueMemory { memory: self.env.memory, source }),
            copies: Some(&self.env.devices),
        };
        let at = StepAt { graph: &self.program.graph, index, step };
        run_work(at, self.env, &mut cx, nested.as_mut(), workspace)?;
        take_handed_over(&mut cx.outputs, handed);
        call.keep(slices, cx.inputs, cx.outputs);
        Ok(())
    }

    /// Lists the ranges of host memory that a step reads. An input whose memory an output takes
    /// over is left out, because the step borrows that memory for writing.
    pub(super) fn find_reads(&self, step: &Step, plan: &StepPlan, reads: &mut Vec<Part>) {
        let part = |(slot, is_taken): (Option<SlotId>, bool)| {
            let Storage::Slab { slab, range } = &self.plan.slots[slot.filter(|_| !is_taken)?.index()].storage
            else {
                return None;
            };
            Some((self.plan.host_region(*slab)?, range.clone()))
        };
        reads.clear();
        reads.extend(slots_read(step, plan).filter_map(part));
    }

    /// Whether a value that the kernel hands over may become an output of the run.
    pub(super) fn outlives_run(&self, step: &Step) -> bool {
        let hands_over = step.claim.outputs != OutputsFrom::Plan || !step.nested.is_empty();
        let is_output = |slot: &SlotId| self.plan.slots[slot.index()].is_output;
        hands_over && self.env.outlives_run && step.outputs.iter().flatten().any(is_output)
    }

    /// Chooses where a kernel allocates the outputs that it hands over: in the arena, or outside
    /// it. The plan counts either all of these outputs or none.
    pub(super) fn source(&self, step: &Step, outlives_run: bool) -> Source {
        let is_planned = |slot: &SlotId| matches!(self.plan.slots[slot.index()].storage, Storage::Own);
        // An arena region must not outlive the run, and the arena would count the planned outputs a
        // second time.
        match outlives_run || step.outputs.iter().flatten().all(is_planned) {
            true => Source::Outside,
            false => Source::Arena,
        }
    }

    /// Reserves budget for the heap memory of a kernel, and checks that the system can provide it.
    pub(super) fn reserve_heap(&self, bytes: usize) -> Result<Reservation> {
        self.env.memory.reserve_for(|| {
            let reservation = self.env.control.budget.reserve(Category::Workspace, bytes)?;
            ask_heap(bytes).map(|()| reservation)
        })
    }

    /// Allocates scratch memory for a step whose shapes the plan did not know, in the memory of the
    /// device that runs it.
    pub(super) fn extra_scratch(
        &self,
        index: usize,
        outputs: &[Option<(DType, Shape)>],
    ) -> Result<ExtraScratch> {
        if self.plan.has_all_shapes {
            return Ok(ExtraScratch::default());
        }
        let step = &self.program.steps[index];
        let planned = |slot: &SlotId| self.plan.slots[slot.index()].shape.is_some();
        // The workspace of a kernel that hands over its outputs follows from the inputs alone.
        let sized = if step.claim.outputs == OutputsFrom::Plan { &step.outputs[..] } else { &[] };
        let all_planned = step.inputs.iter().chain(sized).flatten().all(planned);
        // The workspace of a step with subgraphs is their slab, which `NestedFrames` allocates.
        let kernel = step.work.kernel().filter(|_| !all_planned && step.nested.is_empty());
        let Some(kernel) = kernel else { return Ok(ExtraScratch::default()) };
        let mut inputs: Vec<Option<Shape>> = Vec::with_capacity(step.inputs.len());
        for slot in &step.inputs {
            let shape = slot.map(|slot| match self.value(slot).ok().and_then(|value| value.tensor().ok()) {
                Some(view) => Some(view.shape().into()),
                None => self.plan.slots[slot.index()].shape.clone(),
            });
            inputs.push(shape.flatten());
        }
        let outputs: Vec<Option<Shape>> =
            outputs.iter().map(|known| known.as_ref().map(|(_, shape)| shape.clone())).collect();
        let threads = self.env.control.threads;
        // This memory is in no plan. Under a limit, the kernel gets the smallest workspace that it
        // can run with.
        let room = if self.env.control.budget.limit().is_some() { 0 } else { usize::MAX };
        let shapes = IoShapes { inputs: &inputs, outputs: &outputs, threads, room };
        let (bytes, heap) = (kernel.workspace(&shapes)?, kernel.heap(&shapes)?);
        self.env.memory.scratch(self.env.devices[step.device].memory(), bytes, heap)
    }
}

/// The slots that a step reads: its inputs, then its captures. Each comes with whether an output
/// takes over its memory.
fn slots_read<'a>(
    step: &'a Step,
    plan: &'a StepPlan,
) -> impl Iterator<Item = (Option<SlotId>, bool)> + use<'a> {
    let is_taken = |position: usize| plan.in_place.iter().any(|(_, input)| *input as usize == position);
    let inputs = step.inputs.iter().enumerate();
    let inputs = inputs.map(move |(position, slot)| (*slot, is_taken(position)));
    let captures = step.nested.iter().flat_map(|nested| &nested.captures);
    inputs.chain(captures.map(|slot| (Some(*slot), false)))
}

/// Lists the ranges of host memory that a step writes: its outputs, then its workspace if it is on
/// the host.
fn find_writes(plan: &StepPlan, targets: &[Target], writes: &mut Vec<Part>) {
    writes.clear();
    for target in targets {
        if let Target::Slab { region: Some(region), range, .. } = target {
            writes.push((*region, range.clone()));
        }
    }
    if plan.workspace_slab == 0 && !plan.workspace.is_empty() {
        writes.push((0, plan.workspace.clone()));
    }
}

/// Lists a view of each value that a step reads. `reads` holds the slices of host memory in the
/// order of [`slots_read`].
fn view_inputs<'v>(
    sources: &Sources<'v>,
    (step, plan): (&Step, &StepPlan),
    reads: &[&'v [u8]],
    devices: &'v [Option<DeviceSlab>],
    views: &mut InputViews<'v>,
) -> Result<()> {
    let mut reads = reads.iter().copied();
    for (slot, is_taken) in slots_read(step, plan) {
        let Some(slot) = slot.filter(|_| !is_taken) else {
            views.push(None);
            continue;
        };
        let is_consumed = matches!(sources.program.slots[slot.index()].origin, Origin::Consumed);
        views.push(match view_of(sources, slot, &mut |_, _| reads.next()) {
            Some(view) => Some(view?),
            // The kernel has packed this weight and does not read it.
            None if is_consumed => None,
            None => device_view(sources.plan, devices, slot),
        });
    }
    Ok(())
}

/// The pages of smaller constants wait for the end of the build.
const LEAST_RELEASED_BYTES: usize = 64 << 10;

/// Copies the inputs that are not aligned for their type, if the kernel reads them as typed slices,
/// and releases the pages of the model's files that were read.
fn aligned_copies(
    step: &Step,
    inputs: &[Option<ValueView<'_>>],
    env: &RunEnv<'_>,
) -> Result<Vec<(usize, Tensor)>> {
    let mut copies = Vec::new();
    for (index, input) in inputs.iter().enumerate() {
        let Some(ValueView::Tensor(view)) = input else { continue };
        if view.is_aligned() || step.claim.unaligned.contains(&index) {
            continue;
        }
        let bytes = view.bytes()?;
        let mut buffer = env.memory.allocate_outside(DeviceId::HOST, Category::Workspace, bytes.len())?;
        let to = buffer.bytes_mut().ok_or_else(|| error!(Fail, "host memory is not the host's"))?;
        interrupt::copy(bytes, to);
        if bytes.len() >= LEAST_RELEASED_BYTES {
            env.packing.files.release(bytes);
        }
        copies.push((index, Tensor::from_buffer(view.dtype(), view.shape(), buffer)?));
    }
    Ok(copies)
}

/// A step of a program, with its index and the program's graph.
#[derive(Clone, Copy)]
struct StepAt<'a> {
    graph: &'a Graph,
    index: usize,
    step: &'a Step,
}

/// Runs the kernel or transfer of a step.
fn run_work<'a, 'n: 'a>(
    StepAt { graph, index, step }: StepAt<'a>,
    env: &RunEnv<'_>,
    cx: &mut RunCx<'a>,
    nested: Option<&'a mut NestedFrames<'n>>,
    workspace: Option<&'n mut [u8]>,
) -> Result<()> {
    match &step.work {
        Work::Copy => {
            let (from, to) = (cx.input(0)?, cx.output(0)?);
            guard::copy(&*env.devices[step.device], from, to)?;
        }
        Work::Streamed(kernel) => {
            cx.workspace = workspace;
            let node = step.node.map(|node| &graph.nodes[node]);
            let missing = || error!(Fail, "a streamed kernel runs without its session");
            let (node, streaming) = node.zip(env.streaming).ok_or_else(missing)?;
            let (view, device) = (NodeView { graph, node }, &*env.devices[step.device]);
            kernel.run(streaming.keeps(index), || streaming.make(view, device), cx)?;
        }
        Work::Deferred(kernel) => {
            cx.workspace = workspace;
            let unpacked = || error!(Fail, "a kernel runs before its weights are packed");
            kernel.packed().ok_or_else(unpacked)?.run(cx)?;
        }
        Work::Kernel(kernel) => {
            match nested {
                // The workspace is the host slab of the subgraphs.
                Some(nested) => {
                    nested.workspace = workspace;
                    cx.nested = Some(nested);
                }
                None => cx.workspace = workspace,
            }
            kernel.run(cx)?;
        }
    }
    Ok(())
}

/// Takes the values that a kernel handed over, by output. The list stays empty if the kernel handed
/// over none.
fn take_handed_over(outputs: &mut OutputSlots<'_>, handed: &mut HandedOver) {
    if !outputs.iter().any(|slot| matches!(slot, OutputSlot::Handed(_))) {
        return;
    }
    handed.extend(outputs.drain(..).map(|slot| match slot {
        OutputSlot::Handed(value) => value,
        _ => None,
    }));
}

/// The planned scratch memory of a step on a device with memory of its own.
fn planned_device_workspace<'a>(step: &StepPlan, slabs: &'a [Option<DeviceSlab>]) -> Option<DeviceRange<'a>> {
    let slab = slabs.get(step.workspace_slab)?.as_ref()?;
    (!step.workspace.is_empty()).then(|| slab.range(&step.workspace))
}

/// The ranges of the device slabs that the plan set aside for a step's subgraphs.
fn planned_slabs<'a>(step: &StepPlan, slabs: &'a [Option<DeviceSlab>]) -> Vec<(DeviceId, DeviceRange<'a>)> {
    let parts = step.nested_slabs.iter();
    let parts = parts.filter_map(|(slab, range)| Some(slabs.get(*slab)?.as_ref()?.range(range)));
    parts.map(|range| (range.buffer.device(), range)).collect()
}
