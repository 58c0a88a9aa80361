//! Memory accounting of training steps: planned and measured bytes, and the smallest limit.

use ort_alloc::exact_bytes;
use ort_core::dtype::DType;
use ort_core::plan::PlanReport;
use ort_core::session::BoundPeak;
use ort_core::{Error, MemoryShortage, Result, ensure};

use super::Trainer;
use super::stage_set::StageKind;
use crate::graph::Parameter;
use crate::stage::Stage;
use crate::{ActivationPattern, PlanRow, RecomputeReport};

/// The bytes of a training step at given sizes of its symbolic dimensions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepMemory {
    /// Parameters and running statistics.
    pub parameters: usize,
    /// Optimizer state.
    pub states: usize,
    /// Gradients accumulated over batches.
    pub gradients: usize,
    /// Activations, gradients within a step, and workspaces: the peak of the memory plan.
    pub activations: usize,
    /// Constants in addition to those of the model: folded constants, aligned copies and packed
    /// weights.
    pub constants: usize,
}

impl StepMemory {
    /// Returns the sum of all fields.
    pub fn total(&self) -> usize {
        self.parameters + self.states + self.gradients + self.activations + self.constants
    }
}

impl Trainer {
    /// Plans the memory of a step with these sizes of symbolic dimensions. A dimension that is not
    /// named counts as 1.
    pub fn memory(&mut self, dims: &[(&str, i64)]) -> Result<StepMemory> {
        let kind = self.main_kind();
        let stage = self.ready_at(kind, dims)?;
        let constants = stage.constants();
        let BoundPeak { bytes: activations, is_known } = stage.peak(dims)?;
        ensure!(
            is_known,
            NotImplemented,
            "the peak is not known before the run: sizes of values depend on data"
        );
        Ok(StepMemory { activations, constants, ..self.held() })
    }

    /// Returns the memory of the steps so far, as counted while they ran. Activations are the peak
    /// over all steps.
    pub fn measured(&mut self) -> StepMemory {
        let kind = if self.options.accumulate == 1 { StageKind::Step } else { StageKind::Accumulate };
        let stage = self.stages.get(kind).as_ref();
        let activations = stage.map_or(0, |stage| stage.session().memory().activations_peak);
        let constants = stage.map_or(0, Stage::constants);
        StepMemory { activations, constants, ..self.held() }
    }

    /// The bytes that stay allocated between steps.
    fn held(&self) -> StepMemory {
        let parameters = self.training.parameters.iter();
        let sizes: usize = parameters.clone().map(|parameter| parameter.tensor.byte_count()).sum();
        let statistics: usize = self.training.statistics.iter().map(|it| it.tensor.byte_count()).sum();
        let states: usize = parameters.map(|parameter| self.state_bytes_of(parameter)).sum();
        // `Trainer::accumulate` may also be called directly. Then the accumulators count while
        // batches are pending.
        let gradients = if self.options.accumulate > 1 || self.pending > 0 { sizes } else { 0 };
        StepMemory { parameters: sizes + statistics, states, gradients, ..StepMemory::default() }
    }

    /// Returns the memory plan of a step at these sizes.
    pub fn plan(&mut self, dims: &[(&str, i64)]) -> Result<PlanReport> {
        let kind = self.main_kind();
        self.ready_at(kind, dims)?.plan(dims)
    }

    /// Returns the largest size of the dimension `dim`, for example the batch, whose step fits in
    /// `bytes`. The size is computed from plans, and nothing runs. Returns `None` if not even size
    /// 1 fits. Until recomputation has been chosen for some size, the result is for a step without
    /// recomputation.
    pub fn largest_batch(&mut self, dim: &str, others: &[(&str, i64)], bytes: usize) -> Result<Option<i64>> {
        let kind = self.main_kind();
        self.detach();
        let Some(rest) = bytes.checked_sub(self.kept_bytes()) else { return Ok(None) };
        // Later stages are compiled with recomputation for their own sizes. Here the sizes are not
        // known yet, so we compile a temporary stage without recomputation and without a limit:
        // `bytes` bounds it.
        let is_there = self.stages.get(kind).is_some();
        let is_to_come = !is_there && self.waits_for_sizes();
        let made = if is_to_come { Some(self.made(kind, None)?) } else { None };
        let stage = match &made {
            Some(stage) => stage,
            None => self.ready(kind)?,
        };
        let Some(rest) = rest.checked_sub(stage.folded()) else { return Ok(None) };
        stage.session().largest_size(dim, others, rest)
    }

    /// Chooses which activations to recompute
    /// ([`TrainingOptions::recompute`](crate::TrainingOptions::recompute)) for steps with these
    /// sizes of symbolic dimensions. A dimension that is not named counts as 1. Without this call,
    /// the sizes of the first batch decide. Steps of other sizes run as well, but may not fit.
    ///
    /// # Errors
    ///
    /// No choice fits the memory limit. The error names the smallest limit that some choice fits.
    pub fn optimize_memory(&mut self, dims: &[(&str, i64)]) -> Result<RecomputeReport> {
        self.detach();
        let kind = self.main_kind();
        // The stage compiled before is for other sizes. We drop it, so that `ready_at` compiles one
        // for these.
        *self.stages.get(kind) = None;
        let report = self.ready_at(kind, dims)?.recompute();
        match report {
            Some(report) => Ok(report),
            None => {
                let peak = self.ready_at(kind, dims)?.peak(dims)?.bytes;
                Ok(RecomputeReport { peak_before: peak, peak, ..RecomputeReport::default() })
            }
        }
    }

    /// Returns what can be recomputed at these sizes and how many bytes of the peak that saves: the
    /// rows of [`memory_table`](crate::memory_table).
    pub fn recompute_plans(&mut self, dims: &[(&str, i64)]) -> Result<Vec<PlanRow>> {
        self.tabulated(dims).map(|stage| stage.rows().to_vec())
    }

    /// Returns what is kept for the backward pass at these sizes, node by node: the patterns that
    /// [`memory_insight`](crate::memory_insight) prints.
    pub fn activation_patterns(&mut self, dims: &[(&str, i64)]) -> Result<Vec<ActivationPattern>> {
        self.tabulated(dims).map(|stage| stage.patterns().to_vec())
    }

    /// Compiles the stage of a batch again, with the recomputation tables.
    fn tabulated(&mut self, dims: &[(&str, i64)]) -> Result<&mut Stage> {
        self.detach();
        let kind = self.main_kind();
        *self.stages.get(kind) = None;
        self.tabulates = true;
        let made = self.ready_at(kind, dims).map(|_| ());
        // Cleared even if the compilation failed: tables cost simulations that later stages do not
        // need.
        self.tabulates = false;
        made?;
        self.ready(kind)
    }

    /// The bytes that stay allocated between steps, and count against the limit besides the
    /// session. Sums saturate, because sizes from a file may overflow.
    pub(super) fn kept_bytes(&self) -> usize {
        let of = |parameter: &Parameter| {
            let own = parameter.tensor.byte_count();
            let sum = if self.options.accumulate > 1 { own } else { 0 };
            own.saturating_add(sum).saturating_add(self.state_bytes_of(parameter))
        };
        let parameters = self.training.parameters.iter().map(of);
        let statistics = self.training.statistics.iter().map(|it| it.tensor.byte_count());
        parameters.chain(statistics).fold(0, usize::saturating_add)
    }

    /// The bytes of a parameter's optimizer state.
    fn state_bytes_of(&self, parameter: &Parameter) -> usize {
        let (dtype, shape) = (parameter.tensor.dtype(), parameter.tensor.shape());
        let states = self.options.optimizer.states(dtype, shape);
        // A size that overflows counts as more than any limit.
        let bytes =
            |dtype: DType, shape: &[usize]| ort_core::tensor::byte_count(dtype, shape).unwrap_or(usize::MAX);
        states.iter().fold(0, |sum: usize, state| sum.saturating_add(bytes(state.dtype, &state.shape)))
    }

    /// Fails if the limit is below the bytes that stay allocated between steps. The error names the
    /// smallest limit for a step of these sizes.
    pub(super) fn check_state_fits(&self, dims: &[(&str, i64)]) -> Result<()> {
        let (kept, limit) = (self.kept_bytes(), self.options.memory_limit.unwrap_or(usize::MAX));
        if kept <= limit {
            return Ok(());
        }
        // The search for a recomputation reports the smallest limit for a whole step. It is run
        // only for that number.
        let needed = match self.recomputing(self.main_kind(), dims) {
            Err(problem) => problem.shortage().map(|shortage| shortage.needed),
            Ok(_) => None,
        };
        let largest = vec![("parameters and the optimizer's states".to_string(), kept)];
        let sizes: Vec<String> = dims.iter().map(|(name, size)| format!("{name} = {size}")).collect();
        let sizes = if sizes.is_empty() { "symbolic sizes of 1".to_string() } else { sizes.join(", ") };
        let others = "freeze weights, or use an optimizer with less state";
        let is_known = || -> Result<bool> { Ok(self.made(self.main_kind(), None)?.peak(dims)?.is_known) };
        let more = match needed.is_none() || is_known().unwrap_or(true) {
            true => "",
            false => "; the step itself may need more, as sizes of some values depend on data",
        };
        let advice = match needed {
            Some(needed) => {
                format!("raise the memory limit to {} (with {sizes}), {others}{more}", exact_bytes(needed))
            }
            None => format!("raise the memory limit, {others}"),
        };
        let needed = needed.unwrap_or(kept);
        let shortage = MemoryShortage { needed, available: limit, limit, largest };
        Err(Error::out_of_memory("a training step", shortage).help(advice))
    }
}
