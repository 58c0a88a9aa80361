//! Prefix sums and products along an axis: `CumSum` and `CumProd`.

use super::gradients;
use crate::Result;
use crate::dtype::{DType, TypeSet};
use crate::ops;
use crate::ops::axes;
use crate::ops::batch;
use crate::ops::tensor::index_gradients;
use crate::spec::{BatchRule, Grad, InferCx, OP, OpSpec, attr, one, var};

const CUMULATIVE: OpSpec = OpSpec {
    inputs: &[one("x", "T"), one("axis", "T2")],
    outputs: &[one("y", "T")],
    types: &[var("T", TypeSet::HIGH_PRECISION), var("T2", TypeSet::of(&[DType::I32, DType::I64]))],
    attrs: &[attr::int("exclusive", 0), attr::int("reverse", 0)],
    infer,
    batch: BatchRule::Rule(batch::cumulative),
    ..OP
};

static CUM_SUM: OpSpec = OpSpec {
    name: "CumSum",
    first: 11,
    since: 14,
    grad: Grad::Rule(gradients::of_running_sum),
    ..CUMULATIVE
};
static CUM_PROD: OpSpec = OpSpec {
    name: "CumProd",
    grad: Grad::Parts(index_gradients::running_product),
    first: 26,
    since: 26,
    ..CUMULATIVE
};

ops![CUM_SUM, CUM_PROD];

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let Some(shape) = cx.shape(0) else { return Ok(()) };
    if let Some(&[axis]) = cx.ints(1).as_deref() {
        // A scalar counts as one element along one axis.
        axes::normalize(axis, shape.len().max(1))?;
    }
    cx.set_shape(0, shape.to_vec())
}
