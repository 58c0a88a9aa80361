//! `LabelEncoder`: each element replaced by the value of its key.

use crate::dtype::{DType, TypeSet};
use crate::ops;
use crate::spec::{AttrKind, InferCx, ONNX_ML, OP, OpSpec, attr, one, var};
use crate::{Result, error};

const LABELS: TypeSet =
    TypeSet::of(&[DType::String, DType::I64, DType::F32, DType::I32, DType::I16, DType::F64]);

static LABEL_ENCODER: OpSpec = OpSpec {
    domain: ONNX_ML,
    name: "LabelEncoder",
    since: 4,
    inputs: &[one("X", "T1")],
    outputs: &[one("Y", "T2")],
    types: &[var("T1", LABELS), var("T2", LABELS)],
    attrs: &[
        attr::optional("default_tensor", AttrKind::Tensor),
        attr::int("default_int64", -1),
        attr::float("default_float", -0.0),
        attr::string("default_string", "_Unused"),
        attr::optional("values_int64s", AttrKind::Ints),
        attr::optional("values_strings", AttrKind::Strings),
        attr::optional("values_tensor", AttrKind::Tensor),
        attr::optional("keys_floats", AttrKind::Floats),
        attr::optional("keys_strings", AttrKind::Strings),
        attr::optional("values_floats", AttrKind::Floats),
        attr::optional("keys_int64s", AttrKind::Ints),
        attr::optional("keys_tensor", AttrKind::Tensor),
    ],
    infer,
    ..OP
};

ops![LABEL_ENCODER];

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let attrs = cx.attrs;
    let dtype = attrs
        .find_tensor("values_tensor")
        .map(|tensor| tensor.dtype())
        .or_else(|| attrs.find_ints("values_int64s").map(|_| DType::I64))
        .or_else(|| attrs.find_floats("values_floats").map(|_| DType::F32))
        .or_else(|| attrs.find_strings("values_strings").map(|_| DType::String));
    let dtype = dtype.ok_or_else(|| error!(InvalidGraph, "LabelEncoder has no values"))?;
    let shape = cx.shape(0).map(<[_]>::to_vec);
    cx.set(0, dtype, shape);
    Ok(())
}
