//! The 8-bit micro-kernel, generic over vectors of byte quadruples: a register tile of accumulators
//! from rows of bytes and panels of columns.
//!
//! Accumulators wrap in 32 bits, so the summation order does not matter.

use super::MAX_ROWS;
use super::finish::Run;
use ort_cpu_vector::simd::Simd;
use ort_cpu_vector::simd::bytes::{ByteLanes, Lanes, QuantizeLanes};

/// The arguments of a tile function.
///
/// k steps come in runs. A run is a number of groups of four k steps, contiguous in a row of A and
/// at equal strides in B. Each run starts at its own offset in both. A packed matrix is one run.
/// The windows of a convolution, as rows or as columns, are one run over the channels for each
/// kernel position.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tile {
    /// The start of each row of bytes, which has four bytes for each group of k steps.
    pub(super) a: [*const u8; MAX_ROWS],
    /// Four bytes of each column.
    pub(super) b: *const u8,
    /// Stride from one group of k steps to the next.
    pub(super) b_step: usize,
    /// The offset of each run in the rows of A, and in B.
    pub(super) starts: *const [usize; 2],
    pub(super) runs: usize,
    /// Groups of four k steps in a run.
    pub(super) groups: usize,
    pub(super) sums: *mut i32,
    /// Stride from one row of accumulators to the next.
    pub(super) sums_row: usize,
}

/// Requantization in registers, with one term and one factor per filter:
/// `round(min((sum + term) * factor, greatest)) + zero`, saturated to the range of bytes. Filters
/// are either the rows or the columns.
#[derive(Clone, Copy, Debug)]
pub(super) struct Requantization<'a> {
    /// The terms of the tile's rows, or of its columns in whole vectors.
    pub(super) terms: *const i32,
    pub(super) factors: *const f32,
    pub(super) greatest: f32,
    /// Whether all factors are less than 1, so that `sum * factor` always fits in 32 bits.
    pub(super) is_small: bool,
    pub(super) zero: i32,
    pub(super) signed: bool,
    /// The columns to store, at most 64 in all.
    pub(super) runs: &'a [Run],
    pub(super) to: *mut u8,
    /// Stride from one row of quantized results to the next.
    pub(super) to_row: usize,
    /// Tiles below one another, with the same terms and factors: 1 if filters are rows.
    pub(super) tiles: usize,
    /// Stride in A from one tile to the next.
    pub(super) a_step: usize,
}

/// A tile function of some instruction set.
pub(super) type TileFunction = unsafe fn(&Tile);

/// A tile function that requantizes its accumulators instead of storing them.
pub(super) type RequantizeFunction = unsafe fn(&Tile, &Requantization<'_>);

/// Computes `ROWS` rows and `VECTORS` vectors of accumulators. With `SIGNED_ROWS`, rows are signed
/// and columns unsigned; otherwise it is the other way round.
///
/// # Safety
///
/// `a` holds the bytes of all groups of all runs in each row. Each group of k steps of `b` and each
/// row of `sums` hold `VECTORS` vectors. The CPU has the instructions of `L`.
#[inline(always)]
pub(super) unsafe fn compute<
    L: ByteLanes,
    const ROWS: usize,
    const VECTORS: usize,
    const SIGNED_ROWS: bool,
>(
    lanes: L,
    tile: &Tile,
) {
    let simd = lanes.base();
    // SAFETY: the caller guarantees that `sums` holds `ROWS` rows of `VECTORS` vectors.
    unsafe {
        let zeros = [[simd.splat_i32(0); VECTORS]; ROWS];
        let sums = sums::<L, ROWS, VECTORS, SIGNED_ROWS>(lanes, tile, zeros);
        for row in 0..ROWS {
            for vector in 0..VECTORS {
                let to = tile.sums.add(row * tile.sums_row + vector * L::Base::LANES);
                simd.store_ptr(to.cast(), simd.from_bits(sums[row][vector]));
            }
        }
    }
}

/// Like [`compute`], but requantizes the accumulators in registers, of one or more tiles. The
/// signed operand holds the filters.
///
/// # Safety
///
/// As [`compute`], except for `sums`, for each tile. There is a term and a factor for each filter,
/// and the result holds each row and each column to store.
#[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "only VNNI implements QuantizeLanes"))]
#[inline(always)]
pub(super) unsafe fn compute_quantized<
    L: QuantizeLanes,
    const ROWS: usize,
    const VECTORS: usize,
    const SIGNED_ROWS: bool,
>(
    lanes: L,
    tile: &Tile,
    requantization: &Requantization<'_>,
) {
    let simd = lanes.base();
    let mut terms = [[simd.splat_i32(0); VECTORS]; ROWS];
    // SAFETY: the caller guarantees a term for each filter, and a result for each stored row and
    // column.
    unsafe {
        for row in 0..ROWS {
            for vector in 0..VECTORS {
                terms[row][vector] = match SIGNED_ROWS {
                    true => simd.splat_i32(*requantization.terms.add(row)),
                    false => {
                        simd.to_bits(simd.load_ptr(requantization.terms.add(vector * L::Base::LANES).cast()))
                    }
                };
            }
        }
        let (mut tile, mut requantization) = (*tile, *requantization);
        for _ in 0..requantization.tiles {
            let sums = sums::<L, ROWS, VECTORS, SIGNED_ROWS>(lanes, &tile, terms);
            // Small factors save a clamp per vector.
            match requantization.is_small {
                true => store_quantized::<L, ROWS, VECTORS, SIGNED_ROWS, true>(lanes, &sums, &requantization),
                false => {
                    store_quantized::<L, ROWS, VECTORS, SIGNED_ROWS, false>(lanes, &sums, &requantization);
                }
            }
            for row in 0..ROWS {
                tile.a[row] = tile.a[row].wrapping_add(requantization.a_step);
            }
            requantization.to = requantization.to.wrapping_add(ROWS * requantization.to_row);
        }
    }
}

/// Requantizes the accumulators of a tile and stores them.
///
/// # Safety
///
/// As [`compute_quantized`].
#[inline(always)]
unsafe fn store_quantized<
    L: QuantizeLanes,
    const ROWS: usize,
    const VECTORS: usize,
    const SIGNED_ROWS: bool,
    const SMALL: bool,
>(
    lanes: L,
    sums: &[[Lanes<L>; VECTORS]; ROWS],
    requantization: &Requantization<'_>,
) {
    let (simd, greatest) = (lanes.base(), lanes.base().splat(requantization.greatest));
    // SAFETY: the caller guarantees a factor for each filter. The mask selects only the columns of
    // `run`, which the result holds.
    unsafe {
        for row in 0..ROWS {
            let mut whole = [simd.splat_i32(0); VECTORS];
            for vector in 0..VECTORS {
                let factor = match SIGNED_ROWS {
                    true => simd.splat(*requantization.factors.add(row)),
                    false => simd.load_ptr(requantization.factors.add(vector * L::Base::LANES)),
                };
                let value = simd.mul(simd.to_f32(sums[row][vector]), factor);
                // The conversion turns values below the `i32` range, and NaN, into the smallest
                // `i32`, which saturates to the smallest byte. Only large values must be clamped
                // first.
                let value = if SMALL { value } else { simd.min_or_second(greatest, value) };
                whole[vector] = simd.to_i32(value);
            }
            let quantized = lanes.pack_quantized(whole, requantization.zero, requantization.signed);
            let to = requantization.to.wrapping_add(row * requantization.to_row);
            for run in requantization.runs {
                let mask = (u64::MAX >> (64 - run.len)) << run.first;
                lanes.store_bytes_ptr(to.wrapping_add(run.to).wrapping_sub(run.first), quantized, mask);
            }
        }
    }
}

/// Accumulates a tile on top of the initial values in `sums`.
///
/// # Safety
///
/// As [`compute`], except for `sums`.
#[inline(always)]
unsafe fn sums<L: ByteLanes, const ROWS: usize, const VECTORS: usize, const SIGNED_ROWS: bool>(
    lanes: L,
    tile: &Tile,
    mut sums: [[Lanes<L>; VECTORS]; ROWS],
) -> [[Lanes<L>; VECTORS]; ROWS] {
    let (simd, width) = (lanes.base(), 4 * L::Base::LANES);
    // SAFETY: the caller guarantees the rows and the groups of `b`, and `runs` and `groups` bound
    // the offsets.
    unsafe {
        for run in 0..tile.runs {
            let [left, right] = *tile.starts.add(run);
            let (mut a, mut b) = ([tile.b; ROWS], tile.b.wrapping_add(right));
            for row in 0..ROWS {
                a[row] = tile.a[row].wrapping_add(left);
            }
            for group in 0..tile.groups {
                let mut columns = [simd.splat_i32(0); VECTORS];
                for vector in 0..VECTORS {
                    columns[vector] = simd.to_bits(simd.load_ptr(b.add(vector * width).cast()));
                }
                for row in 0..ROWS {
                    let four = simd.splat_i32(a[row].add(4 * group).cast::<i32>().read_unaligned());
                    for vector in 0..VECTORS {
                        let (unsigned, signed) = match SIGNED_ROWS {
                            true => (columns[vector], four),
                            false => (four, columns[vector]),
                        };
                        sums[row][vector] = lanes.dot(sums[row][vector], unsigned, signed);
                    }
                }
                b = b.wrapping_add(tile.b_step);
            }
        }
    }
    sums
}
