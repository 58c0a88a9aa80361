//! Convolutions: `Conv`, `ConvInteger`, `QLinearConv` and `ConvTranspose`.
//!
//! Shape inference alone; [`Windows`] does the arithmetic of sizes and padding.

use super::conv_gradients;
use super::geometry::Windows;
use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ops;
use crate::ops::batch;
use crate::ops::microsoft::agree;
use crate::spec::{
    AttrKind, AttrSpec, BatchRule, Cost, Grad, InferCx, OP, OpSpec, Requirement, attr, one, opt, var,
};
use crate::{Result, ensure, error};

const BYTES: TypeSet = TypeSet::of(&[DType::I8, DType::U8]);
const INT32: TypeSet = TypeSet::of(&[DType::I32]);

pub(in crate::ops) const ATTRS: &[AttrSpec] = &[
    attr::string("auto_pad", "NOTSET"),
    attr::optional("dilations", AttrKind::Ints),
    attr::int("group", 1),
    attr::optional("kernel_shape", AttrKind::Ints),
    attr::optional("pads", AttrKind::Ints),
    attr::optional("strides", AttrKind::Ints),
];

static CONV: OpSpec = OpSpec {
    name: "Conv",
    since: 22,
    inputs: &[one("X", "T"), one("W", "T"), opt("B", "T")],
    outputs: &[one("Y", "T")],
    types: &[var("T", TypeSet::FLOATS)],
    attrs: ATTRS,
    cost: Cost::Compute,
    infer: |cx| infer(cx, [1, 2]),
    grad: Grad::Rule(conv_gradients::of_conv),
    batch: BatchRule::Rule(batch::conv),
    ..OP
};

static CONV_INTEGER: OpSpec = OpSpec {
    name: "ConvInteger",
    since: 10,
    first: 10,
    inputs: &[one("x", "T1"), one("w", "T2"), opt("x_zero_point", "T1"), opt("w_zero_point", "T2")],
    outputs: &[one("y", "T3")],
    types: &[var("T1", BYTES), var("T2", BYTES), var("T3", INT32)],
    attrs: ATTRS,
    cost: Cost::Compute,
    // It has no bias: no input has this index.
    infer: |cx| infer(cx, [1, usize::MAX]),
    batch: BatchRule::Rule(batch::conv),
    ..OP
};

static QLINEAR_CONV: OpSpec = OpSpec {
    name: "QLinearConv",
    since: 10,
    first: 10,
    inputs: &[
        one("x", "T1"),
        one("x_scale", "tensor(float)"),
        one("x_zero_point", "T1"),
        one("w", "T2"),
        one("w_scale", "tensor(float)"),
        one("w_zero_point", "T2"),
        one("y_scale", "tensor(float)"),
        one("y_zero_point", "T3"),
        opt("B", "T4"),
    ],
    outputs: &[one("y", "T3")],
    types: &[var("T1", BYTES), var("T2", BYTES), var("T3", BYTES), var("T4", INT32)],
    attrs: ATTRS,
    cost: Cost::Compute,
    infer: |cx| infer(cx, [3, 8]),
    batch: BatchRule::Rule(batch::conv_of_codes),
    ..OP
};

static CONV_TRANSPOSE: OpSpec = OpSpec {
    name: "ConvTranspose",
    since: 22,
    inputs: &[one("X", "T"), one("W", "T"), opt("B", "T")],
    outputs: &[one("Y", "T")],
    types: &[var("T", TypeSet::FLOATS)],
    attrs: &[
        attr::string("auto_pad", "NOTSET"),
        attr::optional("dilations", AttrKind::Ints),
        attr::int("group", 1),
        attr::optional("kernel_shape", AttrKind::Ints),
        attr::optional("output_padding", AttrKind::Ints),
        attr::optional("output_shape", AttrKind::Ints),
        attr::optional("pads", AttrKind::Ints),
        attr::optional("strides", AttrKind::Ints),
    ],
    cost: Cost::Compute,
    infer: infer_transposed,
    grad: Grad::Rule(conv_gradients::of_conv_transpose),
    batch: BatchRule::Rule(batch::conv),
    ..OP
};

ops![CONV, CONV_INTEGER, QLINEAR_CONV, CONV_TRANSPOSE];

/// The first two dimensions of an image or weight, and its spatial dimensions.
pub(in crate::ops) type Parts<'a> = (&'a Dim, &'a Dim, &'a [Dim]);

/// Splits an image and a weight of equal rank, 3 or more.
pub(in crate::ops) fn image_and_kernel<'a>(
    image: &'a [Dim],
    kernel: &'a [Dim],
) -> Result<(Parts<'a>, Parts<'a>)> {
    match (image, kernel) {
        ([batch, channels, image @ ..], [first, second, kernel @ ..])
            if !image.is_empty() && image.len() == kernel.len() =>
        {
            Ok(((batch, channels, image), (first, second, kernel)))
        }
        _ => Err(error!(
            InvalidGraph,
            "an image of rank {} and a weight of rank {} do not match",
            image.len(),
            kernel.len()
        )
        .help(RANKS)),
    }
}

/// The help if the ranks of image and weight differ.
const RANKS: &str =
    "both need a batch or filters, channels, and the same spatial axes: [N, C, H, W] and [M, C, h, w]";

fn group(cx: &InferCx<'_>) -> Result<i64> {
    let group = cx.attrs.int("group")?;
    let sensible = (1..1 << 31).contains(&group);
    ensure!(sensible, InvalidGraph, help = "group is 1 or more", "group {group} is out of range");
    Ok(group)
}

/// Infers the shape of a convolution. `places` are the input indices of its weight and bias.
pub(in crate::ops) fn infer(cx: &mut InferCx<'_>, places: [usize; 2]) -> Result<()> {
    let [weight, bias] = places;
    let (Some(image), Some(weight)) = (cx.shape(0), cx.shape(weight)) else { return Ok(()) };
    let shape = output_shape(cx, [image, weight], bias)?;
    cx.set_shape(0, shape)
}

/// The output shape of a convolution of an NCHW image. `bias` is the input index of the bias, which
/// may be absent.
pub(in crate::ops) fn output_shape(
    cx: &InferCx<'_>,
    [image, weight]: [&[Dim]; 2],
    bias: usize,
) -> Result<Vec<Dim>> {
    // The weight is [filters, channels / group, kernel...].
    let ((batch, channels, image), (filters, inner, kernel)) = image_and_kernel(image, weight)?;
    let group = group(cx)?;
    agree("the number of input channels of the weight", channels, &(inner * group))?;
    let divides = filters.as_constant().is_none_or(|filters| filters % group == 0);
    ensure!(
        divides,
        InvalidGraph,
        "the number of filters is {filters}, expected a multiple of group {group}"
    );
    if let Some([channels]) = cx.shape(bias) {
        cx.require(Requirement::equal("the length of the bias", channels, filters).or_fail())?;
    }
    let windows = Windows::new(cx.attrs, kernel)?;
    windows.require_fit(cx, image);
    let mut shape = vec![batch.clone(), filters.clone()];
    shape.extend(windows.outputs(image));
    Ok(shape)
}

fn infer_transposed(cx: &mut InferCx<'_>) -> Result<()> {
    let (Some(image), Some(kernel)) = (cx.shape(0), cx.shape(1)) else { return Ok(()) };
    // The weight is that of the convolution being transposed: the input channels first, then the
    // output channels of one group.
    let ((batch, channels, image), (inner, filters, kernel)) = image_and_kernel(image, kernel)?;
    let group = group(cx)?;
    agree("the number of input channels of the weight", channels, inner)?;
    let divides = inner.as_constant().is_none_or(|channels| channels % group == 0);
    ensure!(divides, InvalidGraph, "the number of channels is {inner}, expected a multiple of group {group}");
    // Output channels are [group, filters of a group], flattened.
    let filters = filters * group;
    if let Some([channels]) = cx.shape(2) {
        cx.require_equal("the length of the bias", channels, &filters)?;
    }
    let windows = Windows::new(cx.attrs, kernel)?;
    windows.require_output(cx, image)?;
    let mut shape = vec![batch.clone(), filters];
    shape.extend(windows.transposed_outputs(cx.attrs, image)?);
    cx.set_shape(0, shape)
}
