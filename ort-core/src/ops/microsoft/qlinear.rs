//! What the `QLinear` operators share: tensors of 8-bit codes `q` that stand for the numbers `(q -
//! zero) * scale`.
//!
//! A zero point that is left out is 0. ONNX Runtime's rounding is followed to the bit: most
//! operators divide by the scale, round, and add the zero point as `QuantizeLinear` does; some add
//! the zero point first and round the sum, which gives another code for a tie where the zero point
//! is odd.

use super::number;
use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ir::{Attribute, ValueId};
use crate::spec::{Draft, InferCx};
use crate::{Result, ensure, error};

/// The types of codes.
pub(super) const CODES: TypeSet = TypeSet::of(&[DType::I8, DType::U8]);

/// Where a tensor of codes stands among the inputs, in the order of most operators: its scale and
/// its zero point follow it.
pub(super) const fn codes_at(first: usize) -> Codes {
    Codes { codes: first, scale: first + 1, zero: first + 2 }
}

/// The inputs that are a tensor of codes, its scale and its zero point.
#[derive(Clone, Copy)]
pub(super) struct Codes {
    codes: usize,
    scale: usize,
    zero: usize,
}

/// Refuses scales and zero points of more than one element, given by their places among the inputs.
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

/// All but the first, of a list that has two or more.
fn behind_first<T>(list: &mut [T]) -> &mut [T] {
    if list.len() < 2 { list } else { list.split_at_mut(1).1 }
}

/// The dimensions of an image in the order batch, channels, places, where the channels may stand
/// last.
pub(in crate::ops) fn channels_first(image: &[Dim], last: bool) -> Result<Vec<Dim>> {
    ensure!(image.len() >= 3, InvalidGraph, "an image has rank 3 or more, got rank {}", image.len());
    let mut dims = image.to_vec();
    if last {
        behind_first(&mut dims).rotate_right(1);
    }
    Ok(dims)
}

/// Sets output 0 to a shape in the order batch, channels, places, with the channels last where they
/// shall be.
pub(in crate::ops) fn set_image(cx: &mut InferCx<'_>, mut shape: Vec<Dim>, last: bool) -> Result<()> {
    if last {
        behind_first(&mut shape).rotate_left(1);
    }
    cx.set_shape(0, shape)
}

/// The rank of the image at input 0, which a decomposition needs to know: its own, or that of the
/// weights at input `weights`, or that of the windows.
pub(in crate::ops) fn image_rank(draft: &Draft<'_>, weights: Option<usize>) -> Result<usize> {
    let own = draft.shape(0).map(|shape| shape.len());
    let of_weights = || weights.and_then(|index| draft.shape(index)).map(|shape| shape.len());
    let of_windows = || match draft.attr("kernel_shape") {
        Some(Attribute::Ints(kernel)) if !kernel.is_empty() => Some(kernel.len() + 2),
        _ => None,
    };
    let rank = own.or_else(of_weights).or_else(of_windows);
    rank.ok_or_else(|| {
        error!(NotImplemented, "the rank of the image is not known")
            .help("give the model's input, or the image's value_info, a shape; or the node the attribute 'kernel_shape'")
    })
}

/// An image with its channels moved from behind to the second place, or back.
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

/// A value of one element without dimensions, so that it does not add any by broadcasting.
pub(super) fn scalar(draft: &mut Draft<'_>, value: ValueId) -> Result<ValueId> {
    if draft.value_type(value).shape().is_some_and(<[Dim]>::is_empty) {
        return Ok(value);
    }
    let shape = draft.constant_ints(&[])?;
    draft.emit("Reshape", &[value, shape], &[])
}

pub(super) fn cast(draft: &mut Draft<'_>, value: ValueId, dtype: DType) -> Result<ValueId> {
    draft.emit("Cast", &[value], &[("to", code(dtype))])
}

fn code(dtype: DType) -> Attribute {
    Attribute::Int(i64::from(dtype.onnx_code()))
}

/// The numbers that codes stand for, with another scale than their own.
pub(super) fn scaled(draft: &mut Draft<'_>, place: Codes, scale: ValueId) -> Result<ValueId> {
    let inputs = [Some(draft.required(place.codes)?), Some(scale), draft.input(place.zero)];
    draft.emit_one("DequantizeLinear", &inputs, &[])
}

/// The numbers that codes stand for.
pub(super) fn numbers(draft: &mut Draft<'_>, place: Codes) -> Result<ValueId> {
    let scale = draft.required(place.scale)?;
    scaled(draft, place, scale)
}

/// The codes with their zero point taken off, as numbers.
pub(super) fn differences(draft: &mut Draft<'_>, place: Codes) -> Result<ValueId> {
    let one = number(draft, 1.0, DType::F32)?;
    scaled(draft, place, one)
}

/// Makes the draft the codes of numbers: divided by the scale, rounded, and the zero point added.
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

/// As [`quantize`], for numbers that are already divided.
pub(super) fn round(
    draft: &mut Draft<'_>,
    numbers: ValueId,
    zero: Option<ValueId>,
    dtype: DType,
) -> Result<()> {
    let one = number(draft, 1.0, DType::F32)?;
    quantize(draft, numbers, one, zero, dtype)
}

/// As [`round`], with a zero point that may have one dimension. It is added after rounding, so that
/// ties go to the even distance from it.
pub(super) fn round_sum(
    draft: &mut Draft<'_>,
    numbers: ValueId,
    zero: Option<ValueId>,
    dtype: DType,
) -> Result<()> {
    let zero = zero.map(|zero| scalar(draft, zero)).transpose()?;
    round(draft, numbers, zero, dtype)
}

/// The codes at a place with another scale and zero point, given by their places among the inputs.
pub(super) fn requantized(draft: &mut Draft<'_>, place: Codes, [scale, zero]: [usize; 2]) -> Result<ValueId> {
    if same(draft, place.scale, scale) && same(draft, place.zero, zero) {
        return draft.required(place.codes);
    }
    let numbers = numbers(draft, place)?;
    let inputs = [numbers, draft.required(scale)?, draft.required(zero)?];
    draft.emit("QuantizeLinear", &inputs, &[])
}

/// Whether two inputs are one value, or constants of one element that are equal.
fn same(draft: &Draft<'_>, a: usize, b: usize) -> bool {
    let constants = || {
        let [a, b] = [draft.constant_input(a)?, draft.constant_input(b)?];
        Some(a.dtype() == b.dtype() && a.view().bytes().ok()? == b.view().bytes().ok()?)
    };
    draft.input(a) == draft.input(b) || constants().unwrap_or(false)
}
