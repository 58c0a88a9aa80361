//! `Imputer`: replaces a placeholder for missing values.

use super::{NUMBERS, check_feature_list, same_shape};
use crate::dtype::DType;
use crate::ops;
use crate::spec::{AttrKind, InferCx, ONNX_ML, OP, OpSpec, attr, one, var};
use crate::{Result, ensure};

static IMPUTER: OpSpec = OpSpec {
    domain: ONNX_ML,
    name: "Imputer",
    inputs: &[one("X", "T")],
    outputs: &[one("Y", "T")],
    types: &[var("T", NUMBERS)],
    attrs: &[
        attr::int("replaced_value_int64", 0),
        attr::optional("imputed_value_int64s", AttrKind::Ints),
        attr::float("replaced_value_float", 0.0),
        attr::optional("imputed_value_floats", AttrKind::Floats),
    ],
    infer,
    ..OP
};

ops![IMPUTER];

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    if let Ok(dtype) = cx.dtype(0) {
        // The input's type selects one of the two pairs of attributes.
        let (name, given) = if dtype.is_float() {
            ("imputed_value_floats", cx.attrs.find_floats("imputed_value_floats").map_or(0, <[f32]>::len))
        } else {
            ("imputed_value_int64s", cx.attrs.find_ints("imputed_value_int64s").map_or(0, <[i64]>::len))
        };
        ensure!(given > 0, InvalidGraph, "an Imputer of {} needs '{name}'", DType::name(dtype));
        check_feature_list(cx, name, given)?;
    }
    same_shape(cx)
}
