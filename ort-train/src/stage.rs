//! A part of a training that runs as one graph: a whole step, a batch whose gradients are added up,
//! an update, an evaluation.

use std::collections::HashMap;
use std::sync::Arc;

use ort_alloc::{Budget, DeviceId};
use ort_core::Result;
use ort_core::ep::Device;
use ort_core::ir::Graph;
use ort_core::plan::PlanReport;
use ort_core::rewrite::Level;
use ort_core::session::{
    BoundPeak, IoBinding, Model, OutputTarget, RunOptions, Session, SessionBuilder, ValueSpec,
};
use ort_core::tensor::Value;

use crate::TrainingOptions;
use crate::mixed::recast;
use crate::recompute::{ActivationPattern, PlanRow, Planned, RecomputeReport, Request, planned};
use crate::state::State;

/// What a stage computes.
pub(crate) struct StageGraph {
    pub(crate) graph: Graph,
    /// Tensors of the training that it reads.
    pub(crate) reads: Vec<String>,
    /// Tensors of the training that it writes in their memory, and the outputs that do.
    pub(crate) updates: Vec<(String, String)>,
    /// Tensors of the training that are replaced by outputs, which are small.
    pub(crate) replaces: Vec<(String, String)>,
    /// Other outputs.
    pub(crate) outputs: Vec<String>,
}

impl StageGraph {
    /// The graph as a session would rewrite it, its outputs by their names, with casts repeated in
    /// the backward pass; and the bytes of the constants that were folded for it.
    fn prepared(&mut self, settings: &Settings<'_>) -> Result<(Graph, usize)> {
        let graph = std::mem::replace(&mut self.graph, Graph::new(""));
        let names: Vec<_> = graph.outputs.iter().map(|&id| graph.value(id).name.clone()).collect();
        // What is folded does not follow from the limit, so that a limit that is named as
        // sufficient is.
        let folded = Budget::new(None);
        let settings = Settings { own: None, ..*settings };
        let builder = settings.builder(&Model::from_graph(graph)).budget(&folded);
        let mut graph = with_updates(builder, &self.updates).prepared()?;
        // Rewrites may have another value in the place of an output.
        for (id, name) in graph.outputs.clone().into_iter().zip(names) {
            graph.value_mut(id).name = name;
        }
        Ok((recast(graph), folded.in_use()))
    }
}

/// What the sessions of stages are built with.
#[derive(Clone, Copy)]
pub(crate) struct Settings<'a> {
    pub(crate) devices: &'a [Arc<dyn Device>],
    pub(crate) options: &'a TrainingOptions,
    /// What the memory limit leaves beside the bytes that are kept from step to step.
    pub(crate) own: Option<usize>,
}

impl Settings<'_> {
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

    /// The same if this many bytes of the limit are taken.
    fn beside(&self, bytes: usize) -> Self {
        Settings { own: self.own.map(|own| own.saturating_sub(bytes)), ..*self }
    }
}

/// The outputs of a stage that its binding keeps in memory of their own.
#[derive(Clone, Copy, Default)]
pub(crate) struct KeptOutputs<'a> {
    replaces: &'a [(String, String)],
    outputs: &'a [String],
}

impl KeptOutputs<'_> {
    /// What a run takes that keeps them.
    pub(crate) fn peak(&self, session: &Session, dims: &[(&str, i64)]) -> Result<BoundPeak> {
        let inputs = session.inputs();
        let memories = memories_of(session, &inputs);
        let memory_of = |name: &str| memories.get(name).copied().unwrap_or(DeviceId::HOST);
        let replaces = self.replaces.iter().map(|(input, output)| (output.as_str(), memory_of(input)));
        let others = self.outputs.iter().map(|output| (output.as_str(), DeviceId::HOST));
        session.bound_peak(dims, &replaces.chain(others).collect::<Vec<_>>())
    }
}

/// The memory in which a session reads each input.
fn memories_of<'a>(session: &Session, inputs: &'a [ValueSpec]) -> HashMap<&'a str, DeviceId> {
    inputs.iter().map(|input| input.name.as_str()).zip(session.input_memories()).collect()
}

pub(crate) struct Stage {
    session: Session,
    /// The bytes of constants that were folded before the session was built.
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

fn with_updates(mut builder: SessionBuilder, updates: &[(String, String)]) -> SessionBuilder {
    for (input, output) in updates {
        builder = builder.update(input, output);
    }
    builder
}

impl Stage {
    /// Plans and compiles a stage.
    pub(crate) fn new(mut stage: StageGraph, settings: &Settings<'_>) -> Result<Stage> {
        let graph = std::mem::replace(&mut stage.graph, Graph::new(""));
        let builder = settings.builder(&Model::from_graph(graph));
        let session = with_updates(builder, &stage.updates).build()?;
        Ok(Stage::of(stage, session, 0))
    }

    /// A stage that a session computes, for which this many bytes of constants were folded before.
    fn of(stage: StageGraph, session: Session, folded: usize) -> Stage {
        let StageGraph { reads, updates, replaces, outputs, .. } = stage;
        let binding = session.io_binding();
        let (recompute, rows, patterns) = (None, Vec::new(), Vec::new());
        Stage { session, folded, binding, reads, updates, replaces, outputs, recompute, rows, patterns }
    }

    /// The same where casts of the forward pass are made anew in the backward pass.
    pub(crate) fn recasting(mut stage: StageGraph, settings: &Settings<'_>) -> Result<Stage> {
        let (graph, folded) = stage.prepared(settings)?;
        // No rewrite takes the clones for what is common.
        let builder = settings.beside(folded).builder(&Model::from_graph(graph)).opt_level(Level::Disabled);
        let session = with_updates(builder, &stage.updates).build()?;
        Ok(Stage::of(stage, session, folded))
    }

    /// The same with recomputation as asked.
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
        let kept = request.kept.saturating_add(folded);
        let outputs = KeptOutputs { replaces: &stage.replaces, outputs: &stage.outputs };
        let request = Request { kept, outputs, ..*request };
        let Planned { session, report, rows, patterns, .. } = planned(&graph, &build, &request)?;
        Ok(Stage { recompute: Some(report), rows, patterns, ..Stage::of(stage, session, folded) })
    }

    /// The bytes of constants that were folded before the session was built.
    pub(crate) fn folded(&self) -> usize {
        self.folded
    }

    /// The bytes of constants that the stage holds beside the model's: folded ones, copies for
    /// alignment, packed weights.
    pub(crate) fn constants(&self) -> usize {
        self.folded.saturating_add(self.session.constant_bytes())
    }

    /// What may be computed again, where that was asked for.
    pub(crate) fn rows(&self) -> &[PlanRow] {
        &self.rows
    }

    /// What is kept for the backward pass, where that was asked for.
    pub(crate) fn patterns(&self) -> &[ActivationPattern] {
        &self.patterns
    }

    /// What recomputation it has.
    pub(crate) fn recompute(&self) -> Option<RecomputeReport> {
        self.recompute
    }

    /// What a run takes beside what it updates, with these sizes of symbolic dimensions.
    pub(crate) fn peak(&self, dims: &[(&str, i64)]) -> Result<BoundPeak> {
        let outputs = KeptOutputs { replaces: &self.replaces, outputs: &self.outputs };
        outputs.peak(&self.session, dims)
    }

    /// The memory of a run, with these sizes of symbolic dimensions.
    pub(crate) fn plan(&self, dims: &[(&str, i64)]) -> Result<PlanReport> {
        self.session.plan(dims)
    }

    pub(crate) fn session(&self) -> &Session {
        &self.session
    }

    /// Takes over the tensors that it needs.
    pub(crate) fn enter(&mut self, state: &mut State) -> Result<()> {
        let inputs = self.session.inputs();
        let memories = memories_of(&self.session, &inputs);
        let memory_of = |name: &str| memories.get(name).copied().unwrap_or(DeviceId::HOST);
        let updates = self.updates.iter().map(|(name, _)| name);
        let replaced = self.replaces.iter().map(|(name, _)| name);
        // All are brought before the first is taken, so that none is lost where there is no room
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
            self.binding.bind_output(output, memory_of(input))?;
        }
        for output in &self.outputs {
            self.binding.bind_output(output, DeviceId::HOST)?;
        }
        Ok(())
    }

    /// Gives all tensors back.
    pub(crate) fn leave(&mut self, state: &mut State) {
        for (name, buffer) in self.binding.take_buffers() {
            state.insert(name, buffer);
        }
    }

    /// Runs on what the caller gives; outputs can be asked for afterwards.
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

    /// An output of the last run that is one number.
    pub(crate) fn number(&self, output: &str) -> Result<f32> {
        let value = self.binding.output(output)?;
        let tensor = value.tensor()?;
        match tensor.dtype() {
            ort_core::dtype::DType::F64 => Ok(tensor.to_scalar::<f64>()? as f32),
            _ => tensor.to_scalar::<f32>(),
        }
    }

    /// An output of the last run that is a truth value.
    pub(crate) fn is_true(&self, output: &str) -> Result<bool> {
        self.binding.output(output)?.tensor()?.to_scalar::<bool>()
    }

    /// An output of the last run.
    pub(crate) fn output(&self, output: &str) -> Result<Value> {
        self.binding.output(output)?.to_value()
    }

    /// Whether the graph has such an input.
    pub(crate) fn takes(&self, input: &str) -> bool {
        self.session.inputs().iter().any(|spec| spec.name == input)
    }
}
