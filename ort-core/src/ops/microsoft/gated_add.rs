//! `GatedAdd`: a tensor plus another one that a gate scales row by row.

use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ops;
use crate::ops::math::shared::{same_shape, x, y};
use crate::spec::{InferCx, MICROSOFT, OP, OpSpec, Requirement, ScalarExpr, Traits, one, var};
use crate::{Result, ensure, error};

/// `X + Y * gate`. ONNX Runtime rounds the product to the element type; we round the result only.
static GATED_ADD: OpSpec = OpSpec {
    domain: MICROSOFT,
    name: "GatedAdd",
    inputs: &[one("X", "T"), one("Y", "T"), one("gate", "T")],
    outputs: &[one("output", "T")],
    types: &[var("T", TypeSet::of(&[DType::F32, DType::F16, DType::BF16]))],
    traits: Traits::ELEMENTWISE,
    infer,
    scalar: Some(|_| Ok(x() + y() * ScalarExpr::Input(2))),
    ..OP
};

ops![GATED_ADD];

/// `X` and `Y` have one shape, and the gate has one value for each of their rows.
fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    if let (Some(shape), Some(scaled)) = (cx.shape(0), cx.shape(1)) {
        let (rank, given) = (shape.len(), scaled.len());
        ensure!(rank == given, InvalidGraph, "Y has rank {given}, X has rank {rank}");
        let mut sizes = shape.iter().zip(scaled);
        sizes.try_for_each(|(size, given)| equal(cx, "a dimension of Y", given, size))?;
    }
    if let (Some(shape), Some(gate)) = (cx.shape(0), cx.shape(2)) {
        let (Some((_, rows)), Some((last, gates))) = (shape.split_last(), gate.split_last()) else {
            return Err(error!(InvalidGraph, "X or the gate of GatedAdd is a scalar, which has no rows"));
        };
        let (rank, given) = (shape.len(), gate.len());
        ensure!(rank == given, InvalidGraph, "the gate has rank {given}, X has rank {rank}");
        equal(cx, "the last dimension of the gate", last, &1.into())?;
        let mut sizes = rows.iter().zip(gates);
        sizes.try_for_each(|(size, given)| equal(cx, "a dimension of the gate", given, size))?;
    }
    same_shape(cx)
}

fn equal(cx: &InferCx<'_>, what: &'static str, actual: &Dim, expected: &Dim) -> Result<()> {
    cx.require(Requirement::equal(what, actual, expected).or_fail())
}
