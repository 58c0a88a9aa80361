//! Gradient rules: from the gradients of a node's outputs to those of its inputs, as new nodes.
//!
//! Reverse accumulation as in Griewank & Walther, Evaluating Derivatives, chapter 3. The gradient
//! of a value has the value's shape and type. Elementwise operators need no rule, because their
//! formula is differentiated.

use std::collections::HashSet;
use std::sync::Arc;

use super::backward::{BackwardPass, NotDifferentiable, prune};
use super::draft::Draft;
use super::infer::infer_at;
use super::node_emitter::NodeEmitter;
use super::{BinaryFn, RUNTIME, ScalarExpr, UnaryFn};
use crate::dtype::DType;
use crate::ir::{Attribute, Attributes, Graph, Node, NodeId, ValueId, ValueType};
use crate::tensor::Tensor;
use crate::{Result, ensure, error};

/// The source of an operator's gradient.
#[derive(Debug, Clone, Copy)]
pub enum Grad {
    /// The derivative of the scalar formula. Without a formula, the gradient of the decomposition
    /// (`lower`). An operator with neither has no gradient.
    Derived,
    /// A rule, which sets the gradient of each wanted input that the outputs depend on.
    Rule(fn(&mut GradCx<'_>) -> Result<()>),
    /// The gradient of other nodes that compute the same. The function adds these to the backward
    /// pass, which recomputes what it needs of them. It returns their outputs in the order of the
    /// node's outputs. Further outputs of the node have no gradient.
    Parts(fn(&mut GradCx<'_>) -> Result<Vec<ValueId>>),
    /// Zero for all inputs, with the reason: the outputs are piecewise constant in the inputs.
    Zero(&'static str),
    /// No gradient, with the reason.
    None(&'static str),
}

/// Context of a gradient rule.
#[derive(Debug)]
pub struct GradCx<'a> {
    /// Adds nodes to the backward pass.
    pub(crate) pen: NodeEmitter<'a>,
    pub(crate) id: NodeId,
    pub(crate) node: &'a Node,
    /// The gradient of each output, if it has one.
    pub(super) upstream: &'a [Option<ValueId>],
    /// The values whose gradients are wanted.
    varying: &'a HashSet<ValueId>,
    /// The gradient of each input, as the rule sets it.
    gradients: Vec<Option<ValueId>>,
    /// The gradients of values that subgraphs capture.
    captured: Vec<(ValueId, ValueId)>,
}

impl<'a> GradCx<'a> {
    /// Runs the gradient rule of a node. Returns the gradients of the varying values that the node
    /// reads, from those of its outputs.
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
            // Absent means zero, so there is nothing to add.
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

    /// Sets the gradients to those of nodes that `build` adds. These compute the node's outputs
    /// again, and `build` returns them in order.
    pub fn through(&mut self, build: impl FnOnce(&mut GradCx<'a>) -> Result<Vec<ValueId>>) -> Result<()> {
        // Nodes are only appended, so those of `build` are the ones from here on.
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
        // A gradient of an output without a counterpart would be dropped silently.
        let missing = self.upstream.iter().skip(outputs.len()).any(Option::is_some);
        ensure!(!missing, NotImplemented, "{} has a gradient for some outputs only", self.node.spec.name);
        // The pass stops at the node's inputs, because what lies before them is the caller's.
        let boundary: Vec<ValueId> = self.node.inputs.iter().flatten().copied().collect();
        let xs: Vec<ValueId> = boundary.iter().copied().filter(|x| self.varying.contains(x)).collect();
        let mut obstacles = Vec::new();
        let pass = BackwardPass { forward: &forward, xs: &xs, boundary: &boundary };
        let mut totals = pass.accumulate(self.pen.graph, &seeds, &mut obstacles)?;
        NotDifferentiable::refuse(&obstacles)?;
        for (input, gradient) in self.node.inputs.iter().zip(&mut self.gradients) {
            // `remove` gives the total of a value that is read twice, as in `Mul(x, x)`, to one
            // position only.
            *gradient = input.and_then(|input| totals.remove(&input));
        }
        // Only some of the recomputed nodes feed the gradients.
        prune(self.pen.graph, start, self.gradients.iter().flatten().copied());
        Ok(())
    }

    /// Adds the node's decomposition to the graph a second time, and returns its outputs.
    fn lowered(&mut self, lower: fn(&mut Draft<'_>) -> Result<()>) -> Result<Vec<ValueId>> {
        let mut node = self.node.clone();
        // The value count makes the name unique in the graph.
        node.name = format!("{}/gradient/again_{}", node.name, self.pen.graph.value_count()).into();
        let mut again = Vec::with_capacity(node.outputs.len());
        for (index, output) in node.outputs.iter_mut().enumerate() {
            let value = self.pen.graph.add_value(format!("{}.{index}", node.name), ValueType::Unknown);
            // An omitted output stays omitted and has no gradient.
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

    /// Returns the attributes of the node.
    pub fn attrs(&self) -> &'a Attributes {
        &self.node.attrs
    }

    /// Returns the number of input positions of the node.
    pub fn input_count(&self) -> usize {
        self.node.inputs.len()
    }

    /// Returns the number of output positions of the node.
    pub fn output_count(&self) -> usize {
        self.node.outputs.len()
    }

    /// Returns the name of the node's operator.
    pub fn operator(&self) -> &'static str {
        self.node.spec.name
    }

    /// Returns the input at `index`; an error if it is omitted.
    pub fn input(&self, index: usize) -> Result<ValueId> {
        let input = self.find_input(index);
        input.ok_or_else(|| error!(InvalidGraph, "input {index} is missing"))
    }

    /// Returns the input at `index`, or `None` if it is omitted.
    pub fn find_input(&self, index: usize) -> Option<ValueId> {
        self.node.inputs.get(index).copied().flatten()
    }

    /// Returns the output at `index`, or `None` if it is omitted.
    pub fn find_output(&self, index: usize) -> Option<ValueId> {
        self.node.outputs.get(index).copied().flatten()
    }

    /// Returns the output at `index`; an error if it is omitted.
    pub fn output(&self, index: usize) -> Result<ValueId> {
        let output = self.find_output(index);
        output.ok_or_else(|| error!(InvalidGraph, "output {index} is missing"))
    }

    /// Returns the output at `index`. If the node omits it, adds it to the node, which then
    /// computes it in the forward pass.
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
        // The type of the new output follows from the node's inputs.
        self.infer_again(self.id)?;
        Ok(value)
    }

    /// Infers a node again after a change.
    pub(crate) fn infer_again(&mut self, id: NodeId) -> Result<()> {
        infer_at(self.pen.graph, id.index())
    }

    /// Returns the gradient of the first output, which must be the only one with a gradient.
    pub fn upstream(&self) -> Result<ValueId> {
        match self.upstream {
            [Some(first), rest @ ..] if rest.iter().all(Option::is_none) => Ok(*first),
            // A gradient of another output would be dropped silently.
            _ => Err(error!(NotImplemented, "{} has a gradient for one output only", self.node.spec.name)),
        }
    }

    /// Returns whether the gradient of the input at `index` is wanted.
    pub fn wants(&self, index: usize) -> bool {
        self.find_input(index).is_some_and(|input| self.varying.contains(&input))
    }

    /// Returns whether the gradient of a captured value is wanted.
    pub(crate) fn wants_captured(&self, outer: ValueId) -> bool {
        self.varying.contains(&outer)
    }

    /// Adds a contribution to the gradient of a captured value.
    pub(crate) fn add_captured(&mut self, outer: ValueId, gradient: ValueId) {
        self.captured.push((outer, gradient));
    }

    /// Returns the inputs whose gradients are wanted.
    pub fn wanted(&self) -> Vec<usize> {
        (0..self.input_count()).filter(|&index| self.wants(index)).collect()
    }

    /// Returns the rank of a value.
    pub fn rank(&self, id: ValueId) -> Result<usize> {
        self.pen.shape(id).map(|shape| shape.len())
    }

    /// Returns the element type of a value.
    pub fn dtype(&self, id: ValueId) -> Result<DType> {
        self.pen.dtype(id)
    }

    /// Emits a node of the standard domain with one output.
    pub fn emit(&mut self, op: &str, inputs: &[ValueId], attrs: &[(&str, Attribute)]) -> Result<ValueId> {
        self.pen.emit(op, inputs, attrs)
    }

    /// Emits the node's own operator with the same attributes on other inputs. It must have one
    /// output.
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

    /// Adds a scalar constant of this float type.
    pub fn number(&mut self, value: f64, dtype: DType) -> Result<ValueId> {
        self.pen.number(value, dtype)
    }

    /// Converts a value to an element type, if it has another.
    pub fn cast(&mut self, value: ValueId, dtype: DType) -> Result<ValueId> {
        self.pen.cast(value, dtype)
    }

    /// Transposes the last two dimensions of a value.
    pub fn transposed(&mut self, value: ValueId) -> Result<ValueId> {
        let mut order: Vec<i64> = (0..self.rank(value)? as i64).collect();
        ensure!(order.len() >= 2, InvalidGraph, "a matrix was expected, got rank {}", order.len());
        let last = order.len() - 1;
        order.swap(last - 1, last);
        self.emit("Transpose", &[value], &[("perm", Attribute::Ints(order))])
    }

    /// Sums `value` over the axes along which `target` was broadcast, in the shape of `target`.
    pub fn sum_to(&mut self, value: ValueId, target: ValueId) -> Result<ValueId> {
        self.pen.sum_to(value, target)
    }

    /// Emits a formula over operands of one type as a single node. Uses a standard operator if
    /// there is one, otherwise `FusedElementwise`.
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

    /// Sets the gradient of an input. It must have the shape of the input.
    pub fn set(&mut self, index: usize, gradient: ValueId) {
        if let Some(slot) = self.gradients.get_mut(index) {
            *slot = Some(gradient);
        }
    }

    /// Removes the gradient of an input.
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

    /// Sets the gradient of an input from the same elements under another shape.
    pub fn set_reshaped(&mut self, index: usize, gradient: ValueId) -> Result<()> {
        let gradient = self.pen.reshape_like(gradient, self.input(index)?)?;
        self.set(index, gradient);
        Ok(())
    }
}

/// Gradient rule of an output that is the first input under another shape.
pub fn of_reshape(cx: &mut GradCx<'_>) -> Result<()> {
    let upstream = cx.upstream()?;
    cx.set_reshaped(0, upstream)
}

/// Gradient rule of an output that is the first input, broadcast.
pub fn of_broadcast(cx: &mut GradCx<'_>) -> Result<()> {
    let upstream = cx.upstream()?;
    cx.set_broadcast(0, upstream)
}

/// Gradient rule of elementwise operators: for each input one fused node, upstream times the
/// derivative of the formula.
fn from_scalar(cx: &mut GradCx<'_>, formula: &ScalarExpr) -> Result<()> {
    let upstream = cx.upstream()?;
    for index in cx.wanted() {
        let derivative = formula.derivative(index);
        // An absent gradient means zero and costs nothing.
        if derivative == ScalarExpr::Constant(0.0) {
            continue;
        }
        let mut operands = vec![upstream];
        let derivative = bind_operands(cx, &derivative, formula, &mut operands)?;
        let gradient = cx.formula(&times(&derivative), &operands)?;
        // The exponent of `Pow` may have another type than the base and the output.
        let own = cx.dtype(cx.input(index)?)?;
        let gradient = cx.cast(gradient, own)?;
        cx.set_broadcast(index, gradient)?;
    }
    Ok(())
}

/// Rewrites a derivative so that its inputs index `operands`, appending the operands it needs in
/// the type of the first. Subexpressions equal to the operator's formula read the operator's output
/// instead of recomputing it.
fn bind_operands(
    cx: &mut GradCx<'_>,
    derivative: &ScalarExpr,
    formula: &ScalarExpr,
    operands: &mut Vec<ValueId>,
) -> Result<ScalarExpr> {
    let mut over = |x: &ScalarExpr| bind_operands(cx, x, formula, operands).map(Box::new);
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
    // The first operand is the gradient, which `times` multiplies by. Each other operand is bound
    // once.
    let place = operands.iter().skip(1).position(|known| *known == operand).map(|place| place + 1);
    Ok(ScalarExpr::Input(place.unwrap_or_else(|| {
        operands.push(operand);
        operands.len() - 1
    })))
}

/// Returns the first operand times `factor`. The product moves into selects, because the branch not
/// taken may be infinite, and infinity times zero is NaN.
fn times(factor: &ScalarExpr) -> ScalarExpr {
    let upstream = ScalarExpr::Input(0);
    match factor {
        ScalarExpr::Constant(0.0) => factor.clone(),
        ScalarExpr::Constant(1.0) => upstream,
        ScalarExpr::Constant(-1.0) => -upstream,
        ScalarExpr::Unary(UnaryFn::Neg, x) => -times(x),
        // A division rounds once, a product with a reciprocal twice.
        ScalarExpr::Unary(UnaryFn::Reciprocal, x) => upstream / (**x).clone(),
        ScalarExpr::Select(condition, then, otherwise) => {
            ScalarExpr::select((**condition).clone(), times(then), times(otherwise))
        }
        factor => upstream * factor.clone(),
    }
}
