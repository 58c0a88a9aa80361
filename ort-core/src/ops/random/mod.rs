//! Random number generators.
//!
//! Each is [`Traits::RANDOM`], which keeps passes from folding or merging it.

use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ops;
use crate::spec::{AttrKind, AttrSpec, Grad, InferCx, OP, OpSpec, Param, Traits, TypeVar, attr, one, var};
use crate::{Result, ensure, error};

const SEED: AttrSpec = attr::optional("seed", AttrKind::Float);
const LIKE_TYPES: &[TypeVar] = &[var("T1", TypeSet::ALL_TENSOR), var("T2", TypeSet::FLOATS)];
const LIKE_INPUTS: &[Param] = &[one("input", "T1")];
const RANDOM: OpSpec = OpSpec { since: 22, traits: Traits::RANDOM, ..OP };

static RANDOM_NORMAL: OpSpec = OpSpec {
    name: "RandomNormal",
    outputs: &[one("output", "T")],
    types: &[var("T", TypeSet::FLOATS)],
    attrs: &[
        attr::int("dtype", 1),
        attr::float("mean", 0.0),
        attr::float("scale", 1.0),
        SEED,
        attr::required("shape", AttrKind::Ints),
    ],
    infer: infer_shape,
    ..RANDOM
};

static RANDOM_UNIFORM: OpSpec = OpSpec {
    name: "RandomUniform",
    outputs: &[one("output", "T")],
    types: &[var("T", TypeSet::FLOATS)],
    attrs: &[
        attr::int("dtype", 1),
        attr::float("high", 1.0),
        attr::float("low", 0.0),
        SEED,
        attr::required("shape", AttrKind::Ints),
    ],
    infer: infer_shape,
    ..RANDOM
};

static RANDOM_NORMAL_LIKE: OpSpec = OpSpec {
    name: "RandomNormalLike",
    grad: Grad::Zero("only the shape of its input counts"),
    inputs: LIKE_INPUTS,
    outputs: &[one("output", "T2")],
    types: LIKE_TYPES,
    attrs: &[
        attr::optional("dtype", AttrKind::Int),
        attr::float("mean", 0.0),
        attr::float("scale", 1.0),
        SEED,
    ],
    infer: infer_like,
    ..RANDOM
};

static RANDOM_UNIFORM_LIKE: OpSpec = OpSpec {
    name: "RandomUniformLike",
    grad: Grad::Zero("only the shape of its input counts"),
    inputs: LIKE_INPUTS,
    outputs: &[one("output", "T2")],
    types: LIKE_TYPES,
    attrs: &[attr::optional("dtype", AttrKind::Int), attr::float("high", 1.0), attr::float("low", 0.0), SEED],
    infer: infer_like,
    ..RANDOM
};

static BERNOULLI: OpSpec = OpSpec {
    name: "Bernoulli",
    grad: Grad::Zero("its output is drawn, and jumps from 0 to 1"),
    first: 15,
    inputs: LIKE_INPUTS,
    outputs: &[one("output", "T2")],
    types: &[var("T1", TypeSet::FLOATS), var("T2", TypeSet::NUMERIC.union(TypeSet::of(&[DType::Bool])))],
    attrs: &[attr::optional("dtype", AttrKind::Int), SEED],
    infer: infer_like,
    ..RANDOM
};

static MULTINOMIAL: OpSpec = OpSpec {
    name: "Multinomial",
    first: 7,
    inputs: LIKE_INPUTS,
    outputs: &[one("output", "T2")],
    types: &[var("T1", TypeSet::FLOATS), var("T2", TypeSet::of(&[DType::I32, DType::I64]))],
    // `TensorProto.DataType.INT32`.
    attrs: &[attr::int("dtype", 6), attr::int("sample_size", 1), SEED],
    infer: infer_multinomial,
    ..RANDOM
};

ops![RANDOM_NORMAL, RANDOM_UNIFORM, RANDOM_NORMAL_LIKE, RANDOM_UNIFORM_LIKE, BERNOULLI, MULTINOMIAL];

/// The element type of the attribute `dtype`, or that of the input without the attribute.
fn output_dtype(cx: &InferCx<'_>, allowed: TypeSet) -> Result<DType> {
    let dtype = match cx.attrs.find_int("dtype") {
        None => cx.dtype(0)?,
        Some(code) => i32::try_from(code)
            .ok()
            .and_then(DType::from_onnx)
            .ok_or_else(|| error!(InvalidGraph, "dtype {code} is not an element type"))?,
    };
    ensure!(allowed.contains(dtype), InvalidGraph, "random numbers of type {}", dtype.name());
    Ok(dtype)
}

fn infer_shape(cx: &mut InferCx<'_>) -> Result<()> {
    let dtype = output_dtype(cx, TypeSet::FLOATS)?;
    let shape = cx.attrs.ints("shape")?;
    ensure!(shape.iter().all(|&size| size >= 0), InvalidGraph, "shape {shape:?} has a negative size");
    cx.set(0, dtype, Some(shape.iter().copied().map(Dim::constant).collect()));
    Ok(())
}

fn infer_like(cx: &mut InferCx<'_>) -> Result<()> {
    let dtype = output_dtype(cx, TypeSet::NUMERIC.union(TypeSet::of(&[DType::Bool])))?;
    cx.set(0, dtype, cx.shape(0).map(<[Dim]>::to_vec));
    Ok(())
}

fn infer_multinomial(cx: &mut InferCx<'_>) -> Result<()> {
    let dtype = output_dtype(cx, TypeSet::of(&[DType::I32, DType::I64]))?;
    let samples = cx.attrs.int("sample_size")?;
    ensure!(samples >= 0, InvalidGraph, "sample_size is {samples}, expected 0 or more");
    // The input holds a row of unnormalized log-probabilities for each item of the batch.
    let shape = match cx.shape(0) {
        None => None,
        Some([batch, _]) => Some(vec![batch.clone(), samples.into()]),
        Some(shape) => return Err(error!(InvalidGraph, "the input has rank {}, expected 2", shape.len())),
    };
    cx.set(0, dtype, shape);
    Ok(())
}
