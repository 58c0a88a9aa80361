//! Matmul fusion: bias, residual and activation become the epilogue of the matmul.

use crate::ir::{Attribute, ValueId};
use crate::ops::fused::activation::Activation;
use crate::rewrite::Then::{Build, Template};
use crate::rewrite::{Found, Patch};
use crate::spec::RUNTIME;
use crate::{Result, rules};

rules! { "linear", Extended;
    /// MatMul with a transposed constant weight becomes FusedMatMul with `transB`.
    matmul_transposed_weight: "MatMul(a, Transpose(#b; perm=[1,0]))" if are_matrices => Template("FusedMatMul(a, b; transB=1)"),
        ["a=f32[2,3,40] b=f32[50,40]"], keep true;
    /// MatMul with a constant weight, plus a vector, becomes FusedMatMul: the epilogue adds the
    /// bias.
    matmul_bias: "Add(m@MatMul(a, #b), #bias)" if bias_is_vector => Template("FusedMatMul(a, b, bias)"),
        ["a=f32[2,3,8] b=f32[8,5] bias=f32[5]"];
    /// A vector added to a FusedMatMul becomes its bias.
    fused_bias: "Add(m@FusedMatMul(a, #b; activation=''), #bias)" if bias_is_vector
        => Template("FusedMatMul(a, b, bias; ..m)"), ["a=f32[2,3,8] b=f32[5,8] m.transB=1 bias=f32[5]"];
    /// Gemm whose third input is a vector becomes FusedMatMul with a bias.
    gemm_bias: "g@Gemm(a, #b, #bias; alpha=1; beta=1; transA=0)" if bias_is_vector
        => Template("FusedMatMul(a, b, bias; ..g; transA=0)"), ["a=f32[3,8] b=f32[5,8] g.transB=1 bias=f32[5]"];
    /// Reshapes to a matrix and back around a FusedMatMul are removed, if they keep the leading
    /// axes.
    matmul_between_reshapes: "Reshape(m@FusedMatMul(Reshape(a, _), #b, bias?; transA=0), _)" if keeps_leading_axes
        => Template("FusedMatMul(a, b, bias?; ..m)"),
        ["a=f32[2,3,8] _0=[-1,8] b=f32[8,5] bias=const:f32[5] _1=[2,3,5]"];
    /// MatMul with a constant weight, plus a tensor of the same shape, becomes FusedMatMul: the
    /// epilogue adds the residual.
    matmul_residual: "Add(m@MatMul(a, #b), residual)" if residual_has_output_shape => Build(residual),
        ["a=f32[2,3,8] b=f32[8,5] residual=f32[2,3,5]"];
    /// A tensor of the same shape added to a FusedMatMul becomes its residual.
    fused_residual: "Add(m@FusedMatMul(a, #b, bias?; activation=''), residual)" if residual_has_output_shape
        => Build(residual), ["a=f32[2,3,8] b=f32[8,5] bias=const:f32[5] residual=f32[2,3,5]"];
    /// An activation after MatMul with a constant weight becomes the epilogue of FusedMatMul: the
    /// output is written once.
    matmul_activation: "act@Activation(MatMul(a, #b))" if are_matrices
        => Build(activation), ["a=f32[2,3,8] b=f32[8,5]", "a=f32[2,3,8] b=f32[8,5] act.op=Gelu"];
    /// An activation after FusedMatMul joins its epilogue.
    fused_activation: "act@Activation(m@FusedMatMul(a, #b, bias?, residual?; activation=''))"
        => Build(activation),
        [
            "a=f32[2,3,8] b=f32[8,5] bias=const:f32[5] act.op=Gelu act.approximate=tanh",
            "a=f32[2,3,8] b=f32[8,5] residual=f32[2,3,5] act.op=LeakyRelu act.alpha=0.1",
        ];
}

/// Whether both operands have two axes or more, as `FusedMatMul` requires.
fn are_matrices(found: &Found<'_>) -> bool {
    ["a", "b"].into_iter().all(|side| found.rank(side).is_some_and(|rank| rank >= 2))
}

/// Whether the bias has one value per column of the matmul, so that it does not broadcast the
/// result.
pub(super) fn bias_is_vector(found: &Found<'_>) -> bool {
    // A `Gemm` is the root itself, whose output has the shape of the matmul.
    let product = found.shape("m").or(found.output_shape());
    match (found.shape("bias"), product) {
        (Some([size]), Some([.., columns])) => size == columns && are_matrices(found),
        _ => false,
    }
}

/// Whether the residual is no constant, and neither side of the addition is broadcast.
pub(super) fn residual_has_output_shape(found: &Found<'_>) -> bool {
    let both = found.has_output_shape("m") && found.has_output_shape("residual");
    found.tensor("residual").is_none() && both && are_matrices(found)
}

fn keeps_leading_axes(found: &Found<'_>) -> bool {
    let matrix = found.node("m").and_then(|node| node.inputs.first().copied().flatten());
    let matrix = matrix.and_then(|matrix| found.graph.value(matrix).ty.shape());
    match (found.shape("a"), matrix, found.output_shape()) {
        (Some([lead @ .., size]), Some([_, columns]), Some([out_lead @ .., _])) => {
            // A weight with more axes would broadcast over the leading axes.
            lead == out_lead && size == columns && found.rank("b") == Some(2)
        }
        _ => false,
    }
}

/// Emits the matched matmul with the addends of the match and more attributes.
fn product(patch: &mut Patch<'_>, more: Vec<(&'static str, Attribute)>) -> Result<Option<Vec<ValueId>>> {
    // All patterns match an empty activation, and the addends are inputs.
    let kept = ["alpha", "transA", "transB", "axis", "block_size"];
    let mut attrs = patch.attrs("m");
    attrs.retain(|(name, _)| kept.contains(name));
    attrs.extend(more);
    let (op, sides): (_, &[&str]) = match patch.found.value("s") {
        Some(_) => ("DequantizeMatMul", &["a", "b", "s", "z"]),
        None => ("FusedMatMul", &["a", "b"]),
    };
    let names = sides.iter().chain(&["bias", "residual"]);
    let inputs: Vec<Option<ValueId>> = names.map(|name| patch.found.value(name)).collect();
    Ok(Some(vec![patch.emit((RUNTIME, op), &inputs, &attrs)?]))
}

pub(super) fn residual(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    product(patch, Vec::new())
}

pub(super) fn activation(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    let node = patch.found().node("act");
    let Some(activation) = node.and_then(|node| Activation::of_operator(node.spec.name, &node.attrs)) else {
        return Ok(None);
    };
    let attrs = activation.attributes();
    product(patch, attrs)
}
