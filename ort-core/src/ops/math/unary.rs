//! Unary mathematical functions.

use crate::Result;
use crate::dtype::{DType, TypeSet};
use crate::ops;
use crate::spec::{InferCx, OpSpec, TypeVar, UnaryFn, Upgrade, attr, one, var};

use super::shared::{INPUT, NUMERIC, OUTPUT, SIGNED, activation, same_shape, unary, x};
use super::{legacy, symbolic};

static ABS: OpSpec =
    OpSpec { types: NUMERIC, infer: infer_abs, ..unary("Abs", 13, |_| Ok(x().apply(UnaryFn::Abs))) };
static NEG: OpSpec =
    OpSpec { types: SIGNED, infer: infer_neg, ..unary("Neg", 13, |_| Ok(x().apply(UnaryFn::Neg))) };
static SIGN: OpSpec = OpSpec {
    types: NUMERIC,
    infer: infer_sign,
    first: 9,
    ..named("Sign", 13, |_| Ok(x().apply(UnaryFn::Sign)))
};
static FLOOR: OpSpec = unary("Floor", 13, |_| Ok(x().apply(UnaryFn::Floor)));
static CEIL: OpSpec = unary("Ceil", 13, |_| Ok(x().apply(UnaryFn::Ceil)));
// The standard rounds halves to the even neighbour.
static ROUND: OpSpec = OpSpec { first: 11, ..unary("Round", 22, |_| Ok(x().apply(UnaryFn::RoundHalfEven))) };
static RECIPROCAL: OpSpec = unary("Reciprocal", 13, |_| Ok(x().apply(UnaryFn::Reciprocal)));
static SQRT: OpSpec = unary("Sqrt", 13, |_| Ok(x().apply(UnaryFn::Sqrt)));
static EXP: OpSpec = named("Exp", 13, |_| Ok(x().apply(UnaryFn::Exp)));
static LOG: OpSpec = named("Log", 13, |_| Ok(x().apply(UnaryFn::Log)));
static ERF: OpSpec = OpSpec {
    upgrades: &[Upgrade { before: 13, apply: legacy::integers_as_floats }],
    first: 9,
    ..named("Erf", 13, |_| Ok(x().apply(UnaryFn::Erf)))
};
static SIN: OpSpec = OpSpec { first: 7, ..named("Sin", 22, |_| Ok(x().apply(UnaryFn::Sin))) };
static COS: OpSpec = OpSpec { first: 7, ..named("Cos", 22, |_| Ok(x().apply(UnaryFn::Cos))) };
static TAN: OpSpec = OpSpec { first: 7, ..named("Tan", 22, |_| Ok(x().apply(UnaryFn::Tan))) };
static ASIN: OpSpec = OpSpec { first: 7, ..named("Asin", 22, |_| Ok(x().apply(UnaryFn::Asin))) };
static ACOS: OpSpec = OpSpec { first: 7, ..named("Acos", 22, |_| Ok(x().apply(UnaryFn::Acos))) };
static ATAN: OpSpec = OpSpec { first: 7, ..named("Atan", 22, |_| Ok(x().apply(UnaryFn::Atan))) };
static SINH: OpSpec = OpSpec { first: 9, ..named("Sinh", 22, |_| Ok(x().apply(UnaryFn::Sinh))) };
static COSH: OpSpec = OpSpec { first: 9, ..named("Cosh", 22, |_| Ok(x().apply(UnaryFn::Cosh))) };
static TANH: OpSpec =
    OpSpec { inputs: INPUT, outputs: OUTPUT, ..activation("Tanh", 13, |_| Ok(x().apply(UnaryFn::Tanh))) };
static ASINH: OpSpec = OpSpec { first: 9, ..named("Asinh", 22, |_| Ok(x().apply(UnaryFn::Asinh))) };
static ACOSH: OpSpec = OpSpec { first: 9, ..named("Acosh", 22, |_| Ok(x().apply(UnaryFn::Acosh))) };
static ATANH: OpSpec = OpSpec { first: 9, ..named("Atanh", 22, |_| Ok(x().apply(UnaryFn::Atanh))) };

/// Types from floats with infinities or NaN to booleans.
const CLASSIFIED: &[TypeVar] =
    &[var("T1", TypeSet::FLOATS.union(TypeSet::FLOAT8)), var("T2", TypeSet::of(&[DType::Bool]))];

static IS_NAN: OpSpec = OpSpec {
    inputs: &[one("X", "T1")],
    outputs: &[one("Y", "T2")],
    types: CLASSIFIED,
    upgrades: &[],
    first: 9,
    ..unary("IsNaN", 20, |_| Ok(x().apply(UnaryFn::IsNan)))
};
static IS_INF: OpSpec = OpSpec {
    inputs: &[one("X", "T1")],
    outputs: &[one("Y", "T2")],
    types: CLASSIFIED,
    attrs: &[attr::int("detect_negative", 1), attr::int("detect_positive", 1)],
    upgrades: &[],
    // No formula: `UnaryFn::IsInf` detects both infinities, but the attributes may select one.
    scalar: None,
    first: 10,
    ..unary("IsInf", 20, |_| Ok(x()))
};

ops![
    ABS, NEG, SIGN, FLOOR, CEIL, ROUND, RECIPROCAL, SQRT, EXP, LOG, ERF, SIN, COS, TAN, ASIN, ACOS, ATAN,
    SINH, COSH, TANH, ASINH, ACOSH, ATANH, IS_NAN, IS_INF,
];

/// The record of a unary function whose parameters are called `input` and `output`.
const fn named(name: &'static str, since: i64, scalar: crate::spec::ScalarFn) -> OpSpec {
    OpSpec { inputs: INPUT, outputs: OUTPUT, ..unary(name, since, scalar) }
}

fn infer_abs(cx: &mut InferCx<'_>) -> Result<()> {
    same_shape(cx)?;
    symbolic::unary(cx, symbolic::abs)
}

fn infer_neg(cx: &mut InferCx<'_>) -> Result<()> {
    same_shape(cx)?;
    symbolic::unary(cx, |x| Some(-x))
}

fn infer_sign(cx: &mut InferCx<'_>) -> Result<()> {
    same_shape(cx)?;
    symbolic::unary(cx, symbolic::sign)
}
