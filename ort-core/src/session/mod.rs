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
mod given;
mod independent;
mod kept;
mod largest;
mod memory;
mod model;
mod nested;
mod options;
mod placement;
mod places;
mod poison;
mod profile;
mod program;
mod providers;
mod room;
mod run;
mod split;
mod streamed;
mod transfer;
mod updates;
mod window_choice;
mod windows;

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use ort_alloc::{Allocator, Budget, DeviceId, HostAllocator, Stats};

pub use binding::{InputSource, IoBinding, OutputTarget};
pub use bound_run::BoundPeak;
pub use builder::SessionBuilder;
pub(crate) use dynamic::{ValueMemory, ask_heap};
pub(crate) use frame::in_words;
pub use kept::{IdleMemory, release_idle_memory};
pub use memory::MemoryUse;
pub use model::Model;
pub use options::{ArenaDevice, ExecutionMode, SessionOptions};
pub use placement::NodePlacement;
pub use profile::{EventMemory, Profile, ProfileEvent};
pub(crate) use program::{Origin, Program, Slot, SlotId, Step};
pub use providers::{ProviderRequest, open_devices};
pub use split::BatchSplit;
pub use transfer::SharedMemory;

use crate::dim::{Bindings, Symbol};
use crate::ep::CancelToken;
use crate::ir::ValueType;
use crate::plan::{
    BoundValues, GivenMemory, KindBytes, LiveStep, MemoryKind, PlanReport, Planning, RunPlan, live_steps,
    report, resolve_bound,
};
use crate::seeded::HashMap;
use crate::tensor::{Value, ValueView};
use crate::{Error, Limits, Result, Within, advise, ensure, error};
use compiled::Compiled;
use given::{bind, fits};
use independent::Independent;
use kept::Kept;
use memory::ConstantBytes;
use run::Need;
use split::Asked;
use streamed::Free;
use transfer::{check_reachable, is_on_device};
use windows::OnDevices;

/// A model compiled for its devices. Cheap beside its [`Model`], and usable from any number of threads.
pub struct Session {
    model: Model,
    /// Shared with other sessions on the model that were built alike.
    compiled: Arc<Compiled>,
    /// What runs of this session hold, within the budget of what is compiled.
    budget: Arc<Budget>,
    threads: usize,
    planning: Planning,
    /// Whether runs may be split.
    batch_split: bool,
    limits: Limits,
    /// What finished runs leave for the next ones.
    kept: Arc<Kept>,
    poison: bool,
    /// The session for runs that contradict the names of dimensions.
    independent: Independent,
    /// The budget that follows the machine's free memory. None if the caller set a limit or shares
    /// a budget.
    machine: Option<Arc<Budget>>,
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
        ensure!(
            self.compiled.program.updates.is_empty(),
            InvalidArgument,
            help = "bind them and run with `run_with_binding`",
            "the session updates inputs in their memory"
        );
        let readable = self.readable(inputs)?;
        let given = self.arrange(&readable)?;
        let mut bindings = Bindings::new();
        if let Some(conflict) = bind(&self.compiled.program, &given, &mut bindings)? {
            return self.independent(conflict)?.run_with(inputs, options);
        }
        let (plan, bindings) = self.plan_fitting(bindings, &given, &self.given_values(&given))?;
        let outputs = self.run_in_way(Asked { plan: &plan, bindings: &bindings }, &given, options)?;
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

    /// The inputs with memory that kernels can read as typed slices: those that are not aligned are copied.
    fn readable<'n>(&self, inputs: &[(&'n str, Value)]) -> Result<Vec<(&'n str, Value)>> {
        let readable = |value: &Value| transfer::readable(value, self.transfers());
        inputs.iter().map(|(name, value)| Ok((*name, readable(value)?))).collect()
    }

    /// Puts named inputs in order; defaults stand in for what is left out.
    fn arrange<'v>(&'v self, inputs: &'v [(&str, Value)]) -> Result<Vec<ValueView<'v>>> {
        let graph = &self.compiled.program.graph;
        let by_name = ByName::new(inputs);
        for (index, (name, _)) in inputs.iter().enumerate() {
            ensure!(by_name.find(name) == Some(index), InvalidArgument, "input '{name}' is given twice");
        }
        let mut is_known = vec![false; inputs.len()];
        for &id in &graph.inputs {
            let index = by_name.find(&graph.value(id).name);
            index.and_then(|index| is_known.get_mut(index)).into_iter().for_each(|known| *known = true);
        }
        for ((name, _), is_known) in inputs.iter().zip(is_known) {
            if !is_known {
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
            let found = by_name.find(&info.name).and_then(|index| inputs.get(index));
            let found = found.map(|(_, value)| value.view());
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

    /// What a plan knows of a run without a binding: what is given in memory of devices.
    fn given_values(&self, given: &[ValueView<'_>]) -> BoundValues {
        let mut values = self.compiled.program.bound_values(self.planning);
        if values.inputs.is_empty() && given.iter().any(is_on_device) {
            values.inputs = given.iter().map(|value| GivenMemory::of(Some(*value))).collect();
        }
        values
    }

    /// The plan for what is bound, as it was made before.
    fn plan_kept(&self, bindings: &Bindings, bound: &BoundValues) -> Result<Arc<RunPlan>> {
        self.compiled.program.plans.get(bindings, bound, || {
            let start = Instant::now();
            let plan = resolve_bound(&self.compiled.program, bindings, self.threads, bound)?;
            let milliseconds = start.elapsed().as_millis() as u64;
            tracing::info!(dims = %bindings, peak_bytes = plan.peak(), milliseconds, "planned");
            Ok(plan)
        })
    }

    /// The memory of a run with these sizes of symbolic dimensions; a dimension that is not named counts as 1.
    /// A name that the model does not have is an error.
    pub fn plan(&self, dims: &[(&str, i64)]) -> Result<PlanReport> {
        let bindings = self.bindings(dims)?;
        let values = self.compiled.program.bound_values(self.planning);
        self.report(&bindings, &values, self.independent.built())
    }

    /// The memory of a run on these inputs.
    pub fn plan_for_inputs(&self, inputs: &[(&str, Value)]) -> Result<PlanReport> {
        self.plan_beside(self.independent.built(), inputs)
    }

    /// [`Self::plan_for_inputs`] that also counts the constants of `other`.
    fn plan_beside(&self, other: Option<&Session>, inputs: &[(&str, Value)]) -> Result<PlanReport> {
        let given = self.arrange(inputs)?;
        let mut bindings = Bindings::new();
        if let Some(conflict) = bind(&self.compiled.program, &given, &mut bindings)? {
            return self.independent(conflict)?.plan_beside(Some(self), inputs);
        }
        self.report(&bindings, &self.given_values(&given), other)
    }

    /// What each step of a run takes and gives back, in their order, with these sizes of symbolic dimensions; for those who edit the graph to
    /// have fewer bytes alive at once.
    pub fn live_steps(&self, dims: &[(&str, i64)]) -> Result<Vec<LiveStep>> {
        Ok(live_steps(&self.compiled.program, &self.bindings(dims)?, self.threads))
    }

    fn report(
        &self,
        bindings: &Bindings,
        values: &BoundValues,
        other: Option<&Session>,
    ) -> Result<PlanReport> {
        let plan = self.plan_bound(bindings, values)?;
        let mut report = report(&self.compiled.program, &plan, bindings, self.threads);
        report.weights_bytes = self.model.graph().weight_bytes();
        let available = self.free_bytes();
        report.batch_split = self.would_split(Asked { plan: &plan, bindings }, available);
        report.unsplit = self.why_whole(Asked { plan: &plan, bindings });
        let peak = report.batch_split.as_ref().map_or(plan.peak(), |split| split.planned_bytes);
        report.kinds.extend(self.constant_kinds(&plan, available.saturating_sub(peak), other));
        report.available_bytes = available.saturating_sub(self.compiled.streams.least_bytes());
        Ok(report)
    }

    /// The constants during a run that leaves `bytes` for them, plus those that `other` holds.
    fn constant_kinds(&self, plan: &RunPlan, bytes: usize, other: Option<&Session>) -> [KindBytes; 7] {
        let streams = &self.compiled.streams;
        // A run that a device's own limit refuses is planned as if it had none.
        let Need { on_devices, is_open_ended, .. } = Need::of(&self.compiled.program, plan);
        let free = |on_devices| Free { bytes, on_devices, eighths: 8, is_open_ended };
        let shares = streams.shares(&free(on_devices)).or_else(|_| streams.shares(&free(OnDevices::new())));
        let (shares, left) = shares.unwrap_or_default();
        let streamed = streams.streamed_bytes(left);
        let parts: Vec<&Session> = std::iter::once(self).chain(other).collect();
        let now = ConstantBytes::of(&parts);
        let packed = self.compiled.packed_bytes + streams.packed_bytes() - streamed;
        let on_devices = self.fixed_device_constants() + shares.kept_bytes();
        let packed_by_other = now.packed.saturating_sub(self.packed_now());
        let on_devices_by_other = now.on_devices.saturating_sub(self.device_constants_now());
        [
            (MemoryKind::WeightsMapped, now.mapped),
            (MemoryKind::WeightsPacked, packed + packed_by_other),
            (MemoryKind::WeightsCached, now.cached),
            (MemoryKind::WeightsStreamed, streamed),
            (MemoryKind::DeviceConstants, on_devices + on_devices_by_other),
            (MemoryKind::DeviceWindow, shares.window_bytes()),
            (MemoryKind::DeviceStreamed, shares.streamed_bytes()),
        ]
        .map(|(kind, bytes)| KindBytes { kind, bytes, symbolic: None })
    }

    /// Sizes for all symbolic dimensions of the inputs: those that are named, and 1 for the others. A name that the model does not have is an
    /// error.
    pub fn bindings(&self, dims: &[(&str, i64)]) -> Result<Bindings> {
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

/// Given inputs by name. Few are looked through, which takes nothing from the heap; of many there is a table.
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

    /// The place of the first input of this name.
    fn find(&self, name: &str) -> Option<usize> {
        match self.inputs.len() > ByName::FEW {
            true => self.places.get(name).copied(),
            false => self.inputs.iter().position(|(given, _)| *given == name),
        }
    }
}
