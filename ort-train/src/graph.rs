//! The training graph: forward pass in training mode, loss, and parameter gradients.
//!
//! The updates are added in `assemble`, because they differ between the stages of a training run.

use std::collections::HashSet;

use ort_core::dtype::DType;
use ort_core::ir::{Graph, GraphBuilder, NodeId, ValueId, ValueType};
use ort_core::pass::{Blocking, add_backward, blocking_nodes};
use ort_core::session::Model;
use ort_core::spec::{Grad, Registry};
use ort_core::tensor::Tensor;
use ort_core::{Result, ensure};

use crate::attention::fuse_attention;
use crate::forward::Forward;
use crate::normalization::split_normalizations;
use crate::options::Patterns;
use crate::values::{LOSS_SCALE, Mode, Statistic, is_standard, named_values};
use crate::weights::{
    EqualWeights, SharedWeight, doubtful_weights, equal_weights, shared_weights, sink_constants,
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
        // Patterns name their weights on purpose, so none of those is doubtful.
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
            help = match options.frozen.as_slice() {
                [] => "name weights that are floats, and that the loss depends on",
                _ => "freeze fewer weights: the loss depends on none of the others",
            },
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
    // The scale is float32, but the loss has the type of the model's output.
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
