//! Deformable convolution: `DeformConv`.
//!
//! An input shifts the sampling positions of each window, and another may weigh them.

use super::conv::image_and_kernel;
use super::geometry::Windows;
use crate::dim::Dim;
use crate::dtype::TypeSet;
use crate::ops;
use crate::ops::tensor::sample_gradients;
use crate::spec::{AttrKind, Cost, Grad, InferCx, OP, OpSpec, attr, one, opt, var};
use crate::{ErrorKind, Result};

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
    let positions = windows.outputs(image);
    // Each window samples as many positions as the kernel has, of two coordinates or more.
    let samples = kernel.iter().product::<Dim>() * cx.attrs.int("offset_group")?;
    for (index, channels) in [(2, &samples * kernel.len() as i64), (4, samples.clone())] {
        let expected = [&[batch.clone(), channels], &positions[..]].concat();
        cx.require_shape(index, &expected, ErrorKind::Fail)?;
    }
    shape.extend(positions);
    cx.set_shape(0, shape)
}
