//! GEMM micro-kernel for the last columns of C, if they fill only a small part of a vector.
//!
//! Lanes are rows here: a packed A holds the rows of a k step contiguously, so one FMA adds a k
//! step to all rows of a column. With columns as lanes, the last 4 of the 196 pixels of a 14 by 14
//! image would cost as much as 16. Sums run over k in order with one FMA per k step, as in a tile,
//! so the bits are the same.

use super::tile::{Tile, finish};
use ort_cpu_vector::simd::{MAX_LANES, Simd};

/// The most columns.
pub(super) const MOST_COLUMNS: usize = 4;

/// k steps that the columns are prefetched ahead: each is in a cache line of its own.
const AHEAD: usize = 16;

/// The functions of an instruction set.
pub(super) struct FewColumns {
    /// The rows of a tile, all of which are computed.
    pub(super) rows: usize,
    pub(super) one: unsafe fn(&[Tile; 1]),
    /// Two tiles with the same columns, whose FMAs hide each other's latency.
    pub(super) two: unsafe fn(&[Tile; 2]),
}

/// Computes tiles of as many rows as a vector of `N` has lanes, and at most [`MOST_COLUMNS`]
/// columns, the same columns in each. A is packed, so `a_row` is not used. The epilogue runs in
/// vectors of `W`, as that of all other tiles.
///
/// # Safety
///
/// Every pointer of `tiles` must be valid for the rows, k steps and columns that the tile names.
#[inline(always)]
pub(super) unsafe fn compute<N: Simd, W: Simd, const ROWS: usize, const TILES: usize>(
    narrow: N,
    wide: W,
    tiles: &[Tile; TILES],
) {
    const { assert!(N::LANES == ROWS && MOST_COLUMNS <= W::LANES && TILES > 0) };
    let Tile { k, columns, mut b, a_step, b_step, .. } = tiles[0];
    // Columns that are missing repeat the last one.
    let places = [0, 1, 2, 3].map(|column: usize| column.min(columns - 1));
    let mut a = [std::ptr::null(); TILES];
    for (a, tile) in a.iter_mut().zip(tiles) {
        *a = tile.a;
    }
    let mut sums = [[narrow.splat(0.0); MOST_COLUMNS]; TILES];
    // SAFETY: the caller guarantees the pointers. `k`, `ROWS` and `columns` bound the offsets.
    unsafe {
        for _ in 0..k {
            narrow.prefetch(b.wrapping_add(AHEAD * b_step));
            let mut factors = [narrow.splat(0.0); MOST_COLUMNS];
            for (factor, place) in factors.iter_mut().zip(places) {
                *factor = narrow.splat(*b.add(place));
            }
            for (a, sums) in a.iter_mut().zip(&mut sums) {
                let rows = narrow.load_ptr(*a);
                for (sum, factor) in sums.iter_mut().zip(factors) {
                    *sum = narrow.mul_add(rows, factor, *sum);
                }
                *a = a.wrapping_add(a_step);
            }
            b = b.wrapping_add(b_step);
        }
        for (sums, tile) in sums.into_iter().zip(tiles) {
            finish::<W, ROWS, 1>(wide, turned(narrow, wide, sums), tile, columns);
        }
    }
}

/// Returns the rows of these columns.
#[inline(always)]
fn turned<N: Simd, W: Simd, const ROWS: usize>(
    narrow: N,
    wide: W,
    columns: [N::F32; MOST_COLUMNS],
) -> [[W::F32; 1]; ROWS] {
    let mut values = [[0.0; MAX_LANES]; ROWS];
    for (column, sums) in columns.into_iter().enumerate() {
        let lanes = narrow.to_array(sums);
        for (row, lane) in values.iter_mut().zip(lanes) {
            row[column] = lane;
        }
    }
    let mut rows = [[wide.splat(0.0)]; ROWS];
    for (row, values) in rows.iter_mut().zip(&values) {
        row[0] = wide.from_array(values);
    }
    rows
}
