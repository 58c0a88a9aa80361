//! Settings of a session, and its making.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use ort_alloc::{
    ArenaConfig, Budget, Category, DeviceId, Recycler, Reservation, TrimOnDrop, free_memory_bytes,
};

use super::cached::Setting;
use super::compiled::{CacheUse, CompileKey, Compiled};
use super::dynamic::DynamicMemory;
use super::independent::Independent;
use super::kept::{IdleMemory, Kept};
use super::poison;
use super::program::{BuildCx, Windowing, aligned};
use super::providers::{Devices, ProviderRequest};
use super::run::Need;
use super::streamed::Streams;
use super::updates;
use super::windows::Windows;
use super::{Model, Program, Session, SessionOptions};
use crate::dim::Bindings;
use crate::ep::interrupt::{Watch, enter};
use crate::ep::{
    CancelToken, Device, NodeView, Owner, Packing, Precision, ProviderOptions, Scope, guard, lower_all_but,
    partition,
};
use crate::ir::{Graph, Node};
use crate::ops::fused::is_in_onnx_runtime;
use crate::plan::{BoundValues, Planning, WorkspaceRoom, resolve_bound};
use crate::rewrite::{Environment, Level, Optimizer, Report, optimize};
use crate::tensor::Tensor;
use crate::{Error, Limits, MemoryShortage, Result, Within, ensure};

/// Settings of a session.
#[derive(Clone)]
pub struct SessionBuilder {
    pub(super) model: Model,
    pub(super) providers: Vec<ProviderRequest>,
    pub(super) devices: Vec<Arc<dyn Device>>,
    threads: Option<usize>,
    load_threads: Option<usize>,
    pub(super) cache_dir: Option<PathBuf>,
    pub(super) memory_limit: Option<usize>,
    pub(super) budget: Option<Arc<Budget>>,
    /// Whether only the machine's free memory bounds `budget`.
    pub(super) follows_machine: bool,
    pub(super) precision: Precision,
    limits: Limits,
    pub(super) optimizer: Optimizer,
    arena: Option<ArenaConfig>,
    planning: Planning,
    batch_split: bool,
    pub(super) updates: Vec<(String, String)>,
    idle_memory: IdleMemory,
    poison: bool,
    strict: bool,
    /// Whether [`SessionBuilder::optimized`] takes equal names of dimensions for equal sizes.
    trusts_names: bool,
}

/// A compiled program.
pub(super) struct Built {
    pub(super) program: Program,
    /// The bytes of its packed weights that always stay, those in the compiled cache left out.
    pub(super) packed_bytes: usize,
    /// The bytes of those in the compiled cache.
    pub(super) cached_bytes: usize,
    pub(super) rewrites: Report,
    pub(super) owner: Arc<Owner>,
    /// What is counted without being held, with [`Packing::Reserved`].
    pub(super) _reserved: Vec<Reservation>,
}

impl SessionBuilder {
    pub(super) fn new(model: &Model) -> SessionBuilder {
        SessionBuilder {
            model: model.clone(),
            providers: Vec::new(),
            devices: Vec::new(),
            threads: None,
            load_threads: None,
            cache_dir: None,
            memory_limit: None,
            budget: None,
            follows_machine: false,
            precision: Precision::Fp32,
            limits: *model.limits(),
            optimizer: Optimizer::default(),
            arena: Some(ArenaConfig::lean()),
            planning: Planning::Shared,
            batch_split: true,
            updates: Vec::new(),
            idle_memory: IdleMemory::default(),
            poison: poison::from_environment(),
            strict: model.is_strict(),
            trusts_names: false,
        }
    }

    /// Adds an execution provider; those added first are preferred. Without any, `cpu` runs everything.
    #[must_use]
    pub fn provider(self, name: &str) -> SessionBuilder {
        self.provider_with(name, ProviderOptions::new())
    }

    /// Adds an execution provider with options.
    #[must_use]
    pub fn provider_with(self, name: &str, options: ProviderOptions) -> SessionBuilder {
        self.provider_request(ProviderRequest { options, ..ProviderRequest::new(name) })
    }

    /// Adds an execution provider as it is asked for.
    #[must_use]
    pub fn provider_request(mut self, request: ProviderRequest) -> SessionBuilder {
        self.providers.push(request);
        self
    }

    /// Adds an execution provider that the session does without, with a warning, where it cannot be used: it is not in this build, its library cannot be
    /// loaded, there is no device, or the device breaks while the session is built. Without this, each of them is an error.
    ///
    /// ```no_run
    /// use ort_core::ep::ProviderOptions;
    /// use ort_core::session::{Model, Session};
    ///
    /// let model = Model::load("model.onnx")?;
    /// let session = Session::builder(&model).optional_provider("wgpu", ProviderOptions::new()).provider("cpu").build()?;
    /// # Ok::<(), ort_core::Error>(())
    /// ```
    #[must_use]
    pub fn optional_provider(self, name: &str, options: ProviderOptions) -> SessionBuilder {
        self.provider_request(ProviderRequest { options, ..ProviderRequest::new(name).optional() })
    }

    /// Adds an opened device, preferred over providers by name.
    #[must_use]
    pub fn device(mut self, device: Arc<dyn Device>) -> SessionBuilder {
        self.devices.push(device);
        self
    }

    /// The threads inside one operator; by default the cores that this process may use.
    #[must_use]
    pub fn threads(mut self, threads: usize) -> SessionBuilder {
        self.threads = Some(threads);
        self
    }

    /// The threads that making the session uses, which packs weights, folds constants and holds files of a compiled cache against their hashes, apart from
    /// [those of runs](Self::threads); by default the cores that this process may use. The session is the same on any number.
    ///
    /// ```no_run
    /// use ort_core::session::{Model, Session};
    ///
    /// // Leaves the other cores to those who run already.
    /// let session = Session::builder(&Model::load("model.onnx")?).load_threads(1).build()?;
    /// # Ok::<(), ort_core::Error>(())
    /// ```
    #[must_use]
    pub fn load_threads(mut self, threads: usize) -> SessionBuilder {
        self.load_threads = Some(threads);
        self
    }

    /// A folder that keeps packed weights and folded constants in files, which sessions map: processes share them, loading packs nothing, and they do
    /// not count against limits. Devices that compile programs keep there what a later process compiles before its first run. An entry is found by the
    /// content of the model's files and by all that the packing depends on; where there is none, or
    /// it is damaged or of other code, it is written first. The folder is made where there is none; what lies in it may be removed at any time, but is
    /// never to be changed. Whoever may write there decides what sessions compute.
    ///
    /// Building fails where the path leads to a file, where the folder cannot be made, and for a graph that was built by hand, which has no
    /// content to be found by. A folder that cannot be written leaves packed weights in memory, with a warning.
    ///
    /// ```no_run
    /// use ort_core::session::{Model, Session};
    ///
    /// let model = Model::load("model.onnx")?;
    /// let session = Session::builder(&model).cache_dir("cache").build()?;
    /// assert_eq!(session.memory().packed, 0);
    /// # Ok::<(), ort_core::Error>(())
    /// ```
    #[must_use]
    pub fn cache_dir(mut self, folder: impl Into<PathBuf>) -> SessionBuilder {
        self.cache_dir = Some(folder.into());
        self
    }

    /// A bound in bytes on what the session allocates: packed weights, activations, workspaces and outputs.
    /// Weights read from a mapped file are not allocated. Without a limit the bound is what is free when the session is built, on the machine and in the
    /// control groups around the process; a run that this would refuse looks again what is free then.
    #[must_use]
    pub fn memory_limit(mut self, bytes: usize) -> SessionBuilder {
        self.memory_limit = Some(bytes);
        self
    }

    /// A budget that several sessions share: what each of them packs and runs counts against it. A [`memory_limit`](Self::memory_limit)
    /// bounds this session besides.
    ///
    /// ```
    /// use ort_alloc::Budget;
    /// use ort_core::session::{Model, Session, SessionBuilder};
    ///
    /// fn within(model: &Model, budget: &std::sync::Arc<Budget>) -> SessionBuilder {
    ///     Session::builder(model).budget(budget)
    /// }
    /// ```
    #[must_use]
    pub fn budget(mut self, budget: &Arc<Budget>) -> SessionBuilder {
        self.budget = Some(budget.clone());
        self
    }

    /// Settings under ONNX Runtime's names, in the place of what was set before.
    ///
    /// ```
    /// use ort_core::session::{Model, Session, SessionOptions};
    ///
    /// fn unplanned(model: &Model) -> ort_core::Result<Session> {
    ///     let options = SessionOptions { enable_mem_pattern: false, ..SessionOptions::default() };
    ///     Session::builder(model).options(&options).build()
    /// }
    /// ```
    #[must_use]
    pub fn options(mut self, options: &SessionOptions) -> SessionBuilder {
        self.threads = (options.intra_op_num_threads > 0).then_some(options.intra_op_num_threads);
        self.load_threads = (options.load_threads > 0).then_some(options.load_threads);
        self.memory_limit = options.memory_limit;
        self.optimizer.level = options.graph_optimization_level;
        self.optimizer.disabled.clone_from(&options.disabled_rules);
        self.arena = options.enable_cpu_mem_arena.then(|| options.arena.clone());
        self.planning = match (options.enable_mem_pattern, options.enable_mem_reuse) {
            (false, _) => Planning::Off,
            (true, false) => Planning::Apart,
            (true, true) => Planning::Shared,
        };
        self
    }

    /// How the session holds memory for values whose size only the run tells: in arenas with this configuration, whose regions count in the
    /// budget, or without one straight from the heap. By default [`ArenaConfig::lean`].
    #[must_use]
    pub fn arena(mut self, config: Option<ArenaConfig>) -> SessionBuilder {
        self.arena = config;
        self
    }

    /// How much memory waits for the next run, and for how long; see [`IdleMemory`].
    #[must_use]
    pub fn idle_memory(mut self, policy: IdleMemory) -> SessionBuilder {
        self.idle_memory = policy;
        self
    }

    /// For finding kernels that read memory before they write it: everything that a kernel is to write holds patterns first that are NaN in
    /// each floating-point type. By default the environment variable `ORT_POISON_MEMORY` decides: 1 is yes.
    #[must_use]
    pub fn poison(mut self, poison: bool) -> SessionBuilder {
        self.poison = poison;
        self
    }

    /// Whether a run that the memory limit, or the machine, cannot hold at once may run in parts of its batch, one after the other; by default
    /// it may. That is done where each item is proved to be computed apart, with the same bits ([`Session::batch_parallel`]), by
    /// [`Session::run`]; what an [`IoBinding`](super::IoBinding) binds is not split.
    #[must_use]
    pub fn batch_split(mut self, allowed: bool) -> SessionBuilder {
        self.batch_split = allowed;
        self
    }

    /// Has the output `output` be the new value of the input `input`, in the same memory: the step that computes it runs after whoever
    /// else reads the input, and plans take the memory to be there. Such a session runs over a binding alone ([`Session::io_binding`]),
    /// in which the output is bound to the input ([`OutputTarget::Input`](super::OutputTarget::Input)).
    ///
    /// ```no_run
    /// use ort_core::dtype::DType;
    /// use ort_core::session::{Model, OutputTarget, RunOptions, Session};
    /// use ort_core::tensor::TensorBuffer;
    ///
    /// let session = Session::builder(&Model::load("step.onnx")?).update("weight", "new_weight").build()?;
    /// let mut binding = session.io_binding();
    /// binding.bind_input("weight", TensorBuffer::new(DType::F32, &[1000])?)?;
    /// binding.bind_output("new_weight", OutputTarget::Input("weight".to_string()))?;
    /// session.run_with_binding(&mut binding, &RunOptions::default())?;
    /// # Ok::<(), ort_core::Error>(())
    /// ```
    ///
    /// Building fails where there is no such input or output, and where the old value is read after the new one.
    #[must_use]
    pub fn update(mut self, input: &str, output: &str) -> SessionBuilder {
        self.updates.push((input.to_string(), output.to_string()));
        self
    }

    /// Has runs refuse inputs that give one dimension name two sizes, which otherwise compile the model again with a
    /// warning; by default what the model was loaded with ([`Source::strict`](crate::onnx::Source::strict)).
    #[must_use]
    pub fn strict(mut self, strict: bool) -> SessionBuilder {
        self.strict = strict;
        self
    }

    pub(super) fn is_strict(&self) -> bool {
        self.strict
    }

    /// Whether the caller set a limit or shares a budget. If not, the machine's free memory is the
    /// bound.
    fn is_bounded(&self) -> bool {
        self.memory_limit.is_some() || (self.budget.is_some() && !self.follows_machine)
    }

    /// How long building the session and each run may take; by default what the model was loaded within.
    #[must_use]
    pub fn limits(mut self, limits: Limits) -> SessionBuilder {
        self.limits = limits;
        self
    }

    /// How the CPU provider multiplies matrices.
    #[must_use]
    pub fn precision(mut self, precision: Precision) -> SessionBuilder {
        self.precision = precision;
        self
    }

    /// How much of the graph may be rewritten before it is compiled; by default all.
    #[must_use]
    pub fn opt_level(mut self, level: Level) -> SessionBuilder {
        self.optimizer.level = level;
        self
    }

    /// The same, rule by rule.
    #[must_use]
    pub fn optimizer(mut self, optimizer: Optimizer) -> SessionBuilder {
        self.optimizer = optimizer;
        self
    }

    /// Writes the model and what compiling it packs and folds into one file, whole or not at all, that [`Model::load`] takes like any other: where these
    /// providers, settings and CPU are found again, nothing is packed. Elsewhere the weights that the file holds are packed again, with a warning.
    ///
    /// ```no_run
    /// use ort_core::session::{Model, Session};
    ///
    /// let model = Model::load("model.onnx")?;
    /// Session::builder(&model).save_compiled("model.compiled")?;
    /// let session = Session::builder(&Model::load("model.compiled")?).build()?;
    /// assert_eq!(session.memory().packed, 0);
    /// # Ok::<(), ort_core::Error>(())
    /// ```
    ///
    /// Fails where building a session would, where the file cannot be written, and for a graph that was built by hand: save it first.
    pub fn save_compiled(&self, path: impl AsRef<Path>) -> Result<()> {
        let budget = self.new_budget();
        let threads = self.thread_count()?;
        self.open_devices()?.attempt(|devices| {
            let setting = self.setting(threads, devices, &budget)?;
            self.write_compiled(path.as_ref(), setting)
        })
    }

    /// The graph as it would be compiled, and what was rewritten. What ONNX Runtime has no operator
    /// for ([`crate::spec::RUNTIME`], some activations) is taken apart again, so that it can be
    /// saved for any runtime.
    ///
    /// The names of the inputs' dimensions are documentation, which a run may contradict. A session
    /// sees such runs; who runs the graph elsewhere does not. So equal names are not taken for equal
    /// sizes, unless [`trust_dimension_names`](Self::trust_dimension_names) says so.
    pub fn optimized(self) -> Result<(Graph, Report)> {
        match !self.trusts_names && self.model.may_be_independent() {
            true => self.optimized_with_independent_dims(),
            false => self.optimized_as_named(),
        }
    }

    /// As [`optimized`](Self::optimized), with equal names of dimensions taken for equal sizes.
    pub(super) fn optimized_as_named(self) -> Result<(Graph, Report)> {
        let devices = self.open_devices()?.all;
        let budget = self.new_budget();
        let setting = self.setting(1, &devices, &budget)?;
        // The graph goes elsewhere, where no checksum of the compiled model holds for it.
        self.verify_files(setting.reading())?;
        let (graph, report) = self.rewritten(setting, Packing::Now)?;
        let mut graph = Arc::unwrap_or_clone(graph);
        lower_all_but(&mut graph, is_in_onnx_runtime)?;
        Ok((graph, report))
    }

    /// Lets [`optimized`](Self::optimized) take equal names of dimensions for equal sizes. The graph
    /// may then have fewer nodes, and is wrong for runs whose inputs contradict the names.
    #[must_use]
    pub fn trust_dimension_names(mut self, trust: bool) -> SessionBuilder {
        self.trusts_names = trust;
        self
    }

    /// The graph as it is compiled: rewritten, and taken apart where no device has a kernel. A session on it with
    /// [`Level::Disabled`] runs it as it stands, so that it can be edited in between.
    pub fn prepared(self) -> Result<Graph> {
        let budget = self.new_budget();
        self.open_devices()?.attempt(|devices| {
            let (mut graph, _) = self.rewritten(self.setting(1, devices, &budget)?, Packing::Now)?;
            partition(&mut graph, devices, Scope::Model)?;
            Ok(Arc::unwrap_or_clone(graph))
        })
    }

    /// The model's graph after the rewrites that the optimizer allows, and what they were.
    fn rewritten(
        &self,
        Setting { devices, budget, load_threads, until, .. }: Setting<'_>,
        packing: Packing<'_>,
    ) -> Result<(Arc<Graph>, Report)> {
        let mut graph = self.model.shared_graph();
        let compute =
            |graph: Graph| evaluate(graph, load_threads, devices, budget, self.limits.ending(until));
        let evaluate = |graph: Graph| match packing {
            Packing::Cached(store) => store.folded(graph, compute),
            _ => compute(graph),
        };
        let first_claim = |graph: &Graph, node: &Node| first_claim(graph, node, devices);
        let channels_last = devices.iter().map(|device| guard::prefers_channels_last(&**device));
        let channels_last = channels_last.collect::<Result<Vec<bool>>>()?;
        // What a session updates is read in both directions of a training, whose gradients have the channels second.
        let channels_last = if self.updates.is_empty() { &channels_last[..] } else { &[] };
        let vector_bytes = devices.iter().map(|device| guard::vector_bytes(&**device));
        let vector_bytes = vector_bytes.collect::<Result<Vec<usize>>>()?;
        let (first_claim, vector_bytes) = (&first_claim, &vector_bytes);
        let environment =
            Environment { evaluate: &evaluate, first_claim, channels_last, vector_bytes, until };
        let report = optimize(&mut graph, &self.optimizer, environment)?;
        Ok((graph, report))
    }

    /// Compiles the model, or takes what a session built alike has compiled. An operator that no provider runs, or packed weights beyond the
    /// memory limit, are errors.
    pub fn build(self) -> Result<Session> {
        let independent = Independent::new(self.clone());
        let threads = self.thread_count()?;
        let key = CompileKey {
            providers: self.providers.clone(),
            devices: self.devices.clone(),
            threads,
            precision: self.precision,
            optimizer: self.optimizer.clone(),
            budget: self.budget.clone(),
            cache_dir: self.cache_dir.clone(),
            updates: self.updates.clone(),
        };
        // What a limit of its own bounds is a session's own.
        let compiled = match self.memory_limit {
            None => self.model.compiled().get(key, |key| self.compile(threads, Some(key)))?,
            Some(_) => Arc::new(self.compile(threads, None)?),
        };
        // What was packed meanwhile is of another file then.
        self.model.check_files(true)?;
        let is_bounded = self.is_bounded();
        let budget = Budget::within(&compiled.budget, None);
        Ok(Session {
            kept: Kept::new(
                DynamicMemory::new(&budget, &compiled.devices, self.arena.as_ref(), is_bounded)?,
                (!is_bounded).then(Recycler::new),
                self.idle_memory,
            ),
            poison: self.poison,
            machine: (!is_bounded).then(|| compiled.budget.clone()),
            budget,
            compiled,
            threads,
            planning: self.planning,
            batch_split: self.batch_split,
            limits: self.limits,
            independent,
            signature: OnceLock::new(),
            model: self.model,
        })
    }

    fn thread_count(&self) -> Result<usize> {
        at_least_one(self.threads)
    }

    /// What the program is compiled with, for runs on so many threads.
    fn setting<'a>(
        &self,
        threads: usize,
        devices: &'a [Arc<dyn Device>],
        budget: &'a Arc<Budget>,
    ) -> Result<Setting<'a>> {
        let load_threads = at_least_one(self.load_threads)?;
        Ok(Setting { threads, load_threads, devices, budget, until: self.limits.until() })
    }

    fn compile(&self, threads: usize, key: Option<CompileKey>) -> Result<Compiled> {
        let mut devices = self.open_devices()?;
        let start = Instant::now();
        let budget = self.new_budget();
        let (built, entry) = devices.attempt(|devices| {
            let setting = self.setting(threads, devices, &budget)?;
            if let Some((built, entry)) = self.cached(setting)? {
                return Ok((built, Some(entry)));
            }
            let built = self.program(setting, Packing::Now);
            Ok((built.map_err(|problem| self.explain(problem, setting))?, None))
        })?;
        let devices = devices.all;
        devices.iter().try_for_each(|device| guard::end_of_build(&**device))?;
        let Built { program, packed_bytes, cached_bytes, rewrites, owner, .. } = built;
        let cache = entry.map(|entry| CacheUse { entry, packed_bytes: cached_bytes });
        self.model.release_all();
        let (nodes, copies) = program.counts(&devices);
        tracing::info!(
            steps = program.steps.len(),
            nodes,
            copies,
            packed_bytes,
            cached_bytes,
            milliseconds = start.elapsed().as_millis() as u64,
            "compiled"
        );
        let windows = Windows::of(&program, &devices)?;
        let streams = Streams::of(&program, (self.precision, &owner), windows);
        let trims = !streams.is_empty() || packed_bytes >= Compiled::WORTH_A_TRIM;
        let _trim = trims.then(TrimOnDrop::new);
        let batch = OnceLock::new();
        let constant_bytes = budget.in_use();
        Ok(Compiled {
            program,
            streams,
            devices,
            packed_bytes,
            constant_bytes,
            rewrites,
            batch,
            budget,
            cache,
            key,
            _trim,
        })
    }

    fn open_devices(&self) -> Result<Devices> {
        Devices::open(&self.devices, &self.providers)
    }

    /// The program, the bytes of its packed weights that always stay, and what was rewritten.
    pub(super) fn program(&self, setting: Setting<'_>, packing: Packing<'_>) -> Result<Built> {
        // Rules that read long constants, and kernels that pack for long, end with the time that
        // building may take.
        let _watch =
            enter(Watch { what: "compiling the model", cancel: CancelToken::new(), deadline: setting.until });
        guard::call(|| "compiling the model".to_string(), || self.compile_program(setting, packing))
    }

    fn compile_program(&self, setting: Setting<'_>, packing: Packing<'_>) -> Result<Built> {
        let (graph, rewrites) = self.rewritten(setting, packing)?;
        let Setting { threads, load_threads, devices, budget, until } = setting;
        let owner = Arc::<Owner>::default();
        let is_bounded = self.is_bounded();
        let mut cx = BuildCx {
            devices,
            budget,
            owner: &owner,
            threads,
            load_threads,
            precision: self.precision,
            release: &|tensor| self.model.release(tensor),
            packed_bytes: 0,
            cached_bytes: 0,
            reserved: Vec::new(),
            is_aligned_in_file: &|tensor| self.model.is_aligned_in_file(tensor),
            is_mapped: &|tensor| tensor.bytes().is_some_and(|bytes| self.model.is_mapped(bytes)),
            // Without a limit all packed weights stay, and those in the cache count against none.
            streams: is_bounded && !matches!(packing, Packing::Cached(_)),
            windows: if is_bounded { Windowing::Always } else { Windowing::OfBounded },
            packing,
            cache_dir: self.cache_dir.as_deref(),
            updates: updates::find(self.model.graph(), &self.updates)?,
            until,
        };
        let mut program = Program::build(graph, &mut cx)?;
        // Kernels read inputs as typed slices, and the file may hold a default anywhere.
        if !program.graph.input_defaults.values().all(Tensor::is_aligned) {
            let defaults = Arc::make_mut(&mut program.graph).input_defaults.values_mut();
            for default in defaults.filter(|default| !default.is_aligned()) {
                if let Some(copy) = aligned(default, &mut cx)? {
                    *default = copy;
                }
            }
        }
        let BuildCx { packed_bytes, cached_bytes, reserved, .. } = cx;
        Ok(Built { program, packed_bytes, cached_bytes, rewrites, owner, _reserved: reserved })
    }

    /// Names the limit that would do where the session's memory limit refused it: folded constants, packed weights and copies at their most, or what of
    /// them stays beside a run, as far as sizes are known. To know that, the session is built once more without memory for what it packs; constants
    /// are folded for good, within a bound that follows from the model's size.
    fn explain(&self, problem: Error, setting: Setting<'_>) -> Error {
        if problem.shortage().is_none() {
            return problem;
        }
        let (available, limit) = self.new_budget().tightest();
        let most = limit.saturating_add(self.model.graph().weight_bytes().saturating_mul(2));
        let budget = Budget::new(Some(most.saturating_add(EXPLAINING)));
        let setting = Setting { budget: &budget, ..setting };
        let Ok(built) = self.program(setting, Packing::Reserved) else {
            let least = problem.shortage().map_or(0, MemoryShortage::sufficient_limit);
            return problem.help(format!("raise the memory limit to more than {least} bytes"));
        };
        let stays = budget.in_use().saturating_add(self.least_run(&built, setting).unwrap_or(0));
        let mut largest: Vec<(String, usize)> = Category::ALL
            .into_iter()
            .map(|category| match category {
                // Those of the sessions that fold.
                Category::Output => ("folded constants".to_string(), budget.peak_of(category)),
                _ => (category.to_string(), budget.peak_of(category)),
            })
            .filter(|(_, bytes)| *bytes > 0)
            .collect();
        largest.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        let shortage = MemoryShortage { needed: budget.peak().max(stays), available, limit, largest };
        let advice = format!(
            "raise the memory limit to {} bytes, or map the model from a file: weights in a mapped file are packed again for each run",
            shortage.sufficient_limit()
        );
        Error::out_of_memory("building the session", shortage).help(advice)
    }

    /// The fewest bytes that a run takes beside what stays, as far as sizes do not depend on its inputs.
    fn least_run(&self, built: &Built, Setting { threads, devices, .. }: Setting<'_>) -> Result<usize> {
        let Built { program, owner, .. } = built;
        let room = WorkspaceRoom::LEAST;
        let bound = BoundValues { room, ..program.bound_values(self.planning) };
        let plan = resolve_bound(program, &Bindings::new(), threads, &bound)?;
        let streams = Streams::of(program, (self.precision, owner), Windows::of(program, devices)?);
        Ok(Need::of(program, &plan).total().saturating_add(streams.least_bytes()))
    }

    /// What everything of the session counts against.
    fn new_budget(&self) -> Arc<Budget> {
        match &self.budget {
            Some(shared) => Budget::within(shared, self.memory_limit),
            None => Budget::new(self.memory_limit.or_else(free_memory_bytes)),
        }
    }
}

/// How much more than the limit and twice the model's weights folding may take while the limit that would do is looked for.
const EXPLAINING: usize = 64 << 20;

/// A number of threads; by default the cores that this process may use.
fn at_least_one(threads: Option<usize>) -> Result<usize> {
    let cores = || std::thread::available_parallelism().map_or(1, usize::from);
    let threads = threads.unwrap_or_else(cores);
    ensure!(threads > 0, InvalidArgument, "a session needs at least one thread");
    Ok(threads)
}

/// The place of the first device that claims a node.
fn first_claim(graph: &Graph, node: &Node, devices: &[Arc<dyn Device>]) -> Option<usize> {
    devices.iter().position(|device| guard::claim(&**device, &NodeView { graph, node }).is_ok())
}

/// Runs a graph of constants on the host's devices; without any of them on the CPU provider. The results count against `budget`.
fn evaluate(
    graph: Graph,
    threads: usize,
    devices: &[Arc<dyn Device>],
    budget: &Arc<Budget>,
    limits: Limits,
) -> Result<Vec<Tensor>> {
    let mut builder = SessionBuilder::new(&Model::from_graph(graph)).threads(threads).load_threads(threads);
    builder = builder.limits(limits).opt_level(Level::Disabled).budget(budget);
    builder.devices = devices.iter().filter(|device| device.memory() == DeviceId::HOST).cloned().collect();
    let outputs = builder.build()?.run(&[])?.into_iter();
    outputs.map(|(name, value)| value.tensor().cloned().within(|| name)).collect()
}
