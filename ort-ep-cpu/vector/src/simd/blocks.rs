//! Dequantization and dot products of block-quantized rows: values of 2, 4 or 8 bits, with a scale
//! and a zero point per block.
//!
//! A byte holds `P = 8 / bits` values, the first in its lowest bits. Shifting a vector of bytes
//! yields one vector for each of the `P` bit positions. So the other operand is permuted by bit
//! position too; see [`arrange`].

use super::{Isa, Simd, SimdOp, dispatch};

/// Some whole blocks of one row.
#[derive(Debug, Clone, Copy)]
pub struct BlockRow<'a> {
    /// The quantized values, `block * bits / 8` bytes per block.
    pub quantized: &'a [u8],
    /// One scale per block.
    pub scales: &'a [f32],
    /// One zero point per block.
    pub zeros: &'a [f32],
}

/// The layout of the quantized values of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockLayout {
    /// Bits of a quantized value: 2, 4 or 8.
    pub bits: usize,
    /// Values per block, a power of two and at least 16.
    pub block: usize,
}

impl BlockLayout {
    /// Returns the bytes of a block.
    #[inline]
    pub fn bytes(self) -> usize {
        self.block * self.bits / 8
    }

    /// Returns the quantized values in a byte.
    #[inline]
    pub fn places(self) -> usize {
        8 / self.bits
    }

    /// Returns the widest instruction set, at most `isa`, whose vectors of bytes fit in a block.
    fn isa(self, isa: Isa) -> Isa {
        match self.bytes() {
            16.. => isa,
            8..16 => isa.min(Isa::Avx2),
            _ => isa.min(Isa::Neon),
        }
    }

    fn check(self, rows: &[BlockRow<'_>], blocks: usize) {
        assert!(matches!(self.bits, 2 | 4 | 8) && self.block >= 16 && self.block.is_power_of_two());
        for row in rows {
            assert!(row.scales.len() == blocks && row.zeros.len() == blocks, "each block has a scale");
            assert_eq!(row.quantized.len(), blocks * self.bytes(), "the quantized values fill their blocks");
        }
    }
}

/// Permutes values to the order of the dequantized vectors. Within each block come first the values
/// for the first quantized value of each byte, then those for the second, and so on. `to` has the
/// length of the blocks that `from` fills or begins; the rest of it becomes 0.
pub fn arrange(layout: BlockLayout, from: &[f32], to: &mut [f32]) {
    let (places, bytes) = (layout.places(), layout.bytes());
    let mut rest = from;
    for to in to.chunks_mut(layout.block) {
        let (from, others) = rest.split_at(to.len().min(rest.len()));
        rest = others;
        to.fill(0.0);
        for (at, from) in from.chunks(places).enumerate() {
            for (place, value) in from.iter().enumerate() {
                to[place * bytes + at] = *value;
            }
        }
    }
}

/// The maximum rows of weights and rows of values that [`dot`] takes at once.
pub const TILE: [usize; 2] = [4, 4];

/// Adds to `sums[row][side]` the dot product of a row of weights and a row of values, which
/// [`arrange`] permuted. Takes at most [`TILE`] rows of each.
///
/// # Panics
/// If there are more rows, or the numbers of values and weights differ.
pub fn dot(
    isa: Isa,
    layout: BlockLayout,
    rows: &[BlockRow<'_>],
    sides: &[&[f32]],
    sums: &mut [[f32; TILE[1]]; TILE[0]],
) {
    let blocks = rows.first().map_or(0, |row| row.scales.len());
    layout.check(rows, blocks);
    assert!(rows.len() <= TILE[0] && sides.len() <= TILE[1], "a tile is small");
    assert!(
        sides.iter().all(|side| side.len() == blocks * layout.block),
        "each quantized value meets a value"
    );
    // Small blocks have fewer bytes than the widest vector loads.
    let isa = layout.isa(isa);
    // Four rows share the loads of one side. With more sides, there are not enough registers for
    // that.
    let at_once = if sides.len() == 1 { 4 } else { 2 };
    for (rows, sums) in rows.chunks(at_once).zip(sums.chunks_mut(at_once)) {
        match layout.bits {
            2 => dot_rows::<2>(isa, layout, rows, sides, sums),
            4 => dot_rows::<4>(isa, layout, rows, sides, sums),
            _ => dot_rows::<8>(isa, layout, rows, sides, sums),
        }
    }
}

fn dot_rows<const BITS: u32>(
    isa: Isa,
    layout: BlockLayout,
    rows: &[BlockRow<'_>],
    sides: &[&[f32]],
    sums: &mut [[f32; TILE[1]]],
) {
    macro_rules! tile {
        ($rows:expr, $count:literal, $sides:literal) => {{
            let (Some(rows), Some(sides)) = ($rows.first_chunk(), sides.first_chunk()) else { return };
            dispatch(isa, Dot::<'_, BITS, $count, $sides> { layout, rows, sides, sums })
        }};
    }
    match (rows.len(), sides.len()) {
        (4, 1) => tile!(rows, 4, 1),
        (2, 2) => tile!(rows, 2, 2),
        (2, 3) => tile!(rows, 2, 3),
        (2, 4) => tile!(rows, 2, 4),
        _ => {
            for (row, sums) in rows.chunks(1).zip(sums.chunks_mut(1)) {
                match sides.len() {
                    1 => dispatch_one::<BITS, 1>(isa, layout, row, sides, sums),
                    2 => dispatch_one::<BITS, 2>(isa, layout, row, sides, sums),
                    3 => dispatch_one::<BITS, 3>(isa, layout, row, sides, sums),
                    _ => dispatch_one::<BITS, 4>(isa, layout, row, sides, sums),
                }
            }
        }
    }
}

fn dispatch_one<const BITS: u32, const SIDES: usize>(
    isa: Isa,
    layout: BlockLayout,
    row: &[BlockRow<'_>],
    sides: &[&[f32]],
    sums: &mut [[f32; TILE[1]]],
) {
    let (Some(rows), Some(sides)) = (row.first_chunk(), sides.first_chunk()) else { return };
    dispatch(isa, Dot::<'_, BITS, 1, SIDES> { layout, rows, sides, sums });
}

/// A tile of accumulators. `dot` checked the lengths.
struct Dot<'a, const BITS: u32, const ROWS: usize, const SIDES: usize> {
    layout: BlockLayout,
    rows: &'a [BlockRow<'a>; ROWS],
    sides: &'a [&'a [f32]; SIDES],
    sums: &'a mut [[f32; TILE[1]]],
}

impl<const BITS: u32, const ROWS: usize, const SIDES: usize> SimdOp for Dot<'_, BITS, ROWS, SIDES> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (block, bytes) = (self.layout.block, self.layout.bytes());
        let mut totals = [[s.splat(0.0); SIDES]; ROWS];
        for index in 0..self.rows[0].scales.len() {
            // Loops instead of `map`: a closure passed to the standard library is compiled without
            // the instruction set, and each intrinsic in it becomes a call.
            let mut parameters = [(s.splat(0.0), s.splat(0.0), s.splat(0.0)); ROWS];
            for (parameters, row) in parameters.iter_mut().zip(self.rows) {
                *parameters = block_parameters::<S, BITS>(s, row, index);
            }
            for at in (0..bytes).step_by(S::LANES) {
                let mut quantized = [s.splat_i32(0); ROWS];
                for (quantized, row) in quantized.iter_mut().zip(self.rows) {
                    // SAFETY: `check` made sure that each row's bytes fill its blocks, and
                    // `BlockLayout::isa` chose vectors that divide a block.
                    *quantized = unsafe { s.load_u8_ptr(row.quantized.as_ptr().add(index * bytes + at)) };
                }
                for place in 0..8 / BITS as usize {
                    let mut weights = [s.splat(0.0); ROWS];
                    for row in 0..ROWS {
                        let (table, scale, zero) = parameters[row];
                        let quantized = at_place::<S, BITS>(s, quantized[row], place);
                        weights[row] = s.decode::<BITS>(quantized, table, scale, zero);
                    }
                    for side in 0..SIDES {
                        let first = index * block + place * bytes + at;
                        // SAFETY: `dot` checked that each side has as many values as a row has
                        // weights.
                        let values = unsafe { s.load_ptr(self.sides[side].as_ptr().add(first)) };
                        for row in 0..ROWS {
                            totals[row][side] = s.mul_add(weights[row], values, totals[row][side]);
                        }
                    }
                }
            }
        }
        for (totals, sums) in totals.into_iter().zip(self.sums) {
            for (total, sum) in totals.into_iter().zip(sums) {
                *sum += s.horizontal_sum(total);
            }
        }
    }
}

/// Returns the decoder table, scale and zero point of a block.
#[inline(always)]
fn block_parameters<S: Simd, const BITS: u32>(
    s: S,
    row: &BlockRow<'_>,
    index: usize,
) -> (S::F32, S::F32, S::F32) {
    let (scale, zero) = (s.splat(row.scales[index]), s.splat(row.zeros[index]));
    (s.decoder::<BITS>(scale, zero), scale, zero)
}

/// Shifts the quantized values at a position of their bytes to the lowest bits.
#[inline(always)]
fn at_place<S: Simd, const BITS: u32>(s: S, bytes: S::I32, place: usize) -> S::I32 {
    match place * BITS as usize {
        0 => bytes,
        2 => s.shr_i32::<2>(bytes),
        4 => s.shr_i32::<4>(bytes),
        _ => s.shr_i32::<6>(bytes),
    }
}

/// Dequantizes each row to `to[row * stride..]`, permuted within blocks as [`arrange`] does.
///
/// # Panics
/// If the rows differ in length, or `to` is too short.
pub fn decode_rows(isa: Isa, layout: BlockLayout, rows: &[BlockRow<'_>], to: &mut [f32], stride: usize) {
    let blocks = rows.first().map_or(0, |row| row.scales.len());
    layout.check(rows, blocks);
    let len = blocks * layout.block;
    assert!(len <= stride && to.len() >= rows.len() * stride, "the target holds the rows");
    let isa = layout.isa(isa);
    match layout.bits {
        2 => dispatch(isa, Decode::<'_, 2> { layout, rows, to, stride }),
        4 => dispatch(isa, Decode::<'_, 4> { layout, rows, to, stride }),
        _ => dispatch(isa, Decode::<'_, 8> { layout, rows, to, stride }),
    }
}

/// Rows to dequantize. `decode_rows` checked the lengths.
struct Decode<'a, const BITS: u32> {
    layout: BlockLayout,
    rows: &'a [BlockRow<'a>],
    to: &'a mut [f32],
    stride: usize,
}

impl<const BITS: u32> SimdOp for Decode<'_, BITS> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (block, bytes) = (self.layout.block, self.layout.bytes());
        let start = self.to.as_mut_ptr();
        for (at_row, row) in self.rows.iter().enumerate() {
            for index in 0..row.scales.len() {
                let (table, scale, zero) = block_parameters::<S, BITS>(s, row, index);
                for at in (0..bytes).step_by(S::LANES) {
                    // SAFETY: `check` made sure that the row's bytes fill its blocks, and
                    // `BlockLayout::isa` chose vectors that divide a block.
                    let quantized = unsafe { s.load_u8_ptr(row.quantized.as_ptr().add(index * bytes + at)) };
                    for place in 0..8 / BITS as usize {
                        let quantized = at_place::<S, BITS>(s, quantized, place);
                        let weights = s.decode::<BITS>(quantized, table, scale, zero);
                        let first = at_row * self.stride + index * block + place * bytes + at;
                        // SAFETY: `decode_rows` checked that the target holds the blocks of each
                        // row.
                        unsafe { s.store_ptr(start.add(first), weights) };
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every bit width, block size and instruction set against sums term by term.
    #[test]
    fn dots_are_sums_of_products() {
        for (bits, block) in [(2, 16), (2, 32), (2, 64), (4, 16), (4, 32), (4, 128), (8, 16), (8, 32)] {
            let layout = BlockLayout { bits, block };
            let (blocks, places) = (3, layout.places());
            let bytes: Vec<u8> =
                (0..5 * blocks * layout.bytes()).map(|at| (at * 37 + at / 7) as u8).collect();
            let scales: Vec<f32> = (0..5 * blocks).map(|at| 0.25 + at as f32 / 8.0).collect();
            let zeros: Vec<f32> = (0..5 * blocks).map(|at| (at % 4) as f32).collect();
            let values: Vec<f32> = (0..4 * blocks * block).map(|at| ((at * 13) % 17) as f32 - 8.0).collect();
            let rows: Vec<BlockRow<'_>> = (0..4)
                .map(|row| BlockRow {
                    quantized: &bytes[row * blocks * layout.bytes()..][..blocks * layout.bytes()],
                    scales: &scales[row * blocks..][..blocks],
                    zeros: &zeros[row * blocks..][..blocks],
                })
                .collect();
            let weight = |row: usize, at: usize| {
                let code =
                    (rows[row].quantized[at / places] >> (at % places * bits)) & ((1_u32 << bits) - 1) as u8;
                (f32::from(code) - rows[row].zeros[at / block]) * rows[row].scales[at / block]
            };
            let mut arranged = vec![0.0; values.len()];
            for (from, to) in values.chunks(blocks * block).zip(arranged.chunks_mut(blocks * block)) {
                arrange(layout, from, to);
            }
            for isa in Isa::available() {
                for (row_count, side_count) in
                    (1..=4).flat_map(|rows| (1..=4).map(move |sides| (rows, sides)))
                {
                    let sides: Vec<&[f32]> = arranged.chunks(blocks * block).take(side_count).collect();
                    let mut sums = [[0.0; TILE[1]]; TILE[0]];
                    dot(isa, layout, &rows[..row_count], &sides, &mut sums);
                    for (row, side) in (0..row_count).flat_map(|row| (0..side_count).map(move |s| (row, s))) {
                        let terms = (0..blocks * block)
                            .map(|at| weight(row, at) * values[side * blocks * block + at]);
                        let expected: f32 = terms.sum();
                        let error = (sums[row][side] - expected).abs();
                        assert!(error <= 1e-5 * expected.abs().max(1000.0), "{bits} {block} {}", isa.name());
                    }
                }
                let mut decoded = vec![0.0; 4 * blocks * block];
                decode_rows(isa, layout, &rows, &mut decoded, blocks * block);
                for (at, value) in decoded.iter().enumerate() {
                    let (row, within) = (at / (blocks * block), at % block);
                    let place = within % layout.bytes() * places + within / layout.bytes();
                    assert_eq!(*value, weight(row, at % (blocks * block) / block * block + place));
                }
            }
        }
    }
}
