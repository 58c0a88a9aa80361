//! `BiasSoftmax`, `BiasDropout`, `BiasAdd` and `BiasSplitGelu`: operators on the sum of an input
//! and a bias.

use super::{check_per_column, check_rank, int};
use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ir::{Attribute, ValueId};
use crate::ops;
use crate::ops::axes;
use crate::ops::math::shared::{broadcast_to_first, same_shape};
use crate::spec::{
    AttrKind, Draft, InferCx, MICROSOFT, OP, OpSpec, Requirement, Traits, attr, one, opt, var,
};
use crate::{Result, ensure, error};

const SMALL: TypeSet = TypeSet::of(&[DType::F16, DType::F32]);

static BIAS_SOFTMAX: OpSpec = OpSpec {
    domain: MICROSOFT,
    name: "BiasSoftmax",
    inputs: &[one("data", "T"), one("bias", "T")],
    outputs: &[one("output", "T")],
    types: &[var("T", TypeSet::IEEE_FLOATS)],
    attrs: &[attr::int("axis", 1), attr::required("is_inner_broadcast", AttrKind::Int)],
    infer: axes::infer_same_along_axis,
    lower: Some(lower_softmax),
    ..OP
};

static BIAS_DROPOUT: OpSpec = OpSpec {
    domain: MICROSOFT,
    name: "BiasDropout",
    inputs: &[
        one("data", "T"),
        one("bias", "T"),
        opt("residual", "T"),
        opt("ratio", "T1"),
        opt("training_mode", "T2"),
    ],
    outputs: &[one("output", "T"), opt("mask", "T2")],
    types: &[var("T", TypeSet::FLOATS), var("T1", TypeSet::FLOATS), var("T2", TypeSet::of(&[DType::Bool]))],
    attrs: &[attr::optional("seed", AttrKind::Int)],
    traits: Traits::RANDOM,
    infer: infer_dropout,
    lower: Some(lower_dropout),
    ..OP
};

static BIAS_ADD: OpSpec = OpSpec {
    domain: MICROSOFT,
    name: "BiasAdd",
    inputs: &[one("X", "T"), one("bias", "T"), one("skip", "T")],
    outputs: &[one("Y", "T")],
    types: &[var("T", SMALL)],
    infer: infer_add,
    lower: Some(|draft| {
        let (input, bias, skip) = (draft.required(0)?, draft.required(1)?, draft.required(2)?);
        let sum = draft.emit("Add", &[input, bias], &[])?;
        draft.become_op("Add", &[sum, skip], &[]);
        Ok(())
    }),
    ..OP
};

/// The left half of the sum times the `Gelu` of the right half.
static BIAS_SPLIT_GELU: OpSpec = OpSpec {
    domain: MICROSOFT,
    name: "BiasSplitGelu",
    inputs: &[one("X", "T"), one("bias", "T")],
    outputs: &[one("Y", "T")],
    types: &[var("T", SMALL)],
    infer: infer_split,
    lower: Some(lower_split),
    ..OP
};

ops![BIAS_SOFTMAX, BIAS_DROPOUT, BIAS_ADD, BIAS_SPLIT_GELU];

/// A softmax over all dimensions from `axis` on, flattened into rows.
///
/// The bias has fewer rows than the data. With `is_inner_broadcast` each bias row serves
/// consecutive data rows; otherwise the bias repeats as a whole.
fn lower_softmax(draft: &mut Draft<'_>) -> Result<()> {
    let (data, bias) = (draft.required(0)?, draft.required(1)?);
    let rank = draft.shape(0).map(|shape| shape.len());
    let rank = rank.ok_or_else(|| error!(NotImplemented, "a softmax of data of unknown rank"))?;
    let axis = axes::normalize(int(draft, "axis")?, rank)? as i64;
    let shape = draft.emit("Shape", &[data], &[])?;
    let product = |draft: &mut Draft<'_>, range: (&'static str, Attribute)| {
        let sizes = draft.emit("Shape", &[data], &[range])?;
        draft.emit("ReduceProd", &[sizes], &[])
    };
    let outer = product(draft, ("end", Attribute::Int(axis)))?;
    let width = product(draft, ("start", Attribute::Int(axis)))?;
    let one = draft.constant_ints(&[1])?;
    // Data without elements may have a width or a bias of 0 rows.
    let quotient = |draft: &mut Draft<'_>, number: ValueId, by: ValueId| {
        let by = draft.emit("Max", &[by, one], &[])?;
        draft.emit("Div", &[number, by], &[])
    };
    let size = draft.emit("Size", &[bias], &[])?;
    let size = draft.emit("Reshape", &[size, one], &[])?;
    let rows = quotient(draft, size, width)?;
    let rest = quotient(draft, outer, rows)?;
    let inner = int(draft, "is_inner_broadcast")? != 0;
    // Splits the rows of the data into two axes, so that the bias broadcasts along one of them.
    let sides = if inner { [[rows, rest], [rows, one]] } else { [[rest, rows], [one, rows]] };
    // Zeros are sizes, not copies.
    let literal = [("allowzero", Attribute::Int(1))];
    // [outer, inner, width], in which `rows` is the number of rows of the bias.
    let mut parts: Vec<ValueId> = Vec::with_capacity(2);
    for (value, [outer, inner]) in [data, bias].into_iter().zip(sides) {
        let sizes = draft.emit("Concat", &[outer, inner, width], &[("axis", Attribute::Int(0))])?;
        parts.push(draft.emit("Reshape", &[value, sizes], &literal)?);
    }
    let sum = draft.emit("Add", &parts, &[])?;
    let result = draft.emit("Softmax", &[sum], &[("axis", Attribute::Int(-1))])?;
    draft.become_op("Reshape", &[result, shape], &literal);
    Ok(())
}

fn infer_dropout(cx: &mut InferCx<'_>) -> Result<()> {
    broadcast_to_first(cx)?;
    let Some(shape) = cx.shape(0).map(<[_]>::to_vec) else { return Ok(()) };
    for (size, own) in shape.iter().rev().zip(cx.shape(1).unwrap_or(&[]).iter().rev()) {
        cx.require(Requirement::broadcast("a size of the bias", own, size))?;
    }
    if let Some(residual) = cx.shape(2) {
        ensure!(
            residual.len() == shape.len(),
            InvalidGraph,
            "the residual has rank {}, expected {}",
            residual.len(),
            shape.len()
        );
        let mut sizes = shape.iter().zip(residual);
        sizes.try_for_each(|(size, own)| cx.require_equal("a size of the residual", own, size))?;
    }
    cx.set(1, DType::Bool, Some(shape));
    Ok(())
}

fn lower_dropout(draft: &mut Draft<'_>) -> Result<()> {
    let (data, bias) = (draft.required(0)?, draft.required(1)?);
    let sum = draft.emit("Add", &[data, bias], &[])?;
    let seed: Vec<(&str, Attribute)> =
        draft.attr("seed").map(|seed| ("seed", seed.clone())).into_iter().collect();
    let inputs = [Some(sum), draft.input(3), draft.input(4)];
    let [mut result, mask] = draft.emit_many("Dropout", &inputs, &seed, 2)?[..] else {
        return Err(error!(Fail, "Dropout has two outputs"));
    };
    // ONNX Runtime adds the residual after the dropout, which never zeroes it.
    if let Some(residual) = draft.input(2) {
        result = draft.emit("Add", &[result, residual], &[])?;
    }
    draft.replace(&[result, mask])
}

fn infer_add(cx: &mut InferCx<'_>) -> Result<()> {
    let Some(shape) = cx.shape(0) else { return Ok(()) };
    check_per_column(cx, 1, "the bias", shape)?;
    check_rank(cx, 2, "the skip", shape.len())?;
    for (size, own) in shape.iter().zip(cx.shape(2).unwrap_or(&[])) {
        cx.require_equal("a size of the skip", own, size)?;
    }
    same_shape(cx)
}

fn infer_split(cx: &mut InferCx<'_>) -> Result<()> {
    let Some(shape) = cx.shape(0) else { return Ok(()) };
    check_per_column(cx, 1, "the bias", shape)?;
    let mut half = shape.to_vec();
    let last = half.last_mut().ok_or_else(|| error!(InvalidGraph, "a scalar has no halves"))?;
    cx.require(Requirement::multiple("the last dimension", last, 2))?;
    *last = last.floor_div(&Dim::constant(2));
    cx.set_shape(0, half)
}

fn lower_split(draft: &mut Draft<'_>) -> Result<()> {
    let (input, bias) = (draft.required(0)?, draft.required(1)?);
    let sum = draft.emit("Add", &[input, bias], &[])?;
    let attrs = [("axis", Attribute::Int(-1)), ("num_outputs", Attribute::Int(2))];
    let [left, right] = draft.emit_many("Split", &[Some(sum)], &attrs, 2)?[..] else {
        return Err(error!(Fail, "Split has as many outputs as it is told"));
    };
    let right = draft.emit("Gelu", &[right], &[])?;
    draft.become_op("Mul", &[left, right], &[]);
    Ok(())
}
