//! Runs of a compiled program: what a run is granted of the memory, and the frame that goes through
//! the steps with it.
//!
//! [`Executor::run`] is the entry. It takes a grant ([`grant`]), for the whole batch or in parts
//! ([`microbatch`]); each part goes through a [`frame`], in which every value is where the plan put
//! it. Weights and constants that the limit cannot hold all at once come and go ([`streaming`]).

mod call;
pub(crate) mod compiled;
pub(crate) mod frame;
pub(crate) mod grant;
pub(crate) mod idle_memory;
pub(crate) mod inputs;
pub(crate) mod microbatch;
mod nested;
mod options;
mod outputs;
pub(crate) mod poison;
mod profile;
pub(crate) mod streaming;
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
pub(crate) use idle_memory::Kept;
pub use idle_memory::{IdleMemory, release_idle_memory};
use inputs::fits;
pub use options::RunOptions;
pub use profile::{EventMemory, Profile, ProfileEvent};
pub use transfer::SharedMemory;
use transfer::is_on_device;

/// Runs one compiled program, from any number of threads.
pub(crate) struct Executor {
    /// The files that weights are read from.
    pub(crate) files: Arc<LoadedModel>,
    /// Shared with other sessions on the model that were built alike.
    pub(crate) compiled: Arc<Compiled>,
    /// What runs of this session hold, within the budget of what is compiled.
    pub(crate) budget: Arc<Budget>,
    /// The budget that follows the machine's free memory. None if the caller set a limit or shares
    /// a budget.
    pub(crate) machine: Option<Arc<Budget>>,
    pub(crate) threads: usize,
    pub(crate) planning: Planning,
    /// Whether runs may be split.
    pub(crate) batch_split: bool,
    pub(crate) limits: Limits,
    /// What finished runs leave for the next ones.
    pub(crate) kept: Arc<Kept>,
    pub(crate) poison: bool,
}

impl Executor {
    /// The plan for these bindings; where what is given contradicts it, one that knows no sizes.
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
        Ok((self.plan_bound(&Bindings::new(), bound)?, Bindings::new()))
    }

    /// Where memory of the host for outputs comes from.
    fn output_allocator(&self) -> &dyn Allocator {
        match &self.kept.outputs {
            Some(recycler) => &**recycler,
            None => &**HostAllocator::global(),
        }
    }

    /// What a plan knows of a run without a binding: what is given in memory of devices.
    pub(crate) fn given_values(&self, given: &[ValueView<'_>]) -> BoundValues {
        let mut values = self.compiled.program.bound_values(self.planning);
        if values.inputs.is_empty() && given.iter().any(is_on_device) {
            values.inputs = given.iter().map(|value| GivenMemory::of(Some(*value))).collect();
        }
        values
    }

    /// The plan for what is bound, as it was made before.
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
