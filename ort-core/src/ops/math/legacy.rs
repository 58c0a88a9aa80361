//! Opset upgrades shared by many elementwise operators.

use crate::dtype::{DType, TypeSet};
use crate::ir::Attribute;
use crate::spec::Draft;
use crate::tensor::Tensor;
use crate::{Result, error};

/// Drops `consumed_inputs`, an in-place hint of versions before 6.
pub(super) fn drop_hint(draft: &mut Draft<'_>) -> Result<()> {
    draft.take_attr("consumed_inputs");
    Ok(())
}

/// Before version 7 the second input broadcast only with the attribute `broadcast`, aligned at the
/// dimension `axis` of the first. Trailing dimensions of size 1 express that under numpy's rules.
pub(super) fn broadcast_along_axis(draft: &mut Draft<'_>) -> Result<()> {
    let broadcast = take_int(draft, "broadcast")?.unwrap_or(0);
    let axis = take_int(draft, "axis")?;
    // Without `axis` these versions align the last dimensions, as numpy does.
    match axis.filter(|_| broadcast != 0) {
        None => Ok(()),
        Some(axis) => append_ones(draft, axis),
    }
}

/// Before version 7 the slope of `PRelu` held one value per channel, dimension 1.
pub(super) fn slope_by_channel(draft: &mut Draft<'_>) -> Result<()> {
    let slope = draft.shape(1).or_else(|| {
        let tensor = draft.constant_input(1)?;
        Some(tensor.shape().iter().map(|&size| (size as i64).into()).collect())
    });
    // A single value broadcasts as it is. An unknown shape counts as one value per channel.
    let alone = slope.is_some_and(|shape| shape.iter().all(|size| size.as_constant() == Some(1)));
    if alone { Ok(()) } else { append_ones(draft, 1) }
}

/// Upgrades an operator that once took integers: it runs in double precision, and the result is
/// cast back.
pub(in crate::ops) fn integers_as_floats(draft: &mut Draft<'_>) -> Result<()> {
    if !draft.dtype(0).is_ok_and(|dtype| TypeSet::INTEGERS.contains(dtype)) {
        return Ok(());
    }
    let (input, op, given) = (draft.required(0)?, draft.op.clone(), draft.attrs.clone());
    let attrs: Vec<(&str, Attribute)> =
        given.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    let to = Attribute::Int(i64::from(DType::F64.onnx_code()));
    let floats = draft.emit("Cast", &[input], &[("to", to)])?;
    draft.set_input(0, floats);
    let inputs = draft.inputs.clone();
    let result = draft.emit_many(&op, &inputs, &attrs, 1)?;
    let result = result.first().copied().ok_or_else(|| error!(Fail, "{op} has one output"))?;
    let result = draft.emit("CastLike", &[result, input], &[])?;
    draft.replace(&[result])
}

/// Removes an integer attribute and returns it.
fn take_int(draft: &mut Draft<'_>, name: &str) -> Result<Option<i64>> {
    match draft.take_attr(name) {
        None => Ok(None),
        Some(Attribute::Int(value)) => Ok(Some(value)),
        Some(_) => Err(error!(InvalidGraph, "attribute '{name}' is not an integer")),
    }
}

/// Appends dimensions of size 1 to the second input until it aligns at `axis` of the first. Ranks
/// may be unknown at load time, so we emit shape arithmetic, which inference folds.
fn append_ones(draft: &mut Draft<'_>, axis: i64) -> Result<()> {
    let (a, b) = (draft.required(0)?, draft.required(1)?);
    let shape_a = draft.emit("Shape", &[a], &[])?;
    let rank_a = draft.emit("Shape", &[shape_a], &[])?;
    let shape_b = draft.emit("Shape", &[b], &[])?;
    let rank_b = draft.emit("Shape", &[shape_b], &[])?;
    // The second input must reach from `axis` to the end: `rank_a - axis` dimensions, and for a
    // negative axis, which counts from the end, just `-axis`.
    let at = draft.constant_ints(&[axis])?;
    let behind =
        if axis < 0 { draft.emit("Neg", &[at], &[])? } else { draft.emit("Sub", &[rank_a, at], &[])? };
    let count = draft.emit("Sub", &[behind, rank_b], &[])?;
    let one = Attribute::Tensor(Tensor::from_slice(&[1], &[1i64])?);
    let ones = draft.emit("ConstantOfShape", &[count], &[("value", one)])?;
    let shape = draft.emit("Concat", &[shape_b, ones], &[("axis", Attribute::Int(0))])?;
    let reshaped = draft.emit("Reshape", &[b, shape], &[])?;
    draft.set_input(1, reshaped);
    Ok(())
}
