//! Convolution of `f32` images with one to three spatial axes, as im2col and GEMM.
//!
//! Images are NCHW, as in ONNX: batch, channels, then the spatial axes. Weights are packed once,
//! per group, as the A operand. B is the virtual im2col matrix of the image, or the image itself
//! for a pointwise convolution. Nothing here allocates.

// A panic in a test merely fails the test; a panic in this code would be a defect.
#![warn(
    clippy::exit,
    clippy::indexing_slicing,
    clippy::mem_forget,
    clippy::string_slice,
    clippy::unchecked_time_subtraction,
    clippy::unreachable
)]
#![allow(
    clippy::indexing_slicing,
    reason = "the geometry is checked when a convolution is made, and the lengths of what it is given at each run"
)]

mod batched;
pub mod bytes;
#[cfg(test)]
mod bytes_tests;
mod forward;
mod geometry;
mod gradient;
mod input;
pub mod nhwc;
#[cfg(test)]
mod nhwc_tests;
pub mod separable;
#[cfg(test)]
mod tests;
mod transpose;
mod windows;
mod winograd;

pub use batched::{batched_workspace_len, forward_batched, is_batched};
pub use forward::{forward, pack_weights, packed_weights_len, workspace_len};
pub use geometry::{ConvAttributes, ConvGeometry};
pub use gradient::{
    image_gradient, image_gradient_workspace_len, weights_gradient, weights_gradient_workspace_len,
};
pub use input::{Input, WeightSide};
pub use transpose::{
    pack_transposed_weights, packed_transposed_weights_len, transposed, transposed_workspace_len,
};

pub use ort_cpu_vector::winograd::Tile;

use ort_cpu_gemm::by_columns;

/// Returns how many parts the rows of an output of `height` by `width` pixels are split into. An
/// image is not split if there is one for each thread, or if there are too few pixels.
pub fn parts_of_image(threads: usize, batch: usize, [height, width]: [usize; 2]) -> usize {
    let is_cut = threads > 1 && batch < threads && by_columns(threads, height * width);
    if is_cut { threads.min(height).max(1) } else { 1 }
}
