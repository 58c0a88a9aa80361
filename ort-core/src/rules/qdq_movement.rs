//! Operators that move or compare quantized values.
//!
//! Between `DequantizeLinear` and `QuantizeLinear` of one scale and zero point, an operator that
//! moves elements runs on quantized values. The results are exact.

use crate::ir::ValueId;
use crate::rewrite::Then::{Build, Template};
use crate::rewrite::{Found, Patch};
use crate::rules::qdq::{of_bytes, parameters_stay, scale_is_single, scale_is_usual};
use crate::{Result, rules};

rules! { "qdq_movement", Extended;
    /// An operator that moves elements or selects the greatest or the least runs on quantized
    /// values, if scale and zero point stay the same: a quarter of the bytes.
    qdq_move: "QuantizeLinear(m@MaxPool|Reshape|Flatten|Transpose|Squeeze|Unsqueeze|Slice|Gather|GatherElements|Expand|Tile|DepthToSpace|SpaceToDepth|ReduceMax|ReduceMin|Resize(DequantizeLinear(x, #s, #z), ..), #ys, #yz)"
        if moves_elements => Build(movement),
        [
            "x=u8[1,2,4,4] s=f32:0.5 z=u8:7 ys=f32:0.5 yz=u8:7 m.op=MaxPool m.kernel_shape=[2,2] m.strides=[2,2]",
            "x=i8[2,3] s=f32:0.5 z=i8:7 ys=f32:0.5 yz=i8:7 m.op=Transpose m.perm=[1,0]",
            "x=i8[1,8,2,3] s=f32:0.5 z=i8:7 ys=f32:0.5 yz=i8:7 m.op=DepthToSpace m.blocksize=2",
            "x=u8[1,2,4,6] s=f32:0.5 z=u8:7 ys=f32:0.5 yz=u8:7 m.op=SpaceToDepth m.blocksize=2",
            "x=u8[2,3,4] s=f32:0.5 z=u8:7 ys=f32:0.5 yz=u8:7 m.op=ReduceMax m.keepdims=0",
            "x=i8[2,3,4] s=f32:0.5 z=i8:7 ys=f32:0.5 yz=i8:7 m.op=ReduceMin",
            "x=u8[2,9] s=f32:0.5 z=u8:7 ys=f32:0.5 yz=u8:7 m.op=Slice m._1=[1] m._2=[8] m._3=[1] m._4=[3]",
            "x=i8[5,3] s=f32:0.5 z=i8:7 ys=f32:0.5 yz=i8:7 m.op=Gather m._1=[4,0,-2] m.axis=0",
            "x=i8[5,8] s=f32:0.5 z=i8:7 ys=f32:0.5 yz=i8:7 m.op=Gather m._1=i64[2,2] m.axis=1",
            "x=u8[3,1] s=f32:0.5 z=u8:7 ys=f32:0.5 yz=u8:7 m.op=Expand m._1=[2,3,4]",
            "x=u8[3,2] s=f32:0.5 z=u8:7 ys=f32:0.5 yz=u8:7 m.op=Tile m._1=[2,3]",
            "x=i8[1,2,4,6] s=f32:0.5 z=i8:7 ys=f32:0.5 yz=i8:7 m.op=Resize m._3=[1,2,8,9] m.mode=nearest",
            "x=u8[1,2,4,6] s=f32:0.5 z=u8:7 ys=f32:0.5 yz=u8:7 m.op=Resize m._3=[1,2,2,3] m.coordinate_transformation_mode=asymmetric m.nearest_mode=floor",
        ], known Nothing;
    /// Where between two DequantizeLinear and QuantizeLinear of one scale and zero point selects
    /// quantized values.
    qdq_where: "QuantizeLinear(Where(c, DequantizeLinear(a, #s, #z), DequantizeLinear(b, s, z)), s, z)"
        if both_have_scale => Template("Where(c, a, b)"),
        ["c=bool[2,3] a=u8[2,3] b=u8[3] s=f32:0.5 z=u8:7"], known Nothing;
    /// ArgMax and ArgMin of dequantized values compare quantized ones, whose order is the same.
    dequantized_arg: "m@ArgMax|ArgMin(DequantizeLinear(x, #s, z?))" if scale_is_single => Build(movement),
        ["x=u8[3,8] s=f32:0.5 z=u8:7 m.op=ArgMax m.axis=1", "x=i8[3,8] s=f32:0.5 m.op=ArgMin m.keepdims=0"], known Nothing;
    /// Split of dequantized values splits quantized ones, and dequantizes the parts.
    dequantized_split: "m@Split(DequantizeLinear(x, #s, #z), ..)" if scale_is_single => Build(split),
        ["x=u8[6,3] s=f32:0.5 z=u8:7 m.outputs=3 m.num_outputs=3"], known Nothing;
}

/// Whether the operator `m` moves elements between values of one scale. `Resize` must take the
/// nearest element, and extrapolate none.
fn moves_elements(found: &Found<'_>) -> bool {
    let text = |name: &str| found.node("m").and_then(|node| node.attrs.find_string(name));
    let resizes = found.node("m").is_some_and(|node| node.spec.name == "Resize");
    let extrapolates = text("coordinate_transformation_mode") == Some("tf_crop_and_resize");
    let takes_nearest = text("mode").is_none_or(|mode| mode == "nearest") && !extrapolates;
    parameters_stay(found) && (!resizes || takes_nearest)
}

/// Like [`scale_is_single`], for two values of one scale.
fn both_have_scale(found: &Found<'_>) -> bool {
    scale_is_usual(found) && of_bytes(found, "a") && found.dtype("a") == found.dtype("b")
}

/// Applies the float operator to the quantized values.
fn movement(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    let Some(node) = patch.found().node("m").cloned() else { return Ok(None) };
    // The replacement has one output; `MaxPool` may have indices as a second.
    if node.outputs.iter().skip(1).any(Option::is_some) {
        return Ok(None);
    }
    let x = patch.value("x")?;
    let inputs: Vec<Option<ValueId>> =
        [Some(x)].into_iter().chain(node.inputs.iter().skip(1).copied()).collect();
    let attrs = patch.attrs("m");
    Ok(Some(vec![patch.emit((node.spec.domain, node.spec.name), &inputs, &attrs)?]))
}

/// Splits quantized values, and dequantizes each part.
fn split(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    let found = patch.found();
    let Some(node) = found.node("m").cloned() else { return Ok(None) };
    // Another reader would keep the dequantized whole beside its parts.
    let whole = node.inputs.first().copied().flatten();
    let is_shared = whole.is_none_or(|whole| found.reads(whole) > 1);
    if is_shared || node.outputs.iter().any(Option::is_none) {
        return Ok(None);
    }
    let [x, scale, zero] = ["x", "s", "z"].map(|name| patch.found().value(name));
    let inputs: Vec<Option<ValueId>> = [x].into_iter().chain(node.inputs.iter().skip(1).copied()).collect();
    let attrs = patch.attrs("m");
    let parts = patch.draft.emit_in(("", "Split"), &inputs, &attrs, node.outputs.len())?;
    let floats = |part| patch.emit(("", "DequantizeLinear"), &[Some(part), scale, zero], &[]);
    parts.into_iter().map(floats).collect::<Result<_>>().map(Some)
}
