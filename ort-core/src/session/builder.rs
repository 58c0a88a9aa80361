//! Settings of a session, and its making.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use ort_alloc::{ArenaConfig, Budget, Category, Recycler, TrimOnDrop, free_memory_bytes};

use super::independent::Independent;
use super::pipeline::{Built, Setting};
use super::providers::{Devices, ProviderRequest};
use super::shared::CompileKey;
use super::{Model, Session, SessionOptions};
use crate::dim::Bindings;
use crate::ep::dynamic::DynamicMemory;
use crate::ep::{Device, Packing, Precision, ProviderOptions, guard};
use crate::ir::Graph;
use crate::plan::{BoundValues, Planning, WorkspaceRoom, resolve_bound};
use crate::rewrite::{Level, Optimizer, Report};
use crate::run::grant::MemoryDemand;
use crate::run::poison;
use crate::run::streaming::{Streams, Windows};
use crate::run::{CacheUse, Compiled, Executor, IdleMemory, Kept};
use crate::{Error, Limits, MemoryShortage, Result, ensure};

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
    pub(super) limits: Limits,
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

    /// Adds an execution provider; those added first are preferred. Without any, `cpu` runs
    /// everything.
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

    /// Adds an execution provider that the session does without, with a warning, where it cannot be
    /// used: it is not in this build, its library cannot be loaded, there is no device, or the
    /// device breaks while the session is built. Without this, each of them is an error.
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

    /// The threads that making the session uses, which packs weights, folds constants and holds
    /// files of a compiled cache against their hashes, apart from [those of runs](Self::threads);
    /// by default the cores that this process may use. The session is the same on any number.
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

    /// A folder that keeps packed weights and folded constants in files, which sessions map:
    /// processes share them, loading packs nothing, and they do not count against limits. Devices
    /// that compile programs keep there what a later process compiles before its first run. An
    /// entry is found by the content of the model's files and by all that the packing depends on;
    /// where there is none, or it is damaged or of other code, it is written first. The folder is
    /// made where there is none; what lies in it may be removed at any time, but is never to be
    /// changed. Whoever may write there decides what sessions compute.
    ///
    /// Building fails where the path leads to a file, where the folder cannot be made, and for a
    /// graph that was built by hand, which has no content to be found by. A folder that cannot be
    /// written leaves packed weights in memory, with a warning.
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

    /// A bound in bytes on what the session allocates: packed weights, activations, workspaces and
    /// outputs. Weights read from a mapped file are not allocated. Without a limit the bound is
    /// what is free when the session is built, on the machine and in the control groups around the
    /// process; a run that this would refuse looks again what is free then.
    #[must_use]
    pub fn memory_limit(mut self, bytes: usize) -> SessionBuilder {
        self.memory_limit = Some(bytes);
        self
    }

    /// A budget that several sessions share: what each of them packs and runs counts against it. A
    /// [`memory_limit`](Self::memory_limit) bounds this session besides.
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

    /// How the session holds memory for values whose size only the run tells: in arenas with this
    /// configuration, whose regions count in the budget, or without one straight from the heap. By
    /// default [`ArenaConfig::lean`].
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

    /// For finding kernels that read memory before they write it: everything that a kernel is to
    /// write holds patterns first that are NaN in each floating-point type. By default the
    /// environment variable `ORT_POISON_MEMORY` decides: 1 is yes.
    #[must_use]
    pub fn poison(mut self, poison: bool) -> SessionBuilder {
        self.poison = poison;
        self
    }

    /// Whether a run that the memory limit, or the machine, cannot hold at once may run in parts of
    /// its batch, one after the other; by default it may. That is done where each item is proved to
    /// be computed apart, with the same bits ([`Session::batch_parallel`]), by [`Session::run`];
    /// what an [`IoBinding`](super::IoBinding) binds is not split.
    #[must_use]
    pub fn batch_split(mut self, allowed: bool) -> SessionBuilder {
        self.batch_split = allowed;
        self
    }

    /// Has the output `output` be the new value of the input `input`, in the same memory: the step
    /// that computes it runs after whoever else reads the input, and plans take the memory to be
    /// there. Such a session runs over a binding alone ([`Session::io_binding`]), in which the
    /// output is bound to the input ([`OutputTarget::Input`](super::OutputTarget::Input)).
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
    /// Building fails where there is no such input or output, and where the old value is read after
    /// the new one.
    #[must_use]
    pub fn update(mut self, input: &str, output: &str) -> SessionBuilder {
        self.updates.push((input.to_string(), output.to_string()));
        self
    }

    /// Has runs refuse inputs that give one dimension name two sizes, which otherwise compile the
    /// model again with a warning; by default what the model was loaded with
    /// ([`Source::strict`](crate::onnx::Source::strict)).
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
    pub(super) fn is_bounded(&self) -> bool {
        self.memory_limit.is_some() || (self.budget.is_some() && !self.follows_machine)
    }

    /// How long building the session and each run may take; by default what the model was loaded
    /// within.
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

    /// Writes the model and what compiling it packs and folds into one file, whole or not at all,
    /// that [`Model::load`] takes like any other: where these providers, settings and CPU are found
    /// again, nothing is packed. Elsewhere the weights that the file holds are packed again, with a
    /// warning.
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
    /// Fails where building a session would, where the file cannot be written, and for a graph that
    /// was built by hand: save it first.
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
    /// sees such runs; who runs the graph elsewhere does not. So equal names are not taken for
    /// equal sizes, unless [`trust_dimension_names`](Self::trust_dimension_names) says so.
    pub fn optimized(self) -> Result<(Graph, Report)> {
        match !self.trusts_names && self.model.may_be_independent() {
            true => self.optimized_with_independent_dims(),
            false => self.optimized_as_named(),
        }
    }

    /// Lets [`optimized`](Self::optimized) take equal names of dimensions for equal sizes. The
    /// graph may then have fewer nodes, and is wrong for runs whose inputs contradict the names.
    #[must_use]
    pub fn trust_dimension_names(mut self, trust: bool) -> SessionBuilder {
        self.trusts_names = trust;
        self
    }

    /// Compiles the model, or takes what a session built alike has compiled. An operator that no
    /// provider runs, or packed weights beyond the memory limit, are errors.
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
        let shared = match self.memory_limit {
            None => Some(self.model.compiled().get(key, || self.compile(threads))?),
            Some(_) => None,
        };
        let compiled = match &shared {
            Some(shared) => shared.compiled.clone(),
            None => Arc::new(self.compile(threads)?),
        };
        // What was packed meanwhile is of another file then.
        self.model.check_files(true)?;
        let is_bounded = self.is_bounded();
        let budget = Budget::within(&compiled.budget, None);
        let executor = Executor {
            files: self.model.files(),
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
        };
        let signature = OnceLock::new();
        Ok(Session { model: self.model, executor, _shared: shared, independent, signature })
    }

    fn thread_count(&self) -> Result<usize> {
        at_least_one(self.threads)
    }

    /// What the program is compiled with, for runs on so many threads.
    pub(super) fn setting<'a>(
        &self,
        threads: usize,
        devices: &'a [Arc<dyn Device>],
        budget: &'a Arc<Budget>,
    ) -> Result<Setting<'a>> {
        let load_threads = at_least_one(self.load_threads)?;
        Ok(Setting { threads, load_threads, devices, budget, until: self.limits.until() })
    }

    fn compile(&self, threads: usize) -> Result<Compiled> {
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
        let Built { program, plans, packed_bytes, cached_bytes, rewrites, owner, .. } = built;
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
            plans,
            streams,
            devices,
            packed_bytes,
            constant_bytes,
            rewrites,
            batch,
            budget,
            cache,
            _trim,
        })
    }

    pub(super) fn open_devices(&self) -> Result<Devices> {
        Devices::open(&self.devices, &self.providers)
    }

    /// Names the limit that would do where the session's memory limit refused it: folded constants,
    /// packed weights and copies at their most, or what of them stays beside a run, as far as sizes
    /// are known. To know that, the session is built once more without memory for what it packs;
    /// constants are folded for good, within a bound that follows from the model's size.
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

    /// The fewest bytes that a run takes beside what stays, as far as sizes do not depend on its
    /// inputs.
    fn least_run(&self, built: &Built, Setting { threads, devices, .. }: Setting<'_>) -> Result<usize> {
        let Built { program, owner, .. } = built;
        let room = WorkspaceRoom::LEAST;
        let bound = BoundValues { room, ..program.bound_values(self.planning) };
        let plan = resolve_bound(program, &Bindings::new(), threads, &bound)?;
        let streams = Streams::of(program, (self.precision, owner), Windows::of(program, devices)?);
        Ok(MemoryDemand::of(program, &plan).total().saturating_add(streams.least_bytes()))
    }

    /// What everything of the session counts against.
    pub(super) fn new_budget(&self) -> Arc<Budget> {
        match &self.budget {
            Some(shared) => Budget::within(shared, self.memory_limit),
            None => Budget::new(self.memory_limit.or_else(free_memory_bytes)),
        }
    }
}

/// How much more than the limit and twice the model's weights folding may take while the limit that
/// would do is looked for.
const EXPLAINING: usize = 64 << 20;

/// A number of threads; by default the cores that this process may use.
fn at_least_one(threads: Option<usize>) -> Result<usize> {
    let cores = || std::thread::available_parallelism().map_or(1, usize::from);
    let threads = threads.unwrap_or_else(cores);
    ensure!(threads > 0, InvalidArgument, "a session needs at least one thread");
    Ok(threads)
}
