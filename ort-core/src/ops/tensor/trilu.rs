//! `Trilu`: the upper or lower triangle of each matrix.

use crate::dtype::TypeSet;
use crate::ops;
use crate::ops::batch;
use crate::spec::{BatchRule, Grad, InferCx, OP, OpSpec, Traits, attr, one, opt, var};
use crate::{Result, ensure};

use super::gradients;

static TRILU: OpSpec = OpSpec {
    name: "Trilu",
    since: 14,
    first: 14,
    inputs: &[one("input", "T"), opt("k", "tensor(int64)")],
    outputs: &[one("output", "T")],
    types: &[var("T", TypeSet::ALL_TENSOR)],
    attrs: &[attr::int("upper", 1)],
    traits: Traits::MOVES_DATA,
    infer,
    grad: Grad::Rule(gradients::of_itself),
    batch: BatchRule::Rule(batch::of_matrices),
    ..OP
};

ops![TRILU];

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let Some(shape) = cx.shape(0) else { return Ok(()) };
    ensure!(shape.len() >= 2, InvalidArgument, "Trilu needs rank 2 or more, got rank {}", shape.len());
    cx.set_shape(0, shape.to_vec())
}
