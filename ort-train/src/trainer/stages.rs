//! Lazily compiled training stages.
//!
//! Each stage is compiled when it is first needed. The attached stage owns the tensors.

use ort_alloc::exact_bytes;
use ort_core::session::NodePlacement;
use ort_core::tensor::Value;
use ort_core::{Error, MemoryShortage, Result, error};

use super::Trainer;
use super::stage_set::StageKind;
use crate::Recompute;
use crate::kept_outputs::KeptOutputs;
use crate::recompute::Request;
use crate::stage::{Settings, Stage};

impl Trainer {
    /// Returns the device of each node of a step. The list is empty until the step is compiled, by
    /// [`Self::plan`] or the first batch.
    pub fn placement(&mut self) -> Vec<NodePlacement> {
        let kind = self.main_kind();
        self.stages.get(kind).as_ref().map_or_else(Vec::new, |stage| stage.session().placement())
    }

    /// The kind of stage that runs for each batch.
    pub(super) fn main_kind(&self) -> StageKind {
        if self.options.accumulate == 1 { StageKind::Step } else { StageKind::Accumulate }
    }

    /// Whether the graph of a batch depends on its sizes, because recomputation is chosen for them.
    pub(super) fn waits_for_sizes(&self) -> bool {
        self.options.memory_limit.is_some() || self.options.recompute != Recompute::AsLimited
    }

    /// Returns a stage, compiled for these sizes if its graph depends on them.
    pub(super) fn ready_at(&mut self, kind: StageKind, dims: &[(&str, i64)]) -> Result<&mut Stage> {
        let is_asked = self.waits_for_sizes() || self.tabulates;
        let recomputes = matches!(kind, StageKind::Step | StageKind::Accumulate) && is_asked;
        // A compiled stage keeps the choice that was made for its sizes.
        if !recomputes || self.stages.get(kind).is_some() {
            return self.ready(kind);
        }
        let stage = self.recomputing(kind, dims)?;
        *self.stages.get(kind) = Some(stage);
        self.ready(kind)
    }

    /// Returns a stage, and compiles it if this is its first use.
    pub(super) fn ready(&mut self, kind: StageKind) -> Result<&mut Stage> {
        if self.stages.get(kind).is_none() {
            let stage = self.made(kind, self.options.memory_limit);
            let stage = stage.map_err(|problem| self.in_all(kind, 0, problem))?;
            *self.stages.get(kind) = Some(stage);
        }
        self.stages
            .get(kind)
            .as_mut()
            .ok_or_else(|| error!(Fail, "a stage of the training run was not compiled"))
    }

    /// Compiles a stage without recomputation, within a limit in bytes.
    pub(super) fn made(&self, kind: StageKind, limit: Option<usize>) -> Result<Stage> {
        let graph = match kind {
            StageKind::Step => self.step_graph()?,
            StageKind::Accumulate => self.accumulate_graph()?,
            StageKind::Apply => self.apply_graph()?,
            StageKind::Evaluate => self.evaluate_graph()?,
        };
        let settings = self.settings(limit);
        match self.options.mixed_precision {
            // Only these two have a backward pass in which casts are repeated.
            Some(_) if matches!(kind, StageKind::Step | StageKind::Accumulate) => {
                Stage::recasting(graph, &settings)
            }
            _ => Stage::new(graph, &settings),
        }
    }

    /// Compiles a stage with the requested recomputation, within the memory limit.
    pub(super) fn recomputing(&self, kind: StageKind, dims: &[(&str, i64)]) -> Result<Stage> {
        let graph = if kind == StageKind::Step { self.step_graph()? } else { self.accumulate_graph()? };
        let (recompute, tabulate) = (&self.options.recompute, self.tabulates);
        let (kept, limit) = (self.kept_bytes(), self.options.memory_limit);
        let outputs = KeptOutputs::default();
        let request = Request { recompute, tabulate, kept, limit, dims, outputs };
        Stage::recomputing(graph, &self.settings(limit), &request)
    }

    /// The session settings of a stage, within a limit in bytes.
    fn settings(&self, limit: Option<usize>) -> Settings<'_> {
        // The session counts neither parameters nor optimizer state, so its own limit is what they
        // leave.
        let own = limit.map(|limit| limit.saturating_sub(self.kept_bytes()));
        Settings { devices: self.state.devices(), options: &self.options, own }
    }

    /// Returns the sizes that the inputs give to symbolic dimensions.
    pub(super) fn sizes_of(&self, inputs: &[(&str, Value)]) -> Vec<(String, i64)> {
        let graph = &self.training.graph;
        let mut sizes: Vec<(String, i64)> = Vec::new();
        for (name, value) in inputs {
            let formal = graph.inputs.iter().find(|&&id| *graph.value(id).name == **name);
            let formal = formal.and_then(|&id| graph.value(id).ty.shape());
            let (Some(formal), Ok(actual)) = (formal, value.tensor()) else { continue };
            for (dim, size) in formal.iter().zip(actual.shape()) {
                let symbol = dim.as_symbol().map(ToString::to_string);
                sizes.extend(symbol.map(|symbol| (symbol, *size as i64)));
            }
        }
        sizes.sort();
        // If two inputs disagree on a size, the smaller one is kept. It only selects the sizes that
        // recomputation is chosen for.
        sizes.dedup_by(|one, other| one.0 == other.0);
        sizes
    }

    /// Hands a stage the tensors that it needs.
    pub(super) fn attach(&mut self, kind: StageKind) -> Result<()> {
        if self.stages.attached == Some(kind) {
            return Ok(());
        }
        self.detach();
        self.trim_others(kind);
        self.ready(kind)?;
        self.hold_gradients(matches!(kind, StageKind::Accumulate | StageKind::Apply))?;
        self.stages.attached = Some(kind);
        let state = &mut self.state;
        let attached = match self.stages.get(kind) {
            Some(stage) => stage.attach(state),
            None => Err(error!(Fail, "a stage of the training run was not compiled")),
        };
        // A stage that lacks room takes no tensor, or only some: the next step must try again.
        attached.inspect_err(|_| self.detach())
    }

    /// Returns the tensors from the attached stage to the state.
    pub(crate) fn detach(&mut self) {
        let Some(kind) = self.stages.attached.take() else { return };
        let state = &mut self.state;
        if let Some(stage) = self.stages.get(kind) {
            stage.detach(state);
        }
    }

    /// Under a limit, frees the idle memory of evaluation before a training stage runs, and vice
    /// versa. Together the two could exceed the limit.
    fn trim_others(&mut self, kind: StageKind) {
        if self.options.memory_limit.is_none() {
            return;
        }
        for other in [StageKind::Step, StageKind::Accumulate, StageKind::Apply, StageKind::Evaluate] {
            let is_apart = (other == StageKind::Evaluate) != (kind == StageKind::Evaluate);
            if let Some(stage) = self.stages.get(other).as_ref().filter(|_| is_apart) {
                stage.session().trim();
            }
        }
    }

    /// Restates a session's out-of-memory error in terms of the limit of the whole training run.
    /// The session's own limit is only what parameters and optimizer state leave of it.
    pub(super) fn in_all(&self, kind: StageKind, folded: usize, problem: Error) -> Error {
        let limit = self.options.memory_limit.zip(problem.shortage());
        let Some((limit, shortage)) = limit else { return problem };
        let held = self.kept_bytes().saturating_add(folded);
        let needed = held.saturating_add(shortage.sufficient_limit());
        let subject = match kind {
            StageKind::Step | StageKind::Accumulate => "a training step",
            StageKind::Apply => "an update",
            StageKind::Evaluate => "an evaluation",
        };
        let largest = shortage.largest.clone();
        let shortage = MemoryShortage { needed, available: limit, limit, largest };
        let advice =
            format!("raise the memory limit to at least {}, or make the batch smaller", exact_bytes(needed));
        Error::out_of_memory(subject, shortage).help(advice)
    }
}
