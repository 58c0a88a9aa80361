//! Classical machine learning: the operators of the domain `ai.onnx.ml`.

mod category;
mod features;
mod imputer;
mod label_encoder;
mod linear;
mod map;
mod normalizer;
mod scaler;
mod svm;
mod tree_ensemble;
mod tree_ensemble_split;

use crate::dim::Dim;
use crate::dtype::{DType, TypeSet};
use crate::ir::Attributes;
use crate::spec::InferCx;
use crate::{Result, ensure, error};

/// The numeric types that most operators of the domain take.
const NUMBERS: TypeSet = TypeSet::of(&[DType::F32, DType::F64, DType::I64, DType::I32]);

/// The types of class labels.
const LABELS: TypeSet = TypeSet::of(&[DType::String, DType::I64]);

/// Returns the type and the number of the class labels in one of two attributes. As in ONNX
/// Runtime, nonempty strings take precedence.
fn class_labels(attrs: &Attributes, ints: &str, strings: &str) -> Result<(DType, usize)> {
    match (attrs.find_strings(strings), attrs.find_ints(ints)) {
        (Some(labels), _) if !labels.is_empty() => Ok((DType::String, labels.len())),
        (_, Some(labels)) if !labels.is_empty() => Ok((DType::I64, labels.len())),
        _ => Err(error!(InvalidGraph, "there are no class labels; give '{ints}' or '{strings}'")),
    }
}

/// Returns the number of samples: the rows of `[N, F]`, or 1 for `[F]`.
fn rows(cx: &InferCx<'_>) -> Result<Option<Dim>> {
    let Some(shape) = cx.shape(0) else { return Ok(None) };
    match shape {
        [_] => Ok(Some(Dim::constant(1))),
        [rows, _] => Ok(Some(rows.clone())),
        _ => Err(error!(InvalidGraph, "features have rank 1 or 2, got rank {}", shape.len())),
    }
}

/// Infers a classifier's outputs: labels `[N]` and scores `[N, columns]`.
fn set_classes(cx: &mut InferCx<'_>, labels: DType, columns: usize) -> Result<()> {
    let rows = rows(cx)?;
    cx.set(0, labels, rows.clone().map(|rows| vec![rows]));
    cx.set(1, DType::F32, rows.map(|rows| vec![rows, Dim::constant(columns as i64)]));
    Ok(())
}

/// Infers an output of the input's shape.
fn same_shape(cx: &mut InferCx<'_>) -> Result<()> {
    match cx.shape(0) {
        Some(shape) => cx.set_shape(0, shape.to_vec()),
        None => Ok(()),
    }
}

/// Refuses a per-feature list whose length is neither 1 nor the number of features.
fn check_feature_list(cx: &InferCx<'_>, name: &str, given: usize) -> Result<()> {
    let Some(shape) = cx.shape(0) else { return Ok(()) };
    let features = shape.last().and_then(|size| size.as_constant());
    // One element serves all features.
    let fits = given == 1 || features.is_none_or(|features| usize::try_from(features) == Ok(given));
    ensure!(fits, InvalidGraph, "attribute '{name}' has {given} elements for inputs of shape {shape:?}");
    Ok(())
}
