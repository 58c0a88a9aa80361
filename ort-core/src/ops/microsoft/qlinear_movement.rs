//! `QLinearConcat` and `QLinearWhere`: data movement among 8-bit quantized tensors with different
//! scales and zero points.

use super::int;
use super::qlinear::{CODES, check_single, codes_at, requantized};
use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ir::Attribute;
use crate::ops;
use crate::ops::axes;
use crate::ops::tensor::concat;
use crate::spec::{AttrKind, Draft, InferCx, MICROSOFT, OP, OpSpec, attr, many_mixed, one, var};
use crate::{Result, ensure};

const FLOAT: TypeSet = TypeSet::of(&[DType::F32]);

static QLINEAR_CONCAT: OpSpec = OpSpec {
    domain: MICROSOFT,
    name: "QLinearConcat",
    inputs: &[one("Y_scale", "TF"), one("Y_zero_point", "T8"), many_mixed("inputs", "TV", 1)],
    outputs: &[one("Y", "T8")],
    types: &[var("T8", CODES), var("TF", FLOAT), var("TV", CODES.union(FLOAT))],
    attrs: &[attr::required("axis", AttrKind::Int)],
    infer: infer_concat,
    lower: Some(lower_concat),
    ..OP
};

static QLINEAR_WHERE: OpSpec = OpSpec {
    domain: MICROSOFT,
    name: "QLinearWhere",
    inputs: &[
        one("condition", "B"),
        one("X", "T"),
        one("x_scale", "TF"),
        one("x_zero_point", "T"),
        one("Y", "T"),
        one("y_scale", "TF"),
        one("y_zero_point", "T"),
        one("z_scale", "TF"),
        one("z_zero_point", "T"),
    ],
    outputs: &[one("Z", "T")],
    types: &[var("B", TypeSet::of(&[DType::Bool])), var("T", CODES), var("TF", FLOAT)],
    infer: infer_where,
    lower: Some(lower_where),
    ..OP
};

ops![QLINEAR_CONCAT, QLINEAR_WHERE];

/// Returns the input indices of the tensors of `QLinearConcat`. Each is followed by its scale and
/// zero point.
fn tensors(inputs: usize) -> impl Iterator<Item = usize> {
    (2..inputs).step_by(3)
}

fn infer_concat(cx: &mut InferCx<'_>) -> Result<()> {
    let count = cx.input_count();
    ensure!(
        count >= 5 && (count - 2).is_multiple_of(3),
        InvalidGraph,
        "{} inputs behind the result's scale and zero point, expected a tensor, a scale and a zero point for each",
        count.saturating_sub(2)
    );
    let dtype = cx.dtype(1)?;
    for first in tensors(count) {
        // The variadic parameter takes both types, so their order is checked here.
        let expected = [dtype, DType::F32, dtype];
        for (index, expected) in (first..).zip(expected) {
            let actual = cx.dtype(index)?;
            ensure!(
                actual == expected,
                InvalidGraph,
                "input {index} is {}, expected {}",
                actual.name(),
                expected.name()
            );
        }
        check_single(cx, [first + 1, first + 2])?;
    }
    check_single(cx, [0, 1])?;
    // Scales and zero points are no parts of the result.
    let known: Vec<&[Dim]> = tensors(count).filter_map(|index| cx.shape(index)).collect();
    let are_all = known.len() == tensors(count).count();
    let Some((mut shape, axis)) = concat::joined(cx, &known)? else { return Ok(()) };
    // An input of unknown shape makes the size along `axis` unknown, but not the others.
    if !are_all {
        shape = axes::with_size(&shape, axis, cx.fresh());
    }
    cx.set_shape(0, shape)
}

fn lower_concat(draft: &mut Draft<'_>) -> Result<()> {
    let mut parts = Vec::new();
    for first in tensors(draft.inputs.len()) {
        parts.push(requantized(draft, codes_at(first), [0, 1])?);
    }
    let axis = Attribute::Int(int(draft, "axis")?);
    draft.become_op("Concat", &parts, &[("axis", axis)]);
    Ok(())
}

fn infer_where(cx: &mut InferCx<'_>) -> Result<()> {
    check_single(cx, [2, 3, 5, 6, 7, 8])?;
    match cx.broadcast(&[0, 1, 4])? {
        Some(shape) => cx.set_shape(0, shape),
        None => Ok(()),
    }
}

fn lower_where(draft: &mut Draft<'_>) -> Result<()> {
    let condition = draft.required(0)?;
    let x = requantized(draft, codes_at(1), [7, 8])?;
    let y = requantized(draft, codes_at(4), [7, 8])?;
    draft.become_op("Where", &[condition, x, y], &[]);
    Ok(())
}
