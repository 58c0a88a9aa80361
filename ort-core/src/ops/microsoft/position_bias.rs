//! `RelativePositionBias`: the relative positions of T5, in buckets that widen with the distance.

use super::{check_rank, int, number};
use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ir::{Attribute, ValueId};
use crate::ops;
use crate::spec::{AttrKind, Draft, InferCx, MICROSOFT, OP, OpSpec, attr, one, var};
use crate::{Result, ensure, error};

static RELATIVE_POSITION_BIAS: OpSpec = OpSpec {
    domain: MICROSOFT,
    name: "RelativePositionBias",
    inputs: &[one("bias_table", "T"), one("query_length", "U").host(), one("key_length", "U").host()],
    outputs: &[one("output", "T")],
    types: &[var("T", TypeSet::of(&[DType::F16, DType::F32])), var("U", TypeSet::of(&[DType::I64]))],
    attrs: &[attr::int("is_bidirectional", 0), attr::required("max_distance", AttrKind::Int)],
    infer,
    lower: Some(lower),
    ..OP
};

ops![RELATIVE_POSITION_BIAS];

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let distance = cx.attrs.int("max_distance")?;
    ensure!(distance > 0, InvalidGraph, "max_distance is {distance}, expected at least 1");
    check_rank(cx, 0, "bias_table", 2)?;
    let Some([_, heads]) = cx.shape(0) else { return Ok(()) };
    let length = |index: usize| cx.dims(index).and_then(|dims| dims.into_iter().next());
    let [queries, keys] = [1, 2].map(|index| length(index).unwrap_or_else(|| cx.fresh()));
    cx.set_shape(0, vec![Dim::constant(1), heads.clone(), queries, keys])
}

/// Emits the numbers from 0 to below the one element of an input.
fn places(draft: &mut Draft<'_>, index: usize) -> Result<ValueId> {
    let (length, scalar) = (draft.required(index)?, draft.constant_ints(&[])?);
    let length = draft.emit("Reshape", &[length, scalar], &[])?;
    let [zero, one] = [draft.constant_ints(&[0])?, draft.constant_ints(&[1])?];
    let [zero, one] = [draft.emit("Squeeze", &[zero], &[])?, draft.emit("Squeeze", &[one], &[])?];
    draft.emit("Range", &[zero, length, one], &[])
}

/// Gathers from the table by bucket. Half of the buckets are for one distance each, the others for
/// distances up to `max_distance` in logarithmic steps. With `is_bidirectional`, keys after the
/// query have buckets of their own.
fn lower(draft: &mut Draft<'_>) -> Result<()> {
    let shape = draft.shape(0).unwrap_or_default();
    let sizes: Option<Vec<i64>> = shape.iter().map(Dim::as_constant).collect();
    let Some([all, heads]) = sizes.as_deref().and_then(<[i64]>::as_array) else {
        return Err(error!(NotImplemented, "a bias_table of unknown shape"));
    };
    let is_bidirectional = int(draft, "is_bidirectional")? != 0;
    let buckets = if is_bidirectional { all / 2 } else { *all };
    let exact = buckets / 2;
    let distance = int(draft, "max_distance")?;
    ensure!(
        exact > 0 && distance > exact,
        InvalidGraph,
        "max_distance is {distance}, expected more than {exact} for {all} buckets"
    );
    let (queries, keys) = (places(draft, 1)?, places(draft, 2)?);
    let axis = draft.constant_ints(&[1])?;
    let queries = draft.emit("Unsqueeze", &[queries, axis], &[])?;
    let position = draft.emit("Sub", &[keys, queries], &[])?;
    let away = draft.emit("Abs", &[position], &[])?;
    let to = |dtype: DType| [("to", Attribute::Int(i64::from(dtype.onnx_code())))];
    let (first, last) = (draft.constant_ints(&[exact])?, draft.constant_ints(&[buckets - 1])?);
    // Closer keys have buckets of their own; the bound keeps their logarithm finite.
    let far = draft.emit("Max", &[away, first], &[])?;
    let far = draft.emit("Cast", &[far], &to(DType::F32))?;
    let step = number(draft, exact as f32, DType::F32)?;
    let ratio = draft.emit("Div", &[far, step], &[])?;
    let logarithm = draft.emit("Log", &[ratio], &[])?;
    let whole = number(draft, (distance as f32 / exact as f32).ln(), DType::F32)?;
    let part = draft.emit("Div", &[logarithm, whole], &[])?;
    let rest = number(draft, (buckets - exact) as f32, DType::F32)?;
    let steps = draft.emit("Mul", &[part, rest], &[])?;
    let steps = draft.emit("Cast", &[steps], &to(DType::I64))?;
    let far = draft.emit("Add", &[steps, first], &[])?;
    let far = draft.emit("Min", &[far, last], &[])?;
    let is_near = draft.emit("Less", &[away, first], &[])?;
    let mut bucket = draft.emit("Where", &[is_near, away, far], &[])?;
    if is_bidirectional {
        let (zero, others) = (draft.constant_ints(&[0])?, draft.constant_ints(&[buckets])?);
        let is_after = draft.emit("Greater", &[position, zero], &[])?;
        let shifted = draft.emit("Add", &[bucket, others], &[])?;
        bucket = draft.emit("Where", &[is_after, shifted, bucket], &[])?;
    }
    // The elements of the table are ordered by head, in spite of its shape.
    let (table, shape) = (draft.required(0)?, draft.constant_ints(&[*heads, *all])?);
    let table = draft.emit("Reshape", &[table, shape], &[])?;
    let bias = draft.emit("Gather", &[table, bucket], &[("axis", Attribute::Int(1))])?;
    let axis = draft.constant_ints(&[0])?;
    let bias = draft.emit("Unsqueeze", &[bias, axis], &[])?;
    draft.replace(&[bias])
}
