//! The one micro-kernel of byte products, written over vectors of bytes in groups of four: a tile of sums from rows of
//! bytes and strips of columns.
//!
//! Sums wrap in 32 bits, so that their order does not matter.

use crate::simd::Simd;
use crate::simd::bytes::ByteLanes;

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

/// A tile function of some instruction set.
pub(super) type TileFunction = unsafe fn(&Tile);

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
        for row in 0..ROWS {
            for vector in 0..VECTORS {
                let to = tile.sums.add(row * tile.sums_row + vector * L::Base::LANES);
                simd.store_ptr(to.cast(), simd.from_bits(sums[row][vector]));
            }
        }
    }
}
