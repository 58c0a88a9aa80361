//! `EyeLike`: a matrix with ones on a diagonal.

use crate::dtype::{DType, TypeSet};
use crate::ops;
use crate::spec::{AttrKind, Grad, InferCx, OP, OpSpec, attr, one, var};
use crate::{Result, ensure, error};

const TYPES: TypeSet = TypeSet::NUMERIC.union(TypeSet::of(&[DType::Bool]));

static EYE_LIKE: OpSpec = OpSpec {
    name: "EyeLike",
    grad: Grad::Zero("only the shape of its input counts"),
    since: 22,
    first: 9,
    inputs: &[one("input", "T1")],
    outputs: &[one("output", "T2")],
    types: &[var("T1", TYPES), var("T2", TYPES)],
    attrs: &[attr::optional("dtype", AttrKind::Int), attr::int("k", 0)],
    infer,
    ..OP
};

ops![EYE_LIKE];

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let dtype = match cx.attrs.find_int("dtype") {
        Some(code) => {
            i32::try_from(code).ok().and_then(DType::from_onnx).filter(|&dtype| TYPES.contains(dtype))
        }
        None => Some(cx.dtype(0)?),
    };
    let dtype =
        dtype.ok_or_else(|| error!(InvalidGraph, "attribute 'dtype' names no type that is allowed"))?;
    let shape = cx.shape(0).map(<[_]>::to_vec);
    let is_matrix = shape.as_ref().is_none_or(|shape| shape.len() == 2);
    ensure!(is_matrix, InvalidGraph, "EyeLike needs a matrix, got {shape:?}");
    cx.set(0, dtype, shape);
    Ok(())
}
