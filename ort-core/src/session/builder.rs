//! Session settings. `build` compiles a session with them.

use std::path::PathBuf;
use std::sync::Arc;

use ort_alloc::{ArenaConfig, Budget, free_memory_bytes};

use super::providers::ProviderRequest;
use super::{Model, SessionOptions};
use crate::Limits;
use crate::ep::{CancelToken, Device, Precision, ProviderOptions};
use crate::plan::Planning;
use crate::rewrite::{Level, Optimizer};
use crate::run::{IdleMemory, poison};

/// The settings of a session.
#[derive(Clone)]
pub struct SessionBuilder {
    pub(super) model: Model,
    pub(super) providers: Vec<ProviderRequest>,
    pub(super) devices: Vec<Arc<dyn Device>>,
    pub(super) threads: Option<usize>,
    pub(super) load_threads: Option<usize>,
    pub(super) cache_dir: Option<PathBuf>,
    pub(super) memory_limit: Option<usize>,
    pub(super) budget: Option<Arc<Budget>>,
    /// Whether `budget` is bounded by the machine's free memory alone.
    pub(super) follows_machine: bool,
    pub(super) precision: Precision,
    pub(super) limits: Limits,
    pub(super) optimizer: Optimizer,
    pub(super) arena: Option<ArenaConfig>,
    pub(super) planning: Planning,
    pub(super) batch_split: bool,
    pub(super) updates: Vec<(String, String)>,
    pub(super) idle_memory: IdleMemory,
    pub(super) poison: bool,
    pub(super) strict: bool,
    /// Whether [`SessionBuilder::optimized`] assumes that equal dimension names mean equal sizes.
    pub(super) trusts_names: bool,
    /// Whether the session runs once: what a run can do in passing is not prepared.
    pub(super) runs_once: bool,
    /// Ends the build.
    pub(super) cancel: CancelToken,
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
            runs_once: false,
            cancel: CancelToken::new(),
        }
    }

    /// Adds an execution provider. Providers that were added first are preferred. Without any,
    /// `cpu` runs everything.
    #[must_use]
    pub fn provider(self, name: &str) -> SessionBuilder {
        self.provider_with(name, ProviderOptions::new())
    }

    /// Adds an execution provider with options.
    #[must_use]
    pub fn provider_with(self, name: &str, options: ProviderOptions) -> SessionBuilder {
        self.provider_request(ProviderRequest { options, ..ProviderRequest::new(name) })
    }

    /// Adds an execution provider from a request.
    #[must_use]
    pub fn provider_request(mut self, request: ProviderRequest) -> SessionBuilder {
        self.providers.push(request);
        self
    }

    /// Adds an execution provider that is optional: if it cannot be used, the session warns and
    /// runs without it. A provider cannot be used if it is not in this build, its library cannot be
    /// loaded, there is no device, or the device breaks during the build. For a required provider
    /// each of these is an error.
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

    /// Sets the number of threads inside one operator. The default is the number of cores that this
    /// process may use.
    #[must_use]
    pub fn threads(mut self, threads: usize) -> SessionBuilder {
        self.threads = Some(threads);
        self
    }

    /// Sets the number of threads that pack weights, fold constants and verify the hashes of
    /// compiled-cache files during the build. It is independent of the [threads of
    /// runs](Self::threads). The default is the number of cores that this process may use. The
    /// session is the same for any number.
    ///
    /// ```no_run
    /// use ort_core::session::{Model, Session};
    ///
    /// // Leaves the other cores to threads that are busy already.
    /// let session = Session::builder(&Model::load("model.onnx")?).load_threads(1).build()?;
    /// # Ok::<(), ort_core::Error>(())
    /// ```
    #[must_use]
    pub fn load_threads(mut self, threads: usize) -> SessionBuilder {
        self.load_threads = Some(threads);
        self
    }

    /// Sets a folder for the compiled cache: files with packed weights and folded constants, which
    /// sessions map. Processes share the mapped pages, loading packs nothing, and the pages do not
    /// count against memory limits. Devices may keep files there, too, such as compiled shaders for
    /// later processes.
    ///
    /// The key of an entry covers the content of the model's files and everything that packing
    /// depends on. If the entry is missing, damaged or outdated, the build writes a new one before
    /// it uses it. The folder is created if it does not exist. Its files may be deleted at any time
    /// but must never be modified. Anyone with write access to the folder decides what sessions
    /// compute.
    ///
    /// The build fails if the path is a file, if the folder cannot be created, or if the graph was
    /// built by hand, because such a graph has no content hash. If the folder is not writable,
    /// packed weights stay in memory, with a warning.
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

    /// Sets a limit in bytes on what the session allocates: packed weights, activations, workspaces
    /// and outputs. Weights that are read from a mapped file are not allocated. Without a limit the
    /// bound is the memory that is free at build time, on the machine and in the process's control
    /// groups. A run that would exceed this bound checks again how much is free at that time.
    #[must_use]
    pub fn memory_limit(mut self, bytes: usize) -> SessionBuilder {
        self.memory_limit = Some(bytes);
        self
    }

    /// Sets a budget that several sessions share: their packed weights and runs count against it. A
    /// [`memory_limit`](Self::memory_limit) bounds this session in addition.
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

    /// Applies settings under ONNX Runtime's names. They replace what was set before.
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
        // Without a plan nothing can share memory ahead of the run, so `enable_mem_reuse` has no
        // effect.
        self.planning = match (options.enable_mem_pattern, options.enable_mem_reuse) {
            (false, _) => Planning::Off,
            (true, false) => Planning::Apart,
            (true, true) => Planning::Shared,
        };
        self
    }

    /// Sets how the session allocates values whose size is known only at run time. With a
    /// configuration they come from arenas, whose regions count in the budget; with `None`,
    /// straight from the heap. The default is [`ArenaConfig::lean`].
    #[must_use]
    pub fn arena(mut self, config: Option<ArenaConfig>) -> SessionBuilder {
        self.arena = config;
        self
    }

    /// Sets how much idle memory is kept for the next run, and for how long; see [`IdleMemory`].
    #[must_use]
    pub fn idle_memory(mut self, policy: IdleMemory) -> SessionBuilder {
        self.idle_memory = policy;
        self
    }

    /// Fills memory with a pattern before a kernel writes it, to find kernels that read memory
    /// before they write it. The pattern is NaN in every floating-point type. By default the
    /// environment variable `ORT_POISON_MEMORY` decides: 1 switches it on.
    #[must_use]
    pub fn poison(mut self, poison: bool) -> SessionBuilder {
        self.poison = poison;
        self
    }

    /// Sets whether a run may split its batch if the memory limit or the machine cannot hold it at
    /// once. The parts run one after another. By default this is allowed. A batch is split only if
    /// each item is proved to be computed independently, bit for bit
    /// ([`Session::batch_parallel`](super::Session::batch_parallel)). Only
    /// [`Session::run`](super::Session::run) splits batches; runs of an
    /// [`IoBinding`](super::IoBinding) do not.
    #[must_use]
    pub fn batch_split(mut self, allowed: bool) -> SessionBuilder {
        self.batch_split = allowed;
        self
    }

    /// Makes the output `output` the new value of the input `input`, in the same memory. The step
    /// that computes the new value runs after all other readers of the input. Plans assume that
    /// both values share the memory. Such a session runs only with a binding
    /// ([`Session::io_binding`](super::Session::io_binding)) in which the output is bound to the
    /// input ([`OutputTarget::Input`](super::OutputTarget::Input)).
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
    /// The build fails if there is no such input or output, or if the old value is read after the
    /// new one is computed.
    #[must_use]
    pub fn update(mut self, input: &str, output: &str) -> SessionBuilder {
        self.updates.push((input.to_string(), output.to_string()));
        self
    }

    /// Sets whether runs refuse inputs that give one dimension name two sizes. Otherwise the first
    /// such run compiles the model again, without relying on the names. The default is the
    /// strictness with which the model was loaded
    /// ([`Source::strict`](crate::onnx::Source::strict)).
    #[must_use]
    pub fn strict(mut self, strict: bool) -> SessionBuilder {
        self.strict = strict;
        self
    }

    pub(super) fn is_strict(&self) -> bool {
        self.strict
    }

    /// Whether the caller set a limit or a shared budget. If not, the machine's free memory is the
    /// bound.
    pub(super) fn is_bounded(&self) -> bool {
        self.memory_limit.is_some() || (self.budget.is_some() && !self.follows_machine)
    }

    /// Sets the limits on the time of the build and of each run. The default is the limits with
    /// which the model was loaded.
    #[must_use]
    pub fn limits(mut self, limits: Limits) -> SessionBuilder {
        self.limits = limits;
        self
    }

    /// Sets a token that ends the build with an error of kind
    /// [`Cancelled`](crate::ErrorKind::Cancelled). Runs have
    /// [tokens of their own](super::RunOptions::cancel).
    ///
    /// ```
    /// use ort_core::ep::CancelToken;
    /// use ort_core::session::{Model, Session, SessionBuilder};
    ///
    /// fn build_until(model: &Model, cancel: &CancelToken) -> SessionBuilder {
    ///     Session::builder(model).cancel(cancel.clone())
    /// }
    /// ```
    #[must_use]
    pub fn cancel(mut self, cancel: CancelToken) -> SessionBuilder {
        self.cancel = cancel;
        self
    }

    /// Sets the precision of the CPU provider's GEMM kernels.
    #[must_use]
    pub fn precision(mut self, precision: Precision) -> SessionBuilder {
        self.precision = precision;
        self
    }

    /// Sets which rewrites are applied before the graph is compiled. The default is [`Level::All`].
    #[must_use]
    pub fn opt_level(mut self, level: Level) -> SessionBuilder {
        self.optimizer.level = level;
        self
    }

    /// Sets the optimizer: the level, and which single rules are disabled.
    #[must_use]
    pub fn optimizer(mut self, optimizer: Optimizer) -> SessionBuilder {
        self.optimizer = optimizer;
        self
    }

    /// Lets [`optimized`](Self::optimized) assume that equal dimension names mean equal sizes. The
    /// graph may then have fewer nodes, but it is wrong for runs whose inputs contradict the names.
    #[must_use]
    pub fn trust_dimension_names(mut self, trust: bool) -> SessionBuilder {
        self.trusts_names = trust;
        self
    }

    /// A new budget for everything that the session allocates.
    pub(super) fn new_budget(&self) -> Arc<Budget> {
        match &self.budget {
            Some(shared) => Budget::within(shared, self.memory_limit),
            // Without a limit, the memory that is free now: Linux overcommits, and the OOM killer
            // would end the process in the middle of a run.
            None => Budget::new(self.memory_limit.or_else(free_memory_bytes)),
        }
    }
}
