//! The one micro-kernel of byte products, written over vectors of bytes in groups of four: a tile
//! of sums from rows of bytes and strips of columns.
//!
//! Sums wrap in 32 bits, so that their order does not matter.

use super::MAX_ROWS;
use super::finish::Run;
use crate::simd::Simd;
use crate::simd::bytes::{ByteLanes, CodeLanes, Lanes};

/// What one call works on.
///
/// Steps come in runs: a run is a number of groups of four steps, side by side in a row and at
/// equal distances on the right side, and each run starts at an offset of its own in both. A packed
/// matrix is one run; the windows of a convolution, be they rows or columns, are a run over the
/// channels for each position of the kernel.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tile {
    /// Where each row of bytes starts, with four bytes for each group of steps.
    pub(super) a: [*const u8; MAX_ROWS],
    /// Four bytes of each column.
    pub(super) b: *const u8,
    /// From a group of steps to the next.
    pub(super) b_step: usize,
    /// Where each run starts behind the rows, and behind `b`.
    pub(super) starts: *const [usize; 2],
    pub(super) runs: usize,
    /// Groups of steps in a run.
    pub(super) groups: usize,
    pub(super) sums: *mut i32,
    /// From a row of sums to the next.
    pub(super) sums_row: usize,
}

/// How the sums of a tile become codes, where each filter has a term and a factor, be filters the
/// rows or the columns: `round(min((sum + term) * factor, greatest)) + zero`, nearest in the range
/// of bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Coding<'a> {
    /// Those of the tile's rows, or of its columns, of whole vectors.
    pub(super) terms: *const i32,
    pub(super) factors: *const f32,
    pub(super) greatest: f32,
    /// Whether all factors are less than 1, so that products are integers of 32 bits in any case.
    pub(super) is_small: bool,
    pub(super) zero: i32,
    pub(super) signed: bool,
    /// Columns that are wanted, at most 64 in all.
    pub(super) runs: &'a [Run],
    pub(super) to: *mut u8,
    /// From a row of codes to the next.
    pub(super) to_row: usize,
}

/// A tile function of some instruction set.
pub(super) type TileFunction = unsafe fn(&Tile);

/// A tile function that makes codes of the sums, and does not store those.
pub(super) type CodingFunction = unsafe fn(&Tile, &Coding<'_>);

/// Computes `ROWS` rows and `VECTORS` vectors of sums. Rows are signed and columns unsigned where
/// `SIGNED_ROWS`, else it is the other way round.
///
/// # Safety
///
/// `a` holds the bytes of all groups of all runs in each row, each group of steps of `b` and each
/// row of `sums` as many as the vectors, and the CPU has the instructions of `L`.
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
    // SAFETY: the caller vouches for the pointers.
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

/// As [`compute`], but the sums become codes where they are. The signed side are the filters.
///
/// # Safety
///
/// As [`compute`], but for `sums`; there is a term and a factor for each filter, and a place for
/// each row and each wanted column.
#[inline(always)]
pub(super) unsafe fn compute_codes<
    L: CodeLanes,
    const ROWS: usize,
    const VECTORS: usize,
    const SIGNED_ROWS: bool,
>(
    lanes: L,
    tile: &Tile,
    coding: &Coding<'_>,
) {
    let simd = lanes.base();
    let mut terms = [[simd.splat_i32(0); VECTORS]; ROWS];
    // SAFETY: the caller vouches for the pointers.
    unsafe {
        for row in 0..ROWS {
            for vector in 0..VECTORS {
                terms[row][vector] = match SIGNED_ROWS {
                    true => simd.splat_i32(*coding.terms.add(row)),
                    false => simd.to_bits(simd.load_ptr(coding.terms.add(vector * L::Base::LANES).cast())),
                };
            }
        }
        let sums = sums::<L, ROWS, VECTORS, SIGNED_ROWS>(lanes, tile, terms);
        match coding.is_small {
            true => store_codes::<L, ROWS, VECTORS, SIGNED_ROWS, true>(lanes, &sums, coding),
            false => store_codes::<L, ROWS, VECTORS, SIGNED_ROWS, false>(lanes, &sums, coding),
        }
    }
}

/// Stores the sums of a tile as codes.
///
/// # Safety
///
/// As [`compute_codes`].
#[inline(always)]
unsafe fn store_codes<
    L: CodeLanes,
    const ROWS: usize,
    const VECTORS: usize,
    const SIGNED_ROWS: bool,
    const SMALL: bool,
>(
    lanes: L,
    sums: &[[Lanes<L>; VECTORS]; ROWS],
    coding: &Coding<'_>,
) {
    let (simd, greatest) = (lanes.base(), lanes.base().splat(coding.greatest));
    // SAFETY: the caller vouches for the pointers.
    unsafe {
        for row in 0..ROWS {
            let mut whole = [simd.splat_i32(0); VECTORS];
            for vector in 0..VECTORS {
                let factor = match SIGNED_ROWS {
                    true => simd.splat(*coding.factors.add(row)),
                    false => simd.load_ptr(coding.factors.add(vector * L::Base::LANES)),
                };
                let value = simd.mul(simd.to_f32(sums[row][vector]), factor);
                // What is below all integers, or is not a number, becomes the least of them.
                let value = if SMALL { value } else { simd.min_or_second(greatest, value) };
                whole[vector] = simd.to_i32(value);
            }
            let codes = lanes.pack_codes(whole, coding.zero, coding.signed);
            let to = coding.to.wrapping_add(row * coding.to_row);
            for run in coding.runs {
                let mask = (u64::MAX >> (64 - run.len)) << run.first;
                lanes.store_bytes_ptr(to.wrapping_add(run.to).wrapping_sub(run.first), codes, mask);
            }
        }
    }
}

/// The sums of a tile, added to what is there.
///
/// # Safety
///
/// As [`compute`], but for `sums`.
#[inline(always)]
unsafe fn sums<L: ByteLanes, const ROWS: usize, const VECTORS: usize, const SIGNED_ROWS: bool>(
    lanes: L,
    tile: &Tile,
    mut sums: [[Lanes<L>; VECTORS]; ROWS],
) -> [[Lanes<L>; VECTORS]; ROWS] {
    let (simd, width) = (lanes.base(), 4 * L::Base::LANES);
    // SAFETY: the caller vouches for the pointers, and the counts bound the offsets.
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
