//! Sequences without their padding, and what goes with them: `RemovePadding`, `RestorePadding`,
//! `GatedRelativePositionBias` and `UnfoldTensor`.

use super::{check_per_column, check_rank, int, number};
use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ir::{Attribute, ValueId};
use crate::ops;
use crate::ops::axes;
use crate::spec::{AttrKind, Draft, InferCx, MICROSOFT, OP, OpSpec, attr, one, opt, var};
use crate::tensor::Tensor;
use crate::{Result, ensure, error};

const SMALL: TypeSet = TypeSet::of(&[DType::F16, DType::F32]);
const INT32: TypeSet = TypeSet::of(&[DType::I32]);

static REMOVE_PADDING: OpSpec = OpSpec {
    domain: MICROSOFT,
    name: "RemovePadding",
    inputs: &[one("input", "T"), one("sequence_token_count", "M")],
    outputs: &[
        one("output", "T"),
        one("token_offset", "M"),
        one("cumulated_seq_len", "M"),
        one("max_seq_len", "M"),
    ],
    types: &[var("T", SMALL), var("M", INT32)],
    infer: infer_remove,
    lower: Some(lower_remove),
    ..OP
};

static RESTORE_PADDING: OpSpec = OpSpec {
    domain: MICROSOFT,
    name: "RestorePadding",
    inputs: &[one("input", "T"), one("token_offset", "M")],
    outputs: &[one("output", "T")],
    types: &[var("T", SMALL), var("M", INT32)],
    infer: infer_restore,
    lower: Some(lower_restore),
    ..OP
};

static GATED_RELATIVE_POSITION_BIAS: OpSpec = OpSpec {
    domain: MICROSOFT,
    name: "GatedRelativePositionBias",
    inputs: &[
        one("query_layer", "T"),
        one("query_bias", "T"),
        one("rel_pos", "T"),
        one("weight", "T"),
        one("bias", "T"),
        one("eco_a", "T"),
        opt("token_offset", "M"),
    ],
    outputs: &[one("output", "T")],
    types: &[var("T", SMALL), var("M", INT32)],
    attrs: &[attr::required("num_heads", AttrKind::Int)],
    infer: infer_gated,
    lower: Some(lower_gated),
    ..OP
};

static UNFOLD_TENSOR: OpSpec = OpSpec {
    domain: MICROSOFT,
    name: "UnfoldTensor",
    inputs: &[one("input", "T")],
    outputs: &[one("output", "T")],
    types: &[var("T", TypeSet::ALL_TENSOR)],
    attrs: &[attr::int("dim", -1), attr::required("size", AttrKind::Int), attr::int("step", 1)],
    infer: infer_unfold,
    lower: Some(lower_unfold),
    ..OP
};

ops![REMOVE_PADDING, RESTORE_PADDING, GATED_RELATIVE_POSITION_BIAS, UNFOLD_TENSOR];

fn infer_remove(cx: &mut InferCx<'_>) -> Result<()> {
    check_rank(cx, 0, "input", 3)?;
    let Some([batch, length, width]) = cx.shape(0) else { return Ok(()) };
    if let Some(counts) = cx.shape(1) {
        let [counts] = counts else {
            return Err(error!(InvalidGraph, "sequence_token_count has rank {}, expected 1", counts.len()));
        };
        cx.require_equal("the length of sequence_token_count", counts, batch)?;
    }
    let (batch, length, width) = (batch.clone(), length.clone(), width.clone());
    let tokens = cx.fresh();
    cx.set_shape(0, vec![tokens, width])?;
    cx.set_shape(1, vec![batch.clone(), length])?;
    cx.set_shape(2, vec![batch + 1])?;
    cx.set_shape(3, vec![Dim::constant(1)])
}

fn cast(draft: &mut Draft<'_>, value: ValueId, to: DType) -> Result<ValueId> {
    draft.emit("Cast", &[value], &[("to", Attribute::Int(i64::from(to.onnx_code())))])
}

/// Emits a reshape to sizes of which -1 takes the rest.
fn reshape(draft: &mut Draft<'_>, value: ValueId, sizes: &[i64]) -> Result<ValueId> {
    let sizes = draft.constant_ints(sizes)?;
    draft.emit("Reshape", &[value, sizes], &[])
}

/// Emits the indices of the elements of a mask that are set.
fn places_of(draft: &mut Draft<'_>, mask: ValueId) -> Result<ValueId> {
    let places = draft.emit("NonZero", &[mask], &[])?;
    reshape(draft, places, &[-1])
}

/// The tokens of all sequences, then their places: first those of tokens, then those of padding.
fn lower_remove(draft: &mut Draft<'_>) -> Result<()> {
    let (input, counts) = (draft.required(0)?, draft.required(1)?);
    let part = |start: i64, end: i64| [("start", Attribute::Int(start)), ("end", Attribute::Int(end))];
    let counts = cast(draft, counts, DType::I64)?;
    let column = reshape(draft, counts, &[-1, 1])?;
    let length = draft.emit("Shape", &[input], &part(1, 2))?;
    let length = reshape(draft, length, &[])?;
    let [zero, step] = [0, 1].map(|value| Tensor::scalar(value as i64));
    let (zero, step) = (draft.constant(zero?), draft.constant(step?));
    let places = draft.emit("Range", &[zero, length, step], &[])?;
    let is_token = draft.emit("Less", &[places, column], &[])?;
    let is_token = reshape(draft, is_token, &[-1])?;
    let is_padding = draft.emit("Not", &[is_token], &[])?;
    let (tokens, padding) = (places_of(draft, is_token)?, places_of(draft, is_padding)?);
    let axis = [("axis", Attribute::Int(0))];
    let order = draft.emit("Concat", &[tokens, padding], &axis)?;
    let shape = draft.emit("Shape", &[input], &part(0, 2))?;
    let order = draft.emit("Reshape", &[order, shape], &[])?;
    let order = cast(draft, order, DType::I32)?;
    let width = draft.emit("Shape", &[input], &part(2, 3))?;
    let rest = draft.constant_ints(&[-1])?;
    let rows = draft.emit("Concat", &[rest, width], &axis)?;
    let rows = draft.emit("Reshape", &[input, rows], &[])?;
    let rows = draft.emit("Gather", &[rows, tokens], &[])?;
    // The sequences start at 0 and end where the next one starts.
    let axis_input = draft.constant(Tensor::scalar(0_i64)?);
    let ends = draft.emit("CumSum", &[counts, axis_input], &[])?;
    let first = draft.constant_ints(&[0])?;
    let ends = draft.emit("Concat", &[first, ends], &axis)?;
    let ends = cast(draft, ends, DType::I32)?;
    let longest = draft.emit("ReduceMax", &[counts, first], &[("keepdims", Attribute::Int(1))])?;
    let longest = cast(draft, longest, DType::I32)?;
    draft.replace(&[rows, order, ends, longest])
}

fn infer_restore(cx: &mut InferCx<'_>) -> Result<()> {
    check_rank(cx, 0, "input", 2)?;
    check_rank(cx, 1, "token_offset", 2)?;
    let (Some([_, width]), Some([batch, length])) = (cx.shape(0), cx.shape(1)) else { return Ok(()) };
    cx.set_shape(0, vec![batch.clone(), length.clone(), width.clone()])
}

/// Zeros, into which the tokens are written at the first places.
fn lower_restore(draft: &mut Draft<'_>) -> Result<()> {
    let (input, offsets) = (draft.required(0)?, draft.required(1)?);
    let dtype = draft.dtype(0)?;
    let places = cast(draft, offsets, DType::I64)?;
    let places = reshape(draft, places, &[-1])?;
    let (all, axis) = (draft.emit("Shape", &[places], &[])?, [("axis", Attribute::Int(0))]);
    let tokens = draft.emit("Shape", &[input], &[("end", Attribute::Int(1))])?;
    let width = draft.emit("Shape", &[input], &[("start", Attribute::Int(1))])?;
    let zero = draft.constant_ints(&[0])?;
    let places = draft.emit("Slice", &[places, zero, tokens], &[])?;
    let places = reshape(draft, places, &[-1, 1])?;
    let shape = draft.emit("Concat", &[all, width], &axis)?;
    let nothing = number(draft, 0.0, dtype)?;
    let zeros = draft.emit("Expand", &[nothing, shape], &[])?;
    let rows = draft.emit("ScatterND", &[zeros, places, input], &[])?;
    let outer = draft.emit("Shape", &[offsets], &[])?;
    let shape = draft.emit("Concat", &[outer, width], &axis)?;
    let result = draft.emit("Reshape", &[rows, shape], &[])?;
    draft.replace(&[result])
}

fn infer_gated(cx: &mut InferCx<'_>) -> Result<()> {
    let heads = cx.attrs.int("num_heads")?;
    ensure!(heads > 0, InvalidGraph, "num_heads is {heads}, expected at least 1");
    check_rank(cx, 3, "weight", 2)?;
    check_rank(cx, 2, "rel_pos", 4)?;
    if let Some(shape) = cx.shape(0) {
        check_per_column(cx, 1, "query_bias", shape)?;
    }
    let lengths = match (cx.shape(6), cx.shape(0)) {
        (Some([batch, length]), _) => Some([batch, length]),
        (None, Some([batch, length, _])) if !cx.has_input(6) => Some([batch, length]),
        (None, Some(shape)) if !cx.has_input(6) => {
            return Err(error!(InvalidGraph, "query_layer has rank {}, expected 3", shape.len()));
        }
        _ => None,
    };
    let Some([batch, length]) = lengths.map(|lengths| lengths.map(Dim::clone)) else { return Ok(()) };
    cx.set_shape(0, vec![batch, Dim::constant(heads), length.clone(), length])
}

/// The relative positions, scaled by a gate that each query computes from two sums of projections.
fn lower_gated(draft: &mut Draft<'_>) -> Result<()> {
    let (heads, dtype) = (int(draft, "num_heads")?, draft.dtype(0)?);
    let (mut query, bias) = (draft.required(0)?, draft.required(1)?);
    query = draft.emit("Add", &[query, bias], &[])?;
    if let Some(offsets) = draft.input(6) {
        let restored = draft.emit_in((MICROSOFT, "RestorePadding"), &[Some(query), Some(offsets)], &[], 1)?;
        query = restored.first().copied().ok_or_else(|| error!(Fail, "RestorePadding has one output"))?;
    }
    let query = reshape(draft, query, &[0, 0, heads, -1])?;
    let order = [("perm", Attribute::Ints(vec![0, 2, 1, 3]))];
    let query = draft.emit("Transpose", &[query], &order)?;
    let (weight, bias) = (draft.required(3)?, draft.required(4)?);
    let product = draft.emit("MatMul", &[query, weight], &[])?;
    let product = draft.emit("Add", &[product, bias], &[])?;
    // The projection is two halves, whose sums are two gates.
    let mut gates = [product; 2];
    let halves = draft.emit_many(
        "Split",
        &[Some(product)],
        &[("axis", Attribute::Int(-1)), ("num_outputs", Attribute::Int(2))],
        2,
    )?;
    let last = draft.constant_ints(&[-1])?;
    for (gate, half) in gates.iter_mut().zip(halves) {
        let sum = draft.emit("ReduceSum", &[half, last], &[])?;
        *gate = draft.emit("Sigmoid", &[sum], &[])?;
    }
    let [update, reset] = gates;
    let eco = draft.required(5)?;
    let (one, two) = (number(draft, 1.0, dtype)?, number(draft, 2.0, dtype)?);
    let reset = draft.emit("Mul", &[reset, eco], &[])?;
    let reset = draft.emit("Sub", &[reset, one], &[])?;
    let gate = draft.emit("Mul", &[update, reset], &[])?;
    let gate = draft.emit("Add", &[gate, two], &[])?;
    let positions = draft.required(2)?;
    let result = draft.emit("Mul", &[gate, positions], &[])?;
    draft.replace(&[result])
}

/// Returns the size and the step of the windows.
fn windows(size: i64, step: i64) -> Result<[i64; 2]> {
    ensure!(size > 0 && step > 0, InvalidGraph, "size is {size} and step {step}, expected at least 1");
    Ok([size, step])
}

fn infer_unfold(cx: &mut InferCx<'_>) -> Result<()> {
    let [size, step] = windows(cx.attrs.int("size")?, cx.attrs.int("step")?)?;
    let Some(shape) = cx.shape(0) else { return Ok(()) };
    let axis = axes::normalize(cx.attrs.int("dim")?, shape.len())?;
    let mut shape = shape.to_vec();
    if let Some(along) = shape.get_mut(axis) {
        if let Some(own) = along.as_constant() {
            ensure!(own >= size, InvalidGraph, "size is {size}, but dimension {axis} has {own}");
        }
        *along = (&*along - size).floor_div(&Dim::constant(step)) + 1;
    }
    shape.push(Dim::constant(size));
    cx.set_shape(0, shape)
}

/// Gathers the windows along the dimension, and moves their elements to the end.
fn lower_unfold(draft: &mut Draft<'_>) -> Result<()> {
    let [size, step] = windows(int(draft, "size")?, int(draft, "step")?)?;
    let input = draft.required(0)?;
    let rank = draft.shape(0).map(|shape| shape.len());
    let rank = rank.ok_or_else(|| error!(NotImplemented, "windows of a tensor of unknown rank"))?;
    let axis = axes::normalize(int(draft, "dim")?, rank)? as i64;
    let part = [("start", Attribute::Int(axis)), ("end", Attribute::Int(axis + 1))];
    let length = draft.emit("Shape", &[input], &part)?;
    let length = reshape(draft, length, &[])?;
    let [zero, one, size_input, step, before] = [0, 1, size, step, size - 1].map(Tensor::scalar);
    let [zero, one, size_input, step, before] =
        [zero?, one?, size_input?, step?, before?].map(|tensor| draft.constant(tensor));
    let end = draft.emit("Sub", &[length, before], &[])?;
    let starts = draft.emit("Range", &[zero, end, step], &[])?;
    let starts = reshape(draft, starts, &[-1, 1])?;
    let within = draft.emit("Range", &[zero, size_input, one], &[])?;
    let places = draft.emit("Add", &[starts, within], &[])?;
    let parts = draft.emit("Gather", &[input, places], &[("axis", Attribute::Int(axis))])?;
    // The elements of a window follow it: they move from `axis + 1` to the end.
    let (rank, axis) = (rank as i64, axis + 1);
    let order: Vec<i64> = (0..axis).chain(axis + 1..=rank).chain([axis]).collect();
    let result = draft.emit("Transpose", &[parts], &[("perm", Attribute::Ints(order))])?;
    draft.replace(&[result])
}
