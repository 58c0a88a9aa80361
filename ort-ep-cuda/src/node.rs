//! A compiled node: caches its kernel's launches per shape, and runs them.

use std::sync::Arc;

use ort_core::dtype::DType;
use ort_core::ep::{Executable, IoShapes, NewTensor, RunCx};
use ort_core::tensor::Shape;
use ort_core::{Result, Within, error};
use ort_gpu::{Arg, BoundTensors, Key, LaunchCache, NodeInfo};
use smallvec::SmallVec;

use crate::choices::fastest;
use crate::device_state::{DeviceState, FreeMemory};
use crate::driver::{Call, Launched, Routed, Routine};
use crate::kernels::{self, Counted, CudaKernel};
use crate::launch::{Bounds, Code, Launch, OpCx, Operand, Param, ways};
use crate::libraries::ALIGNMENT;
use crate::memory::address;
use crate::modules::Entry;

/// A node on the device.
pub(crate) struct Node {
    pub(crate) kernel: &'static CudaKernel,
    pub(crate) info: NodeInfo,
    pub(crate) state: Arc<DeviceState>,
    pub(crate) cache: LaunchCache<Met, Step>,
}

/// The cache key of launches: everything they depend on.
#[derive(PartialEq, Eq)]
pub(crate) struct Met {
    key: Key,
    /// The library workspace in bytes; `None` if libraries may not be called.
    room: Option<usize>,
    /// Whether kernels may read tensors through TMA maps.
    has_maps: bool,
    phase: Phase,
}

/// Which launches of a node: those up to the count, or those after it. Nodes whose output shapes
/// are known before the run have only the former.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    First,
    Counted(usize),
}

/// A launch with its entry, unless it is a library call.
pub(crate) struct Step {
    entry: Option<Entry>,
    launch: Launch,
}

impl Executable for Node {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        let Some(workspace) = self.kernel.workspace else { return Ok(0) };
        // Addresses are not known yet, so we assume that all tensors are aligned.
        let limits = Bounds { has_maps: self.has_maps(), ..self.state.bounds(Some(self.room(shapes))) };
        workspace(&self.info.planned(shapes, limits))
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        match &self.kernel.counted {
            Some(counted) => self.run_counted(counted, cx),
            None => {
                let given = BoundTensors::new(cx, self.kernel.def.host_inputs, &self.info.input_types)?;
                self.launch_all(&given, Phase::First, cx).map(|_| ())
            }
        }
    }

    fn kernels(&self) -> Option<String> {
        // The launches used last are those of the last run.
        let steps = self.cache.last_used()?;
        let mut names: Vec<String> = Vec::new();
        for step in steps.iter() {
            let name = match &step.launch.code {
                Code::Library(routine) => routine.name(),
                Code::Family(_) | Code::Text(_) => step.launch.entry.clone(),
            };
            if !names.contains(&name) {
                names.push(name);
            }
        }
        (!names.is_empty()).then(|| names.join(", "))
    }
}

impl Node {
    /// Returns the most workspace that a library may use, given what the plan and the device leave.
    /// Without `gpu_mem_limit`, the plan does not count other nodes' memory against the free bytes.
    /// We then offer half of what remains after this node's tensors.
    fn room(&self, shapes: &IoShapes<'_>) -> usize {
        let Some(FreeMemory { bytes: left, is_of_limit }) = self.state.free_memory() else {
            return shapes.room;
        };
        let all = self.info.input_types.iter().zip(shapes.inputs);
        let all = all.chain(self.info.output_types.iter().zip(shapes.outputs));
        let bytes = |(dtype, shape): (&Option<DType>, &Option<Shape>)| match (dtype, shape) {
            // A size that overflows counts as all memory, so that no library gets a workspace.
            (Some(dtype), Some(shape)) => dtype.byte_len(shape.iter().product()).unwrap_or(usize::MAX),
            _ => 0,
        };
        let left = left.saturating_sub(all.map(bytes).fold(0, usize::saturating_add));
        shapes.room.min(if is_of_limit { left } else { left / 2 })
    }

    /// Returns the library workspace of a run, or `None` if libraries may not be called: none is
    /// loaded, the kernel uses none, or a tensor is misaligned.
    fn room_of(&self, given: &BoundTensors<'_>) -> Result<Option<usize>> {
        if !self.state.libraries.any() || self.kernel.workspace.is_none() {
            return Ok(None);
        }
        Ok(self.are_aligned(given)?.then(|| given.workspace.map_or(0, |range| range.len)))
    }

    /// Whether all tensors are aligned for libraries and TMA maps.
    fn are_aligned(&self, given: &BoundTensors<'_>) -> Result<bool> {
        for range in given.input_ranges.iter().chain(&given.output_ranges).flatten() {
            // An empty tensor has no address that could be misaligned.
            if address(self.state.id, *range)?.is_some_and(|address| !address.is_multiple_of(ALIGNMENT)) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Whether kernels of the node may read its tensors through TMA maps once these are aligned: it
    /// writes float16 or bfloat16, and the device has warpgroups.
    fn has_maps(&self) -> bool {
        let mut types = self.info.output_types.iter().flatten();
        self.state.limits.has_warpgroups() && types.any(|dtype| matches!(dtype, DType::F16 | DType::BF16))
    }

    /// Runs a node with data-dependent output shapes: counts, reads the count back, allocates the
    /// outputs and fills them.
    fn run_counted(&self, counted: &Counted, cx: &mut RunCx<'_>) -> Result<()> {
        let given = BoundTensors::of_inputs(cx, self.kernel.def.host_inputs)?;
        let count = match self.launch_all(&given, Phase::First, cx)? {
            // No launches: there is nothing to count.
            0 => 0,
            _ => self.read_count(&given)?,
        };
        let shapes = (counted.shapes)(&self.op_cx(&given, None), count)?;
        let mut made = Vec::with_capacity(shapes.len());
        for (index, (shape, dtype)) in shapes.iter().zip(&self.info.output_types).enumerate() {
            // An output that nothing reads gets no memory.
            made.push(match dtype.filter(|_| cx.wants(index)) {
                Some(dtype) => Some(cx.allocate_in(self.state.id, dtype, shape)?),
                None => None,
            });
        }
        self.launch_all(&given.with_outputs(&made)?, Phase::Counted(count), cx)?;
        for (index, tensor) in made.into_iter().enumerate() {
            tensor.map_or(Ok(()), |tensor| cx.set(index, tensor.finish()?))?;
        }
        Ok(())
    }

    /// Reads the count that the launches wrote. The download flushes the queue, so a CUDA graph
    /// ends here.
    fn read_count(&self, given: &BoundTensors<'_>) -> Result<usize> {
        // Every counting kernel reserves its count first, so it is found at the workspace's start.
        let count = kernels::count(&self.op_cx(given, None), &mut 0);
        let (address, _) = self.place(count.arg, given)?;
        let mut bytes = [0; size_of::<u64>()];
        self.state.queue.download(address, &mut bytes)?;
        usize::try_from(u64::from_ne_bytes(bytes)).map_err(|_| error!(Fail, "a count is beyond memory"))
    }

    /// Submits the launches, and returns how many there are.
    fn launch_all(&self, given: &BoundTensors<'_>, phase: Phase, run: &RunCx<'_>) -> Result<usize> {
        let steps = self.steps(given, phase, run)?;
        steps.iter().try_for_each(|step| self.launch(step, given))?;
        Ok(steps.len())
    }

    /// The view of the bound tensors that kernels get.
    fn op_cx<'a>(&'a self, given: &'a BoundTensors<'_>, room: Option<usize>) -> OpCx<'a> {
        self.info.bound(given, self.state.bounds(room))
    }

    /// Returns the launches for the bound tensors, from the cache if the same key occurred before.
    fn steps(&self, given: &BoundTensors<'_>, phase: Phase, run: &RunCx<'_>) -> Result<Arc<[Step]>> {
        let has_maps = self.has_maps() && self.are_aligned(given)?;
        let met = Met { key: given.key()?, room: self.room_of(given)?, has_maps, phase };
        if let Some(steps) = self.cache.find(&met) {
            return Ok(steps);
        }
        let mut cx = self.op_cx(given, met.room);
        // Only a run knows its tensors' alignment; the device's own bounds therefore exclude maps.
        cx.limits.has_maps = has_maps;
        let mut ways = match (phase, &self.kernel.counted) {
            (Phase::Counted(count), Some(counted)) => vec![(counted.write)(&cx, count)?],
            _ => ways(&cx, self.kernel.launches)?,
        };
        // A single candidate needs no timing.
        let place = match ways.len() {
            1 => 0,
            _ => self.state.choices.find(&ways, || self.find_fastest(&ways, given, run))?,
        };
        let steps: Arc<[Step]> = self.with_entries(ways.swap_remove(place))?.into();
        self.cache.insert(met, steps.clone());
        Ok(steps)
    }

    fn with_entries(&self, launches: Vec<Launch>) -> Result<Vec<Step>> {
        let step = |launch| Ok(Step { entry: self.state.modules.entry(&launch)?, launch });
        launches.into_iter().map(step).collect()
    }

    /// Returns the index of the fastest candidate, timed on the bound tensors. If an output aliases
    /// an input, timing would overwrite the input, so we time into separate outputs. If memory is
    /// short for those, we return the first candidate.
    fn find_fastest(&self, ways: &[Vec<Launch>], given: &BoundTensors<'_>, run: &RunCx<'_>) -> Result<usize> {
        // An input that shares an output's memory is bound as that output.
        let is_output = |input: &Operand| matches!(input.arg, Arg::Output(_));
        let times = if !given.inputs.iter().flatten().any(is_output) {
            self.time(ways, given)?
        } else if let Some(outputs) = self.outputs_apart(given, run) {
            self.time(ways, &given.with_outputs(&outputs)?)?
        } else {
            return Ok(0);
        };
        let place = fastest(&times);
        tracing::debug!("{}: way {place} of {times:?} ms", self.info.op);
        Ok(place)
    }

    /// Times each candidate in milliseconds; `None` for one that the device cannot run.
    fn time(&self, ways: &[Vec<Launch>], given: &BoundTensors<'_>) -> Result<Vec<Option<f32>>> {
        let steps = ways.iter().map(|launches| self.with_entries(launches.clone()));
        let steps: Vec<Vec<Step>> = steps.collect::<Result<_>>()?;
        let calls = |steps: &Vec<Step>| steps.iter().map(|step| self.call(step, given)).collect();
        let calls: Vec<Vec<Call>> = steps.iter().map(calls).collect::<Result<_>>()?;
        self.state.queue.time(&calls).within(|| format!("trying ways to compute {}", self.info.op))
    }

    /// Allocates separate outputs for timing, if they fit into a quarter of the free memory.
    fn outputs_apart(&self, given: &BoundTensors<'_>, run: &RunCx<'_>) -> Option<Vec<Option<NewTensor>>> {
        let bytes = given.outputs.iter().flatten().map(Operand::bytes).fold(0, usize::saturating_add);
        self.state.free_memory().filter(|left| left.bytes / 4 >= bytes)?;
        let apart = |output: &Option<Operand>| match output {
            Some(output) => run.allocate_in(self.state.id, output.dtype, &output.shape).map(Some),
            None => Ok(None),
        };
        given.outputs.iter().map(apart).collect::<Result<_>>().ok()
    }

    fn launch(&self, step: &Step, given: &BoundTensors<'_>) -> Result<()> {
        let call = self.call(step, given)?;
        self.state.queue.ask(call).within(|| format!("kernel '{}'", step.launch.entry))
    }

    fn call(&self, step: &Step, given: &BoundTensors<'_>) -> Result<Call> {
        let launch = &step.launch;
        match (&step.entry, &launch.code) {
            (Some(entry), _) => Ok(Call::Launch(Box::new(self.launched(entry, launch, given)?))),
            (None, Code::Library(routine)) => {
                Ok(Call::Routine(Box::new(self.routed(routine, launch, given)?)))
            }
            _ => Err(error!(Fail, "kernel '{}' has no code", launch.entry)),
        }
    }

    fn launched(&self, entry: &Entry, launch: &Launch, given: &BoundTensors<'_>) -> Result<Launched> {
        let mut launched = Launched::new(entry.function, [launch.grid, launch.block], launch.shared);
        for param in &launch.params {
            match param {
                // A pointer has 8 bytes on every device, and null means that the tensor is left
                // out.
                Param::Tensor(None) => launched.bytes(&[0; 8]),
                Param::Tensor(Some(arg)) => {
                    let (address, bytes) = self.place(*arg, given)?;
                    launched.tensor(address, bytes as usize);
                }
                Param::Map(arg, boxes) => {
                    let (address, bytes) = self.place(*arg, given)?;
                    let map = boxes.encode(self.state.queue.context(), address)?;
                    launched.map(map, address, bytes as usize);
                }
                Param::Bytes(bytes) => launched.bytes(bytes),
            }
        }
        Ok(launched)
    }

    fn routed(
        &self,
        routine: &Arc<dyn Routine>,
        launch: &Launch,
        given: &BoundTensors<'_>,
    ) -> Result<Routed> {
        let mut tensors = SmallVec::new();
        for param in &launch.params {
            tensors.push(match param {
                Param::Tensor(Some(arg)) => self.place(*arg, given)?,
                // A routine finds its tensors by position, so a missing one keeps its place.
                _ => (0, 0),
            });
        }
        Ok(Routed { routine: routine.clone(), tensors })
    }

    /// Returns a tensor's address and bytes.
    fn place(&self, arg: Arg, given: &BoundTensors<'_>) -> Result<(u64, u64)> {
        let range = given.range(arg).ok_or_else(|| error!(Fail, "{arg:?} has no memory"))?;
        Ok((address(self.state.id, range)?.unwrap_or(0), range.len as u64))
    }
}
