//! The layout of `MatMulNBits`: the blocks of a column are next to each other.
//!
//! The matrix is read by rows and written by columns. A tile of [`TILE`] columns is quantized with
//! one column per vector lane, and transposed when a block is complete.

use crate::grid::{Bits, BlockQuantizer, QuantizedBlocks, extend_ranges, limit, round_half_away};
use crate::parallel;
use crate::weight::Weight;

/// The columns of a tile. Its rows are a few cache lines each, and a block of it stays in L1.
const TILE: usize = 64;

/// Quantizes a matrix that is not empty, into slices of the right lengths.
pub(crate) fn quantize<T: Weight>(quantizer: &BlockQuantizer, weights: &[T], out: QuantizedBlocks<'_, T>) {
    let stride = ColumnStride::new(quantizer);
    let threads = parallel::threads_for(weights.len());
    let width = quantizer.n.div_ceil(threads).next_multiple_of(TILE);
    let QuantizedBlocks { codes, scales, zero_points } = out;
    let mut zero_points = zero_points.chunks_mut(width.saturating_mul(stride.zero_points));
    let codes = codes.chunks_mut(width.saturating_mul(stride.codes));
    let scales = scales.chunks_mut(width.saturating_mul(stride.blocks));
    let mut jobs = Vec::with_capacity(threads);
    for (index, (codes, scales)) in codes.zip(scales).enumerate() {
        // Symmetric blocks may come without zero points.
        let zero_points = zero_points.next().unwrap_or_default();
        jobs.push(Columns { first: index * width, codes, scales, zero_points });
    }
    parallel::for_each(jobs, |columns| columns.quantize(quantizer, weights));
}

/// What the results of one column take.
#[derive(Clone, Copy)]
struct ColumnStride {
    blocks: usize,
    /// Bytes of values of one block.
    block: usize,
    /// Bytes of values.
    codes: usize,
    /// Bytes of zero points.
    zero_points: usize,
}

impl ColumnStride {
    fn new(quantizer: &BlockQuantizer) -> ColumnStride {
        let blocks = quantizer.k.div_ceil(quantizer.block_size);
        let block = quantizer.block_size * quantizer.bits.count() / 8;
        let zero_points = blocks.div_ceil(quantizer.bits.per_byte());
        ColumnStride { blocks, block, codes: blocks * block, zero_points }
    }
}

/// The results of adjacent columns.
struct Columns<'a, T> {
    first: usize,
    codes: &'a mut [u8],
    scales: &'a mut [T],
    zero_points: &'a mut [u8],
}

impl<T: Weight> Columns<'_, T> {
    fn quantize(self, quantizer: &BlockQuantizer, weights: &[T]) {
        let stride = ColumnStride::new(quantizer);
        let Columns { first, codes, scales, zero_points } = self;
        let codes = codes.chunks_mut(TILE.saturating_mul(stride.codes));
        let scales = scales.chunks_mut(TILE.saturating_mul(stride.blocks));
        let mut zero_points = zero_points.chunks_mut(TILE.saturating_mul(stride.zero_points));
        // The bytes of a block, each for all columns of the tile.
        let mut packed = vec![[0_u8; TILE]; stride.block];
        for (index, (codes, scales)) in codes.zip(scales).enumerate() {
            let zero_points = zero_points.next().unwrap_or_default();
            let tile = Columns { first: first + index * TILE, codes, scales, zero_points };
            tile.quantize_tile(quantizer, weights, &mut packed);
        }
    }

    /// Quantizes at most [`TILE`] columns.
    fn quantize_tile(self, quantizer: &BlockQuantizer, weights: &[T], packed: &mut [[u8; TILE]]) {
        let (stride, bits) = (ColumnStride::new(quantizer), quantizer.bits);
        let Columns { first, codes, scales, zero_points } = self;
        let columns = first..first + scales.len() / stride.blocks;
        if !quantizer.is_symmetric {
            // The kernels' default, for places after the last block.
            zero_points.fill(bits.middle_byte());
        }
        // The lanes after the last column stay zero.
        let mut wide = [0.0_f32; TILE];
        for block in 0..stride.blocks {
            let mut low = [f32::INFINITY; TILE];
            let mut high = [f32::NEG_INFINITY; TILE];
            for row in quantizer.rows(weights, block) {
                load(row.get(columns.clone()), &mut wide);
                extend_ranges(&wide, &mut low, &mut high);
            }

            let mut inverse = [0.0_f32; TILE];
            let mut zero = [0.0_f32; TILE];
            let ranges = low.iter().zip(&high);
            let lanes = scales.chunks_mut(stride.blocks).zip(inverse.iter_mut().zip(&mut zero));
            for (lane, ((low, high), (scales, (inverse, zero)))) in ranges.zip(lanes).enumerate() {
                let grid = quantizer.grid::<T>(*low, *high);
                if let Some(scale) = scales.get_mut(block) {
                    *scale = grid.scale;
                }
                (*inverse, *zero) = (grid.inverse, f32::from(grid.zero_point));
                if !quantizer.is_symmetric {
                    let column = zero_points.chunks_mut(stride.zero_points).nth(lane);
                    put(column.unwrap_or_default(), block, grid.zero_point, bits);
                }
            }

            packed.fill([0; TILE]);
            let largest = f32::from(bits.largest());
            for (index, row) in quantizer.rows(weights, block).enumerate() {
                load(row.get(columns.clone()), &mut wide);
                let Some(packed) = packed.get_mut(index / bits.per_byte()) else { break };
                let shift = index % bits.per_byte() * bits.count();
                let lanes = packed.iter_mut().zip(&wide).zip(inverse.iter().zip(&zero));
                for ((byte, value), (inverse, zero)) in lanes {
                    let code = round_half_away(limit(value * inverse + zero, 0.0, largest));
                    *byte |= (code << shift) as u8;
                }
            }

            for (lane, column) in codes.chunks_mut(stride.codes).enumerate() {
                let column = column.chunks_mut(stride.block).nth(block).unwrap_or_default();
                for (to, from) in column.iter_mut().zip(&*packed) {
                    *to = from.get(lane).copied().unwrap_or_default();
                }
            }
        }
    }
}

/// Converts the part of a row that is in the tile.
fn load<T: Weight>(row: Option<&[T]>, wide: &mut [f32; TILE]) {
    let row = row.unwrap_or_default();
    if let Some(wide) = wide.get_mut(..row.len()) {
        T::widen(row, wide);
    }
}

/// Replaces a value in a packed row.
fn put(row: &mut [u8], index: usize, code: u8, bits: Bits) {
    let shift = index % bits.per_byte() * bits.count();
    if let Some(byte) = row.get_mut(index / bits.per_byte()) {
        *byte = *byte & !(bits.largest() << shift) | code << shift;
    }
}
