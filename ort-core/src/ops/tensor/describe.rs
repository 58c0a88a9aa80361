//! `Shape` and `Size`: the dimensions of a tensor, and the number of its elements.

use crate::Result;

use super::geometry::shape_range;
use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ops;
use crate::spec::{AttrKind, Cost, InferCx, OP, OpSpec, SymTensor, TypeVar, attr, one, var};

const TYPES: &[TypeVar] = &[var("T", TypeSet::ALL_TENSOR_IR13), var("T1", TypeSet::of(&[DType::I64]))];

static SHAPE: OpSpec = OpSpec {
    name: "Shape",
    since: 25,
    inputs: &[one("data", "T")],
    outputs: &[one("shape", "T1")],
    types: TYPES,
    attrs: &[attr::optional("end", AttrKind::Int), attr::int("start", 0)],
    cost: Cost::Free,
    infer: infer_shape,
    ..OP
};

static SIZE: OpSpec = OpSpec {
    name: "Size",
    since: 25,
    inputs: &[one("data", "T")],
    outputs: &[one("size", "T1")],
    types: TYPES,
    cost: Cost::Free,
    infer: infer_size,
    ..OP
};

ops![SHAPE, SIZE];

fn infer_shape(cx: &mut InferCx<'_>) -> Result<()> {
    let Some(shape) = cx.shape(0) else {
        // Without a rank, the length of the list of sizes is unknown as well.
        let rank = cx.fresh();
        return cx.set_shape(0, vec![rank]);
    };
    let range = shape_range(cx.attrs.int("start")?, cx.attrs.find_int("end"), shape.len());
    let sizes = shape.get(range).unwrap_or(&[]).to_vec();
    cx.set_shape(0, vec![Dim::constant(sizes.len() as i64)])?;
    // Later nodes compute shapes from these elements, so inference propagates them.
    cx.set_symbolic(0, SymTensor::vector(sizes));
    Ok(())
}

fn infer_size(cx: &mut InferCx<'_>) -> Result<()> {
    cx.set_shape(0, Vec::new())?;
    if let Some(shape) = cx.shape(0) {
        cx.set_symbolic(0, SymTensor::scalar(shape.iter().product()));
    }
    Ok(())
}
