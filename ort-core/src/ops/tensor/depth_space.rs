//! `DepthToSpace` and `SpaceToDepth`: moves channels into blocks of positions and back.

use crate::dim::Dim;
use crate::dtype::TypeSet;
use crate::ops;
use crate::ops::batch;
use crate::spec::{
    AttrKind, AttrSpec, BatchRule, Grad, InferCx, OP, OpSpec, Requirement, Traits, attr, one, var,
};
use crate::{Result, ensure, one_of};

use super::gradients;

const ATTRIBUTES: &[AttrSpec] = &[attr::string("mode", "DCR"), attr::required("blocksize", AttrKind::Int)];

static DEPTH_TO_SPACE: OpSpec = OpSpec {
    name: "DepthToSpace",
    since: 28,
    inputs: &[one("input", "T")],
    outputs: &[one("output", "T")],
    types: &[var("T", TypeSet::ALL_TENSOR)],
    attrs: ATTRIBUTES,
    traits: Traits::MOVES_DATA,
    infer: infer_depth_to_space,
    grad: Grad::Rule(gradients::of_blocks),
    batch: BatchRule::Rule(batch::images),
    ..OP
};

static SPACE_TO_DEPTH: OpSpec = OpSpec {
    name: "SpaceToDepth",
    since: 28,
    inputs: &[one("input", "T")],
    outputs: &[one("output", "T")],
    types: &[var("T", TypeSet::ALL_TENSOR)],
    attrs: ATTRIBUTES,
    traits: Traits::MOVES_DATA,
    infer: infer_space_to_depth,
    grad: Grad::Rule(gradients::of_blocks),
    batch: BatchRule::Rule(batch::images),
    ..OP
};

ops![DEPTH_TO_SPACE, SPACE_TO_DEPTH];

/// Returns the four dimensions of the input and the block size.
fn parts<'a>(cx: &InferCx<'a>) -> Result<Option<(&'a [Dim; 4], i64)>> {
    let mode = cx.attrs.string("mode")?;
    one_of("the mode", mode, &["DCR", "CRD"])?;
    let block = cx.attrs.int("blocksize")?;
    ensure!(
        // The bound keeps the square of the block in 64 bits.
        (1..1 << 16).contains(&block),
        InvalidGraph,
        help = "it must divide the height and width, or its square the channels",
        "blocksize is {block}, expected 1 to 65535"
    );
    let Some(shape) = cx.shape(0) else { return Ok(None) };
    match <&[Dim; 4]>::try_from(shape) {
        Ok(sizes) => Ok(Some((sizes, block))),
        Err(_) => Err(crate::error!(InvalidGraph, "the input has shape {shape:?}, expected rank 4")),
    }
}

fn divide(cx: &InferCx<'_>, size: &Dim, divisor: i64) -> Result<Dim> {
    let whole = Requirement::multiple("size", size, divisor);
    cx.require(whole.help("pad the image, or use another blocksize"))?;
    Ok(size.floor_div(&Dim::constant(divisor)))
}

fn infer_depth_to_space(cx: &mut InferCx<'_>) -> Result<()> {
    let Some(([batch, channels, height, width], block)) = parts(cx)? else { return Ok(()) };
    let shape = vec![batch.clone(), divide(cx, channels, block * block)?, height * block, width * block];
    cx.set_shape(0, shape)
}

fn infer_space_to_depth(cx: &mut InferCx<'_>) -> Result<()> {
    let Some(([batch, channels, height, width], block)) = parts(cx)? else { return Ok(()) };
    let shape = vec![
        batch.clone(),
        channels * (block * block),
        divide(cx, height, block)?,
        divide(cx, width, block)?,
    ];
    cx.set_shape(0, shape)
}
