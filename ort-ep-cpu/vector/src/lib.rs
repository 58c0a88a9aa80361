//! Vectorized functions over slices, rows and planes of f32.
//!
//! They know nothing of tensors or threads. The kernels that wrap them check shapes, split the
//! work, and call one of these functions for each row, plane or channel. All take the
//! [`Isa`](crate::simd::Isa) to use, normally [`Isa::current`](crate::simd::Isa::current). They
//! panic if slices do not have the documented lengths, which is a bug of the caller and never of a
//! model.

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
    reason = "the functions say which lengths they take, and kernels hand over views that are as long as their shapes"
)]

pub mod activation;
pub mod conv_window;
pub mod convert;
pub mod dynamic_quantization;
pub mod elementwise;
pub mod norm;
pub mod norm_gradients;
mod places;
pub mod pool;
pub mod pool_indices;
pub mod random;
pub mod recurrent;
pub mod reduce;
pub mod simd;
pub mod softmax;
pub mod training;
pub mod transpose;
pub mod window;
pub mod winograd;
