//! `FusedPointwiseDepthwise`: a pointwise convolution fused into the depthwise convolution that
//! reads it.

use super::activation::Activation;
use crate::dtype::TypeSet;
use crate::ir::{Attribute, ValueId};
use crate::ops;
use crate::ops::batch;
use crate::ops::microsoft::{agree, draft_attributes};
use crate::ops::nn::conv;
use crate::spec::{
    AttrKind, BatchRule, Cost, Draft, InferCx, MICROSOFT, OP, OpSpec, RUNTIME, attr, one, opt, var,
};
use crate::{Result, ensure, error};

/// `Y = activation(depthwise(inner_activation(pointwise(X, W1) + B1), W2) + B2)`.
///
/// `W1` is [C, K, 1, ..] and `W2` is [C, 1, k, ..], with one filter for each of the C = `group`
/// channels between the two. The window attributes are those of the depthwise convolution.
static FUSED_POINTWISE_DEPTHWISE: OpSpec = OpSpec {
    domain: RUNTIME,
    name: "FusedPointwiseDepthwise",
    inputs: &[one("X", "T"), one("W1", "T"), one("W2", "T"), opt("B1", "T"), opt("B2", "T")],
    outputs: &[one("Y", "T")],
    types: &[var("T", TypeSet::IEEE_FLOATS)],
    attrs: &[
        attr::required("group", AttrKind::Int),
        attr::string("auto_pad", "NOTSET"),
        attr::optional("dilations", AttrKind::Ints),
        attr::optional("kernel_shape", AttrKind::Ints),
        attr::optional("pads", AttrKind::Ints),
        attr::optional("strides", AttrKind::Ints),
        attr::string("inner_activation", ""),
        attr::optional("inner_activation_params", AttrKind::Floats),
        attr::string("activation", ""),
        attr::optional("activation_params", AttrKind::Floats),
    ],
    cost: Cost::Compute,
    infer,
    lower: Some(lower),
    batch: BatchRule::Rule(batch::conv),
    ..OP
};

ops![FUSED_POINTWISE_DEPTHWISE];

fn infer(cx: &mut InferCx<'_>) -> Result<()> {
    Activation::of_attributes(cx.attrs)?;
    Activation::inner_of_attributes(cx.attrs)?;
    let (Some(image), Some(pointwise)) = (cx.shape(0), cx.shape(1)) else { return Ok(()) };
    let ((batch, channels, sizes), (filters, inner, kernel)) = conv::image_and_kernel(image, pointwise)?;
    agree("the number of channels of W1", channels, inner)?;
    // A symbolic size passes, because it may be 1.
    let is_pointwise = kernel.iter().all(|size| size.as_constant().is_none_or(|size| size == 1));
    ensure!(is_pointwise, InvalidGraph, "W1 has the kernel {kernel:?}, expected 1 along each axis");
    if let Some([bias]) = cx.shape(3) {
        agree("the length of B1", filters, bias)?;
    }
    if let Some([depthwise, each, ..]) = cx.shape(2) {
        agree("the number of filters of W2", filters, depthwise)?;
        let one = each.as_constant().is_none_or(|channels| channels == 1);
        ensure!(one, InvalidGraph, "a filter of W2 has {each} channels, expected 1");
    }
    // A pointwise convolution without padding or strides keeps the spatial sizes.
    let between: Vec<_> = [batch, filters].into_iter().chain(sizes).cloned().collect();
    let Some(depthwise) = cx.shape(2) else { return Ok(()) };
    let shape = conv::output_shape(cx, [&between, depthwise], 4)?;
    cx.set_shape(0, shape)
}

fn lower(draft: &mut Draft<'_>) -> Result<()> {
    let attrs = draft_attributes(draft)?;
    let [inner, outer] = [Activation::inner_of_attributes(&attrs)?, Activation::of_attributes(&attrs)?];
    let windows = ["group", "auto_pad", "dilations", "kernel_shape", "pads", "strides"];
    let of_windows = windows.iter().filter_map(|name| attrs.get(name).map(|value| (*name, value.clone())));
    let of_windows = of_windows.collect();
    let inputs = [Some(draft.required(0)?), Some(draft.required(1)?), draft.input(3)];
    // The window attributes belong to the depthwise convolution. For the pointwise one the defaults
    // hold.
    let between = conv_with(draft, &inputs, Vec::new(), inner.as_ref())?;
    let inputs = [Some(between), Some(draft.required(2)?), draft.input(4)];
    let result = conv_with(draft, &inputs, of_windows, outer.as_ref())?;
    draft.replace(&[result])
}

/// Emits a convolution with an optional activation.
fn conv_with(
    draft: &mut Draft<'_>,
    inputs: &[Option<ValueId>],
    mut attrs: Vec<(&str, Attribute)>,
    activation: Option<&Activation>,
) -> Result<ValueId> {
    let Some(activation) = activation else { return draft.emit_one("Conv", inputs, &attrs) };
    attrs.extend(activation.attributes());
    let results = draft.emit_in((MICROSOFT, "FusedConv"), inputs, &attrs, 1)?;
    results.first().copied().ok_or_else(|| error!(Fail, "the convolution has no output"))
}
