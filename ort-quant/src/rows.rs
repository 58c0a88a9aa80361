//! The layout of `DequantizeLinear`: values, scales and zero points in row-major order.
//!
//! A value is rounded before the zero point is added, as in ONNX Runtime. [`columns`] rounds
//! afterwards, so ties of negative values differ by one.
//!
//! [`columns`]: crate::columns

use crate::grid::{BlockQuantizer, QuantizedBlocks, extend_ranges, limit, round_half_away};
use crate::pack::BitWriter;
use crate::parallel;
use crate::weight::Weight;

/// No value of up to 8 bits is this far from its zero point.
const FAR: f32 = 512.0;

/// Quantizes a matrix that is not empty, into slices of the right lengths.
pub(crate) fn quantize<T: Weight>(quantizer: &BlockQuantizer, weights: &[T], out: QuantizedBlocks<'_, T>) {
    // With a block no larger than the matrix, the products below are small.
    let block_size = quantizer.block_size.min(quantizer.k);
    let quantizer = BlockQuantizer { block_size, ..*quantizer };
    let (n, per_byte) = (quantizer.n, quantizer.bits.per_byte());
    let threads = parallel::threads_for(weights.len());
    // A byte may hold values of two blocks. After this many it is full, whatever `n` is.
    let blocks = quantizer.k.div_ceil(block_size).div_ceil(threads).next_multiple_of(per_byte);
    let per_job = blocks.saturating_mul(n);
    let QuantizedBlocks { codes, scales, zero_points } = out;
    let mut zero_points = zero_points.chunks_mut(per_job / per_byte);
    let codes = codes.chunks_mut(per_job.saturating_mul(block_size) / per_byte);
    let mut jobs = Vec::with_capacity(threads);
    for (index, (codes, scales)) in codes.zip(scales.chunks_mut(per_job)).enumerate() {
        // Symmetric blocks may come without zero points.
        let zero_points = zero_points.next().unwrap_or_default();
        jobs.push(RowBlocks { first: index * blocks, codes, scales, zero_points });
    }
    parallel::for_each(jobs, |blocks| blocks.quantize(&quantizer, weights));
}

/// The results of adjacent blocks, over all columns.
struct RowBlocks<'a, T> {
    first: usize,
    codes: &'a mut [u8],
    scales: &'a mut [T],
    zero_points: &'a mut [u8],
}

impl<T: Weight> RowBlocks<'_, T> {
    fn quantize(self, quantizer: &BlockQuantizer, weights: &[T]) {
        let BlockQuantizer { n, bits, is_symmetric, .. } = *quantizer;
        let RowBlocks { first, codes, scales, zero_points } = self;
        let mut codes = BitWriter::new(codes, bits);
        let mut zero_points = BitWriter::new(zero_points, bits);
        // Signed values differ from unsigned ones in the highest bit.
        let sign = if is_symmetric { bits.middle() } else { 0 };
        let (mut wide, mut inverse) = (vec![0.0_f32; n], vec![0.0_f32; n]);
        let (mut low, mut high) = (vec![0.0_f32; n], vec![0.0_f32; n]);
        let (mut zero, mut line) = (vec![0_u8; n], vec![0_u8; n]);
        for (index, scales) in scales.chunks_mut(n).enumerate() {
            let block = first + index;
            low.fill(f32::INFINITY);
            high.fill(f32::NEG_INFINITY);
            for row in quantizer.rows(weights, block) {
                T::widen(row, &mut wide);
                extend_ranges(&wide, &mut low, &mut high);
            }

            let ranges = low.iter().zip(&high);
            let columns = scales.iter_mut().zip(inverse.iter_mut().zip(&mut zero));
            for ((low, high), (scale, (inverse, zero))) in ranges.zip(columns) {
                let grid = quantizer.grid::<T>(*low, *high);
                (*scale, *inverse, *zero) = (grid.scale, grid.inverse, grid.zero_point);
            }
            if !is_symmetric {
                zero_points.push(&zero);
            }

            for row in quantizer.rows(weights, block) {
                T::widen(row, &mut wide);
                let columns = wide.iter().zip(inverse.iter().zip(&zero));
                for (code, (value, (inverse, zero))) in line.iter_mut().zip(columns) {
                    let steps = round_half_away(limit(value * inverse, -FAR, FAR));
                    let unsigned = (steps + i32::from(*zero)).clamp(0, i32::from(bits.largest()));
                    *code = unsigned as u8 ^ sign;
                }
                codes.push(&line);
            }
        }
        codes.finish();
        zero_points.finish();
    }
}
