//! Nodes of custom operators: the choice among overloads, inference, claims and kernels.

use std::sync::Arc;

use super::CustomOperator;
use super::record::pairs;
use crate::dtype::DType;
use crate::ep::{Claim, Device, Executable, NodeView, OutputsFrom, OwnKernels};
use crate::ir::ValueType;
use crate::spec::{Arity, InferCx};
use crate::{Result, error};

/// The operators that a node may stand for: the first one whose types fit.
pub(super) struct CustomNode {
    /// In the order in which they were given.
    pub(super) overloads: Vec<Arc<dyn CustomOperator>>,
}

impl CustomNode {
    /// Returns the overloads that take inputs of these types. An unknown type fits all.
    fn fitting(
        &self,
        inputs: usize,
        dtype: impl Fn(usize) -> Option<DType>,
    ) -> impl Iterator<Item = &dyn CustomOperator> {
        let fits = move |operator: &&dyn CustomOperator| {
            let params = &operator.schema().inputs;
            let param = |index: usize| params.get(index).or(params.last());
            (0..inputs).all(|index| match (param(index), dtype(index)) {
                (Some(param), Some(dtype)) => param.types.contains(dtype),
                _ => true,
            })
        };
        self.overloads.iter().map(|operator| &**operator).filter(fits)
    }

    /// Returns the overload for a provider.
    fn of_provider(&self, provider: &str, node: &NodeView<'_>) -> Result<&dyn CustomOperator, String> {
        let mut fitting = self.fitting(node.node.inputs.len(), |index| node.dtype(index));
        let first = fitting.next().ok_or_else(|| {
            let dtypes = (0..node.node.inputs.len()).map(|index| node.dtype(index));
            let dtypes: Vec<&str> = dtypes.map(|dtype| dtype.map_or("none", DType::name)).collect();
            format!("no custom operator of that name takes ({})", dtypes.join(", "))
        })?;
        std::iter::once(first)
            .chain(fitting)
            .find(|operator| operator.schema().provider == provider)
            .ok_or_else(|| format!("the custom operator has no kernel for {provider}"))
    }
}

impl OwnKernels for CustomNode {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<()> {
        let dtypes: Vec<Option<DType>> =
            (0..cx.input_count()).map(|index| cx.input_type(index).and_then(ValueType::dtype)).collect();
        let operator = self.fitting(dtypes.len(), |index| dtypes.get(index).copied().flatten()).next();
        // The device refuses the node, with its types.
        let Some(operator) = operator else { return Ok(()) };
        operator.infer(cx)?;
        for index in 0..cx.output_count() {
            let known = dtype_of_output(operator, index, &dtypes);
            if let (Some(dtype), true) = (known, cx.is_open(index)) {
                cx.set(index, dtype, None);
            }
        }
        Ok(())
    }

    fn claim(&self, device: &dyn Device, node: &NodeView<'_>) -> Result<Claim, String> {
        let provider = device.info().provider;
        if device.memory() != ort_alloc::DeviceId::HOST {
            return Err(format!("custom operators work on host memory, {provider} does not"));
        }
        let schema = self.of_provider(provider, node)?.schema();
        let is_exact = schema.has_exact_shapes && has_shapes(node);
        // The kernel sees shared memory with the output's type, so the input must have the same.
        let of_one_type = |(input, output): &(usize, usize)| node.dtype(*input) == node.output_dtype(*output);
        let in_place: Vec<(usize, usize)> = match is_exact {
            true => schema.in_place.iter().filter(|pair| of_one_type(pair)).copied().collect(),
            false => Vec::new(),
        };
        Ok(Claim {
            in_place: pairs(&in_place),
            shared_buffers: &[],
            host_inputs: &[],
            unaligned: &[],
            left_out: &[],
            outputs: if is_exact { OutputsFrom::Plan } else { OutputsFrom::Kernel },
        })
    }

    fn kernel(&self, device: &dyn Device, node: &NodeView<'_>) -> Result<Box<dyn Executable>> {
        let operator = self.of_provider(device.info().provider, node);
        operator.map_err(|reason| error!(NotImplemented, "{reason}"))?.kernel(node)
    }
}

/// Whether inference knows the ranks of all outputs. Strings are allocated by the kernel.
fn has_shapes(node: &NodeView<'_>) -> bool {
    let planned = |id: &crate::ir::ValueId| match &node.graph.value(*id).ty {
        ValueType::Tensor(tensor) => tensor.dtype != DType::String && tensor.shape.is_some(),
        _ => false,
    };
    node.node.outputs.iter().flatten().all(planned)
}

/// The element type of an output: the only one it has, or that of its type variable.
fn dtype_of_output(operator: &dyn CustomOperator, index: usize, inputs: &[Option<DType>]) -> Option<DType> {
    let schema = operator.schema();
    let param = schema.outputs.get(index).or(schema.outputs.last())?;
    if let (Some(only), 1) = (param.types.iter().next(), param.types.len()) {
        return Some(only);
    }
    let binds = |input: &&super::CustomParam| {
        input.variable == param.variable && !matches!(input.arity, Arity::Variadic { homogeneous: false, .. })
    };
    let position = schema.inputs.iter().position(|input| binds(&input))?;
    inputs.get(position).copied().flatten()
}
