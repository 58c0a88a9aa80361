//! The one micro-kernel of byte products, written over vectors of bytes in groups of four: a tile of sums from rows of
//! bytes and strips of columns.
//!
//! Sums wrap in 32 bits, so that their order does not matter.

use super::finish::Run;
use crate::simd::Simd;
use crate::simd::bytes::{ByteLanes, CodeLanes, Lanes};

/// What one call works on.
///
/// Steps come in runs: a run is a number of groups of four steps at equal distances on the right side, and each run
/// starts at an offset of its own. A packed matrix is one run; the windows of a convolution are a run over the channels
/// for each position of the kernel.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tile {
    /// Rows of bytes, four of a row for each group of steps.
    pub(super) a: *const u8,
    /// From a row to the next.
    pub(super) a_row: usize,
    /// Four bytes of each column.
    pub(super) b: *const u8,
    /// From a group of steps to the next.
    pub(super) b_step: usize,
    /// Where each run starts behind `b`.
    pub(super) offsets: *const usize,
    pub(super) runs: usize,
    /// Groups of steps in a run.
    pub(super) groups: usize,
    pub(super) sums: *mut i32,
    /// From a row of sums to the next.
    pub(super) sums_row: usize,
}

/// How the sums of a tile become codes, where each row has a term and a factor and columns have none:
/// `round(min((sum + term) * factor, greatest)) + zero`, nearest in the range of bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Coding<'a> {
    /// Those of the tile's rows.
    pub(super) terms: *const i32,
    pub(super) factors: *const f32,
    pub(super) greatest: f32,
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

/// Computes `ROWS` rows and `VECTORS` vectors of sums. Rows are signed and columns unsigned where `SIGNED_ROWS`, else it
/// is the other way round.
///
/// # Safety
///
/// `a` holds the bytes of all groups of all runs in each row, each group of steps of `b` and each row of `sums` as many
/// as the vectors, and the CPU has the instructions of `L`.
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
        let sums = sums::<L, ROWS, VECTORS, SIGNED_ROWS>(lanes, tile);
        for row in 0..ROWS {
            for vector in 0..VECTORS {
                let to = tile.sums.add(row * tile.sums_row + vector * L::Base::LANES);
                simd.store_ptr(to.cast(), simd.from_bits(sums[row][vector]));
            }
        }
    }
}

/// As [`compute`] with signed rows, but the sums become codes where they are.
///
/// # Safety
///
/// As [`compute`], but for `sums`; there is a term, a factor and a place for each row, and a place for each wanted column.
#[inline(always)]
pub(super) unsafe fn compute_codes<L: CodeLanes, const ROWS: usize, const VECTORS: usize>(
    lanes: L,
    tile: &Tile,
    coding: &Coding<'_>,
) {
    let (simd, greatest) = (lanes.base(), lanes.base().splat(coding.greatest));
    // SAFETY: the caller vouches for the pointers.
    unsafe {
        let sums = sums::<L, ROWS, VECTORS, true>(lanes, tile);
        for row in 0..ROWS {
            let term = simd.splat_i32(*coding.terms.add(row));
            let factor = simd.splat(*coding.factors.add(row));
            let mut whole = [term; VECTORS];
            for vector in 0..VECTORS {
                let value = simd.mul(simd.to_f32(simd.add_i32(sums[row][vector], term)), factor);
                // What is below all integers, or is not a number, becomes the least of them.
                whole[vector] = simd.to_i32(simd.min_or_second(greatest, value));
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

/// The sums of a tile.
///
/// # Safety
///
/// As [`compute`], but for `sums`.
#[inline(always)]
unsafe fn sums<L: ByteLanes, const ROWS: usize, const VECTORS: usize, const SIGNED_ROWS: bool>(
    lanes: L,
    tile: &Tile,
) -> [[Lanes<L>; VECTORS]; ROWS] {
    let (simd, width) = (lanes.base(), 4 * L::Base::LANES);
    let mut sums = [[simd.splat_i32(0); VECTORS]; ROWS];
    let mut a = tile.a;
    // SAFETY: the caller vouches for the pointers, and the counts bound the offsets.
    unsafe {
        for run in 0..tile.runs {
            let mut b = tile.b.wrapping_add(*tile.offsets.add(run));
            for _ in 0..tile.groups {
                let mut columns = [simd.splat_i32(0); VECTORS];
                for vector in 0..VECTORS {
                    columns[vector] = simd.to_bits(simd.load_ptr(b.add(vector * width).cast()));
                }
                for row in 0..ROWS {
                    let four = simd.splat_i32(a.add(row * tile.a_row).cast::<i32>().read_unaligned());
                    for vector in 0..VECTORS {
                        let (unsigned, signed) = match SIGNED_ROWS {
                            true => (columns[vector], four),
                            false => (four, columns[vector]),
                        };
                        sums[row][vector] = lanes.dot(sums[row][vector], unsigned, signed);
                    }
                }
                a = a.wrapping_add(4);
                b = b.wrapping_add(tile.b_step);
            }
        }
    }
    sums
}
