//! Comparisons with broadcasting, to booleans.

use crate::Result;
use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ops;
use crate::spec::{BinaryFn, InferCx, OpSpec, Param, ScalarExpr, Traits, TypeVar, Upgrade, one, var};

use super::shared::{BINARY_UPGRADES, COMMUTATIVE, NUMERIC, binary, broadcast, x, y};
use super::symbolic;

const C: &[Param] = &[one("C", "T1")];
const BOOL: TypeSet = TypeSet::of(&[DType::Bool]);
const ORDERED: &[TypeVar] = &[var("T", TypeSet::NUMERIC), var("T1", BOOL)];
const EQUATABLE: &[TypeVar] =
    &[var("T", TypeSet::NUMERIC.union(TypeSet::of(&[DType::Bool, DType::String]))), var("T1", BOOL)];

static EQUAL: OpSpec = OpSpec {
    types: EQUATABLE,
    traits: COMMUTATIVE,
    infer: |cx| compare(cx, symbolic::equal),
    scalar: Some(|_| Ok(ScalarExpr::binary(BinaryFn::Equal, x(), y()))),
    ..comparison("Equal", 19, BINARY_UPGRADES)
};
static LESS: OpSpec = OpSpec {
    infer: |cx| compare(cx, symbolic::less),
    scalar: Some(|_| Ok(x().less(y()))),
    ..comparison("Less", 13, BINARY_UPGRADES)
};
static GREATER: OpSpec = OpSpec {
    infer: |cx| compare(cx, |a, b| symbolic::less(b, a)),
    scalar: Some(|_| Ok(y().less(x()))),
    ..comparison("Greater", 13, BINARY_UPGRADES)
};
static LESS_OR_EQUAL: OpSpec = OpSpec {
    infer: |cx| compare(cx, symbolic::less_or_equal),
    // Not the negation of `y < x`: for NaN both are false.
    scalar: Some(|_| Ok(ScalarExpr::binary(BinaryFn::LessOrEqual, x(), y()))),
    first: 12,
    ..comparison("LessOrEqual", 16, &[])
};
static GREATER_OR_EQUAL: OpSpec = OpSpec {
    infer: |cx| compare(cx, |a, b| symbolic::less_or_equal(b, a)),
    scalar: Some(|_| Ok(ScalarExpr::binary(BinaryFn::LessOrEqual, y(), x()))),
    first: 12,
    ..comparison("GreaterOrEqual", 16, &[])
};

ops![EQUAL, LESS, GREATER, LESS_OR_EQUAL, GREATER_OR_EQUAL];

/// The record of a comparison.
const fn comparison(name: &'static str, since: i64, upgrades: &'static [Upgrade]) -> OpSpec {
    OpSpec {
        outputs: C,
        types: ORDERED,
        traits: Traits::ELEMENTWISE,
        upgrades,
        ..binary(name, since, NUMERIC)
    }
}

/// Infers the shape, and the elements if they can be decided symbolically.
fn compare(cx: &mut InferCx<'_>, function: fn(&Dim, &Dim) -> Option<Dim>) -> Result<()> {
    broadcast(cx)?;
    symbolic::binary(cx, function)
}
