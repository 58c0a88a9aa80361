//! The graphs of the training stages: step, gradient accumulation, update, evaluation.
//!
//! They combine forward and backward pass ([`TrainingGraph`]) with optimizer nodes. How a stage is
//! compiled and run is in `stage`.

use std::collections::{HashMap, HashSet};

use ort_core::dtype::DType;
use ort_core::ir::{Graph, GraphBuilder, ValueId, ValueType};
use ort_core::spec::RUNTIME;
use ort_core::tensor::Tensor;
use ort_core::{Result, error};

use crate::graph::{Parameter, TrainingGraph, evaluation};
use crate::optimizer::{Optimizer, StepValues, shared_inputs};
use crate::options::{Patterns, TrainingOptions};
use crate::stage::StageGraph;
use crate::state::{gradient_name, state_name};
use crate::trainer::Trainer;
use crate::values::{LOSS, Statistic, named_values};

/// The input that scales the accumulated gradients before an update.
pub(crate) const GRADIENT_SCALE: &str = "optimizer.gradient_scale";
/// The output of an update under loss scaling: whether all its gradients are finite.
pub(crate) const FINITE: &str = "optimizer.finite";
/// The input that says whether accumulators are overwritten instead of added to.
pub(crate) const OVERWRITE: &str = "gradient.overwrite";

impl Trainer {
    /// Builds the graph of a whole step: forward pass, backward pass and update. Each gradient is
    /// freed as soon as its parameter is updated.
    pub(crate) fn step_graph(&self) -> Result<StageGraph> {
        let mut builder = GraphBuilder::extend(self.training.graph.clone());
        builder.set_scope("optimizer");
        let first = builder.graph().nodes.len();
        let gradients: Vec<(usize, ValueId, ValueId)> = self
            .training
            .parameters
            .iter()
            .enumerate()
            .map(|(index, it)| (index, it.value, it.gradient))
            .collect();
        let mut stage = Updates::of(&self.training, &self.options, &mut builder);
        // A step needs no averaging, so only a loss scale has to be divided out.
        let scale = stage.options.scaling().is_some().then(|| stage.gradient_scale());
        stage.emit(&gradients, scale)?;
        let Updates { updates, outputs, .. } = stage;
        let mut all = vec![self.training.loss];
        all.extend(self.training.statistics.iter().map(|statistic| statistic.updated));
        all.extend(outputs);
        all.extend(named_values(builder.graph(), &self.options.additional_outputs)?);
        update_early(builder.graph_mut(), first);
        let graph = builder.finish(&all)?;
        let (mut outputs, reads) = (self.batch_outputs(), Vec::new());
        outputs.extend(finite(&self.options));
        Ok(StageGraph { replaces: self.replaced(&graph), graph, reads, updates, outputs })
    }

    /// The outputs of a batch for the caller.
    fn batch_outputs(&self) -> Vec<String> {
        std::iter::once(LOSS.to_string()).chain(self.options.additional_outputs.iter().cloned()).collect()
    }

    /// Running statistics, and the outputs that replace them.
    fn replaced(&self, graph: &Graph) -> Vec<(String, String)> {
        let pair = |it: &Statistic| (it.name.clone(), graph.value(it.updated).name.to_string());
        self.training.statistics.iter().map(pair).collect()
    }

    /// Builds the graph of a batch that accumulates its gradients: forward and backward pass, then
    /// one addition per parameter.
    pub(crate) fn accumulate_graph(&self) -> Result<StageGraph> {
        let mut builder = GraphBuilder::extend(self.training.graph.clone());
        builder.set_scope("gradient");
        let first = builder.graph().nodes.len();
        // The first batch of an update overwrites, so no pass has to clear the accumulators.
        let overwrite = builder.typed_input(OVERWRITE, ValueType::tensor(DType::Bool, Some(Vec::new())));
        let mut outputs = vec![self.training.loss];
        outputs.extend(self.training.statistics.iter().map(|statistic| statistic.updated));
        let mut updates = Vec::new();
        for parameter in &self.training.parameters {
            let name = gradient_name(&parameter.name);
            let ty = builder.graph().value(parameter.value).ty.clone();
            let sum = builder.typed_input(&name, ty);
            let inputs = [sum, parameter.gradient, overwrite].map(Some);
            let added = builder.add((RUNTIME, "Accumulate"), &inputs, &[], 1, Vec::new())?;
            for (output, name) in added.into_iter().zip([name]) {
                updates.push((name.clone(), rename(&mut builder, output, &name)));
                outputs.push(output);
            }
        }
        update_early(builder.graph_mut(), first);
        outputs.extend(named_values(builder.graph(), &self.options.additional_outputs)?);
        let graph = builder.finish(&outputs)?;
        let reads = self.training.parameters.iter().map(|parameter| parameter.name.clone()).collect();
        let outputs = self.batch_outputs();
        Ok(StageGraph { replaces: self.replaced(&graph), graph, reads, updates, outputs })
    }

    /// Builds the graph of an update with the accumulated gradients.
    pub(crate) fn apply_graph(&self) -> Result<StageGraph> {
        apply_graph(&self.training, &self.options)
    }

    /// Builds the evaluation graph, or takes the one that was loaded from a file.
    pub(crate) fn evaluate_graph(&self) -> Result<StageGraph> {
        let graph = match &self.evaluation {
            Some(graph) => graph.clone(),
            None => evaluation(&self.model, &self.training, &self.options)?.0,
        };
        let output = self.training.output.clone();
        let parameters = self.training.parameters.iter().map(|it| it.name.clone());
        let statistics = self.training.statistics.iter().map(|it| it.name.clone());
        let inputs: HashSet<&str> = graph.inputs.iter().map(|&id| &*graph.value(id).name).collect();
        // An evaluation model from a file need not read all trained tensors.
        let reads = parameters.chain(statistics).filter(|name| inputs.contains(name.as_str())).collect();
        let mut outputs = self.batch_outputs();
        if !outputs.contains(&output) {
            outputs.push(output);
        }
        Ok(StageGraph { graph, reads, updates: Vec::new(), replaces: Vec::new(), outputs })
    }
}

/// Builds the graph of an update with the accumulated gradients.
pub(crate) fn apply_graph(training: &TrainingGraph, options: &TrainingOptions) -> Result<StageGraph> {
    let mut builder = GraphBuilder::new("apply");
    builder.set_scope("optimizer");
    let mut gradients = Vec::with_capacity(training.parameters.len());
    let mut reads = Vec::with_capacity(training.parameters.len());
    for (index, Parameter { name, value, .. }) in training.parameters.iter().enumerate() {
        let ty = training.graph.value(*value).ty.clone();
        let parameter = builder.typed_input(name, ty.clone());
        let name = gradient_name(name);
        gradients.push((index, parameter, builder.typed_input(&name, ty)));
        reads.push(name);
    }
    let mut stage = Updates::of(training, options, &mut builder);
    let scale = stage.gradient_scale();
    stage.emit(&gradients, Some(scale))?;
    let Updates { updates, outputs, .. } = stage;
    let graph = builder.finish(&outputs)?;
    let outputs = finite(options).into_iter().collect();
    Ok(StageGraph { graph, reads, updates, replaces: Vec::new(), outputs })
}

/// The output that says whether an update was applied, if there is a loss scale.
fn finite(options: &TrainingOptions) -> Option<String> {
    options.scaling().map(|_| FINITE.to_string())
}

/// Emits the parameter updates into a graph.
struct Updates<'a> {
    training: &'a TrainingGraph,
    options: &'a TrainingOptions,
    no_decay: Patterns<'a>,
    builder: &'a mut GraphBuilder,
    updates: Vec<(String, String)>,
    outputs: Vec<ValueId>,
}

impl<'a> Updates<'a> {
    fn of(
        training: &'a TrainingGraph,
        options: &'a TrainingOptions,
        builder: &'a mut GraphBuilder,
    ) -> Updates<'a> {
        let no_decay = Patterns::new(&options.no_decay);
        Updates { training, options, no_decay, builder, updates: Vec::new(), outputs: Vec::new() }
    }

    /// Emits the update of each parameter, given by index, value and gradient. Gradients are
    /// multiplied by `scale` before they are clipped.
    fn emit(&mut self, gradients: &[(usize, ValueId, ValueId)], scale: Option<ValueId>) -> Result<()> {
        let (learning_rate, step) = shared_inputs(self.builder);
        let all: Vec<ValueId> = gradients.iter().map(|(_, _, gradient)| *gradient).collect();
        let scale = match self.options.clip_norm {
            Some(most) => Some(self.clipped(&all, scale, most)?),
            None => scale,
        };
        let update = if self.options.scaling().is_some() { Some(self.finite(&all)?) } else { None };
        let shared = StepValues { learning_rate, scale, update, step };
        for &(index, value, gradient) in gradients {
            let Some(parameter) = self.training.parameters.get(index) else { continue };
            self.update(parameter, (value, gradient), shared)?;
        }
        Ok(())
    }

    /// Adds the input that gradients are multiplied by.
    fn gradient_scale(&mut self) -> ValueId {
        self.builder.typed_input(GRADIENT_SCALE, ValueType::tensor(DType::F32, Some(Vec::new())))
    }

    /// Emits the check that all gradients are finite, whose result is also an output.
    fn finite(&mut self, gradients: &[ValueId]) -> Result<ValueId> {
        let inputs: Vec<Option<ValueId>> = gradients.iter().copied().map(Some).collect();
        let finite = self.builder.add((RUNTIME, "AllFinite"), &inputs, &[], 1, Vec::new())?;
        let finite = finite.first().copied().ok_or_else(|| error!(Fail, "AllFinite has no output"))?;
        self.builder.graph_mut().value_mut(finite).name = FINITE.into();
        self.outputs.push(finite);
        Ok(finite)
    }

    /// Emits the factor that scales the gradients so that their norm, after `scale`, is at most
    /// `most`. The formula is that of PyTorch's `clip_grad_norm_`.
    fn clipped(&mut self, gradients: &[ValueId], scale: Option<ValueId>, most: f32) -> Result<ValueId> {
        let inputs: Vec<Option<ValueId>> = gradients.iter().copied().map(Some).collect();
        let norm = self.builder.add((RUNTIME, "GlobalNorm"), &inputs, &[], 1, Vec::new())?;
        let norm = norm.first().copied().ok_or_else(|| error!(Fail, "GlobalNorm has no output"))?;
        let number = |builder: &mut GraphBuilder, number: f32| {
            Ok::<_, ort_core::Error>(builder.constant(Tensor::scalar(number)?))
        };
        let scale = match scale {
            Some(scale) => scale,
            None => number(self.builder, 1.0)?,
        };
        // We scale the norm instead of each gradient, which gives the same clipping without another
        // pass.
        let norm = self.builder.node("Mul", &[norm, scale], &[])?;
        // PyTorch adds 1e-6 to the norm and never scales up.
        let (most, little, one) =
            (number(self.builder, most)?, number(self.builder, 1e-6)?, number(self.builder, 1.0)?);
        let norm = self.builder.node("Add", &[norm, little], &[])?;
        let share = self.builder.node("Div", &[most, norm], &[])?;
        let share = self.builder.node("Min", &[share, one], &[])?;
        self.builder.node("Mul", &[scale, share], &[])
    }

    /// Emits the update of one parameter and of its optimizer state.
    fn update(
        &mut self,
        parameter: &Parameter,
        values: (ValueId, ValueId),
        shared: StepValues,
    ) -> Result<()> {
        let options = self.options;
        let decays = !self.no_decay.matches(&parameter.name);
        let optimizer: Optimizer = if decays { options.optimizer } else { options.optimizer.without_decay() };
        let specs = optimizer.states(parameter.tensor.dtype(), parameter.tensor.shape());
        let mut names = vec![parameter.name.clone()];
        let mut states = Vec::with_capacity(specs.len());
        for spec in &specs {
            let name = state_name(&parameter.name, spec.kind);
            let dims = spec.shape.iter().map(|&size| ort_core::dim::Dim::constant(size as i64)).collect();
            states.push(self.builder.typed_input(&name, ValueType::tensor(spec.dtype, Some(dims))));
            names.push(name);
        }
        let outputs = optimizer.emit(self.builder, values, shared, &states)?;
        for (output, name) in outputs.into_iter().zip(names) {
            let renamed = rename(self.builder, output, &name);
            self.updates.push((name, renamed));
            self.outputs.push(output);
        }
        Ok(())
    }
}

/// Names an output after the tensor whose new value it is.
fn rename(builder: &mut GraphBuilder, output: ValueId, of: &str) -> String {
    let name = format!("{of}.updated");
    builder.graph_mut().value_mut(output).name = name.as_str().into();
    name
}

/// Moves the nodes from `first` on directly behind what they wait for among the earlier nodes: the
/// producers of their inputs and the other readers of these. So a gradient dies early, and an
/// in-place update comes after all readers of the old value.
fn update_early(graph: &mut Graph, first: usize) {
    let producers = graph.producers();
    let mut last_reader: HashMap<ValueId, usize> = HashMap::new();
    for (index, node) in graph.nodes.iter().enumerate().take(first) {
        // In graph order, so the last reader of a value overwrites the others.
        last_reader.extend(node.reads().map(|value| (value, index)));
    }
    let mut keys: Vec<(usize, usize)> = (0..graph.nodes.len()).map(|index| (index, index)).collect();
    for (index, node) in graph.nodes.iter().enumerate().skip(first) {
        let made = node.reads().filter_map(|value| producers.get(value.index()).copied().flatten());
        let made: Vec<usize> = made.map(|id| id.index()).collect();
        // A node that reads other new nodes stays behind them.
        if made.iter().any(|maker| *maker >= first) {
            continue;
        }
        let readers = node.reads().filter_map(|value| last_reader.get(&value).copied());
        if let (Some(last), Some(key)) = (made.iter().copied().chain(readers).max(), keys.get_mut(index)) {
            // Sorts right behind node `last`, whose own key is (last, last).
            *key = (last, index);
        }
    }
    let mut nodes: Vec<_> = keys.into_iter().zip(std::mem::take(&mut graph.nodes)).collect();
    nodes.sort_by_key(|(key, _)| *key);
    graph.nodes = nodes.into_iter().map(|(_, node)| node).collect();
}
