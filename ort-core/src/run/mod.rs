//! Execution of a compiled program.
//!
//! [`Executor::run`] is the entry point. It reserves memory for the run ([`grant`]) and runs the
//! batch whole or in parts ([`microbatch`]). Each part is one pass of a [`frame`] through the
//! steps, in which every value is where the plan put it. Weights and device constants that the
//! memory limit cannot hold all at once are streamed ([`streaming`]).

mod call;
pub(crate) mod compiled;
pub(crate) mod deferred;
pub(crate) mod frame;
pub(crate) mod grant;
pub(crate) mod idle_memory;
pub(crate) mod inputs;
pub(crate) mod microbatch;
mod nested;
mod observer;
mod options;
mod outputs;
pub(crate) mod poison;
mod profile;
pub(crate) mod streaming;
pub(crate) mod tables;
mod target;
pub(crate) mod transfer;
mod views;
mod workspace_limits;

use std::sync::Arc;
use std::time::Instant;

use ort_alloc::{Allocator, Budget, HostAllocator};

use crate::Limits;
use crate::Result;
use crate::dim::Bindings;
use crate::onnx::LoadedModel;
use crate::plan::{BoundValues, GivenMemory, Planning, RunPlan, resolve_bound};
use crate::tensor::ValueView;

pub(crate) use compiled::{CacheUse, Compiled};
pub(crate) use idle_memory::SessionIdleMemory;
pub use idle_memory::{IdleMemory, release_idle_memory};
use inputs::{fits, is_on_device};
pub use observer::ValueObserver;
pub use options::RunOptions;
pub use profile::{EventMemory, EventTensor, Profile, ProfileEvent};
pub use transfer::SharedMemory;

/// Runs one compiled program; any number of threads may share it.
pub(crate) struct Executor {
    /// The model's files, from which weights are read.
    pub(crate) files: Arc<LoadedModel>,
    /// Shared by sessions on one model with the same settings.
    pub(crate) compiled: Arc<Compiled>,
    /// Counts what this session's runs hold. It is a child of the compiled program's budget.
    pub(crate) budget: Arc<Budget>,
    /// The budget that follows the machine's free memory. `None` if the caller set a limit or
    /// shares a budget.
    pub(crate) machine: Option<Arc<Budget>>,
    pub(crate) threads: usize,
    pub(crate) planning: Planning,
    /// Whether a batch that does not fit in the budget may be split.
    pub(crate) batch_split: bool,
    pub(crate) limits: Limits,
    /// Idle memory that finished runs leave for the next ones.
    pub(crate) kept: Arc<SessionIdleMemory>,
    /// Whether to poison memory before kernels write it ([`poison`]).
    pub(crate) poison: bool,
}

impl Executor {
    /// Returns a plan that fits the inputs, and its bindings. If the inputs contradict the shapes
    /// planned with `bindings`, this is a plan without symbolic sizes, with empty bindings.
    pub(crate) fn plan_fitting(
        &self,
        bindings: Bindings,
        given: &[ValueView<'_>],
        bound: &BoundValues,
    ) -> Result<(Arc<RunPlan>, Bindings)> {
        let plan = self.plan_bound(&bindings, bound)?;
        if fits(&self.compiled.program, &plan, given) {
            return Ok((plan, bindings));
        }
        // Without bindings no symbolic size is known, so the run allocates those values itself, and
        // the inputs fit.
        Ok((self.plan_bound(&Bindings::new(), bound)?, Bindings::new()))
    }

    /// The host allocator for outputs: the recycler, if the session has one.
    fn output_allocator(&self) -> &dyn Allocator {
        match &self.kept.outputs {
            Some(recycler) => &**recycler,
            None => &**HostAllocator::global(),
        }
    }

    /// Describes a run without an I/O binding to the planner: which inputs are in device memory.
    pub(crate) fn given_values(&self, given: &[ValueView<'_>]) -> BoundValues {
        let mut values = self.compiled.program.bound_values(self.planning);
        // An empty list means that every input is in host memory.
        if values.inputs.is_empty() && given.iter().any(is_on_device) {
            values.inputs = given.iter().map(|value| GivenMemory::of(Some(*value))).collect();
        }
        values
    }

    /// Returns the cached plan for these bindings, or makes one.
    fn plan_kept(&self, bindings: &Bindings, bound: &BoundValues) -> Result<Arc<RunPlan>> {
        self.compiled.plans.get(&self.compiled.program, bindings, bound, || {
            let start = Instant::now();
            let plan = resolve_bound(&self.compiled.program, bindings, self.threads, bound)?;
            let milliseconds = start.elapsed().as_millis() as u64;
            tracing::info!(dims = %bindings, peak_bytes = plan.peak(), milliseconds, "planned");
            Ok(plan)
        })
    }
}
