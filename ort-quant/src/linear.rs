//! Affine quantization of whole tensors: one scale for all elements, or one for each channel.
//!
//! Scales, zero points and codes are bit-identical to those of onnxruntime.quantization 1.31.1.

use std::ops::Range;

use half::f16;
use ort_core::{Error, ErrorKind, Result};

use crate::elements::Elements;
use crate::grid::extend_ranges;
use crate::integer::{CodeRange, Grid, GridOptions, QuantType, code_of};
use crate::noise::Noise;
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
    /// What quantization changed.
    pub noise: Noise,
}

/// A tensor as channels: each channel has `inner` elements in a row, then comes the next one.
#[derive(Clone, Copy)]
struct Channels {
    count: usize,
    inner: usize,
}

/// The elements that are widened and encoded at a time.
const CHUNK: usize = 1024;

impl LinearQuantizer {
    /// Quantizes a tensor in row-major order, on up to as many threads as the machine has cores.
    ///
    /// # Errors
    ///
    /// An element is NaN or infinite, the shape has another number of elements, or the axis is not
    /// one of the shape.
    pub fn quantize<T: Weight>(&self, weights: &[T], shape: &[usize]) -> Result<LinearCodes> {
        self.quantize_elements(weights, shape)
    }

    /// [`Self::quantize`] for elements wherever they are.
    pub(crate) fn quantize_elements<E: Elements + ?Sized>(
        &self,
        elements: &E,
        shape: &[usize],
    ) -> Result<LinearCodes> {
        self.quantize_at_least(elements, shape, &[])
    }

    /// [`Self::quantize_elements`] with scales that are no smaller than these: one for each
    /// channel, of which a single grid takes the largest.
    pub(crate) fn quantize_at_least<E: Elements + ?Sized>(
        &self,
        elements: &E,
        shape: &[usize],
        least: &[f32],
    ) -> Result<LinearCodes> {
        let channels = self.channels(elements.count(), shape)?;
        let options = GridOptions { is_half: E::Element::IS_HALF, ..self.grid };
        let grids = ranges(elements, channels).into_iter().enumerate();
        let grids = grids.map(|(channel, (low, high))| {
            let within = |problem: Error| match self.axis {
                Some(_) => problem.within(format!("channel {channel}")),
                None => problem,
            };
            options.grid(f64::from(low), f64::from(high)).map_err(within)
        });
        let mut grids: Vec<Grid> = grids.collect::<Result<_>>()?;
        match &mut grids[..] {
            [only] => only.scale = least.iter().copied().fold(only.scale, f32::max),
            grids => {
                let pairs = grids.iter_mut().zip(least);
                pairs.for_each(|(grid, least)| grid.scale = grid.scale.max(*least));
            }
        }
        let (codes, noise) = encode(self.grid.ty, elements, channels, &grids);
        Ok(LinearCodes { codes, grids, noise })
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
}

/// Encodes a tensor on up to as many threads as the machine has cores.
fn encode<E: Elements + ?Sized>(
    ty: QuantType,
    elements: &E,
    channels: Channels,
    grids: &[Grid],
) -> (Vec<u8>, Noise) {
    let count = elements.count();
    let mut bytes = vec![0; ty.byte_count(count)];
    if count == 0 || grids.is_empty() {
        return (bytes, Noise::default());
    }
    // An even number, so that no byte has codes of two jobs.
    let threads = parallel::threads_for(count);
    let per_job = count.div_ceil(threads).next_multiple_of(2);
    let mut noises = vec![Noise::default(); threads];
    let parts = bytes.chunks_mut(ty.byte_count(per_job));
    let jobs: Vec<_> = parts.zip(&mut noises).enumerate().collect();
    let scales: Vec<f32> = grids.iter().map(|grid| grid.scale).collect();
    let points: Vec<f32> = grids.iter().map(|grid| grid.zero_point as f32).collect();
    parallel::for_each(jobs, |(index, (bytes, noise))| {
        let part = Part { ty, channels, scales: &scales, points: &points };
        let start = index * per_job;
        *noise = part.encode(elements, start..count.min(start + per_job), bytes);
    });
    let noise = noises.into_iter().fold(Noise::default(), Noise::plus);
    (bytes, noise)
}

/// What the encoding of a part of a tensor reads.
struct Part<'a> {
    ty: QuantType,
    channels: Channels,
    scales: &'a [f32],
    points: &'a [f32],
}

impl Part<'_> {
    /// Encodes these elements.
    fn encode<E: Elements + ?Sized>(&self, elements: &E, range: Range<usize>, bytes: &mut [u8]) -> Noise {
        let Channels { count, inner } = self.channels;
        let mut writer = CodeWriter::new(self.ty, bytes);
        let mut noise = Noise::default();
        let (mut wide, mut became, mut codes) = ([0.0_f32; CHUNK], [0.0_f32; CHUNK], [0_i32; CHUNK]);
        let mut place = range.start;
        while place < range.end {
            let channel = place / inner % count;
            // Up to the end of the channel, or over neighbouring channels of one element each.
            let ahead = if inner == 1 { count - channel } else { inner - place % inner };
            let now = ahead.min(range.end - place).min(CHUNK);
            let Some(wide) = wide.get_mut(..now) else { break };
            let (Some(became), Some(codes)) = (became.get_mut(..now), codes.get_mut(..now)) else { break };
            elements.widen(place, wide);
            let to = (&mut *codes, &mut *became);
            if inner == 1 {
                let grids = (self.scales.get(channel..), self.points.get(channel..));
                let (Some(scales), Some(points)) = grids else { break };
                encode_each(wide, scales.iter().zip(points), self.ty.codes(), to);
            } else if let (Some(scale), Some(point)) = (self.scales.get(channel), self.points.get(channel)) {
                encode_each(wide, std::iter::repeat((scale, point)), self.ty.codes(), to);
            }
            noise.add_all(wide, became);
            writer.push(codes);
            place += now;
        }
        writer.finish();
        noise
    }
}

/// Encodes values, each with its scale and zero point, and decodes them.
#[inline]
fn encode_each<'g>(
    values: &[f32],
    grids: impl Iterator<Item = (&'g f32, &'g f32)>,
    range: CodeRange,
    (codes, became): (&mut [i32], &mut [f32]),
) {
    let to = codes.iter_mut().zip(became);
    for ((value, (scale, point)), (code, became)) in values.iter().zip(grids).zip(to) {
        *code = code_of(*value, *scale, *point, range);
        *became = (*code as f32 - *point) * *scale;
    }
}

/// Writes codes as the bytes of a tensor.
enum CodeWriter<'a> {
    Nibbles(BitWriter<'a>),
    Bytes(std::slice::IterMut<'a, u8>),
    Pairs(std::slice::ChunksExactMut<'a, u8>),
}

impl<'a> CodeWriter<'a> {
    fn new(ty: QuantType, bytes: &'a mut [u8]) -> CodeWriter<'a> {
        match ty.bits() {
            4 => CodeWriter::Nibbles(BitWriter::new(bytes, Bits::Four)),
            8 => CodeWriter::Bytes(bytes.iter_mut()),
            _ => CodeWriter::Pairs(bytes.chunks_exact_mut(2)),
        }
    }

    fn push(&mut self, codes: &[i32]) {
        // The codes come first in the zips, so that their end takes no byte from the iterator.
        match self {
            CodeWriter::Nibbles(writer) => {
                let mut nibbles = [0; CHUNK];
                for (nibble, code) in nibbles.iter_mut().zip(codes) {
                    *nibble = *code as u8 & 0xf;
                }
                writer.push(nibbles.get(..codes.len()).unwrap_or_default());
            }
            CodeWriter::Bytes(bytes) => codes.iter().zip(bytes).for_each(|(code, byte)| *byte = *code as u8),
            CodeWriter::Pairs(pairs) => {
                for (code, pair) in codes.iter().zip(pairs) {
                    pair.copy_from_slice(&(*code as u16).to_le_bytes());
                }
            }
        }
    }

    fn finish(self) {
        if let CodeWriter::Nibbles(writer) = self {
            writer.finish();
        }
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
        let points: Vec<i32> = self.grids.iter().map(|grid| grid.zero_point).collect();
        let mut bytes = vec![0; options.ty.byte_count(points.len())];
        let mut writer = CodeWriter::new(options.ty, &mut bytes);
        points.chunks(CHUNK).for_each(|points| writer.push(points));
        writer.finish();
        bytes
    }
}

/// The least and the greatest element of each channel. Those of a channel with NaN are NaN, and an
/// empty one has 0.
fn ranges<E: Elements + ?Sized>(elements: &E, channels: Channels) -> Vec<(f32, f32)> {
    let all = elements.count();
    if all == 0 {
        return vec![(0.0, 0.0); channels.count];
    }
    let threads = parallel::threads_for(all);
    let per_job = all.div_ceil(threads);
    let mut parts = vec![Ranges::none(channels.count); threads];
    let jobs: Vec<_> = parts.iter_mut().enumerate().collect();
    parallel::for_each(jobs, |(index, part)| {
        let start = index * per_job;
        part.extend(elements, channels, start..all.min(start + per_job));
    });
    let mut ranges = Ranges::none(channels.count);
    parts.iter().for_each(|part| ranges.merge(part));
    ranges.low.into_iter().zip(ranges.high).collect()
}

/// The ranges of channels, as far as they were read.
#[derive(Clone)]
struct Ranges {
    low: Vec<f32>,
    high: Vec<f32>,
}

impl Ranges {
    fn none(channels: usize) -> Ranges {
        Ranges { low: vec![f32::INFINITY; channels], high: vec![f32::NEG_INFINITY; channels] }
    }

    /// Extends the ranges by these elements.
    fn extend<E: Elements + ?Sized>(
        &mut self,
        elements: &E,
        Channels { count, inner }: Channels,
        range: Range<usize>,
    ) {
        let mut wide = [0.0_f32; CHUNK];
        let mut place = range.start;
        while place < range.end {
            let channel = place / inner % count;
            let ahead = if inner == 1 { count - channel } else { inner - place % inner };
            let Some(wide) = wide.get_mut(..ahead.min(range.end - place).min(CHUNK)) else { break };
            elements.widen(place, wide);
            place += wide.len();
            let own = (self.low.get_mut(channel..), self.high.get_mut(channel..));
            let (Some(low), Some(high)) = own else { break };
            if inner == 1 {
                extend_ranges(wide, low, high);
                if has_nan(wide) {
                    let ends = low.iter_mut().zip(high).zip(&*wide);
                    ends.filter(|(_, value)| value.is_nan())
                        .for_each(|((low, high), value)| (*low, *high) = (*value, *value));
                }
            } else if let (Some(low), Some(high)) = (low.first_mut(), high.first_mut()) {
                (*low, *high) = extended((*low, *high), wide);
            }
        }
    }

    /// Extends the ranges by those of a later part.
    fn merge(&mut self, part: &Ranges) {
        let lows = self.low.iter_mut().zip(&part.low);
        lows.for_each(|(low, own)| *low = if *own < *low || own.is_nan() { *own } else { *low });
        let highs = self.high.iter_mut().zip(&part.high);
        highs.for_each(|(high, own)| *high = if *own > *high || own.is_nan() { *own } else { *high });
    }
}

#[inline]
fn has_nan(values: &[f32]) -> bool {
    values.iter().fold(false, |found, value| found | value.is_nan())
}

/// A range with more values, in ranges that do not wait for each other. NaN fails all comparisons,
/// and stays once it is there.
fn extended((low, high): (f32, f32), values: &[f32]) -> (f32, f32) {
    if has_nan(values) || low.is_nan() {
        return (f32::NAN, f32::NAN);
    }
    let (mut lows, mut highs) = ([low; 16], [high; 16]);
    values.chunks(16).for_each(|values| extend_ranges(values, &mut lows, &mut highs));
    let least = lows.into_iter().fold(low, |least, low| if low < least { low } else { least });
    let greatest =
        highs.into_iter().fold(high, |greatest, high| if high > greatest { high } else { greatest });
    (least, greatest)
}
