//! `CDist`: pairwise distances between the rows of two matrices.

use super::agree;
use crate::dtype::{DType, TypeSet};
use crate::ops;
use crate::spec::{Cost, Grad, InferCx, MICROSOFT, OP, OpSpec, attr, one, var};
use crate::{Result, error, unknown_name};

static CDIST: OpSpec = OpSpec {
    domain: MICROSOFT,
    name: "CDist",
    inputs: &[one("A", "T"), one("B", "T")],
    outputs: &[one("C", "T")],
    types: &[var("T", TypeSet::of(&[DType::F32, DType::F64]))],
    attrs: &[attr::string("metric", "sqeuclidean")],
    cost: Cost::Compute,
    grad: Grad::None("it is not written as other operators; Sub, Mul and ReduceSum have gradients"),
    infer,
    ..OP
};

ops![CDIST];

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let metric = cx.attrs.string("metric")?;
    let metrics = ["euclidean", "sqeuclidean"];
    if !metrics.contains(&metric) {
        return Err(unknown_name("metric", metric, &metrics));
    }
    let (Some(a), Some(b)) = (cx.shape(0), cx.shape(1)) else { return Ok(()) };
    let ([rows, width], [columns, other]) = (a, b) else {
        return Err(error!(InvalidGraph, "CDist takes matrices, got ranks {} and {}", a.len(), b.len()));
    };
    agree("the width of B", width, other)?;
    cx.set_shape(0, vec![rows.clone(), columns.clone()])
}
