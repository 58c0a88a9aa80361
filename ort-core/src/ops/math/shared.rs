//! Building blocks of elementwise records: parameters, type sets, upgrades and inference.

use crate::dtype::TypeSet;
use crate::spec::{
    Cost, InferCx, OP, OpSpec, Param, ScalarExpr, ScalarFn, Traits, TypeVar, Upgrade, many, one, var,
};
use crate::{Result, ensure};

use super::legacy;

pub(super) const X: &[Param] = &[one("X", "T")];
pub(super) const Y: &[Param] = &[one("Y", "T")];
pub(super) const INPUT: &[Param] = &[one("input", "T")];
pub(super) const OUTPUT: &[Param] = &[one("output", "T")];
pub(super) const A_B: &[Param] = &[one("A", "T"), one("B", "T")];
pub(super) const C: &[Param] = &[one("C", "T")];
pub(super) const DATA_0: &[Param] = &[many("data_0", "T", 1)];

pub(super) const FLOATS: &[TypeVar] = &[var("T", TypeSet::FLOATS)];
pub(super) const INTEGERS: &[TypeVar] = &[var("T", TypeSet::INTEGERS)];
pub(super) const NUMERIC: &[TypeVar] = &[var("T", TypeSet::NUMERIC)];
/// Floats and signed integers.
pub(super) const SIGNED: &[TypeVar] = &[var("T", TypeSet::FLOATS.union(TypeSet::SIGNED))];

/// The traits of elementwise operators whose inputs may be swapped.
pub(super) const COMMUTATIVE: Traits = Traits::ELEMENTWISE.with(Traits::COMMUTATIVE);
/// The traits of elementwise operators that are commutative and associative.
pub(super) const SEMIRING: Traits = COMMUTATIVE.with(Traits::ASSOCIATIVE);

/// Before version 6 operators carried an in-place hint, which is ignored.
pub(super) const DROP_HINT: Upgrade = Upgrade { before: 6, apply: legacy::drop_hint };
/// The upgrades of unary operators.
pub(super) const UNARY_UPGRADES: &[Upgrade] = &[DROP_HINT];
/// The upgrades of binary operators, whose broadcasting was along an axis before version 7.
pub(super) const BINARY_UPGRADES: &[Upgrade] =
    &[DROP_HINT, Upgrade { before: 7, apply: legacy::broadcast_along_axis }];

/// The record of a unary float operator, from `X` to `Y`.
pub(in crate::ops) const fn unary(name: &'static str, since: i64, scalar: ScalarFn) -> OpSpec {
    OpSpec {
        name,
        since,
        inputs: X,
        outputs: Y,
        types: FLOATS,
        traits: Traits::ELEMENTWISE,
        cost: Cost::Memory,
        infer: same_shape,
        upgrades: UNARY_UPGRADES,
        scalar: Some(scalar),
        ..OP
    }
}

/// The record of a unary float operator that matmuls and convolutions fuse.
pub(super) const fn activation(name: &'static str, since: i64, scalar: ScalarFn) -> OpSpec {
    OpSpec { traits: Traits::ELEMENTWISE.with(Traits::ACTIVATION), ..unary(name, since, scalar) }
}

/// The record of a binary operator with broadcasting, from `A` and `B` to `C`.
pub(super) const fn binary(name: &'static str, since: i64, types: &'static [TypeVar]) -> OpSpec {
    OpSpec {
        name,
        since,
        inputs: A_B,
        outputs: C,
        types,
        traits: Traits::ELEMENTWISE,
        infer: broadcast,
        upgrades: BINARY_UPGRADES,
        ..OP
    }
}

/// The first input's element.
pub(in crate::ops) fn x() -> ScalarExpr {
    ScalarExpr::Input(0)
}

/// The second input's element.
pub(in crate::ops) fn y() -> ScalarExpr {
    ScalarExpr::Input(1)
}

/// A constant.
pub(in crate::ops) fn number(value: f64) -> ScalarExpr {
    ScalarExpr::Constant(value)
}

/// Infers an output of the first input's shape.
pub(in crate::ops) fn same_shape(cx: &mut InferCx<'_>) -> Result<()> {
    match cx.shape(0) {
        Some(shape) => cx.set_shape(0, shape.to_vec()),
        None => Ok(()),
    }
}

/// Infers an output of the broadcast shape of all inputs.
pub(super) fn broadcast(cx: &mut InferCx<'_>) -> Result<()> {
    // Omitted inputs take no part in broadcasting.
    let given: Vec<usize> = (0..cx.input_count()).filter(|&index| cx.has_input(index)).collect();
    match cx.broadcast(&given)? {
        Some(shape) => cx.set_shape(0, shape),
        None => Ok(()),
    }
}

/// Infers an output of the first input's shape, to which the second must broadcast without
/// enlarging it.
pub(in crate::ops) fn broadcast_to_first(cx: &mut InferCx<'_>) -> Result<()> {
    let Some(shape) = cx.shape(0) else { return Ok(()) };
    if let Some(both) = cx.broadcast(&[0, 1])? {
        // The standard's unidirectional broadcasting: the second shape must not enlarge the first.
        let grows = both.len() > shape.len()
            || both
                .iter()
                .zip(shape)
                .any(|(a, b)| b.as_constant().is_some_and(|b| a.as_constant().is_some_and(|a| a != b)));
        ensure!(!grows, InvalidGraph, "the second input does not broadcast to the first");
    }
    cx.set_shape(0, shape.to_vec())
}
