//! Quantization and pruning: float tensors as integers of 2 to 16 bits, in the layouts of ONNX.
//!
//! [`BlockQuantizer`] gives each block of a column a scale and a zero point, for `MatMulNBits` or
//! for `DequantizeLinear`. [`Bnb4Quantizer`] writes the types FP4 and NF4 of bitsandbytes, for
//! `MatMulBnb4`. [`LinearQuantizer`] gives a tensor, or each channel of it, one scale and zero
//! point. These functions work on slices; a [`Quantizer`] does it for the weights of a
//! whole model, and writes the model.
//!
//! [`Quantizer::gptq`] and [`Quantizer::awq`] tune weights in blocks with the Hessians that a
//! [`HessianCalibration`] accumulates.
//!
//! [`Quantizer::mixed_weights`] finds what each precision of each weight costs, and a [`Front`] the
//! best assignments of them.
//!
//! A [`Pruner`] makes a share of the weights zero, by magnitude, Wanda or SparseGPT. A
//! [`ChannelPruner`] removes whole channels.
//!
//! A [`Calibration`] runs a model on samples. An [`Observer`] collects statistics of each value,
//! and a [`RangeRule`] makes from them the range that the value's codes cover.
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

mod awq;
mod blocks;
mod bnb4;
mod calibrate;
mod calibration_file;
mod columns;
#[cfg(test)]
mod decoded;
mod elements;
mod feedback;
mod float8;
mod gptq;
mod grid;
mod hessian;
mod integer;
mod linear;
mod mask;
mod means;
mod mixed;
mod model;
mod noise;
mod observe;
mod pack;
mod pages;
mod parallel;
mod prune;
mod range;
mod rows;
mod smooth;
mod tile;
mod weight;

pub use bnb4::{Bnb4Quantizer, Bnb4Sizes, Bnb4Type};
pub use calibrate::{AxisCalibration, Calibration, ChannelCalibration, HessianCalibration};
pub use calibration_file::{read_ranges, write_ranges};
pub use feedback::GptqOptions;
pub use grid::{Bits, BlockLayout, BlockMethod, BlockQuantizer, BlockSizes, QuantizedBlocks};
pub use hessian::{Hessian, HessianInput, Hessians};
pub use integer::{CodeRange, Grid, GridOptions, QuantType};
pub use linear::{LinearCodes, LinearQuantizer};
pub use mask::TokenMask;
pub use means::{ChannelAxis, ChannelMeans, MeanCalibration, Means};
pub use mixed::{Cost, Front, WeightProbe};
pub use model::{
    BlockOptions, Blocks, ChannelPruner, DynamicOptions, Equalised, ErrorSearch, FileSize, GridNames, Grids,
    HalfOptions, HalfType, LastProduct, Layer, LayerUnit, MeasureWeight, MixedWeight, MixedWeights, Mode,
    NodePattern, Outcome, OutputErrors, Precision, PruneOutcome, PruneTuning, PrunedLayer, Pruner, Pruning,
    Quantization, Quantizer, RangeChoice, Scope, Smoothed, Smoothing, StaticBiases, StaticFormat,
    StaticOptions, StaticType, TunedWeights, Written, choose_ranges,
};
pub use noise::Noise;
pub use observe::{BINS, Channels, Counts, Extremes, Histogram, Moments, MovingAverage, Observer, Wanted};
pub use prune::{PruneCalibration, PruneInput, PruneMethod, PruneScope, PruneStatistics, Sparsity, Zeros};
pub use range::{RangeRule, ValueRange, entropy_range};
pub use smooth::Smooth;
pub use weight::Weight;
