//! A node under construction, which upgrades and decompositions edit.

use std::sync::Arc;

use super::Registry;
use crate::dtype::DType;
use crate::ir::{Attribute, Attributes, Graph, Node, Subgraph, SymShape, ValueId, ValueIds, ValueType};
use crate::tensor::Tensor;
use crate::{Result, error};

/// A node that is not canonical yet. Helpers emit further nodes in front of it. Finally, either the
/// draft itself becomes a node, or [`Draft::replace`] lets emitted nodes produce its outputs.
#[derive(Debug)]
pub struct Draft<'g> {
    graph: &'g mut Graph,
    /// The node's name.
    pub name: Arc<str>,
    /// The domain of the operator.
    pub domain: String,
    /// The operator's name.
    pub op: String,
    /// The version of the operator's domain that the node was written for.
    pub version: i64,
    /// The inputs.
    pub inputs: ValueIds,
    /// The outputs.
    pub outputs: ValueIds,
    /// The attributes as given, without defaults.
    pub attrs: Vec<(String, Attribute)>,
    /// The subgraphs.
    pub subgraphs: Vec<Subgraph>,
    /// Canonical nodes in front of the draft.
    emitted: Vec<Node>,
    /// Whether emitted nodes produce the outputs.
    replaced: bool,
}

impl<'g> Draft<'g> {
    /// Returns a draft of operator `op` in `graph`.
    pub fn new(graph: &'g mut Graph, name: Arc<str>, (domain, op, version): (&str, &str, i64)) -> Draft<'g> {
        Draft {
            graph,
            name,
            domain: domain.to_string(),
            op: op.to_string(),
            version,
            inputs: ValueIds::new(),
            outputs: ValueIds::new(),
            attrs: Vec::new(),
            subgraphs: Vec::new(),
            emitted: Vec::new(),
            replaced: false,
        }
    }

    /// Returns a draft of a canonical node, to decompose it.
    pub fn of_node(graph: &'g mut Graph, node: Node) -> Draft<'g> {
        Draft {
            graph,
            name: node.name.clone(),
            domain: node.spec.domain.to_string(),
            op: node.spec.name.to_string(),
            version: node.spec.since,
            inputs: node.inputs,
            outputs: node.outputs,
            attrs: node.attrs.iter().map(|(name, value)| (name.to_string(), value.clone())).collect(),
            subgraphs: node.subgraphs,
            emitted: Vec::new(),
            replaced: false,
        }
    }

    /// Returns the graph that the draft belongs to.
    pub(crate) fn graph(&self) -> &Graph {
        self.graph
    }

    /// Returns the values that the emitted nodes compute.
    pub(crate) fn emitted_values(&self) -> Vec<ValueId> {
        self.emitted.iter().flat_map(|node| node.outputs.iter().flatten().copied()).collect()
    }

    /// Returns the input at `index`, or `None` if it is omitted.
    pub fn input(&self, index: usize) -> Option<ValueId> {
        self.inputs.get(index).copied().flatten()
    }

    /// Returns the input at `index`; an error if it is omitted.
    pub fn required(&self, index: usize) -> Result<ValueId> {
        self.input(index).ok_or_else(|| error!(InvalidGraph, "input {index} is missing"))
    }

    /// Returns the type of a value, if known. During upgrades most types are still unknown.
    pub fn value_type(&self, id: ValueId) -> &ValueType {
        &self.graph.value(id).ty
    }

    /// Returns the element type of an input.
    pub fn dtype(&self, index: usize) -> Result<DType> {
        let dtype = self.input(index).and_then(|id| self.value_type(id).dtype());
        dtype.ok_or_else(|| error!(InvalidGraph, "the type of input {index} is not known"))
    }

    /// Returns the shape of an input, if its rank is known.
    pub fn shape(&self, index: usize) -> Option<SymShape> {
        self.input(index).and_then(|id| self.value_type(id).shape().map(<[_]>::to_vec))
    }

    /// Returns the constant behind an input, if it is one.
    pub fn constant_input(&self, index: usize) -> Option<&Tensor> {
        self.input(index).and_then(|id| self.graph.constants.get(&id))
    }

    /// Returns the attribute of this name, as given.
    pub fn attr(&self, name: &str) -> Option<&Attribute> {
        self.attrs.iter().find(|(given, _)| given == name).map(|(_, value)| value)
    }

    /// Removes and returns the attribute of this name.
    pub fn take_attr(&mut self, name: &str) -> Option<Attribute> {
        let index = self.attrs.iter().position(|(given, _)| given == name)?;
        Some(self.attrs.remove(index).1)
    }

    /// Sets an attribute, replacing one of the same name.
    pub fn set_attr(&mut self, name: &str, value: Attribute) {
        self.take_attr(name);
        self.attrs.push((name.to_string(), value));
    }

    /// Adds a constant to the graph.
    pub fn constant(&mut self, tensor: Tensor) -> ValueId {
        // Each constant adds a value, so the count makes the name unique.
        let name = format!("{}.constant_{}", self.name, self.graph.value_count());
        self.graph.add_constant(name, tensor)
    }

    /// Adds a one-dimensional `int64` constant.
    pub fn constant_ints(&mut self, ints: &[i64]) -> Result<ValueId> {
        let tensor = Tensor::from_slice(&[ints.len()], ints)?;
        Ok(self.constant(tensor))
    }

    /// Sets the input at `index`. Missing positions before it become omitted inputs.
    pub fn set_input(&mut self, index: usize, value: ValueId) {
        if self.inputs.len() <= index {
            self.inputs.resize(index + 1, None);
        }
        self.inputs.get_mut(index).into_iter().for_each(|input| *input = Some(value));
    }

    /// Moves an attribute of numbers into a constant input at `index`, as later opsets did for many
    /// operators. Integers become `int64`, floats `float`. A list becomes one-dimensional, a single
    /// number a scalar. Without the attribute nothing changes.
    pub fn attr_to_input(&mut self, name: &str, index: usize) -> Result<()> {
        let tensor = match self.take_attr(name) {
            None => return Ok(()),
            Some(Attribute::Int(value)) => Tensor::scalar(value)?,
            Some(Attribute::Ints(values)) => Tensor::from_slice(&[values.len()], &values)?,
            Some(Attribute::Float(value)) => Tensor::scalar(value)?,
            Some(Attribute::Floats(values)) => Tensor::from_slice(&[values.len()], &values)?,
            Some(_) => return Err(error!(InvalidGraph, "attribute '{name}' has an unexpected kind")),
        };
        let id = self.constant(tensor);
        self.set_input(index, id);
        Ok(())
    }

    /// Emits a node of the standard domain with one output in front of this one.
    pub fn emit(&mut self, op: &str, inputs: &[ValueId], attrs: &[(&str, Attribute)]) -> Result<ValueId> {
        let inputs: Vec<Option<ValueId>> = inputs.iter().copied().map(Some).collect();
        self.emit_one(op, &inputs, attrs)
    }

    /// The same with optional inputs.
    pub fn emit_one(
        &mut self,
        op: &str,
        inputs: &[Option<ValueId>],
        attrs: &[(&str, Attribute)],
    ) -> Result<ValueId> {
        let outputs = self.emit_many(op, inputs, attrs, 1)?;
        outputs.first().copied().ok_or_else(|| error!(Fail, "{op} has no output"))
    }

    /// Emits a node of the standard domain in front of this one, with optional inputs and any
    /// number of outputs.
    pub fn emit_many(
        &mut self,
        op: &str,
        inputs: &[Option<ValueId>],
        attrs: &[(&str, Attribute)],
        outputs: usize,
    ) -> Result<Vec<ValueId>> {
        self.emit_in(("", op), inputs, attrs, outputs)
    }

    /// Emits a node of any domain in front of this one.
    pub fn emit_in(
        &mut self,
        (domain, op): (&str, &str),
        inputs: &[Option<ValueId>],
        attrs: &[(&str, Attribute)],
        outputs: usize,
    ) -> Result<Vec<ValueId>> {
        let spec = Registry::global()?.operator(domain, op)?;
        let name = format!("{}/{op}_{}", self.name, self.emitted.len());
        let (node, values) = self.graph.new_node(spec, name.into(), inputs, attrs, outputs)?;
        self.emitted.push(node);
        Ok(values)
    }

    /// Turns this draft into another operator of the standard domain, with other inputs and
    /// attributes.
    pub fn become_op(&mut self, op: &str, inputs: &[ValueId], attrs: &[(&str, Attribute)]) {
        self.domain = String::new();
        self.op = op.to_string();
        self.inputs = inputs.iter().copied().map(Some).collect();
        self.attrs = attrs.iter().map(|(name, value)| (name.to_string(), value.clone())).collect();
    }

    /// Lets emitted nodes produce the outputs of the draft, which itself disappears. The values are
    /// renamed to the outputs, so each must come from an emitted node.
    pub fn replace(&mut self, values: &[ValueId]) -> Result<()> {
        for (index, output) in self.outputs.clone().into_iter().enumerate() {
            let Some(output) = output else { continue };
            let value = values.get(index).ok_or_else(|| error!(Fail, "output {index} has no replacement"))?;
            let mut slots = self.emitted.iter_mut().flat_map(|node| node.outputs.iter_mut());
            let slot = slots.find(|slot| **slot == Some(*value));
            let slot = slot.ok_or_else(|| error!(Fail, "output {index} is replaced by no emitted value"))?;
            *slot = Some(output);
            // Emitted nodes that read the value follow the rename.
            for node in &mut self.emitted {
                // Emitted nodes have no subgraphs, so no capture reads the value.
                for input in &mut node.inputs {
                    if *input == Some(*value) {
                        *input = Some(output);
                    }
                }
            }
        }
        self.replaced = true;
        Ok(())
    }

    /// Returns the canonical nodes, in order.
    pub fn finish(mut self) -> Result<Vec<Node>> {
        // The emitted nodes write the outputs, so the draft's own operator and attributes do not
        // matter.
        if self.replaced {
            return Ok(self.emitted);
        }
        let spec = Registry::global()?.operator(&self.domain, &self.op)?;
        let attrs = Attributes::new(spec, self.attrs)?;
        self.emitted.push(Node {
            name: self.name,
            spec,
            inputs: self.inputs,
            outputs: self.outputs,
            attrs,
            subgraphs: self.subgraphs,
        });
        Ok(self.emitted)
    }
}
