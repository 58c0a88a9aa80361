//! The layout of `MatMulNBits`: the blocks of a column are next to each other.
//!
//! The matrix is read by rows and written by columns. A tile of [`TILE`] columns is quantized with
//! one column per vector lane, and transposed when a block is complete.

use crate::elements::Elements;
use crate::feedback::{Curvature, Feedback};
use crate::gptq::{RoundedTile, round_tile};
use crate::grid::{Bits, BlockQuantizer, QuantizedBlocks, Scheme};
use crate::noise::Noise;
use crate::parallel;
use crate::tile::{Lanes, TILE, TileGrids};
use crate::weight::Weight;

/// A matrix of weights as its elements, which may be those of its transpose.
pub(crate) struct Matrix<'e, E: ?Sized> {
    pub(crate) elements: &'e E,
    pub(crate) is_transposed: bool,
}

/// What quantization changed in a matrix.
pub(crate) struct Changes {
    pub(crate) noise: Noise,
    /// What the means of the outputs lack, by column; empty without those of the channels.
    pub(crate) bias: Vec<f64>,
    /// The energies of the outputs, by column, if there is a bias.
    pub(crate) energies: Vec<f64>,
}

/// Quantizes a matrix that is not empty, into slices of the right lengths.
pub(crate) fn quantize<E: Elements + ?Sized>(
    scheme: &Scheme,
    curvature: Curvature<'_>,
    weights: &Matrix<'_, E>,
    out: QuantizedBlocks<'_, E::Element>,
) -> Changes {
    let (stride, n) = (ColumnStride::new::<E::Element>(scheme), scheme.blocks.n);
    let threads = parallel::threads_for(weights.elements.count());
    let width = n.div_ceil(threads).next_multiple_of(TILE);
    let QuantizedBlocks { codes, scales, zero_points } = out;
    let mut noises = vec![Noise::default(); n.div_ceil(TILE)];
    let biases = if curvature.means.is_empty() { 0 } else { n };
    let (mut bias, mut energies) = (vec![0.0; biases], vec![0.0; biases]);
    let mut zero_points = zero_points.chunks_mut(width.saturating_mul(stride.zero_points));
    let (mut biases, mut outputs) = (bias.chunks_mut(width), energies.chunks_mut(width));
    let codes = codes.chunks_mut(width.saturating_mul(stride.codes));
    let scales = scales.chunks_mut(width.saturating_mul(stride.blocks));
    let parts = codes.zip(scales).zip(noises.chunks_mut(width / TILE));
    let mut jobs = Vec::with_capacity(threads);
    for (index, ((codes, scales), noises)) in parts.enumerate() {
        // Symmetric blocks may come without zero points.
        let zero_points = zero_points.next().unwrap_or_default();
        let bias = biases.next().unwrap_or_default();
        let energies = outputs.next().unwrap_or_default();
        let changes = ColumnChanges { noises, bias, energies };
        jobs.push(Columns { first: index * width, codes, scales, zero_points, changes });
    }
    parallel::for_each(jobs, |columns| columns.quantize((scheme, curvature), weights));
    // In this order, whatever the number of threads.
    let noise = noises.into_iter().fold(Noise::default(), Noise::plus);
    Changes { noise, bias, energies }
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
    fn new<T>(scheme: &Scheme) -> ColumnStride {
        let BlockQuantizer { k, block_size, bits, .. } = scheme.blocks;
        let blocks = k.div_ceil(block_size);
        let block = block_size * bits.stored() / 8;
        let zero_points = match scheme.has_float_points() {
            true => blocks * size_of::<T>(),
            false => blocks.div_ceil(bits.per_byte()),
        };
        ColumnStride { blocks, block, codes: blocks * block, zero_points }
    }
}

/// The results of adjacent columns.
struct Columns<'a, T> {
    first: usize,
    codes: &'a mut [u8],
    scales: &'a mut [T],
    zero_points: &'a mut [u8],
    changes: ColumnChanges<'a>,
}

/// What quantization changed in adjacent columns: a noise for each tile.
struct ColumnChanges<'a> {
    noises: &'a mut [Noise],
    bias: &'a mut [f64],
    energies: &'a mut [f64],
}

/// What is computed of a tile at a time.
struct Scratch {
    values: Vec<Lanes>,
    codes: Vec<[u8; TILE]>,
    /// The bytes of a block, each for all columns of the tile.
    packed: Vec<[u8; TILE]>,
    /// A column, if the matrix is transposed.
    column: Vec<f32>,
}

impl<T: Weight> Columns<'_, T> {
    fn quantize<E>(self, (scheme, curvature): (&Scheme, Curvature<'_>), weights: &Matrix<'_, E>)
    where
        E: Elements<Element = T> + ?Sized,
    {
        let stride = ColumnStride::new::<T>(scheme);
        let Columns { first, codes, scales, zero_points, changes } = self;
        let codes = codes.chunks_mut(TILE.saturating_mul(stride.codes));
        let scales = scales.chunks_mut(TILE.saturating_mul(stride.blocks));
        let mut zero_points = zero_points.chunks_mut(TILE.saturating_mul(stride.zero_points));
        let (mut bias, mut energies) = (changes.bias.chunks_mut(TILE), changes.energies.chunks_mut(TILE));
        let BlockQuantizer { k, block_size, .. } = scheme.blocks;
        let is_whole = curvature.feedback.is_some() || weights.is_transposed;
        // The lanes after the last column stay zero.
        let mut scratch = Scratch {
            values: vec![[0.0; TILE]; if is_whole { k } else { block_size.min(k) }],
            codes: vec![[0; TILE]; block_size.min(k)],
            packed: vec![[0; TILE]; stride.block],
            column: vec![0.0; if weights.is_transposed { k } else { 0 }],
        };
        let parts = codes.zip(scales).zip(changes.noises.chunks_mut(1));
        for (index, ((codes, scales), noises)) in parts.enumerate() {
            let zero_points = zero_points.next().unwrap_or_default();
            let (bias, energies) = (bias.next().unwrap_or_default(), energies.next().unwrap_or_default());
            let changes = ColumnChanges { noises, bias, energies };
            let mut tile = Columns { first: first + index * TILE, codes, scales, zero_points, changes };
            if !scheme.has_float_points() && !scheme.blocks.is_symmetric {
                // The kernels' default, for places after the last block.
                tile.zero_points.fill(scheme.blocks.bits.middle_byte());
            }
            match curvature.feedback {
                Some(feedback) => tile.round_all((scheme, curvature, feedback), weights, &mut scratch),
                None => tile.quantize_all((scheme, curvature), weights, &mut scratch),
            }
        }
    }

    /// Quantizes at most [`TILE`] columns by GPTQ.
    fn round_all<E: Elements<Element = T> + ?Sized>(
        &mut self,
        (scheme, curvature, feedback): (&Scheme, Curvature<'_>, &Feedback),
        weights: &Matrix<'_, E>,
        scratch: &mut Scratch,
    ) {
        let Scratch { values, packed, column, .. } = scratch;
        let block_size = scheme.blocks.block_size;
        self.load((scheme, weights), 0, (&mut *values, &mut *column));
        let RoundedTile { grids, codes } = round_tile(scheme, feedback, values);
        // The values have changed.
        self.load((scheme, weights), 0, (&mut *values, column));
        let blocks = grids.iter().zip(codes.chunks(block_size).zip(values.chunks(block_size)));
        for (block, (grids, (codes, values))) in blocks.enumerate() {
            self.note(curvature, block * block_size, (grids, codes, values));
            self.store(scheme, (block, grids), codes, packed);
        }
    }

    /// Quantizes at most [`TILE`] columns block by block.
    fn quantize_all<E: Elements<Element = T> + ?Sized>(
        &mut self,
        (scheme, curvature): (&Scheme, Curvature<'_>),
        weights: &Matrix<'_, E>,
        scratch: &mut Scratch,
    ) {
        let BlockQuantizer { k, block_size, bits, .. } = scheme.blocks;
        let Scratch { values: all, codes, packed, column } = scratch;
        if weights.is_transposed {
            // A column is in a row, which is read as a whole.
            self.load((scheme, weights), 0, (&mut *all, &mut *column));
        }
        for block in 0..k.div_ceil(block_size) {
            let rows = block * block_size..k.min((block + 1) * block_size);
            let own = if weights.is_transposed { rows.clone() } else { 0..rows.len() };
            let (Some(values), Some(codes)) = (all.get_mut(own), codes.get_mut(..rows.len())) else { return };
            if !weights.is_transposed {
                self.load((scheme, weights), rows.start, (&mut *values, &mut *column));
            }
            let importance = curvature.importance.get(rows.clone()).unwrap_or_default();
            let grids = TileGrids::<T>::of(scheme, values, importance);
            for (values, codes) in values.iter().zip(&mut *codes) {
                grids.encode(f32::from(bits.largest()), values, codes);
            }
            self.note(curvature, rows.start, (&grids, codes, values));
            self.store(scheme, (block, &grids), codes, packed);
        }
    }

    /// Loads rows of the weight from this one on. Those of a transposed one go through `column`.
    fn load<E: Elements<Element = T> + ?Sized>(
        &self,
        (scheme, weights): (&Scheme, &Matrix<'_, E>),
        first: usize,
        (values, column): (&mut [Lanes], &mut [f32]),
    ) {
        let BlockQuantizer { k, n, .. } = scheme.blocks;
        let width = self.scales.len() / ColumnStride::new::<T>(scheme).blocks;
        if weights.is_transposed {
            for lane in 0..width {
                weights.elements.widen((self.first + lane) * k + first, column);
                let lanes = values.iter_mut().filter_map(|row| row.get_mut(lane));
                lanes.zip(&*column).for_each(|(to, value)| *to = *value);
            }
            return;
        }
        for (row, values) in (first..).zip(values) {
            if let Some(values) = values.get_mut(..width) {
                weights.elements.widen(row * n + self.first, values);
            }
        }
    }

    /// Notes what the codes of a block change, whose first row is this one.
    fn note(
        &mut self,
        curvature: Curvature<'_>,
        first: usize,
        (grids, codes, values): (&TileGrids<T>, &[[u8; TILE]], &[Lanes]),
    ) {
        let Some(noise) = self.changes.noises.first_mut() else { return };
        for (row, (values, codes)) in (first..).zip(values.iter().zip(codes)) {
            let became = grids.decode(codes);
            noise.add_all(values, &became);
            let of_row = |channels: &[f32]| f64::from(channels.get(row).copied().unwrap_or_default());
            let (mean, energy) = (of_row(curvature.means), of_row(curvature.energies));
            // None without means.
            let outputs = self.changes.bias.iter_mut().zip(&mut *self.changes.energies);
            for ((bias, output), (value, became)) in outputs.zip(values.iter().zip(&became)) {
                *bias += mean * (f64::from(*value) - f64::from(*became));
                *output += energy * f64::from(value * value);
            }
        }
    }

    /// Writes the grids and the codes of a block.
    fn store(
        &mut self,
        scheme: &Scheme,
        (block, grids): (usize, &TileGrids<T>),
        codes: &[[u8; TILE]],
        packed: &mut [[u8; TILE]],
    ) {
        let (stride, bits) = (ColumnStride::new::<T>(scheme), scheme.blocks.bits);
        for (scales, scale) in self.scales.chunks_mut(stride.blocks).zip(&grids.stored) {
            scales.iter_mut().skip(block).take(1).for_each(|to| *to = *scale);
        }
        if !scheme.blocks.is_symmetric {
            for (points, zero) in self.zero_points.chunks_mut(stride.zero_points).zip(&grids.zero) {
                match scheme.has_float_points() {
                    true => put_number::<T>(points, block, *zero),
                    false => put(points, block, *zero as u8, bits),
                }
            }
        }
        packed.fill([0; TILE]);
        for (index, codes) in codes.iter().enumerate() {
            let Some(packed) = packed.get_mut(index / bits.per_byte()) else { break };
            let shift = index % bits.per_byte() * bits.stored();
            packed.iter_mut().zip(codes).for_each(|(byte, code)| *byte |= code << shift);
        }
        for (lane, column) in self.codes.chunks_mut(stride.codes).enumerate() {
            let column = column.chunks_mut(stride.block).nth(block).unwrap_or_default();
            for (to, from) in column.iter_mut().zip(&*packed) {
                *to = from.get(lane).copied().unwrap_or_default();
            }
        }
    }
}

/// Replaces a value in a packed row.
fn put(row: &mut [u8], index: usize, code: u8, bits: Bits) {
    let shift = index % bits.per_byte() * bits.stored();
    if let Some(byte) = row.get_mut(index / bits.per_byte()) {
        let place = u8::MAX >> (8 - bits.stored());
        *byte = *byte & !(place << shift) | code << shift;
    }
}

/// Replaces a number in a row of bytes.
fn put_number<T: Weight>(row: &mut [u8], index: usize, number: f32) {
    let bytes = T::bytes(&[T::narrow(number)]);
    if let Some(to) = row.chunks_mut(bytes.len()).nth(index) {
        to.copy_from_slice(&bytes);
    }
}

#[cfg(test)]
mod tests {
    use half::f16;
    use ort_core::Result;
    use serde_json::Value;

    use super::*;
    use crate::decoded::{METHODS, REFERENCE, bits_of, scheme, symmetric, weights};
    use crate::grid::BlockMethod;

    fn decoded<T: Weight>(scheme: &Scheme, weights: &[T]) -> Result<Vec<f32>> {
        crate::decoded::decoded(scheme, Curvature::default(), weights)
    }

    /// The error that a method minimizes, in each block of each column: squares, squares that weigh
    /// more for large values, or magnitudes.
    fn errors(scheme: &Scheme, weights: &[f32], decoded: &[f32]) -> Vec<f64> {
        let BlockQuantizer { k, n, block_size, .. } = scheme.blocks;
        let mut errors = Vec::new();
        for (column, first) in
            (0..n).flat_map(|column| (0..k).step_by(block_size).map(move |first| (column, first)))
        {
            let places = (first..k.min(first + block_size)).map(|row| row * n + column);
            let pairs: Vec<(f64, f64)> =
                places.map(|place| (f64::from(weights[place]), f64::from(decoded[place]))).collect();
            let squares: f64 = pairs.iter().map(|(value, _)| value * value).sum();
            let root = (squares / pairs.len() as f64).sqrt();
            let term = |(value, became): &(f64, f64)| match scheme.method {
                BlockMethod::MinMax | BlockMethod::SquaredError => (value - became).powi(2),
                BlockMethod::KQuant => (root + value.abs()) * (value - became).powi(2),
                BlockMethod::HalfQuadratic => (value - became).abs(),
            };
            errors.push(pairs.iter().map(term).sum());
        }
        errors
    }

    #[test]
    fn no_block_is_worse_than_with_its_whole_range() -> Result<()> {
        let weights = weights(100 * 70);
        let halves: Vec<f16> = weights.iter().map(|value| f16::from_f32(*value)).collect();
        let rounded: Vec<f32> = halves.iter().map(|value| value.to_f32()).collect();
        for bits in [Bits::Two, Bits::Three, Bits::Four, Bits::Eight] {
            for (name, method) in METHODS {
                let plain = scheme((100, 70, 32), bits, method);
                for scheme in [plain, symmetric(plain)] {
                    // Symmetric blocks have no zero point that this method could search, or that 3
                    // bits need.
                    let has_points = method == BlockMethod::HalfQuadratic || bits == Bits::Three;
                    if scheme.blocks.is_symmetric && has_points {
                        continue;
                    }
                    let whole = Scheme { method: BlockMethod::MinMax, ..scheme };
                    for (given, found, plain) in [
                        (&weights, decoded(&scheme, &weights)?, decoded(&whole, &weights)?),
                        (&rounded, decoded(&scheme, &halves)?, decoded(&whole, &halves)?),
                    ] {
                        let pairs =
                            errors(&scheme, given, &found).into_iter().zip(errors(&scheme, given, &plain));
                        for (block, (found, plain)) in pairs.enumerate() {
                            let label =
                                format!("{name} {bits:?} {}: block {block}", scheme.blocks.is_symmetric);
                            assert!(found <= plain * 1.0001 + 1e-9, "{label}: {found} of {plain}");
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// The errors of prototypes in NumPy, which follow the published formulas block by block.
    #[test]
    fn methods_reach_the_errors_of_their_formulas() -> Result<()> {
        let cases: Value = serde_json::from_str(REFERENCE).unwrap();
        let cases = cases["methods"].as_array().unwrap();
        assert_eq!(cases.len(), 21);
        for case in cases {
            let size = |name: &str| case[name].as_u64().unwrap() as usize;
            let (_, method) = METHODS.into_iter().find(|(name, _)| case["method"] == *name).unwrap();
            let bits = bits_of(size("bits") as u64);
            let plain = scheme((size("k"), size("n"), size("block")), bits, method);
            let scheme = if case["symmetric"] == true { symmetric(plain) } else { plain };
            let weights = weights(size("k") * size("n"));
            let found: f64 = errors(&scheme, &weights, &decoded(&scheme, &weights)?).iter().sum();
            let expected = case["error"].as_f64().unwrap();
            assert!((found - expected).abs() < 2e-3 * expected, "{case}: {found}");
        }
        Ok(())
    }

    #[test]
    fn equal_values_and_values_on_a_grid_are_exact() -> Result<()> {
        for (_, method) in METHODS {
            let scheme = scheme((48, 3, 16), Bits::Four, method);
            // Each block has all multiples of 1/4 from -1 to 2.75.
            let grid: Vec<f32> = (0..144).map(|place| (place / 3 * 7 % 16) as f32 * 0.25 - 1.0).collect();
            for weights in [grid, vec![0.0; 144], vec![0.75; 144], vec![-3.0; 144]] {
                for (found, expected) in decoded(&scheme, &weights)?.into_iter().zip(&weights) {
                    assert!((found - expected).abs() < 1e-6, "{method:?}: {found} {expected}");
                }
            }
        }
        Ok(())
    }

    /// A number as zero point may be far outside of the codes.
    #[test]
    fn values_far_from_zero_gain_from_a_zero_point_in_floating_point() -> Result<()> {
        let weights: Vec<f32> = weights(64 * 5).iter().map(|value| 3.0 + value).collect();
        let error = |method: BlockMethod| -> Result<f64> {
            let scheme = scheme((64, 5, 32), Bits::Four, method);
            let squared = Scheme { method: BlockMethod::MinMax, ..scheme };
            Ok(errors(&squared, &weights, &decoded(&scheme, &weights)?).iter().sum())
        };
        let (plain, numbers) = (error(BlockMethod::MinMax)?, error(BlockMethod::HalfQuadratic)?);
        assert!(numbers < 0.1 * plain, "{numbers} of {plain}");
        Ok(())
    }
}
