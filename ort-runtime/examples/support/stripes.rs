//! A network for pictures of 8 by 8 pixels that is not trained yet, and synthetic pictures of ten
//! kinds of stripes.

#![allow(dead_code, reason = "each example uses some of it")]

use ort_runtime::ir::GraphBuilder;
use ort_runtime::{DType, Model, Result, Tensor, Value};

/// Kinds of stripes.
pub(crate) const CLASSES: usize = 10;
const PIXELS: usize = 64;

/// Two convolutions and two layers of products: `image` [batch, 1, 8, 8] to `logits` [batch, 10].
pub(crate) fn model() -> Result<Model> {
    Model::load(concat!(env!("CARGO_MANIFEST_DIR"), "/../ort-train/tests/data/digits.onnx"))
}

/// A network with `hidden` features and nothing else between picture and scores.
pub(crate) fn small_model(hidden: usize) -> Result<Model> {
    let mut builder = GraphBuilder::new("small");
    let image = builder.input("image", DType::F32, &["batch", "1", "8", "8"]);
    let first = builder.constant(weights(&[PIXELS, hidden])?);
    let second = builder.constant(weights(&[hidden, CLASSES])?);
    let pixels = builder.node("Flatten", &[image], &[])?;
    let features = builder.node("MatMul", &[pixels, first], &[])?;
    let features = builder.node("Relu", &[features], &[])?;
    let logits = builder.node("MatMul", &[features, second], &[])?;
    Ok(Model::from_graph(builder.finish(&[logits])?))
}

/// Numbers of both signs that follow from their places, small enough to begin a training with.
fn weights(shape: &[usize]) -> Result<Tensor> {
    let count: usize = shape.iter().product();
    let number = |index: usize| ((index * 37 + 11) % 101) as f32 / 101.0 - 0.5;
    Tensor::from_vec(shape, (0..count).map(|index| number(index) * 0.4).collect())
}

/// Pictures from `first` on, each with stripes as wide as its label says and some noise.
pub(crate) fn images(first: usize, count: usize) -> Result<Tensor> {
    let pixel = |place: usize| {
        let (picture, pixel) = (first + place / PIXELS, place % PIXELS);
        let stripe = (pixel / 8 + pixel % 8 + picture) % (picture % CLASSES + 2);
        let noise = ((picture * 31 + pixel * 17) % 23) as f32 / 115.0;
        if stripe == 0 { 0.8 + noise } else { noise }
    };
    Tensor::from_vec(&[count, 1, 8, 8], (0..count * PIXELS).map(pixel).collect())
}

pub(crate) fn labels(first: usize, count: usize) -> Result<Tensor> {
    Tensor::from_vec(&[count], (first..first + count).map(|picture| (picture % CLASSES) as i64).collect())
}

/// A batch as a training step takes it.
pub(crate) fn batch(first: usize, count: usize) -> Result<[(&'static str, Value); 2]> {
    Ok([("image", images(first, count)?.into()), ("labels", labels(first, count)?.into())])
}

/// The share of pictures whose own kind has the largest score.
pub(crate) fn accuracy(scores: &Tensor, first: usize) -> Result<f64> {
    let scores = scores.to_vec::<f32>()?;
    let best = scores.chunks_exact(CLASSES).map(|scores| {
        let best = scores.iter().enumerate().max_by(|one, other| one.1.total_cmp(other.1));
        best.map_or(0, |(class, _)| class)
    });
    let right = best.clone().zip(first..).filter(|(class, picture)| *class == picture % CLASSES).count();
    Ok(right as f64 / best.len().max(1) as f64)
}
