//! Weight quantization: float matrices as values of 2, 4 and 8 bits, in the layouts of ONNX.
//!
//! [`BlockQuantizer`] gives each block of a column a scale and a zero point, for `MatMulNBits` or
//! for `DequantizeLinear`. [`Bnb4Quantizer`] writes the types FP4 and NF4 of bitsandbytes, for
//! `MatMulBnb4`. The functions work on slices; models are left to the caller.
//!
//! Scales, zero points and quantized values are bit-identical to those of ONNX Runtime 1.31.1, if
//! the weights are finite and no scale is so small that its reciprocal overflows. Its 2-bit values
//! for `DequantizeLinear` are an exception: it writes 4 bits instead.
//!
//! ```
//! use ort_quant::{Bits, BlockLayout, BlockQuantizer, QuantizedBlocks};
//!
//! let quantizer = BlockQuantizer {
//!     k: 32,
//!     n: 1,
//!     block_size: 16,
//!     bits: Bits::Four,
//!     is_symmetric: true,
//!     layout: BlockLayout::MatMulNBits,
//! };
//! let weights: Vec<f32> = (0..32u8).map(|row| f32::from(row) - 15.0).collect();
//! let sizes = quantizer.sizes()?;
//! let (mut codes, mut scales) = (vec![0; sizes.codes], vec![0.0; sizes.scales]);
//! let out = QuantizedBlocks { codes: &mut codes, scales: &mut scales, zero_points: &mut [] };
//! quantizer.quantize(&weights, out)?;
//! // The largest magnitudes of the two blocks are -15 and 16.
//! assert_eq!(scales, [1.875, -2.0]);
//! # Ok::<(), ort_core::Error>(())
//! ```

// Tests may panic: there a panic is an ordinary failure. In library code it would be a bug.
#![warn(
    clippy::exit,
    clippy::indexing_slicing,
    clippy::mem_forget,
    clippy::string_slice,
    clippy::unchecked_time_subtraction,
    clippy::unreachable
)]
#![forbid(unsafe_code)]

mod blocks;
mod bnb4;
mod columns;
mod grid;
mod pack;
mod parallel;
mod rows;
mod weight;

pub use bnb4::{Bnb4Quantizer, Bnb4Sizes, Bnb4Type};
pub use grid::{Bits, BlockLayout, BlockQuantizer, BlockSizes, QuantizedBlocks};
pub use weight::Weight;
