//! The layout of `MatMulNBits`: the blocks of a column are next to each other.
//!
//! The matrix is read by rows and written by columns. A tile of [`TILE`] columns is quantized with
//! one column per vector lane, and transposed when a block is complete.

use std::ops::Range;

use crate::elements::Elements;
use crate::grid::{
    Bits, BlockMethod, BlockQuantizer, QuantizedBlocks, extend_ranges, limit, round_half_away,
};
use crate::parallel;
use crate::weight::Weight;

/// The columns of a tile. Its rows are a few cache lines each, and a block of it stays in L1.
const TILE: usize = 64;

/// Quantizes a matrix that is not empty, into slices of the right lengths.
pub(crate) fn quantize<E: Elements + ?Sized>(
    quantizer: &BlockQuantizer,
    method: BlockMethod,
    weights: &E,
    out: QuantizedBlocks<'_, E::Element>,
) {
    let stride = ColumnStride::new(quantizer);
    let threads = parallel::threads_for(weights.count());
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
    parallel::for_each(jobs, |columns| columns.quantize(quantizer, method, weights));
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
    fn quantize<E>(self, quantizer: &BlockQuantizer, method: BlockMethod, weights: &E)
    where
        E: Elements<Element = T> + ?Sized,
    {
        let stride = ColumnStride::new(quantizer);
        let Columns { first, codes, scales, zero_points } = self;
        let codes = codes.chunks_mut(TILE.saturating_mul(stride.codes));
        let scales = scales.chunks_mut(TILE.saturating_mul(stride.blocks));
        let mut zero_points = zero_points.chunks_mut(TILE.saturating_mul(stride.zero_points));
        // The bytes of a block, each for all columns of the tile.
        let mut packed = vec![[0_u8; TILE]; stride.block];
        // The values of a block, for the search.
        let rows = if method == BlockMethod::SquaredError { quantizer.block_size } else { 0 };
        let mut values = vec![[0.0_f32; TILE]; rows];
        for (index, (codes, scales)) in codes.zip(scales).enumerate() {
            let zero_points = zero_points.next().unwrap_or_default();
            let tile = Columns { first: first + index * TILE, codes, scales, zero_points };
            tile.quantize_tile(quantizer, weights, (&mut packed, &mut values));
        }
    }

    /// Quantizes at most [`TILE`] columns. With room for the values of a block, the ranges are
    /// searched.
    fn quantize_tile<E: Elements<Element = T> + ?Sized>(
        self,
        quantizer: &BlockQuantizer,
        weights: &E,
        (packed, values): (&mut [[u8; TILE]], &mut [[f32; TILE]]),
    ) {
        let (stride, bits) = (ColumnStride::new(quantizer), quantizer.bits);
        let Columns { first, codes, scales, zero_points } = self;
        let width = scales.len() / stride.blocks;
        let of_row = |row: usize| row * quantizer.n + first..row * quantizer.n + first + width;
        if !quantizer.is_symmetric {
            // The kernels' default, for places after the last block.
            zero_points.fill(bits.middle_byte());
        }
        // The lanes after the last column stay zero.
        let mut wide = [0.0_f32; TILE];
        for block in 0..stride.blocks {
            let mut low = [f32::INFINITY; TILE];
            let mut high = [f32::NEG_INFINITY; TILE];
            let rows = block * quantizer.block_size..quantizer.k.min((block + 1) * quantizer.block_size);
            for row in rows.clone() {
                load(weights, of_row(row), &mut wide);
                extend_ranges(&wide, &mut low, &mut high);
            }
            let mut used = 0;
            for (row, values) in rows.clone().zip(values.iter_mut()) {
                load(weights, of_row(row), values);
                used += 1;
            }
            if let Some(values) = values.get(..used).filter(|values| !values.is_empty()) {
                search_ranges::<T>(quantizer, values, (&mut low, &mut high));
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
            for (index, row) in rows.enumerate() {
                load(weights, of_row(row), &mut wide);
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

/// Replaces ranges by those of the least squared error, among parts and multiples of them.
fn search_ranges<T: Weight>(
    quantizer: &BlockQuantizer,
    values: &[[f32; TILE]],
    (low, high): (&mut [f32; TILE], &mut [f32; TILE]),
) {
    // From 0.6 to 1.1; the first is the range itself, which wins ties.
    let shares = [1.0].into_iter().chain((30_u8..=55).map(|step| f32::from(step) * 0.02));
    let (all_low, all_high) = (*low, *high);
    let mut least = [f32::INFINITY; TILE];
    let largest = f32::from(quantizer.bits.largest());
    for share in shares {
        let (mut scale, mut inverse, mut zero) = ([0.0_f32; TILE], [0.0_f32; TILE], [0.0_f32; TILE]);
        let grids = scale.iter_mut().zip(inverse.iter_mut().zip(&mut zero));
        for ((low, high), (scale, (inverse, zero))) in all_low.iter().zip(&all_high).zip(grids) {
            let grid = quantizer.grid::<T>(low * share, high * share);
            (*scale, *inverse, *zero) = (grid.scale.wide(), grid.inverse, f32::from(grid.zero_point));
        }
        let mut errors = [0.0_f32; TILE];
        for row in values {
            let grids = scale.iter().zip(inverse.iter().zip(&zero));
            for ((error, value), (scale, (inverse, zero))) in errors.iter_mut().zip(row).zip(grids) {
                let code = round_half_away(limit(value * inverse + zero, 0.0, largest));
                let difference = (code as f32 - zero) * scale - value;
                *error += difference * difference;
            }
        }
        let ends = low.iter_mut().zip(high.iter_mut()).zip(all_low.iter().zip(&all_high));
        for (((low, high), (all_low, all_high)), (least, error)) in ends.zip(least.iter_mut().zip(errors)) {
            if error < *least {
                (*least, *low, *high) = (error, all_low * share, all_high * share);
            }
        }
    }
}

/// Converts the part of a row that is in the tile.
fn load<E: Elements + ?Sized>(weights: &E, part: Range<usize>, wide: &mut [f32; TILE]) {
    if let Some(wide) = wide.get_mut(..part.len()) {
        weights.widen(part.start, wide);
    }
}

/// Replaces a value in a packed row.
fn put(row: &mut [u8], index: usize, code: u8, bits: Bits) {
    let shift = index % bits.per_byte() * bits.count();
    if let Some(byte) = row.get_mut(index / bits.per_byte()) {
        *byte = *byte & !(bits.largest() << shift) | code << shift;
    }
}

#[cfg(test)]
mod tests {
    use ort_core::Result;

    use super::*;
    use crate::grid::BlockLayout;

    /// The squared error of each column's blocks together.
    fn errors(quantizer: &BlockQuantizer, method: BlockMethod, weights: &[f32]) -> Result<Vec<f64>> {
        let sizes = quantizer.sizes()?;
        let (mut codes, mut zero_points) = (vec![0; sizes.codes], vec![0; sizes.zero_points]);
        let mut scales = vec![0.0_f32; sizes.scales];
        let out = QuantizedBlocks { codes: &mut codes, scales: &mut scales, zero_points: &mut zero_points };
        quantizer.quantize_by(method, weights, out)?;
        let stride = ColumnStride::new(quantizer);
        let bits = quantizer.bits;
        let code = |bytes: &[u8], place: usize| {
            let shift = place % bits.per_byte() * bits.count();
            f64::from(bytes[place / bits.per_byte()] >> shift & bits.largest())
        };
        let error = |column: usize| {
            let row_error = |row: usize| {
                let block = row / quantizer.block_size;
                let zero = match zero_points.is_empty() {
                    true => f64::from(bits.middle()),
                    false => code(&zero_points[column * stride.zero_points..], block),
                };
                let scale = f64::from(scales[column * stride.blocks + block]);
                let value = (code(&codes[column * stride.codes..], row) - zero) * scale;
                (value - f64::from(weights[row * quantizer.n + column])).powi(2)
            };
            (0..quantizer.k).map(row_error).sum::<f64>()
        };
        Ok((0..quantizer.n).map(error).collect())
    }

    #[test]
    fn a_search_never_raises_the_error_and_usually_lowers_it() -> Result<()> {
        let (k, n) = (100, 70);
        // Cubes have few large values, as trained weights do.
        let unit = |step: usize| (step * 7919 % 10007) as f32 / 10007.0 - 0.5;
        let weights: Vec<f32> = (0..k * n).map(|step| unit(step).powi(3)).collect();
        for bits in [Bits::Two, Bits::Four, Bits::Eight] {
            for is_symmetric in [false, true] {
                let layout = BlockLayout::MatMulNBits;
                let quantizer = BlockQuantizer { k, n, block_size: 32, bits, is_symmetric, layout };
                let plain = errors(&quantizer, BlockMethod::MinMax, &weights)?;
                let searched = errors(&quantizer, BlockMethod::SquaredError, &weights)?;
                for (plain, searched) in plain.iter().zip(&searched) {
                    assert!(*searched <= plain * 1.0001, "{bits:?} {is_symmetric}: {searched} {plain}");
                }
                let (plain, searched): (f64, f64) = (plain.iter().sum(), searched.iter().sum());
                let most = if bits == Bits::Eight { 1.0 } else { 0.99 };
                assert!(searched <= most * plain, "{bits:?} {is_symmetric}: {searched} {plain}");
            }
        }
        Ok(())
    }

    #[test]
    fn blocks_of_zeros_stay_zeros() -> Result<()> {
        let layout = BlockLayout::MatMulNBits;
        let bits = Bits::Four;
        let quantizer = BlockQuantizer { k: 40, n: 3, block_size: 32, bits, is_symmetric: false, layout };
        assert_eq!(errors(&quantizer, BlockMethod::SquaredError, &[0.0; 120])?, [0.0; 3]);
        Ok(())
    }
}
