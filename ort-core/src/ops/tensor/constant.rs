//! Constant tensors: `Constant` and `ConstantOfShape`.
//!
//! The loader turns `Constant` nodes into constants of the graph, so no provider has a kernel for
//! them.

use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ops;
use crate::ops::batch;
use crate::spec::{AttrKind, BatchRule, Cost, InferCx, OP, OpSpec, SymTensor, attr, one, var};
use crate::tensor::Tensor;
use crate::{Result, ensure, error};

static CONSTANT: OpSpec = OpSpec {
    name: "Constant",
    since: 25,
    outputs: &[one("output", "T")],
    types: &[var("T", TypeSet::ALL_TENSOR_IR13)],
    attrs: &[
        attr::optional("value", AttrKind::Tensor),
        attr::optional("sparse_value", AttrKind::Sparse),
        attr::optional("value_int", AttrKind::Int),
        attr::optional("value_ints", AttrKind::Ints),
        attr::optional("value_float", AttrKind::Float),
        attr::optional("value_floats", AttrKind::Floats),
        attr::optional("value_string", AttrKind::String),
        attr::optional("value_strings", AttrKind::Strings),
    ],
    cost: Cost::Free,
    infer: infer_constant,
    ..OP
};

static CONSTANT_OF_SHAPE: OpSpec = OpSpec {
    name: "ConstantOfShape",
    since: 25,
    first: 9,
    inputs: &[one("input", "T1").host()],
    outputs: &[one("output", "T2")],
    types: &[
        var("T1", TypeSet::of(&[DType::I64])),
        var("T2", TypeSet::ALL_TENSOR_IR13.difference(TypeSet::COMPLEX).difference(STRING)),
    ],
    attrs: &[attr::optional("value", AttrKind::Tensor)],
    infer: infer_constant_of_shape,
    batch: BatchRule::Rule(batch::constant_of_shape),
    ..OP
};

const STRING: TypeSet = TypeSet::of(&[DType::String]);

ops![CONSTANT, CONSTANT_OF_SHAPE];

fn infer_constant(cx: &mut InferCx<'_>) -> Result<()> {
    let attrs = cx.attrs;
    let list = |count: usize| vec![Dim::constant(count as i64)];
    let sizes = |shape: &[usize]| shape.iter().map(|&size| Dim::constant(size as i64)).collect();
    let found = [
        attrs.find_tensor("value").map(|tensor| (tensor.dtype(), sizes(tensor.shape()))),
        attrs.get("sparse_value").and_then(|value| match value {
            crate::ir::Attribute::Sparse(sparse) => Some((sparse.values.dtype(), sizes(&sparse.shape))),
            _ => None,
        }),
        attrs.find_int("value_int").map(|_| (DType::I64, Vec::new())),
        attrs.find_ints("value_ints").map(|values| (DType::I64, list(values.len()))),
        attrs.find_float("value_float").map(|_| (DType::F32, Vec::new())),
        attrs.find_floats("value_floats").map(|values| (DType::F32, list(values.len()))),
        attrs.find_string("value_string").map(|_| (DType::String, Vec::new())),
        attrs.find_strings("value_strings").map(|values| (DType::String, list(values.len()))),
    ];
    let mut given = found.into_iter().flatten();
    // Exactly one of the attributes must be given.
    let (dtype, shape) = given.next().ok_or_else(|| error!(InvalidGraph, "Constant has no value"))?;
    ensure!(given.next().is_none(), InvalidGraph, "Constant has two values, expected one");
    cx.set(0, dtype, Some(shape));
    if let Some(symbolic) = attrs.find_tensor("value").and_then(|tensor| SymTensor::from_view(&tensor.view()))
    {
        cx.set_symbolic(0, symbolic);
    }
    Ok(())
}

fn infer_constant_of_shape(cx: &mut InferCx<'_>) -> Result<()> {
    let value = cx.attrs.find_tensor("value");
    // The default value is a float zero.
    let one_element = value.is_none_or(|value| value.element_count() == 1);
    ensure!(one_element, InvalidGraph, "the value of ConstantOfShape must be one element");
    let dtype = value.map_or(DType::F32, Tensor::dtype);
    let shape = match (cx.dims(0), cx.shape(0)) {
        (Some(dims), _) => Some(dims),
        (None, Some([length])) => fresh_dims(cx, length),
        _ => None,
    };
    if let Some(sizes) = shape.as_deref().and_then(super::constant_sizes)
        && let Some(value) = value
        && SymTensor::follows(dtype, SymTensor::extent(&sizes))
    {
        let element = value.view().to_ints()?.first().copied().unwrap_or(0);
        let count = crate::tensor::element_count(&sizes)?;
        cx.set_symbolic(0, SymTensor::new(&sizes, vec![Dim::constant(element); count])?);
    }
    cx.set(0, dtype, shape);
    Ok(())
}

/// Returns one fresh symbolic dimension per element of a list, if its length is a constant.
pub(super) fn fresh_dims(cx: &InferCx<'_>, length: &Dim) -> Option<Vec<Dim>> {
    // The bound keeps a hostile length from allocating a symbol for each element.
    let rank = length.as_constant().filter(|rank| (0..=64).contains(rank))?;
    Some((0..rank).map(|_| cx.fresh()).collect())
}
