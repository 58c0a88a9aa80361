//! Fusion of depthwise-separable convolutions: a pointwise and a depthwise convolution become one
//! operator.

use crate::ir::ValueId;
use crate::ops::fused::activation::Activation;
use crate::rewrite::Then::Build;
use crate::rewrite::{Found, Patch};
use crate::spec::RUNTIME;
use crate::{Result, rules};

rules! { "separable", Extended;
    /// A pointwise convolution and the depthwise one that reads it become FusedPointwiseDepthwise,
    /// if the image between them exceeds the second-level cache: it is then never whole in memory.
    pointwise_depthwise: "d@FusedConv(p@Conv|FusedConv(x, #w1, b1?), #w2, b2?)" if pays => Build(pointwise_depthwise),
        [
            "x=f32[1,16,112,112] w1=f32[24,16,1,1] w2=f32[24,1,3,3] b1=const:f32[24] b2=const:f32[24] d.group=24 d.activation=Relu d.pads=[1,1,1,1] d.strides=[2,2] p.op=Conv",
            "x=f32[2,5,h,w] w1=f32[7,5,1,1] w2=f32[7,1,5,5] d.group=7 d.activation=HardSwish d.pads=[2,2,2,2] p.op=FusedConv p.activation=Relu",
        ];
}

/// Minimum bytes of the intermediate image for which fusion pays: the size of a second-level cache.
/// We measured the speedup with AVX-512 and 1 MiB of such cache per core
/// (`ort-ep-cpu/benches/fused.rs`). From this size on it is 1.00 to 1.07 on one thread, and 0.92 to
/// 1.08 on two. Below, it is 0.98 to 1.08 at 28 by 28 pixels, and 0.6 to 1.04 at 14 by 14 and 7 by
/// 7, with one weight panel per task.
const LEAST_BYTES: usize = 1 << 20;

/// Whether fusion pays: the windows are of the usual kind, and the intermediate is too large to
/// stay in a near cache until it is read. An image of unknown size counts as large.
fn pays(found: &Found<'_>) -> bool {
    is_pointwise(found)
        && is_depthwise(found)
        && bytes_between(found).is_none_or(|bytes| bytes >= LEAST_BYTES)
}

/// Whether all numbers of an attribute are `number`, or it is absent.
fn all_are(found: &Found<'_>, node: &str, attr: &str, number: i64) -> bool {
    let ints = found.node(node).and_then(|node| node.attrs.find_ints(attr));
    ints.is_none_or(|ints| ints.iter().all(|value| *value == number))
}

fn group(found: &Found<'_>, node: &str) -> Option<usize> {
    usize::try_from(found.node(node)?.attrs.find_int("group")?).ok()
}

fn is_pointwise(found: &Found<'_>) -> bool {
    // `auto_pad` needs no check: a window of 1 with stride 1 gets no padding in any mode.
    let kernel_is_one = matches!(found.fixed_shape("w1").as_deref(), Some([_, _, 1, 1]));
    kernel_is_one
        && group(found, "p") == Some(1)
        && all_are(found, "p", "strides", 1)
        && all_are(found, "p", "pads", 0)
}

/// Whether each channel has a square filter of its own, and there is an activation: without one, a
/// later rewrite may still fuse one.
fn is_depthwise(found: &Found<'_>) -> bool {
    let Some([filters, 1, height, width]) =
        found.fixed_shape("w2").and_then(|shape| <[usize; 4]>::try_from(shape).ok())
    else {
        return false;
    };
    let is_square = height == width && matches!(height, 3 | 5 | 7);
    let by_one_or_two = all_are(found, "d", "strides", 1) || all_are(found, "d", "strides", 2);
    let activation = found.node("d").and_then(|node| node.attrs.find_string("activation"));
    let is_finished = activation.is_some_and(|activation| !activation.is_empty());
    group(found, "d") == Some(filters)
        && is_square
        && by_one_or_two
        && all_are(found, "d", "dilations", 1)
        && is_finished
}

/// Returns the bytes of the intermediate for one image, if its size is known.
fn bytes_between(found: &Found<'_>) -> Option<usize> {
    let size = |axis: usize| usize::try_from(found.shape("x")?.get(axis)?.as_constant()?).ok();
    let channels = *found.fixed_shape("w1")?.first()?;
    // The pointwise convolution keeps height and width, axes 2 and 3.
    let elements = channels.saturating_mul(size(2)?).saturating_mul(size(3)?);
    found.dtype("x")?.byte_len(elements)
}

fn pointwise_depthwise(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    let mut attrs = patch.attrs("d");
    // The activation of the pointwise convolution becomes the inner one.
    let inner =
        patch.found().node("p").map(|node| Activation::of_attributes(&node.attrs)).transpose()?.flatten();
    attrs.extend(inner.iter().flat_map(Activation::inner_attributes));
    let inputs = ["x", "w1", "w2", "b1", "b2"].map(|name| patch.found.value(name));
    Ok(Some(vec![patch.emit((RUNTIME, "FusedPointwiseDepthwise"), &inputs, &attrs)?]))
}
