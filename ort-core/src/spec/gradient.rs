//! Gradient rules: from the gradient of a node's outputs to those of its inputs, as nodes.
//!
//! Reverse accumulation as in Griewank & Walther, Evaluating Derivatives, chapter 3: a value's
//! gradient has the value's shape and type. Elementwise operators need no rule, their formula is
//! differentiated.

use std::collections::HashSet;
use std::sync::Arc;

use super::backward::{BackwardPass, NotDifferentiable, prune};
use super::draft::Draft;
use super::infer::infer_at;
use super::{BinaryFn, RUNTIME, Registry, ScalarExpr, UnaryFn};
use crate::dim::Dim;
use crate::dtype::DType;
use crate::ir::{Attribute, Attributes, Graph, Node, NodeId, Subgraph, ValueId, ValueType};
use crate::tensor::Tensor;
use crate::{Result, Within, ensure, error};

/// Where the gradient of an operator comes from.
#[derive(Debug, Clone, Copy)]
pub enum Grad {
    /// The derivative of its scalar formula; of an operator without formula that of its parts
    /// (`lower`). One that has neither has no gradient.
    Derived,
    /// A rule, which sets the gradient of each wanted input that the outputs depend on.
    Rule(fn(&mut GradCx<'_>) -> Result<()>),
    /// The derivative of other nodes that compute the same: added to the backward pass, which
    /// computes again what it needs of them. The function returns what stands for the outputs, in
    /// order; outputs behind those have no gradient.
    Parts(fn(&mut GradCx<'_>) -> Result<Vec<ValueId>>),
    /// Zero for all inputs, and why: the outputs do not change, or jump, when an input's elements
    /// change a little.
    Zero(&'static str),
    /// There is none, and why.
    None(&'static str),
}

/// Adds nodes to a graph that is inferred, and stays so.
#[derive(Debug)]
pub(crate) struct NodeEmitter<'g> {
    pub(crate) graph: &'g mut Graph,
    /// What the names of added nodes begin with.
    pub(crate) name: Arc<str>,
}

impl NodeEmitter<'_> {
    /// Adds a node of the standard domain with one output.
    pub(crate) fn emit(
        &mut self,
        op: &str,
        inputs: &[ValueId],
        attrs: &[(&str, Attribute)],
    ) -> Result<ValueId> {
        let inputs: Vec<Option<ValueId>> = inputs.iter().copied().map(Some).collect();
        self.emit_some(op, &inputs, attrs)
    }

    /// Adds a node of the standard domain with one output, and inputs that may be left out.
    pub(crate) fn emit_some(
        &mut self,
        op: &str,
        inputs: &[Option<ValueId>],
        attrs: &[(&str, Attribute)],
    ) -> Result<ValueId> {
        let outputs = self.emit_many(op, inputs, attrs, 1)?;
        outputs.first().copied().ok_or_else(|| error!(Fail, "{op} has no output"))
    }

    /// Adds a node of the standard domain with so many outputs.
    pub(crate) fn emit_many(
        &mut self,
        op: &str,
        inputs: &[Option<ValueId>],
        attrs: &[(&str, Attribute)],
        outputs: usize,
    ) -> Result<Vec<ValueId>> {
        self.emit_many_in(("", op), inputs, attrs, outputs)
    }

    /// A node with new outputs.
    fn node(
        &mut self,
        (domain, op): (&str, &str),
        inputs: &[Option<ValueId>],
        attrs: &[(&str, Attribute)],
        outputs: usize,
    ) -> Result<(Node, Vec<ValueId>)> {
        let spec = Registry::global()?
            .find(domain, op)
            .ok_or_else(|| error!(NotImplemented, "operator {op} of domain '{domain}' is not known"))?;
        let name: Arc<str> = format!("{}/gradient/{op}_{}", self.name, self.graph.value_count()).into();
        let given = attrs.iter().map(|(name, value)| (name.to_string(), value.clone())).collect();
        let attrs = Attributes::new(spec, given).within(|| format!("node '{name}' ({op})"))?;
        let value = |index| self.graph.add_value(format!("{name}.{index}"), ValueType::Unknown);
        let values: Vec<ValueId> = (0..outputs).map(value).collect();
        let outputs = values.iter().copied().map(Some).collect();
        let inputs = inputs.iter().copied().collect();
        Ok((Node { name, spec, inputs, outputs, attrs, subgraphs: Vec::new() }, values))
    }

    /// Adds a node of any domain with one output, and inputs that may be left out.
    pub(crate) fn emit_in(
        &mut self,
        (domain, op): (&str, &str),
        inputs: &[Option<ValueId>],
        attrs: &[(&str, Attribute)],
    ) -> Result<ValueId> {
        let values = self.emit_many_in((domain, op), inputs, attrs, 1)?;
        values.first().copied().ok_or_else(|| error!(Fail, "{op} has no output"))
    }

    /// Adds a node of any domain with so many outputs.
    pub(crate) fn emit_many_in(
        &mut self,
        (domain, op): (&str, &str),
        inputs: &[Option<ValueId>],
        attrs: &[(&str, Attribute)],
        outputs: usize,
    ) -> Result<Vec<ValueId>> {
        let (node, values) = self.node((domain, op), inputs, attrs, outputs)?;
        self.add(node)?;
        Ok(values)
    }

    /// Adds a node of the standard domain with graphs of its own and so many outputs.
    pub(crate) fn emit_flow(
        &mut self,
        (op, inputs): (&str, &[Option<ValueId>]),
        attrs: &[(&str, Attribute)],
        outputs: usize,
        subgraphs: Vec<Subgraph>,
    ) -> Result<Vec<ValueId>> {
        let (mut node, values) = self.node(("", op), inputs, attrs, outputs)?;
        node.subgraphs = subgraphs;
        self.add(node)?;
        Ok(values)
    }

    /// Adds a node whose outputs exist.
    pub(crate) fn add(&mut self, node: Node) -> Result<()> {
        self.graph.nodes.push(node);
        infer_at(self.graph, self.graph.nodes.len() - 1)
    }

    /// Adds a constant.
    pub(crate) fn constant(&mut self, tensor: Tensor) -> ValueId {
        let name = format!("{}/gradient/constant_{}", self.name, self.graph.value_count());
        self.graph.add_constant(name, tensor)
    }

    /// Adds a scalar of this type of floats.
    pub(crate) fn number(&mut self, value: f64, dtype: DType) -> Result<ValueId> {
        let tensor = match dtype {
            DType::F64 => Tensor::scalar(value)?,
            DType::F32 => Tensor::scalar(value as f32)?,
            DType::F16 => Tensor::scalar(half::f16::from_f64(value))?,
            DType::BF16 => Tensor::scalar(half::bf16::from_f64(value))?,
            other => return Err(error!(NotImplemented, "{} has no gradients", other.name())),
        };
        Ok(self.constant(tensor))
    }

    /// A tensor with the shape and type of `like` and this number everywhere.
    pub(crate) fn filled(&mut self, value: f64, like: ValueId) -> Result<ValueId> {
        let number = self.number(value, self.dtype(like)?)?;
        let shape = self.emit("Shape", &[like], &[])?;
        self.emit("Expand", &[number, shape], &[])
    }

    /// The element type of a value.
    pub(crate) fn dtype(&self, id: ValueId) -> Result<DType> {
        let value = self.graph.value(id);
        value.ty.dtype().ok_or_else(|| error!(NotImplemented, "the type of '{}' is not known", value.name))
    }

    pub(super) fn shape(&self, id: ValueId) -> Result<Vec<Dim>> {
        let value = self.graph.value(id);
        let shape = value.ty.shape().map(<[Dim]>::to_vec);
        shape.ok_or_else(|| error!(NotImplemented, "the rank of '{}' is not known", value.name))
    }

    /// Undoes broadcasting: the sum of `value` over what `target` was repeated along, in the shape
    /// of `target`.
    fn sum_to(&mut self, value: ValueId, target: ValueId) -> Result<ValueId> {
        let (from, to) = (self.shape(value)?, self.shape(target)?);
        if from == to {
            return Ok(value);
        }
        let rank = from.len();
        ensure!(to.len() <= rank, Fail, "a gradient of rank {rank} for a value of rank {}", to.len());
        let lead = rank - to.len();
        let pairs = || from.iter().skip(lead).zip(&to);
        // Whether two symbolic sizes agree, only the run knows.
        let certain = pairs().all(|(from, to)| from == to || to.as_constant().is_some());
        if !certain {
            let shape = self.emit("Shape", &[target], &[])?;
            return self.emit_in((RUNTIME, "SumTo"), &[Some(value), Some(shape)], &[]);
        }
        let repeated = pairs().enumerate().filter(|(_, (from, to))| from != to && **to == Dim::constant(1));
        let axes: Vec<i64> =
            (0..lead).chain(repeated.map(|(axis, _)| lead + axis)).map(|axis| axis as i64).collect();
        let axes = self.constant(Tensor::from_slice(&[axes.len()], &axes)?);
        let keep = [("keepdims", Attribute::Int(1)), ("noop_with_empty_axes", Attribute::Int(1))];
        let sum = self.emit("ReduceSum", &[value, axes], &keep)?;
        self.reshape_like(sum, target)
    }

    pub(super) fn reshape_like(&mut self, value: ValueId, target: ValueId) -> Result<ValueId> {
        if self.shape(value)? == self.shape(target)? {
            return Ok(value);
        }
        let shape = self.emit("Shape", &[target], &[])?;
        self.emit("Reshape", &[value, shape], &[("allowzero", Attribute::Int(1))])
    }

    fn cast(&mut self, value: ValueId, dtype: DType) -> Result<ValueId> {
        if self.dtype(value)? == dtype {
            return Ok(value);
        }
        self.emit("Cast", &[value], &[("to", Attribute::Int(i64::from(dtype.onnx_code())))])
    }
}

/// What a gradient rule sees and sets.
#[derive(Debug)]
pub struct GradCx<'a> {
    pub(crate) pen: NodeEmitter<'a>,
    pub(crate) id: NodeId,
    pub(crate) node: &'a Node,
    pub(super) upstream: &'a [Option<ValueId>],
    varying: &'a HashSet<ValueId>,
    gradients: Vec<Option<ValueId>>,
    /// The gradients of values that subgraphs capture.
    captured: Vec<(ValueId, ValueId)>,
}

impl<'a> GradCx<'a> {
    /// The gradients of what a node reads from those of its outputs, for the values that vary.
    pub(crate) fn run(
        graph: &'a mut Graph,
        (id, node): (NodeId, &'a Node),
        upstream: &'a [Option<ValueId>],
        varying: &'a HashSet<ValueId>,
    ) -> Result<Vec<(ValueId, ValueId)>> {
        let pen = NodeEmitter { graph, name: node.name.clone() };
        let gradients = vec![None; node.inputs.len()];
        let mut cx = GradCx { pen, id, node, upstream, varying, gradients, captured: Vec::new() };
        match (node.spec.grad, node.spec.scalar, node.spec.lower) {
            (Grad::Zero(_), ..) => {}
            (Grad::Rule(rule), ..) => rule(&mut cx)?,
            (Grad::Parts(parts), ..) => cx.through(parts)?,
            (Grad::Derived, Some(formula), _) => from_scalar(&mut cx, &formula(&node.attrs)?)?,
            (Grad::Derived, None, Some(lower)) => cx.through(|cx| cx.lowered(lower))?,
            (Grad::Derived | Grad::None(_), ..) => {
                return Err(error!(NotImplemented, "{}", node.spec.without_gradient()));
            }
        }
        let inputs = node.inputs.iter().zip(&cx.gradients);
        let mut shares: Vec<(ValueId, ValueId)> =
            inputs.filter_map(|(input, share)| (*input).zip(*share)).collect();
        shares.append(&mut cx.captured);
        Ok(shares)
    }

    /// Sets the gradients from those of nodes that `build` adds: they compute the outputs again,
    /// which it returns in order.
    pub fn through(&mut self, build: impl FnOnce(&mut GradCx<'a>) -> Result<Vec<ValueId>>) -> Result<()> {
        let start = self.pen.graph.nodes.len();
        let outputs = build(self)?;
        let added = self.pen.graph.nodes.iter().enumerate().skip(start);
        let forward: Vec<(NodeId, Node)> =
            added.map(|(index, node)| (NodeId(index as u32), node.clone())).collect();
        let seeds: Vec<(ValueId, ValueId)> = outputs
            .iter()
            .zip(self.upstream)
            .filter_map(|(output, seed)| seed.map(|seed| (*output, seed)))
            .collect();
        let missing = self.upstream.iter().skip(outputs.len()).any(Option::is_some);
        ensure!(!missing, NotImplemented, "{} has a gradient for some outputs only", self.node.spec.name);
        let boundary: Vec<ValueId> = self.node.inputs.iter().flatten().copied().collect();
        let xs: Vec<ValueId> = boundary.iter().copied().filter(|x| self.varying.contains(x)).collect();
        let mut obstacles = Vec::new();
        let course = BackwardPass { forward: &forward, xs: &xs, boundary: &boundary };
        let mut totals = course.accumulate(self.pen.graph, &seeds, &mut obstacles)?;
        NotDifferentiable::refuse(&obstacles)?;
        for (input, gradient) in self.node.inputs.iter().zip(&mut self.gradients) {
            *gradient = input.and_then(|input| totals.remove(&input));
        }
        prune(self.pen.graph, start, self.gradients.iter().flatten().copied());
        Ok(())
    }

    /// The node's decomposition once more; returns what stands for its outputs.
    fn lowered(&mut self, lower: fn(&mut Draft<'_>) -> Result<()>) -> Result<Vec<ValueId>> {
        let mut node = self.node.clone();
        node.name = format!("{}/gradient/again_{}", node.name, self.pen.graph.value_count()).into();
        let mut again = Vec::with_capacity(node.outputs.len());
        for (index, output) in node.outputs.iter_mut().enumerate() {
            let value = self.pen.graph.add_value(format!("{}.{index}", node.name), ValueType::Unknown);
            // What nobody reads stays left out, and has no gradient.
            *output = output.map(|_| value);
            again.push(value);
        }
        let mut draft = Draft::of_node(self.pen.graph, node);
        lower(&mut draft)?;
        for part in draft.finish()? {
            self.pen.add(part)?;
        }
        Ok(again)
    }

    /// The attributes of the node.
    pub fn attrs(&self) -> &'a Attributes {
        &self.node.attrs
    }

    /// The number of input positions that the node gives.
    pub fn input_count(&self) -> usize {
        self.node.inputs.len()
    }

    /// The number of output positions that the node gives.
    pub fn output_count(&self) -> usize {
        self.node.outputs.len()
    }

    /// The name of the node's operator.
    pub fn operator(&self) -> &'static str {
        self.node.spec.name
    }

    /// The input at `index`, which must be given.
    pub fn input(&self, index: usize) -> Result<ValueId> {
        let input = self.find_input(index);
        input.ok_or_else(|| error!(InvalidGraph, "input {index} is missing"))
    }

    /// The input at `index`, where it is given.
    pub fn find_input(&self, index: usize) -> Option<ValueId> {
        self.node.inputs.get(index).copied().flatten()
    }

    /// The output at `index`, where it is given.
    pub fn find_output(&self, index: usize) -> Option<ValueId> {
        self.node.outputs.get(index).copied().flatten()
    }

    /// The output at `index`, which must be given.
    pub fn output(&self, index: usize) -> Result<ValueId> {
        let output = self.find_output(index);
        output.ok_or_else(|| error!(InvalidGraph, "output {index} is missing"))
    }

    /// The output at `index`; where the node leaves it out, it computes it from now on.
    pub fn demand_output(&mut self, index: usize) -> Result<ValueId> {
        if let Some(output) = self.find_output(index) {
            return Ok(output);
        }
        let name = format!("{}/gradient/output_{index}", self.node.name);
        let value = self.pen.graph.add_value(name, ValueType::Unknown);
        let node = self.pen.graph.nodes.get_mut(self.id.index());
        let node = node.ok_or_else(|| error!(Fail, "a node of the forward pass is gone"))?;
        while node.outputs.len() <= index {
            node.outputs.push(None);
        }
        if let Some(slot) = node.outputs.get_mut(index) {
            *slot = Some(value);
        }
        self.infer_again(self.id)?;
        Ok(value)
    }

    /// Infers a node that was changed.
    pub(crate) fn infer_again(&mut self, id: NodeId) -> Result<()> {
        infer_at(self.pen.graph, id.index())
    }

    /// The gradient of the first output, which must be the only one that counts.
    pub fn upstream(&self) -> Result<ValueId> {
        match self.upstream {
            [Some(first), rest @ ..] if rest.iter().all(Option::is_none) => Ok(*first),
            _ => Err(error!(NotImplemented, "{} has a gradient for one output only", self.node.spec.name)),
        }
    }

    /// Whether the gradient of the input at `index` is wanted.
    pub fn wants(&self, index: usize) -> bool {
        self.find_input(index).is_some_and(|input| self.varying.contains(&input))
    }

    /// Whether the gradient of a value that a subgraph captures is wanted.
    pub(crate) fn wants_captured(&self, outer: ValueId) -> bool {
        self.varying.contains(&outer)
    }

    /// Adds to the gradient of a value that a subgraph captures.
    pub(crate) fn add_captured(&mut self, outer: ValueId, gradient: ValueId) {
        self.captured.push((outer, gradient));
    }

    /// The inputs whose gradients are wanted.
    pub fn wanted(&self) -> Vec<usize> {
        (0..self.input_count()).filter(|&index| self.wants(index)).collect()
    }

    /// The rank of a value.
    pub fn rank(&self, id: ValueId) -> Result<usize> {
        self.pen.shape(id).map(|shape| shape.len())
    }

    /// The element type of a value.
    pub fn dtype(&self, id: ValueId) -> Result<DType> {
        self.pen.dtype(id)
    }

    /// Emits a node of the standard domain with one output.
    pub fn emit(&mut self, op: &str, inputs: &[ValueId], attrs: &[(&str, Attribute)]) -> Result<ValueId> {
        self.pen.emit(op, inputs, attrs)
    }

    /// Emits the node's own operator, which has one output, with its attributes on other inputs.
    pub fn repeat(&mut self, inputs: &[ValueId]) -> Result<ValueId> {
        let Node { spec, attrs, .. } = self.node;
        let name: Arc<str> =
            format!("{}/gradient/{}_{}", self.node.name, spec.name, self.pen.graph.value_count()).into();
        let output = self.pen.graph.add_value(format!("{name}.0"), ValueType::Unknown);
        let inputs = inputs.iter().copied().map(Some).collect();
        let outputs = std::iter::once(Some(output)).collect();
        self.pen.add(Node { name, spec, inputs, outputs, attrs: attrs.clone(), subgraphs: Vec::new() })?;
        Ok(output)
    }

    /// Adds a one-dimensional `int64` constant.
    pub fn ints(&mut self, ints: &[i64]) -> Result<ValueId> {
        Ok(self.pen.constant(Tensor::from_slice(&[ints.len()], ints)?))
    }

    /// Adds a scalar of this type of floats.
    pub fn number(&mut self, value: f64, dtype: DType) -> Result<ValueId> {
        self.pen.number(value, dtype)
    }

    /// The value converted to an element type.
    pub fn cast(&mut self, value: ValueId, dtype: DType) -> Result<ValueId> {
        self.pen.cast(value, dtype)
    }

    /// The value with its last two dimensions exchanged.
    pub fn transposed(&mut self, value: ValueId) -> Result<ValueId> {
        let mut order: Vec<i64> = (0..self.rank(value)? as i64).collect();
        ensure!(order.len() >= 2, InvalidGraph, "a matrix was expected, got rank {}", order.len());
        let last = order.len() - 1;
        order.swap(last - 1, last);
        self.emit("Transpose", &[value], &[("perm", Attribute::Ints(order))])
    }

    /// The sum of `value` over what `target` was broadcast along, in the shape of `target`.
    pub fn sum_to(&mut self, value: ValueId, target: ValueId) -> Result<ValueId> {
        self.pen.sum_to(value, target)
    }

    /// A formula over operands of one type, as one node: an operator of the standard where one will
    /// do.
    pub fn formula(&mut self, formula: &ScalarExpr, operands: &[ValueId]) -> Result<ValueId> {
        use ScalarExpr::{Binary, Input, Unary};
        let standard = match formula {
            Input(0) => {
                return operands.first().copied().ok_or_else(|| error!(Fail, "a formula of nothing"));
            }
            Unary(UnaryFn::Neg, x) if **x == Input(0) => Some("Neg"),
            Binary(BinaryFn::Mul, a, b) if [&**a, &**b] == [&Input(0), &Input(1)] => Some("Mul"),
            Binary(BinaryFn::Div, a, b) if [&**a, &**b] == [&Input(0), &Input(1)] => Some("Div"),
            _ => None,
        };
        if let Some(op) = standard {
            return self.emit(op, operands, &[]);
        }
        let attrs = [("formula", Attribute::String(formula.to_string()))];
        let operands: Vec<Option<ValueId>> = operands.iter().copied().map(Some).collect();
        self.pen.emit_in((RUNTIME, "FusedElementwise"), &operands, &attrs)
    }

    /// Sets the gradient of an input, which has the input's shape.
    pub fn set(&mut self, index: usize, gradient: ValueId) {
        if let Some(slot) = self.gradients.get_mut(index) {
            *slot = Some(gradient);
        }
    }

    /// Takes the gradient of an input back.
    pub fn forget(&mut self, index: usize) {
        if let Some(slot) = self.gradients.get_mut(index) {
            *slot = None;
        }
    }

    /// Sets the gradient of an input that was broadcast to the shape of `gradient`.
    pub fn set_broadcast(&mut self, index: usize, gradient: ValueId) -> Result<()> {
        let gradient = self.pen.sum_to(gradient, self.input(index)?)?;
        self.set(index, gradient);
        Ok(())
    }

    /// Sets the gradient of an input whose elements are those of `gradient` under another shape.
    pub fn set_reshaped(&mut self, index: usize, gradient: ValueId) -> Result<()> {
        let gradient = self.pen.reshape_like(gradient, self.input(index)?)?;
        self.set(index, gradient);
        Ok(())
    }
}

/// The gradient of an output that is the first input under another shape.
pub fn of_reshape(cx: &mut GradCx<'_>) -> Result<()> {
    let upstream = cx.upstream()?;
    cx.set_reshaped(0, upstream)
}

/// The gradient of an output that is the first input, broadcast.
pub fn of_broadcast(cx: &mut GradCx<'_>) -> Result<()> {
    let upstream = cx.upstream()?;
    cx.set_broadcast(0, upstream)
}

/// The gradient of an elementwise operator: upstream times the derivative of the formula, in one
/// pass.
fn from_scalar(cx: &mut GradCx<'_>, formula: &ScalarExpr) -> Result<()> {
    let upstream = cx.upstream()?;
    for index in cx.wanted() {
        let derivative = formula.derivative(index);
        if derivative == ScalarExpr::Constant(0.0) {
            continue;
        }
        let mut operands = vec![upstream];
        let derivative = over_operands(cx, &derivative, formula, &mut operands)?;
        let gradient = cx.formula(&times(&derivative), &operands)?;
        let own = cx.dtype(cx.input(index)?)?;
        let gradient = cx.cast(gradient, own)?;
        cx.set_broadcast(index, gradient)?;
    }
    Ok(())
}

/// A derivative whose inputs are places among `operands`, which come to be there, in the type of
/// the first. Where it has the operator's formula itself, it reads the operator's output.
fn over_operands(
    cx: &mut GradCx<'_>,
    derivative: &ScalarExpr,
    formula: &ScalarExpr,
    operands: &mut Vec<ValueId>,
) -> Result<ScalarExpr> {
    let mut over = |x: &ScalarExpr| over_operands(cx, x, formula, operands).map(Box::new);
    let operand = match derivative {
        x if x == formula => cx.output(0)?,
        ScalarExpr::Input(index) => {
            let input = cx.input(*index)?;
            let dtype = operands.first().map_or(Ok(DType::F32), |first| cx.dtype(*first))?;
            cx.cast(input, dtype)?
        }
        ScalarExpr::Constant(_) => return Ok(derivative.clone()),
        ScalarExpr::Unary(function, x) => return Ok(ScalarExpr::Unary(*function, over(x)?)),
        ScalarExpr::Binary(function, a, b) => return Ok(ScalarExpr::Binary(*function, over(a)?, over(b)?)),
        ScalarExpr::Select(condition, then, otherwise) => {
            return Ok(ScalarExpr::Select(over(condition)?, over(then)?, over(otherwise)?));
        }
    };
    let place = operands.iter().skip(1).position(|known| *known == operand).map(|place| place + 1);
    Ok(ScalarExpr::Input(place.unwrap_or_else(|| {
        operands.push(operand);
        operands.len() - 1
    })))
}

/// The first operand times `factor`. Choices stay outside of the product: what is not chosen may be
/// infinite, and infinity times zero is no number.
fn times(factor: &ScalarExpr) -> ScalarExpr {
    let upstream = ScalarExpr::Input(0);
    match factor {
        ScalarExpr::Constant(0.0) => factor.clone(),
        ScalarExpr::Constant(1.0) => upstream,
        ScalarExpr::Constant(-1.0) => -upstream,
        ScalarExpr::Unary(UnaryFn::Neg, x) => -times(x),
        ScalarExpr::Unary(UnaryFn::Reciprocal, x) => upstream / (**x).clone(),
        ScalarExpr::Select(condition, then, otherwise) => {
            ScalarExpr::select((**condition).clone(), times(then), times(otherwise))
        }
        factor => upstream * factor.clone(),
    }
}
