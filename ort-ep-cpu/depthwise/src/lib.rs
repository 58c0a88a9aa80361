//! Depthwise convolution over slices: one filter for each channel.
//!
//! Like `ort-cpu-vector`, it knows nothing of tensors or threads, and its functions take the
//! instruction set to use. Its loops are written for each kernel size, stride and activation, which
//! makes them a crate of their own: they compile beside the other functions over slices.

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

pub mod channels;
pub mod gradients;
pub mod nhwc;
pub mod planes;
pub mod quantized;
pub mod simd;
