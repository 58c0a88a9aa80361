//! Binary arithmetic with broadcasting: `Add`, `Sub`, `Mul`, `Div`, `Mod` and `Pow`.

use crate::Result;
use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ensure;
use crate::ops;
use crate::spec::{BinaryFn, InferCx, OpSpec, ScalarExpr, attr, one, var};

use super::shared::{BINARY_UPGRADES, NUMERIC, SEMIRING, binary, broadcast, x, y};
use super::symbolic;

static ADD: OpSpec = OpSpec {
    traits: SEMIRING,
    infer: |cx| with_symbols(cx, |a, b| a.checked_add(b)),
    scalar: Some(|_| Ok(x() + y())),
    ..binary("Add", 14, NUMERIC)
};
static SUB: OpSpec = OpSpec {
    infer: |cx| with_symbols(cx, |a, b| a.checked_sub(b)),
    scalar: Some(|_| Ok(x() - y())),
    ..binary("Sub", 14, NUMERIC)
};
static MUL: OpSpec = OpSpec {
    traits: SEMIRING,
    infer: |cx| with_symbols(cx, |a, b| a.checked_mul(b)),
    scalar: Some(|_| Ok(x() * y())),
    ..binary("Mul", 14, NUMERIC)
};
static DIV: OpSpec = OpSpec {
    infer: |cx| with_symbols(cx, symbolic::divide),
    scalar: Some(|_| Ok(x() / y())),
    ..binary("Div", 14, NUMERIC)
};
static MOD: OpSpec = OpSpec {
    attrs: &[attr::int("fmod", 0)],
    infer: infer_mod,
    upgrades: &[],
    scalar: Some(|attrs| {
        // With `fmod` the result has the sign of the dividend, as in C, else that of the divisor.
        let function = if attrs.flag("fmod")? { BinaryFn::Fmod } else { BinaryFn::Mod };
        Ok(ScalarExpr::binary(function, x(), y()))
    }),
    first: 10,
    ..binary("Mod", 28, NUMERIC)
};
static POW: OpSpec = OpSpec {
    inputs: &[one("X", "T"), one("Y", "T1")],
    outputs: &[one("Z", "T")],
    types: &[var("T", POW_BASES), var("T1", TypeSet::NUMERIC)],
    infer: |cx| with_symbols(cx, symbolic::power),
    upgrades: BINARY_UPGRADES,
    scalar: Some(|_| Ok(ScalarExpr::binary(BinaryFn::Pow, x(), y()))),
    ..binary("Pow", 15, NUMERIC)
};

/// The types of a base. An exponent may be of any numeric type.
const POW_BASES: TypeSet = TypeSet::FLOATS.union(TypeSet::of(&[DType::I32, DType::I64]));

ops![ADD, SUB, MUL, DIV, MOD, POW];

/// Infers the shape, and the elements if they are known symbolically.
fn with_symbols(cx: &mut InferCx<'_>, function: fn(&Dim, &Dim) -> Option<Dim>) -> Result<()> {
    broadcast(cx)?;
    symbolic::binary(cx, function)
}

fn infer_mod(cx: &mut InferCx<'_>) -> Result<()> {
    let fmod = cx.attrs.int("fmod")?;
    ensure!(matches!(fmod, 0 | 1), InvalidGraph, "the attribute fmod of Mod is {fmod}, expected 0 or 1");
    with_symbols(cx, symbolic::remainder)
}
