//! Categorical features: `CategoryMapper` and `OneHotEncoder`.

use super::{LABELS, NUMBERS};
use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ops;
use crate::spec::{AttrKind, InferCx, ONNX_ML, OP, OpSpec, attr, one, var};
use crate::{Result, ensure, error};

static CATEGORY_MAPPER: OpSpec = OpSpec {
    domain: ONNX_ML,
    name: "CategoryMapper",
    inputs: &[one("X", "T1")],
    outputs: &[one("Y", "T2")],
    types: &[var("T1", LABELS), var("T2", LABELS)],
    attrs: &[
        attr::int("default_int64", -1),
        attr::string("default_string", "_Unused"),
        attr::optional("cats_int64s", AttrKind::Ints),
        attr::optional("cats_strings", AttrKind::Strings),
    ],
    infer: infer_mapper,
    ..OP
};

static ONE_HOT_ENCODER: OpSpec = OpSpec {
    domain: ONNX_ML,
    name: "OneHotEncoder",
    inputs: &[one("X", "T")],
    outputs: &[one("Y", "tensor(float)")],
    types: &[var("T", NUMBERS.union(TypeSet::of(&[DType::String])))],
    attrs: &[
        attr::int("zeros", 1),
        attr::optional("cats_strings", AttrKind::Strings),
        attr::optional("cats_int64s", AttrKind::Ints),
    ],
    infer: infer_one_hot,
    ..OP
};

ops![CATEGORY_MAPPER, ONE_HOT_ENCODER];

fn infer_mapper(cx: &mut InferCx<'_>) -> Result<()> {
    let ints = cx.attrs.find_ints("cats_int64s").map_or(0, <[i64]>::len);
    let strings = cx.attrs.find_strings("cats_strings").map_or(0, <[String]>::len);
    ensure!(
        ints == strings,
        InvalidGraph,
        "'cats_int64s' has {ints} elements and 'cats_strings' has {strings}; each category is one of both"
    );
    let Ok(from) = cx.dtype(0) else { return Ok(()) };
    // The mapper runs in either direction; the input's type selects it.
    let to = if from == DType::String { DType::I64 } else { DType::String };
    let shape = cx.shape(0).map(<[_]>::to_vec);
    cx.set(0, to, shape);
    Ok(())
}

fn infer_one_hot(cx: &mut InferCx<'_>) -> Result<()> {
    let strings = cx.attrs.find_strings("cats_strings").map_or(0, <[String]>::len);
    let ints = cx.attrs.find_ints("cats_int64s").map_or(0, <[i64]>::len);
    let categories = match (strings, ints) {
        (0, 0) => return Err(error!(InvalidGraph, "OneHotEncoder has no categories")),
        (strings, 0) => strings,
        (0, ints) => ints,
        _ => return Err(error!(InvalidGraph, "OneHotEncoder has categories of integers and of strings")),
    };
    if let Ok(dtype) = cx.dtype(0) {
        let fits = (dtype == DType::String) == (strings > 0);
        ensure!(fits, InvalidGraph, "the categories are not of the input's type {}", dtype.name());
    }
    let Some(shape) = cx.shape(0) else { return Ok(()) };
    let mut shape = shape.to_vec();
    shape.push(Dim::constant(categories as i64));
    cx.set_shape(0, shape)
}
