//! The model of handwritten digits that ships with the repository, and synthetic pictures for it.

#![allow(dead_code, reason = "each example uses some of it")]

use ort_runtime::{Model, Result, Tensor};

/// A batch of one picture.
pub(crate) const SHAPE: [usize; 4] = [1, 1, 8, 8];

pub(crate) fn model() -> Result<Model> {
    Model::load(concat!(env!("CARGO_MANIFEST_DIR"), "/../ort-cli/demo/digits.onnx"))
}

/// Paints ink from 0 to 16, each `seed` another picture.
pub(crate) fn draw(seed: usize, pixels: &mut [f32]) {
    for (index, pixel) in pixels.iter_mut().enumerate() {
        *pixel = ((index * 7 + seed * 13) % 17) as f32;
    }
}

pub(crate) fn picture(seed: usize) -> Result<Tensor> {
    let mut pixels = vec![0.0; SHAPE.iter().product()];
    draw(seed, &mut pixels);
    Tensor::from_vec(&SHAPE, pixels)
}
