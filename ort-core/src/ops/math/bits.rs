//! Bitwise operators on integers.

use crate::Result;
use crate::ensure;
use crate::ops;
use crate::spec::{AttrKind, InferCx, OP, OpSpec, Traits, attr, one};

use super::shared::{INTEGERS, SEMIRING, X, Y, binary, broadcast, same_shape};

static BITWISE_NOT: OpSpec = OpSpec {
    name: "BitwiseNot",
    since: 18,
    first: 18,
    inputs: X,
    outputs: Y,
    types: INTEGERS,
    traits: Traits::ELEMENTWISE,
    infer: same_shape,
    ..OP
};
static BITWISE_AND: OpSpec =
    OpSpec { traits: SEMIRING, upgrades: &[], first: 18, ..binary("BitwiseAnd", 18, INTEGERS) };
static BITWISE_OR: OpSpec =
    OpSpec { traits: SEMIRING, upgrades: &[], first: 18, ..binary("BitwiseOr", 18, INTEGERS) };
static BITWISE_XOR: OpSpec =
    OpSpec { traits: SEMIRING, upgrades: &[], first: 18, ..binary("BitwiseXor", 18, INTEGERS) };
static BIT_SHIFT: OpSpec = OpSpec {
    inputs: &[one("X", "T"), one("Y", "T")],
    outputs: &[one("Z", "T")],
    attrs: &[attr::required("direction", AttrKind::String)],
    infer: infer_shift,
    upgrades: &[],
    first: 11,
    ..binary("BitShift", 28, INTEGERS)
};

ops![BITWISE_NOT, BITWISE_AND, BITWISE_OR, BITWISE_XOR, BIT_SHIFT];

fn infer_shift(cx: &mut InferCx<'_>) -> Result<()> {
    let direction = cx.attrs.string("direction")?;
    ensure!(
        matches!(direction, "LEFT" | "RIGHT"),
        InvalidGraph,
        "the direction of BitShift is '{direction}', expected LEFT or RIGHT"
    );
    broadcast(cx)
}
