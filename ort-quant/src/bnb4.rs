//! The 4-bit types of bitsandbytes, FP4 and NF4, in the layout of `MatMulBnb4`.
//!
//! Weights are one sequence in the order of memory, whatever their shape is. A block of it is
//! divided by its largest magnitude, and each quotient becomes the nearest of 16 values. The first
//! of two values is in the high bits of the byte. The thresholds are those of ONNX Runtime, which
//! are not exactly half-way between the values.

use ort_core::{Error, ErrorKind, Result};

use crate::parallel;
use crate::weight::Weight;

const LARGEST_BLOCK: usize = 256;

/// From each threshold to the next, the magnitude is the value of the same place in [`FP4_CODES`].
const FP4_THRESHOLDS: [f32; 7] =
    [0.00260417, 0.0859375, 0.20833333, 0.29166666, 0.4166667, 0.583333, 0.8333333];
const FP4_CODES: [u8; 8] = [0, 1, 6, 7, 4, 5, 2, 3];

/// The quotients after which the next value begins.
const NF4_THRESHOLDS: [f32; 15] = [
    -0.84809643,
    -0.6106329,
    -0.45999527,
    -0.33967942,
    -0.2346074,
    -0.13791174,
    -0.045525018,
    0.03979015,
    0.120255254,
    0.20352125,
    0.29201376,
    0.38931254,
    0.5016634,
    0.6427869,
    0.8614784,
];

/// A 4-bit type of bitsandbytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bnb4Type {
    /// A sign and seven magnitudes.
    Fp4,
    /// Quantiles of the normal distribution.
    Nf4,
}

/// Quantizes weights to FP4 or NF4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bnb4Quantizer {
    /// The elements of a block: 16, 32, 64, 128 or 256. The last block may have fewer.
    pub block_size: usize,
    /// The type.
    pub data_type: Bnb4Type,
}

/// The lengths of the slices that [`Bnb4Quantizer::quantize`] writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bnb4Sizes {
    /// The bytes of the quantized values.
    pub codes: usize,
    /// The number of blocks, each with its largest magnitude.
    pub absmax: usize,
}

impl Bnb4Quantizer {
    /// Returns the lengths of the results for this many weights. Fails for other block sizes.
    pub fn sizes(&self, weights: usize) -> Result<Bnb4Sizes> {
        let block_size = self.block_size;
        if !block_size.is_power_of_two() || !(16..=LARGEST_BLOCK).contains(&block_size) {
            let text = format!("block size {block_size}, expected 16, 32, 64, 128 or 256");
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        Ok(Bnb4Sizes { codes: weights.div_ceil(2), absmax: weights.div_ceil(block_size) })
    }

    /// Quantizes weights, on up to as many threads as the machine has cores. If their number is
    /// odd, the last four bits stand for 0.
    ///
    /// Infinities and NaN are not refused; what their blocks become is unspecified. Fails if a
    /// slice has another length than [`Bnb4Quantizer::sizes`] says.
    pub fn quantize<T: Weight>(&self, weights: &[T], codes: &mut [u8], absmax: &mut [T]) -> Result<()> {
        let sizes = self.sizes(weights.len())?;
        let found = Bnb4Sizes { codes: codes.len(), absmax: absmax.len() };
        if found != sizes {
            let text = format!(
                "codes: {} bytes, expected {}; absmax: {} elements, expected {}",
                found.codes, sizes.codes, found.absmax, sizes.absmax
            );
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        let threads = parallel::threads_for(weights.len());
        let blocks = sizes.absmax.div_ceil(threads).max(1);
        let per_job = blocks.saturating_mul(self.block_size);
        let results = codes.chunks_mut(per_job / 2).zip(absmax.chunks_mut(blocks));
        let jobs: Vec<_> = weights.chunks(per_job).zip(results).collect();
        parallel::for_each(jobs, |(weights, (codes, absmax))| {
            let codes = codes.chunks_mut(self.block_size / 2);
            for (weights, (codes, absmax)) in weights.chunks(self.block_size).zip(codes.zip(absmax)) {
                *absmax = self.quantize_block(weights, codes);
            }
        });
        Ok(())
    }

    /// Quantizes a block and returns its largest magnitude.
    fn quantize_block<T: Weight>(&self, weights: &[T], codes: &mut [u8]) -> T {
        let mut values = [0.0_f32; LARGEST_BLOCK];
        let mut nibbles = [0_u8; LARGEST_BLOCK];
        // What a short block lacks stays 0.
        let (Some(used), Some(nibbles)) =
            (values.get_mut(..weights.len()), nibbles.get_mut(..self.block_size))
        else {
            return T::narrow(0.0);
        };
        T::widen(weights, used);
        let absmax = largest_magnitude(used);
        let inverse = if absmax == 0.0 { 0.0 } else { 1.0 / absmax };
        for value in used {
            *value *= inverse;
        }
        match self.data_type {
            Bnb4Type::Fp4 => encode_fp4(&values, nibbles),
            Bnb4Type::Nf4 => encode_nf4(&values, nibbles),
        }
        for (byte, pair) in codes.iter_mut().zip(nibbles.chunks_exact(2)) {
            if let [first, second] = pair {
                *byte = first << 4 | second;
            }
        }
        T::narrow(absmax)
    }
}

fn largest_magnitude(values: &[f32]) -> f32 {
    // One maximum per vector lane: a single one would wait for itself.
    let mut lanes = [0.0_f32; 16];
    for group in values.chunks(lanes.len()) {
        for (most, value) in lanes.iter_mut().zip(group) {
            *most = if value.abs() > *most { value.abs() } else { *most };
        }
    }
    lanes.into_iter().fold(0.0, f32::max)
}

/// Encodes as many values as there is room for. `nibbles` are zeros.
fn encode_fp4(values: &[f32], nibbles: &mut [u8]) {
    for threshold in FP4_THRESHOLDS {
        for (nibble, value) in nibbles.iter_mut().zip(values) {
            *nibble += u8::from(value.abs() > threshold);
        }
    }
    for (nibble, value) in nibbles.iter_mut().zip(values) {
        let magnitude = FP4_CODES.get(usize::from(*nibble)).copied().unwrap_or_default();
        *nibble = magnitude | u8::from(*value < 0.0) << 3;
    }
}

/// Encodes as many values as there is room for. `nibbles` are zeros.
fn encode_nf4(values: &[f32], nibbles: &mut [u8]) {
    for threshold in NF4_THRESHOLDS {
        for (nibble, value) in nibbles.iter_mut().zip(values) {
            *nibble += u8::from(*value > threshold);
        }
    }
}
