//! Gradient rules: from the gradient of a node's outputs to those of its inputs, as nodes.
//!
//! Reverse accumulation as in Griewank & Walther, Evaluating Derivatives, chapter 3: a value's gradient has the
//! value's shape and type. Elementwise operators need no rule, their formula is differentiated.

use std::sync::Arc;

use super::infer::infer_at;
use super::render::{Render, Sheet};
use super::{Registry, ScalarExpr, UnaryFn};
use crate::dim::Dim;
use crate::dtype::DType;
use crate::ir::{Attribute, Attributes, Graph, Node, NodeId, ValueId, ValueType};
use crate::tensor::Tensor;
use crate::{Result, Within, ensure, error};

/// Where the gradient of an operator comes from.
#[derive(Debug, Clone, Copy)]
pub enum Grad {
    /// The derivative of its scalar formula. An operator without formula then has no gradient.
    FromScalar,
    /// A rule, which sets the gradient of each wanted input that the outputs depend on.
    Rule(fn(&mut GradCx<'_>) -> Result<()>),
}

/// Adds nodes to a graph that is inferred, and stays so.
#[derive(Debug)]
pub(crate) struct Pen<'g> {
    pub(crate) graph: &'g mut Graph,
    /// What the names of added nodes begin with.
    pub(crate) name: Arc<str>,
}

impl Pen<'_> {
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
        let spec = Registry::global()?
            .find("", op)
            .ok_or_else(|| error!(NotImplemented, "operator {op} is not known"))?;
        let name: Arc<str> = format!("{}/gradient/{op}_{}", self.name, self.graph.value_count()).into();
        let given = attrs.iter().map(|(name, value)| (name.to_string(), value.clone())).collect();
        let attrs = Attributes::new(spec, given).within(|| format!("node '{name}' ({op})"))?;
        let value = |index| self.graph.add_value(format!("{name}.{index}"), ValueType::Unknown);
        let values: Vec<ValueId> = (0..outputs).map(value).collect();
        let outputs = values.iter().copied().map(Some).collect();
        let inputs = inputs.iter().copied().collect();
        self.add(Node { name, spec, inputs, outputs, attrs, subgraphs: Vec::new() })?;
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

    /// Undoes broadcasting: the sum of `value` over what `target` was repeated along, in the shape of `target`.
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
        let axes = if certain {
            let repeated =
                pairs().enumerate().filter(|(_, (from, to))| from != to && **to == Dim::constant(1));
            let axes: Vec<i64> =
                (0..lead).chain(repeated.map(|(axis, _)| lead + axis)).map(|axis| axis as i64).collect();
            self.constant(Tensor::from_slice(&[axes.len()], &axes)?)
        } else {
            self.repeated_axes(value, target, lead)?
        };
        let keep = [("keepdims", Attribute::Int(1)), ("noop_with_empty_axes", Attribute::Int(1))];
        let sum = self.emit("ReduceSum", &[value, axes], &keep)?;
        self.reshape_like(sum, target)
    }

    /// The axes along which the sizes of `value` and `target` differ, found at run time, after the `lead` axes that
    /// only `value` has.
    fn repeated_axes(&mut self, value: ValueId, target: ValueId, lead: usize) -> Result<ValueId> {
        let from = self.emit("Shape", &[value], &[("start", Attribute::Int(lead as i64))])?;
        let to = self.emit("Shape", &[target], &[])?;
        let same = self.emit("Equal", &[from, to], &[])?;
        let differ = self.emit("Not", &[same], &[])?;
        let found = self.emit("NonZero", &[differ], &[])?;
        let flat = self.constant(Tensor::from_slice(&[1], &[-1i64])?);
        let found = self.emit("Reshape", &[found, flat], &[])?;
        let offset = self.constant(Tensor::scalar(lead as i64)?);
        let found = self.emit("Add", &[found, offset], &[])?;
        let leading: Vec<i64> = (0..lead as i64).collect();
        let leading = self.constant(Tensor::from_slice(&[lead], &leading)?);
        self.emit("Concat", &[leading, found], &[("axis", Attribute::Int(0))])
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
    pub(super) pen: Pen<'a>,
    id: NodeId,
    pub(super) node: &'a Node,
    pub(super) upstream: &'a [Option<ValueId>],
    wanted: &'a [bool],
    gradients: Vec<Option<ValueId>>,
}

impl<'a> GradCx<'a> {
    /// The gradients of a node's inputs from those of its outputs, for the inputs that are `wanted`.
    pub(crate) fn run(
        graph: &'a mut Graph,
        (id, node): (NodeId, &'a Node),
        upstream: &'a [Option<ValueId>],
        wanted: &'a [bool],
    ) -> Result<Vec<Option<ValueId>>> {
        let pen = Pen { graph, name: node.name.clone() };
        let mut cx = GradCx { pen, id, node, upstream, wanted, gradients: vec![None; node.inputs.len()] };
        match (node.spec.grad, node.spec.scalar) {
            (Grad::Rule(rule), _) => rule(&mut cx)?,
            (Grad::FromScalar, Some(formula)) => from_scalar(&mut cx, &formula(&node.attrs)?)?,
            (Grad::FromScalar, None) => {
                return Err(error!(NotImplemented, "operator {} has no gradient", node.spec.name));
            }
        }
        Ok(cx.gradients)
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
        infer_at(self.pen.graph, self.id.index())?;
        Ok(value)
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
        self.wanted.get(index).copied().unwrap_or(false)
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

    /// Sets the gradient of an input, which has the input's shape.
    pub fn set(&mut self, index: usize, gradient: ValueId) {
        if let Some(slot) = self.gradients.get_mut(index) {
            *slot = Some(gradient);
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

/// The gradient of an elementwise operator: upstream times the derivative of the formula.
fn from_scalar(cx: &mut GradCx<'_>, formula: &ScalarExpr) -> Result<()> {
    let (upstream, output) = (cx.upstream()?, cx.output(0)?);
    let dtype = cx.dtype(upstream)?;
    let mut known = vec![(formula.clone(), output)];
    for index in cx.wanted() {
        let derivative = formula.derivative(index);
        if derivative == ScalarExpr::Constant(0.0) {
            continue;
        }
        let mut render = Render { sheet: &mut *cx, dtype, known };
        let gradient = times(&mut render, upstream, &derivative)?;
        known = render.known;
        let own = cx.dtype(cx.input(index)?)?;
        let gradient = cx.cast(gradient, own)?;
        cx.set_broadcast(index, gradient)?;
    }
    Ok(())
}

impl Sheet for GradCx<'_> {
    fn operand(&mut self, index: usize, dtype: DType) -> Result<ValueId> {
        let input = GradCx::input(self, index)?;
        GradCx::cast(self, input, dtype)
    }

    fn number(&mut self, value: f64, dtype: DType) -> Result<ValueId> {
        GradCx::number(self, value, dtype)
    }

    fn cast(&mut self, value: ValueId, dtype: DType) -> Result<ValueId> {
        GradCx::cast(self, value, dtype)
    }

    fn emit(&mut self, op: &str, inputs: &[ValueId], attrs: &[(&str, Attribute)]) -> Result<ValueId> {
        GradCx::emit(self, op, inputs, attrs)
    }
}

/// `value * factor`. Choices stay outside of the product: what is not chosen may be infinite, and infinity times
/// zero is no number.
fn times(render: &mut Render<'_, GradCx<'_>>, value: ValueId, factor: &ScalarExpr) -> Result<ValueId> {
    match factor {
        ScalarExpr::Constant(0.0) => render.number(factor),
        ScalarExpr::Constant(1.0) => Ok(value),
        ScalarExpr::Unary(UnaryFn::Neg, x) => {
            let product = times(render, value, x)?;
            render.sheet.emit("Neg", &[product], &[])
        }
        ScalarExpr::Constant(-1.0) => render.sheet.emit("Neg", &[value], &[]),
        ScalarExpr::Unary(UnaryFn::Reciprocal, x) => {
            let x = render.number(x)?;
            render.sheet.emit("Div", &[value, x], &[])
        }
        ScalarExpr::Select(condition, then, otherwise) => {
            let condition = render.truth(condition)?;
            let (then, otherwise) = (times(render, value, then)?, times(render, value, otherwise)?);
            render.sheet.emit("Where", &[condition, then, otherwise], &[])
        }
        factor => {
            let factor = render.number(factor)?;
            render.sheet.emit("Mul", &[value, factor], &[])
        }
    }
}
