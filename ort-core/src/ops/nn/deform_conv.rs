//! Deformable convolution: `DeformConv`.
//!
//! An input shifts the sampling positions of each window, and another may weigh them.

use super::conv::image_and_kernel;
use super::geometry::Windows;
use crate::Result;
use crate::dtype::TypeSet;
use crate::ops;
use crate::ops::tensor::sample_gradients;
use crate::spec::{AttrKind, Cost, Grad, InferCx, OP, OpSpec, attr, one, opt, var};

static DEFORM_CONV: OpSpec = OpSpec {
    name: "DeformConv",
    grad: Grad::Parts(sample_gradients::deform_conv_parts),
    since: 22,
    first: 19,
    inputs: &[one("X", "T"), one("W", "T"), one("offset", "T"), opt("B", "T"), opt("mask", "T")],
    outputs: &[one("Y", "T")],
    types: &[var("T", TypeSet::FLOATS)],
    attrs: &[
        attr::optional("dilations", AttrKind::Ints),
        attr::int("group", 1),
        attr::optional("kernel_shape", AttrKind::Ints),
        attr::int("offset_group", 1),
        attr::optional("pads", AttrKind::Ints),
        attr::optional("strides", AttrKind::Ints),
    ],
    cost: Cost::Compute,
    infer,
    ..OP
};

ops![DEFORM_CONV];

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let (Some(image), Some(kernel)) = (cx.shape(0), cx.shape(1)) else { return Ok(()) };
    let ((batch, _, image), (filters, _, kernel)) = image_and_kernel(image, kernel)?;
    let windows = Windows::new(cx.attrs, kernel)?;
    let mut shape = vec![batch.clone(), filters.clone()];
    shape.extend(windows.outputs(image));
    cx.set_shape(0, shape)
}
