//! Normalization fusion, for normalizations that exporters write as formulas. Also softmax over the
//! last axis of a flattened tensor.
//!
//! Ba, Kiros and Hinton, "Layer Normalization", arXiv 1607.06450; Zhang and Sennrich, "Root Mean
//! Square Layer Normalization", arXiv 1910.07467.

use crate::dtype::DType;
use crate::ir::{Attribute, ValueId};
use crate::rewrite::Then::{Build, Template};
use crate::rewrite::{Found, Patch};
use crate::{Result, rules};

rules! { "norm", Extended;
    /// `x / sqrt(mean(x * x) + epsilon) * scale` over the last axis becomes RMSNormalization,
    /// except for double.
    rms_norm: "Mul(Div(x, Sqrt(Add(ReduceMean(Mul(x, x), axes; keepdims=1), #epsilon))), scale)"
        if is_rms_norm => Build(rms_norm), ["x=f32[2,3,40] axes=[2] epsilon=f32:0.00001 scale=f32[40]"];
    /// RMSNormalization, written with Reciprocal instead of the division.
    rms_norm_reciprocal: "Mul(Mul(x, Reciprocal(Sqrt(Add(ReduceMean(Mul(x, x), axes; keepdims=1), #epsilon)))), scale)"
        if is_rms_norm => Build(rms_norm), ["x=f32[2,3,40] axes=[-1] epsilon=f32:0.00001 scale=f32[40]"];
    /// RMSNormalization, written with a division of 1 instead.
    rms_norm_quotient: "Mul(Mul(x, Div(1, Sqrt(Add(ReduceMean(Mul(x, x), axes; keepdims=1), #epsilon)))), scale)"
        if is_rms_norm => Build(rms_norm), ["x=f32[2,3,40] axes=[-1] epsilon=f32:0.00001 scale=f32[40]"];
    /// RMSNormalization of `x - mean(x)`, plus a bias, becomes LayerNormalization.
    layer_norm: "Add(r@RMSNormalization(Sub(x, ReduceMean(x, axes; keepdims=1)), scale; axis=-1; stash_type=1), bias)"
        if is_layer_norm => Build(layer_norm), ["x=f32[2,3,40] axes=[-1] scale=f32[40] bias=f32[40]"];
    /// Flatten, Softmax over the last axis and a Reshape back become one Softmax, if Flatten keeps
    /// the last axis. Exporters write this for Softmax before opset 13.
    softmax_flattened: "Reshape(Softmax(f@Flatten(x); axis=-1), _)" if flattens_to_last_axis
        => Template("Softmax(x; axis=-1)"), ["x=f32[2,3,40] f.axis=2 _0=[2,3,40]"];
}

/// Whether `axes` is the last axis of `x`.
fn over_last_axis(found: &Found<'_>) -> bool {
    let (Some(axes), Some(rank)) = (found.ints("axes"), found.rank("x")) else { return false };
    axes == [-1] || axes == [rank as i64 - 1]
}

/// Whether the value `name` has one number for each element of the last axis of `x`.
fn per_last_axis(found: &Found<'_>, name: &str) -> bool {
    match (found.shape(name), found.shape("x")) {
        (Some([size]), Some([.., last])) => size == last,
        _ => false,
    }
}

/// Whether the type is not double. The fused operator's epsilon is of single precision, and so is
/// its first stage.
fn is_not_double(found: &Found<'_>) -> bool {
    found.dtype("x") != Some(DType::F64)
}

fn is_layer_norm(found: &Found<'_>) -> bool {
    is_not_double(found)
        && over_last_axis(found)
        && per_last_axis(found, "scale")
        && per_last_axis(found, "bias")
}

fn is_rms_norm(found: &Found<'_>) -> bool {
    found.scalar("epsilon").is_some()
        && is_not_double(found)
        && over_last_axis(found)
        && per_last_axis(found, "scale")
}

fn layer_norm(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    let epsilon = patch.found().node("r").and_then(|node| node.attrs.find_float("epsilon"));
    normalization(patch, "LayerNormalization", &["x", "scale", "bias"], epsilon.unwrap_or(1e-5))
}

fn rms_norm(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    match patch.found().scalar("epsilon") {
        Some(epsilon) => normalization(patch, "RMSNormalization", &["x", "scale"], epsilon as f32),
        None => Ok(None),
    }
}

fn normalization(
    patch: &mut Patch<'_>,
    op: &str,
    inputs: &[&str],
    epsilon: f32,
) -> Result<Option<Vec<ValueId>>> {
    let inputs = inputs.iter().map(|name| patch.value(name)).collect::<Result<Vec<_>>>()?;
    let attrs = [("epsilon", Attribute::Float(epsilon)), ("axis", Attribute::Int(-1))];
    Ok(Some(vec![patch.node(op, &inputs, &attrs)?]))
}

fn flattens_to_last_axis(found: &Found<'_>) -> bool {
    let axis = found.node("f").and_then(|node| node.attrs.find_int("axis"));
    // A scalar has no last axis.
    let is_last = |rank: usize| rank > 0 && (axis == Some(-1) || axis == Some(rank as i64 - 1));
    found.has_output_shape("x") && found.rank("x").is_some_and(is_last)
}
