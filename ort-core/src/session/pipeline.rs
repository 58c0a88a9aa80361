//! The compile pipeline: rewrite, place, compile, order, plan.
//!
//! `SessionBuilder::prepare` runs the first four stages. Types and shapes are already inferred:
//! [`Model::from_source`] does that at load time. Plans depend on input sizes, so
//! `Executor::plan_kept` makes one at the first run with each combination of sizes.
//! [`SessionBuilder::optimized`] stops after the rewrites and decomposes what ONNX Runtime lacks;
//! [`SessionBuilder::prepared`] stops after the placement.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Instant;

use ort_alloc::{Budget, DeviceId, Reservation};
use rustc_hash::FxHashSet;

use super::{Model, SessionBuilder};
use crate::cache::Reading;
use crate::ep::interrupt::{Watch, enter};
use crate::ep::{Device, NodeView, Owner, Packing, guard};
use crate::ir::{Graph, Node};
use crate::ops::fused::is_in_onnx_runtime;
use crate::placement::{Partition, Scope, lower_all_but, partition};
use crate::plan::{PlanCaches, better_order, order_of_updates};
use crate::program::{BuildCx, ConstantCopies, ConstantStreaming, Program, Update, aligned, find_updates};
use crate::rewrite::{Environment, Level, Report, optimize};
use crate::tensor::Tensor;
use crate::{Limits, Result, Within};

/// The inputs of a compilation besides the settings.
#[derive(Clone, Copy)]
pub(super) struct CompileContext<'a> {
    /// The number of threads of runs.
    pub(super) threads: usize,
    pub(super) load_threads: usize,
    pub(super) devices: &'a [Arc<dyn Device>],
    pub(super) budget: &'a Arc<Budget>,
    /// The deadline for the whole build, in which the program may be compiled more than once.
    pub(super) until: Option<Instant>,
}

impl CompileContext<'_> {
    pub(super) fn reading(self) -> Reading {
        Reading { threads: self.load_threads, until: self.until }
    }
}

/// The graph that is compiled.
struct Rewritten {
    graph: Arc<Graph>,
    report: Report,
    /// The addresses of the constants that folding has computed.
    folded: FxHashSet<usize>,
}

/// A compiled program, with the byte counts of its compilation.
pub(super) struct Built {
    pub(super) program: Program,
    /// The plan caches of the program and of its subgraphs.
    pub(super) plans: PlanCaches,
    /// The bytes of packed weights in memory, without those in the compiled cache.
    pub(super) packed_bytes: usize,
    /// The bytes of packed weights that runs pack when they need them.
    pub(super) deferred_bytes: usize,
    /// The bytes of packed weights in the compiled cache.
    pub(super) cached_bytes: usize,
    pub(super) rewrites: Report,
    pub(super) owner: Arc<Owner>,
    /// With [`Packing::Reserved`], the reservations for weights that were measured but not packed.
    pub(super) _reserved: Vec<Reservation>,
}

impl SessionBuilder {
    /// [`optimized`](Self::optimized), under the assumption that equal dimension names mean equal
    /// sizes.
    pub(super) fn optimized_as_named(self) -> Result<(Graph, Report)> {
        let devices = self.open_devices()?.all;
        let budget = self.new_budget();
        let setting = self.setting(1, &devices, &budget)?;
        // The caller may save the graph, which the compiled model's checksums do not protect.
        self.verify_files(setting.reading())?;
        let Rewritten { graph, report, .. } = self.rewrite(setting, Packing::Now)?;
        let mut graph = Arc::unwrap_or_clone(graph);
        lower_all_but(&mut graph, is_in_onnx_runtime)?;
        Ok((graph, report))
    }

    /// Returns the graph as it is compiled: rewritten, and decomposed where no device has a kernel.
    /// The caller can edit it. A session on it with [`Level::Disabled`] runs it unchanged.
    pub fn prepared(self) -> Result<Graph> {
        let budget = self.new_budget();
        self.open_devices()?.attempt(|devices| {
            let setting = self.setting(1, devices, &budget)?;
            let mut graph = self.rewrite(setting, Packing::Now)?.graph;
            partition(&mut graph, devices, Scope::Model)?;
            Ok(Arc::unwrap_or_clone(graph))
        })
    }

    /// Runs all stages before planning, with the build's deadline. The deadline also interrupts
    /// rules that read large constants, and kernels that pack.
    pub(super) fn program(&self, setting: CompileContext<'_>, packing: Packing<'_>) -> Result<Built> {
        let what = "compiling the model";
        let _watch = enter(Watch { what, cancel: self.cancel.clone(), deadline: setting.until });
        guard::call(|| what.to_string(), || self.prepare(setting, packing))
    }

    /// Runs the first four stages on the model's graph: rewrite, place, compile, order.
    fn prepare(&self, setting: CompileContext<'_>, packing: Packing<'_>) -> Result<Built> {
        let mut rewritten = self.rewrite(setting, packing)?;
        let updates = find_updates(self.model.graph(), &self.updates)?;
        let placed = partition(&mut rewritten.graph, setting.devices, Scope::Model)?;
        let mut built = self.compile_placed(rewritten, placed, updates, setting, packing)?;
        order(&mut built.program, setting.threads)?;
        Ok(built)
    }

    /// The rewrite stage: applies the rules and passes that the optimizer enables.
    fn rewrite(
        &self,
        CompileContext { devices, budget, load_threads, until, .. }: CompileContext<'_>,
        packing: Packing<'_>,
    ) -> Result<Rewritten> {
        let mut graph = self.model.shared_graph();
        let folded = RefCell::<FxHashSet<usize>>::default();
        let compute = |graph: Graph| {
            // With the model's files, because they hold most constants of the graph.
            let constants = self.model.with_graph(graph);
            let results = evaluate(&constants, load_threads, devices, budget, self.limits.ending(until))?;
            folded.borrow_mut().extend(results.iter().filter_map(Tensor::address));
            Ok(results)
        };
        // A cache entry holds the folded constants as well, so loading from it folds nothing.
        let evaluate = |graph: Graph| match packing {
            Packing::Cached(store) => store.folded(graph, compute),
            _ => compute(graph),
        };
        let first_claim = |graph: &Graph, node: &Node| first_claim(graph, node, devices);
        let channels_last = devices.iter().map(|device| guard::prefers_channels_last(&**device));
        let channels_last = channels_last.collect::<Result<Vec<bool>>>()?;
        // No NHWC in sessions that update inputs: both directions of a training step read the
        // updated weights, and the gradients are NCHW.
        let channels_last = if self.updates.is_empty() { &channels_last[..] } else { &[] };
        let vector_bytes = devices.iter().map(|device| guard::vector_bytes(&**device));
        let vector_bytes = vector_bytes.collect::<Result<Vec<usize>>>()?;
        let (first_claim, vector_bytes) = (&first_claim, &vector_bytes);
        let environment =
            Environment { evaluate: &evaluate, first_claim, channels_last, vector_bytes, until };
        let report = optimize(&mut graph, &self.optimizer, environment)?;
        Ok(Rewritten { graph, report, folded: folded.into_inner() })
    }

    /// The compile stage: compiles a kernel for each node, and uploads constants to the memories in
    /// which they are read.
    fn compile_placed(
        &self,
        Rewritten { graph, report: rewrites, folded }: Rewritten,
        placed: Partition,
        updates: Vec<Update>,
        setting: CompileContext<'_>,
        packing: Packing<'_>,
    ) -> Result<Built> {
        let CompileContext { load_threads, devices, budget, until, .. } = setting;
        let owner = Arc::<Owner>::default();
        let is_bounded = self.is_bounded();
        let mut cx = BuildCx {
            devices,
            budget,
            owner: &owner,
            load_threads,
            precision: self.precision,
            release: &|tensor| self.model.release(tensor),
            programs: 0,
            packed_bytes: 0,
            cached_bytes: 0,
            reserved: Vec::new(),
            is_aligned_in_file: &|tensor| self.model.is_aligned_in_file(tensor),
            is_mapped: &|tensor| tensor.bytes().is_some_and(|bytes| self.model.is_mapped(bytes)),
            is_folded: &|tensor| tensor.address().is_some_and(|address| folded.contains(&address)),
            // Without a limit all packed weights stay. Those in the cache are mapped and count
            // against no limit.
            streams: is_bounded && !matches!(packing, Packing::Cached(_)),
            defers: !is_bounded && matches!(packing, Packing::Now),
            deferred_bytes: 0,
            windows: if is_bounded { ConstantStreaming::Always } else { ConstantStreaming::OfBounded },
            packing,
            cache_dir: self.cache_dir.as_deref(),
            runs_once: self.runs_once,
            updates,
            until,
            copies: ConstantCopies::default(),
        };
        let mut program = Program::build(graph, placed, &mut cx)?;
        align_defaults(&mut program, &mut cx)?;
        let BuildCx { programs, packed_bytes, deferred_bytes, cached_bytes, reserved, .. } = cx;
        let plans = PlanCaches::new(programs);
        let _reserved = reserved;
        Ok(Built { program, plans, packed_bytes, deferred_bytes, cached_bytes, rewrites, owner, _reserved })
    }
}

/// Copies defaults of inputs that are not aligned for their type, because kernels read typed slices
/// and the file may place a default at any offset.
fn align_defaults(program: &mut Program, cx: &mut BuildCx<'_>) -> Result<()> {
    if program.graph.input_defaults.values().all(Tensor::is_aligned) {
        return Ok(());
    }
    let defaults = Arc::make_mut(&mut program.graph).input_defaults.values_mut();
    for default in defaults.filter(|default| !default.is_aligned()) {
        if let Some(copy) = aligned(default, cx)? {
            *default = copy;
        }
    }
    Ok(())
}

/// The order stage: reorders the steps to lower the peak. Subgraphs come first, because their peak
/// is part of their node's.
fn order(program: &mut Program, threads: usize) -> Result<()> {
    for nested in program.steps.iter_mut().flat_map(|step| &mut step.nested) {
        order(&mut nested.program, threads)?;
    }
    if let Some(order) = order_of_updates(program)? {
        program.reorder(&order);
        // The file's order would read old values after they are overwritten, so this order replaces
        // it as the reference.
        program.file_order = None;
    }
    if let Some(order) = better_order(program, threads) {
        program.reorder(&order);
    }
    Ok(())
}

/// The index of the first device that claims a node.
fn first_claim(graph: &Graph, node: &Node, devices: &[Arc<dyn Device>]) -> Option<usize> {
    devices.iter().position(|device| guard::claim(&**device, &NodeView { graph, node }).is_ok())
}

/// Constant folding: runs a graph of constants on the host devices, or on the CPU provider if there
/// are none. The results count against `budget`.
fn evaluate(
    constants: &Model,
    threads: usize,
    devices: &[Arc<dyn Device>],
    budget: &Arc<Budget>,
    limits: Limits,
) -> Result<Vec<Tensor>> {
    let mut builder = SessionBuilder::new(constants).threads(threads).load_threads(threads);
    // No rewrites: constant folding calls this function, and would recurse without end.
    builder = builder.limits(limits).opt_level(Level::Disabled).budget(budget);
    builder.runs_once = true;
    builder.devices = devices.iter().filter(|device| device.memory() == DeviceId::HOST).cloned().collect();
    let outputs = builder.build()?.run(&[])?.into_iter();
    outputs.map(|(name, value)| value.tensor().cloned().within(|| name)).collect()
}
