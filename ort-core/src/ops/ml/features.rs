//! Feature selection and thresholds: `ArrayFeatureExtractor` and `Binarizer`.

use super::{NUMBERS, same_shape};
use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ops;
use crate::spec::{InferCx, ONNX_ML, OP, OpSpec, attr, one, var};
use crate::{Result, error};

static ARRAY_FEATURE_EXTRACTOR: OpSpec = OpSpec {
    domain: ONNX_ML,
    name: "ArrayFeatureExtractor",
    since: 1,
    inputs: &[one("X", "T"), one("Y", "tensor(int64)")],
    outputs: &[one("Z", "T")],
    types: &[var("T", NUMBERS.union(TypeSet::of(&[DType::String])))],
    infer: extract,
    ..OP
};

static BINARIZER: OpSpec = OpSpec {
    domain: ONNX_ML,
    name: "Binarizer",
    since: 1,
    inputs: &[one("X", "T")],
    outputs: &[one("Y", "T")],
    types: &[var("T", NUMBERS)],
    attrs: &[attr::float("threshold", 0.0)],
    infer: same_shape,
    ..OP
};

ops![ARRAY_FEATURE_EXTRACTOR, BINARIZER];

fn extract(cx: &mut InferCx<'_>) -> Result<()> {
    let (Some(shape), Some(indices)) = (cx.shape(0), cx.shape(1)) else { return Ok(()) };
    let Some((_, rows)) = shape.split_last() else {
        return Err(error!(InvalidGraph, "ArrayFeatureExtractor needs rank 1 or more, got rank 0"));
    };
    // A vector counts as a matrix of one row.
    let mut picked = if rows.is_empty() { vec![Dim::constant(1)] } else { rows.to_vec() };
    // Indices of any rank pick along the last axis and are flattened.
    picked.push(indices.iter().product());
    cx.set_shape(0, picked)
}
