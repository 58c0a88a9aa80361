//! `Normalizer`: divides each row by its norm.

use super::{NUMBERS, same_shape};
use crate::ops;
use crate::spec::{InferCx, ONNX_ML, OP, OpSpec, attr, one, var};
use crate::{Result, ensure};

static NORMALIZER: OpSpec = OpSpec {
    domain: ONNX_ML,
    name: "Normalizer",
    inputs: &[one("X", "T")],
    outputs: &[one("Y", "tensor(float)")],
    types: &[var("T", NUMBERS)],
    attrs: &[attr::string("norm", "MAX")],
    infer,
    ..OP
};

ops![NORMALIZER];

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let rank = cx.shape(0).map(<[_]>::len);
    let fits = rank.is_none_or(|rank| rank == 1 || rank == 2);
    ensure!(fits, InvalidGraph, "Normalizer takes rank 1 or 2, got rank {}", rank.unwrap_or(0));
    same_shape(cx)
}
