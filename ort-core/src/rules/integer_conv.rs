//! Convolutions of quantized values whose results stay floats.
//!
//! Accumulators are exact integers, as in [`qdq`](super::qdq); the epilogue scales them. A run
//! would otherwise dequantize the image, and the filters, too, which are constants.

use super::conv::{activation, addend_is_per_channel, bounds_are_attributes, clip, list, residual};
use super::conv::{factor_is_per_channel, residual_has_output_shape};
use super::qdq::{is_single, of_bytes, weights_are_scaled};
use crate::dtype::DType;
use crate::ir::ValueId;
use crate::rewrite::Then::{Build, Template};
use crate::rewrite::{Found, Patch};
use crate::spec::RUNTIME;
use crate::{Result, rules};

rules! { "integer_conv", Extended;
    /// Conv of dequantized values that stays a float becomes ConvIntegerToFloat.
    dequantized_conv: "c@Conv(DequantizeLinear(x, #xs, xz?), d@DequantizeLinear(#w, #ws, wz?), b?)"
        if stays_float => Template("ConvIntegerToFloat(x, w, xs, ws, xz?, wz?, b?; ..c)"),
        [
            "x=u8[1,4,6,6] xs=f32:0.015625 xz=u8:128 w=i8[8,4,3,3] ws=f32:0.03125 wz=i8:3",
            "x=u8[2,4,6,5] xs=f32:0.015625 xz=u8:5 w=i8[6,2,3,3] ws=f32[6] wz=const:i8[6] b=const:f32[6] c.pads=[1,1,1,1] c.group=2 d.axis=0",
            "x=i8[1,6,7,6] xs=f32:0.015625 w=u8[6,1,3,3] ws=f32[6] wz=const:u8[6] b=f32[6] c.strides=[2,1] c.group=6 d.axis=0",
            "x=i8[1,4,9] xs=f32:0.015625 xz=i8:-128 w=i8[5,4,3] ws=f32:0.03125 c.auto_pad=SAME_UPPER",
            "x=u8[1,2,4,5,4] xs=f32:0.015625 xz=u8:7 w=i8[3,2,2,2,3] ws=f32[3] b=const:f32[3] d.axis=0",
        ], known Nothing;
    /// Conv of dequantized values before QuantizeLinear becomes ConvIntegerToFloat, if it cannot be
    /// QLinearConv: its bias is not a whole number of steps, or a zero point is left out.
    dequantized_conv_quantized: "q@QuantizeLinear(c@Conv(DequantizeLinear(x, #xs, xz?), d@DequantizeLinear(#w, #ws, wz?), b?), ys, yz?)"
        if is_never_quantized => Build(quantized),
        ["x=u8[1,4,6,6] xs=f32:0.015625 xz=u8:128 w=i8[8,4,3,3] ws=f32:0.03125 wz=i8:3 b=const:f32[8] ys=f32:0.25 yz=u8:9"],
        known Nothing;
    /// A dynamically quantized ConvInteger with Cast and scales becomes ConvIntegerToFloat: the
    /// epilogue applies the scales.
    integer_conv_scaled: "Mul(Cast(c@ConvInteger(x, #w, xz, wz?); to=1), Mul(xs, #factor))" if is_scaled_conv
        => Build(scaled),
        [
            "x=u8[1,4,6,6] xz=u8:128 w=i8[8,4,3,3] wz=i8:0 xs=f32[1] factor=f32:0.25 c.pads=[1,1,1,1]",
            "x=u8[1,4,6,6] xz=u8:3 w=i8[8,4,1,1] xs=f32[1] factor=f32[1,8,1,1]",
        ];
    /// A constant added after ConvIntegerToFloat, one number or one per channel, becomes its bias.
    integer_conv_bias: "Add(c@ConvIntegerToFloat(x, #w, xs, ws, xz?, wz?; activation=''), #addend)"
        if addend_is_per_channel => Build(bias),
        [
            "x=u8[1,4,6,6] w=i8[8,4,3,3] xs=f32:0.25 ws=f32:0.125 xz=u8:7 addend=f32[1,8,1,1]",
            "x=u8[1,4,6] w=i8[8,4,3] xs=f32:0.25 ws=f32:0.125 wz=i8:7 addend=f32:0.5",
        ], known Nothing;
    /// A tensor of the same shape added to ConvIntegerToFloat becomes its residual.
    integer_conv_residual: "Add(c@ConvIntegerToFloat(x, #w, xs, ws, xz?, wz?, b?; activation=''), residual)"
        if residual_has_output_shape => Build(residual),
        [
            "x=u8[1,4,6,6] w=i8[8,4,3,3] xs=f32:0.25 ws=f32[8] xz=u8:7 b=f32[8] residual=f32[1,8,4,4]",
            "x=i8[1,4,6,6] w=i8[4,1,3,3] xs=f32:0.25 ws=f32:0.5 residual=f32[1,4,4,4] c.group=4",
        ];
    /// An activation after ConvIntegerToFloat joins its epilogue.
    integer_conv_activation: "act@Activation(c@ConvIntegerToFloat(x, #w, xs, ws, xz?, wz?, b?, residual?; activation=''))"
        => Build(activation),
        [
            "x=u8[1,4,6,6] w=i8[8,4,3,3] xs=f32:0.25 ws=f32[8] xz=u8:7 b=f32[8] residual=f32[1,8,4,4]",
            "x=u8[1,4,6,6] w=i8[8,4,3,3] xs=f32:0.01 ws=f32:0.5 act.op=HardSwish",
            "x=u8[1,4,6,6] w=i8[4,1,3,3] xs=f32:0.01 ws=f32[4] b=f32[4] c.group=4 act.op=Sigmoid",
        ], known Nothing;
    /// Clip with constant bounds after ConvIntegerToFloat joins its epilogue.
    integer_conv_clip: "Clip(c@ConvIntegerToFloat(x, #w, xs, ws, xz?, wz?, b?, residual?; activation=''), #min, #max)"
        if bounds_are_attributes => Build(clip),
        ["x=u8[1,4,6,6] w=i8[8,4,3,3] xs=f32:0.01 ws=f32:0.5 xz=u8:9 b=f32[8] min=f32:0 max=f32:6"], known Nothing;
}

/// Whether image and filters are 8-bit values with float32 scales, of which only the filters' may
/// be one for each.
fn is_integer_conv(found: &Found<'_>) -> bool {
    let Some(rank) = found.rank("w") else { return false };
    let zeros_fit = |zero: &str, scale: &str| {
        found.value(zero).is_none() || found.fixed_shape(zero) == found.fixed_shape(scale)
    };
    let of_floats = ["xs", "ws"].into_iter().all(|name| found.dtype(name) == Some(DType::F32));
    (3..=5).contains(&rank)
        && weights_are_scaled(found, 0, rank)
        && is_single(found, "xs")
        && (found.value("xz").is_none() || is_single(found, "xz"))
        && zeros_fit("wz", "ws")
        && (found.value("b").is_none() || found.rank("b") == Some(1))
        && of_floats
        && of_bytes(found, "x")
        && of_bytes(found, "w")
}

/// Like [`is_integer_conv`], for a result that no `QuantizeLinear` alone reads: the rules of that
/// come first.
fn stays_float(found: &Found<'_>) -> bool {
    let output = found.root().and_then(|root| root.outputs.first().copied().flatten());
    let is_free = |output: ValueId| !found.is_quantized(output) || found.reads(output) > 1;
    output.is_some_and(is_free) && is_integer_conv(found)
}

/// Like [`is_integer_conv`], for a bias that is constant: one that is dequantized becomes constant
/// by folding, and the rules of `QLinearConv` then try again.
fn is_never_quantized(found: &Found<'_>) -> bool {
    (found.value("b").is_none() || found.tensor("b").is_some()) && is_integer_conv(found)
}

fn quantized(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    let inputs = ["x", "w", "xs", "ws", "xz", "wz", "b"].map(|name| patch.found.value(name));
    let (conv_attrs, attrs) = (patch.attrs("c"), patch.attrs("q"));
    let conv = patch.emit((RUNTIME, "ConvIntegerToFloat"), &inputs, &conv_attrs)?;
    let [scale, zero] = ["ys", "yz"].map(|name| patch.found.value(name));
    Ok(Some(vec![patch.emit(("", "QuantizeLinear"), &[Some(conv), scale, zero], &attrs)?]))
}

/// Whether the scales and zero points of a dynamically quantized convolution fit
/// `ConvIntegerToFloat`.
fn is_scaled_conv(found: &Found<'_>) -> bool {
    let filters = found.fixed_shape("w").and_then(|shape| shape.first().copied());
    let zeros_fit = found.value("wz").is_none()
        || is_single(found, "wz")
        || found.fixed_shape("wz").is_some_and(|shape| shape.first().copied() == filters && shape.len() == 1);
    let of_floats = ["xs", "factor"].into_iter().all(|name| found.dtype(name) == Some(DType::F32));
    factor_is_per_channel(found)
        && is_single(found, "xs")
        && is_single(found, "xz")
        && zeros_fit
        && of_floats
        && found.rank("w").is_some_and(|rank| (3..=5).contains(&rank))
}

/// Converts a constant that is one number, or one per filter along the channel axis, to a vector.
fn per_filter(patch: &mut Patch<'_>, name: &str) -> Result<Option<ValueId>> {
    let Some(shape) = patch.found().fixed_shape("w") else { return Ok(None) };
    let [filters, ..] = shape.as_slice() else { return Ok(None) };
    let value = patch.value(name)?;
    list(patch, value, (shape.len(), *filters)).map(Some)
}

fn scaled(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    let Some(scales) = per_filter(patch, "factor")? else { return Ok(None) };
    let [x, w, xs, xz, wz] = ["x", "w", "xs", "xz", "wz"].map(|name| patch.found.value(name));
    let attrs = patch.attrs("c");
    let inputs = [x, w, xs, Some(scales), xz, wz];
    Ok(Some(vec![patch.emit((RUNTIME, "ConvIntegerToFloat"), &inputs, &attrs)?]))
}

fn bias(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    let Some(bias) = per_filter(patch, "addend")? else { return Ok(None) };
    let [x, w, xs, ws, xz, wz] = ["x", "w", "xs", "ws", "xz", "wz"].map(|name| patch.found.value(name));
    let attrs = patch.attrs("c");
    let inputs = [x, w, xs, ws, xz, wz, Some(bias)];
    Ok(Some(vec![patch.emit((RUNTIME, "ConvIntegerToFloat"), &inputs, &attrs)?]))
}
