//! Convolution fusion: padding, per-channel scales and biases, batch normalization, residual and
//! activation.

use crate::ir::{Attribute, ValueId};
use crate::ops::fused::activation::Activation;
use crate::rewrite::Then::Build;
use crate::rewrite::{Found, Patch};
use crate::spec::{MICROSOFT, RUNTIME};
use crate::{Result, rules};

rules! { "conv", Extended;
    /// BatchNormalization after Conv becomes part of the filters, `w * scale / sqrt(variance +
    /// epsilon)`, and of the bias. Constant folding computes both once.
    batch_norm_into_conv: "n@BatchNormalization(c@Conv(x, #w, b?), #scale, #bias, #mean, #variance; training_mode=0)"
        if is_normalization_of_filters => Build(batch_norm_into_conv),
        [
            "x=f32[1,4,5,5] w=f32[6,2,3,3] b=const:f32[6] scale=f32[6] bias=f32[6] mean=f32[6] variance=f32[6] c.group=2",
            "x=f32[1,4,5] w=f32[6,4,3] scale=f32[6] bias=f32[6] mean=f32[6] variance=f32[6]",
        ], known Nothing;
    /// A constant factor after Conv, one number or one per channel, is multiplied into the filters
    /// and the bias.
    mul_into_conv: "Mul(c@Conv(x, #w, b?), #factor)" if factor_is_per_channel => Build(mul_into_conv),
        [
            "x=f32[1,4,5,5] w=f32[6,4,3,3] b=const:f32[6] factor=f32[6,1,1]",
            "x=f32[1,4,5,5] w=f32[6,4,3,3] factor=f32[1]",
        ], known Nothing;
    /// A constant added after Conv, one number or one per channel, becomes part of the bias.
    add_into_conv: "Add(c@Conv(x, #w, b?), #addend)" if addend_is_per_channel => Build(add_into_conv),
        [
            "x=f32[1,4,5,5] w=f32[6,4,3,3] b=const:f32[6] addend=f32[1,6,1,1]",
            "x=f32[1,4,5,5] w=f32[6,4,3,3] addend=f32:0.5",
        ], known Nothing;
    /// Zero padding of the spatial axes before Conv becomes the `pads` of the Conv: the padded
    /// image is never written.
    pad_into_conv: "c@Conv(Pad(x, pads, value?; mode='constant'), w, b?; auto_pad='NOTSET')" if pads_spatial_axes_with_zeros
        => Build(pad_into_conv),
        ["x=f32[1,2,5,5] pads=[0,0,1,0,0,0,2,1] w=f32[3,2,3,3] c.pads=[0,1,0,0]"];
    /// Conv plus a tensor of the same shape becomes FusedConv: the epilogue adds the residual.
    conv_residual: "Add(c@Conv(x, w, b?), residual)" if residual_has_output_shape => Build(residual),
        ["x=f32[1,4,5,5] w=const:f32[6,4,3,3] b=const:f32[6] residual=f32[1,6,3,3]"];
    /// An activation after Conv becomes the epilogue of FusedConv: the output is written once.
    conv_activation: "act@Activation(c@Conv(x, w, b?))"
        => Build(activation),
        ["x=f32[1,4,5,5] w=const:f32[6,4,3,3] b=const:f32[6]", "x=f32[1,4,5,5] w=const:f32[6,4,3,3] act.op=Swish"], known Nothing;
    /// An activation after a FusedConv with a residual joins its epilogue.
    residual_activation: "act@Activation(c@FusedConv(x, w, b?, residual?; activation=''))"
        => Build(activation),
        ["x=f32[1,4,5,5] w=const:f32[6,4,3,3] b=const:f32[6] residual=f32[1,6,3,3]"], known Nothing;
    /// Clip with constant bounds after Conv becomes the epilogue of FusedConv.
    conv_clip: "Clip(c@Conv(x, w, b?), #min, #max)" if bounds_are_attributes => Build(clip),
        ["x=f32[1,4,5,5] w=const:f32[6,4,3,3] b=const:f32[6] min=f32:0 max=f32:6"], known Nothing;
    /// Clip with constant bounds after a FusedConv with a residual joins its epilogue.
    residual_clip: "Clip(c@FusedConv(x, w, b?, residual?; activation=''), #min, #max)" if bounds_are_attributes => Build(clip),
        ["x=f32[1,4,5,5] w=const:f32[6,4,3,3] b=const:f32[6] residual=f32[1,6,3,3] min=f32:0 max=f32:6"], known Nothing;
}

/// Whether only the normalized images are read, and each parameter is a vector with one number per
/// filter.
fn is_normalization_of_filters(found: &Found<'_>) -> bool {
    let is_list = |name: &str| {
        let filters = found.fixed_shape("w").and_then(|shape| shape.first().copied());
        filters.is_some_and(|filters| found.fixed_shape(name).as_deref() == Some(&[filters]))
    };
    let has_one_output = found.root().is_some_and(|node| node.outputs.iter().skip(1).all(Option::is_none));
    has_one_output
        && ["scale", "bias", "mean", "variance"].into_iter().all(is_list)
        && (found.value("b").is_none() || is_list("b"))
}

/// Whether the bias is a constant vector, or left out.
fn bias_is_constant(found: &Found<'_>) -> bool {
    found.value("b").is_none() || found.tensor("b").is_some_and(|bias| bias.shape().len() == 1)
}

/// Whether the constant `name` has a single number, or one per filter along the channel axis.
fn per_channel(found: &Found<'_>, name: &str) -> bool {
    let (Some(constant), Some(filters)) = (found.tensor(name), found.fixed_shape("w")) else { return false };
    let [count, kernel @ ..] = filters.as_slice() else { return false };
    let spatial = kernel.len().saturating_sub(1);
    // A constant of more axes than the image would add axes to the result.
    let fits = constant.shape().len() <= spatial + 2;
    let one = constant.element_count() == 1;
    // Counted from the last axis, the channels follow the spatial axes.
    let channels =
        constant.shape().iter().rev().enumerate().all(|(axis, size)| *size == 1 || axis == spatial);
    fits && (one || (channels && constant.element_count() == *count))
}

pub(super) fn factor_is_per_channel(found: &Found<'_>) -> bool {
    per_channel(found, "factor") && bias_is_constant(found)
}

pub(super) fn addend_is_per_channel(found: &Found<'_>) -> bool {
    per_channel(found, "addend") && bias_is_constant(found)
}

/// Returns the rank of the filters and their number.
fn filters(patch: &Patch<'_>) -> Option<(usize, usize)> {
    let shape = patch.found().fixed_shape("w")?;
    Some((shape.len(), *shape.first()?))
}

/// Reshapes `value`, one number per filter, so that it broadcasts over the filters.
fn over_filters(patch: &mut Patch<'_>, value: ValueId, (rank, _): (usize, usize)) -> Result<ValueId> {
    let mut sizes = vec![1; rank];
    sizes.iter_mut().take(1).for_each(|size| *size = -1);
    let sizes = patch.constant_ints(&sizes)?;
    patch.node("Reshape", &[value, sizes], &[])
}

/// Converts `value` to a vector of one number per filter.
pub(super) fn list(patch: &mut Patch<'_>, value: ValueId, (_, count): (usize, usize)) -> Result<ValueId> {
    let flat = patch.constant_ints(&[-1])?;
    let flat = patch.node("Reshape", &[value, flat], &[])?;
    let count = patch.constant_ints(&[count as i64])?;
    // A single number repeats for each filter.
    patch.node("Expand", &[flat, count], &[])
}

/// Emits the convolution with other filters and another bias.
fn conv(patch: &mut Patch<'_>, w: ValueId, b: Option<ValueId>) -> Result<Option<Vec<ValueId>>> {
    let (x, attrs) = (patch.value("x")?, patch.attrs("c"));
    Ok(Some(vec![patch.emit(("", "Conv"), &[Some(x), Some(w), b], &attrs)?]))
}

fn batch_norm_into_conv(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    let Some(size) = filters(patch) else { return Ok(None) };
    let epsilon = patch.found().node("n").and_then(|node| node.attrs.find_float("epsilon")).unwrap_or(1e-5);
    let Some(epsilon) = patch.number_like("variance", epsilon)? else { return Ok(None) };
    let [w, scale, bias, mean, variance] = [
        patch.value("w")?,
        patch.value("scale")?,
        patch.value("bias")?,
        patch.value("mean")?,
        patch.value("variance")?,
    ];
    // These nodes read constants: folding computes them while the session is built.
    let variance = patch.node("Add", &[variance, epsilon], &[])?;
    let deviation = patch.node("Sqrt", &[variance], &[])?;
    let factor = patch.node("Div", &[scale, deviation], &[])?;
    let broad = over_filters(patch, factor, size)?;
    let w = patch.node("Mul", &[w, broad], &[])?;
    // The new bias is `(b - mean) * factor + bias`.
    let shifted = match patch.found.value("b") {
        Some(b) => patch.node("Sub", &[b, mean], &[])?,
        None => patch.node("Neg", &[mean], &[])?,
    };
    let scaled = patch.node("Mul", &[shifted, factor], &[])?;
    let b = patch.node("Add", &[scaled, bias], &[])?;
    conv(patch, w, Some(b))
}

fn mul_into_conv(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    let Some(size) = filters(patch) else { return Ok(None) };
    let (w, factor) = (patch.value("w")?, patch.value("factor")?);
    let broad = over_filters(patch, factor, size)?;
    let w = patch.node("Mul", &[w, broad], &[])?;
    let b = match patch.found.value("b") {
        Some(b) => {
            let factor = list(patch, factor, size)?;
            Some(patch.node("Mul", &[b, factor], &[])?)
        }
        None => None,
    };
    conv(patch, w, b)
}

fn add_into_conv(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    let Some(size) = filters(patch) else { return Ok(None) };
    let (w, addend) = (patch.value("w")?, patch.value("addend")?);
    let addend = list(patch, addend, size)?;
    let b = match patch.found.value("b") {
        Some(b) => patch.node("Add", &[b, addend], &[])?,
        None => addend,
    };
    conv(patch, w, Some(b))
}

fn pads_spatial_axes_with_zeros(found: &Found<'_>) -> bool {
    let (Some(pads), Some(rank)) = (found.ints("pads"), found.rank("x")) else { return false };
    let zeros = found.value("value").is_none() || found.scalar("value") == Some(0.0);
    // Batch and channels must stay as they are. A negative padding crops, which a convolution
    // cannot.
    let spatial = |(axis, pad): (usize, &i64)| if axis % rank < 2 { *pad == 0 } else { *pad >= 0 };
    zeros && rank > 2 && pads.len() == 2 * rank && pads.iter().enumerate().all(spatial)
}

fn pad_into_conv(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    let found = patch.found();
    let (Some(pads), Some(rank)) = (found.ints("pads"), found.rank("x")) else { return Ok(None) };
    let spatial = rank.saturating_sub(2);
    let mut attrs = patch.attrs("c");
    let own = attrs.iter().find(|(name, _)| *name == "pads").and_then(|(_, value)| match value {
        Attribute::Ints(pads) => Some(pads.clone()),
        _ => None,
    });
    let own = own.unwrap_or_else(|| vec![0; 2 * spatial]);
    // `Pad` lists the begins of all axes, then the ends; skip batch and channels in both.
    let added = pads.iter().skip(2).take(spatial).chain(pads.iter().skip(rank + 2));
    let sum = own.iter().zip(added).map(|(own, added)| own.saturating_add(*added)).collect();
    attrs.retain(|(name, _)| *name != "pads");
    attrs.push(("pads", Attribute::Ints(sum)));
    let inputs = ["x", "w", "b"].map(|name| patch.found.value(name));
    Ok(Some(vec![patch.emit(("", "Conv"), &inputs, &attrs)?]))
}

/// Whether the residual is no constant, and neither side of the addition is broadcast.
pub(super) fn residual_has_output_shape(found: &Found<'_>) -> bool {
    let both = found.has_output_shape("c") && found.has_output_shape("residual");
    found.tensor("residual").is_none() && both
}

/// Emits a `FusedConv` or `ConvIntegerToFloat` with the inputs of the match.
fn fused(
    patch: &mut Patch<'_>,
    activation: impl IntoIterator<Item = (&'static str, Attribute)>,
) -> Result<Option<Vec<ValueId>>> {
    let mut attrs = patch.attrs("c");
    // A matched `FusedConv` has an empty activation, which the new one replaces.
    attrs.retain(|(name, _)| !name.starts_with("activation"));
    attrs.extend(activation);
    let (operator, names): (_, &[&str]) = match patch.found.value("xs") {
        Some(_) => ((RUNTIME, "ConvIntegerToFloat"), &["x", "w", "xs", "ws", "xz", "wz", "b", "residual"]),
        None => ((MICROSOFT, "FusedConv"), &["x", "w", "b", "residual"]),
    };
    let inputs: Vec<Option<ValueId>> = names.iter().map(|name| patch.found.value(name)).collect();
    Ok(Some(vec![patch.emit(operator, &inputs, &attrs)?]))
}

pub(super) fn residual(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    fused(patch, [])
}

pub(super) fn activation(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    let node = patch.found().node("act");
    match node.and_then(|node| Activation::of_operator(node.spec.name, &node.attrs)) {
        Some(activation) => fused(patch, activation.attributes()),
        None => Ok(None),
    }
}

/// Returns both bounds, if float attributes can hold them.
fn bounds(found: &Found<'_>) -> Option<[f32; 2]> {
    let bound = |name: &str| found.attribute("x", found.scalar(name)?);
    Some([bound("min")?, bound("max")?])
}

pub(super) fn bounds_are_attributes(found: &Found<'_>) -> bool {
    bounds(found).is_some()
}

pub(super) fn clip(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    let Some(bounds) = bounds(&patch.found()) else { return Ok(None) };
    let activation = Activation::new("Clip", &bounds)?;
    fused(patch, activation.attributes())
}
