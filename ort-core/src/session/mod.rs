//! Sessions: a model compiled for devices, ready to run from any thread.
//!
//! ```no_run
//! use ort_core::session::{Model, Session};
//! use ort_core::tensor::Tensor;
//!
//! let model = Model::load("model.onnx")?;
//! let session = Session::builder(&model).threads(2).build()?;
//! let image = Tensor::from_slice(&[1, 3, 224, 224], &vec![0.0f32; 3 * 224 * 224])?;
//! for (name, value) in session.run(&[("input", image.into())])? {
//!     println!("{name}: {:?}", value.tensor()?.shape());
//! }
//! # Ok::<(), ort_core::Error>(())
//! ```

mod binding;
mod bound_run;
mod builder;
mod cache;
mod cached;
mod compiled;
mod dynamic;
mod frame;
mod kept;
mod largest;
mod memory;
mod model;
mod nested;
mod options;
mod places;
mod poison;
mod profile;
mod program;
mod streamed;

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use ort_alloc::{Advance, Allocator, Budget, Buffer, Category, DeviceId, HostAllocator, Stats, allocate_in};

pub use binding::{InputSource, IoBinding, OutputTarget};
pub use builder::SessionBuilder;
pub(crate) use dynamic::ValueMemory;
pub(crate) use frame::in_words;
pub use kept::{IdleMemory, release_idle_memory};
pub use memory::MemoryUse;
pub use model::Model;
pub use options::{ArenaDevice, ExecutionMode, SessionOptions};
pub use profile::{EventMemory, Profile, ProfileEvent};
pub(crate) use program::{Origin, Program, Slot, SlotId, Step};

use crate::dim::{Bindings, Symbol};
use crate::ep::{CancelToken, RunControl};
use crate::ir::ValueType;
use crate::plan::{
    BoundValues, KindBytes, MemoryKind, PlanReport, Planning, RunPlan, largest_at_peak, report, resolve_bound,
};
use crate::tensor::{Tensor, TensorBuffer, Value, ValueView};
use crate::{Error, Limits, MemoryShortage, Result, advise, ensure, error};
use compiled::Compiled;
use frame::{Frame, Given, Memory, RunEnv, Slabs, Tables, bind, device_slabs, fits};
use kept::Kept;
use streamed::Streaming;

/// A model compiled for its devices. Cheap beside its [`Model`], and usable from any number of threads.
pub struct Session {
    model: Model,
    /// Shared with other sessions on the model that were built alike.
    compiled: Arc<Compiled>,
    /// What runs of this session hold, within the budget of what is compiled.
    budget: Arc<Budget>,
    threads: usize,
    planning: Planning,
    limits: Limits,
    /// What finished runs leave for the next ones.
    kept: Arc<Kept>,
    poison: bool,
    /// What bindings know of the session, once there is one.
    signature: OnceLock<Arc<binding::Signature>>,
}

/// An input or output of a model.
#[derive(Clone, Debug)]
pub struct ValueSpec {
    /// Its name.
    pub name: String,
    /// Its type, with symbolic sizes.
    pub ty: ValueType,
    /// Whether the caller may leave it out.
    pub has_default: bool,
}

/// What bounds one run.
#[derive(Clone, Debug, Default)]
pub struct RunOptions<'a> {
    /// Ends the run when it is cancelled.
    pub cancel: CancelToken,
    /// When the run gives up; by default after the session's [`Limits::deadline`].
    pub deadline: Option<Instant>,
    /// Collects the time of each node.
    pub profile: Option<&'a Profile>,
    /// Memories whose arenas give back their free regions after the run.
    pub shrink_arenas: Vec<ArenaDevice>,
}

impl RunOptions<'_> {
    /// Changes a setting of the run by its key, as ONNX Runtime's `add_run_config_entry` does. There is one:
    /// `memory.enable_memory_arena_shrinkage`, a list as in `cpu:0;gpu:0` of the memories whose arenas give back their free regions after the
    /// run; `gpu` counts the devices with memory of their own.
    ///
    /// # Errors
    ///
    /// A key or a device that does not exist. A run is refused that is to shrink an arena which the session does not have.
    pub fn add_run_config_entry(&mut self, key: &str, value: &str) -> Result<()> {
        ensure!(
            options::RUN_ENTRIES.contains(&key),
            InvalidArgument,
            help = advise("options of a run", key, options::RUN_ENTRIES),
            "there is no option '{key}' of a run"
        );
        self.shrink_arenas = options::shrink_devices(value)?;
        Ok(())
    }
}

impl Session {
    /// A builder for a session on `model`.
    pub fn builder(model: &Model) -> SessionBuilder {
        SessionBuilder::new(model)
    }

    /// The model it runs.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The inputs, in the model's order.
    pub fn inputs(&self) -> Vec<ValueSpec> {
        self.model.inputs()
    }

    /// The outputs, in the model's order.
    pub fn outputs(&self) -> Vec<ValueSpec> {
        let graph = &self.compiled.program.graph;
        let outputs = graph.outputs.iter().zip(self.model.graph().outputs.iter());
        outputs
            .map(|(id, named)| ValueSpec {
                name: self.model.graph().value(*named).name.to_string(),
                ty: graph.value(*id).ty.clone(),
                has_default: false,
            })
            .collect()
    }

    /// Runs the model on named inputs and returns the named outputs, each with memory of its own.
    pub fn run(&self, inputs: &[(&str, Value)]) -> Result<Vec<(String, Value)>> {
        self.run_with(inputs, &RunOptions::default())
    }

    /// The same with a deadline, a cancel token or a profile.
    pub fn run_with(
        &self,
        inputs: &[(&str, Value)],
        options: &RunOptions<'_>,
    ) -> Result<Vec<(String, Value)>> {
        let aligned = align(inputs)?;
        let given = self.arrange(&aligned)?;
        let mut bindings = Bindings::new();
        bind(&self.compiled.program, &given, &mut bindings)?;
        let (plan, bindings) = self.plan_fitting(bindings, &given, &BoundValues::unbound(self.planning))?;
        let mut tables = Tables::default();
        let work = RunWork { plan: &plan, bindings: &bindings, given: Given::Views(&given) };
        let outputs = self.execute(work, (&mut [], &mut tables), options, |frame| frame.run())?;
        let names = self.model.graph();
        let names = names.outputs.iter().map(|&id| names.value(id).name.to_string());
        Ok(names.zip(outputs).collect())
    }

    /// The plan for these bindings; where what is given contradicts it, one that knows no sizes.
    fn plan_fitting(
        &self,
        bindings: Bindings,
        given: &[ValueView<'_>],
        bound: &BoundValues,
    ) -> Result<(Arc<RunPlan>, Bindings)> {
        let plan = self.plan_bound(&bindings, bound)?;
        if fits(&self.compiled.program, &plan, given) {
            return Ok((plan, bindings));
        }
        Ok((self.plan_bound(&Bindings::new(), bound)?, Bindings::new()))
    }

    /// Where memory of the host for outputs comes from.
    fn output_allocator(&self) -> &dyn Allocator {
        match &self.kept.outputs {
            Some(recycler) => &**recycler,
            None => &**HostAllocator::global(),
        }
    }

    /// One run of the program: takes the slabs, and lets `run` go through a frame.
    fn execute<T>(
        &self,
        work: RunWork<'_>,
        (bound, tables): (&mut [Option<TensorBuffer>], &mut Tables),
        options: &RunOptions<'_>,
        run: impl FnOnce(Frame<'_>) -> Result<T>,
    ) -> Result<T> {
        let RunWork { plan, bindings, given } = work;
        self.kept.dynamic.check_shrink(&options.shrink_arenas)?;
        let deadline = options.deadline.or_else(|| self.limits.until());
        let (streams, program) = (&self.compiled.streams, &self.compiled.program);
        let (room, _turn) = streams.turn(program, || self.free_beside(plan), deadline)?;
        let mut slab = self.take_slab(plan, room.to_pack)?;
        // Where a limit counts every byte, what the run takes besides is its own from here on: other runs cannot make it fail midway.
        let advance = match self.kept.outputs {
            None => Some(self.budget.advance((plan.peak() - plan.host_slab()).saturating_add(room.to_pack))?),
            Some(_) => None,
        };
        let budget = advance.as_ref().map_or(&self.budget, Advance::budget);
        let control = RunControl {
            cancel: options.cancel.clone(),
            deadline,
            budget: budget.clone(),
            threads: self.threads,
        };
        let outputs = self.output_allocator();
        let release = |tensor: &Tensor| self.model.release(tensor);
        let streaming = (!self.compiled.streams.is_empty()).then_some(Streaming {
            streams: &self.compiled.streams,
            keep: &room.keep,
            budget,
            threads: self.threads,
            release: &release,
        });
        let devices = &self.compiled.devices;
        let (profile, memory) = (options.profile, &self.kept.dynamic);
        let (planning, outlives_run) = (self.planning, true);
        let env = RunEnv {
            control: &control,
            devices,
            profile,
            outputs,
            planning,
            depth: 0,
            poison: self.poison,
            memory,
            outlives_run,
            streaming,
        };
        let host = slab.bytes_mut().ok_or_else(|| error!(Fail, "host memory is not the host's"))?;
        let devices = device_slabs(plan, env)?;
        let memory = Memory { slabs: Slabs { host, devices: &devices }, bound, tables };
        let frame = Frame::new((program, plan, bindings), env, given, memory);
        // A kernel that panics is a defect; the caller gets an error all the same, and the slab is dropped.
        let outputs = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run(frame)));
        let outputs = outputs.unwrap_or_else(|panic| Err(panic_error(&*panic)))?;
        if room.window > 0 {
            // What runs read of the file in passing would add up to all of it.
            self.model.release_all();
        }
        self.kept.run_ended(Some(slab).filter(|_| self.planning != Planning::Off));
        self.kept.dynamic.shrink(&options.shrink_arenas);
        Ok(outputs)
    }

    /// Puts named inputs in order; defaults stand in for what is left out.
    fn arrange<'v>(&'v self, inputs: &'v [(&str, Value)]) -> Result<Vec<ValueView<'v>>> {
        let graph = &self.compiled.program.graph;
        let known = |name: &str| graph.inputs.iter().any(|&id| &*graph.value(id).name == name);
        for (index, (name, _)) in inputs.iter().enumerate() {
            ensure!(
                !inputs.iter().take(index).any(|(earlier, _)| earlier == name),
                InvalidArgument,
                "input '{name}' is given twice"
            );
            if !known(name) {
                let names: Vec<&str> = graph.inputs.iter().map(|&id| &*graph.value(id).name).collect();
                return Err(error!(InvalidArgument, "the model has no input '{name}'").help(advise(
                    "inputs",
                    name,
                    names.iter().copied(),
                )));
            }
        }
        let mut given = Vec::with_capacity(graph.inputs.len());
        for &id in &graph.inputs {
            let info = graph.value(id);
            let found = inputs.iter().find(|(name, _)| *name == &*info.name).map(|(_, value)| value.view());
            let default = || graph.input_defaults.get(&id).map(|tensor| ValueView::Tensor(tensor.view()));
            let value = found.or_else(default).ok_or_else(|| {
                error!(InvalidArgument, "input '{}' ({}) is not given", info.name, info.ty)
                    .help("give a value for each input that has no default")
            })?;
            check_type(&info.name, &info.ty, &value)?;
            given.push(value);
        }
        Ok(given)
    }

    fn plan_for(&self, bindings: &Bindings) -> Result<Arc<RunPlan>> {
        self.plan_bound(bindings, &BoundValues::unbound(self.planning))
    }

    /// The plan where some inputs and outputs lie in buffers of a binding.
    fn plan_bound(&self, bindings: &Bindings, bound: &BoundValues) -> Result<Arc<RunPlan>> {
        self.compiled.program.plans.get(bindings, bound, || {
            let start = Instant::now();
            let plan = resolve_bound(&self.compiled.program, bindings, self.threads, bound)?;
            let milliseconds = start.elapsed().as_millis() as u64;
            tracing::info!(dims = %bindings, peak_bytes = plan.peak(), milliseconds, "planned");
            Ok(plan)
        })
    }

    /// What a run may take: what nothing holds, idle slabs and regions of arenas, and packed weights that may go.
    fn free_bytes(&self) -> usize {
        let packed = self.compiled.streams.resident_bytes(&self.compiled.program);
        let idle = self.kept.slab_bytes().saturating_add(self.kept.dynamic.idle_bytes());
        self.budget.available().saturating_add(idle).saturating_add(packed)
    }

    /// The bytes that a run leaves for packed weights. Refuses a run that the budget cannot hold, before anything runs.
    fn free_beside(&self, plan: &RunPlan) -> Result<usize> {
        let (streams, program) = (&self.compiled.streams, &self.compiled.program);
        let available = self.free_bytes();
        let needed = plan.peak().saturating_add(streams.least_bytes());
        if needed <= available {
            return Ok(available - plan.peak());
        }
        let mut largest = largest_at_peak(plan, program);
        largest.extend(streams.largest(program));
        largest.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        largest.truncate(5);
        let (_, limit) = self.budget.tightest();
        let shortage = MemoryShortage { needed, available, limit, largest };
        let advice = format!(
            "raise the memory limit to {} bytes or use smaller dimensions",
            shortage.sufficient_limit()
        );
        Err(Error::out_of_memory("the run", shortage).help(advice))
    }

    /// A slab for a run: an idle one that fits and is not more than twice too large, or a new one.
    /// `to_pack` bytes are left for weights.
    fn take_slab(&self, plan: &RunPlan, to_pack: usize) -> Result<Buffer> {
        const SLACK: usize = 1 << 20;
        let bytes = plan.host_slab();
        // What the run takes beside its slab.
        let rest = (plan.peak() - bytes).saturating_add(to_pack);
        if self.budget.available() < rest.saturating_add(bytes) {
            self.kept.dynamic.trim();
        }
        let mut idle = self.kept.slabs.lock();
        let fits = |buffer: &Buffer| buffer.len() >= bytes && buffer.len() <= bytes.saturating_mul(2) + SLACK;
        let mut found = idle.iter().position(fits).map(|index| idle.swap_remove(index));
        if found.is_none() {
            // What does not fit this run would only add to the resident size.
            idle.pop();
        }
        // Idle slabs make room where the budget is short, at last the one that is larger than this run needs.
        while self.budget.available() < rest && idle.pop().is_some() {}
        if self.budget.available() < rest {
            found = None;
        }
        if let Some(slab) = found {
            return Ok(slab);
        }
        while self.budget.available() < rest.saturating_add(bytes) && idle.pop().is_some() {}
        drop(idle);
        Ok(allocate_in(&self.budget, Category::Slab, &**HostAllocator::global(), bytes, 64)?)
    }

    /// The memory of a run with these sizes of symbolic dimensions; a dimension that is not named counts as 1.
    /// A name that the model does not have is an error.
    pub fn plan(&self, dims: &[(&str, i64)]) -> Result<PlanReport> {
        let bindings = self.bindings(dims)?;
        self.report(&bindings)
    }

    /// The memory of a run on these inputs.
    pub fn plan_for_inputs(&self, inputs: &[(&str, Value)]) -> Result<PlanReport> {
        let given = self.arrange(inputs)?;
        let mut bindings = Bindings::new();
        bind(&self.compiled.program, &given, &mut bindings)?;
        self.report(&bindings)
    }

    fn report(&self, bindings: &Bindings) -> Result<PlanReport> {
        let plan = self.plan_for(bindings)?;
        let mut report = report(&self.compiled.program, &plan, bindings, self.threads);
        let memory = self.memory();
        report.weights_bytes = memory.weights;
        let streams = &self.compiled.streams;
        let available = self.free_bytes();
        let streamed = streams.streamed_bytes(available.saturating_sub(plan.peak()));
        let packed = self.compiled.packed_bytes + streams.total_bytes() - streamed;
        let weights = [
            (MemoryKind::WeightsMapped, memory.weights_mapped),
            (MemoryKind::WeightsPacked, packed),
            (MemoryKind::WeightsCached, memory.cached),
            (MemoryKind::WeightsStreamed, streamed),
        ];
        report.kinds.extend(weights.map(|(kind, bytes)| KindBytes { kind, bytes, symbolic: None }));
        report.available_bytes = available.saturating_sub(streams.least_bytes());
        Ok(report)
    }

    /// Bindings for all symbolic dimensions of the inputs.
    fn bindings(&self, dims: &[(&str, i64)]) -> Result<Bindings> {
        let symbols = self.model.symbols();
        let mut bindings = Bindings::new();
        for symbol in &symbols {
            bindings.insert(symbol.clone(), 1);
        }
        for (name, size) in dims {
            let symbol = symbols.iter().find(|symbol| symbol.to_string() == *name);
            let symbol = symbol.ok_or_else(|| unknown_dim(name, &symbols))?;
            ensure!(*size >= 0, InvalidArgument, "dimension '{name}' cannot be {size}");
            bindings.insert(symbol.clone(), *size);
        }
        Ok(bindings)
    }

    /// Which device runs each node: (node, operator, provider).
    pub fn placement(&self) -> Vec<(String, String, String)> {
        let step = |step: &Step| {
            let provider = self.compiled.devices.get(step.device).map_or("", |device| device.info().provider);
            (step.name.to_string(), step.op.to_string(), provider.to_string())
        };
        self.compiled.program.steps.iter().map(step).collect()
    }

    /// The counters of the session's arenas, which hold values whose size only the run tells: one for the host and one for each
    /// device with memory of its own. Empty where the session has none.
    ///
    /// Their names are those of ONNX Runtime's `GetStats`, and as text they read like it.
    pub fn allocator_stats(&self) -> Vec<(DeviceId, Stats)> {
        self.kept.dynamic.stats()
    }

    /// What was rewritten before the graph was compiled.
    pub fn rewrites(&self) -> &crate::rewrite::Report {
        &self.compiled.rewrites
    }

    /// The threads inside one operator.
    pub fn threads(&self) -> usize {
        self.threads
    }
}

/// What one run computes.
struct RunWork<'a> {
    plan: &'a RunPlan,
    bindings: &'a Bindings,
    given: Given<'a>,
}

/// The inputs with memory that kernels can read as typed slices: those that are not aligned are copied.
fn align<'n>(inputs: &[(&'n str, Value)]) -> Result<Vec<(&'n str, Value)>> {
    inputs.iter().map(|(name, value)| Ok((*name, value.to_aligned()?))).collect()
}

fn unknown_dim(name: &str, symbols: &[Symbol]) -> Error {
    let known: Vec<String> = symbols.iter().map(Symbol::to_string).collect();
    error!(InvalidArgument, "the model has no symbolic dimension '{name}'").help(advise(
        "symbolic dimensions",
        name,
        known.iter().map(String::as_str),
    ))
}

fn check_type(name: &str, expected: &ValueType, value: &ValueView<'_>) -> Result<()> {
    match (expected, value.tensor()) {
        (ValueType::Tensor(expected), Ok(tensor)) => ensure!(
            expected.dtype == tensor.dtype(),
            InvalidArgument,
            "input '{name}' is {}, expected {}",
            tensor.dtype().name(),
            expected.dtype.name()
        ),
        (ValueType::Tensor(_), Err(problem)) => return Err(problem.within(format!("input '{name}'"))),
        (ValueType::Unknown | ValueType::Optional(_), _) => {}
        (_, Ok(_)) => {
            return Err(error!(InvalidArgument, "input '{name}' is a tensor, expected {expected}"));
        }
        _ => {}
    }
    Ok(())
}

fn panic_error(panic: &(dyn std::any::Any + Send)) -> Error {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
    error!(RuntimeException, "a kernel panicked: {text}")
        .help("this is a defect of the runtime: please report it")
}
