//! Broadcasting and tiling: `Expand` and `Tile`.

use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ir::Attribute;
use crate::ops;
use crate::ops::batch;
use crate::spec::{
    BatchRule, Draft, Grad, InferCx, OP, OpSpec, SymTensor, Traits, Upgrade, ViewCx, ViewOf, broadcast,
    gradient, one, var,
};
use crate::tensor::Tensor;
use crate::{ErrorKind, Result, ensure};

use super::constant::fresh_dims;
use super::geometry::Strided;
use super::gradients;
use super::{constant_sizes, set_elements};

static EXPAND: OpSpec = OpSpec {
    name: "Expand",
    since: 13,
    first: 8,
    inputs: &[one("input", "T"), one("shape", "tensor(int64)").host()],
    outputs: &[one("output", "T")],
    types: &[var("T", TypeSet::ALL_TENSOR)],
    traits: Traits::MOVES_DATA,
    infer: infer_expand,
    view: Some(view_if_equal),
    grad: Grad::Rule(gradient::of_broadcast),
    batch: BatchRule::Rule(batch::repeated),
    ..OP
};

static TILE: OpSpec = OpSpec {
    name: "Tile",
    since: 13,
    inputs: &[one("input", "T"), one("repeats", "T1").host()],
    outputs: &[one("output", "T")],
    types: &[var("T", TypeSet::ALL_TENSOR), var("T1", TypeSet::of(&[DType::I64]))],
    traits: Traits::MOVES_DATA,
    infer: infer_tile,
    view: Some(view_if_equal),
    upgrades: &[Upgrade { before: 6, apply: repeats_of_one_axis }],
    grad: Grad::Rule(gradients::of_tile),
    batch: BatchRule::Rule(batch::repeated),
    ..OP
};

ops![EXPAND, TILE];

/// Before version 6, `Tile` repeated one axis: `tiles` and `axis` were inputs of one element, of
/// the data's type.
///
/// The rank may be unknown during loading, so the repeats are computed from the shape at run time.
fn repeats_of_one_axis(draft: &mut Draft<'_>) -> Result<()> {
    let (data, tiles, axis) = (draft.required(0)?, draft.required(1)?, draft.required(2)?);
    let vector = draft.constant_ints(&[1])?;
    let to = Attribute::Int(i64::from(DType::I64.onnx_code()));
    let mut whole = |value| {
        let value = draft.emit("Cast", &[value], &[("to", to.clone())])?;
        draft.emit("Reshape", &[value, vector], &[])
    };
    let (tiles, axis) = (whole(tiles)?, whole(axis)?);
    let shape = draft.emit("Shape", &[data], &[])?;
    let rank = draft.emit("Shape", &[shape], &[])?;
    let one = Attribute::Tensor(Tensor::from_slice(&[1], &[1i64])?);
    let ones = draft.emit("ConstantOfShape", &[rank], &[("value", one)])?;
    // Repeats of 1 for all axes but one.
    let repeats = draft.emit("ScatterElements", &[ones, axis, tiles], &[])?;
    draft.inputs = [Some(data), Some(repeats)].into();
    Ok(())
}

fn infer_expand(cx: &mut InferCx<'_>) -> Result<()> {
    let Some(input) = cx.shape(0) else { return Ok(()) };
    let target = match (cx.dims(1), cx.shape(1)) {
        (Some(target), _) => target,
        (None, Some([length])) => {
            let Some(unknown) = fresh_dims(cx, length) else { return Ok(()) };
            // An unknown size may be 1, which keeps the input's size: nothing is known but the
            // rank.
            let rank = unknown.len().max(input.len());
            let sizes = (0..rank).map(|_| cx.fresh()).collect();
            return cx.set_shape(0, sizes);
        }
        _ => return Ok(()),
    };
    let negative = target.iter().any(|size| size.as_constant().is_some_and(|size| size < 0));
    ensure!(
        !negative,
        InvalidGraph,
        help = "a size of 1 keeps the input's",
        "the shape {target:?} has a negative size"
    );
    // The standard broadcasts both ways: a 1 in `shape` keeps the input's size.
    let shape = broadcast::dims(&[input, &target])
        .map_err(|problem| problem.reclassified(&[ErrorKind::InvalidGraph], ErrorKind::InvalidArgument))?;
    if let (Some(symbolic), Some(from), Some(to)) =
        (cx.symbolic(0), constant_sizes(input), constant_sizes(&shape))
        && SymTensor::follows(cx.dtype(0)?, SymTensor::extent(&to))
    {
        let elements = Strided::expand(&from, &to)?.collect(&symbolic.elements)?;
        set_elements(cx, cx.dtype(0)?, &shape, elements)?;
    }
    cx.set_shape(0, shape)
}

fn infer_tile(cx: &mut InferCx<'_>) -> Result<()> {
    let Some(input) = cx.shape(0) else { return Ok(()) };
    let Some(repeats) = cx.dims(1) else {
        let sizes = input.iter().map(|_| cx.fresh()).collect();
        return cx.set_shape(0, sizes);
    };
    ensure!(
        repeats.len() == input.len(),
        InvalidArgument,
        "repeats {repeats:?} do not have one value for each axis of shape {input:?}"
    );
    let negative = repeats.iter().any(|repeat| repeat.as_constant().is_some_and(|repeat| repeat < 0));
    ensure!(!negative, InvalidArgument, "repeats {repeats:?} have a negative value");
    let shape: Vec<Dim> = input.iter().zip(&repeats).map(|(size, repeat)| size * repeat).collect();
    if let (Some(symbolic), Some(from), Some(to)) =
        (cx.symbolic(0), constant_sizes(input), constant_sizes(&shape))
        && let Some(repeats) = constant_sizes(&repeats)
        && SymTensor::follows(cx.dtype(0)?, SymTensor::extent(&to))
    {
        let elements = Strided::tile(&from, &repeats).collect(&symbolic.elements)?;
        set_elements(cx, cx.dtype(0)?, &shape, elements)?;
    }
    cx.set_shape(0, shape)
}

/// A view if the element counts agree, because then nothing is repeated.
fn view_if_equal(cx: &ViewCx<'_>) -> Option<ViewOf> {
    let count = |shape: &[usize]| shape.iter().try_fold(1usize, |count, &size| count.checked_mul(size));
    let input = count(cx.inputs.first()?.as_ref()?)?;
    let output = count(cx.outputs.first()?.as_ref()?)?;
    if input == output { ViewOf::whole(cx) } else { None }
}
