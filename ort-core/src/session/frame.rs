//! One run of one program: steps through the schedule with every value where the plan put it.

#![allow(
    clippy::indexing_slicing,
    reason = "ids of slots and steps are made with the program, and each table of a frame and plan has an entry for each"
)]

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use ort_alloc::{Allocator, Buffer, Category, DeviceId, Reservation, SharedBuffer, allocate_in};
use smallvec::SmallVec;

use super::dynamic::{ExtraScratch, RunMemory, Source, ValueMemory, ask_heap};
use super::given::Given;
use super::nested::NestedFrames;
use super::places::{Part, Sources, device_view, output_slot, split_regions, view_of};
use super::poison::poison;
use super::profile::{EventMemory, Profile};
use super::program::{Origin, Program, SlotId, Step, Work};
use super::streamed::Streaming;
use super::windows::Passing;
use crate::dim::Bindings;
use crate::dtype::DType;
use crate::ep::{Device, IoShapes, NodeView, OutputSlot, OutputsFrom, RunControl, RunCx, guard, interrupt};
use crate::plan::{Action, Place, Planning, RunPlan, StepPlan};
use crate::spec::{InputFacts, OutputShapes, ViewCx, infer_concrete, known_ints};
use crate::tensor::{DeviceRange, Shape, Tensor, TensorBuffer, TensorView, Value, ValueView, byte_count};
use crate::{ErrorKind, Result, Within, ensure, error};

/// What all frames of a run share.
#[derive(Clone, Copy)]
pub(crate) struct RunEnv<'a> {
    pub(crate) control: &'a RunControl,
    pub(crate) devices: &'a [Arc<dyn Device>],
    pub(crate) profile: Option<&'a Profile>,
    /// Where memory of the host for outputs comes from.
    pub(crate) outputs: &'a dyn Allocator,
    pub(crate) planning: Planning,
    /// How many subgraphs the frame is in.
    pub(crate) depth: usize,
    /// Whether kernels find patterns where they are to write.
    pub(crate) poison: bool,
    /// Memory for what cannot be planned.
    pub(crate) memory: RunMemory<'a>,
    /// Whether the outputs of the program may be outputs of the run.
    pub(crate) outlives_run: bool,
    /// How weights are packed during the run, where not all can stay packed.
    pub(crate) streaming: Option<Streaming<'a>>,
}

/// The slabs of a run: the host's, which the frame borrows, and the devices'.
pub(crate) struct Slabs<'a> {
    pub(crate) host: &'a mut [u8],
    /// By slab index of the plan; the host's entry is none.
    pub(crate) devices: &'a [Option<DeviceSlab>],
}

/// A slab in the memory of a device: a buffer, or for a subgraph the part of one that its node has.
#[derive(Clone)]
pub(crate) struct DeviceSlab {
    pub(crate) buffer: SharedBuffer,
    pub(crate) offset: usize,
}

impl DeviceSlab {
    pub(super) fn range(&self, bytes: &Range<usize>) -> DeviceRange<'_> {
        DeviceRange { buffer: &self.buffer, offset: self.offset + bytes.start, len: bytes.len() }
    }
}

/// All memory of a run.
pub(crate) struct Memory<'a> {
    pub(crate) slabs: Slabs<'a>,
    /// The constants of devices that come and go; none in subgraphs.
    pub(crate) windows: Passing<'a>,
    /// The buffers of a binding.
    pub(crate) bound: &'a mut [Option<TensorBuffer>],
    pub(crate) tables: &'a mut Tables,
}

/// The tables of a run, which the next one may use again.
#[derive(Default)]
pub(crate) struct Tables {
    /// Values with memory of their own, by slot.
    owned: Vec<Option<Value>>,
    /// Where the outputs of a step go, and their types and shapes.
    targets: Vec<Target>,
    shapes: KnownShapes,
}

impl Tables {
    /// Lets go of the values.
    pub(crate) fn clear(&mut self) {
        self.owned.fill(None);
    }
}

pub(crate) struct Frame<'a> {
    pub(super) program: &'a Program,
    pub(super) plan: &'a RunPlan,
    bindings: &'a Bindings,
    pub(super) env: RunEnv<'a>,
    pub(super) given: Given<'a>,
    pub(super) owned: &'a mut Vec<Option<Value>>,
    targets: &'a mut Vec<Target>,
    shapes: &'a mut KnownShapes,
    slabs: Slabs<'a>,
    windows: Passing<'a>,
    /// Buffers of outputs that hold other values until the outputs are computed, in the order of the plan.
    homes: Vec<Option<Buffer>>,
    pub(super) bound: &'a mut [Option<TensorBuffer>],
}

/// For each output its type and shape, where they are known before the kernel runs.
type KnownShapes = Vec<Option<(DType, Shape)>>;

/// What a kernel hands over, by output.
type Handed = SmallVec<[Option<Value>; 4]>;

/// Where an output's memory comes from in this run.
pub(super) enum Target {
    Unwanted,
    /// `region` is that of the host, where it is the host's.
    Slab {
        slab: usize,
        region: Option<usize>,
        range: Range<usize>,
        in_place: Option<usize>,
    },
    /// Memory of its own, and the input that it holds.
    Buffer(Buffer, Option<usize>),
    DeviceBuffer(SharedBuffer),
    /// The binding's buffer at this place, which is there again after the step.
    Bound {
        place: usize,
        buffer: TensorBuffer,
        in_place: Option<usize>,
    },
    Handed,
}

impl<'a> Frame<'a> {
    pub(crate) fn new(
        (program, plan, bindings): (&'a Program, &'a RunPlan, &'a Bindings),
        env: RunEnv<'a>,
        given: Given<'a>,
        Memory { slabs, windows, bound, tables }: Memory<'a>,
    ) -> Frame<'a> {
        let Tables { owned, targets, shapes } = tables;
        owned.clear();
        owned.resize(program.slots.len(), None);
        for (slot, tensor) in windows.residents() {
            owned[slot.index()] = Some(Value::Tensor(tensor.clone()));
        }
        let homes = Vec::new();
        Frame { program, plan, bindings, env, given, owned, targets, shapes, slabs, windows, homes, bound }
    }

    /// Runs every step and returns the outputs.
    pub(crate) fn run(mut self) -> Result<Vec<Value>> {
        self.run_steps()?;
        let outputs = &self.plan.outputs;
        let mut values = Vec::with_capacity(outputs.len());
        for (index, slot) in outputs.iter().enumerate() {
            let owned = &mut self.owned[slot.index()];
            // A tensor is reference-counted and cheap to share. A clone of a sequence or map copies
            // every element, so its last use moves it.
            let is_copied = owned.as_ref().is_some_and(|value| !matches!(value, Value::Tensor(_)));
            let moves = is_copied && !outputs[index + 1..].contains(slot);
            let moved = owned.take_if(|_| moves);
            values.push(self.detach(moved.map_or_else(|| self.take_output(*slot), Ok)?)?);
        }
        Ok(values)
    }

    /// An output of the run has memory that is no part of an arena's.
    pub(super) fn detach(&self, value: Value) -> Result<Value> {
        match self.env.outlives_run {
            true => self.env.memory.detach(value, self.env.outputs),
            false => Ok(value),
        }
    }

    /// Runs every step.
    pub(super) fn run_steps(&mut self) -> Result<()> {
        self.open_homes()?;
        self.copy_given()?;
        for index in 0..self.program.steps.len() {
            if self.plan.steps[index].action == Action::Run {
                self.env.control.check()?;
                let start = self.env.profile.map(|_| std::time::Instant::now());
                self.step_with_constants(index)
                    .map_err(|problem| match problem.kind() {
                        // Its inputs are not to blame.
                        ErrorKind::Cancelled | ErrorKind::OutOfMemory => problem,
                        _ => problem.help(self.inputs_in_words(index)),
                    })
                    .within(|| self.program.steps[index].place())?;
                if let (Some(profile), Some(start)) = (self.env.profile, start) {
                    let memory = self.event_memory(index);
                    profile.record(&self.program.steps[index], start, memory, self.env.depth);
                }
            }
            for slot in &self.plan.steps[index].release {
                self.owned[slot.index()] = None;
            }
        }
        Ok(())
    }

    /// What a step that has run did to the memory: what the plan says, and the values that it does not know.
    fn event_memory(&self, index: usize) -> EventMemory {
        let (plan, step) = (self.plan, &self.program.steps[index]);
        let bytes = |slot: &SlotId| match plan.slots[slot.index()].place {
            Place::Dynamic => self.owned[slot.index()].as_ref().map_or(0, Value::byte_count),
            _ => 0,
        };
        let all = (0..self.owned.len() as u32).map(SlotId);
        let dynamic: usize = if plan.has_dynamic { all.map(|slot| bytes(&slot)).sum() } else { 0 };
        let made: usize = step.outputs.iter().flatten().map(bytes).sum();
        let gone: usize = plan.steps[index].release.iter().map(bytes).sum();
        EventMemory {
            allocated: plan.begins.get(index).map_or(0, |begins| begins + made),
            freed: plan.ends(index) + gone,
            live: plan.live.get(index).map_or(0, |live| live + dynamic),
        }
    }

    fn open_homes(&mut self) -> Result<()> {
        for &slot in &self.plan.homes {
            let planned = &self.plan.slots[slot.index()];
            let known = planned.dtype.zip(planned.shape.clone());
            self.homes.push(match self.allocate(slot, known, Category::Output)?.0 {
                Target::Buffer(buffer, _) => Some(buffer),
                _ => None,
            });
        }
        Ok(())
    }

    /// The host's bytes at a place of the plan.
    fn host_bytes(&self, region: usize, range: Range<usize>) -> Option<&[u8]> {
        match region.checked_sub(1) {
            None => self.slabs.host.get(range),
            Some(home) => self.homes.get(home)?.as_ref()?.bytes()?.get(range),
        }
    }

    /// What errors without an advice of their own say: what the step was given.
    fn inputs_in_words(&self, index: usize) -> String {
        let input = |slot: &Option<SlotId>| {
            let slot = (*slot)?;
            let name = &self.program.graph.value(self.program.slots[slot.index()].value).name;
            let known = self.value(slot).ok().and_then(|value| value.tensor().ok());
            let known = known.map(|view| format!(" {}{:?}", view.dtype(), view.shape()));
            Some(format!("'{name}'{}", known.unwrap_or_default()))
        };
        let inputs = self.program.steps[index].inputs.iter();
        let inputs: Vec<String> = inputs.filter_map(input).take(12).collect();
        match inputs.as_slice() {
            [] => "check its attributes; it has no inputs".to_string(),
            inputs => format!("check its inputs: {}", inputs.join(", ")),
        }
    }

    /// An output keeps nothing but its own memory alive.
    pub(super) fn take_output(&self, slot: SlotId) -> Result<Value> {
        if let Some(value) = &self.owned[slot.index()] {
            return Ok(value.clone());
        }
        self.copy_output(self.output_view(slot)?)
    }

    /// An output where it is.
    pub(super) fn output_view(&self, slot: SlotId) -> Result<ValueView<'_>> {
        let name = &self.program.graph.value(self.program.slots[slot.index()].value).name;
        let view = view_of(&self.sources(), slot, &mut |region, range| self.host_bytes(region, range));
        view.ok_or_else(|| error!(Fail, "output '{name}' was not computed"))?
    }

    /// Where values outside of slabs are found.
    fn sources(&self) -> Sources<'_> {
        let Frame { program, plan, owned, given, bound, .. } = self;
        Sources { program, plan, owned, given: *given, bound }
    }

    /// An output that is an input, a constant or folded gets memory of its own.
    fn copy_output(&self, value: ValueView<'_>) -> Result<Value> {
        let tensor = value.tensor().ok();
        if let Some(view) = tensor.filter(|view| !view.is_host()) {
            return self.copied_to(view, view.memory(), Category::Output).map(Value::Tensor);
        }
        let Some((view, bytes)) = tensor.and_then(|view| Some((view, view.bytes().ok()?))) else {
            return value.to_value();
        };
        let (budget, outputs) = (&self.env.control.budget, self.env.outputs);
        let allocate = || allocate_in(budget, Category::Output, outputs, bytes.len(), 64);
        let mut buffer = self.env.memory.reserve_for(allocate)?;
        let to = buffer.bytes_mut().ok_or_else(|| error!(Fail, "host memory is not the host's"))?;
        interrupt::copy(bytes, to);
        Ok(Value::Tensor(Tensor::from_buffer(view.dtype(), view.shape(), buffer)?))
    }

    /// Runs a step with the constants that come for it.
    fn step_with_constants(&mut self, index: usize) -> Result<()> {
        if self.windows.is_empty() {
            return self.step(index);
        }
        let plan = self.plan;
        let arrived = self.windows.arrive(index, &|step| plan.steps[step].action == Action::Run)?;
        let slots: SmallVec<[SlotId; 2]> = arrived.iter().map(|(slot, _)| *slot).collect();
        for (slot, tensor) in arrived {
            self.owned[slot.index()] = Some(Value::Tensor(tensor));
        }
        let done = self.step(index);
        slots.iter().for_each(|slot| self.owned[slot.index()] = None);
        done
    }

    fn step(&mut self, index: usize) -> Result<()> {
        let step = &self.program.steps[index];
        if self.dynamic_view(step)? {
            return Ok(());
        }
        let (mut targets, mut shapes) = (std::mem::take(self.targets), std::mem::take(self.shapes));
        let found = self.find_targets(index, &mut targets, &mut shapes);
        let done = found.and_then(|()| self.execute(index, &mut targets, &shapes));
        let done = done.and_then(|handed| self.keep(step, (&mut targets, &shapes), handed));
        // Bound buffers go back to their places, also after an error.
        for target in targets.drain(..) {
            if let Target::Bound { place, buffer, .. } = target {
                self.bound[place] = Some(buffer);
            }
        }
        shapes.clear();
        (*self.targets, *self.shapes) = (targets, shapes);
        done
    }

    /// Keeps what a step has computed into memory of its own.
    fn keep(
        &mut self,
        step: &Step,
        (targets, shapes): (&mut [Target], &[Option<(DType, Shape)>]),
        handed: Handed,
    ) -> Result<()> {
        for (position, (target, value)) in targets.iter_mut().zip(handed).enumerate() {
            let Some(slot) = step.outputs[position] else { continue };
            if matches!(target, Target::Bound { .. }) {
                continue;
            }
            let value = match (std::mem::replace(target, Target::Unwanted), value) {
                (Target::Buffer(buffer, _), _) => Some(buffer_value(&shapes[position], buffer)?),
                (Target::DeviceBuffer(buffer), _) => {
                    let (dtype, shape) = shapes[position].as_ref().ok_or_else(no_shape)?;
                    Some(Value::Tensor(Tensor::from_device(*dtype, shape, buffer)?))
                }
                (Target::Handed, Some(value)) => Some(self.check_handed(slot, value)?),
                (Target::Handed, None) => return Err(error!(Fail, "output {position} was not computed")),
                _ => None,
            };
            if value.is_some() {
                self.owned[slot.index()] = value;
            }
        }
        Ok(())
    }

    /// A handed value must be what the plan took it for, and where the program looks for it.
    fn check_handed(&self, slot: SlotId, value: Value) -> Result<Value> {
        let planned = &self.plan.slots[slot.index()];
        let memory = self.program.slots[slot.index()].memory;
        let value = match value {
            Value::Tensor(tensor) if tensor.memory() != memory => {
                Value::Tensor(self.copied_to(tensor.view(), memory, Category::Output)?)
            }
            other => other,
        };
        if let (Place::Own, Some(shape), Value::Tensor(tensor)) = (&planned.place, &planned.shape, &value) {
            // A loop that ran no iteration does not know the sizes of what it would have handed over; the plan does.
            if tensor.element_count() == 0 && shape.contains(&0) {
                return Ok(Value::Tensor(tensor.reshape(shape)?));
            }
            ensure!(
                tensor.shape() == shape.as_slice(),
                RuntimeException,
                "an output has shape {:?}, the plan expected {:?}",
                tensor.shape(),
                shape
            );
        }
        Ok(value)
    }

    /// Where each output goes, and its type and shape.
    fn find_targets(
        &mut self,
        index: usize,
        targets: &mut Vec<Target>,
        shapes: &mut KnownShapes,
    ) -> Result<()> {
        let (program, plan) = (self.program, self.plan);
        let step = &program.steps[index];
        let mut inferred: Option<OutputShapes> = None;
        for (position, slot) in step.outputs.iter().enumerate() {
            let Some(slot) = *slot else {
                targets.push(Target::Unwanted);
                shapes.push(None);
                continue;
            };
            let planned = &plan.slots[slot.index()];
            let known = planned.dtype.zip(planned.shape.clone());
            let in_place = plan.steps[index].input_in_place_of(position);
            let home = plan.homes.iter().position(|home| *home == slot);
            let home = home.and_then(|home| self.homes.get_mut(home)?.take());
            let (target, shape) = match &planned.place {
                Place::Slab { slab, range } => {
                    let region = plan.host_region(*slab);
                    (Target::Slab { slab: *slab, region, range: range.clone(), in_place }, known)
                }
                Place::Bound(place) => {
                    let buffer = self.bound.get_mut(*place).and_then(Option::take);
                    let buffer = buffer.ok_or_else(|| error!(Fail, "a bound output has no buffer"))?;
                    let shape = Some((buffer.dtype(), Shape::from(buffer.shape())));
                    targets.push(Target::Bound { place: *place, buffer, in_place });
                    if known.is_none() {
                        self.check_bound(step, position, &shape)?;
                    }
                    shapes.push(shape);
                    continue;
                }
                _ if step.claim.outputs != OutputsFrom::Plan => (Target::Handed, None),
                Place::Own if let Some(buffer) = home => (Target::Buffer(buffer, in_place), known),
                Place::Own => self.allocate(slot, known, Category::Output)?,
                _ => {
                    if inferred.is_none() {
                        inferred = Some(self.infer(step)?);
                    }
                    let shape = inferred.as_ref().and_then(|all| all.get(position).cloned().flatten());
                    match shape {
                        Some((dtype, Some(shape))) if dtype != DType::String => {
                            self.allocate(slot, Some((dtype, shape)), Category::Dynamic)?
                        }
                        _ => (Target::Handed, None),
                    }
                }
            };
            targets.push(target);
            shapes.push(shape);
        }
        Ok(())
    }

    /// A bound output whose shape only the run tells must have that of its buffer.
    fn check_bound(&self, step: &Step, position: usize, bound: &Option<(DType, Shape)>) -> Result<()> {
        let inferred = self.infer(step)?.into_iter().nth(position).flatten();
        let inferred = inferred.and_then(|(dtype, shape)| Some((dtype, shape?)));
        ensure!(
            inferred.is_some() && inferred == *bound,
            InvalidArgument,
            help = "bind the output to a device, where it may have any size",
            "the output is {}, it is bound to {}",
            in_words(&inferred),
            in_words(bound)
        );
        Ok(())
    }

    fn allocate(
        &self,
        slot: SlotId,
        known: Option<(DType, Shape)>,
        category: Category,
    ) -> Result<(Target, Option<(DType, Shape)>)> {
        let (dtype, shape) = known.ok_or_else(no_shape)?;
        let bytes = byte_count(dtype, &shape)?;
        let device = self.program.slots[slot.index()].memory;
        let memory = self.env.memory;
        let buffer = match category {
            Category::Output if device == DeviceId::HOST => {
                let (budget, outputs) = (&self.env.control.budget, self.env.outputs);
                memory.reserve_for(|| allocate_in(budget, category, outputs, bytes, 64))?
            }
            Category::Output => memory.allocate_outside(device, category, bytes)?,
            _ => {
                let outlives_run = self.env.outlives_run && self.plan.slots[slot.index()].is_output;
                let source = if outlives_run { Source::Outside } else { Source::Arena };
                ValueMemory { memory, source }.allocate(device, category, bytes)?
            }
        };
        let target = match device {
            DeviceId::HOST => Target::Buffer(buffer, None),
            _ => Target::DeviceBuffer(buffer.freeze()),
        };
        Ok((target, Some((dtype, shape))))
    }

    /// Output types and shapes from the inputs as they are now.
    fn infer(&self, step: &Step) -> Result<OutputShapes> {
        let Some(node) = step.node.map(|node| &self.program.graph.nodes[node]) else {
            // A copy has its input's type and shape.
            let view = self.value(step.inputs[0].ok_or_else(no_shape)?)?.tensor()?;
            return Ok(vec![Some((view.dtype(), Some(view.shape().into())))]);
        };
        if !node.subgraphs.is_empty() {
            return Ok(vec![None; step.outputs.len()]);
        }
        let mut facts = Vec::with_capacity(step.inputs.len());
        for (position, slot) in step.inputs.iter().enumerate() {
            facts.push(match slot {
                None => None,
                Some(slot) => Some(self.facts(node.inputs[position], *slot)?),
            });
        }
        infer_concrete(node, &facts)
    }

    fn facts(&self, value: Option<crate::ir::ValueId>, slot: SlotId) -> Result<InputFacts<'_>> {
        if let (Origin::Consumed, Some(value)) = (&self.program.slots[slot.index()].origin, value) {
            // A packed weight is not read at run time; its type and shape still count.
            let info = self.program.graph.value(value);
            let known = self.program.graph.constants.get(&value).map(|tensor| tensor.view());
            return Ok(InputFacts { ty: Cow::Borrowed(&info.ty), known, symbolic: None });
        }
        Ok(match self.value(slot)? {
            ValueView::Tensor(view) => InputFacts::concrete(view),
            ValueView::Value(value) => {
                InputFacts { ty: Cow::Owned(value.value_type()), known: None, symbolic: None }
            }
        })
    }

    fn value(&self, slot: SlotId) -> Result<ValueView<'_>> {
        let bytes = &mut |region, range| self.host_bytes(region, range);
        if let Some(view) = view_of(&self.sources(), slot, bytes) {
            return view;
        }
        self.device_value(slot)
    }

    fn device_value(&self, slot: SlotId) -> Result<ValueView<'_>> {
        device_view(self.plan, self.slabs.devices, slot).ok_or_else(|| {
            let name = &self.program.graph.value(self.program.slots[slot.index()].value).name;
            error!(Fail, "'{name}' was not computed")
        })
    }

    /// Makes outputs of unknown size parts of an input that owns its memory, where the operator allows it.
    fn dynamic_view(&mut self, step: &Step) -> Result<bool> {
        let Some(node) = step.node.map(|node| &self.program.graph.nodes[node]) else { return Ok(false) };
        let (Some(view), true) = (node.spec.view, node.subgraphs.is_empty()) else { return Ok(false) };
        // An output of the graph owns its memory, so it is copied rather than a view.
        let shares = |slot: &SlotId| {
            let dynamic = matches!(self.plan.slots[slot.index()].place, Place::Dynamic);
            dynamic && !self.plan.slots[slot.index()].is_output
        };
        if !step.outputs.iter().flatten().all(shares) {
            return Ok(false);
        }
        let outputs: Vec<Option<Shape>> =
            self.infer(step)?.into_iter().map(|output| output.and_then(|(_, shape)| shape)).collect();
        if outputs.iter().any(Option::is_none) {
            return Ok(false);
        }
        let views: Vec<Option<TensorView<'_>>> = step
            .inputs
            .iter()
            .map(|slot| slot.and_then(|slot| self.value(slot).ok()).and_then(|value| value.tensor().ok()))
            .collect();
        let inputs: Vec<Option<Shape>> =
            views.iter().map(|view| view.map(|view| view.shape().into())).collect();
        let ints: Vec<Option<Vec<i64>>> = views.iter().map(|view| known_ints(*view)).collect();
        let cx = ViewCx { attrs: &node.attrs, inputs: &inputs, ints: &ints, outputs: &outputs };
        let Some(of) = view(&cx) else { return Ok(false) };
        let source = step.inputs.get(of.input).copied().flatten();
        let source = source.and_then(|slot| self.owned[slot.index()].as_ref());
        let Some(Value::Tensor(source)) = source else { return Ok(false) };
        if !source.view().is_host() && of.offsets.iter().any(|offset| *offset > 0) {
            return Ok(false);
        }
        let mut parts = Vec::new();
        for ((slot, shape), offset) in step.outputs.iter().zip(&outputs).zip(&of.offsets) {
            if let (Some(slot), Some(shape)) = (slot, shape) {
                parts.push((*slot, source.slice(*offset, shape)?));
            }
        }
        for (slot, part) in parts {
            self.owned[slot.index()] = Some(Value::Tensor(part));
        }
        Ok(true)
    }

    /// Runs the kernel (or the copy) of a step; returns what it handed over.
    fn execute(
        &mut self,
        index: usize,
        targets: &mut [Target],
        shapes: &[Option<(DType, Shape)>],
    ) -> Result<Handed> {
        let step = &self.program.steps[index];
        let outlives_run = self.outlives_run(step);
        let source = self.source(step, outlives_run);
        let extra = self.extra_scratch(index, shapes)?;
        let (mut scratch, device_scratch) = (extra.host, extra.device);
        let plan = &self.plan.steps[index];
        let heap = plan.heap.saturating_add(extra.heap);
        let _heap = if heap > 0 { Some(self.reserve_heap(heap)?) } else { None };

        // The host's memory is split into what the step reads and what it writes.
        let mut reads: SmallVec<[Part; 16]> = SmallVec::new();
        let mut writes: SmallVec<[Part; 4]> = SmallVec::new();
        let taken: SmallVec<[usize; 2]> = plan.in_place.iter().map(|(_, input)| *input as usize).collect();
        let mut all_reads: SmallVec<[(Option<SlotId>, bool); 16]> = SmallVec::new();
        for (position, slot) in step.inputs.iter().enumerate() {
            all_reads.push((*slot, taken.contains(&position)));
        }
        all_reads
            .extend(step.nested.iter().flat_map(|nested| &nested.captures).map(|slot| (Some(*slot), false)));
        for (slot, taken) in &all_reads {
            if let (Some(slot), false) = (slot, taken)
                && let Place::Slab { slab, range } = &self.plan.slots[slot.index()].place
                && let Some(region) = self.plan.host_region(*slab)
            {
                reads.push((region, range.clone()));
            }
        }
        for target in targets.iter() {
            if let Target::Slab { region: Some(region), range, .. } = target {
                writes.push((*region, range.clone()));
            }
        }
        if plan.workspace_slab == 0 {
            writes.push((0, plan.workspace.clone()));
        }
        let sources = Sources {
            program: self.program,
            plan: self.plan,
            owned: self.owned,
            given: self.given,
            bound: self.bound,
        };
        let (reads, mut writes) = split_regions(self.slabs.host, &mut self.homes, &reads, &writes)?;
        if self.env.poison {
            poison(targets, &mut writes, scratch.as_mut().and_then(Buffer::bytes_mut));
        }
        let (mut reads, mut writes) = (reads.into_iter(), writes.into_iter());

        // Inputs and captures in the order in which their ranges were collected.
        let mut inputs: SmallVec<[Option<ValueView<'_>>; 16]> = SmallVec::new();
        for (slot, taken) in &all_reads {
            let (Some(slot), false) = (slot, taken) else {
                inputs.push(None);
                continue;
            };
            let view = view_of(&sources, *slot, &mut |_, _| reads.next());
            let consumed = matches!(self.program.slots[slot.index()].origin, Origin::Consumed);
            inputs.push(match view {
                Some(view) => Some(view?),
                None if consumed => None,
                None => device_view(self.plan, self.slabs.devices, *slot),
            });
        }
        let captures: Vec<Option<ValueView<'_>>> = inputs.drain(step.inputs.len()..).collect();
        let mut outputs: SmallVec<[OutputSlot<'_>; 4]> = SmallVec::new();
        for (target, shape) in targets.iter_mut().zip(shapes) {
            outputs.push(output_slot(target, shape, &mut writes, self.slabs.devices)?);
        }
        let planned_scratch = writes.next();
        // The iterators must not outlive what the kernel's context borrows.
        drop((reads, writes));
        let workspace = match &mut scratch {
            Some(buffer) => buffer.bytes_mut(),
            None => planned_scratch,
        };
        let device_workspace = match &device_scratch {
            Some(buffer) => Some(DeviceRange { buffer, offset: 0, len: buffer.len() }),
            None => planned_device_workspace(plan, self.slabs.devices),
        };
        let mut nested = NestedFrames {
            plans: &plan.nested,
            nested: &step.nested,
            captures,
            bindings: self.bindings,
            env: RunEnv { outlives_run, depth: self.env.depth + 1, ..self.env },
            workspace: None,
            slabs: planned_slabs(plan, self.slabs.devices),
        };
        let memory = Some(ValueMemory { memory: self.env.memory, source });
        let control = self.env.control;
        let devices = self.env.devices;
        let mut cx = RunCx {
            inputs,
            outputs,
            workspace: None,
            device_workspace,
            control,
            nested: None,
            memory,
            devices,
        };
        match &step.work {
            Work::Copy => {
                let device = &self.env.devices[step.device];
                let (from, to) = (cx.input(0)?, cx.output(0)?);
                guard::copy(&**device, from, to)?;
            }
            Work::Kernel(kernel) if step.nested.is_empty() => {
                cx.workspace = workspace;
                kernel.run(&mut cx)?;
            }
            Work::Streamed(kernel) => {
                cx.workspace = workspace;
                let node = step.node.map(|node| &self.program.graph.nodes[node]);
                let missing = || error!(Fail, "a streamed kernel outside of its session");
                let (node, streaming) = node.zip(self.env.streaming).ok_or_else(missing)?;
                let view = NodeView { graph: &self.program.graph, node };
                kernel.run((index, view), &*self.env.devices[step.device], streaming, &mut cx)?;
            }
            Work::Kernel(kernel) => {
                nested.workspace = workspace;
                cx.nested = Some(&mut nested);
                kernel.run(&mut cx)?;
            }
        }
        let handed = cx.outputs.into_iter().map(|slot| match slot {
            OutputSlot::Handed(value) => value,
            _ => None,
        });
        Ok(handed.collect())
    }

    /// Whether what the kernel hands over may be an output of the run.
    fn outlives_run(&self, step: &Step) -> bool {
        let hands_over = step.claim.outputs != OutputsFrom::Plan || !step.nested.is_empty();
        let is_output = |slot: &SlotId| self.plan.slots[slot.index()].is_output;
        hands_over && self.env.outlives_run && step.outputs.iter().flatten().any(is_output)
    }

    /// Where what a step hands over comes from. The plan counts all of it, or none.
    fn source(&self, step: &Step, outlives_run: bool) -> Source {
        let is_planned = |slot: &SlotId| matches!(self.plan.slots[slot.index()].place, Place::Own);
        match outlives_run || step.outputs.iter().flatten().all(is_planned) {
            true => Source::Outside,
            false => Source::Arena,
        }
    }

    /// Counts what a kernel takes of the heap.
    fn reserve_heap(&self, bytes: usize) -> Result<Reservation> {
        self.env.memory.reserve_for(|| {
            let reservation = self.env.control.budget.reserve(Category::Workspace, bytes)?;
            ask_heap(bytes).map(|()| reservation)
        })
    }

    /// Scratch memory for a step whose shapes were not known to the plan: of the host, or of the device that it runs on.
    fn extra_scratch(&self, index: usize, outputs: &[Option<(DType, Shape)>]) -> Result<ExtraScratch> {
        let step = &self.program.steps[index];
        let planned = |slot: &SlotId| self.plan.slots[slot.index()].shape.is_some();
        // What hands over its outputs has a workspace that follows from the inputs.
        let sized = if step.claim.outputs == OutputsFrom::Plan { &step.outputs[..] } else { &[] };
        let all_planned = step.inputs.iter().chain(sized).flatten().all(planned);
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
        // What no plan knows is to be as little as can be where every byte counts.
        let room = if self.env.control.budget.limit().is_some() { 0 } else { usize::MAX };
        let shapes = IoShapes { inputs: &inputs, outputs: &outputs, threads, room };
        let (bytes, heap) = (kernel.workspace(&shapes)?, kernel.heap(&shapes)?);
        self.env.memory.scratch(self.env.devices[step.device].memory(), bytes, heap)
    }
}

/// The planned scratch memory of a step on a device with memory of its own.
fn planned_device_workspace<'a>(step: &StepPlan, slabs: &'a [Option<DeviceSlab>]) -> Option<DeviceRange<'a>> {
    let slab = slabs.get(step.workspace_slab)?.as_ref()?;
    (!step.workspace.is_empty()).then(|| slab.range(&step.workspace))
}

/// The parts of the devices' slabs that are for the subgraphs of a step.
fn planned_slabs<'a>(step: &StepPlan, slabs: &'a [Option<DeviceSlab>]) -> Vec<(DeviceId, DeviceRange<'a>)> {
    let parts = step.nested_slabs.iter();
    let parts = parts.filter_map(|(slab, range)| Some(slabs.get(*slab)?.as_ref()?.range(range)));
    parts.map(|range| (range.buffer.device(), range)).collect()
}

/// The type and shape of an output for messages.
pub(crate) fn in_words(known: &Option<(DType, Shape)>) -> String {
    known.as_ref().map_or("of no known size".to_string(), |(dtype, shape)| format!("{dtype}{shape:?}"))
}

fn buffer_value(shape: &Option<(DType, Shape)>, buffer: Buffer) -> Result<Value> {
    let (dtype, shape) = shape.as_ref().ok_or_else(no_shape)?;
    Ok(Value::Tensor(Tensor::from_buffer(*dtype, shape, buffer)?))
}

pub(super) fn no_shape() -> crate::Error {
    error!(Fail, "an output's shape is not known")
}

/// The slabs of the devices that are not the host, by slab index. A subgraph has those of its node, which are `ready`, where they are long enough,
/// and else what its sizes take that were not known to the plan.
pub(crate) fn device_slabs(
    plan: &RunPlan,
    env: RunEnv<'_>,
    ready: Option<&[(DeviceId, DeviceRange<'_>)]>,
) -> Result<SmallVec<[Option<DeviceSlab>; 2]>> {
    let mut slabs = SmallVec::new();
    for (memory, bytes) in &plan.slabs {
        let fits = |part: &&(DeviceId, DeviceRange<'_>)| part.0 == *memory && part.1.len >= *bytes;
        let part = ready.and_then(|ready| ready.iter().find(fits));
        // A slab of no bytes is the place of values without elements.
        slabs.push(match part {
            _ if *memory == DeviceId::HOST => None,
            Some((_, part)) => Some(DeviceSlab { buffer: part.buffer.clone(), offset: part.offset }),
            None => {
                let buffer = match ready {
                    Some(_) => {
                        let values = ValueMemory { memory: env.memory, source: Source::Arena };
                        values.allocate(*memory, Category::Dynamic, *bytes)?
                    }
                    None => env.memory.allocate_outside(*memory, Category::Slab, *bytes)?,
                };
                Some(DeviceSlab { buffer: buffer.freeze(), offset: 0 })
            }
        });
    }
    Ok(slabs)
}
