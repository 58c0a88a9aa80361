//! `MatMul`, `MatMulInteger` and `QLinearMatMul`: batched matmuls with the shape rules of
//! `numpy.matmul`.

use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ir::{Attribute, SymShape, ValueId};
use crate::ops;
use crate::ops::batch;
use crate::spec::{BatchRule, Cost, Grad, GradCx, InferCx, MICROSOFT, OP, OpSpec, broadcast, one, opt, var};
use crate::{Result, ensure, error};

const PRODUCTS: TypeSet = TypeSet::HIGH_PRECISION;
const BYTES: TypeSet = TypeSet::of(&[DType::I8, DType::U8]);
const SMALL: TypeSet = BYTES.union(TypeSet::FLOAT8);

static MATMUL: OpSpec = OpSpec {
    name: "MatMul",
    since: 13,
    inputs: &[one("A", "T"), one("B", "T")],
    outputs: &[one("Y", "T")],
    types: &[var("T", PRODUCTS)],
    cost: Cost::Compute,
    infer: |cx| infer(cx, 1),
    grad: Grad::Rule(gradient),
    batch: BatchRule::Rule(batch::matmul),
    ..OP
};

static MATMUL_INTEGER: OpSpec = OpSpec {
    name: "MatMulInteger",
    since: 10,
    first: 10,
    inputs: &[one("A", "T1"), one("B", "T2"), opt("a_zero_point", "T1"), opt("b_zero_point", "T2")],
    outputs: &[one("Y", "T3")],
    types: &[var("T1", BYTES), var("T2", BYTES), var("T3", TypeSet::of(&[DType::I32]))],
    cost: Cost::Compute,
    infer: |cx| infer(cx, 1),
    ..OP
};

static QLINEAR_MATMUL: OpSpec = OpSpec {
    name: "QLinearMatMul",
    since: 21,
    first: 10,
    inputs: &[
        one("a", "T1"),
        one("a_scale", "TS"),
        one("a_zero_point", "T1"),
        one("b", "T2"),
        one("b_scale", "TS"),
        one("b_zero_point", "T2"),
        one("y_scale", "TS"),
        one("y_zero_point", "T3"),
    ],
    outputs: &[one("y", "T3")],
    types: &[
        var("TS", TypeSet::of(&[DType::F32, DType::F16, DType::BF16])),
        var("T1", SMALL),
        var("T2", SMALL),
        var("T3", SMALL),
    ],
    cost: Cost::Compute,
    infer: |cx| infer(cx, 3),
    ..OP
};

ops![MATMUL, MATMUL_INTEGER, QLINEAR_MATMUL];

/// Infers the output shape; `right` is the index of the second operand.
fn infer(cx: &mut InferCx<'_>, right: usize) -> Result<()> {
    let (Some(a), Some(b)) = (cx.shape(0), cx.shape(right)) else { return Ok(()) };
    let shape = product_shape(a, b)?;
    cx.set_shape(0, shape)
}

/// Returns the shape of `a * b` by the rules of `numpy.matmul`. The last two axes are the matrices
/// and the others broadcast. A vector is a row as `a` and a column as `b`, and that axis is dropped
/// from the output.
pub(in crate::ops) fn product_shape(a: &[Dim], b: &[Dim]) -> Result<SymShape> {
    let (Some((left_k, a_rest)), false) = (a.split_last(), b.is_empty()) else {
        return Err(error!(InvalidGraph, "a matrix product needs operands of rank 1 or more"));
    };
    // A vector has no batch axes on either side: its only axis is the inner one.
    let (a_batch, rows) = match a_rest.split_last() {
        Some((rows, batch)) => (batch, Some(rows)),
        None => (a_rest, None),
    };
    let (b_batch, right_k, columns) = match b {
        [batch @ .., k, columns] => (batch, k, Some(columns)),
        [k] => (&[][..], k, None),
        [] => return Err(error!(InvalidGraph, "a matrix product needs operands of rank 1 or more")),
    };
    if let (Some(left), Some(right)) = (left_k.as_constant(), right_k.as_constant()) {
        ensure!(
            left == right,
            InvalidGraph,
            help = "the last dimension of the left input must equal the second-to-last of the right; transpose one of them?",
            "the inner dimensions of a matrix multiplication differ: {left} in {a:?} and {right} in {b:?}"
        );
    }
    let mut shape = broadcast::dims(&[a_batch, b_batch])?;
    shape.extend(rows.into_iter().chain(columns).cloned());
    Ok(shape)
}

/// The gradient of `MatMul`: `dA = dY * B^T` and `dB = A^T * dY`, summed over broadcast batch axes.
/// Vector operands become matrices first.
fn gradient(cx: &mut GradCx<'_>) -> Result<()> {
    let (mut a, mut b, mut upstream) = (cx.input(0)?, cx.input(1)?, cx.upstream()?);
    // A product with a vector drops an axis. We restore it in the operand and in the upstream
    // gradient.
    let (row, column) = (cx.rank(a)? == 1, cx.rank(b)? == 1);
    if column {
        let last = cx.ints(&[-1])?;
        b = cx.emit("Unsqueeze", &[b, last], &[])?;
        upstream = cx.emit("Unsqueeze", &[upstream, last], &[])?;
    }
    // The column axis is restored first, so -2 is the place of the row with and without a column.
    if row {
        let (first, second_last) = (cx.ints(&[0])?, cx.ints(&[-2])?);
        a = cx.emit("Unsqueeze", &[a, first], &[])?;
        upstream = cx.emit("Unsqueeze", &[upstream, second_last], &[])?;
    }
    if cx.wants(0) {
        let product = transposed_product(cx, [upstream, b], "transB")?;
        let gradient = cx.sum_to(product, a)?;
        cx.set_reshaped(0, gradient)?;
    }
    if cx.wants(1) {
        let is_one_matrix = cx.rank(b)? == 2 && cx.rank(a)? > 2;
        let product = if is_one_matrix {
            // All batches share one B, so its gradient is a sum over them. One GEMM over the rows
            // of all batches computes that sum in its accumulators.
            let rows =
                |cx: &mut GradCx<'_>, side| cx.emit("Flatten", &[side], &[("axis", Attribute::Int(-1))]);
            let sides = [rows(cx, a)?, rows(cx, upstream)?];
            transposed_product(cx, sides, "transA")?
        } else {
            transposed_product(cx, [a, upstream], "transA")?
        };
        let gradient = cx.sum_to(product, b)?;
        cx.set_reshaped(1, gradient)?;
    }
    Ok(())
}

/// Emits the matmul of two operands with the flag `side` set, which transposes one of them without
/// a copy.
fn transposed_product(cx: &mut GradCx<'_>, sides: [ValueId; 2], side: &str) -> Result<ValueId> {
    cx.pen.emit_in((MICROSOFT, "FusedMatMul"), &sides.map(Some), &[(side, Attribute::Int(1))])
}
