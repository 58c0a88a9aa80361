//! A read-only view of a node for providers: canonical operator, inferred types and shapes.

use crate::dim::Dim;
use crate::dtype::DType;
use crate::ir::{Attributes, Graph, Node, SymShape, ValueId, ValueType};
use crate::spec::bind_types;
use crate::tensor::Tensor;

/// A node of a graph after type and shape inference.
#[derive(Clone, Copy, Debug)]
pub struct NodeView<'a> {
    /// The graph that owns the node.
    pub graph: &'a Graph,
    /// The node.
    pub node: &'a Node,
}

impl<'a> NodeView<'a> {
    /// The node's attributes.
    pub fn attrs(&self) -> &'a Attributes {
        &self.node.attrs
    }

    /// The value at input `index`, or `None` if it is left out.
    pub fn input(&self, index: usize) -> Option<ValueId> {
        self.node.inputs.get(index).copied().flatten()
    }

    /// The type of an input; unknown if it is left out.
    pub fn input_type(&self, index: usize) -> ValueType {
        self.input(index).map_or(ValueType::Unknown, |id| self.graph.value(id).ty.clone())
    }

    /// The type of an output; unknown if it is left out.
    pub fn output_type(&self, index: usize) -> ValueType {
        self.output(index).map_or(ValueType::Unknown, |id| self.graph.value(id).ty.clone())
    }

    fn output(&self, index: usize) -> Option<ValueId> {
        self.node.outputs.get(index).copied().flatten()
    }

    /// The element type of an input.
    pub fn dtype(&self, index: usize) -> Option<DType> {
        self.input(index).and_then(|id| self.graph.value(id).ty.dtype())
    }

    /// The element type of an output.
    pub fn output_dtype(&self, index: usize) -> Option<DType> {
        self.output(index).and_then(|id| self.graph.value(id).ty.dtype())
    }

    /// The symbolic shape of an input, if its rank is known.
    pub fn shape(&self, index: usize) -> Option<SymShape> {
        self.input(index).and_then(|id| self.graph.value(id).ty.shape().map(<[Dim]>::to_vec))
    }

    /// The shape of an input, if every dimension is a constant.
    pub fn fixed_shape(&self, index: usize) -> Option<Vec<usize>> {
        let sizes = self.shape(index)?;
        sizes.iter().map(|size| size.as_constant().and_then(|s| usize::try_from(s).ok())).collect()
    }

    /// The rank of an input, if known.
    pub fn rank(&self, index: usize) -> Option<usize> {
        self.input(index).and_then(|id| self.graph.value(id).ty.shape().map(<[Dim]>::len))
    }

    /// The constant behind an input, if it is one.
    pub fn constant(&self, index: usize) -> Option<&'a Tensor> {
        self.input(index).and_then(|id| self.graph.constants.get(&id))
    }

    /// The element type bound to a type variable (or a fixed type) of the operator at this node.
    pub fn bound_dtype(&self, var: &str) -> Option<DType> {
        static UNKNOWN: ValueType = ValueType::Unknown;
        let type_of = |index| self.input(index).map_or(&UNKNOWN, |id| &self.graph.value(id).ty);
        let bound = bind_types(self.node.spec, self.node, type_of).ok()?;
        let from_inputs = bound.iter().find(|(name, _)| *name == var).and_then(|(_, ty)| ty.dtype());
        // A variable that no input binds may still be that of an output, such as the target of a
        // cast.
        from_inputs.or_else(|| {
            let index = self.node.spec.outputs.iter().position(|param| param.ty == var)?;
            self.output_dtype(index)
        })
    }
}
