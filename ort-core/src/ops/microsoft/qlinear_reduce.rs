//! `QLinearAveragePool`, `QLinearGlobalAveragePool`, `QLinearReduceMean` and `QLinearSoftmax`:
//! reductions of 8-bit quantized tensors.

use super::int;
use super::qlinear::{
    CODES, cast, channels_first, check_single, codes_at, image_rank, move_channels, numbers, quantize, round,
    round_sum, scalar, set_image,
};
use crate::dim::Dim;
use crate::dtype::DType;
use crate::ir::{Attribute, ValueId};
use crate::ops;
use crate::ops::axes;
use crate::ops::nn::geometry::Windows;
use crate::spec::{AttrKind, Draft, InferCx, MICROSOFT, OP, OpSpec, Param, TypeVar, attr, one, opt, var};
use crate::tensor::Tensor;
use crate::{Result, error};

const FLOAT: &str = "tensor(float)";
const OUTPUT: &[Param] = &[one("Y", "T")];
const TYPES: &[TypeVar] = &[var("T", CODES)];

static QLINEAR_AVERAGE_POOL: OpSpec = OpSpec {
    domain: MICROSOFT,
    name: "QLinearAveragePool",
    inputs: &[
        one("X", "T"),
        one("x_scale", FLOAT),
        opt("x_zero_point", "T"),
        one("y_scale", FLOAT),
        opt("y_zero_point", "T"),
    ],
    outputs: OUTPUT,
    types: TYPES,
    attrs: &[
        attr::string("auto_pad", "NOTSET"),
        attr::int("ceil_mode", 0),
        attr::int("channels_last", 0),
        attr::int("count_include_pad", 0),
        attr::required("kernel_shape", AttrKind::Ints),
        attr::optional("pads", AttrKind::Ints),
        attr::optional("strides", AttrKind::Ints),
    ],
    infer: infer_pool,
    lower: Some(lower_pool),
    ..OP
};

static QLINEAR_GLOBAL_AVERAGE_POOL: OpSpec = OpSpec {
    domain: MICROSOFT,
    name: "QLinearGlobalAveragePool",
    inputs: &[
        one("X", "T"),
        one("x_scale", FLOAT),
        one("x_zero_point", "T"),
        one("y_scale", FLOAT),
        one("y_zero_point", "T"),
    ],
    outputs: OUTPUT,
    types: TYPES,
    attrs: &[attr::int("channels_last", 0)],
    infer: infer_global,
    lower: Some(lower_global),
    ..OP
};

static QLINEAR_REDUCE_MEAN: OpSpec = OpSpec {
    domain: MICROSOFT,
    name: "QLinearReduceMean",
    inputs: &[
        one("data", "T"),
        one("data_scale", FLOAT),
        opt("data_zero_point", "T"),
        one("reduced_scale", FLOAT),
        opt("reduced_zero_point", "T"),
    ],
    outputs: &[one("reduced", "T")],
    types: TYPES,
    attrs: &[attr::required("axes", AttrKind::Ints), attr::required("keepdims", AttrKind::Int)],
    infer: infer_mean,
    lower: Some(lower_mean),
    ..OP
};

static QLINEAR_SOFTMAX: OpSpec = OpSpec {
    domain: MICROSOFT,
    name: "QLinearSoftmax",
    inputs: &[
        one("X", "T"),
        one("X_scale", FLOAT),
        opt("x_zero_point", "T"),
        one("y_scale", FLOAT),
        one("y_zero_point", "T"),
    ],
    outputs: OUTPUT,
    types: TYPES,
    attrs: &[attr::int("axis", -1), attr::required("opset", AttrKind::Int)],
    infer: infer_softmax,
    lower: Some(lower_softmax),
    ..OP
};

ops![QLINEAR_AVERAGE_POOL, QLINEAR_GLOBAL_AVERAGE_POOL, QLINEAR_REDUCE_MEAN, QLINEAR_SOFTMAX];

fn infer_pool(cx: &mut InferCx<'_>) -> Result<()> {
    check_single(cx, 1..5)?;
    let Some(image) = cx.shape(0) else { return Ok(()) };
    let last = cx.attrs.flag("channels_last")?;
    let image = channels_first(image, last)?;
    let windows = Windows::of_pool(cx.attrs, image.len())?;
    let (outer, places) = image.split_at_checked(2).unwrap_or((&image, &[]));
    let mut shape = outer.to_vec();
    shape.extend(windows.outputs(places));
    set_image(cx, shape, last)
}

fn infer_global(cx: &mut InferCx<'_>) -> Result<()> {
    check_single(cx, 1..5)?;
    let Some(image) = cx.shape(0) else { return Ok(()) };
    let last = cx.attrs.flag("channels_last")?;
    let mut shape = channels_first(image, last)?;
    shape.iter_mut().skip(2).for_each(|size| *size = Dim::constant(1));
    set_image(cx, shape, last)
}

fn infer_mean(cx: &mut InferCx<'_>) -> Result<()> {
    check_single(cx, 1..5)?;
    let Some(shape) = cx.shape(0) else { return Ok(()) };
    let given = cx.attrs.ints("axes")?;
    // Without axes all are reduced, as in the standard's `ReduceMean`.
    let mask = if given.is_empty() { vec![true; shape.len()] } else { axes::mask(given, shape.len())? };
    cx.set_shape(0, axes::without(&shape.to_vec(), &mask, cx.attrs.flag("keepdims")?))
}

fn infer_softmax(cx: &mut InferCx<'_>) -> Result<()> {
    check_single(cx, 1..5)?;
    axes::infer_same_along_axis(cx)
}

/// Averages the dequantized values, divides by the output's scale and rounds, before the zero point
/// is added.
fn lower_pool(draft: &mut Draft<'_>) -> Result<()> {
    if is_global(draft) {
        return lower_global(draft);
    }
    let (dtype, rank) = (draft.dtype(0)?, image_rank(draft, None)?);
    let last = int(draft, "channels_last")? != 0;
    pad_last_windows(draft)?;
    if last {
        let codes = draft.required(0)?;
        let codes = move_channels(draft, codes, rank, true)?;
        draft.set_input(0, codes);
    }
    let numbers = numbers(draft, codes_at(0))?;
    let attrs = draft.attrs.iter().filter(|(name, _)| name != "channels_last").cloned().collect::<Vec<_>>();
    let attrs: Vec<(&str, Attribute)> =
        attrs.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    let mut averages = draft.emit("AveragePool", &[numbers], &attrs)?;
    if last {
        averages = move_channels(draft, averages, rank, false)?;
    }
    let scale = draft.required(3)?;
    let scale = scalar(draft, scale)?;
    let averages = draft.emit("Div", &[averages, scale], &[])?;
    round_sum(draft, averages, draft.input(4), dtype)
}

/// Pads the image so that no window reaches beyond the padding.
///
/// With `ceil_mode` and `count_include_pad`, ONNX Runtime counts a last window that reaches beyond
/// the padding as a whole window. The standard's operator does not.
#[allow(
    clippy::indexing_slicing,
    reason = "each list is made with a value for each axis of the image, whose rank is 3 or more"
)]
fn pad_last_windows(draft: &mut Draft<'_>) -> Result<()> {
    let ints = |name: &str, default: i64, len: usize| match draft.attr(name) {
        Some(Attribute::Ints(values)) if values.len() == len => values.clone(),
        _ => vec![default; len],
    };
    // `auto_pad` computes pads of its own, and the standard refuses it beside explicit ones.
    let is_explicit = matches!(draft.attr("auto_pad"), Some(Attribute::String(name)) if name == "NOTSET");
    if int(draft, "ceil_mode")? == 0 || int(draft, "count_include_pad")? == 0 || !is_explicit {
        return Ok(());
    }
    let last = int(draft, "channels_last")? != 0;
    let shape = draft
        .shape(0)
        .ok_or_else(|| error!(NotImplemented, "the windows of an image of unknown rank cannot be padded"))?;
    let image = channels_first(&shape, last)?;
    let rank = image.len() - 2;
    let (kernel, strides, mut pads) =
        (ints("kernel_shape", 1, rank), ints("strides", 1, rank), ints("pads", 0, 2 * rank));
    for axis in 0..rank {
        // The clamp keeps the arithmetic below from overflowing.
        let size = image[2 + axis].as_constant().map(|size| size.clamp(0, 1 << 40));
        let size = size.ok_or_else(|| {
            error!(NotImplemented, "the windows of an image of unknown size cannot be padded")
        })?;
        let (kernel, stride, before, behind) = (kernel[axis], strides[axis], pads[axis], pads[axis + rank]);
        // The window count of `ceil_mode`, without windows that start in the padding after the
        // image.
        let room = (size + before + behind - kernel).max(0);
        let begin = size + before;
        let windows = ((room + stride - 1) / stride + 1).min((begin + stride - 1) / stride).max(1);
        pads[axis + rank] = behind.max((windows - 1) * stride + kernel - size - before);
    }
    draft.set_attr("pads", Attribute::Ints(pads));
    Ok(())
}

/// Returns whether one window without padding covers the whole image. ONNX Runtime then sums the
/// quantized values, not the dequantized ones, which rounds differently.
fn is_global(draft: &Draft<'_>) -> bool {
    let (Some(Attribute::Ints(kernel)), Some(image)) = (draft.attr("kernel_shape"), draft.shape(0)) else {
        return false;
    };
    let last = int(draft, "channels_last").is_ok_and(|last| last != 0);
    let Ok(image) = channels_first(&image, last) else { return false };
    let pads = match draft.attr("pads") {
        Some(Attribute::Ints(pads)) => pads.as_slice(),
        _ => &[],
    };
    let covers = image.iter().skip(2).map(Dim::as_constant).eq(kernel.iter().map(|size| Some(*size)));
    covers && pads.iter().all(|pad| *pad == 0)
}

/// Decomposes a global pool: the int32 sum of the quantized values is exact, and is multiplied by
/// `x_scale / (y_scale * count)`.
fn lower_global(draft: &mut Draft<'_>) -> Result<()> {
    let (dtype, last) = (draft.dtype(0)?, int(draft, "channels_last")? != 0);
    let codes = draft.required(0)?;
    let mut bounds = vec![("start", Attribute::Int(if last { 1 } else { 2 }))];
    bounds.extend(last.then_some(("end", Attribute::Int(-1))));
    let sizes = draft.emit("Shape", &[codes], &bounds)?;
    let count = draft.emit("ReduceProd", &[sizes], &[("keepdims", Attribute::Int(0))])?;
    // A sum of bytes would overflow them.
    let wide = cast(draft, codes, DType::I32)?;
    let axes = place_axes(draft, codes, last)?;
    let mut sum = draft.emit("ReduceSum", &[wide, axes], &[])?;
    if let Some(zero) = draft.input(2) {
        let zero = scalar(draft, zero)?;
        let terms = [cast(draft, zero, DType::I32)?, cast(draft, count, DType::I32)?];
        // Each of the `count` summands contains the zero point once.
        let zeros = draft.emit("Mul", &terms, &[])?;
        sum = draft.emit("Sub", &[sum, zeros], &[])?;
    }
    let sum = cast(draft, sum, DType::F32)?;
    let scale = mean_scale(draft, count)?;
    let means = draft.emit("Mul", &[sum, scale], &[])?;
    round(draft, means, draft.input(4), dtype)
}

/// Returns the spatial axes of an image, computed at run time if its rank is unknown.
fn place_axes(draft: &mut Draft<'_>, image: ValueId, last: bool) -> Result<ValueId> {
    let first: i64 = if last { 1 } else { 2 };
    if let Some(shape) = draft.shape(0) {
        // NHWC has its channels behind the spatial axes.
        let end = shape.len() as i64 - i64::from(last);
        return draft.constant_ints(&(first..end).collect::<Vec<i64>>());
    }
    let shape = draft.emit("Shape", &[image], &[])?;
    let rank = draft.emit("Size", &[shape], &[])?;
    let [first, behind, step] =
        [Tensor::scalar(first)?, Tensor::scalar(i64::from(last))?, Tensor::scalar(1i64)?]
            .map(|number| draft.constant(number));
    let end = draft.emit("Sub", &[rank, behind], &[])?;
    draft.emit("Range", &[first, end, step], &[])
}

/// Returns the factor from a sum of quantized inputs to a quantized output, less its zero point.
fn mean_scale(draft: &mut Draft<'_>, count: ValueId) -> Result<ValueId> {
    let (own, result) = (draft.required(1)?, draft.required(3)?);
    let [own, result] = [scalar(draft, own)?, scalar(draft, result)?];
    let count = cast(draft, count, DType::F32)?;
    let divisor = draft.emit("Mul", &[result, count], &[])?;
    draft.emit("Div", &[own, divisor], &[])
}

fn lower_mean(draft: &mut Draft<'_>) -> Result<()> {
    let (dtype, numbers) = (draft.dtype(0)?, numbers(draft, codes_at(0))?);
    let keep = Attribute::Int(int(draft, "keepdims")?);
    let axes = match draft.attr("axes") {
        Some(Attribute::Ints(axes)) => axes.clone(),
        _ => Vec::new(),
    };
    let axes = draft.constant_ints(&axes)?;
    let means = draft.emit("ReduceMean", &[numbers, axes], &[("keepdims", keep)])?;
    quantize(draft, means, draft.required(3)?, draft.input(4), dtype)
}

/// Decomposes a quantized softmax, whose result is multiplied by `floor(1 / y_scale)`.
///
/// The attribute `opset` selects the standard's form: before version 13 the softmax is over all
/// dimensions from `axis` on.
fn lower_softmax(draft: &mut Draft<'_>) -> Result<()> {
    let (dtype, codes, axis) = (draft.dtype(0)?, draft.required(0)?, int(draft, "axis")?);
    let is_last = match draft.shape(0).map(|shape| shape.len()) {
        Some(rank) => axes::normalize(axis, rank.max(1))? + 1 >= rank,
        // Of an unknown rank only -1 is sure to be the last axis. If another axis turns out to be
        // the last, the matrix form gives the same result.
        None => axis == -1,
    };
    let is_matrix = int(draft, "opset")? < 13 && !is_last;
    let numbers = numbers(draft, codes_at(0))?;
    let result = if is_matrix {
        // The 2D coercion of `Softmax` before version 13.
        let matrix = draft.emit("Flatten", &[numbers], &[("axis", Attribute::Int(axis))])?;
        let result = draft.emit("Softmax", &[matrix], &[("axis", Attribute::Int(-1))])?;
        let shape = draft.emit("Shape", &[codes], &[])?;
        draft.emit("Reshape", &[result, shape], &[("allowzero", Attribute::Int(1))])?
    } else {
        draft.emit("Softmax", &[numbers], &[("axis", Attribute::Int(axis))])?
    };
    let scale = draft.required(3)?;
    let scale = scalar(draft, scale)?;
    let steps = draft.emit("Reciprocal", &[scale], &[])?;
    // ONNX Runtime rounds the reciprocal down to a whole number before it multiplies.
    let steps = draft.emit("Floor", &[steps], &[])?;
    let result = draft.emit("Mul", &[result, steps], &[])?;
    round(draft, result, draft.input(4), dtype)
}
