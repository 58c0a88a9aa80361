//! CPU kernels of neural networks: convolution, pooling, attention, recurrent layers and
//! quantization.
//!
//! Each file registers its own kernels with `cpu_kernels!`.

// A panic in a test merely fails the test; a panic in this code would be a defect.
#![warn(
    clippy::exit,
    clippy::indexing_slicing,
    clippy::mem_forget,
    clippy::string_slice,
    clippy::unchecked_time_subtraction,
    clippy::unreachable
)]

mod nn;
mod quant;
