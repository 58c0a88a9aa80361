//! Dot products of block-quantized weights of 4 or 8 bits with activations quantized to 8 bits:
//! integers within a block, `f32` across blocks.
//!
//! Activations are quantized block by block: `value = scale * number`, with
//! `-127 <= number <= 127`. A weight is `(code - zero) * scale`, with the quantized weight `code`.
//! So a block contributes `scale * value_scale * (sum of code * number)` minus
//! `scale * zero * (value_scale * sum of numbers)`. The last factor is computed once for all
//! columns.
//!
//! The product of a number and a `code` of 4 bits, or half of one of 8, needs 12 bits. So two of
//! them add up in 16 bits without saturation, on CPUs without an instruction that adds four in 32
//! bits. All instruction sets keep 16 accumulators in the same order, with one rounding per block,
//! so they produce the same bits.

mod sixteen;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::ops::Range;

use super::blocks::BlockLayout;
use super::{Isa, Simd, SimdOp, dispatch};
pub use sixteen::UNIT;
use sixteen::{LANES, Plain, Sixteen};

/// Columns that share the loads of the activations.
const COLUMNS: usize = 4;

/// The prefetch distance for quantized weights and scales, in bytes. Columns are short, and those
/// of a tile are read in parallel, so they end before the hardware prefetcher has detected the
/// streams.
const AHEAD: usize = 4096;

/// Returns the blocks of `block` quantized weights in a unit, at least 1.
fn blocks_of_unit(block: usize) -> usize {
    (UNIT / block).max(1)
}

/// Some columns of weights.
#[derive(Debug, Clone, Copy)]
pub struct Columns<'a> {
    /// Weights of 4 or 8 bits.
    pub layout: BlockLayout,
    /// Blocks of a column.
    pub blocks: usize,
    /// A quantized weight per byte, or two, the first in the low nibble.
    pub quantized: &'a [u8],
    /// One scale per block, as the bytes of an `f32`.
    pub scales: &'a [u8],
    /// Zero points, packed like the weights, column by column. If `None`, all of them are the
    /// middle of the codes: 8 or 128.
    pub zeros: Option<&'a [u8]>,
}

/// A row of quantized activations.
#[derive(Debug, Clone, Copy)]
pub struct Side<'a> {
    /// The numbers, in the order of [`quantize`].
    pub numbers: &'a [i8],
    /// One scale per block.
    pub scales: &'a [f32],
    /// For each block, its scale times the sum of its numbers.
    pub sums: &'a [f32],
}

/// Returns the lengths of the numbers, and of the scales and sums, of a row of `blocks` blocks,
/// rounded up to whole units.
pub fn side_lens(block: usize, blocks: usize) -> [usize; 2] {
    let padded = blocks.next_multiple_of(blocks_of_unit(block));
    [padded.saturating_mul(block), padded]
}

/// Quantizes a row of activations. For weights of 4 bits, the values at even positions of a unit
/// come first, because the low nibbles do. Padding becomes 0.
///
/// # Panics
/// If the targets do not have the lengths of [`side_lens`].
pub fn quantize(
    isa: Isa,
    layout: BlockLayout,
    from: &[f32],
    numbers: &mut [i8],
    scales: &mut [f32],
    sums: &mut [f32],
) {
    let lens = side_lens(layout.block, from.len().div_ceil(layout.block));
    assert!([numbers.len(), scales.len()] == lens && sums.len() == lens[1], "the targets hold whole units");
    numbers.fill(0);
    scales.fill(0.0);
    sums.fill(0.0);
    dispatch(isa, Quantize { layout, from, numbers, scales, sums });
}

/// `quantize` checked the lengths.
struct Quantize<'a> {
    layout: BlockLayout,
    from: &'a [f32],
    numbers: &'a mut [i8],
    scales: &'a mut [f32],
    sums: &'a mut [f32],
}

impl SimdOp for Quantize<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let BlockLayout { bits, block } = self.layout;
        for (index, from) in self.from.chunks(block).enumerate() {
            let mut greatest = s.splat(0.0);
            for at in (0..from.len()).step_by(S::LANES) {
                let values = s.load_partial(from, at, (from.len() - at).min(S::LANES), 0.0);
                greatest = s.max(s.abs(values), greatest);
            }
            let greatest = s.horizontal_max(greatest);
            let scale = greatest / 127.0;
            // If all values are 0 or one is not finite, the numbers become 0, and the scale carries
            // an infinity or NaN on.
            let inverse = if scale > 0.0 && scale.is_finite() { 1.0 / scale } else { 0.0 };
            let mut sum = 0_i32;
            for at in (0..from.len()).step_by(S::LANES) {
                let count = (from.len() - at).min(S::LANES);
                let values = s.load_partial(from, at, count, 0.0);
                let rounded = s.to_array(s.round_even(s.mul(values, s.splat(inverse))));
                for (lane, rounded) in rounded.iter().enumerate().take(count) {
                    let number = *rounded as i8;
                    sum += i32::from(number);
                    let mut place = index * block + at + lane;
                    if bits == 4 {
                        let within = place % UNIT;
                        place = place - within + within % 2 * (UNIT / 2) + within / 2;
                    }
                    self.numbers[place] = number;
                }
            }
            self.scales[index] = scale;
            self.sums[index] = scale * sum as f32;
        }
    }
}

/// Computes `to[column * sides + side]`, the dot product of a column and a side.
///
/// # Panics
/// If lengths do not match.
pub fn multiply(isa: Isa, columns: &Columns<'_>, sides: &[Side<'_>], to: &mut [f32]) {
    let Columns { layout, blocks, quantized, scales, zeros } = *columns;
    let BlockLayout { bits, block } = layout;
    assert!(matches!(bits, 4 | 8), "weights have 4 or 8 bits");
    assert!(block >= 16 && block.is_power_of_two(), "a block is a power of two");
    let count = to.len() / sides.len().max(1);
    assert!(quantized.len() >= count * blocks * layout.bytes(), "the quantized values fill their blocks");
    assert!(scales.len() >= count * blocks * 4, "each block has a scale");
    assert!(
        zeros.is_none_or(|zeros| zeros.len() >= count * (blocks * bits).div_ceil(8)),
        "each block has a zero point"
    );
    let lens = side_lens(block, blocks);
    for side in sides {
        assert!(side.numbers.len() >= lens[0], "a side has a number for each code");
        assert!(
            side.scales.len() >= lens[1] && side.sums.len() >= lens[1],
            "a side has a scale for each block"
        );
    }
    let call = Multiply { columns, sides, count, to };
    #[cfg(target_arch = "x86_64")]
    {
        let isa = isa.min(Isa::widest());
        if isa >= Isa::Avx512 && is_x86_feature_detected!("avx512vnni") {
            /// # Safety
            ///
            /// The CPU has AVX-512 F, BW, DQ, VL and VNNI, AVX2 and FMA. The slices of `call` have
            /// the lengths that `multiply` checks.
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma")]
            unsafe fn enter(call: Multiply<'_>) {
                // SAFETY: `multiply` checked the lengths, and calls this only if it detected these
                // features.
                unsafe { call.run_bits(x86::Vnni) }
            }
            // SAFETY: the features were detected just above.
            return unsafe { enter(call) };
        }
        if isa >= Isa::Avx2 {
            /// # Safety
            ///
            /// The CPU has AVX2 and FMA. The slices of `call` have the lengths that `multiply`
            /// checks.
            #[target_feature(enable = "avx2,fma")]
            unsafe fn enter(call: Multiply<'_>) {
                // SAFETY: `multiply` checked the lengths, and calls this only if `Isa::widest`
                // detected these features.
                unsafe { call.run_bits(x86::Halves) }
            }
            // SAFETY: `Isa::widest` detected these features.
            return unsafe { enter(call) };
        }
    }
    let _ = isa;
    // SAFETY: the lengths were checked above, and `Plain` needs no special instructions.
    unsafe { call.run_bits(Plain) }
}

/// `multiply` checked the lengths.
struct Multiply<'a> {
    columns: &'a Columns<'a>,
    sides: &'a [Side<'a>],
    count: usize,
    to: &'a mut [f32],
}

impl Multiply<'_> {
    /// Computes all columns for all sides.
    ///
    /// # Safety
    /// The CPU has the instructions of `V`, and the lengths are checked.
    #[inline(always)]
    unsafe fn run_bits<V: Sixteen>(self, v: V) {
        // SAFETY: the caller's contract is that of `run`.
        unsafe {
            match self.columns.layout.bits {
                4 => self.run::<V, 4>(v),
                _ => self.run::<V, 8>(v),
            }
        }
    }

    /// Computes all columns, of weights of `BITS`, for all sides.
    ///
    /// # Safety
    /// As [`Multiply::run_bits`].
    #[inline(always)]
    unsafe fn run<V: Sixteen, const BITS: usize>(self, v: V) {
        let Multiply { columns, sides, count, to } = self;
        let block = columns.layout.block;
        let mut pattern = [0; LANES];
        for (lane, place) in pattern.iter_mut().enumerate() {
            // The first weight of each accumulator. The low nibbles of the 32 bytes fill the first
            // eight lanes and the high nibbles the others. So lane `i` of either half takes four of
            // the eight weights from `8 * i` on.
            let first = if BITS == 4 { lane % 8 * 8 } else { lane * 4 };
            *place = if block < UNIT { (first / block) as i32 } else { 0 };
        }
        let mut column = 0;
        while column < count {
            let tile = if column + COLUMNS <= count { COLUMNS } else { 1 };
            for (at, side) in sides.iter().enumerate() {
                // SAFETY: the loop keeps the tile's columns below `count`, and `multiply` checked
                // the lengths.
                unsafe {
                    if tile == COLUMNS {
                        let sums = dot::<V, BITS, COLUMNS>(v, columns, side, column, &pattern);
                        for index in 0..COLUMNS {
                            to[(column + index) * sides.len() + at] = sums[index];
                        }
                    } else {
                        to[column * sides.len() + at] =
                            dot::<V, BITS, 1>(v, columns, side, column, &pattern)[0];
                    }
                }
            }
            column += tile;
        }
    }
}

/// Computes the dot products of `N` columns and a side.
///
/// # Safety
/// `N` columns from `first` on exist, the lengths are checked, and the CPU has the instructions of
/// `V`.
#[inline(always)]
unsafe fn dot<V: Sixteen, const BITS: usize, const N: usize>(
    v: V,
    columns: &Columns<'_>,
    side: &Side<'_>,
    first: usize,
    pattern: &[i32; LANES],
) -> [f32; N] {
    let Columns { layout, blocks, quantized, scales, zeros } = *columns;
    let block = layout.block;
    let per_unit = blocks_of_unit(block);
    let (quantized_len, whole) = (blocks * layout.bytes(), blocks * block / UNIT);
    let unit_len = UNIT * BITS / 8;
    // SAFETY: `multiply` checked the lengths, so units are inside the weights of their column and
    // the numbers of the side.
    unsafe {
        let mut totals = [v.zero(); N];
        for unit in 0..whole {
            let at = unit * UNIT / block;
            let of_side = v.spread(side.scales.as_ptr().add(at).cast(), per_unit, pattern);
            let numbers = side.numbers.as_ptr().add(unit * UNIT);
            for index in 0..N {
                let column = first + index;
                let quantized = quantized.as_ptr().add(column * quantized_len + unit * unit_len);
                let scale = scales.as_ptr().add((column * blocks + at) * 4);
                v.prefetch(quantized.wrapping_add(AHEAD));
                if at.is_multiple_of(LANES) {
                    v.prefetch(scale.wrapping_add(AHEAD / 4));
                }
                let scale = v.spread(scale, per_unit, pattern);
                let dots = dots::<V, BITS>(v, quantized, numbers);
                totals[index] = v.mul_add(dots, v.mul(scale, of_side), totals[index]);
            }
        }
        let at = whole * per_unit;
        if at < blocks && block < UNIT {
            // Blocks that do not fill a unit are copied to a zero-padded buffer.
            let of_side = v.spread(side.scales.as_ptr().add(at).cast(), per_unit, pattern);
            for index in 0..N {
                let column = first + index;
                let (mut last, mut of_last) = ([0_u8; UNIT], [0_u8; 16]);
                let rest =
                    &quantized[column * quantized_len + whole * unit_len..(column + 1) * quantized_len];
                last[..rest.len()].copy_from_slice(rest);
                let rest = &scales[(column * blocks + at) * 4..(column + 1) * blocks * 4];
                of_last[..rest.len()].copy_from_slice(rest);
                let scale = v.spread(of_last.as_ptr(), per_unit, pattern);
                let dots = dots::<V, BITS>(v, last.as_ptr(), side.numbers.as_ptr().add(whole * UNIT));
                totals[index] = v.mul_add(dots, v.mul(scale, of_side), totals[index]);
            }
        }
        let mut sums = [0.0; N];
        for index in 0..N {
            let column = first + index;
            let mut below = v.zero();
            for at in (0..blocks).step_by(LANES) {
                let count = (blocks - at).min(LANES);
                let zero = zero_points::<V, BITS>(v, zeros, column, at..at + count, blocks);
                let scale = v.load(scales.as_ptr().add((column * blocks + at) * 4), count);
                let sum = v.load(side.sums.as_ptr().add(at).cast(), count);
                below = v.mul_add(v.mul(scale, zero), sum, below);
            }
            sums[index] = v.sum(totals[index]) - v.sum(below);
        }
        sums
    }
}

/// For each four quantized weights of `BITS`, the sum of their products with four numbers. Reads a
/// unit of both.
///
/// # Safety
/// The unit is there, and the CPU has the instructions of `V`.
#[inline(always)]
unsafe fn dots<V: Sixteen, const BITS: usize>(v: V, quantized: *const u8, numbers: *const i8) -> V::F32 {
    // SAFETY: the caller's contract is that of the methods.
    unsafe {
        match BITS {
            4 => v.dots_of_nibbles(quantized, numbers),
            _ => v.dots_of_bytes(quantized, numbers),
        }
    }
}

/// The zero points of at most 16 blocks of a column with `all` blocks.
///
/// # Safety
/// The CPU has the instructions of `V`.
#[inline(always)]
unsafe fn zero_points<V: Sixteen, const BITS: usize>(
    v: V,
    zeros: Option<&[u8]>,
    column: usize,
    blocks: Range<usize>,
    all: usize,
) -> V::F32 {
    // The middle of the codes, twice in a byte if they have 4 bits.
    let mut bytes = [if BITS == 4 { 0x88_u8 } else { 0x80 }; LANES];
    if let Some(zeros) = zeros {
        let first = column * (all * BITS).div_ceil(8) + blocks.start * BITS / 8;
        let from = &zeros[first..][..(blocks.len() * BITS).div_ceil(8)];
        bytes[..from.len()].copy_from_slice(from);
    }
    let mut nibbles = [0; LANES / 2];
    nibbles.copy_from_slice(&bytes[..LANES / 2]);
    // SAFETY: the caller guarantees the instructions.
    unsafe {
        match BITS {
            4 => v.unpack_nibbles(nibbles),
            _ => v.unpack_bytes(bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The code at `index` of packed ones.
    fn code(bits: usize, bytes: &[u8], index: usize) -> u8 {
        (bytes[index * bits / 8] >> (index * bits % 8)) & ((1_u32 << bits) - 1) as u8
    }

    /// Blocks of all sizes, with and without zero points, against double-precision sums of the
    /// dequantized values. Every instruction set must produce the same bits.
    #[test]
    fn products_are_those_of_the_rounded_values() {
        let blocks = [(16, 1), (16, 7), (32, 1), (32, 5), (32, 24), (64, 3), (128, 2), (256, 1)];
        for bits in [4, 8] {
            for (block, blocks) in blocks {
                check_products(BlockLayout { bits, block }, blocks);
            }
        }
    }

    fn check_products(layout: BlockLayout, blocks: usize) {
        let BlockLayout { bits, block } = layout;
        let (k, count) = (blocks * block - 3, 7);
        let (row, zero_row) = (blocks * layout.bytes(), (blocks * bits).div_ceil(8));
        // Codes of all values, the greatest included.
        let weights: Vec<u8> =
            (0..count * row).map(|at| (at * 37 + at / 7) as u8 | (at % 3 * 85) as u8).collect();
        let scales: Vec<f32> = (0..count * blocks).map(|at| 0.25 + (at % 9) as f32 / 8.0).collect();
        let scale_bytes: Vec<u8> = scales.iter().flat_map(|scale| scale.to_ne_bytes()).collect();
        let zeros: Vec<u8> = (0..count * zero_row).map(|at| (at * 29 + 5) as u8).collect();
        let values: Vec<Vec<f32>> = (0..3)
            .map(|side| (0..k).map(|at| ((at * 13 + side * 5) % 17) as f32 * 0.37 - 3.0).collect())
            .collect();
        let lens = side_lens(block, blocks);
        let quantize_on = |isa: Isa, values: &[f32]| {
            let mut row = (vec![1; lens[0]], vec![1.0; lens[1]], vec![1.0; lens[1]]);
            quantize(isa, layout, values, &mut row.0, &mut row.1, &mut row.2);
            row
        };
        let quantized: Vec<_> = values.iter().map(|values| quantize_on(Isa::Scalar, values)).collect();
        let sides: Vec<Side<'_>> =
            quantized.iter().map(|(numbers, scales, sums)| Side { numbers, scales, sums }).collect();
        for zeros in [None, Some(&zeros[..])] {
            let columns = Columns { layout, blocks, quantized: &weights, scales: &scale_bytes, zeros };
            let expected = |column: usize, side: usize| -> f64 {
                let product = |at: usize| {
                    let of_block = at / block;
                    let zero = zeros
                        .map_or(1 << (bits - 1), |zeros| code(bits, &zeros[column * zero_row..], of_block));
                    let code = code(bits, &weights[column * row..], at);
                    let scale = f64::from(scales[column * blocks + of_block]);
                    let weight = (f64::from(code) - f64::from(zero)) * scale;
                    let step = f64::from(sides[side].scales[of_block]);
                    weight * step * (f64::from(values[side][at]) / step).round_ties_even()
                };
                (0..k).map(product).sum()
            };
            let mut plain = vec![0.0; count * sides.len()];
            multiply(Isa::Scalar, &columns, &sides, &mut plain);
            for (at, got) in plain.iter().enumerate() {
                let expected = expected(at / sides.len(), at % sides.len());
                let error = (f64::from(*got) - expected).abs();
                let least = f64::from(300_u16 << (bits - 4));
                assert!(error <= 1e-5 * expected.abs().max(least), "{layout:?} {blocks}: {got} {expected}");
            }
            for isa in Isa::available() {
                assert_eq!(quantize_on(isa, &values[0]), quantized[0], "{isa:?}");
                let mut to = vec![0.0; plain.len()];
                multiply(isa, &columns, &sides, &mut to);
                let same = to.iter().zip(&plain).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "{isa:?} {layout:?} {blocks}");
            }
        }
    }
}
