//! Settings of a session, and its making.

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use ort_alloc::{ArenaConfig, Budget, DeviceId, Recycler, TrimOnDrop, host_memory_bytes};

use super::compiled::{CompileKey, Compiled};
use super::dynamic::DynamicMemory;
use super::kept::{IdleMemory, Kept};
use super::poison;
use super::program::BuildCx;
use super::streamed::Streams;
use super::{Model, Program, Session, SessionOptions};
use crate::ep::{Device, NodeView, Packing, Precision, ProviderOptions, lower_all_but, provider};
use crate::ir::{Graph, Node};
use crate::ops::fused::is_in_onnx_runtime;
use crate::plan::Planning;
use crate::rewrite::{Environment, Level, Optimizer, Report, optimize};
use crate::tensor::Tensor;
use crate::{Error, ErrorKind, Limits, Result, Within, ensure, error};

/// Settings of a session.
#[derive(Clone)]
pub struct SessionBuilder {
    model: Model,
    providers: Vec<(String, ProviderOptions)>,
    devices: Vec<Arc<dyn Device>>,
    threads: Option<usize>,
    memory_limit: Option<usize>,
    budget: Option<Arc<Budget>>,
    precision: Precision,
    limits: Limits,
    optimizer: Optimizer,
    arena: Option<ArenaConfig>,
    planning: Planning,
    idle_memory: IdleMemory,
    poison: bool,
}

impl SessionBuilder {
    pub(super) fn new(model: &Model) -> SessionBuilder {
        SessionBuilder {
            model: model.clone(),
            providers: Vec::new(),
            devices: Vec::new(),
            threads: None,
            memory_limit: None,
            budget: None,
            precision: Precision::Fp32,
            limits: *model.limits(),
            optimizer: Optimizer::default(),
            arena: Some(ArenaConfig::lean()),
            planning: Planning::Shared,
            idle_memory: IdleMemory::default(),
            poison: poison::from_environment(),
        }
    }

    /// Adds an execution provider; those added first are preferred. Without any, `cpu` runs everything.
    #[must_use]
    pub fn provider(self, name: &str) -> SessionBuilder {
        self.provider_with(name, ProviderOptions::new())
    }

    /// Adds an execution provider with options.
    #[must_use]
    pub fn provider_with(mut self, name: &str, options: ProviderOptions) -> SessionBuilder {
        self.providers.push((name.to_string(), options));
        self
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

    /// A bound in bytes on what the session allocates: packed weights, activations, workspaces and outputs.
    /// Weights read from a mapped file are not allocated. Without a limit the memory of the machine is the bound.
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

    /// The graph as it would be compiled, and what was rewritten. What ONNX Runtime has no operator
    /// for ([`crate::spec::RUNTIME`], some activations) is taken apart again, so that it can be saved for any runtime.
    pub fn optimized(self) -> Result<(Graph, Report)> {
        let devices = open_devices(self.devices.clone(), &self.providers)?;
        let (graph, report) = self.rewritten(&devices, &self.new_budget(), self.limits.until())?;
        let mut graph = Arc::unwrap_or_clone(graph);
        lower_all_but(&mut graph, is_in_onnx_runtime)?;
        Ok((graph, report))
    }

    /// The model's graph after the rewrites that the optimizer allows, and what they were.
    fn rewritten(
        &self,
        devices: &[Arc<dyn Device>],
        budget: &Arc<Budget>,
        until: Option<Instant>,
    ) -> Result<(Arc<Graph>, Report)> {
        let mut graph = self.model.shared_graph();
        let evaluate = |graph: Graph| evaluate(graph, devices, budget, &self.limits);
        let first_claim = |graph: &Graph, node: &Node| first_claim(graph, node, devices);
        let environment = Environment { evaluate: &evaluate, first_claim: &first_claim, until };
        let report = optimize(&mut graph, &self.optimizer, environment)?;
        Ok((graph, report))
    }

    /// Compiles the model, or takes what a session built alike has compiled. An operator that no provider runs, or packed weights beyond the
    /// memory limit, are errors.
    pub fn build(self) -> Result<Session> {
        let cores = || std::thread::available_parallelism().map_or(1, usize::from);
        let threads = self.threads.unwrap_or_else(cores);
        ensure!(threads > 0, InvalidArgument, "a session needs at least one thread");
        let key = CompileKey {
            providers: self.providers.clone(),
            devices: self.devices.clone(),
            threads,
            precision: self.precision,
            optimizer: self.optimizer.clone(),
            budget: self.budget.clone(),
        };
        // What a limit of its own bounds is a session's own.
        let compiled = match self.memory_limit {
            None => self.model.compiled().get(key, |key| self.compile(threads, Some(key)))?,
            Some(_) => Arc::new(self.compile(threads, None)?),
        };
        let counts_all = self.memory_limit.is_some() || self.budget.is_some();
        let budget = Budget::within(&compiled.budget, None);
        Ok(Session {
            kept: Kept::new(
                DynamicMemory::new(&budget, &compiled.devices, self.arena.as_ref()),
                (!counts_all).then(Recycler::new),
                self.idle_memory,
            ),
            poison: self.poison,
            budget,
            compiled,
            threads,
            planning: self.planning,
            limits: self.limits,
            signature: OnceLock::new(),
            model: self.model,
        })
    }

    fn compile(&self, threads: usize, key: Option<CompileKey>) -> Result<Compiled> {
        let devices = open_devices(self.devices.clone(), &self.providers)?;
        let start = Instant::now();
        let budget = self.new_budget();
        let (program, packed_bytes, rewrites) = self
            .program(threads, &devices, &budget, Packing::Now)
            .map_err(|problem| self.explain(problem, threads, &devices))?;
        self.model.release_all();
        tracing::info!(
            steps = program.steps.len(),
            packed_bytes,
            milliseconds = start.elapsed().as_millis() as u64,
            "compiled"
        );
        let streams = Streams::of(&program, self.precision);
        let trims = !streams.is_empty() || packed_bytes >= Compiled::WORTH_A_TRIM;
        let _trim = trims.then(TrimOnDrop::new);
        Ok(Compiled { program, streams, devices, packed_bytes, rewrites, budget, key, _trim })
    }

    /// The program, the bytes of its packed weights that always stay, and what was rewritten.
    fn program(
        &self,
        threads: usize,
        devices: &[Arc<dyn Device>],
        budget: &Arc<Budget>,
        packing: Packing,
    ) -> Result<(Program, usize, Report)> {
        let until = self.limits.until();
        let (graph, rewrites) = self.rewritten(devices, budget, until)?;
        let mut cx = BuildCx {
            devices,
            budget,
            threads,
            precision: self.precision,
            release: &|tensor| self.model.release(tensor),
            packed_bytes: 0,
            is_mapped: &|tensor| tensor.bytes().is_some_and(|bytes| self.model.is_mapped(bytes)),
            // Without a limit all packed weights stay.
            streams: self.memory_limit.is_some() || self.budget.is_some(),
            packing,
            until,
        };
        let mut program = Program::build(graph, &[], &mut cx)?;
        // Kernels read inputs as typed slices, and the file may hold a default anywhere.
        if !program.graph.input_defaults.values().all(Tensor::is_aligned) {
            let defaults = Arc::make_mut(&mut program.graph).input_defaults.values_mut();
            for default in defaults.filter(|default| !default.is_aligned()) {
                *default = default.to_owned_copy()?;
            }
        }
        Ok((program, cx.packed_bytes, rewrites))
    }

    /// Where memory did not suffice: how much all weights would take that cannot be packed again.
    fn explain(&self, problem: Error, threads: usize, devices: &[Arc<dyn Device>]) -> Error {
        if problem.kind() != ErrorKind::OutOfMemory {
            return problem;
        }
        let budget = self.new_budget();
        let Ok((_, needed, _)) = self.program(threads, devices, &budget, Packing::Counted) else {
            return problem;
        };
        let (available, limit) = (budget.available(), budget.limit().unwrap_or(usize::MAX));
        error!(
            OutOfMemory,
            "the session's packed weights need {needed} bytes, {available} of the limit of {limit} are free"
        )
        .help(format!(
            "raise the memory limit to more than {} bytes, or map the model from a file: such weights can be packed again for each run",
            limit.saturating_add(needed.saturating_sub(available))
        ))
    }

    /// What everything of the session counts against.
    fn new_budget(&self) -> Arc<Budget> {
        match &self.budget {
            Some(shared) => Budget::within(shared, self.memory_limit),
            None => Budget::new(self.memory_limit.or_else(host_memory_bytes)),
        }
    }
}

/// The devices of a session in order: those that are open, then the named providers' first ones; the CPU where there
/// are none.
fn open_devices(
    mut devices: Vec<Arc<dyn Device>>,
    providers: &[(String, ProviderOptions)],
) -> Result<Vec<Arc<dyn Device>>> {
    for (name, options) in providers {
        devices.push(provider(name)?.open(0, options).within(|| format!("provider {name}"))?);
    }
    if devices.is_empty() {
        devices.push(provider("cpu")?.open(0, &ProviderOptions::new())?);
    }
    Ok(devices)
}

/// The place of the first device that claims a node.
fn first_claim(graph: &Graph, node: &Node, devices: &[Arc<dyn Device>]) -> Option<usize> {
    devices.iter().position(|device| device.claim(&NodeView { graph, node }).is_ok())
}

/// Runs a graph of constants on the host's devices; without any of them on the CPU provider. The results count against `budget`.
fn evaluate(
    graph: Graph,
    devices: &[Arc<dyn Device>],
    budget: &Arc<Budget>,
    limits: &Limits,
) -> Result<Vec<Tensor>> {
    let mut builder = SessionBuilder::new(&Model::from_graph(graph)).threads(1).limits(*limits);
    builder = builder.opt_level(Level::Disabled).budget(budget);
    builder.devices = devices.iter().filter(|device| device.memory() == DeviceId::HOST).cloned().collect();
    let outputs = builder.build()?.run(&[])?.into_iter();
    outputs.map(|(name, value)| value.tensor().cloned().within(|| name)).collect()
}
