//! `CenterCropPad`: crops a tensor to its center, or pads it with zeros on both sides.

use super::index_gradients;
use crate::dtype::{DType, TypeSet};
use crate::ops;
use crate::ops::axes;
use crate::spec::{AttrKind, Grad, InferCx, OP, OpSpec, attr, one, var};
use crate::{Result, ensure};

use super::geometry::normalize_axes;

static CENTER_CROP_PAD: OpSpec = OpSpec {
    name: "CenterCropPad",
    grad: Grad::Rule(index_gradients::of_center_crop_pad),
    since: 18,
    first: 18,
    inputs: &[one("input_data", "T"), one("shape", "Tind").host()],
    outputs: &[one("output_data", "T")],
    types: &[var("T", TypeSet::ALL_TENSOR), var("Tind", TypeSet::of(&[DType::I32, DType::I64]))],
    attrs: &[attr::optional("axes", AttrKind::Ints)],
    infer,
    ..OP
};

ops![CENTER_CROP_PAD];

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let Some(shape) = cx.shape(0) else { return Ok(()) };
    let axes = match cx.attrs.find_ints("axes") {
        Some(axes) => normalize_axes(axes, shape.len())?,
        None => (0..shape.len()).collect(),
    };
    // Unknown sizes change the listed axes only.
    let target = match cx.dims(1) {
        Some(target) => target,
        None => axes.iter().map(|_| cx.fresh()).collect(),
    };
    ensure!(
        target.len() == axes.len(),
        InvalidGraph,
        "{} sizes are given for {} axes",
        target.len(),
        axes.len()
    );
    let mut sizes = shape.to_vec();
    for (axis, size) in axes.into_iter().zip(target) {
        ensure!(size.as_constant().is_none_or(|size| size >= 0), InvalidGraph, "size {size} is negative");
        sizes = axes::with_size(&sizes, axis, size);
    }
    cx.set_shape(0, sizes)
}
