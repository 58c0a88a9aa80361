//! The forward pass in training mode: what a model's graph becomes before loss and backward pass.

use std::collections::HashSet;

use ort_core::dtype::{DType, TypeSet};
use ort_core::ir::{Attribute, Attributes, Graph, GraphBuilder, Node, ValueId, ValueType};
use ort_core::pass::stack_sequences;
use ort_core::rewrite::apply_families;
use ort_core::session::Model;
use ort_core::spec::RUNTIME;
use ort_core::tensor::Tensor;
use ort_core::{Result, Within, advise, advise_listed, ensure, error};

use crate::mixed::autocast;
use crate::options::Patterns;
use crate::values::{COUNTER, LOSS, Mode, SEED, Statistic, is_standard, named_values};
use crate::weights::{TrainableGraph, all_running_statistics, sink_constants};
use crate::{OperatorPrecision, TrainingOptions};

/// A model's graph while it is turned into a training graph.
pub(crate) struct Forward {
    pub(crate) graph: Graph,
    /// The weights among the constants. The others are outputs of `Constant` nodes.
    pub(crate) weights: HashSet<ValueId>,
    pub(crate) output: ValueId,
    pub(crate) inputs: Vec<String>,
    pub(crate) statistics: Vec<Statistic>,
    pub(crate) frozen: Vec<String>,
    /// The weights of rank 0 that the options neither train nor freeze.
    pub(crate) scalars: Vec<String>,
    /// The weights that are not parameters.
    pub(crate) buffers: HashSet<ValueId>,
    /// The names of those `buffers` that the options neither train nor freeze.
    pub(crate) skipped: Vec<String>,
}

impl Forward {
    /// Prepares a model's graph for training or evaluation.
    pub(crate) fn new(model: &Model, options: &TrainingOptions, mode: Mode) -> Result<Forward> {
        let TrainableGraph { mut graph, weights, buffers } = TrainableGraph::of(model, options)?;
        stack_sequences(&mut graph)?;
        // An input with a default is a weight as well. We go through the inputs in order, because
        // the order of the parameters follows from it, and so does the summation order over all
        // gradients.
        let mut defaults = std::mem::take(&mut graph.input_defaults);
        for input in std::mem::take(&mut graph.inputs) {
            match defaults.remove(&input) {
                Some(tensor) => drop(graph.constants.insert(input, tensor)),
                None => graph.inputs.push(input),
            }
        }
        let output = output_of(&graph, options.output.as_deref())?;
        let inputs = graph.inputs.iter().map(|&input| graph.value(input).name.to_string()).collect();
        let (statistics, frozen) = (Vec::new(), Vec::new());
        let (scalars, skipped) = (Vec::new(), Vec::new());
        let mut forward =
            Forward { graph, weights, output, inputs, statistics, frozen, scalars, buffers, skipped };
        forward.inputs.extend(options.loss.input().map(str::to_string));
        forward.normalize_batches(mode, options)?;
        forward.drop_out(if options.dropout { mode } else { Mode::Evaluate })?;
        Ok(forward)
    }

    /// Makes each `BatchNormalization` use the statistics of its batch and update the running ones.
    /// In evaluation, and if the options freeze them, it only reads the running ones.
    fn normalize_batches(&mut self, mode: Mode, options: &TrainingOptions) -> Result<()> {
        let mut kept = Vec::new();
        let frozen = Patterns::new(&options.frozen);
        for index in 0..self.graph.nodes.len() {
            let Some(node) =
                self.graph.nodes.get(index).filter(|node| is_standard(node, "BatchNormalization"))
            else {
                continue;
            };
            let given = |name: &'static str| {
                node.attrs.float(name).map(|number| (name.to_string(), Attribute::Float(number)))
            };
            let is_frozen = [3, 4].iter().filter_map(|&input| node.inputs.get(input).copied().flatten());
            let is_frozen = is_frozen
                .map(|running| &*self.graph.value(running).name)
                .any(|name| options.freeze_statistics || frozen.matches(name));
            let mode = if is_frozen { Mode::Evaluate } else { mode };
            let trains = Attribute::Int(i64::from(mode == Mode::Train));
            let attrs = vec![given("epsilon")?, given("momentum")?, ("training_mode".to_string(), trains)];
            let attrs = Attributes::new(node.spec, attrs).within(|| node.place())?;
            let (place, running) =
                (node.place(), [3, 4].map(|input| node.inputs.get(input).copied().flatten()));
            let mut outputs = node.outputs.clone();
            // Without training mode the operator has only its first output.
            outputs.truncate(if mode == Mode::Train { 3 } else { 1 });
            for (position, running) in running.into_iter().enumerate().filter(|_| mode == Mode::Train) {
                let running = running
                    .ok_or_else(|| error!(InvalidGraph, "it has no statistics"))
                    .within(|| place.clone())?;
                let updated = match outputs.get(position + 1).copied().flatten() {
                    Some(updated) => updated,
                    None => {
                        let name = format!("{}.updated", self.graph.value(running).name);
                        let updated = self.graph.add_value(name, ValueType::Unknown);
                        outputs.resize(outputs.len().max(position + 2), None);
                        outputs.get_mut(position + 1).into_iter().for_each(|output| *output = Some(updated));
                        updated
                    }
                };
                self.keep_statistic(running, updated).within(|| place.clone())?;
                kept.push(running);
            }
            if let Some(node) = self.graph.nodes.get_mut(index) {
                (node.attrs, node.outputs) = (attrs, outputs);
            }
        }
        self.make_inputs(&kept);
        Ok(())
    }

    /// Registers a running statistic and its new value.
    fn keep_statistic(&mut self, running: ValueId, updated: ValueId) -> Result<()> {
        let name = self.graph.value(running).name.to_string();
        let tensor = self.graph.constants.get(&running).cloned().ok_or_else(|| {
            error!(
                NotImplemented,
                "the running statistic '{name}' is not an initializer, so no update can be kept"
            )
            .help("normalize by the running statistics (--freeze-statistics), or export them as initializers")
        })?;
        self.statistics.push(Statistic { name, tensor, updated });
        Ok(())
    }

    /// Replaces each `Dropout` by one whose random numbers depend on a seed and the step, so that
    /// the backward pass draws them again and keeps no mask. In evaluation it drops nothing.
    fn drop_out(&mut self, mode: Mode) -> Result<()> {
        let drops = |node: &Node| is_standard(node, "Dropout");
        if mode == Mode::Evaluate {
            for node in self.graph.nodes.iter_mut().filter(|node| drops(node)) {
                // The third input is `training_mode`. Without it the node is the identity.
                node.inputs.truncate(2);
            }
            return Ok(());
        }
        let places: Vec<usize> = (0..self.graph.nodes.len())
            .filter(|place| self.graph.nodes.get(*place).is_some_and(drops))
            .collect();
        if places.is_empty() {
            return Ok(());
        }
        let scalar = ValueType::tensor(DType::I64, Some(Vec::new()));
        let [seed, counter] = [SEED, COUNTER].map(|name| self.graph.add_value(name, scalar.clone()));
        self.graph.inputs.extend([seed, counter]);
        let read: HashSet<ValueId> = self.graph.nodes.iter().flat_map(Node::reads).collect();
        // Each node has a stream of its own, so that the nodes do not all drop the same elements.
        for (stream, place) in places.into_iter().enumerate() {
            // ONNX's default for `ratio` is 0.5.
            let ratio = self.graph.add_constant(format!("dropout.{stream}.ratio"), Tensor::scalar(0.5f32)?);
            let Some(node) = self.graph.nodes.get(place) else { continue };
            // The replacement has no mask: the backward pass draws it again.
            let mask = node.outputs.get(1).copied().flatten();
            let is_read = mask.is_some_and(|mask| read.contains(&mask));
            ensure!(!is_read, NotImplemented, "the mask of {} is read", node.place());
            let (data, output) =
                (node.inputs.first().copied().flatten(), node.outputs.first().copied().flatten());
            let given = node.inputs.get(1).copied().flatten();
            let mut builder = GraphBuilder::extend(Graph::new("dropout"));
            let attrs = [("stream", Attribute::Int(stream as i64))];
            builder.add((RUNTIME, "CounterDropout"), &[None; 4], &attrs, 1, Vec::new())?;
            let Some(mut replacement) = builder.graph_mut().nodes.pop() else { continue };
            replacement.name = node.name.clone();
            replacement.inputs =
                [data, Some(given.unwrap_or(ratio)), Some(seed), Some(counter)].into_iter().collect();
            replacement.outputs = std::iter::once(output).collect();
            if let Some(node) = self.graph.nodes.get_mut(place) {
                *node = replacement;
            }
        }
        Ok(())
    }

    /// Turns weights into inputs, in this order. It takes several at once, because each call is a
    /// pass over all constants.
    pub(crate) fn make_inputs(&mut self, weights: &[ValueId]) {
        let made: HashSet<ValueId> = weights.iter().copied().collect();
        self.graph.constants.retain(|value, _| !made.contains(value));
        self.graph.inputs.extend(weights);
    }

    /// Selects the weights that may be trained and turns them into inputs.
    pub(crate) fn take_candidates(&mut self, options: &TrainingOptions) -> Result<Vec<(ValueId, Tensor)>> {
        let constants: Vec<(ValueId, Tensor)> =
            self.graph.constants.iter().map(|(value, tensor)| (*value, tensor.clone())).collect();
        let name_of = |value: ValueId| self.graph.value(value).name.to_string();
        let names: Vec<String> = constants.iter().map(|(value, _)| name_of(*value)).collect();
        let all: HashSet<&str> = names.iter().map(String::as_str).collect();
        for pattern in options.trainable.iter().chain(&options.frozen).chain(&options.no_decay) {
            let wild = Patterns::new(std::slice::from_ref(pattern));
            let found = all.contains(pattern.as_str()) || names.iter().any(|name| wild.matches(name));
            let known = names.iter().map(String::as_str);
            ensure!(
                found,
                InvalidArgument,
                help = advise_listed("weights", pattern, known, "`ort inspect --graph` prints the weights"),
                "the model has no weight '{pattern}'"
            );
        }
        let [trainable, frozen] = [&options.trainable, &options.frozen].map(|list| Patterns::new(list));
        // The statistics that a training step updates are inputs by now. Those in bodies and frozen
        // ones are still constants.
        let statistics = all_running_statistics(&self.graph);
        let mut candidates = Vec::new();
        for ((value, tensor), name) in constants.into_iter().zip(names) {
            let is_weight = self.weights.contains(&value);
            // A pattern selects weights only. The output of a `Constant` node, for example an
            // epsilon, must be named in full.
            let is_asked = trainable.names(&name) || is_weight && trainable.matches(&name);
            let is_continuous = TypeSet::FLOATS.contains(tensor.dtype());
            let is_buffer = self.buffers.contains(&value);
            let by_default =
                options.trainable.is_empty() && is_weight && !is_buffer && !tensor.shape().is_empty();
            let is_frozen = frozen.matches(&name) || statistics.contains(&value) && !trainable.names(&name);
            if is_frozen || !is_continuous || !(is_asked || by_default) {
                if is_continuous && is_weight {
                    let is_silent = options.trainable.is_empty() && !is_frozen;
                    if is_silent && tensor.shape().is_empty() {
                        self.scalars.push(name.clone());
                    } else if is_silent && is_buffer {
                        self.skipped.push(name.clone());
                    }
                    self.frozen.push(name);
                }
                continue;
            }
            let dtype = tensor.dtype();
            // Updates exist for float32 and float64 only.
            ensure!(
                matches!(dtype, DType::F32 | DType::F64),
                NotImplemented,
                help = "convert the model to float; its GEMMs may run in bfloat16 (mixed precision)",
                "weight '{name}' is {dtype}, which cannot be trained"
            );
            candidates.push((value, tensor));
        }
        let values: Vec<ValueId> = candidates.iter().map(|(value, _)| *value).collect();
        self.make_inputs(&values);
        // What is trained is an input by this time, so only frozen weights move into bodies.
        sink_constants(&mut self.graph);
        Ok(candidates)
    }

    /// Fuses activations and normalizations that are written as formulas into single operators,
    /// whose gradients need only their inputs.
    pub(crate) fn recognize(&mut self, options: &TrainingOptions) -> Result<()> {
        let outputs = self.graph.outputs.clone();
        // These values must survive the rewrites under their names, so they are outputs meanwhile.
        self.graph.outputs.extend(named_values(&self.graph, &options.additional_outputs)?);
        self.graph.outputs.extend(self.statistics.iter().map(|statistic| statistic.updated));
        apply_families(&mut self.graph, &["activation", "norm"])?;
        self.graph.outputs = outputs;
        Ok(())
    }

    /// Applies autocast if mixed precision is asked for.
    pub(crate) fn mix(&mut self, options: &TrainingOptions) -> Result<Vec<OperatorPrecision>> {
        let Some(precision) = options.mixed_precision else { return Ok(Vec::new()) };
        let graph = std::mem::replace(&mut self.graph, Graph::new(""));
        let (graph, precisions) = autocast(graph, precision, &[self.output])?;
        self.graph = graph;
        Ok(precisions)
    }

    /// Appends the loss and infers types. `more` are outputs in addition to the loss and the
    /// statistics.
    pub(crate) fn finish(&mut self, options: &TrainingOptions, more: &[ValueId]) -> Result<(Graph, ValueId)> {
        let mut builder = GraphBuilder::extend(std::mem::replace(&mut self.graph, Graph::new("")));
        builder.set_scope("loss");
        let loss = options.loss.emit(&mut builder, self.output)?;
        builder.graph_mut().value_mut(loss).name = LOSS.into();
        let mut outputs = vec![loss];
        outputs.extend(self.statistics.iter().map(|statistic| statistic.updated));
        outputs.extend(more);
        Ok((builder.finish(&outputs)?, loss))
    }
}

/// Returns the value that the loss is computed from: a model output, or a value that a node
/// computes on the way to one.
fn output_of(graph: &Graph, asked: Option<&str>) -> Result<ValueId> {
    let named = |id: &&ValueId| asked.is_none_or(|name| &*graph.value(**id).name == name);
    if let Some(output) = graph.outputs.iter().find(named) {
        return Ok(*output);
    }
    let inner = asked.and_then(|name| named_values(graph, &[name.to_string()]).ok()?.pop());
    inner.ok_or_else(|| {
        let names = graph.outputs.iter().map(|&id| &*graph.value(id).name);
        let name = asked.unwrap_or_default();
        error!(InvalidArgument, "the model has no output '{name}'").help(advise("outputs", name, names))
    })
}
