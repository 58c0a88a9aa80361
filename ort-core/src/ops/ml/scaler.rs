//! `Scaler`: shifts and scales each feature.

use super::{NUMBERS, check_feature_list, same_shape};
use crate::Result;
use crate::ops;
use crate::spec::{AttrKind, InferCx, ONNX_ML, OP, OpSpec, attr, one, var};

static SCALER: OpSpec = OpSpec {
    domain: ONNX_ML,
    name: "Scaler",
    since: 1,
    inputs: &[one("X", "T")],
    outputs: &[one("Y", "tensor(float)")],
    types: &[var("T", NUMBERS)],
    attrs: &[attr::optional("offset", AttrKind::Floats), attr::optional("scale", AttrKind::Floats)],
    infer,
    ..OP
};

ops![SCALER];

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    for name in ["offset", "scale"] {
        // An omitted list has length 1 here, which always fits.
        check_feature_list(cx, name, cx.attrs.find_floats(name).map_or(1, <[f32]>::len))?;
    }
    same_shape(cx)
}
