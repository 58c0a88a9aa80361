//! `Trilu`, `GridSample` and `Unique` from before the standard had them, and `Inverse`.

use super::{SAME_AS_STANDARD, becomes, check_rank};
use crate::dtype::{DType, TypeSet};
use crate::ir::Attribute;
use crate::ops;
use crate::ops::tensor::grid_sample::rename_modes;
use crate::ops::tensor::index_gradients;
use crate::spec::{Cost, Draft, Grad, InferCx, MICROSOFT, OP, OpSpec, Traits, attr, one, opt, var};
use crate::{Result, ensure};

const WITHOUT_BFLOAT16: TypeSet = TypeSet::ALL_TENSOR.difference(TypeSet::of(&[DType::BF16]));

static TRILU: OpSpec = OpSpec {
    domain: MICROSOFT,
    name: "Trilu",
    inputs: &[one("X", "T"), opt("k", "tensor(int64)")],
    outputs: &[one("Y", "T")],
    types: &[var("T", TypeSet::NUMERIC.union(TypeSet::of(&[DType::Bool])))],
    attrs: &[attr::int("upper", 1)],
    traits: Traits::MOVES_DATA,
    upgrades: SAME_AS_STANDARD,
    ..OP
};

static GRID_SAMPLE: OpSpec = OpSpec {
    domain: MICROSOFT,
    name: "GridSample",
    inputs: &[one("X", "T1"), one("Grid", "T1")],
    outputs: &[one("Y", "T2")],
    types: &[var("T1", WITHOUT_BFLOAT16), var("T2", TypeSet::IEEE_FLOATS)],
    attrs: &[
        attr::int("align_corners", 0),
        attr::string("padding_mode", "zeros"),
        attr::string("mode", "bilinear"),
    ],
    cost: Cost::Compute,
    upgrades: &[becomes(|draft| {
        draft.domain.clear();
        rename_modes(draft)
    })],
    ..OP
};

/// The distinct elements of a vector, in order of first occurrence.
static UNIQUE: OpSpec = OpSpec {
    domain: MICROSOFT,
    name: "Unique",
    inputs: &[one("x", "T")],
    outputs: &[one("y", "T"), one("idx", "tensor(int64)"), one("counts", "tensor(int64)")],
    types: &[var("T", WITHOUT_BFLOAT16)],
    infer: infer_unique,
    lower: Some(lower_unique),
    ..OP
};

static INVERSE: OpSpec = OpSpec {
    domain: MICROSOFT,
    name: "Inverse",
    grad: Grad::Rule(index_gradients::of_matrix),
    inputs: &[one("X", "T")],
    outputs: &[one("Y", "T")],
    types: &[var("T", TypeSet::IEEE_FLOATS)],
    cost: Cost::Compute,
    infer: infer_inverse,
    ..OP
};

ops![TRILU, GRID_SAMPLE, UNIQUE, INVERSE];

fn infer_unique(cx: &mut InferCx<'_>) -> Result<()> {
    check_rank(cx, 0, "the input of Unique", 1)?;
    // Values and counts have one length, which depends on the data.
    let count = cx.fresh();
    cx.set_shape(0, vec![count.clone()])?;
    cx.set_shape(2, vec![count])?;
    match cx.shape(0) {
        Some(shape) => cx.set_shape(1, shape.to_vec()),
        None => Ok(()),
    }
}

/// Becomes the standard's `Unique`, which has the indices of first occurrence as an additional
/// output.
fn lower_unique(draft: &mut Draft<'_>) -> Result<()> {
    let input = draft.required(0)?;
    draft.become_op("Unique", &[input], &[("sorted", Attribute::Int(0))]);
    // The standard's outputs are Y, indices, inverse_indices and counts. `idx` is the third.
    draft.outputs.insert(1, None);
    Ok(())
}

fn infer_inverse(cx: &mut InferCx<'_>) -> Result<()> {
    let Some(shape) = cx.shape(0) else { return Ok(()) };
    let [.., rows, columns] = shape else {
        return Err(crate::error!(InvalidGraph, "an inverse needs rank 2 or more, got {}", shape.len()));
    };
    let square = !matches!((rows.as_constant(), columns.as_constant()), (Some(a), Some(b)) if a != b);
    ensure!(square, InvalidGraph, "a matrix of {rows} by {columns} has no inverse");
    cx.set_shape(0, shape.to_vec())
}
