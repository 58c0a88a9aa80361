//! `QLinearAdd`, `QLinearMul`, `QLinearSigmoid` and `QLinearLeakyRelu`: elementwise operators on
//! 8-bit quantized tensors.

use super::float;
use super::qlinear::{
    CODES, check_single, codes_at, differences, numbers, quantize, round_sum, scalar, scaled,
};
use crate::Result;
use crate::ir::{Attribute, ValueId};
use crate::ops;
use crate::spec::{Draft, InferCx, MICROSOFT, OP, OpSpec, attr, one, opt, var};

/// The record of a binary operator: two quantized tensors, and the output's scale and zero point.
const BINARY: OpSpec = OpSpec {
    domain: MICROSOFT,
    inputs: &[
        one("A", "T"),
        one("A_scale", "tensor(float)"),
        opt("A_zero_point", "T"),
        one("B", "T"),
        one("B_scale", "tensor(float)"),
        opt("B_zero_point", "T"),
        one("C_scale", "tensor(float)"),
        opt("C_zero_point", "T"),
    ],
    outputs: &[one("C", "T")],
    types: &[var("T", CODES)],
    infer: infer_binary,
    ..OP
};

static QLINEAR_ADD: OpSpec = OpSpec { name: "QLinearAdd", lower: Some(lower_add), ..BINARY };
static QLINEAR_MUL: OpSpec = OpSpec { name: "QLinearMul", lower: Some(lower_mul), ..BINARY };

/// The record of a unary operator: one quantized tensor, and the output's scale and zero point.
const UNARY: OpSpec = OpSpec {
    domain: MICROSOFT,
    inputs: &[
        one("X", "T"),
        one("X_scale", "tensor(float)"),
        opt("X_zero_point", "T"),
        one("Y_scale", "tensor(float)"),
        opt("Y_zero_point", "T"),
    ],
    outputs: &[one("Y", "T")],
    types: &[var("T", CODES)],
    infer: infer_unary,
    ..OP
};

static QLINEAR_SIGMOID: OpSpec =
    OpSpec { name: "QLinearSigmoid", lower: Some(|draft| lower_unary(draft, "Sigmoid", &[])), ..UNARY };
static QLINEAR_LEAKY_RELU: OpSpec = OpSpec {
    name: "QLinearLeakyRelu",
    attrs: &[attr::float("alpha", 0.01)],
    lower: Some(|draft| {
        let alpha = Attribute::Float(float(draft, "alpha")?);
        lower_unary(draft, "LeakyRelu", &[("alpha", alpha)])
    }),
    ..UNARY
};

ops![QLINEAR_ADD, QLINEAR_MUL, QLINEAR_SIGMOID, QLINEAR_LEAKY_RELU];

fn infer_binary(cx: &mut InferCx<'_>) -> Result<()> {
    check_single(cx, [1, 2, 4, 5, 6, 7])?;
    match cx.broadcast(&[0, 3])? {
        Some(shape) => cx.set_shape(0, shape),
        None => Ok(()),
    }
}

fn infer_unary(cx: &mut InferCx<'_>) -> Result<()> {
    check_single(cx, 1..5)?;
    match cx.shape(0) {
        Some(shape) => cx.set_shape(0, shape.to_vec()),
        None => Ok(()),
    }
}

/// Returns the scales of both operands and of the output.
fn scales(draft: &mut Draft<'_>) -> Result<[ValueId; 3]> {
    let mut scale = |index| {
        let value = draft.required(index)?;
        scalar(draft, value)
    };
    Ok([scale(1)?, scale(4)?, scale(6)?])
}

/// `round(a * (a_scale / c_scale) + b * (b_scale / c_scale)) + c_zero`, with `a` and `b` less their
/// zero points.
fn lower_add(draft: &mut Draft<'_>) -> Result<()> {
    let (dtype, [a, b, c]) = (draft.dtype(0)?, scales(draft)?);
    let mut sides = [a, b];
    for (scale, first) in sides.iter_mut().zip([0, 3]) {
        // Each side is dequantized with this ratio, so the sum needs no further division.
        let ratio = draft.emit("Div", &[*scale, c], &[])?;
        *scale = scaled(draft, codes_at(first), ratio)?;
    }
    let sum = draft.emit("Add", &sides, &[])?;
    round_sum(draft, sum, draft.input(7), dtype)
}

/// `round(a * b * (a_scale * b_scale / c_scale)) + c_zero`, with `a` and `b` less their zero
/// points, whose product is exact.
fn lower_mul(draft: &mut Draft<'_>) -> Result<()> {
    let (dtype, [a, b, c]) = (draft.dtype(0)?, scales(draft)?);
    let scale = draft.emit("Mul", &[a, b], &[])?;
    let scale = draft.emit("Div", &[scale, c], &[])?;
    let sides = [differences(draft, codes_at(0))?, differences(draft, codes_at(3))?];
    // Differences of bytes have 9 bits at most, so float32 holds their product exactly.
    let product = draft.emit("Mul", &sides, &[])?;
    let product = draft.emit("Mul", &[product, scale], &[])?;
    round_sum(draft, product, draft.input(7), dtype)
}

/// Dequantizes the input, applies `op` and quantizes the output.
fn lower_unary(draft: &mut Draft<'_>, op: &str, attrs: &[(&str, Attribute)]) -> Result<()> {
    let (dtype, numbers) = (draft.dtype(0)?, numbers(draft, codes_at(0))?);
    let result = draft.emit(op, &[numbers], attrs)?;
    quantize(draft, result, draft.required(3)?, draft.input(4), dtype)
}
