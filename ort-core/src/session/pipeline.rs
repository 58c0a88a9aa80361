//! From a model to the program that runs it, in five stages: rewrite, place, compile, order, plan.
//!
//! `SessionBuilder::prepare` is the whole of it, but for two ends. Loading a model
//! ([`Model::from_source`]) has inferred its types and shapes before the first stage. Plans depend
//! on the sizes of inputs: `Executor::plan_kept` makes one for each combination of sizes, at its
//! first run. [`SessionBuilder::optimized`] ends after the rewrites, [`SessionBuilder::prepared`]
//! after the placement.

use std::sync::Arc;
use std::time::Instant;

use ort_alloc::{Budget, DeviceId, Reservation};

use super::{Model, SessionBuilder};
use crate::cache::Reading;
use crate::ep::interrupt::{Watch, enter};
use crate::ep::{CancelToken, Device, NodeView, Owner, Packing, guard};
use crate::ir::{Graph, Node};
use crate::ops::fused::is_in_onnx_runtime;
use crate::placement::{Partition, Scope, lower_all_but, partition};
use crate::plan::{PlanCaches, better_order, order_of_updates};
use crate::program::{BuildCx, Program, Update, Windowing, aligned, find_updates};
use crate::rewrite::{Environment, Level, Report, optimize};
use crate::tensor::Tensor;
use crate::{Limits, Result, Within};

/// What compiling takes besides the settings.
#[derive(Clone, Copy)]
pub(super) struct Setting<'a> {
    /// Those of runs, and those that make the session.
    pub(super) threads: usize,
    pub(super) load_threads: usize,
    pub(super) devices: &'a [Arc<dyn Device>],
    pub(super) budget: &'a Arc<Budget>,
    /// When all of it has to be done: the program may be built more than once.
    pub(super) until: Option<Instant>,
}

impl Setting<'_> {
    pub(super) fn reading(self) -> Reading {
        Reading { threads: self.load_threads, until: self.until }
    }
}

/// A compiled program.
pub(super) struct Built {
    pub(super) program: Program,
    /// Where its plans are kept, and those of its subgraphs.
    pub(super) plans: PlanCaches,
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
    /// As [`optimized`](Self::optimized), with equal names of dimensions taken for equal sizes.
    pub(super) fn optimized_as_named(self) -> Result<(Graph, Report)> {
        let devices = self.open_devices()?.all;
        let budget = self.new_budget();
        let setting = self.setting(1, &devices, &budget)?;
        // The graph goes elsewhere, where no checksum of the compiled model holds for it.
        self.verify_files(setting.reading())?;
        let (graph, report) = self.rewrite(setting, Packing::Now)?;
        let mut graph = Arc::unwrap_or_clone(graph);
        lower_all_but(&mut graph, is_in_onnx_runtime)?;
        Ok((graph, report))
    }

    /// The graph as it is compiled: rewritten, and taken apart where no device has a kernel. A
    /// session on it with [`Level::Disabled`] runs it as it stands, so that it can be edited in
    /// between.
    pub fn prepared(self) -> Result<Graph> {
        let budget = self.new_budget();
        self.open_devices()?.attempt(|devices| {
            let setting = self.setting(1, devices, &budget)?;
            let (mut graph, _) = self.rewrite(setting, Packing::Now)?;
            partition(&mut graph, devices, Scope::Model)?;
            Ok(Arc::unwrap_or_clone(graph))
        })
    }

    /// All stages, within the time that building may take: rules that read long constants, and
    /// kernels that pack for long, end with it.
    pub(super) fn program(&self, setting: Setting<'_>, packing: Packing<'_>) -> Result<Built> {
        let what = "compiling the model";
        let _watch = enter(Watch { what, cancel: CancelToken::new(), deadline: setting.until });
        guard::call(|| what.to_string(), || self.prepare(setting, packing))
    }

    /// The road from the model's graph to a program whose runs can be planned.
    fn prepare(&self, setting: Setting<'_>, packing: Packing<'_>) -> Result<Built> {
        let (mut graph, rewrites) = self.rewrite(setting, packing)?;
        let updates = find_updates(self.model.graph(), &self.updates)?;
        let placed = partition(&mut graph, setting.devices, Scope::Model)?;
        let mut built = self.compile_placed(graph, placed, updates, rewrites, setting, packing)?;
        order(&mut built.program, setting.threads)?;
        Ok(built)
    }

    /// Stage 1: the model's graph after the rewrites that the optimizer allows, and what they were.
    fn rewrite(
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
        // What a session updates is read in both directions of a training, whose gradients have the
        // channels second.
        let channels_last = if self.updates.is_empty() { &channels_last[..] } else { &[] };
        let vector_bytes = devices.iter().map(|device| guard::vector_bytes(&**device));
        let vector_bytes = vector_bytes.collect::<Result<Vec<usize>>>()?;
        let (first_claim, vector_bytes) = (&first_claim, &vector_bytes);
        let environment =
            Environment { evaluate: &evaluate, first_claim, channels_last, vector_bytes, until };
        let report = optimize(&mut graph, &self.optimizer, environment)?;
        Ok((graph, report))
    }

    /// Stage 3: a kernel for each node, and its constants where it reads them.
    fn compile_placed(
        &self,
        graph: Arc<Graph>,
        placed: Partition,
        updates: Vec<Update>,
        rewrites: Report,
        setting: Setting<'_>,
        packing: Packing<'_>,
    ) -> Result<Built> {
        let Setting { load_threads, devices, budget, until, .. } = setting;
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
            // Without a limit all packed weights stay, and those in the cache count against none.
            streams: is_bounded && !matches!(packing, Packing::Cached(_)),
            windows: if is_bounded { Windowing::Always } else { Windowing::OfBounded },
            packing,
            cache_dir: self.cache_dir.as_deref(),
            updates,
            until,
        };
        let mut program = Program::build(graph, placed, &mut cx)?;
        align_defaults(&mut program, &mut cx)?;
        let BuildCx { programs, packed_bytes, cached_bytes, reserved, .. } = cx;
        let plans = PlanCaches::new(programs);
        Ok(Built { program, plans, packed_bytes, cached_bytes, rewrites, owner, _reserved: reserved })
    }
}

/// Kernels read inputs as typed slices, and the file may hold the default of an input anywhere.
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

/// Stage 4: the steps in an order that has fewer bytes alive at once. Subgraphs come first: what
/// they take counts for their node.
fn order(program: &mut Program, threads: usize) -> Result<()> {
    for nested in program.steps.iter_mut().flat_map(|step| &mut step.nested) {
        order(&mut nested.program, threads)?;
    }
    if let Some(order) = order_of_updates(program)? {
        program.reorder(&order);
        program.file_order = None;
    }
    if let Some(order) = better_order(program, threads) {
        program.reorder(&order);
    }
    Ok(())
}

/// The place of the first device that claims a node.
fn first_claim(graph: &Graph, node: &Node, devices: &[Arc<dyn Device>]) -> Option<usize> {
    devices.iter().position(|device| guard::claim(&**device, &NodeView { graph, node }).is_ok())
}

/// Runs a graph of constants on the host's devices; without any of them on the CPU provider. The
/// results count against `budget`.
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
