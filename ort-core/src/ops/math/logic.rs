//! Boolean logic with broadcasting: `Not`, `And`, `Or` and `Xor`.

use crate::Result;
use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ops;
use crate::spec::{BinaryFn, InferCx, OP, OpSpec, Param, ScalarExpr, Traits, TypeVar, UnaryFn, one, var};

use super::shared::{SEMIRING, X, Y, binary, broadcast, same_shape, x, y};
use super::symbolic;

const C: &[Param] = &[one("C", "T1")];
const BOOL: TypeSet = TypeSet::of(&[DType::Bool]);
const BOOLS: &[TypeVar] = &[var("T", BOOL), var("T1", BOOL)];

static NOT: OpSpec = OpSpec {
    name: "Not",
    since: 1,
    inputs: X,
    outputs: Y,
    types: &[var("T", BOOL)],
    traits: Traits::ELEMENTWISE,
    infer: infer_not,
    scalar: Some(|_| Ok(x().apply(UnaryFn::Not))),
    ..OP
};
static AND: OpSpec = OpSpec {
    infer: |cx| with_symbols(cx, symbolic::and),
    scalar: Some(|_| Ok(ScalarExpr::binary(BinaryFn::And, x(), y()))),
    ..logic("And")
};
static OR: OpSpec = OpSpec {
    infer: |cx| with_symbols(cx, symbolic::or),
    scalar: Some(|_| Ok(ScalarExpr::binary(BinaryFn::Or, x(), y()))),
    ..logic("Or")
};
static XOR: OpSpec = OpSpec {
    infer: |cx| with_symbols(cx, symbolic::xor),
    scalar: Some(|_| Ok(ScalarExpr::binary(BinaryFn::Xor, x(), y()))),
    ..logic("Xor")
};

ops![NOT, AND, OR, XOR];

/// The record of a binary logic operator.
const fn logic(name: &'static str) -> OpSpec {
    OpSpec { outputs: C, traits: SEMIRING, ..binary(name, 7, BOOLS) }
}

fn infer_not(cx: &mut InferCx<'_>) -> Result<()> {
    same_shape(cx)?;
    symbolic::unary(cx, |x| x.as_constant().map(|value| Dim::constant(i64::from(value == 0))))
}

/// Infers the shape, and the elements if they are known symbolically.
fn with_symbols(cx: &mut InferCx<'_>, function: fn(&Dim, &Dim) -> Option<Dim>) -> Result<()> {
    broadcast(cx)?;
    symbolic::binary(cx, function)
}
