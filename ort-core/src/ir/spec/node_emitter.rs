//! Node emission: how gradient rules and decompositions append nodes to an inferred graph.

use std::sync::Arc;

use super::infer::infer_at;
use super::{RUNTIME, Registry};
use crate::dim::Dim;
use crate::dtype::DType;
use crate::ir::{Attribute, Graph, Node, Subgraph, ValueId};
use crate::tensor::Tensor;
use crate::{Result, ensure, error};

/// Appends nodes to an inferred graph, and infers each as it is added.
#[derive(Debug)]
pub(crate) struct NodeEmitter<'g> {
    pub(crate) graph: &'g mut Graph,
    /// Prefix of the names of added nodes.
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

    /// Adds a node of the standard domain with one output and optional inputs.
    pub(crate) fn emit_some(
        &mut self,
        op: &str,
        inputs: &[Option<ValueId>],
        attrs: &[(&str, Attribute)],
    ) -> Result<ValueId> {
        let outputs = self.emit_many(op, inputs, attrs, 1)?;
        outputs.first().copied().ok_or_else(|| error!(Fail, "{op} has no output"))
    }

    /// Adds a node of the standard domain with this number of outputs.
    pub(crate) fn emit_many(
        &mut self,
        op: &str,
        inputs: &[Option<ValueId>],
        attrs: &[(&str, Attribute)],
        outputs: usize,
    ) -> Result<Vec<ValueId>> {
        self.emit_many_in(("", op), inputs, attrs, outputs)
    }

    /// Creates a node with new output values, without adding it.
    fn node(
        &mut self,
        (domain, op): (&str, &str),
        inputs: &[Option<ValueId>],
        attrs: &[(&str, Attribute)],
        outputs: usize,
    ) -> Result<(Node, Vec<ValueId>)> {
        let spec = Registry::global()?.operator(domain, op)?;
        // Each node adds a value, so the count makes the name unique.
        let name = format!("{}/gradient/{op}_{}", self.name, self.graph.value_count());
        self.graph.new_node(spec, name.into(), inputs, attrs, outputs)
    }

    /// Adds a node of any domain with one output and optional inputs.
    pub(crate) fn emit_in(
        &mut self,
        (domain, op): (&str, &str),
        inputs: &[Option<ValueId>],
        attrs: &[(&str, Attribute)],
    ) -> Result<ValueId> {
        let values = self.emit_many_in((domain, op), inputs, attrs, 1)?;
        values.first().copied().ok_or_else(|| error!(Fail, "{op} has no output"))
    }

    /// Adds a node of any domain with this number of outputs.
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

    /// Adds a control-flow node of the standard domain: one with subgraphs.
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

    /// Adds a node whose output values already exist.
    pub(crate) fn add(&mut self, node: Node) -> Result<()> {
        self.graph.nodes.push(node);
        infer_at(self.graph, self.graph.nodes.len() - 1)
    }

    /// Adds a constant.
    pub(crate) fn constant(&mut self, tensor: Tensor) -> ValueId {
        let name = format!("{}/gradient/constant_{}", self.name, self.graph.value_count());
        self.graph.add_constant(name, tensor)
    }

    /// Adds a scalar constant of this float type.
    pub(crate) fn number(&mut self, value: f64, dtype: DType) -> Result<ValueId> {
        let tensor = match dtype {
            DType::F64 => Tensor::scalar(value)?,
            DType::F32 => Tensor::scalar(value as f32)?,
            // Directly from the double: through `f32` it would be rounded twice.
            DType::F16 => Tensor::scalar(half::f16::from_f64(value))?,
            DType::BF16 => Tensor::scalar(half::bf16::from_f64(value))?,
            other => return Err(error!(NotImplemented, "{} has no gradients", other.name())),
        };
        Ok(self.constant(tensor))
    }

    /// Adds a tensor filled with one number, of the shape and type of `like`.
    pub(crate) fn filled(&mut self, value: f64, like: ValueId) -> Result<ValueId> {
        let number = self.number(value, self.dtype(like)?)?;
        // Through `Shape`, because only the run may know the sizes.
        let shape = self.emit("Shape", &[like], &[])?;
        self.emit("Expand", &[number, shape], &[])
    }

    /// Returns the element type of a value.
    pub(crate) fn dtype(&self, id: ValueId) -> Result<DType> {
        let value = self.graph.value(id);
        value.ty.dtype().ok_or_else(|| error!(NotImplemented, "the type of '{}' is not known", value.name))
    }

    pub(super) fn shape(&self, id: ValueId) -> Result<Vec<Dim>> {
        let value = self.graph.value(id);
        let shape = value.ty.shape().map(<[Dim]>::to_vec);
        shape.ok_or_else(|| error!(NotImplemented, "the rank of '{}' is not known", value.name))
    }

    /// Undoes broadcasting: sums `value` over the axes along which `target` was broadcast, and
    /// returns the sum in the shape of `target`.
    pub(super) fn sum_to(&mut self, value: ValueId, target: ValueId) -> Result<ValueId> {
        let (from, to) = (self.shape(value)?, self.shape(target)?);
        if from == to {
            return Ok(value);
        }
        let rank = from.len();
        ensure!(to.len() <= rank, Fail, "a gradient of rank {rank} for a value of rank {}", to.len());
        // Broadcasting adds leading axes and stretches axes of size 1.
        let lead = rank - to.len();
        let pairs = || from.iter().skip(lead).zip(&to);
        // Only the run knows whether two symbolic sizes agree, so the operator decides then.
        let certain = pairs().all(|(from, to)| from == to || to.as_constant().is_some());
        if !certain {
            let shape = self.emit("Shape", &[target], &[])?;
            return self.emit_in((RUNTIME, "SumTo"), &[Some(value), Some(shape)], &[]);
        }
        let repeated = pairs().enumerate().filter(|(_, (from, to))| from != to && **to == Dim::constant(1));
        let axes: Vec<i64> =
            (0..lead).chain(repeated.map(|(axis, _)| lead + axis)).map(|axis| axis as i64).collect();
        let axes = self.constant(Tensor::from_slice(&[axes.len()], &axes)?);
        // Empty axes would otherwise mean a sum over all of them.
        let keep = [("keepdims", Attribute::Int(1)), ("noop_with_empty_axes", Attribute::Int(1))];
        let sum = self.emit("ReduceSum", &[value, axes], &keep)?;
        self.reshape_like(sum, target)
    }

    pub(super) fn reshape_like(&mut self, value: ValueId, target: ValueId) -> Result<ValueId> {
        if self.shape(value)? == self.shape(target)? {
            return Ok(value);
        }
        let shape = self.emit("Shape", &[target], &[])?;
        // A size of 0 in the shape is a size, not a copy of the input's.
        self.emit("Reshape", &[value, shape], &[("allowzero", Attribute::Int(1))])
    }

    pub(super) fn cast(&mut self, value: ValueId, dtype: DType) -> Result<ValueId> {
        if self.dtype(value)? == dtype {
            return Ok(value);
        }
        self.emit("Cast", &[value], &[("to", Attribute::Int(i64::from(dtype.onnx_code())))])
    }
}
