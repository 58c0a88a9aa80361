//! The interpreter loop over the steps of a program.
//!
//! A frame is one run of one program or subgraph. It keeps every value where the plan put it, and
//! runs the steps in schedule order. `call.rs` invokes a step's kernel, and `outputs.rs` places its
//! outputs.

#![allow(
    clippy::indexing_slicing,
    reason = "ids of slots and steps are made with the program, and each table of a frame and plan has an entry for each"
)]

use std::ops::Range;
use std::sync::Arc;

use ort_alloc::{Allocator, Buffer, Category, DeviceId};
use smallvec::SmallVec;

use super::deferred::WeightPacking;
use super::inputs::Given;
use super::profile::{EventMemory, EventTensor, Seen};
use super::streaming::{Streaming, WindowCursor};
use super::tables::StepTables;
use super::target::Target;
use super::views::{DeviceSlab, Sources, device_view, view_of};
use super::{Profile, ValueObserver};
use crate::dim::Bindings;
use crate::ep::dynamic::{RunMemory, Source, ValueMemory};
use crate::ep::{Device, RunControl};
use crate::interrupt::CoarseDeadline;
use crate::plan::{Action, PlanCaches, Planning, RunPlan, Storage};
use crate::program::{Program, SlotId, Work};
use crate::tensor::{DeviceRange, TensorBuffer, Value, ValueView};
use crate::{ErrorKind, Result, error};

/// The environment that all frames of a run share.
#[derive(Clone, Copy)]
pub(crate) struct RunEnv<'a> {
    pub(crate) control: &'a RunControl,
    pub(crate) devices: &'a [Arc<dyn Device>],
    /// Caches the plans of subgraphs.
    pub(crate) plans: &'a PlanCaches,
    pub(crate) profile: Option<&'a Profile>,
    pub(crate) observer: Option<&'a dyn ValueObserver>,
    /// The host allocator for outputs.
    pub(crate) outputs: &'a dyn Allocator,
    pub(crate) planning: Planning,
    /// The subgraph nesting depth; 0 for the model's graph.
    pub(crate) depth: usize,
    /// Whether to poison memory before kernels write it.
    pub(crate) poison: bool,
    /// Memory for values that cannot be planned.
    pub(crate) memory: RunMemory<'a>,
    /// Whether an output of the frame's program may become an output of the run.
    pub(crate) outlives_run: bool,
    /// Weights that are packed before the first step that needs them.
    pub(crate) packing: WeightPacking<'a>,
    /// On-demand weight packing; `None` if nothing of the program is streamed.
    pub(crate) streaming: Option<Streaming<'a>>,
}

/// The slabs of a run: the host's bytes and the device slabs.
pub(crate) struct Slabs<'a> {
    pub(crate) host: &'a mut [u8],
    /// By slab index of the plan; the entry of the host is `None`.
    pub(crate) devices: &'a [Option<DeviceSlab>],
}

/// The memory that a frame works in.
pub(crate) struct FrameMemory<'a> {
    pub(crate) slabs: Slabs<'a>,
    /// The streamed device constants; empty for subgraphs.
    pub(crate) windows: WindowCursor<'a>,
    /// The buffers of the run's I/O binding.
    pub(crate) bound: &'a mut [Option<TensorBuffer>],
    /// An empty list that the frame fills with the values that have memory of their own, by slot.
    pub(crate) owned: &'a mut Vec<Option<Value>>,
}

/// One run of a program or subgraph.
pub(crate) struct Frame<'a> {
    pub(super) program: &'a Program,
    pub(super) plan: &'a RunPlan,
    pub(super) bindings: &'a Bindings,
    pub(super) env: &'a RunEnv<'a>,
    pub(super) given: Given<'a>,
    pub(super) owned: &'a mut [Option<Value>],
    pub(super) slabs: Slabs<'a>,
    pub(super) windows: WindowCursor<'a>,
    /// Donated inputs and reused output buffers, which hold other values as well. In the order of
    /// `RunPlan::homes`.
    pub(super) homes: Vec<Option<Buffer>>,
    pub(super) bound: &'a mut [Option<TensorBuffer>],
}

impl<'a> Frame<'a> {
    pub(crate) fn new(
        (program, plan, bindings): (&'a Program, &'a RunPlan, &'a Bindings),
        env: &'a RunEnv<'a>,
        given: Given<'a>,
        FrameMemory { slabs, windows, bound, owned }: FrameMemory<'a>,
    ) -> Frame<'a> {
        owned.clear();
        owned.resize_with(program.slots.len(), || None);
        // Resident constants are in the frame from the start. Streamed constants arrive before the
        // step that reads them.
        for (slot, tensor) in windows.residents() {
            owned[slot.index()] = Some(Value::Tensor(tensor.clone()));
        }
        let homes = Vec::new();
        Frame { program, plan, bindings, env, given, owned, slabs, windows, homes, bound }
    }

    /// Runs every step and returns the outputs.
    pub(crate) fn run(&mut self, tables: &mut StepTables) -> Result<Vec<Value>> {
        self.run_steps(tables)?;
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

    /// Runs every step.
    pub(crate) fn run_steps(&mut self, tables: &mut StepTables) -> Result<()> {
        if let Some(problem) = &self.plan.contradiction {
            return Err(problem.clone());
        }
        self.env.packing.pack(self.program, self.plan)?;
        self.open_homes()?;
        self.copy_given()?;
        if let Some(observer) = self.env.observer {
            // The captures of a subgraph come after its inputs. The graph around it has shown them.
            self.show(observer, self.program.given.iter().take(self.program.graph.inputs.len()));
        }
        let deadline = CoarseDeadline::new(self.env.control.deadline);
        for index in 0..self.program.steps.len() {
            if self.plan.steps[index].action == Action::Run {
                // Checked between steps as well: a kernel looks at the deadline only after some
                // work, and a run may consist of many short steps.
                if self.env.control.cancel.is_cancelled() || deadline.is_past() {
                    self.env.control.check()?;
                }
                let start = self.env.profile.map(|_| std::time::Instant::now());
                self.step_with_constants(index, tables)
                    .map_err(|problem| match problem.kind() {
                        // The inputs did not cause this error, so do not list them.
                        ErrorKind::Cancelled | ErrorKind::OutOfMemory => problem,
                        _ => problem.help(self.inputs_in_words(index)),
                    })
                    .map_err(|problem| self.program.steps[index].failed(problem))?;
                if let (Some(profile), Some(start)) = (self.env.profile, start) {
                    profile.record(&self.program.steps[index], start, self.seen(index));
                }
            }
            if let Some(observer) = self.env.observer {
                self.show_outputs(observer, index);
            }
            // A skipped step releases values, too: a view or a concatenation in place may be the
            // last reader.
            for slot in &self.plan.steps[index].release {
                self.owned[slot.index()] = None;
            }
            for home in &self.plan.steps[index].closes {
                self.homes[*home as usize] = None;
            }
        }
        Ok(())
    }

    /// Shows the outputs of a step. Those of a skipped step are views, parts of another value, or
    /// unused.
    #[cold]
    fn show_outputs(&self, observer: &dyn ValueObserver, index: usize) {
        let step = &self.program.steps[index];
        // A copy between host and device computes no new value.
        if !matches!(step.work, Work::Copy) {
            self.show(observer, step.outputs.iter().flatten());
        }
    }

    /// Shows the tensors of these slots that are in host memory.
    fn show<'s>(&self, observer: &dyn ValueObserver, slots: impl Iterator<Item = &'s SlotId>) {
        for slot in slots {
            let Ok(ValueView::Tensor(tensor)) = self.value(*slot) else { continue };
            if tensor.is_host() {
                let value = self.program.slots[slot.index()].value;
                observer.observe(&self.program.graph.value(value).name, tensor);
            }
        }
    }

    /// Returns what a profile records about a step that has run.
    fn seen(&self, index: usize) -> Seen {
        let step = &self.program.steps[index];
        let constants = &self.program.graph.constants;
        let tensor = |slot: &SlotId| {
            let view = self.value(*slot).ok()?.tensor().ok()?;
            let is_constant = constants.contains_key(&self.program.slots[slot.index()].value);
            Some(EventTensor { dtype: view.dtype(), shape: view.shape().into(), is_constant })
        };
        let of = |slots: &[Option<SlotId>]| slots.iter().flatten().filter_map(tensor).collect();
        Seen {
            provider: self.env.devices.get(step.device).map_or("", |device| device.info().provider),
            inputs: of(&step.inputs),
            outputs: of(&step.outputs),
            memory: self.event_memory(index),
            depth: self.env.depth,
        }
    }

    /// Returns the memory that a step allocated and freed: the plan's numbers plus the values of
    /// unknown size.
    fn event_memory(&self, index: usize) -> EventMemory {
        let (plan, step) = (self.plan, &self.program.steps[index]);
        let bytes = |slot: &SlotId| match plan.slots[slot.index()].storage {
            Storage::Dynamic => self.owned[slot.index()].as_ref().map_or(0, Value::byte_count),
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

    /// Returns bytes of a host region: region 0 is the slab, the regions after it are the reused
    /// output buffers.
    pub(super) fn host_bytes(&self, region: usize, range: Range<usize>) -> Option<&[u8]> {
        match region.checked_sub(1) {
            None => self.slabs.host.get(range),
            Some(home) => self.homes.get(home)?.as_ref()?.bytes()?.get(range),
        }
    }

    /// Returns the help text for errors that have none: the step's inputs with their types and
    /// shapes.
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

    /// Where the frame finds values that are not in slabs.
    pub(super) fn sources(&self) -> Sources<'_> {
        let Frame { program, plan, owned, given, bound, .. } = self;
        Sources { program, plan, owned, given: *given, bound }
    }

    /// Runs a step with the streamed constants that it reads.
    fn step_with_constants(&mut self, index: usize, tables: &mut StepTables) -> Result<()> {
        if self.windows.is_empty() {
            return self.step(index, tables);
        }
        let plan = self.plan;
        let arrived = self.windows.arrive(index, &|step| plan.steps[step].action == Action::Run)?;
        let slots: SmallVec<[SlotId; 2]> = arrived.iter().map(|(slot, _)| *slot).collect();
        for (slot, tensor) in arrived {
            self.owned[slot.index()] = Some(Value::Tensor(tensor));
        }
        // A later upload overwrites this half of the window, so drop the tensors even if the step
        // fails.
        let done = self.step(index, tables);
        slots.iter().for_each(|slot| self.owned[slot.index()] = None);
        done
    }

    /// Runs a step: makes its outputs views of an input if that is possible, otherwise calls its
    /// kernel.
    fn step(&mut self, index: usize, tables: &mut StepTables) -> Result<()> {
        let step = &self.program.steps[index];
        let mut inferred = None;
        if self.dynamic_view(step, &mut inferred)? {
            return Ok(());
        }
        let mut running = RunningStep { frame: self, tables };
        let RunningStep { frame, tables } = &mut running;
        frame.find_targets(index, &mut tables.targets, &mut tables.shapes, inferred)?;
        frame.execute(index, tables)?;
        frame.keep(step, tables)
    }

    /// Returns the value of a slot, wherever it is.
    pub(super) fn value(&self, slot: SlotId) -> Result<ValueView<'_>> {
        let bytes = &mut |region, range| self.host_bytes(region, range);
        if let Some(view) = view_of(&self.sources(), slot, bytes) {
            return view;
        }
        self.device_value(slot)
    }

    /// Returns the value of a slot in a device slab.
    pub(super) fn device_value(&self, slot: SlotId) -> Result<ValueView<'_>> {
        device_view(self.plan, self.slabs.devices, slot).ok_or_else(|| {
            let name = &self.program.graph.value(self.program.slots[slot.index()].value).name;
            error!(Fail, "'{name}' was not computed")
        })
    }
}

/// A running step and its tables. Dropping it empties the tables and returns bound buffers to their
/// binding. This happens even after an error or a panic, because a binding outlives its runs.
struct RunningStep<'f, 'a> {
    frame: &'f mut Frame<'a>,
    tables: &'f mut StepTables,
}

impl Drop for RunningStep<'_, '_> {
    fn drop(&mut self) {
        for target in self.tables.targets.drain(..) {
            if let Target::Bound { place, buffer, .. } = target
                && let Some(bound) = self.frame.bound.get_mut(place)
            {
                *bound = Some(buffer);
            }
        }
        self.tables.shapes.clear();
        self.tables.handed.clear();
    }
}

/// Allocates the device slabs of a frame, by slab index; the entry of the host is `None`.
///
/// `ready` has the ranges that the plan of a subgraph's node set aside for the subgraph. If such a
/// range is too short, because that plan did not know some size, the slab is allocated here.
pub(crate) fn device_slabs(
    plan: &RunPlan,
    env: &RunEnv<'_>,
    ready: Option<&[(DeviceId, DeviceRange<'_>)]>,
) -> Result<SmallVec<[Option<DeviceSlab>; 2]>> {
    let mut slabs = SmallVec::new();
    for (memory, bytes) in &plan.slabs {
        let fits = |part: &&(DeviceId, DeviceRange<'_>)| part.0 == *memory && part.1.len >= *bytes;
        let part = ready.and_then(|ready| ready.iter().find(fits));
        // Empty slabs are allocated, too, because values without elements are placed in them.
        slabs.push(match part {
            _ if *memory == DeviceId::HOST => None,
            Some((_, part)) => Some(DeviceSlab { buffer: part.buffer.clone(), offset: part.offset }),
            None => {
                let buffer = match ready {
                    // The plan of the run does not include this slab, so it comes from the arena.
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
