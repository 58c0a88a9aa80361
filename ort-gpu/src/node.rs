//! A compiled node: its operator, attributes and types, and the contexts that its kernel gets.

use ort_core::dtype::DType;
use ort_core::ep::{IoShapes, KernelDef, KernelTable, NodeView};
use ort_core::ir::Attributes;
use ort_core::spec::OpSpec;
use ort_core::tensor::Shape;
use ort_core::{Result, error};
use smallvec::SmallVec;

use crate::bound::BoundTensors;
use crate::operand::{Arg, OpCx, Operand};

/// What a compiled node keeps of its graph's node.
pub struct NodeInfo {
    /// The operator.
    pub op: &'static str,
    /// The operator's record.
    pub spec: &'static OpSpec,
    /// The attributes.
    pub attrs: Attributes,
    /// The element types of the inputs; `None` for an absent one.
    pub input_types: SmallVec<[Option<DType>; 8]>,
    /// The element types of the outputs; `None` for an absent one.
    pub output_types: SmallVec<[Option<DType>; 4]>,
}

impl NodeInfo {
    /// Copies what the node keeps.
    pub fn new(view: &NodeView<'_>) -> NodeInfo {
        let node = view.node;
        NodeInfo {
            op: node.spec.name,
            spec: node.spec,
            attrs: node.attrs.clone(),
            input_types: (0..node.inputs.len()).map(|index| view.dtype(index)).collect(),
            output_types: (0..node.outputs.len()).map(|index| view.output_dtype(index)).collect(),
        }
    }

    /// Returns the context for planning: shapes without memory. Host inputs have no values, because
    /// the plan reserves the workspace before a run.
    pub fn planned<L>(&self, shapes: &IoShapes<'_>, limits: L) -> OpCx<'_, L> {
        // An operand without a known shape is left out, as an absent one.
        let operand = |arg, dtype: &Option<DType>, shape: &Option<Shape>| {
            Some(Operand { arg, dtype: (*dtype)?, shape: shape.clone()? })
        };
        let inputs = self.input_types.iter().zip(shapes.inputs).enumerate();
        let outputs = self.output_types.iter().zip(shapes.outputs).enumerate();
        OpCx {
            op: self.op,
            spec: self.spec,
            attrs: &self.attrs,
            limits,
            inputs: inputs.map(|(index, (ty, shape))| operand(Arg::Input(index), ty, shape)).collect(),
            outputs: outputs.map(|(index, (ty, shape))| operand(Arg::Output(index), ty, shape)).collect(),
            host: SmallVec::new(),
        }
    }

    /// Returns the context for the tensors bound in a run.
    pub fn bound<'a, L>(&'a self, given: &'a BoundTensors<'_>, limits: L) -> OpCx<'a, L> {
        OpCx {
            op: self.op,
            spec: self.spec,
            attrs: &self.attrs,
            limits,
            inputs: given.inputs.clone(),
            outputs: given.outputs.clone(),
            host: given.host.iter().copied().collect(),
        }
    }
}

/// Returns the kernel that runs a node: the one of `kernels` whose definition `table` selects.
///
/// # Errors
///
/// No kernel covers the node.
pub fn find_kernel<K: 'static>(
    table: &KernelTable,
    node: &NodeView<'_>,
    mut kernels: impl Iterator<Item = &'static K>,
    def_of: fn(&K) -> &KernelDef,
) -> Result<&'static K> {
    let def = table.find(node).map_err(|reason| error!(NotImplemented, "{reason}"))?;
    // The table refers to the registered definitions, so identity finds the kernel.
    let kernel = kernels.find(|kernel| std::ptr::eq(def_of(kernel), def));
    kernel.ok_or_else(|| error!(Fail, "operator {} has no kernel", def.op))
}
