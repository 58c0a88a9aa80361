//! `GridSample`: samples an image at the positions of a grid.

use super::sample_gradients;
use crate::dtype::TypeSet;
use crate::ir::Attribute;
use crate::ops;
use crate::spec::{Cost, Draft, Grad, InferCx, OP, OpSpec, Upgrade, attr, one, var};
use crate::{Result, ensure, error, one_of};

static GRID_SAMPLE: OpSpec = OpSpec {
    name: "GridSample",
    grad: Grad::Parts(sample_gradients::grid_sample_parts),
    since: 22,
    first: 16,
    inputs: &[one("X", "T1"), one("grid", "T2")],
    outputs: &[one("Y", "T1")],
    types: &[var("T1", TypeSet::ALL_TENSOR), var("T2", TypeSet::FLOATS)],
    attrs: &[
        attr::int("align_corners", 0),
        attr::string("padding_mode", "zeros"),
        attr::string("mode", "linear"),
    ],
    cost: Cost::Compute,
    infer,
    upgrades: &[Upgrade { before: 20, apply: rename_modes }],
    ..OP
};

ops![GRID_SAMPLE];

/// Renames modes: before version 20 they had the names of the two-dimensional forms.
pub(in crate::ops) fn rename_modes(draft: &mut Draft<'_>) -> Result<()> {
    let renamed = match draft.attr("mode") {
        Some(Attribute::String(mode)) if mode == "bilinear" => "linear",
        Some(Attribute::String(mode)) if mode == "bicubic" => "cubic",
        _ => return Ok(()),
    };
    draft.set_attr("mode", Attribute::String(renamed.to_string()));
    Ok(())
}

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let (mode, padding) = (cx.attrs.string("mode")?, cx.attrs.string("padding_mode")?);
    one_of("the mode", mode, &["linear", "nearest", "cubic"])?;
    one_of("the padding mode", padding, &["zeros", "border", "reflection"])?;
    let (Some(image), Some(grid)) = (cx.shape(0), cx.shape(1)) else { return Ok(()) };
    let ([batch, channels, spatial @ ..], [_, places @ .., positions]) = (image, grid) else {
        return Err(error!(
            InvalidGraph,
            "the image of shape {image:?} does not match the grid of shape {grid:?}"
        ));
    };
    // [N, C, H, W] sampled at [N, H', W', 2] gives [N, C, H', W'].
    let same_rank = !spatial.is_empty() && grid.len() == image.len();
    ensure!(
        same_rank,
        InvalidGraph,
        "the image of shape {image:?} does not match the grid of shape {grid:?}"
    );
    let fits = positions.as_constant().is_none_or(|count| count == spatial.len() as i64);
    ensure!(fits, InvalidGraph, "grid positions have {positions} numbers, but the image has shape {image:?}");
    cx.set_shape(0, [batch, channels].into_iter().chain(places).cloned().collect())
}
