//! Algebraic simplification: removes operators that change nothing, or that undo each other.

use crate::dim::Dim;
use crate::ir::{Attribute, ValueId};
use crate::ops::tensor::geometry::{normalize_axis, permutation};
use crate::rewrite::Then::{Build, Template};
use crate::rewrite::{Found, Patch};
use crate::rules;
use crate::{Result, error};

rules! { "algebra", Basic;
    /// Identity(x) becomes x.
    identity: "Identity(x)" => Template("x"), ["x=f32[2,3]"], keep true, known Nothing;
    /// Dropout outside training becomes its input, if its mask is not read.
    dropout: "Dropout(x, ..)" if is_not_training => Template("x"), ["x=f32[2,3]"], keep true, known Nothing;
    /// A cast to the type that its input already has becomes the input.
    cast_to_same: "c@Cast(x)" if casts_to_own_type => Template("x"), ["x=f32[2,3] c.to=1"], keep true, known Types;
    /// `x + 0` becomes x. For floats the zero must be negative, because `-0 + 0` is `0`.
    add_zero: "Add(x, #zero)" if adds_nothing => Template("x"), ["x=f32[2,3] zero=f32:-0", "x=i64[2,3] zero=i64:0"],
        keep true, known Types;
    /// `x - 0` becomes x. For floats the zero must be positive, because `-0 - -0` is `0`.
    sub_zero: "Sub(x, #zero)" if subtracts_nothing => Template("x"), ["x=f32[2,3] zero=f32:0", "x=i64[2,3] zero=i64:0"],
        keep true, known Types;
    /// `x * 1` becomes x.
    mul_one: "Mul(x, 1)" => Template("x"), ["x=f32[2,3]"], keep true, known Types;
    /// `x / 1` becomes x.
    div_one: "Div(x, 1)" => Template("x"), ["x=f32[2,3]"], keep true, known Types;
    /// `x ** 1` becomes x.
    pow_one: "Pow(x, 1)" => Template("x"), ["x=f32[2,3]"], keep true, known Types;
    /// `x ** 2` of floats becomes `x * x`: every provider has a fast loop for Mul.
    square: "Pow(x, 2)" if is_float => Template("Mul(x, x)"), ["x=f32[2,3]"], known Types;
    /// `-(-x)` becomes x.
    neg_neg: "Neg(Neg(x))" => Template("x"), ["x=f32[2,3]"], keep true, known Types;
    /// Relu of Relu becomes one Relu, because Relu is idempotent.
    relu_relu: "Relu(r@Relu(x))" => Template("r"), ["x=f32[2,3]"], keep true, known Types;
    /// A Transpose with the identity permutation becomes its input.
    transpose_nothing: "t@Transpose(x)" if moves_nothing => Template("x"), ["x=f32[2,3] t.perm=[0,1]"], keep true;
    /// Two Transposes become one with the composed permutation: one pass over memory less.
    transpose_transpose: "outer@Transpose(inner@Transpose(x))" => Build(join_transposes),
        ["x=f32[2,3,4] outer.perm=[0,2,1] inner.perm=[1,2,0]", "x=f32[2,3] outer.perm=[1,0] inner.perm=[1,0]",
            "x=f32[2,3] outer.perm=[-1,0] inner.perm=[-1,0]"],
        keep true;
    /// Gather from a transposed constant matrix gathers along its other axis, and only the gathered
    /// part is transposed: tied embeddings are stored as the last MatMul reads them.
    gather_transposed: "g@Gather(t@Transpose(#w), i)" if transposes_matrix => Build(gather_transposed),
        ["w=f32[6,40] i=i64[2,3] g.axis=0 t.perm=[1,0]", "w=f32[6,40] i=i64[3] g.axis=1 t.perm=[1,0]",
            "w=f16[6,40] i=i32[2] g.axis=-2"];
    /// A Reshape of a Reshape becomes the outer one, if its constant shape has no 0, which would
    /// copy a size of the inner one.
    reshape_reshape: "Reshape(Reshape(x, _), shape)" if names_its_sizes => Template("Reshape(x, shape)"),
        ["x=f32[2,6] _0=[3,4] shape=[4,3]"], keep true;
    /// A Reshape to the shape of its input becomes the input.
    reshape_to_same: "r@Reshape(x, _)" if keeps_its_shape => Template("x"), ["x=f32[2,6] _0=[2,6]"], keep true;
    /// Unsqueeze and a Reshape back to the original shape become the input.
    reshape_unsqueezed_to_same: "r@Reshape(Unsqueeze(x, _), _)" if keeps_its_shape => Template("x"),
        ["x=f32[2,6] _0=[1] _1=[2,6]"], keep true;
    /// Where with a condition that is false everywhere becomes its third input, if that has the
    /// shape of the output.
    where_never: "r@Where(#condition, _, x)" if is_never_and_keeps_its_shape => Template("x"),
        ["condition=const:bool[2,1] _0=const:f32[1] x=f32[2,6]"], keep true;
    /// CastLike becomes Cast, if the target type is known: kernels and rules need only support
    /// Cast.
    cast_like: "c@CastLike(x, like)" => Build(cast_like), ["x=f32[2,6] like=f16[1]"], known Types;
    /// An Expand to the shape of its input becomes the input.
    expand_to_same: "r@Expand(x, _)" if keeps_its_shape => Template("x"), ["x=f32[2,6] _0=[1,6]"], keep true;
    /// Unsqueeze and a Squeeze back to the original shape become the input.
    squeeze_unsqueeze: "r@Squeeze(Unsqueeze(x, _), _)" if keeps_its_shape => Template("x"),
        ["x=f32[2,6] _0=[1] _1=[1]"], keep true;
    /// A Concat of one input becomes that input.
    concat_of_one: "r@Concat(x, ..)" if keeps_its_shape => Template("x"), ["x=f32[2,3] r.axis=0"], keep true;
    /// A Slice that keeps all elements in their order becomes its input.
    slice_of_all: "r@Slice(x, starts, ends, axes?, steps?)" if keeps_all_forwards => Template("x"),
        ["x=f32[2,6] starts=[0] ends=[9] axes=[1]"], keep true;
}

/// Whether the constant `zero` is a single zero, and for floats has the sign that leaves every
/// value unchanged.
fn is_zero(found: &Found<'_>, is_negative: bool) -> bool {
    let is_float = found.dtype("zero").is_some_and(|dtype| dtype.is_float());
    found
        .scalar("zero")
        .is_some_and(|zero| zero == 0.0 && (!is_float || zero.is_sign_negative() == is_negative))
}

fn adds_nothing(found: &Found<'_>) -> bool {
    is_zero(found, true)
}

fn subtracts_nothing(found: &Found<'_>) -> bool {
    is_zero(found, false)
}

/// Whether `x` holds floats. For integers, `Pow` may compute in another type than `Mul`.
fn is_float(found: &Found<'_>) -> bool {
    found.dtype("x").is_some_and(|dtype| dtype.is_float())
}

fn is_not_training(found: &Found<'_>) -> bool {
    let Some(node) = found.root() else { return false };
    let mask_wanted = node.outputs.get(1).copied().flatten().is_some();
    let training = node.inputs.get(2).copied().flatten();
    // A flag that is not constant may be true in a run.
    let trains = training.is_some_and(|value| match found.graph.constants.get(&value) {
        Some(tensor) => crate::rewrite::scalar(tensor) != Some(0.0),
        None => true,
    });
    !mask_wanted && !trains
}

fn casts_to_own_type(found: &Found<'_>) -> bool {
    let to = found.root().and_then(|node| node.attrs.find_int("to"));
    to.is_some_and(|to| found.dtype("x").is_some_and(|dtype| i64::from(dtype.onnx_code()) == to))
}

fn moves_nothing(found: &Found<'_>) -> bool {
    let (Some(node), Some(rank)) = (found.node("t"), found.rank("x")) else { return false };
    permutation(&node.attrs, rank).is_ok_and(|order| order.into_iter().eq(0..rank))
}

fn join_transposes(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    let found = patch.found();
    let (Some(outer), Some(inner), Some(rank)) = (found.node("outer"), found.node("inner"), found.rank("x"))
    else {
        return Ok(None);
    };
    let (outer, inner) = (permutation(&outer.attrs, rank)?, permutation(&inner.attrs, rank)?);
    // Axis i of the result is axis `outer[i]` of the inner one, which is axis `inner[outer[i]]` of
    // x.
    let joined: Option<Vec<i64>> =
        outer.iter().map(|&axis| inner.get(axis).and_then(|&axis| i64::try_from(axis).ok())).collect();
    let joined = joined.ok_or_else(|| error!(Fail, "a permutation names an axis that is not there"))?;
    let x = patch.value("x")?;
    Ok(Some(vec![patch.node("Transpose", &[x], &[("perm", Attribute::Ints(joined))])?]))
}

fn is_never_and_keeps_its_shape(found: &Found<'_>) -> bool {
    // A boolean is one byte.
    let bytes = found.tensor("condition").and_then(|condition| condition.bytes());
    bytes.is_some_and(|bytes| bytes.iter().all(|&byte| byte == 0)) && keeps_its_shape(found)
}

fn cast_like(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    let Some(dtype) = patch.found().dtype("like") else { return Ok(None) };
    let x = patch.value("x")?;
    // `saturate` and `round_mode` mean the same in both operators.
    let mut attrs = patch.attrs("c");
    attrs.push(("to", Attribute::Int(i64::from(dtype.onnx_code()))));
    Ok(Some(vec![patch.node("Cast", &[x], &attrs)?]))
}

fn names_its_sizes(found: &Found<'_>) -> bool {
    let allows_zero = found.root().and_then(|node| node.attrs.find_int("allowzero")) == Some(1);
    // A 0 copies a size of the input, and the rewrite changes the input.
    found.ints("shape").is_some_and(|sizes| !allows_zero && sizes.iter().all(|&size| size != 0))
}

fn keeps_its_shape(found: &Found<'_>) -> bool {
    found.has_output_shape("x") && !found.shape("x").into_iter().flatten().any(Dim::has_unknown)
}

/// Whether a slice keeps all elements in their order. It may also reverse them, so an unchanged
/// shape is enough only if the steps are 1.
fn keeps_all_forwards(found: &Found<'_>) -> bool {
    let ones = |steps: Vec<i64>| steps.iter().all(|&step| step == 1);
    let forwards = found.value("steps").is_none() || found.ints("steps").is_some_and(ones);
    forwards && keeps_its_shape(found)
}

/// Whether `t` swaps the axes of a matrix and the rank of the indices is known.
fn transposes_matrix(found: &Found<'_>) -> bool {
    let order = found.node("t").and_then(|node| node.attrs.find_ints("perm"));
    let is_swapped = order.is_none_or(|order| matches!(order, [1 | -1, 0 | -2]));
    is_swapped && found.rank("w") == Some(2) && found.rank("i").is_some()
}

fn gather_transposed(patch: &mut Patch<'_>) -> Result<Option<Vec<ValueId>>> {
    let found = patch.found();
    let (Some(node), Some(rank)) = (found.node("g"), found.rank("i")) else { return Ok(None) };
    let along = normalize_axis(node.attrs.find_int("axis").unwrap_or(0), 2)?;
    let attrs = [("axis", Attribute::Int(if along == 0 { 1 } else { 0 }))];
    let (matrix, indices) = (patch.value("w")?, patch.value("i")?);
    let part = patch.node("Gather", &[matrix, indices], &attrs)?;
    // The other axis of the matrix comes first in the part and last in the result, or vice versa.
    let order: Vec<i64> = match (along, rank as i64) {
        (0, rank) => (1..=rank).chain([0]).collect(),
        (_, rank) => std::iter::once(rank).chain(0..rank).collect(),
    };
    Ok(Some(vec![patch.node("Transpose", &[part], &[("perm", Attribute::Ints(order))])?]))
}
