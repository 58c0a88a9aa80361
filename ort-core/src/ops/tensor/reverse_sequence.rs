//! `ReverseSequence`: reverses the leading elements of each sequence of a batch.

use crate::dtype::TypeSet;
use crate::ops;
use crate::spec::{Grad, InferCx, OP, OpSpec, Traits, attr, one, var};
use crate::{Result, ensure};

use super::gradients;

static REVERSE_SEQUENCE: OpSpec = OpSpec {
    name: "ReverseSequence",
    since: 28,
    first: 10,
    inputs: &[one("input", "T"), one("sequence_lens", "tensor(int64)")],
    outputs: &[one("Y", "T")],
    types: &[var("T", TypeSet::ALL_TENSOR)],
    attrs: &[attr::int("batch_axis", 1), attr::int("time_axis", 0)],
    traits: Traits::MOVES_DATA,
    infer,
    grad: Grad::Rule(gradients::of_itself),
    ..OP
};

ops![REVERSE_SEQUENCE];

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let axes = (cx.attrs.int("batch_axis")?, cx.attrs.int("time_axis")?);
    ensure!(matches!(axes, (0, 1) | (1, 0)), InvalidGraph, "batch and time axes {axes:?} are not 0 and 1");
    let Some(shape) = cx.shape(0) else { return Ok(()) };
    ensure!(shape.len() >= 2, InvalidGraph, "ReverseSequence needs rank 2 or more, got {shape:?}");
    cx.set_shape(0, shape.to_vec())
}
