//! Packing of deferred weights, before the first step of the first run that needs them.
//!
//! At the start of a run its slab is untouched. So packing there, one weight after the other, peaks
//! where packing during the build would: at the packed weights plus the file pages of the smallest.

use std::cmp::Reverse;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ort_alloc::fork::PerProcess;
use parking_lot::{Mutex, MutexGuard};
use rustc_hash::{FxHashMap, FxHashSet};

use super::streaming::compile_packed;
use crate::ep::{Account, CompileSettings, Device, NodeView, Owner, Precision, RunControl};
use crate::ir::Graph;
use crate::onnx::LoadedModel;
use crate::plan::{Action, RunPlan};
use crate::program::{DeferredKernel, Origin, Program, Step, Work};
use crate::tensor::Tensor;
use crate::{Result, error};

/// The deferred weights of a compiled program.
pub(crate) struct DeferredWeights {
    precision: Precision,
    owner: Arc<Owner>,
    /// The kernels of the program and its subgraphs that are not packed yet. More in a child of
    /// `fork` that missed the end of a packing, which costs it only time.
    left: AtomicUsize,
    /// Held by the run that packs. A child of `fork` has a lock of its own, because it has no run
    /// that could release the parent's.
    turn: PerProcess<Mutex<()>>,
    /// The bytes of folded constants that are freed once they are packed.
    pub(crate) passing_bytes: usize,
}

/// The deferred weights as a run sees them.
#[derive(Clone, Copy)]
pub(crate) struct WeightPacking<'a> {
    pub(crate) weights: &'a DeferredWeights,
    pub(crate) devices: &'a [Arc<dyn Device>],
    pub(crate) control: &'a RunControl,
    /// The model's files, from which weights are read.
    pub(crate) files: &'a LoadedModel,
}

impl DeferredWeights {
    pub(crate) fn of(program: &Program, precision: Precision, owner: &Arc<Owner>) -> DeferredWeights {
        let (mut left, mut programs) = (0, vec![program]);
        // By address, the constants that stay, and those that deferred kernels read.
        let mut stay: FxHashSet<_> = program.constants().into_iter().filter_map(Tensor::address).collect();
        let mut read = FxHashMap::default();
        while let Some(program) = programs.pop() {
            stay.extend(program.graph.constants.values().filter_map(Tensor::address));
            for step in &program.steps {
                programs.extend(step.nested.iter().map(|nested| &nested.program));
                let Work::Deferred(kernel) = &step.work else { continue };
                left += 1;
                let waiting = kernel.waiting();
                let alone = waiting.iter().filter_map(|waiting| waiting.alone.as_ref());
                read.extend(
                    alone
                        .flat_map(|graph| graph.constants.values())
                        .map(|tensor| (tensor.address(), tensor.byte_count())),
                );
            }
        }
        let passing = read.into_iter().filter(|(address, _)| address.is_some_and(|at| !stay.contains(&at)));
        let (passing_bytes, turn) = (passing.map(|(_, bytes)| bytes).sum(), PerProcess::default());
        DeferredWeights { precision, owner: owner.clone(), left: AtomicUsize::new(left), turn, passing_bytes }
    }
}

impl WeightPacking<'_> {
    /// Packs the weights that this plan of a program needs and that no run has packed yet.
    pub(crate) fn pack(&self, program: &Program, plan: &RunPlan) -> Result<()> {
        if self.weights.left.load(Ordering::Relaxed) == 0 {
            return Ok(());
        }
        let steps = program.steps.iter().zip(&plan.steps);
        let needed = steps.filter_map(|(step, plan)| match &step.work {
            Work::Deferred(kernel) if plan.action == Action::Run => {
                kernel.packed().is_none().then_some((step, kernel))
            }
            _ => None,
        });
        let mut needed: Vec<_> = needed.collect();
        if needed.is_empty() {
            return Ok(());
        }
        // The largest first: the pages of the file that the last one reads add to all packed ones.
        needed.sort_by_key(|(_, kernel)| Reverse(kernel.packed_bytes));
        let _turn = self.turn()?;
        for (step, kernel) in needed {
            self.pack_step(program, step, kernel).map_err(|problem| step.failed(problem))?;
        }
        // Packing has also read what lies between the weights.
        self.files.release_all();
        // If a file was changed meanwhile, the packed weights may come from the new content.
        self.files.check_files(true)
    }

    /// Waits until no other run packs.
    fn turn(&self) -> Result<MutexGuard<'_, ()>> {
        /// How long a run waits before it looks whether it is over.
        const PATIENCE: Duration = Duration::from_millis(5);
        let lock = self.weights.turn.get();
        loop {
            if let Some(guard) = lock.try_lock_for(PATIENCE) {
                return Ok(guard);
            }
            self.control.check()?;
        }
    }

    fn pack_step(&self, program: &Program, step: &Step, kernel: &DeferredKernel) -> Result<()> {
        let node = step.node.and_then(|node| program.graph.nodes.get(node));
        let (node, device) =
            node.zip(self.devices.get(step.device)).ok_or_else(|| error!(Fail, "it has no kernel"))?;
        let view = NodeView { graph: &program.graph, node };
        let DeferredWeights { precision, owner, left, .. } = self.weights;
        let settings = CompileSettings { threads: self.control.threads, precision: *precision };
        let release = |bytes: &[u8]| self.files.release(bytes);
        let is_new = kernel.pack(|waiting| {
            let alone = waiting.alone.as_ref();
            let alone = alone.and_then(|graph| Some(NodeView { graph, node: graph.nodes.first()? }));
            let account = Account { budget: waiting.budget(), owner };
            compile_packed((alone.unwrap_or(view), &**device), settings, account, &release)
        })?;
        left.fetch_sub(usize::from(is_new), Ordering::Relaxed);
        Ok(())
    }
}

/// The deferred weights of a program, by where they are now or, with a plan, during a run.
#[derive(Default)]
pub(crate) struct DeferredBytes {
    /// The bytes of those that are packed.
    pub(crate) packed: usize,
    /// Those that are not, in the model's file or folded.
    pub(crate) unpacked: Vec<Tensor>,
}

impl DeferredBytes {
    pub(crate) fn of(program: &Program, plan: Option<&RunPlan>) -> DeferredBytes {
        let mut bytes = DeferredBytes::default();
        bytes.add(program, plan);
        bytes
    }

    fn add(&mut self, program: &Program, plan: Option<&RunPlan>) {
        for (index, step) in program.steps.iter().enumerate() {
            let plan = plan.and_then(|plan| plan.steps.get(index));
            for (nested, index) in step.nested.iter().zip(0..) {
                self.add(&nested.program, plan.and_then(|plan| plan.nested.get(index)).map(|plan| &**plan));
            }
            let Work::Deferred(kernel) = &step.work else { continue };
            let packs = plan.is_some_and(|plan| plan.action == Action::Run);
            if packs || kernel.packed().is_some() {
                self.packed = self.packed.saturating_add(kernel.packed_bytes);
                continue;
            }
            let waiting = kernel.waiting();
            let alone = waiting.as_ref().and_then(|waiting| waiting.alone.as_ref());
            for (position, slot) in step.inputs.iter().enumerate() {
                let slot = slot.and_then(|slot| program.slots.get(slot.index()));
                let Some(slot) = slot.filter(|slot| matches!(slot.origin, Origin::Consumed)) else {
                    continue;
                };
                let weight = match alone {
                    Some(graph) => weight_of(graph, position),
                    None => program.graph.constants.get(&slot.value),
                };
                self.unpacked.extend(weight.cloned());
            }
        }
    }
}

/// The constant at an input of the only node of a graph.
fn weight_of(graph: &Graph, position: usize) -> Option<&Tensor> {
    graph.constants.get(&graph.nodes.first()?.inputs.get(position).copied().flatten()?)
}
