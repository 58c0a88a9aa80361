//! GEMM micro-kernel for the last columns of C, if they fill only a small part of a vector.
//!
//! Lanes are rows here: a packed A holds the rows of a k step contiguously, so one FMA adds a k
//! step to all rows of a column. With columns as lanes, the last of the 49 pixels of a 7 by 7 image
//! would cost as much as a whole vector. Sums run over k in order with one FMA per k step, as in a
//! tile, so the bits are the same.

use super::tile::{STEPS, Tile, finish, step};
use ort_cpu_vector::simd::steps::Singles;
use ort_cpu_vector::simd::{MAX_LANES, Simd};

/// The most columns.
pub(super) const MOST_COLUMNS: usize = 4;

/// The most tiles of a call. FMAs of several tiles hide each other's latency.
pub(super) const MOST_TILES: usize = 8;

/// k steps that the columns are prefetched ahead: each is in a cache line of its own.
const AHEAD: usize = 16;

/// The function of an instruction set.
pub(super) struct FewColumns {
    /// The rows of a tile, all of which are computed.
    pub(super) rows: usize,
    /// Computes tiles with the same columns.
    pub(super) compute: unsafe fn(&[Tile]),
    /// Computes a run of whole tiles and of the one column that follows them, if the tiles leave a
    /// register for it.
    pub(super) beside: Option<unsafe fn(&mut Tile, &mut Tile)>,
}

/// Computes up to [`MOST_TILES`] tiles with the same columns, at most [`MOST_COLUMNS`]. The rows of
/// a tile are lanes of `N`. A is packed, so `a_row` is not used. The epilogue runs in vectors of
/// `W`, as that of all other tiles.
///
/// # Safety
///
/// Every pointer of `tiles` must be valid for the rows, k steps and columns that the tile names.
#[inline(always)]
pub(super) unsafe fn compute<N: Simd, W: Simd, const ROWS: usize>(narrow: N, wide: W, tiles: &[Tile]) {
    // Loops, because a closure would not be compiled for the instruction set.
    // SAFETY: `at_once` has the contract of this function.
    unsafe {
        if tiles.first().is_some_and(|tile| tile.columns == 1) {
            let (eights, rest) = tiles.as_chunks::<MOST_TILES>();
            let (twos, ones) = rest.as_chunks::<2>();
            for tiles in eights {
                at_once::<_, _, ROWS, 1, MOST_TILES>(narrow, wide, tiles);
            }
            for tiles in twos {
                at_once::<_, _, ROWS, 1, 2>(narrow, wide, tiles);
            }
            for tile in ones {
                at_once::<_, _, ROWS, 1, 1>(narrow, wide, &[*tile]);
            }
        } else {
            let (twos, ones) = tiles.as_chunks::<2>();
            for tiles in twos {
                at_once::<_, _, ROWS, MOST_COLUMNS, 2>(narrow, wide, tiles);
            }
            for tile in ones {
                at_once::<_, _, ROWS, MOST_COLUMNS, 1>(narrow, wide, &[*tile]);
            }
        }
    }
}

/// Computes `TILES` tiles together.
///
/// # Safety
///
/// As [`compute`].
#[inline(always)]
unsafe fn at_once<N: Simd, W: Simd, const ROWS: usize, const COLUMNS: usize, const TILES: usize>(
    narrow: N,
    wide: W,
    tiles: &[Tile; TILES],
) {
    const { assert!(ROWS <= N::LANES && COLUMNS <= W::LANES && COLUMNS > 0 && TILES > 0) };
    let Tile { k, columns, mut b, a_step, b_step, .. } = tiles[0];
    // Columns that are missing repeat the last one.
    let mut places = [0; COLUMNS];
    places.iter_mut().enumerate().for_each(|(column, place)| *place = column.min(columns - 1));
    let mut a = [std::ptr::null(); TILES];
    a.iter_mut().zip(tiles).for_each(|(a, tile)| *a = tile.a);
    let mut sums = [[narrow.splat(0.0); COLUMNS]; TILES];
    // SAFETY: the caller guarantees the pointers. `k`, `ROWS` and `columns` bound the offsets. The
    // lanes beyond the rows of a k step read the next ones, except at the end of the panel.
    unsafe {
        for left in (0..k).rev() {
            narrow.prefetch(b.wrapping_add(AHEAD * b_step));
            let mut factors = [narrow.splat(0.0); COLUMNS];
            for (factor, place) in factors.iter_mut().zip(places) {
                *factor = narrow.splat(*b.add(place));
            }
            for (a, sums) in a.iter_mut().zip(&mut sums) {
                let rows = match (left + 1) * ROWS < N::LANES {
                    true => narrow.load_partial_ptr(*a, ROWS, 0.0),
                    false => narrow.load_ptr(*a),
                };
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

/// Computes a run of tiles with `VECTORS` whole vectors, and one column beside each: a read of A
/// from memory serves both. There are at most [`STEPS`] k steps.
///
/// # Safety
///
/// As [`compute`], for both runs. They have the same rows of A.
#[inline(always)]
pub(super) unsafe fn beside<S: Simd, const ROWS: usize, const VECTORS: usize>(
    s: S,
    tile: &mut Tile,
    column: &mut Tile,
) {
    // The read of the last step but one ends inside the panel.
    const { assert!(ROWS <= S::LANES && S::LANES <= 2 * ROWS) };
    let k = tile.k;
    // In B, each value of the column is in a cache line of its own, and they would not stay in L1.
    let mut factors = [0.0; STEPS];
    // SAFETY: the caller guarantees the pointers. `k`, `ROWS` and the width of the panel bound the
    // offsets. The lanes beyond the rows of a k step read the next ones, except at the end of the
    // panel.
    unsafe {
        for (at, factor) in factors[..k].iter_mut().enumerate() {
            *factor = *column.b.add(at * column.b_step);
        }
        while tile.count > 0 {
            let mut sums = [[s.splat(0.0); VECTORS]; ROWS];
            let mut lanes = s.splat(0.0);
            let (mut a, mut b, mut ahead) = (tile.a, tile.b, tile.prefetch);
            // A loop without the last step, whose short read would take registers from the sums.
            for factor in &factors[..k - 1] {
                s.prefetch(ahead);
                ahead = ahead.wrapping_add(tile.prefetch_step);
                step::<_, ROWS, VECTORS, false>(Singles(s), &mut sums, (a, 1), b, S::LANES);
                lanes = s.mul_add(s.load_ptr(a), s.splat(*factor), lanes);
                a = a.wrapping_add(tile.a_step);
                b = b.wrapping_add(tile.b_step);
            }
            step::<_, ROWS, VECTORS, false>(Singles(s), &mut sums, (a, 1), b, S::LANES);
            lanes = s.mul_add(s.load_partial_ptr(a, ROWS, 0.0), s.splat(factors[k - 1]), lanes);
            finish::<S, ROWS, VECTORS>(s, sums, tile, S::LANES);
            finish::<S, ROWS, 1>(s, turned(s, s, [lanes]), column, 1);
            tile.advance();
            column.advance();
            tile.count -= 1;
        }
    }
}

/// Returns the rows of these columns.
#[inline(always)]
fn turned<N: Simd, W: Simd, const ROWS: usize, const COLUMNS: usize>(
    narrow: N,
    wide: W,
    columns: [N::F32; COLUMNS],
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
