//! Dynamic quantization to 8 bits: scale and zero point from the range of the values.

#![allow(
    clippy::indexing_slicing,
    reason = "places are counted over shapes that inference checked and that views are as long as"
)]

use parking_lot::Mutex;

use ort_cpu_threads::parallel::{for_each_chunk, for_each_chunk_mut};
use ort_cpu_vector::simd::bytes::{ByteLanes, ByteOp, dispatch_bytes};
use ort_cpu_vector::simd::{Isa, Simd, SimdOp, dispatch, max_or_nan, min_or_nan};

/// Values in one task.
const CHUNK: usize = 1 << 14;

/// Returns the least and the greatest value in one pass; NaN if any value is NaN.
fn range(isa: Isa, threads: usize, values: &[f32]) -> (f32, f32) {
    let all = Mutex::new((f32::INFINITY, f32::NEG_INFINITY));
    for_each_chunk(threads, values.len(), CHUNK, |chunk| {
        // The extremes do not depend on the order of chunks, so a lock in any order keeps the bits.
        let (least, greatest) = dispatch(isa, Range(&values[chunk]));
        let mut all = all.lock();
        *all = (min_or_nan(all.0, least), max_or_nan(all.1, greatest));
    });
    all.into_inner()
}

struct Range<'a>(&'a [f32]);

impl SimdOp for Range<'_> {
    type Output = (f32, f32);

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> (f32, f32) {
        /// Vectors at a time, each with its own extremes.
        const AT_ONCE: usize = 4;
        let mut least = [simd.splat(f32::INFINITY); AT_ONCE];
        let mut greatest = [simd.splat(f32::NEG_INFINITY); AT_ONCE];
        let blocks = self.0.chunks_exact(AT_ONCE * S::LANES);
        let rest = blocks.remainder();
        for block in blocks {
            for index in 0..AT_ONCE {
                let values = simd.load(block, index * S::LANES);
                least[index] = simd.min(least[index], values);
                greatest[index] = simd.max(greatest[index], values);
            }
        }
        for index in 1..AT_ONCE {
            least[0] = simd.min(least[0], least[index]);
            greatest[0] = simd.max(greatest[0], greatest[index]);
        }
        let first = (simd.horizontal_min(least[0]), simd.horizontal_max(greatest[0]));
        rest.iter()
            .fold(first, |(least, greatest), value| (min_or_nan(least, *value), max_or_nan(greatest, *value)))
    }
}

/// An affine map from numbers to quantized values.
#[derive(Clone, Copy, Debug)]
pub struct AffineMap {
    /// The difference between the numbers of neighbouring quantized values.
    pub scale: f32,
    /// The quantized value of zero.
    pub zero: f32,
    /// The least and the greatest quantized value.
    pub range: [f32; 2],
}

/// Computes `round(from / scale) + zero` as bytes, clamped to the range. NaN becomes 0.
pub fn quantize(isa: Isa, threads: usize, from: &[f32], map: AffineMap, to: &mut [u8]) {
    for_each_chunk_mut(threads, to, CHUNK, |chunk, to| {
        let from = &from[chunk * CHUNK..][..to.len()];
        dispatch_bytes(isa, Encode { from, map, to });
    });
}

struct Encode<'a> {
    from: &'a [f32],
    map: AffineMap,
    to: &'a mut [u8],
}

impl ByteOp for Encode<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: ByteLanes>(self, lanes: L) {
        let (simd, step) = (lanes.base(), L::Base::LANES);
        let AffineMap { scale, zero, range } = self.map;
        let (scale, zero) = (simd.splat(scale), simd.splat(zero));
        let (least, greatest) = (simd.splat(range[0]), simd.splat(range[1]));
        let mut at = 0;
        while at < self.to.len() {
            let count = (self.to.len() - at).min(step);
            let values = match count == step {
                true => simd.load(self.from, at),
                false => simd.load_partial(self.from, at, count, 0.0),
            };
            // A division, as the standard defines it: a reciprocal would round some values to a
            // neighbour.
            let quantized = simd.add(simd.round_even(simd.div(values, scale)), zero);
            let quantized = simd.select(simd.is_nan(quantized), simd.splat(0.0), quantized);
            let quantized = simd.min_or_second(simd.max_or_second(quantized, least), greatest);
            lanes.store_low_bytes(self.to, at, count, simd.to_i32(quantized));
            at += count;
        }
    }
}

/// The scale and zero point of 8-bit quantized values.
#[derive(Debug, Clone, Copy)]
pub struct ByteQuantizer {
    /// The difference between neighbouring values.
    pub scale: f32,
    /// A whole number from 0 to 255.
    pub zero: f32,
}

impl ByteQuantizer {
    /// Covers the range of `values`, which always includes zero, so that zero is exact.
    pub fn covering(isa: Isa, threads: usize, values: &[f32]) -> ByteQuantizer {
        let (least, greatest) = range(isa, threads, values);
        // `f32::min` and `max` drop NaN, so a NaN among the values leaves the range at zero.
        let (least, greatest) = (least.min(0.0), greatest.max(0.0));
        let scale = (greatest - least) / 255.0;
        // All values are zero.
        let quotient = if scale == 0.0 { 0.0 } else { -least / scale };
        ByteQuantizer { scale, zero: quotient.clamp(0.0, 255.0).round_ties_even() }
    }

    /// Quantizes `from`, as many values as `to` takes.
    pub fn encode(self, isa: Isa, threads: usize, from: &[f32], to: &mut [u8]) {
        // All values are zero then, and 0 / 0 would be NaN.
        let divisor = if self.scale == 0.0 { 1.0 } else { self.scale };
        let map = AffineMap { scale: divisor, zero: self.zero, range: [0.0, 255.0] };
        quantize(isa, threads, from, map, to);
    }
}
