//! Image decoding: `ImageDecoder`.

use crate::dtype::{DType, TypeSet};
use crate::ops;
use crate::spec::{InferCx, OP, OpSpec, attr, one, var};
use crate::{Result, ensure, unknown_name};

static IMAGE_DECODER: OpSpec = OpSpec {
    name: "ImageDecoder",
    since: 20,
    first: 20,
    inputs: &[one("encoded_stream", "T1")],
    outputs: &[one("image", "T2")],
    types: &[var("T1", TypeSet::of(&[DType::U8])), var("T2", TypeSet::of(&[DType::U8]))],
    attrs: &[attr::string("pixel_format", "RGB")],
    infer,
    ..OP
};

ops![IMAGE_DECODER];

/// The output is (height, width, channels), and the pixel format determines the channels.
fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let channels = match cx.attrs.string("pixel_format")? {
        "RGB" | "BGR" => 3,
        "Grayscale" => 1,
        other => return Err(unknown_name("pixel_format", other, &["RGB", "BGR", "Grayscale"])),
    };
    if let Some(shape) = cx.shape(0) {
        ensure!(shape.len() == 1, InvalidGraph, "the encoded stream has rank {}, expected 1", shape.len());
    }
    let (height, width) = (cx.fresh(), cx.fresh());
    cx.set(0, DType::U8, Some(vec![height, width, channels.into()]));
    Ok(())
}
