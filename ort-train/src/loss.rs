//! Loss functions, as nodes from a model output to a scalar.

use ort_core::dim::Dim;
use ort_core::dtype::DType;
use ort_core::ir::{Attribute, Graph, GraphBuilder, ValueId, ValueType};
use ort_core::tensor::Tensor;
use ort_core::{Error, Result, ensure, error};
use serde::{Deserialize, Serialize};

/// The loss that a training run minimizes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Loss {
    /// Mean squared error against an input `target` of the output's shape.
    Mse,
    /// Mean absolute error against an input `target` of the output's shape.
    L1,
    /// Mean cross entropy of logits against an input `labels` of `int64` classes.
    CrossEntropy {
        /// The label smoothing: the share of the target that is spread evenly over all classes,
        /// from 0 to below 1 (Szegedy et al. 2016, section 7).
        label_smoothing: f32,
        /// A label that is ignored.
        ignore_index: Option<i64>,
        /// The class axis. By default it is the last axis for rank 3, as language models have it,
        /// and axis 1 for all other ranks.
        class_axis: Option<i64>,
    },
    /// Mean binary cross entropy of logits against an input `target` of probabilities of the same
    /// shape.
    BceWithLogits,
    /// Distillation: the Kullback-Leibler divergence `KL(teacher || model)`. The teacher's logits
    /// are an input `target`. Both logits are divided by a temperature. The result is the mean over
    /// all axes except the last, times the square of the temperature (Hinton et al. 2015, section
    /// 2).
    KlDivergence {
        /// The temperature, above 0.
        temperature: f32,
    },
    /// The model's own output, which has a single element.
    Output,
}

impl Loss {
    /// Returns cross entropy without label smoothing and without an ignored label.
    pub fn cross_entropy() -> Loss {
        Loss::CrossEntropy { label_smoothing: 0.0, ignore_index: None, class_axis: None }
    }

    /// Returns the name of the input that the loss adds to the model's, or `None` if it adds none.
    pub fn input(&self) -> Option<&'static str> {
        match self {
            Loss::Output => None,
            Loss::CrossEntropy { .. } => Some("labels"),
            _ => Some("target"),
        }
    }

    /// Returns the class axis for logits of this rank, counted from the first. Returns `None` if
    /// the loss has no classes or the rank has no such axis.
    pub fn class_axis(&self, rank: usize) -> Option<usize> {
        match self {
            Loss::CrossEntropy { class_axis, .. } => class_axis_of(*class_axis, rank).ok(),
            _ => None,
        }
    }

    /// Emits the loss into an inferred graph. Returns its value, a scalar.
    pub(crate) fn emit(&self, builder: &mut GraphBuilder, output: ValueId) -> Result<ValueId> {
        self.check()?;
        if let Some(name) = self.input() {
            let taken = builder.graph().find_value(name).is_some();
            ensure!(
                !taken,
                InvalidArgument,
                help = "rename it in the model",
                "the loss adds an input '{name}', but the model already has a value of that name"
            );
        }
        let value = builder.graph().value(output);
        let (ty, name) = (value.ty.clone(), value.name.clone());
        let is_float = ty.dtype().is_none_or(DType::is_float);
        ensure!(
            is_float,
            InvalidArgument,
            help = "use the scores that it was computed from, such as the input of an ArgMax",
            "output '{name}' is {ty}, expected floats for a loss"
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
                    help = "use an output of one element, or another loss",
                    "output '{name}' is {ty}, expected one element as the loss"
                );
                // The mean of one element is that element as a scalar.
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

    /// Checks the ranges of the loss's parameters.
    fn check(&self) -> Result<()> {
        match self {
            Loss::CrossEntropy { label_smoothing: number, .. } => ensure!(
                (0.0..1.0).contains(number),
                InvalidArgument,
                "the label smoothing is {number}, expected 0 or more and less than 1"
            ),
            Loss::KlDivergence { temperature: number } => ensure!(
                *number > 0.0 && number.is_finite(),
                InvalidArgument,
                "the temperature is {number}, expected a number above 0"
            ),
            _ => {}
        }
        Ok(())
    }

    /// Emits a loss that compares the output with a target of the same shape.
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
            // `softplus(x) - x t` equals `-t log s(x) - (1 - t) log(1 - s(x))` with the sigmoid
            // `s`, and is finite for every finite `x`.
            _ => {
                let softplus = nodes.emit("Softplus", &[output])?;
                let product = nodes.emit("Mul", &[output, target])?;
                nodes.emit("Sub", &[softplus, product])?
            }
        };
        nodes.mean(each)
    }
}

/// The error for an output of unknown rank. It names the cause: the first node whose inputs have
/// ranks and whose outputs have none.
fn unknown_rank(graph: &Graph, output: ValueId) -> Error {
    let producers = graph.producers();
    let mut cause = None;
    let mut value = Some(output);
    // The graph is acyclic, so this ends.
    while let Some(maker) = value.and_then(|id| producers.get(id.index()).copied().flatten()) {
        let Some(node) = graph.nodes.get(maker.index()) else { break };
        cause = Some(node.place());
        value = node.reads().find(|id| !has_rank(&graph.value(*id).ty));
    }
    let name = &graph.value(output).name;
    let problem = match cause {
        Some(node) => {
            error!(NotImplemented, "the rank of '{name}' is not known: {node} does not determine it")
        }
        None => error!(NotImplemented, "the rank of '{name}' is not known"),
    };
    problem.help("take an output of a known rank for the loss, or add a Reshape to the model")
}

/// Whether the rank of a type, or of its elements, is known.
fn has_rank(ty: &ValueType) -> bool {
    match ty {
        ValueType::Sequence(element) | ValueType::Optional(element) => has_rank(element),
        ty => ty.shape().is_some(),
    }
}

/// Returns the class axis, counted from the first. Axis 0 cannot be the class axis.
fn class_axis_of(asked: Option<i64>, rank: usize) -> Result<usize> {
    ensure!(
        rank >= 2,
        InvalidArgument,
        help = "use the output that has a score for each class, such as the input of an ArgMax",
        "the loss input has rank {rank}; cross entropy needs logits of rank 2 or more, such as [batch, classes]"
    );
    let axis = asked.unwrap_or(if rank == 3 { -1 } else { 1 });
    let from_first = if axis < 0 { axis + rank as i64 } else { axis };
    let found = usize::try_from(from_first).ok().filter(|axis| (1..rank).contains(axis));
    let last = rank - 1;
    found.ok_or_else(|| {
        error!(
            InvalidArgument,
            "class axis {axis} is out of range for scores of rank {rank}, expected 1 to {last}"
        )
        .help("axis 0 is the batch; negative axes count from the last, which is -1")
    })
}

/// Emits nodes of the standard domain.
struct Nodes<'b> {
    builder: &'b mut GraphBuilder,
}

impl Nodes<'_> {
    /// Emits a node without attributes.
    fn emit(&mut self, op: &str, inputs: &[ValueId]) -> Result<ValueId> {
        self.builder.node(op, inputs, &[])
    }

    /// Emits a node with attributes.
    fn emit_with(&mut self, op: &str, inputs: &[ValueId], attrs: &[(&str, Attribute)]) -> Result<ValueId> {
        self.builder.node(op, inputs, attrs)
    }

    /// Emits a constant with the element type of `like`.
    fn number(&mut self, number: f32, like: ValueId) -> Result<ValueId> {
        let constant = self.builder.constant(Tensor::scalar(number)?);
        self.emit("CastLike", &[constant, like])
    }

    /// Emits the mean over all elements.
    fn mean(&mut self, value: ValueId) -> Result<ValueId> {
        self.emit_with("ReduceMean", &[value], &[("keepdims", Attribute::Int(0))])
    }

    /// Emits the sum over all elements.
    fn sum(&mut self, value: ValueId) -> Result<ValueId> {
        self.emit_with("ReduceSum", &[value], &[("keepdims", Attribute::Int(0))])
    }

    /// Emits the sum over the last axis.
    fn sum_of_last(&mut self, value: ValueId) -> Result<ValueId> {
        let axes = self.builder.constant(Tensor::from_slice(&[1], &[-1i64])?);
        self.emit_with("ReduceSum", &[value, axes], &[("keepdims", Attribute::Int(0))])
    }

    /// Emits the Kullback-Leibler divergence.
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
        // The gradients of softened logits shrink with the square of the temperature. This factor
        // makes up for it.
        let square = self.number(temperature * temperature, mean)?;
        self.emit("Mul", &[mean, square])
    }

    /// Emits cross entropy, with label smoothing if there is any.
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
        // The standard's operators have their classes on axis 1.
        let (scores, labels) = match axis {
            1 => (scores, labels),
            _ if axis + 1 == shape.len() => {
                // If the classes come last, two reshapes move them to axis 1 without a copy. Any
                // other axis takes a transpose.
                // [rows, classes]
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
        // (1 - smoothing) * NLL - smoothing * mean(log p), with the mean over all classes.
        let likelihood = self.emit_with("NegativeLogLikelihoodLoss", &[logs, labels], &attrs)?;
        let alike = self.mean_over_classes(logs, labels, ignore)?;
        let kept = self.number(1.0 - smoothing, likelihood)?;
        let share = self.number(-smoothing, likelihood)?;
        let likelihood = self.emit("Mul", &[likelihood, kept])?;
        let alike = self.emit("Mul", &[alike, share])?;
        self.emit("Add", &[likelihood, alike])
    }

    /// Emits the mean log-probability over all classes and all labels that are not ignored.
    fn mean_over_classes(&mut self, logs: ValueId, labels: ValueId, ignore: Option<i64>) -> Result<ValueId> {
        let Some(label) = ignore else { return self.mean(logs) };
        let axes = self.builder.constant(Tensor::from_slice(&[1], &[1i64])?);
        let means = self.emit_with("ReduceMean", &[logs, axes], &[("keepdims", Attribute::Int(0))])?;
        let label = self.builder.constant(Tensor::scalar(label)?);
        // Rows with an ignored label count neither in the sum nor in the number of rows.
        let ignored = self.emit("Equal", &[labels, label])?;
        let counts = self.emit("Not", &[ignored])?;
        let counts = self.emit("CastLike", &[counts, means])?;
        let kept = self.emit("Mul", &[means, counts])?;
        let (kept, count) = (self.sum(kept)?, self.sum(counts)?);
        self.emit("Div", &[kept, count])
    }
}
