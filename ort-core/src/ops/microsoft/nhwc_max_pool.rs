//! `NhwcMaxPool`: the greatest codes of windows, with the channels of the image last.

use super::qlinear::{CODES, channels_first, move_channels, rank, set_image};
use crate::Result;
use crate::ir::Attribute;
use crate::ops;
use crate::ops::nn::geometry::Windows;
use crate::spec::{AttrKind, Draft, InferCx, MICROSOFT, OP, OpSpec, attr, one, var};

static NHWC_MAX_POOL: OpSpec = OpSpec {
    domain: MICROSOFT,
    name: "NhwcMaxPool",
    inputs: &[one("x", "T")],
    outputs: &[one("y", "T")],
    types: &[var("T", CODES)],
    attrs: &[
        attr::string("auto_pad", "NOTSET"),
        attr::int("ceil_mode", 0),
        attr::optional("dilations", AttrKind::Ints),
        attr::required("kernel_shape", AttrKind::Ints),
        attr::optional("pads", AttrKind::Ints),
        attr::optional("strides", AttrKind::Ints),
    ],
    infer,
    lower: Some(lower),
    ..OP
};

ops![NHWC_MAX_POOL];

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    let Some(image) = cx.shape(0) else { return Ok(()) };
    let image = channels_first(image, true)?;
    let windows = Windows::of_pool(cx.attrs, image.len())?;
    let (outer, places) = image.split_at_checked(2).unwrap_or((&image, &[]));
    let mut shape = outer.to_vec();
    shape.extend(windows.outputs(places));
    set_image(cx, shape, true)
}

fn lower(draft: &mut Draft<'_>) -> Result<()> {
    let (rank, image) = (rank(draft)?, draft.required(0)?);
    let image = move_channels(draft, image, rank, true)?;
    let attrs = draft.attrs.clone();
    let attrs: Vec<(&str, Attribute)> =
        attrs.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    let result = draft.emit("MaxPool", &[image], &attrs)?;
    let result = move_channels(draft, result, rank, false)?;
    draft.replace(&[result])
}
