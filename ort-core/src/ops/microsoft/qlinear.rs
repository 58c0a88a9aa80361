//! Building blocks of the `QLinear` operators: tensors of 8-bit quantized values `q` that represent
//! `(q - zero) * scale`.
//!
//! A zero point that is left out is 0. Rounding follows ONNX Runtime to the bit: divide by the
//! scale, round half to even, then add the zero point, as `QuantizeLinear` does. Adding an odd zero
//! point before rounding would send ties the other way.

use super::number;
use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ir::{Attribute, ValueId};
use crate::spec::{Draft, InferCx};
use crate::{Result, ensure, error};

/// The 8-bit quantized types.
pub(super) const CODES: TypeSet = TypeSet::of(&[DType::I8, DType::U8]);

/// The inputs of a quantized tensor at `first`, in the usual order: scale and zero point follow it.
pub(super) const fn codes_at(first: usize) -> Codes {
    Codes { codes: first, scale: first + 1, zero: first + 2 }
}

/// The input indices of a quantized tensor, its scale and its zero point.
#[derive(Clone, Copy)]
pub(super) struct Codes {
    codes: usize,
    scale: usize,
    zero: usize,
}

/// Refuses scales and zero points, at these inputs, that have more than one element.
pub(super) fn check_single(cx: &InferCx<'_>, places: impl IntoIterator<Item = usize>) -> Result<()> {
    for index in places {
        let Some(shape) = cx.shape(index) else { continue };
        let is_single = match shape {
            [] => true,
            [length] => length.as_constant().is_none_or(|length| length == 1),
            _ => false,
        };
        ensure!(
            is_single,
            InvalidGraph,
            "the scale or zero point at input {index} has shape {shape:?}, expected one element"
        );
    }
    Ok(())
}

/// Returns all elements but the first; a list of fewer than two stays whole.
fn behind_first<T>(list: &mut [T]) -> &mut [T] {
    if list.len() < 2 { list } else { list.split_at_mut(1).1 }
}

/// Returns the shape of an image as NCHW; `last` says that it is NHWC.
pub(in crate::ops) fn channels_first(image: &[Dim], last: bool) -> Result<Vec<Dim>> {
    ensure!(image.len() >= 3, InvalidGraph, "an image has rank 3 or more, got rank {}", image.len());
    let mut dims = image.to_vec();
    if last {
        // The batch stays first in both layouts.
        behind_first(&mut dims).rotate_right(1);
    }
    Ok(dims)
}

/// Sets output 0 to an NCHW shape, converted to NHWC if `last`.
pub(in crate::ops) fn set_image(cx: &mut InferCx<'_>, mut shape: Vec<Dim>, last: bool) -> Result<()> {
    if last {
        behind_first(&mut shape).rotate_left(1);
    }
    cx.set_shape(0, shape)
}

/// Returns the rank of the image at input 0, which a decomposition must know. It follows from the
/// image, else from the weights at input `weights`, else from `kernel_shape`.
pub(in crate::ops) fn image_rank(draft: &Draft<'_>, weights: Option<usize>) -> Result<usize> {
    // The transpositions around a decomposed image operator need a `perm` of the image's rank.
    let own = draft.shape(0).map(|shape| shape.len());
    let of_weights = || weights.and_then(|index| draft.shape(index)).map(|shape| shape.len());
    let of_windows = || match draft.attr("kernel_shape") {
        Some(Attribute::Ints(kernel)) if !kernel.is_empty() => Some(kernel.len() + 2),
        _ => None,
    };
    let rank = own.or_else(of_weights).or_else(of_windows).ok_or_else(|| {
        error!(NotImplemented, "the rank of the image is not known")
            .help("give the model's input, or the image's value_info, a shape; or the node the attribute 'kernel_shape'")
    })?;
    ensure!(rank >= 3, InvalidGraph, "an image has rank 3 or more, got rank {rank}");
    Ok(rank)
}

/// Transposes an image from NHWC to NCHW, or back.
pub(in crate::ops) fn move_channels(
    draft: &mut Draft<'_>,
    image: ValueId,
    rank: usize,
    to_front: bool,
) -> Result<ValueId> {
    let mut order: Vec<i64> = (0..rank as i64).collect();
    if to_front {
        behind_first(&mut order).rotate_right(1)
    } else {
        behind_first(&mut order).rotate_left(1)
    }
    draft.emit("Transpose", &[image], &[("perm", Attribute::Ints(order))])
}

/// Reshapes a value of one element to a scalar, so that it adds no dimension by broadcasting.
pub(super) fn scalar(draft: &mut Draft<'_>, value: ValueId) -> Result<ValueId> {
    if draft.value_type(value).shape().is_some_and(<[Dim]>::is_empty) {
        return Ok(value);
    }
    let shape = draft.constant_ints(&[])?;
    draft.emit("Reshape", &[value, shape], &[])
}

/// Emits a cast to `dtype`.
pub(super) fn cast(draft: &mut Draft<'_>, value: ValueId, dtype: DType) -> Result<ValueId> {
    draft.emit("Cast", &[value], &[("to", code(dtype))])
}

/// Returns a type as an attribute holds it.
fn code(dtype: DType) -> Attribute {
    Attribute::Int(i64::from(dtype.onnx_code()))
}

/// Dequantizes a tensor with another scale than its own.
pub(super) fn scaled(draft: &mut Draft<'_>, place: Codes, scale: ValueId) -> Result<ValueId> {
    let inputs = [Some(draft.required(place.codes)?), Some(scale), draft.input(place.zero)];
    draft.emit_one("DequantizeLinear", &inputs, &[])
}

/// Dequantizes a tensor.
pub(super) fn numbers(draft: &mut Draft<'_>, place: Codes) -> Result<ValueId> {
    let scale = draft.required(place.scale)?;
    scaled(draft, place, scale)
}

/// Returns the quantized values minus their zero point, as floats.
pub(super) fn differences(draft: &mut Draft<'_>, place: Codes) -> Result<ValueId> {
    let one = number(draft, 1.0, DType::F32)?;
    scaled(draft, place, one)
}

/// Turns the draft into the quantization of `numbers`: divided by the scale, rounded, plus the zero
/// point.
pub(super) fn quantize(
    draft: &mut Draft<'_>,
    numbers: ValueId,
    scale: ValueId,
    zero: Option<ValueId>,
    dtype: DType,
) -> Result<()> {
    let inputs: Vec<ValueId> = [numbers, scale].into_iter().chain(zero).collect();
    draft.become_op("QuantizeLinear", &inputs, &[("output_dtype", code(dtype))]);
    Ok(())
}

/// As [`quantize`], for numbers that are already divided by the scale.
pub(super) fn round(
    draft: &mut Draft<'_>,
    numbers: ValueId,
    zero: Option<ValueId>,
    dtype: DType,
) -> Result<()> {
    let one = number(draft, 1.0, DType::F32)?;
    quantize(draft, numbers, one, zero, dtype)
}

/// As [`round`], for a zero point of rank 0 or 1, which becomes a scalar like the scale.
pub(super) fn round_sum(
    draft: &mut Draft<'_>,
    numbers: ValueId,
    zero: Option<ValueId>,
    dtype: DType,
) -> Result<()> {
    let zero = zero.map(|zero| scalar(draft, zero)).transpose()?;
    round(draft, numbers, zero, dtype)
}

/// Requantizes the tensor at `place` to the scale and zero point at these inputs.
pub(super) fn requantized(draft: &mut Draft<'_>, place: Codes, [scale, zero]: [usize; 2]) -> Result<ValueId> {
    // Equal parameters on both sides: the quantized values pass unchanged.
    if same(draft, place.scale, scale) && same(draft, place.zero, zero) {
        return draft.required(place.codes);
    }
    let numbers = numbers(draft, place)?;
    let inputs = [numbers, draft.required(scale)?, draft.required(zero)?];
    draft.emit("QuantizeLinear", &inputs, &[])
}

/// Returns whether two inputs are one value, or bitwise equal constants.
fn same(draft: &Draft<'_>, a: usize, b: usize) -> bool {
    let constants = || {
        let [a, b] = [draft.constant_input(a)?, draft.constant_input(b)?];
        Some(a.dtype() == b.dtype() && a.view().bytes().ok()? == b.view().bytes().ok()?)
    };
    // Two omitted zero points are equal as well.
    draft.input(a) == draft.input(b) || constants().unwrap_or(false)
}
