//! Sessions: a model compiled for its devices, ready to run from any thread.
//!
//! [`Model`] is a loaded and inferred graph, [`SessionBuilder`] compiles it, and an [`IoBinding`]
//! runs it on preallocated memory. The run itself is in `crate::run`.
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
mod build;
mod builder;
mod compile_cache;
mod donated_run;
mod independent;
mod max_batch;
mod memory;
mod model;
mod options;
mod pipeline;
mod planning;
mod providers;
mod shared;
mod signature;
mod transfer;
mod value_spec;

use std::sync::{Arc, Mutex, OnceLock};

use ort_alloc::fork::PerProcess;
use ort_alloc::{DeviceId, Stats};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

pub use crate::ep::dynamic::ArenaDevice;
pub use crate::placement::NodePlacement;
pub use crate::plan::BatchSplit;
pub use binding::{InputSource, IoBinding, OutputTarget};
pub use bound_run::{BoundPeak, KeptIn};
pub use builder::SessionBuilder;
pub use memory::MemoryUse;
pub use model::Model;
pub use options::{ExecutionMode, SessionOptions};
pub use providers::{ProviderRequest, open_devices};
pub use value_spec::ValueSpec;

use crate::dim::Bindings;
use crate::ir::ValueId;
use crate::placement;
use crate::plan::{BatchProof, BatchRefusal};
use crate::program::{Program, SlotId, Step, Work};
use crate::run::Executor;
use crate::run::inputs::bind;
use crate::run::microbatch::RunRequest;
use crate::run::transfer::{self as transfers, check_reachable};
pub use crate::run::{
    EventMemory, EventTensor, IdleMemory, Profile, ProfileEvent, RunOptions, SharedMemory, ValueObserver,
    release_idle_memory,
};
use crate::seeded::{HashMap, HashSet};
use crate::tensor::{Value, ValueView};
use crate::{Error, Result, Within, advise, ensure, error};
use shared::Shared;
use signature::Signature;
use value_spec::check_type;

/// A model compiled for its devices. Any number of threads may run it at once. Sessions with equal
/// settings on one [`Model`] share the compiled program and its packed weights, unless they have a
/// memory limit of their own.
pub struct Session {
    model: Model,
    /// Runs the program.
    executor: Executor,
    /// Keeps the shared program alive, so that later sessions can share it. `None` if this session
    /// compiled a program of its own.
    _shared: Option<Arc<Shared>>,
    /// Serves runs whose inputs contradict the dimension names.
    independent: Independent,
    /// The inputs and outputs by name, for bindings; made by the first [`Session::io_binding`].
    signature: OnceLock<Arc<Signature>>,
}

/// The session with independent dimensions, which the first run that needs it builds, and its
/// settings.
struct Independent {
    settings: SessionBuilder,
    session: OnceLock<Arc<Session>>,
    /// Held while the session is built; a child of `fork` has a lock of its own. Readers of
    /// `session` do not take it, so that memory queries do not wait for a build.
    building: PerProcess<Mutex<()>>,
}

impl Independent {
    fn new(settings: SessionBuilder) -> Independent {
        Independent { settings, session: OnceLock::new(), building: PerProcess::default() }
    }

    /// The session, if a run has needed it so far.
    fn built(&self) -> Option<&Session> {
        self.session.get().map(|session| &**session)
    }
}

impl Session {
    /// Returns a builder for a session on `model`.
    pub fn builder(model: &Model) -> SessionBuilder {
        SessionBuilder::new(model)
    }

    /// The model that the session runs.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The inputs, in the model's order.
    pub fn inputs(&self) -> Vec<ValueSpec> {
        self.model.inputs()
    }

    /// The outputs, in the model's order.
    pub fn outputs(&self) -> Vec<ValueSpec> {
        let graph = &self.executor.compiled.program.graph;
        let outputs = graph.outputs.iter().zip(self.model.graph().outputs.iter());
        outputs
            .map(|(id, named)| ValueSpec {
                name: self.model.graph().value(*named).name.to_string(),
                ty: graph.value(*id).ty.clone(),
                has_default: false,
            })
            .collect()
    }

    /// Runs the model on named inputs. Returns the named outputs, each in memory of its own.
    pub fn run(&self, inputs: &[(&str, Value)]) -> Result<Vec<(String, Value)>> {
        self.run_with(inputs, &RunOptions::default())
    }

    /// [`Self::run`] with a deadline, a cancel token, a profile or an observer.
    pub fn run_with(
        &self,
        inputs: &[(&str, Value)],
        options: &RunOptions<'_>,
    ) -> Result<Vec<(String, Value)>> {
        let values = self.run_values(inputs, options)?;
        let names = self.model.graph();
        let names = names.outputs.iter().map(|&id| names.value(id).name.to_string());
        Ok(names.zip(values).collect())
    }

    /// As [`Self::run_with`], but returns the values without their names, in the order of
    /// [`Self::outputs`].
    pub fn run_values(&self, inputs: &[(&str, Value)], options: &RunOptions<'_>) -> Result<Vec<Value>> {
        self.check_updates()?;
        let readable = self.readable(inputs)?;
        let given = self.arrange(readable.as_deref().unwrap_or(inputs))?;
        let mut bindings = Bindings::new();
        // One dimension name has two sizes, but this program assumes that they are equal.
        if let Some(conflict) = bind(&self.executor.compiled.program, &given, &mut bindings)? {
            return self.independent(conflict)?.run_values(inputs, options);
        }
        let (plan, bindings) =
            self.executor.plan_fitting(bindings, &given, &self.executor.given_values(&given))?;
        self.executor.run(RunRequest { plan: &plan, bindings: &bindings }, &given, options)
    }

    /// Fails if inputs are updated in place, for which only a binding has the buffers.
    fn check_updates(&self) -> Result<()> {
        ensure!(
            self.executor.compiled.program.updates.is_empty(),
            InvalidArgument,
            help = "bind them and run with `run_with_binding`",
            "the session updates inputs in place, which needs a binding"
        );
        Ok(())
    }

    /// Makes inputs readable as typed slices. Copies inputs that are not aligned for their type.
    /// Copies tensors inside sequences, optionals, maps and sparse tensors to the host if they are
    /// on a device. `None` if all inputs are aligned tensors already.
    fn readable<'n>(&self, inputs: &[(&'n str, Value)]) -> Result<Option<Vec<(&'n str, Value)>>> {
        let is_readable = |value: &Value| matches!(value, Value::Tensor(tensor) if tensor.is_aligned());
        if inputs.iter().all(|(_, value)| is_readable(value)) {
            return Ok(None);
        }
        let readable = |value: &Value| transfers::readable(value, self.executor.transfers());
        inputs.iter().map(|(name, value)| Ok((*name, readable(value)?))).collect::<Result<_>>().map(Some)
    }

    /// Puts named inputs into the model's order and fills in the defaults of omitted ones.
    fn arrange<'v>(&'v self, inputs: &'v [(&str, Value)]) -> Result<SmallVec<[ValueView<'v>; 4]>> {
        let graph = &self.executor.compiled.program.graph;
        let by_name = ByName::new(inputs);
        let find = |&id: &ValueId| by_name.find(&graph.value(id).name);
        let found: SmallVec<[Option<usize>; 8]> = graph.inputs.iter().map(find).collect();
        // Unknown names are errors. Otherwise an input with a misspelled name would run with its
        // default.
        if found.iter().flatten().count() < inputs.len() {
            return Err(self.stray(inputs));
        }
        let mut given = SmallVec::with_capacity(graph.inputs.len());
        for (&id, found) in graph.inputs.iter().zip(found) {
            let info = graph.value(id);
            let found = found.and_then(|index| inputs.get(index)).map(|(_, value)| value.view());
            let default = || graph.input_defaults.get(&id).map(|tensor| ValueView::Tensor(tensor.view()));
            let value = found.or_else(default).ok_or_else(|| {
                error!(InvalidArgument, "input '{}' ({}) is not given", info.name, info.ty)
                    .help("give a value for each input that has no default")
            })?;
            check_type(&info.name, &info.ty, &value)?;
            check_reachable(self.devices(), value).within(|| format!("input '{}'", info.name))?;
            given.push(value);
        }
        Ok(given)
    }

    /// Returns the error for an input that is given twice, or that the model does not have.
    #[cold]
    fn stray(&self, inputs: &[(&str, Value)]) -> Error {
        let graph = &self.executor.compiled.program.graph;
        let mut names = HashSet::default();
        if let Some((name, _)) = inputs.iter().find(|(name, _)| !names.insert(*name)) {
            return error!(InvalidArgument, "input '{name}' is given twice");
        }
        let known: HashSet<&str> = graph.inputs.iter().map(|&id| &*graph.value(id).name).collect();
        let stray =
            inputs.iter().map(|(name, _)| *name).find(|name| !known.contains(name)).unwrap_or_default();
        let advice = advise("inputs", stray, known.iter().copied());
        error!(InvalidArgument, "the model has no input '{stray}'").help(advice)
    }

    /// Allocation counters of the session's arenas: one for the host and one for each device with
    /// memory of its own. Arenas hold the values whose size is known only at run time. Empty if the
    /// session has no arenas.
    ///
    /// The fields are named as in ONNX Runtime's `GetStats`, and their text form is the same.
    pub fn allocator_stats(&self) -> Vec<(DeviceId, Stats)> {
        self.executor.kept.dynamic.stats()
    }

    /// Returns where each node runs, in execution order. Each entry says why the node runs there,
    /// and why it does not run on the providers that the session prefers. Copies between memories
    /// are not nodes, so only [`Session::steps`] lists them.
    ///
    /// ```
    /// fn print(session: &ort_core::session::Session) {
    ///     for placed in session.placement() {
    ///         println!("{} ({}) on {}: {}", placed.node, placed.operator, placed.provider, placed.reason);
    ///         for (provider, why) in &placed.refusals {
    ///             println!("    not on {provider}: {why}");
    ///         }
    ///     }
    /// }
    /// ```
    pub fn placement(&self) -> Vec<NodePlacement> {
        placement::placements(&self.executor.compiled.program, &self.executor.compiled.devices)
    }

    /// Returns the steps in execution order, including copies between memories: (node or copied
    /// value, operator or `Copy`, provider).
    pub fn steps(&self) -> Vec<(String, String, String)> {
        placement::steps(&self.executor.compiled.program, &self.executor.compiled.devices)
    }

    /// Returns for each input, in the model's order, the memory from which runs read it without a
    /// copy. It is host memory if steps in several memories read the input. Corresponds to ONNX
    /// Runtime's `get_input_memory_infos`. An input that the session updates
    /// ([`SessionBuilder::update`]) must be bound to a buffer in this memory, because its new value
    /// is computed there.
    pub fn input_memories(&self) -> Vec<DeviceId> {
        let program = &self.executor.compiled.program;
        let read = memories_of_reads(program);
        let memory = |given: &SlotId| read.get(given).copied().flatten().unwrap_or(DeviceId::HOST);
        let mut memories: Vec<DeviceId> = program.given.iter().map(memory).collect();
        for (update, memory) in program.updates.iter().zip(program.memories_of_updates()) {
            memories.get_mut(update.input).into_iter().for_each(|place| *place = memory);
        }
        memories
    }

    /// Returns the proof that a batch can be split: each item is computed independently of the
    /// others, bit for bit, in any batch size.
    ///
    /// # Errors
    ///
    /// The input, node or output for which this could not be proved.
    pub fn batch_parallel(&self) -> Result<&BatchProof, &BatchRefusal> {
        self.executor.compiled.batch()
    }

    /// The rewrites that were applied before the graph was compiled.
    pub fn rewrites(&self) -> &crate::rewrite::Report {
        &self.executor.compiled.rewrites
    }

    /// The number of threads inside one operator.
    pub fn threads(&self) -> usize {
        self.executor.threads
    }
}

/// Maps each slot that steps read to the memory in which they read it, or to `None` if steps read
/// it in several memories.
fn memories_of_reads(program: &Program) -> FxHashMap<SlotId, Option<DeviceId>> {
    // A copy counts as a read at its destination: an input that is bound there needs no copy.
    let memory = |step: &Step| match step.work {
        Work::Copy => {
            program.slots.get(step.outputs.first().copied().flatten()?.index()).map(|slot| slot.memory)
        }
        _ => None,
    };
    let mut memories: FxHashMap<SlotId, Option<DeviceId>> = FxHashMap::default();
    for step in &program.steps {
        // The program's inputs have host slots, so steps other than copies read them there.
        let memory = Some(memory(step).unwrap_or(DeviceId::HOST));
        for slot in step.reads() {
            let only = memories.entry(slot).or_insert(memory);
            *only = only.filter(|_| *only == memory);
        }
    }
    memories
}

/// Looks up the given inputs by name. Up to [`ByName::FEW`] inputs are searched linearly, which
/// allocates nothing; more get a hash table.
struct ByName<'v> {
    inputs: &'v [(&'v str, Value)],
    places: HashMap<&'v str, usize>,
}

impl<'v> ByName<'v> {
    const FEW: usize = 16;

    fn new(inputs: &'v [(&'v str, Value)]) -> ByName<'v> {
        let mut places = HashMap::default();
        if inputs.len() > ByName::FEW {
            places.reserve(inputs.len());
            for (index, (name, _)) in inputs.iter().enumerate() {
                places.entry(*name).or_insert(index);
            }
        }
        ByName { inputs, places }
    }

    /// The index of the first input with this name.
    fn find(&self, name: &str) -> Option<usize> {
        match self.inputs.len() > ByName::FEW {
            true => self.places.get(name).copied(),
            false => self.inputs.iter().position(|(given, _)| *given == name),
        }
    }
}
