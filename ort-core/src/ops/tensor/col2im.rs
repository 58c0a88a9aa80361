//! `Col2Im`: adds columns of blocks up to an image, the transpose of im2col.

use super::index_gradients;
use crate::dim::Dim;
use crate::dtype::TypeSet;
use crate::ops;
use crate::spec::{AttrKind, Grad, InferCx, OP, OpSpec, attr, one, var};
use crate::{Result, ensure, error};

static COL2IM: OpSpec = OpSpec {
    name: "Col2Im",
    grad: Grad::Rule(index_gradients::of_col2im),
    since: 18,
    first: 18,
    inputs: &[
        one("input", "T"),
        one("image_shape", "tensor(int64)").host(),
        one("block_shape", "tensor(int64)").host(),
    ],
    outputs: &[one("output", "T")],
    types: &[var("T", TypeSet::ALL_TENSOR)],
    attrs: &[
        attr::optional("strides", AttrKind::Ints),
        attr::optional("pads", AttrKind::Ints),
        attr::optional("dilations", AttrKind::Ints),
    ],
    infer,
    ..OP
};

ops![COL2IM];

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let Some(input) = cx.shape(0) else { return Ok(()) };
    let [batch, rows, _] = input else {
        return Err(error!(InvalidGraph, "the input has shape {input:?}, expected rank 3"));
    };
    let Some(image) = cx.dims(1) else { return Ok(()) };
    // The rows are [C * product of the block], one column for each block.
    let channels = match cx.dims(2) {
        Some(block) => {
            let pixels: Dim = block.iter().product();
            let whole = match (rows.as_constant(), pixels.as_constant()) {
                (Some(rows), Some(pixels)) => rows.checked_rem(pixels) == Some(0),
                _ => true,
            };
            ensure!(
                whole,
                InvalidGraph,
                "the input has {rows} rows, expected a multiple of the block {block:?}"
            );
            rows.floor_div(&pixels)
        }
        None => cx.fresh(),
    };
    let mut shape = vec![batch.clone(), channels];
    shape.extend(image);
    let negative = shape.iter().any(|size| size.as_constant().is_some_and(|size| size < 0));
    ensure!(!negative, InvalidGraph, "an image of shape {shape:?} has a negative size");
    cx.set_shape(0, shape)
}
