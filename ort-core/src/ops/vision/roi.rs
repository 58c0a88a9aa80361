//! Region pooling: `RoiAlign` and `MaxRoiPool` pool regions of feature maps to one size.

use crate::dtype::{DType, TypeSet};
use crate::ir::Attribute;
use crate::ops;
use crate::ops::tensor::sample_gradients;
use crate::spec::{AttrKind, Cost, Draft, Grad, InferCx, OP, OpSpec, Upgrade, attr, one, var};
use crate::{Result, ensure, error, one_of};

static ROI_ALIGN: OpSpec = OpSpec {
    name: "RoiAlign",
    grad: Grad::Rule(sample_gradients::of_roi_align),
    since: 22,
    first: 10,
    inputs: &[one("X", "T1"), one("rois", "T1"), one("batch_indices", "T2")],
    outputs: &[one("Y", "T1")],
    types: &[var("T1", TypeSet::FLOATS), var("T2", TypeSet::of(&[DType::I64]))],
    attrs: &[
        attr::string("coordinate_transformation_mode", "half_pixel"),
        attr::string("mode", "avg"),
        attr::int("output_height", 1),
        attr::int("output_width", 1),
        attr::int("sampling_ratio", 0),
        attr::float("spatial_scale", 1.0),
    ],
    cost: Cost::Compute,
    infer: infer_align,
    upgrades: &[Upgrade { before: 16, apply: without_half_pixel }],
    ..OP
};

static MAX_ROI_POOL: OpSpec = OpSpec {
    name: "MaxRoiPool",
    grad: Grad::None("the edges of its regions are rounded; RoiAlign has a gradient"),
    since: 22,
    inputs: &[one("X", "T"), one("rois", "T")],
    outputs: &[one("Y", "T")],
    types: &[var("T", TypeSet::FLOATS)],
    attrs: &[attr::required("pooled_shape", AttrKind::Ints), attr::float("spatial_scale", 1.0)],
    infer: infer_pool,
    ..OP
};

ops![ROI_ALIGN, MAX_ROI_POOL];

/// Version 10 had no shift by half a pixel.
fn without_half_pixel(draft: &mut Draft<'_>) -> Result<()> {
    let mode = Attribute::String("output_half_pixel".to_string());
    draft.set_attr("coordinate_transformation_mode", mode);
    Ok(())
}

fn infer_align(cx: &mut InferCx<'_>) -> Result<()> {
    let mode = cx.attrs.string("mode")?;
    one_of("the mode", mode, &["avg", "max"])?;
    let transform = cx.attrs.string("coordinate_transformation_mode")?;
    one_of("coordinate_transformation_mode", transform, &["half_pixel", "output_half_pixel"])?;
    ensure!(
        cx.attrs.int("sampling_ratio")? >= 0,
        InvalidGraph,
        "sampling_ratio is negative, expected 0 or more"
    );
    infer_regions(cx, [cx.attrs.int("output_height")?, cx.attrs.int("output_width")?])
}

fn infer_pool(cx: &mut InferCx<'_>) -> Result<()> {
    let &[height, width] = cx.attrs.ints("pooled_shape")? else {
        return Err(error!(InvalidGraph, "pooled_shape must hold a height and a width"));
    };
    infer_regions(cx, [height, width])
}

fn infer_regions(cx: &mut InferCx<'_>, [height, width]: [i64; 2]) -> Result<()> {
    ensure!(
        height > 0 && width > 0,
        InvalidGraph,
        "the pooled shape is {height} by {width}, expected 1 or more"
    );
    let (Some(maps), Some(regions)) = (cx.shape(0), cx.shape(1)) else { return Ok(()) };
    let [_, channels, _, _] = maps else {
        return Err(error!(InvalidGraph, "the feature maps have rank {}, expected 4", maps.len()));
    };
    // A region of `MaxRoiPool` starts with its batch index; `RoiAlign` has these in another input.
    let [count, _] = regions else {
        return Err(error!(InvalidGraph, "the regions have rank {}, expected 2", regions.len()));
    };
    cx.set_shape(0, vec![count.clone(), channels.clone(), height.into(), width.into()])
}
