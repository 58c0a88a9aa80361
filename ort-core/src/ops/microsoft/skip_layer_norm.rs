//! Fused normalizations: `SimplifiedLayerNormalization`, the standard's `RMSNormalization`, and the
//! two of a residual sum, `SkipLayerNormalization` and `SkipSimplifiedLayerNormalization`.

use super::{check_per_column, float, int, number, wants};
use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ir::{Attribute, ValueId};
use crate::ops;
use crate::ops::batch;
use crate::ops::nn::norm_layer::infer_layer;
use crate::spec::{BatchRule, Draft, InferCx, MICROSOFT, OP, OpSpec, Traits, attr, one, opt, var};
use crate::{Result, ensure, error};

const SUMMED: TypeSet = TypeSet::of(&[DType::F32, DType::F16, DType::BF16]);
const SINGLE: TypeSet = TypeSet::of(&[DType::F32]);

/// ONNX Runtime registers it in the standard's domain, and accepts attributes that it does not
/// have.
static SIMPLIFIED_LAYER_NORMALIZATION: OpSpec = OpSpec {
    name: "SimplifiedLayerNormalization",
    unchecked_before: i64::MAX,
    inputs: &[one("X", "T"), one("scale", "V")],
    outputs: &[one("Y", "V"), opt("inv_std_var", "U")],
    types: &[
        var("T", TypeSet::FLOATS),
        var("U", TypeSet::of(&[DType::F32, DType::F64])),
        var("V", TypeSet::FLOATS),
    ],
    attrs: &[attr::int("axis", -1), attr::float("epsilon", 1e-5), attr::int("stash_type", 1)],
    traits: Traits::NORMALIZES,
    infer: infer_layer,
    lower: Some(lower_simplified),
    batch: BatchRule::Rule(batch::layer_norm),
    ..OP
};

const SKIP: OpSpec = OpSpec {
    domain: MICROSOFT,
    outputs: &[
        one("output", "T"),
        opt("mean", "U"),
        opt("inv_std_var", "U"),
        opt("input_skip_bias_sum", "T"),
    ],
    types: &[var("T", SUMMED), var("U", SINGLE)],
    attrs: &[attr::float("epsilon", 1e-12)],
    ..OP
};

static SKIP_LAYER_NORMALIZATION: OpSpec = OpSpec {
    name: "SkipLayerNormalization",
    inputs: &[one("input", "T"), one("skip", "T"), one("gamma", "T"), opt("beta", "T"), opt("bias", "T")],
    traits: Traits::NORMALIZES,
    infer: infer_skip,
    lower: Some(lower_skip),
    batch: BatchRule::Rule(batch::skip_norm),
    ..SKIP
};

static SKIP_SIMPLIFIED_LAYER_NORMALIZATION: OpSpec = OpSpec {
    name: "SkipSimplifiedLayerNormalization",
    inputs: &[one("input", "T"), one("skip", "T"), one("gamma", "T"), opt("bias", "T")],
    traits: Traits::NORMALIZES,
    infer: infer_skip,
    lower: Some(lower_skip_simplified),
    batch: BatchRule::Rule(batch::skip_norm),
    ..SKIP
};

ops![SIMPLIFIED_LAYER_NORMALIZATION, SKIP_LAYER_NORMALIZATION, SKIP_SIMPLIFIED_LAYER_NORMALIZATION];

/// Infers the shapes. The skip has the shape of the input, except that its batch may be 1 or left
/// out.
fn infer_skip(cx: &mut InferCx<'_>) -> Result<()> {
    let Some(shape) = cx.shape(0) else { return Ok(()) };
    ensure!(
        matches!(shape.len(), 2 | 3),
        InvalidGraph,
        "the input has rank {}, expected 2 or 3",
        shape.len()
    );
    if let Some(skip) = cx.shape(1) {
        let known = |size: &Dim, other: &Dim| size.as_constant().zip(other.as_constant());
        let fits = matches!(skip.len(), 2 | 3)
            && skip.len() <= shape.len()
            && skip.iter().rev().zip(shape.iter().rev()).enumerate().all(|(from_last, (size, whole))| {
                known(size, whole).is_none_or(|(size, whole)| size == whole || (from_last == 2 && size == 1))
            });
        ensure!(fits, InvalidGraph, "a skip of shape {skip:?} does not fit an input of shape {shape:?}");
        // At run time ONNX Runtime does not check the batch either.
        for (size, whole) in skip.iter().rev().zip(shape.iter().rev()).take(2) {
            cx.require_equal("a size of the skip", size, whole)?;
        }
    }
    for index in 2..cx.input_count() {
        check_per_column(cx, index, "gamma, beta or bias", shape)?;
    }
    // Mean and inverse deviation are per row.
    let mut statistics = shape.to_vec();
    if let Some(last) = statistics.last_mut() {
        *last = Dim::constant(1);
    }
    // Type variable `U` occurs in outputs only, so no input binds it.
    cx.set(1, DType::F32, Some(statistics.clone()));
    cx.set(2, DType::F32, Some(statistics));
    cx.set_shape(0, shape.to_vec())?;
    cx.set_shape(3, shape.to_vec())
}

fn lower_simplified(draft: &mut Draft<'_>) -> Result<()> {
    if !wants(draft, 1) {
        // Without `inv_std_var`, which the standard's operator lacks, the two are the same.
        draft.op = "RMSNormalization".to_string();
        return Ok(());
    }
    let (input, scale) = (draft.required(0)?, draft.required(1)?);
    let (axis, stash, epsilon) = (int(draft, "axis")?, int(draft, "stash_type")?, float(draft, "epsilon")?);
    let rank = draft.shape(0).map(|shape| shape.len() as i64);
    // Negative axes run up to -1, the last one, and need no rank.
    let (first, last) = match (axis, rank) {
        (..0, _) => (axis, 0),
        (_, Some(rank)) => (axis, rank),
        _ => return Err(error!(NotImplemented, "axis {axis} of an input of unknown rank")),
    };
    // With an unknown rank nothing else bounds a negative axis, and the list of axes must stay
    // short.
    let sensible = last.checked_sub(first).is_some_and(|count| count <= 64);
    ensure!(sensible, InvalidGraph, help = "-1 is the last axis", "axis {axis} is beyond every rank");
    let axes: Vec<i64> = (first..last).collect();
    let dtype = i32::try_from(stash).ok().and_then(DType::from_onnx);
    let dtype = dtype.ok_or_else(|| error!(InvalidGraph, "stash_type {stash} is not known"))?;
    let attrs = draft.attrs.clone();
    let attrs: Vec<(&str, Attribute)> =
        attrs.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    let result = draft.emit("RMSNormalization", &[input, scale], &attrs)?;
    let factor = inverse_deviation(draft, input, &axes, epsilon, dtype)?;
    draft.replace(&[result, factor])
}

/// Emits `1 / sqrt(mean(x^2) + epsilon)` over `axes`, computed and returned in `dtype`.
fn inverse_deviation(
    draft: &mut Draft<'_>,
    input: ValueId,
    axes: &[i64],
    epsilon: f32,
    dtype: DType,
) -> Result<ValueId> {
    let to = [("to", Attribute::Int(i64::from(dtype.onnx_code())))];
    let input = draft.emit("Cast", &[input], &to)?;
    let axes = draft.constant_ints(axes)?;
    let squares = draft.emit("Mul", &[input, input], &[])?;
    let mean = draft.emit("ReduceMean", &[squares, axes], &[])?;
    let epsilon = number(draft, epsilon, dtype)?;
    let shifted = draft.emit("Add", &[mean, epsilon], &[])?;
    let root = draft.emit("Sqrt", &[shifted], &[])?;
    draft.emit("Reciprocal", &[root], &[])
}

/// Emits the sum of input, skip and the bias at input `bias`.
fn sum(draft: &mut Draft<'_>, bias: usize) -> Result<ValueId> {
    let (input, skip) = (draft.required(0)?, draft.required(1)?);
    let sum = draft.emit("Add", &[input, skip], &[])?;
    match draft.input(bias) {
        Some(bias) => draft.emit("Add", &[sum, bias], &[]),
        None => Ok(sum),
    }
}

fn lower_skip(draft: &mut Draft<'_>) -> Result<()> {
    let sum = sum(draft, 4)?;
    let inputs = [Some(sum), Some(draft.required(2)?), draft.input(3)];
    let attrs = [("epsilon", Attribute::Float(float(draft, "epsilon")?))];
    let count = if wants(draft, 1) || wants(draft, 2) { 3 } else { 1 };
    let results = draft.emit_many("LayerNormalization", &inputs, &attrs, count)?;
    // `sum` stands in for statistics that the node does not output; `replace` skips those.
    let at = |index: usize| results.get(index).copied().unwrap_or(sum);
    draft.replace(&[at(0), at(1), at(2), sum])
}

/// Decomposes `SkipSimplifiedLayerNormalization`, which subtracts no mean: the output `mean` is 0.
fn lower_skip_simplified(draft: &mut Draft<'_>) -> Result<()> {
    let sum = sum(draft, 3)?;
    let (scale, epsilon) = (draft.required(2)?, float(draft, "epsilon")?);
    let attrs = [("epsilon", Attribute::Float(epsilon))];
    let result = draft.emit("RMSNormalization", &[sum, scale], &attrs)?;
    if !wants(draft, 1) && !wants(draft, 2) {
        return draft.replace(&[result, sum, sum, sum]);
    }
    let factor = inverse_deviation(draft, sum, &[-1], epsilon, DType::F32)?;
    let shape = draft.emit("Shape", &[factor], &[])?;
    // The default value of `ConstantOfShape` is a float32 zero.
    let mean = draft.emit("ConstantOfShape", &[shape], &[])?;
    draft.replace(&[result, mean, factor, sum])
}
