//! Determinants of square matrices: `Det`.

use crate::dtype::TypeSet;
use crate::ops;
use crate::ops::tensor::index_gradients;
use crate::spec::{Cost, Grad, InferCx, OP, OpSpec, one, var};
use crate::{Result, ensure};

static DET: OpSpec = OpSpec {
    name: "Det",
    grad: Grad::Rule(index_gradients::of_matrix),
    since: 22,
    first: 11,
    inputs: &[one("X", "T")],
    outputs: &[one("Y", "T")],
    types: &[var("T", TypeSet::FLOATS)],
    cost: Cost::Compute,
    infer,
    ..OP
};

ops![DET];

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let Some(shape) = cx.shape(0) else { return Ok(()) };
    let [batch @ .., rows, columns] = shape else {
        ensure!(shape.len() >= 2, InvalidGraph, "Det needs rank 2 or more, got rank {}", shape.len());
        return Ok(());
    };
    if let (Some(rows), Some(columns)) = (rows.as_constant(), columns.as_constant()) {
        ensure!(rows == columns, InvalidGraph, "a matrix of {rows} by {columns} has no determinant");
    }
    cx.set_shape(0, batch.to_vec())
}
