//! Training stages: a compiled graph with a binding for the tensors that it updates.
//!
//! A stage is a whole step, a batch with gradient accumulation, an update, or an evaluation. The
//! graphs are built in `assemble`.

use std::sync::Arc;

use ort_alloc::{Budget, DeviceId};
use ort_core::Result;
use ort_core::ep::Device;
use ort_core::ir::Graph;
use ort_core::plan::PlanReport;
use ort_core::rewrite::Level;
use ort_core::session::{BoundPeak, IoBinding, Model, OutputTarget, RunOptions, Session, SessionBuilder};
use ort_core::tensor::Value;

use crate::TrainingOptions;
use crate::kept_outputs::{KeptOutputs, memories_of};
use crate::mixed::recast;
use crate::recompute::{ActivationPattern, PlanRow, Planned, RecomputeReport, Request, planned};
use crate::state::State;

/// The graph of a stage, and the persistent tensors that it uses.
pub(crate) struct StageGraph {
    pub(crate) graph: Graph,
    /// Persistent tensors that it only reads.
    pub(crate) reads: Vec<String>,
    /// Persistent tensors that it updates in place, each with the output that is the new value.
    pub(crate) updates: Vec<(String, String)>,
    /// Persistent tensors that are replaced by outputs: running statistics, which are small enough
    /// to copy after a run.
    pub(crate) replaces: Vec<(String, String)>,
    /// Other outputs, for the caller.
    pub(crate) outputs: Vec<String>,
}

impl StageGraph {
    /// Returns the graph as a session would rewrite it, with the casts of the forward pass repeated
    /// in the backward pass and with the original output names. Also returns the bytes of the
    /// constants that were folded.
    fn prepared(&mut self, settings: &Settings<'_>) -> Result<(Graph, usize)> {
        let graph = std::mem::replace(&mut self.graph, Graph::new(""));
        let names: Vec<_> = graph.outputs.iter().map(|&id| graph.value(id).name.clone()).collect();
        // Folding ignores the memory limit. Otherwise the folded bytes would depend on it, and a
        // limit that an error names as sufficient might not suffice.
        let folded = Budget::new(None);
        let settings = Settings { own: None, ..*settings };
        let builder = settings.builder(&Model::from_graph(graph)).budget(&folded);
        let mut graph = with_updates(builder, &self.updates).prepared()?;
        // A rewrite may replace an output by a value of another name.
        for (id, name) in graph.outputs.clone().into_iter().zip(names) {
            graph.value_mut(id).name = name;
        }
        Ok((recast(graph), folded.in_use()))
    }
}

/// The settings that the sessions of stages are built with.
#[derive(Clone, Copy)]
pub(crate) struct Settings<'a> {
    pub(crate) devices: &'a [Arc<dyn Device>],
    pub(crate) options: &'a TrainingOptions,
    /// What the memory limit leaves after the bytes that stay allocated between steps.
    pub(crate) own: Option<usize>,
}

impl Settings<'_> {
    /// Returns a session builder with these settings.
    fn builder(&self, model: &Model) -> SessionBuilder {
        let mut builder = self.devices.iter().cloned().fold(Session::builder(model), SessionBuilder::device);
        if let Some(threads) = self.options.threads {
            builder = builder.threads(threads);
        }
        if let Some(own) = self.own {
            builder = builder.memory_limit(own);
        }
        builder.precision(self.options.precision)
    }

    /// Returns the settings with this many bytes taken off the limit.
    fn beside(&self, bytes: usize) -> Self {
        Settings { own: self.own.map(|own| own.saturating_sub(bytes)), ..*self }
    }
}

/// A compiled stage.
pub(crate) struct Stage {
    session: Session,
    /// The bytes of the constants that were folded before the session was built.
    folded: usize,
    binding: IoBinding,
    reads: Vec<String>,
    updates: Vec<(String, String)>,
    replaces: Vec<(String, String)>,
    outputs: Vec<String>,
    recompute: Option<RecomputeReport>,
    rows: Vec<PlanRow>,
    patterns: Vec<ActivationPattern>,
}

/// Declares the in-place updates to a session builder.
fn with_updates(mut builder: SessionBuilder, updates: &[(String, String)]) -> SessionBuilder {
    for (input, output) in updates {
        builder = builder.update(input, output);
    }
    builder
}

impl Stage {
    /// Compiles a stage.
    pub(crate) fn new(mut stage: StageGraph, settings: &Settings<'_>) -> Result<Stage> {
        let graph = std::mem::replace(&mut stage.graph, Graph::new(""));
        let builder = settings.builder(&Model::from_graph(graph));
        let session = with_updates(builder, &stage.updates).build()?;
        Ok(Stage::of(stage, session, 0))
    }

    /// Wraps a session as a stage. `folded` is the bytes of constants that were folded before.
    fn of(stage: StageGraph, session: Session, folded: usize) -> Stage {
        let StageGraph { reads, updates, replaces, outputs, .. } = stage;
        let binding = session.io_binding();
        let (recompute, rows, patterns) = (None, Vec::new(), Vec::new());
        Stage { session, folded, binding, reads, updates, replaces, outputs, recompute, rows, patterns }
    }

    /// Compiles a stage whose backward pass repeats the casts of the forward pass instead of
    /// keeping their results.
    pub(crate) fn recasting(mut stage: StageGraph, settings: &Settings<'_>) -> Result<Stage> {
        let (graph, folded) = stage.prepared(settings)?;
        // Without rewrites, because CSE would merge the clones with their originals.
        let builder = settings.beside(folded).builder(&Model::from_graph(graph)).opt_level(Level::Disabled);
        let session = with_updates(builder, &stage.updates).build()?;
        Ok(Stage::of(stage, session, folded))
    }

    /// Compiles a stage with the requested recomputation.
    pub(crate) fn recomputing(
        mut stage: StageGraph,
        settings: &Settings<'_>,
        request: &Request<'_>,
    ) -> Result<Stage> {
        let (graph, folded) = stage.prepared(settings)?;
        let build = |graph: Graph, own: Option<usize>| {
            let settings = Settings { own, ..*settings };
            let builder = settings.builder(&Model::from_graph(graph)).opt_level(Level::Disabled);
            with_updates(builder, &stage.updates).build()
        };
        // Folded constants live outside the candidate sessions, so they count as kept bytes.
        let kept = request.kept.saturating_add(folded);
        let outputs = KeptOutputs { replaces: &stage.replaces, outputs: &stage.outputs };
        let request = Request { kept, outputs, ..*request };
        let Planned { session, report, rows, patterns, .. } = planned(&graph, &build, &request)?;
        Ok(Stage { recompute: Some(report), rows, patterns, ..Stage::of(stage, session, folded) })
    }

    /// Returns the bytes of the constants that were folded before the session was built.
    pub(crate) fn folded(&self) -> usize {
        self.folded
    }

    /// Returns the bytes of constants that the stage holds in addition to the model's: folded
    /// constants, aligned copies and packed weights.
    pub(crate) fn constants(&self) -> usize {
        self.folded.saturating_add(self.session.constant_bytes())
    }

    /// Returns the recomputation table, if it was asked for.
    pub(crate) fn rows(&self) -> &[PlanRow] {
        &self.rows
    }

    /// Returns the patterns of what is kept for the backward pass, if they were asked for.
    pub(crate) fn patterns(&self) -> &[ActivationPattern] {
        &self.patterns
    }

    /// Returns the recomputation that was chosen.
    pub(crate) fn recompute(&self) -> Option<RecomputeReport> {
        self.recompute
    }

    /// Returns the memory of a run in addition to what it updates, with these sizes of symbolic
    /// dimensions.
    pub(crate) fn peak(&self, dims: &[(&str, i64)]) -> Result<BoundPeak> {
        let outputs = KeptOutputs { replaces: &self.replaces, outputs: &self.outputs };
        outputs.peak(&self.session, dims)
    }

    /// Returns the memory plan of a run with these sizes of symbolic dimensions.
    pub(crate) fn plan(&self, dims: &[(&str, i64)]) -> Result<PlanReport> {
        self.session.plan(dims)
    }

    pub(crate) fn session(&self) -> &Session {
        &self.session
    }

    /// Takes the tensors that it needs from the state and binds them.
    pub(crate) fn attach(&mut self, state: &mut State) -> Result<()> {
        let inputs = self.session.inputs();
        let memories = memories_of(&self.session, &inputs);
        let memory_of = |name: &str| memories.get(name).copied().unwrap_or(DeviceId::HOST);
        let updates = self.updates.iter().map(|(name, _)| name);
        let replaced = self.replaces.iter().map(|(name, _)| name);
        // All tensors are moved before the first is taken, so that none is lost if there is no room
        // for another.
        let needed = || self.reads.iter().chain(updates.clone()).chain(replaced.clone());
        needed().try_for_each(|name| state.bring(name, memory_of(name)))?;
        for name in needed() {
            self.binding.bind_input(name, state.take(name)?)?;
        }
        for (input, output) in &self.updates {
            self.binding.bind_output(output, OutputTarget::Input(input.clone()))?;
        }
        for (input, output) in &self.replaces {
            // In the memory of the statistic, so that the copy after the run stays on one device.
            self.binding.bind_output(output, memory_of(input))?;
        }
        for output in &self.outputs {
            self.binding.bind_output(output, DeviceId::HOST)?;
        }
        Ok(())
    }

    /// Returns all tensors to the state.
    pub(crate) fn detach(&mut self, state: &mut State) {
        for (name, buffer) in self.binding.take_buffers() {
            state.insert(name, buffer);
        }
    }

    /// Runs on the caller's inputs. Afterwards the outputs can be read.
    pub(crate) fn run(&mut self, inputs: &[(&str, Value)], options: &RunOptions<'_>) -> Result<()> {
        for (name, value) in inputs {
            self.binding.bind_input(name, value.clone())?;
        }
        self.session.run_with_binding(&mut self.binding, options)?;
        for (input, output) in &self.replaces {
            let value = self.binding.shared_output(output)?;
            self.session.update_inplace(self.binding.input_mut(input)?, value.tensor()?)?;
        }
        Ok(())
    }

    /// Returns an output of the last run that is a single number.
    pub(crate) fn number(&self, output: &str) -> Result<f32> {
        let value = self.binding.output(output)?;
        let tensor = value.tensor()?;
        match tensor.dtype() {
            // Losses are reported in single precision, whatever the model computes in.
            ort_core::dtype::DType::F64 => Ok(tensor.to_scalar::<f64>()? as f32),
            _ => tensor.to_scalar::<f32>(),
        }
    }

    /// Returns an output of the last run that is a boolean.
    pub(crate) fn is_true(&self, output: &str) -> Result<bool> {
        self.binding.output(output)?.tensor()?.to_scalar::<bool>()
    }

    /// Returns an output of the last run.
    pub(crate) fn output(&self, output: &str) -> Result<Value> {
        self.binding.output(output)?.to_value()
    }

    /// Whether the graph has an input of this name.
    pub(crate) fn takes(&self, input: &str) -> bool {
        self.session.inputs().iter().any(|spec| spec.name == input)
    }
}
