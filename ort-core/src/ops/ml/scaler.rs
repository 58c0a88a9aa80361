//! `Scaler`: shifts and scales each feature.

use crate::dtype::{DType, TypeSet};
use crate::ops;
use crate::spec::{AttrKind, InferCx, ONNX_ML, OP, OpSpec, attr, one, var};
use crate::{Result, ensure};

static SCALER: OpSpec = OpSpec {
    domain: ONNX_ML,
    name: "Scaler",
    since: 1,
    inputs: &[one("X", "T")],
    outputs: &[one("Y", "tensor(float)")],
    types: &[var("T", TypeSet::of(&[DType::F32, DType::F64, DType::I64, DType::I32]))],
    attrs: &[attr::optional("offset", AttrKind::Floats), attr::optional("scale", AttrKind::Floats)],
    infer,
    ..OP
};

ops![SCALER];

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let Some(shape) = cx.shape(0) else { return Ok(()) };
    let features = shape.last().and_then(|size| size.as_constant());
    for name in ["offset", "scale"] {
        let given = cx.attrs.find_floats(name).map_or(1, <[f32]>::len);
        let fits = given == 1 || features.is_none_or(|features| usize::try_from(features) == Ok(given));
        ensure!(fits, InvalidGraph, "attribute '{name}' has {given} elements for inputs of shape {shape:?}");
    }
    cx.set_shape(0, shape.to_vec())
}
