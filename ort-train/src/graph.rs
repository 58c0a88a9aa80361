//! The training graph: forward pass in training mode, loss, and parameter gradients.
//!
//! The updates are added in `assemble`, because they differ between the stages of a training run.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use ort_core::dtype::{DType, TypeSet};
use ort_core::ir::{Attribute, Attributes, Graph, GraphBuilder, Node, NodeId, ValueId, ValueType};
use ort_core::pass::{Blocking, add_backward, blocking_nodes, stack_sequences};
use ort_core::rewrite::apply_families;
use ort_core::session::Model;
use ort_core::spec::{Grad, RUNTIME, Registry};
use ort_core::tensor::Tensor;
use ort_core::{Result, Within, advise, ensure, error};

use crate::attention::fuse_attention;
use crate::mixed::autocast;
use crate::normalization::split_normalizations;
use crate::options::Patterns;
use crate::weights::{
    EqualWeights, SharedWeight, TrainableGraph, all_running_statistics, doubtful_weights, equal_weights,
    shared_weights, sink_constants,
};
use crate::{OperatorPrecision, TrainingOptions};

/// A trained weight.
#[derive(Clone, Debug)]
pub struct Parameter {
    /// The name of the initializer in the model.
    pub name: String,
    /// Its value before training.
    pub tensor: Tensor,
    pub(crate) value: ValueId,
    /// The gradient of the loss by it.
    pub(crate) gradient: ValueId,
}

/// A statistic that the forward pass itself updates, such as the running mean of
/// `BatchNormalization`.
#[derive(Clone, Debug)]
pub(crate) struct Statistic {
    pub(crate) name: String,
    pub(crate) tensor: Tensor,
    pub(crate) updated: ValueId,
}

/// The forward pass, loss and backward pass of a model as one graph. Parameters are inputs.
#[derive(Clone, Debug)]
pub struct TrainingGraph {
    pub(crate) graph: Graph,
    pub(crate) loss: ValueId,
    pub(crate) parameters: Vec<Parameter>,
    pub(crate) statistics: Vec<Statistic>,
    /// The inputs that the caller provides at each step.
    pub(crate) inputs: Vec<String>,
    /// The weights that are not trained.
    pub(crate) frozen: Vec<String>,
    /// The model output that the loss is computed from.
    pub(crate) output: String,
    /// With mixed precision, the number of nodes per operator and type.
    pub(crate) precisions: Vec<OperatorPrecision>,
    shared: Vec<SharedWeight>,
    equal: Vec<EqualWeights>,
    scalars: Vec<String>,
    constants: Vec<String>,
    doubtful: Vec<String>,
}

/// The input for the loss scale, in graphs that have one.
pub(crate) const LOSS_SCALE: &str = "loss.scale";
/// The input for the random seed, in graphs with dropout.
pub(crate) const SEED: &str = "dropout.seed";
/// The input for the counter that dropout draws a step's random numbers from, in graphs with
/// dropout.
pub(crate) const COUNTER: &str = "dropout.step";

/// The mode of the forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Train,
    Evaluate,
}

impl TrainingGraph {
    /// Builds the graph of a training step without its update.
    ///
    /// # Errors
    ///
    /// The output or a pattern of weights is not in the model, the output does not suit the loss,
    /// or a node between parameters and loss has no gradient.
    pub fn new(model: &Model, options: &TrainingOptions) -> Result<TrainingGraph> {
        let mut forward = Forward::new(model, options, Mode::Train)?;
        let candidates = forward.take_candidates(options)?;
        let output = forward.graph.value(forward.output).name.to_string();
        let values: Vec<ValueId> = candidates.iter().map(|(value, _)| *value).collect();
        let shared = shared_weights(&forward.graph, &values);
        let equal = equal_weights(&forward.graph, &candidates);
        let doubtful = match options.trainable.is_empty() {
            true => doubtful_weights(&forward.graph, &values),
            false => Vec::new(),
        };
        // Before differentiation, because fused operators keep less for their gradients, and before
        // autocast, whose lists name them.
        forward.recognize(options)?;
        forward.graph = fuse_attention(forward.graph, &values)?;
        let precisions = forward.mix(options)?;
        let (mut graph, loss) = forward.finish(options, &[])?;
        let differentiated = match options.scaling() {
            Some(_) => scaled(&mut graph, loss)?,
            None => loss,
        };
        let gradients = add_backward(&mut graph, differentiated, &values)?;
        let producers = graph.producers();
        let mut parameters = Vec::with_capacity(candidates.len());
        let mut frozen = Vec::new();
        let mut constant: HashSet<ValueId> = HashSet::new();
        let trainable = Patterns::new(&options.trainable);
        for ((value, tensor), gradient) in candidates.into_iter().zip(gradients) {
            let name = graph.value(value).name.to_string();
            let Some(gradient) = gradient else {
                ensure!(
                    !trainable.matches(&name),
                    InvalidArgument,
                    help = "leave it out of the weights that are trained",
                    "the loss does not depend on weight '{name}'"
                );
                // The loss does not depend on it, so it turns back from an input into a constant.
                constant.insert(value);
                graph.constants.insert(value, tensor);
                frozen.push(name);
                continue;
            };
            let gradient = narrowest(&graph, &producers, gradient);
            parameters.push(Parameter { name, tensor, value, gradient });
        }
        graph.inputs.retain(|input| !constant.contains(input));
        ensure!(
            !parameters.is_empty(),
            InvalidArgument,
            help = "name weights that are floats, and that the loss depends on",
            "no weight of the model is trained"
        );
        frozen.extend(forward.frozen);
        Ok(TrainingGraph {
            // After differentiation, because the gradient then shares the statistics.
            graph: split_normalizations(graph)?,
            loss,
            parameters,
            statistics: forward.statistics,
            inputs: forward.inputs,
            frozen,
            output,
            precisions,
            shared,
            equal,
            scalars: forward.scalars,
            constants: forward.skipped,
            doubtful,
        })
    }

    /// Lists all operators between weights and loss that have no gradient.
    ///
    /// # Errors
    ///
    /// The output or a pattern of weights is not in the model, or the output does not suit the
    /// loss.
    pub fn blocking(model: &Model, options: &TrainingOptions) -> Result<Vec<Blocking>> {
        let mut forward = Forward::new(model, options, Mode::Train)?;
        let candidates = forward.take_candidates(options)?;
        forward.mix(options)?;
        let values: Vec<ValueId> = candidates.iter().map(|(value, _)| *value).collect();
        let (before, output) = (forward.graph.clone(), forward.output);
        match forward.finish(options, &[]) {
            Ok((graph, loss)) => blocking_nodes(&graph, loss, &values),
            // An operator without a gradient before the loss may be the reason why the output does
            // not suit the loss. So we report it instead, if there is one.
            Err(problem) => {
                let mut found = blocking_nodes(&before, output, &values).unwrap_or_default();
                let registry = Registry::global()?;
                let spec_of = |blocking: &Blocking| registry.find("", &blocking.operator);
                found.retain(|blocking| {
                    spec_of(blocking).is_some_and(|spec| matches!(spec.grad, Grad::None(_)))
                });
                if found.is_empty() { Err(problem) } else { Ok(found) }
            }
        }
    }

    /// Returns the graph. Its inputs are those of the model and of the loss, then parameters and
    /// statistics.
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// Returns the trained weights.
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// Returns the names of the weights that are not trained.
    pub fn frozen(&self) -> &[String] {
        &self.frozen
    }

    /// Returns the names of the inputs that a caller provides at each step: those of the model,
    /// then that of the loss.
    pub fn inputs(&self) -> &[String] {
        &self.inputs
    }

    /// Returns the name of the model output that the loss is computed from.
    pub fn output(&self) -> &str {
        &self.output
    }

    /// Returns the trained weights that several nodes read. Each is trained as one parameter.
    pub fn shared_weights(&self) -> &[SharedWeight] {
        &self.shared
    }

    /// Returns the trained weights whose values equal those of another one, but that are trained
    /// separately.
    pub fn equal_weights(&self) -> &[EqualWeights] {
        &self.equal
    }

    /// Returns the weights of rank 0 that are not trained because no option names them. Each is a
    /// temperature or a gate, or a constant that an exporter made an initializer.
    pub fn untrained_scalars(&self) -> &[String] {
        &self.scalars
    }

    /// Returns the buffers and constants among the initializers that are not trained because no
    /// option names them. PyTorch's exporter marks them, or they have the names that exporters give
    /// to constants.
    pub fn untrained_constants(&self) -> &[String] {
        &self.constants
    }

    /// Returns the weights that are trained by default but may be constants of the model's code:
    /// exporters generated their names, and only elementwise arithmetic reads them.
    pub fn doubtful_weights(&self) -> &[String] {
        &self.doubtful
    }

    /// Returns, with mixed precision, how many nodes of each forward operator compute in 16 bits
    /// and in float32. The list is empty otherwise.
    pub fn precisions(&self) -> &[OperatorPrecision] {
        &self.precisions
    }
}

/// Multiplies the loss by its scale, which becomes an input.
fn scaled(graph: &mut Graph, loss: ValueId) -> Result<ValueId> {
    let outputs = graph.outputs.clone();
    let mut builder = GraphBuilder::extend(std::mem::replace(graph, Graph::new("")));
    builder.set_scope("loss");
    let scale = builder.typed_input(LOSS_SCALE, ValueType::tensor(DType::F32, Some(Vec::new())));
    let scale = builder.node("CastLike", &[scale, loss], &[])?;
    let scaled = builder.node("Mul", &[loss, scale], &[])?;
    *graph = builder.finish(&outputs)?;
    Ok(scaled)
}

/// Returns a gradient before its cast to the parameter's type, if it was computed in 16 bits.
/// Updates read gradients of any float type, so the float32 copy is not needed.
fn narrowest(graph: &Graph, producers: &[Option<NodeId>], gradient: ValueId) -> ValueId {
    let maker = producers.get(gradient.index()).copied().flatten();
    let cast = maker.and_then(|id| graph.nodes.get(id.index())).filter(|node| is_standard(node, "Cast"));
    let from = cast.and_then(|node| node.inputs.first().copied().flatten());
    let is_half = |value: &ValueId| matches!(graph.value(*value).ty.dtype(), Some(DType::F16 | DType::BF16));
    from.filter(is_half).unwrap_or(gradient)
}

/// Builds the forward pass and the loss for evaluation. The graph also outputs the value that the
/// loss is computed from. Parameters are inputs as in the training graph.
pub(crate) fn evaluation(
    model: &Model,
    training: &TrainingGraph,
    options: &TrainingOptions,
) -> Result<(Graph, ValueId)> {
    let mut forward = Forward::new(model, options, Mode::Evaluate)?;
    let names = training.parameters.iter().map(|parameter| &parameter.name);
    let names: HashSet<&String> = names.chain(training.statistics.iter().map(|it| &it.name)).collect();
    let name_of = |value: &ValueId| forward.graph.value(*value).name.to_string();
    let given = forward.graph.constants.keys().copied();
    let given: Vec<ValueId> = given.filter(|value| names.contains(&name_of(value))).collect();
    forward.make_inputs(&given);
    sink_constants(&mut forward.graph);
    let mut outputs = named_values(&forward.graph, &options.additional_outputs)?;
    if !outputs.contains(&forward.output) {
        outputs.insert(0, forward.output);
    }
    forward.finish(options, &outputs)
}

/// Indexes the values by name. If names repeat, the first value wins.
pub(crate) fn values_by_name(graph: &Graph) -> HashMap<Arc<str>, ValueId> {
    let mut values = HashMap::with_capacity(graph.value_count());
    for id in graph.value_ids() {
        values.entry(graph.value(id).name.clone()).or_insert(id);
    }
    values
}

/// Returns the values of these names, all of which a node must compute.
pub(crate) fn named_values(graph: &Graph, names: &[String]) -> Result<Vec<ValueId>> {
    let producers = graph.producers();
    let made = |id: ValueId| producers.get(id.index()).is_some_and(Option::is_some);
    let mut found = Vec::with_capacity(names.len());
    for name in names {
        let value = graph.find_value(name).filter(|id| made(*id)).ok_or_else(|| {
            let known = graph.value_ids().filter(|id| made(*id)).map(|id| &*graph.value(id).name);
            let known: Vec<&str> = known.collect();
            error!(InvalidArgument, "no node of the model computes '{name}'")
                .help(advise("values", name, known))
        })?;
        ensure!(!found.contains(&value), InvalidArgument, "output '{name}' is asked for twice");
        found.push(value);
    }
    Ok(found)
}

/// A model's graph while it is turned into a training graph.
struct Forward {
    graph: Graph,
    /// The weights among the constants. The others are outputs of `Constant` nodes.
    weights: HashSet<ValueId>,
    output: ValueId,
    inputs: Vec<String>,
    statistics: Vec<Statistic>,
    frozen: Vec<String>,
    /// The weights of rank 0 that the options neither train nor freeze.
    scalars: Vec<String>,
    /// The weights that are not parameters.
    buffers: HashSet<ValueId>,
    /// The names of those `buffers` that the options neither train nor freeze.
    skipped: Vec<String>,
}

impl Forward {
    /// Prepares a model's graph for training or evaluation.
    fn new(model: &Model, options: &TrainingOptions, mode: Mode) -> Result<Forward> {
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
            let ratio = self.graph.add_constant(format!("dropout.{stream}.ratio"), Tensor::scalar(0.5f32)?);
            let Some(node) = self.graph.nodes.get(place) else { continue };
            let mask = node.outputs.get(1).copied().flatten();
            let is_read = mask.is_some_and(|mask| read.contains(&mask));
            ensure!(!is_read, NotImplemented, "{} has its mask read", node.place());
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
    fn make_inputs(&mut self, weights: &[ValueId]) {
        let made: HashSet<ValueId> = weights.iter().copied().collect();
        self.graph.constants.retain(|value, _| !made.contains(value));
        self.graph.inputs.extend(weights);
    }

    /// Selects the weights that may be trained and turns them into inputs.
    fn take_candidates(&mut self, options: &TrainingOptions) -> Result<Vec<(ValueId, Tensor)>> {
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
                help = advise("weights", pattern, known),
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
            ensure!(
                matches!(dtype, DType::F32 | DType::F64),
                NotImplemented,
                help = "convert the model to float32; its products may be of bfloat16",
                "weight '{name}' is {dtype}, which is not trained"
            );
            candidates.push((value, tensor));
        }
        let values: Vec<ValueId> = candidates.iter().map(|(value, _)| *value).collect();
        self.make_inputs(&values);
        sink_constants(&mut self.graph);
        Ok(candidates)
    }

    /// Fuses activations and normalizations that are written as formulas into single operators,
    /// whose gradients need only their inputs.
    fn recognize(&mut self, options: &TrainingOptions) -> Result<()> {
        let outputs = self.graph.outputs.clone();
        // These values must survive the rewrites under their names, so they are outputs meanwhile.
        self.graph.outputs.extend(named_values(&self.graph, &options.additional_outputs)?);
        self.graph.outputs.extend(self.statistics.iter().map(|statistic| statistic.updated));
        apply_families(&mut self.graph, &["activation", "norm"])?;
        self.graph.outputs = outputs;
        Ok(())
    }

    /// Applies autocast if mixed precision is asked for.
    fn mix(&mut self, options: &TrainingOptions) -> Result<Vec<OperatorPrecision>> {
        let Some(precision) = options.mixed_precision else { return Ok(Vec::new()) };
        let graph = std::mem::replace(&mut self.graph, Graph::new(""));
        let (graph, precisions) = autocast(graph, precision, &[self.output])?;
        self.graph = graph;
        Ok(precisions)
    }

    /// Appends the loss and infers types. `more` are outputs in addition to the loss and the
    /// statistics.
    fn finish(&mut self, options: &TrainingOptions, more: &[ValueId]) -> Result<(Graph, ValueId)> {
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

/// The name of the output for the loss.
pub(crate) const LOSS: &str = "loss";

/// Whether a node is this operator of the standard domain.
pub(crate) fn is_standard(node: &Node, op: &str) -> bool {
    node.spec.domain.is_empty() && node.spec.name == op
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
