//! Affine quantization of whole tensors: one scale for all elements, or one for each channel.
//!
//! Scales, zero points and codes are bit-identical to those of onnxruntime.quantization 1.31.1.

use half::f16;
use ort_core::{Error, ErrorKind, Result};

use crate::integer::{Grid, GridOptions};
use crate::pack::BitWriter;
use crate::weight::Weight;
use crate::{Bits, parallel};

/// Quantizes tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinearQuantizer {
    /// How ranges become grids. [`GridOptions::is_half`] is set by the element type.
    pub grid: GridOptions,
    /// The axis of the channels. `None` for one grid.
    pub axis: Option<usize>,
}

/// A quantized tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct LinearCodes {
    /// The bytes of the codes in row-major order. Codes of 4 bits are two to a byte, the first in
    /// the low bits.
    pub codes: Vec<u8>,
    /// The grid of each channel, or the only one.
    pub grids: Vec<Grid>,
}

/// A tensor as channels: `outer` times each channel has `inner` elements in a row.
struct Channels {
    count: usize,
    inner: usize,
}

impl LinearQuantizer {
    /// Quantizes a tensor in row-major order, on up to as many threads as the machine has cores.
    ///
    /// # Errors
    ///
    /// An element is NaN or infinite, the shape has another number of elements, or the axis is not
    /// one of the shape.
    pub fn quantize<T: Weight>(&self, weights: &[T], shape: &[usize]) -> Result<LinearCodes> {
        let channels = self.channels(weights.len(), shape)?;
        let options = GridOptions { is_half: T::IS_HALF, ..self.grid };
        let ranges = ranges(weights, &channels);
        let grids = ranges.into_iter().enumerate();
        let grids = grids.map(|(channel, (low, high))| {
            let within = |problem: Error| match self.axis {
                Some(_) => problem.within(format!("channel {channel}")),
                None => problem,
            };
            options.grid(f64::from(low), f64::from(high)).map_err(within)
        });
        let grids: Vec<Grid> = grids.collect::<Result<_>>()?;
        let codes = self.codes(weights, &channels, &grids);
        Ok(LinearCodes { codes, grids })
    }

    fn channels(&self, elements: usize, shape: &[usize]) -> Result<Channels> {
        let invalid = |text: String| Error::new(ErrorKind::InvalidArgument, text);
        let expected = shape.iter().try_fold(1_usize, |product, size| product.checked_mul(*size));
        if expected != Some(elements) {
            return Err(invalid(format!("{elements} elements do not have the shape {shape:?}")));
        }
        let Some(axis) = self.axis else { return Ok(Channels { count: 1, inner: elements.max(1) }) };
        let count = *shape
            .get(axis)
            .ok_or_else(|| invalid(format!("axis {axis} is not one of a tensor of shape {shape:?}")))?;
        let inner: usize = shape.iter().skip(axis + 1).product();
        Ok(Channels { count, inner: inner.max(1) })
    }

    fn codes<T: Weight>(&self, weights: &[T], channels: &Channels, grids: &[Grid]) -> Vec<u8> {
        let ty = self.grid.ty;
        let mut bytes = vec![0; ty.byte_count(weights.len())];
        if weights.is_empty() || grids.is_empty() {
            return bytes;
        }
        // An even number, so that no byte has codes of two jobs.
        let threads = parallel::threads_for(weights.len());
        let per_job = weights.len().div_ceil(threads).next_multiple_of(2);
        let jobs = weights.chunks(per_job).zip(bytes.chunks_mut(ty.byte_count(per_job)));
        let jobs: Vec<_> = jobs.enumerate().collect();
        let range = ty.codes();
        parallel::for_each(jobs, |(index, (weights, bytes))| {
            let start = index * per_job;
            let code = |(place, weight): (usize, &T)| {
                let channel = (start + place) / channels.inner % channels.count;
                grids.get(channel).map_or(0, |grid| grid.code(weight.wide(), range))
            };
            let codes = weights.iter().enumerate().map(code);
            match ty.bits() {
                4 => {
                    let nibbles: Vec<u8> = codes.map(|code| code as u8 & 0xf).collect();
                    let mut writer = BitWriter::new(bytes, Bits::Four);
                    writer.push(&nibbles);
                    writer.finish();
                }
                8 => bytes.iter_mut().zip(codes).for_each(|(byte, code)| *byte = code as u8),
                _ => {
                    for (pair, code) in bytes.chunks_exact_mut(2).zip(codes) {
                        pair.copy_from_slice(&(code as u16).to_le_bytes());
                    }
                }
            }
        });
        bytes
    }
}

impl LinearCodes {
    /// The scales as the little-endian elements of a tensor: float16 or float32.
    pub fn scale_bytes(&self, is_half: bool) -> Vec<u8> {
        let scales = self.grids.iter().map(|grid| grid.scale);
        match is_half {
            true => scales.flat_map(|scale| f16::from_f32(scale).to_le_bytes()).collect(),
            false => scales.flat_map(f32::to_le_bytes).collect(),
        }
    }

    /// The zero points as the little-endian elements of a tensor of the codes' type.
    pub fn zero_point_bytes(&self, options: &GridOptions) -> Vec<u8> {
        let points = self.grids.iter().map(|grid| grid.zero_point);
        match options.ty.bits() {
            4 => {
                let nibbles: Vec<u8> = points.map(|point| point as u8 & 0xf).collect();
                nibbles
                    .chunks(2)
                    .map(|pair| pair.iter().rev().fold(0, |byte, nibble| byte << 4 | nibble))
                    .collect()
            }
            8 => points.map(|point| point as u8).collect(),
            _ => points.flat_map(|point| (point as u16).to_le_bytes()).collect(),
        }
    }
}

/// The least and the greatest element of each channel. Those of a channel with NaN are NaN, and an
/// empty one has 0.
fn ranges<T: Weight>(weights: &[T], channels: &Channels) -> Vec<(f32, f32)> {
    let mut ranges = vec![(f32::INFINITY, f32::NEG_INFINITY); channels.count];
    if weights.is_empty() {
        return vec![(0.0, 0.0); channels.count];
    }
    for (index, row) in weights.chunks(channels.inner).enumerate() {
        let Some((low, high)) = ranges.get_mut(index % channels.count) else { continue };
        for weight in row {
            let value = weight.wide();
            // NaN fails both comparisons, and stays once it is there.
            let is_nan = value.is_nan();
            *low = if value < *low || is_nan { value } else { *low };
            *high = if value > *high || is_nan { value } else { *high };
        }
    }
    ranges
}
