//! `ArgMax` and `ArgMin`: the index of the extreme element along an axis.

use crate::Result;
use crate::dtype::TypeSet;
use crate::ops;
use crate::ops::axes;
use crate::ops::batch;
use crate::spec::{BatchRule, InferCx, OP, OpSpec, attr, one, var};

const ARG: OpSpec = OpSpec {
    since: 13,
    inputs: &[one("data", "T")],
    outputs: &[one("reduced", "tensor(int64)")],
    types: &[var("T", TypeSet::NUMERIC)],
    attrs: &[attr::int("axis", 0), attr::int("keepdims", 1), attr::int("select_last_index", 0)],
    infer,
    batch: BatchRule::Rule(batch::arg),
    ..OP
};

static ARG_MAX: OpSpec = OpSpec { name: "ArgMax", ..ARG };
static ARG_MIN: OpSpec = OpSpec { name: "ArgMin", ..ARG };

ops![ARG_MAX, ARG_MIN];

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let Some(shape) = cx.shape(0) else { return Ok(()) };
    // A scalar has no axis to check: its index is 0.
    let mask = match shape.len() {
        0 => Vec::new(),
        rank => axes::mask(&[cx.attrs.int("axis")?], rank)?,
    };
    let keep = cx.attrs.flag("keepdims")?;
    cx.set_shape(0, axes::without(&shape.to_vec(), &mask, keep))
}
