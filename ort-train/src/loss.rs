//! Losses: nodes from a model's output to one number.

use ort_core::dim::Dim;
use ort_core::dtype::DType;
use ort_core::ir::{Attribute, Graph, GraphBuilder, ValueId, ValueType};
use ort_core::tensor::Tensor;
use ort_core::{Error, Result, ensure, error};
use serde::{Deserialize, Serialize};

/// What a training step makes smaller.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Loss {
    /// The mean of the squared differences from an input `target` of the output's shape.
    Mse,
    /// The mean of the absolute differences from an input `target` of the output's shape.
    L1,
    /// The mean cross entropy of scores (logits) with an input `labels`, which are `int64` classes.
    CrossEntropy {
        /// The share of the target that all classes have alike, 0 to below 1 (Szegedy et al. 2016,
        /// section 7).
        label_smoothing: f32,
        /// A label that does not count.
        ignore_index: Option<i64>,
        /// The axis of classes; by default 1 for matrices and images, and the last for scores of
        /// rank 3, as language models give them.
        class_axis: Option<i64>,
    },
    /// The mean binary cross entropy of scores (logits) with an input `target` of probabilities of
    /// the same shape.
    BceWithLogits,
    /// The Kullback-Leibler divergence of the scores' distribution from that of an input `target`
    /// of a teacher's scores, both divided by a temperature; mean over all but the last axis, times
    /// the square of the temperature (Hinton et al. 2015, section 2).
    KlDivergence {
        /// The temperature, above 0.
        temperature: f32,
    },
    /// The model's own output, which is one number.
    Output,
}

impl Loss {
    /// Cross entropy without label smoothing, in which every label counts.
    pub fn cross_entropy() -> Loss {
        Loss::CrossEntropy { label_smoothing: 0.0, ignore_index: None, class_axis: None }
    }

    /// The name of the input that it adds to the model's; none where there is no such input.
    pub fn input(&self) -> Option<&'static str> {
        match self {
            Loss::Output => None,
            Loss::CrossEntropy { .. } => Some("labels"),
            _ => Some("target"),
        }
    }

    /// The axis of classes of scores of this rank, counted from the first; none where the loss has
    /// no classes, or the rank no such axis.
    pub fn class_axis(&self, rank: usize) -> Option<usize> {
        match self {
            Loss::CrossEntropy { class_axis, .. } => class_axis_of(*class_axis, rank).ok(),
            _ => None,
        }
    }

    /// Adds the nodes to an inferred graph; returns the value of the loss, a scalar.
    pub(crate) fn emit(&self, builder: &mut GraphBuilder, output: ValueId) -> Result<ValueId> {
        self.check()?;
        if let Some(name) = self.input() {
            let taken = builder.graph().find_value(name).is_some();
            ensure!(
                !taken,
                InvalidArgument,
                help = "rename it in the model",
                "the model has a value '{name}' already, which is what the loss calls its input"
            );
        }
        let value = builder.graph().value(output);
        let (ty, name) = (value.ty.clone(), value.name.clone());
        let is_float = ty.dtype().is_none_or(DType::is_float);
        ensure!(
            is_float,
            InvalidArgument,
            help = "take the floats that it was computed from, before an ArgMax for example",
            "output '{name}' is {ty}, and a loss is of floats"
        );
        let shape = ty.shape().map(<[Dim]>::to_vec);
        let shape = shape.ok_or_else(|| unknown_rank(builder.graph(), output))?;
        let mut nodes = Nodes { builder };
        match self {
            Loss::Output => {
                let is_one = shape.iter().all(|dim| dim.as_constant() == Some(1));
                ensure!(
                    is_one,
                    InvalidArgument,
                    help = "take an output that is one number, or one of the losses",
                    "'{name}' is {ty}, which is no loss"
                );
                nodes.mean(output)
            }
            Loss::Mse | Loss::L1 | Loss::BceWithLogits | Loss::KlDivergence { .. } => {
                let target = nodes.builder.typed_input("target", ty);
                self.compare(&mut nodes, output, target)
            }
            Loss::CrossEntropy { label_smoothing, ignore_index, class_axis } => {
                let axis = class_axis_of(*class_axis, shape.len())?;
                nodes.cross_entropy((output, &shape), axis, *label_smoothing, *ignore_index)
            }
        }
    }

    fn check(&self) -> Result<()> {
        match self {
            Loss::CrossEntropy { label_smoothing: number, .. } => ensure!(
                (0.0..1.0).contains(number),
                InvalidArgument,
                "a label smoothing of {number}, expected 0 to below 1"
            ),
            Loss::KlDivergence { temperature: number } => ensure!(
                *number > 0.0 && number.is_finite(),
                InvalidArgument,
                "a temperature of {number}, expected one above 0"
            ),
            _ => {}
        }
        Ok(())
    }

    fn compare(&self, nodes: &mut Nodes<'_>, output: ValueId, target: ValueId) -> Result<ValueId> {
        let each = match self {
            Loss::Mse => {
                let difference = nodes.emit("Sub", &[output, target])?;
                nodes.emit("Mul", &[difference, difference])?
            }
            Loss::L1 => {
                let difference = nodes.emit("Sub", &[output, target])?;
                nodes.emit("Abs", &[difference])?
            }
            Loss::KlDivergence { temperature } => return nodes.divergence(output, target, *temperature),
            // log(1 + exp(x)) - x t is - t log s(x) - (1 - t) log(1 - s(x)), and finite wherever x
            // is.
            _ => {
                let softplus = nodes.emit("Softplus", &[output])?;
                let product = nodes.emit("Mul", &[output, target])?;
                nodes.emit("Sub", &[softplus, product])?
            }
        };
        nodes.mean(each)
    }
}

/// Says which node is why the rank of a value is not known: the first whose inputs have ranks and
/// whose outputs have none.
fn unknown_rank(graph: &Graph, output: ValueId) -> Error {
    let producers = graph.producers();
    let mut cause = None;
    let mut value = Some(output);
    // Nodes read what comes before them, so that this ends.
    while let Some(maker) = value.and_then(|id| producers.get(id.index()).copied().flatten()) {
        let Some(node) = graph.nodes.get(maker.index()) else { break };
        cause = Some(node.place());
        value = node.reads().find(|id| !has_rank(&graph.value(*id).ty));
    }
    let name = &graph.value(output).name;
    let problem = match cause {
        Some(node) => error!(NotImplemented, "the rank of '{name}' is not known: {node} does not tell it"),
        None => error!(NotImplemented, "the rank of '{name}' is not known"),
    };
    problem.help("take an output of a known rank for the loss, or add a Reshape to the model")
}

fn has_rank(ty: &ValueType) -> bool {
    match ty {
        ValueType::Sequence(element) | ValueType::Optional(element) => has_rank(element),
        ty => ty.shape().is_some(),
    }
}

/// The axis of classes, counted from the first.
fn class_axis_of(asked: Option<i64>, rank: usize) -> Result<usize> {
    ensure!(
        rank >= 2,
        InvalidArgument,
        help = "take the output that has a score for each class, before an ArgMax or a sum for example",
        "scores of rank {rank} have no axis of classes, expected rank 2 or more"
    );
    let axis = asked.unwrap_or(if rank == 3 { -1 } else { 1 });
    let from_first = if axis < 0 { axis + rank as i64 } else { axis };
    let found = usize::try_from(from_first).ok().filter(|axis| (1..rank).contains(axis));
    found.ok_or_else(|| error!(InvalidArgument, "classes on axis {axis}, expected 1 to {}", rank - 1))
}

/// Adds nodes of the standard domain.
struct Nodes<'b> {
    builder: &'b mut GraphBuilder,
}

impl Nodes<'_> {
    fn emit(&mut self, op: &str, inputs: &[ValueId]) -> Result<ValueId> {
        self.builder.node(op, inputs, &[])
    }

    fn emit_with(&mut self, op: &str, inputs: &[ValueId], attrs: &[(&str, Attribute)]) -> Result<ValueId> {
        self.builder.node(op, inputs, attrs)
    }

    /// A number of the element type of `like`.
    fn number(&mut self, number: f32, like: ValueId) -> Result<ValueId> {
        let constant = self.builder.constant(Tensor::scalar(number)?);
        self.emit("CastLike", &[constant, like])
    }

    fn mean(&mut self, value: ValueId) -> Result<ValueId> {
        self.emit_with("ReduceMean", &[value], &[("keepdims", Attribute::Int(0))])
    }

    fn sum(&mut self, value: ValueId) -> Result<ValueId> {
        self.emit_with("ReduceSum", &[value], &[("keepdims", Attribute::Int(0))])
    }

    /// The sum of elements over the last axis, where the others stay.
    fn sum_of_last(&mut self, value: ValueId) -> Result<ValueId> {
        let axes = self.builder.constant(Tensor::from_slice(&[1], &[-1i64])?);
        self.emit_with("ReduceSum", &[value, axes], &[("keepdims", Attribute::Int(0))])
    }

    fn divergence(&mut self, student: ValueId, teacher: ValueId, temperature: f32) -> Result<ValueId> {
        let last = [("axis", Attribute::Int(-1))];
        let divisor = self.number(temperature, student)?;
        let student = self.emit("Div", &[student, divisor])?;
        let student = self.emit_with("LogSoftmax", &[student], &last)?;
        let teacher = self.emit("Div", &[teacher, divisor])?;
        let teacher = self.emit_with("LogSoftmax", &[teacher], &last)?;
        let difference = self.emit("Sub", &[teacher, student])?;
        let share = self.emit("Exp", &[teacher])?;
        let each = self.emit("Mul", &[share, difference])?;
        let rows = self.sum_of_last(each)?;
        let mean = self.mean(rows)?;
        let square = self.number(temperature * temperature, mean)?;
        self.emit("Mul", &[mean, square])
    }

    fn cross_entropy(
        &mut self,
        (scores, shape): (ValueId, &[Dim]),
        axis: usize,
        smoothing: f32,
        ignore: Option<i64>,
    ) -> Result<ValueId> {
        let places = shape.iter().enumerate().filter(|(place, _)| *place != axis);
        let places: Vec<Dim> = places.map(|(_, dim)| dim.clone()).collect();
        let labels = self.builder.typed_input("labels", ValueType::tensor(DType::I64, Some(places)));
        // The operators have classes on axis 1.
        let (scores, labels) = match axis {
            1 => (scores, labels),
            _ if axis + 1 == shape.len() => {
                let rows = self.emit_with("Flatten", &[scores], &[("axis", Attribute::Int(axis as i64))])?;
                let one = self.builder.constant(Tensor::from_slice(&[1], &[-1i64])?);
                (rows, self.emit("Reshape", &[labels, one])?)
            }
            _ => {
                let mut order: Vec<i64> =
                    (0..shape.len() as i64).filter(|place| *place != axis as i64).collect();
                order.insert(1, axis as i64);
                (self.emit_with("Transpose", &[scores], &[("perm", Attribute::Ints(order))])?, labels)
            }
        };
        let mut attrs = vec![("reduction", Attribute::String("mean".into()))];
        attrs.extend(ignore.map(|label| ("ignore_index", Attribute::Int(label))));
        if smoothing == 0.0 {
            return self.emit_with("SoftmaxCrossEntropyLoss", &[scores, labels], &attrs);
        }
        let logs = self.emit_with("LogSoftmax", &[scores], &[("axis", Attribute::Int(1))])?;
        let likelihood = self.emit_with("NegativeLogLikelihoodLoss", &[logs, labels], &attrs)?;
        let alike = self.mean_over_classes(logs, labels, ignore)?;
        let kept = self.number(1.0 - smoothing, likelihood)?;
        let share = self.number(-smoothing, likelihood)?;
        let likelihood = self.emit("Mul", &[likelihood, kept])?;
        let alike = self.emit("Mul", &[alike, share])?;
        self.emit("Add", &[likelihood, alike])
    }

    /// The mean of what stands at labels that count, over all classes.
    fn mean_over_classes(&mut self, logs: ValueId, labels: ValueId, ignore: Option<i64>) -> Result<ValueId> {
        let Some(label) = ignore else { return self.mean(logs) };
        let axes = self.builder.constant(Tensor::from_slice(&[1], &[1i64])?);
        let means = self.emit_with("ReduceMean", &[logs, axes], &[("keepdims", Attribute::Int(0))])?;
        let label = self.builder.constant(Tensor::scalar(label)?);
        let ignored = self.emit("Equal", &[labels, label])?;
        let counts = self.emit("Not", &[ignored])?;
        let counts = self.emit("CastLike", &[counts, means])?;
        let kept = self.emit("Mul", &[means, counts])?;
        let (kept, count) = (self.sum(kept)?, self.sum(counts)?);
        self.emit("Div", &[kept, count])
    }
}
