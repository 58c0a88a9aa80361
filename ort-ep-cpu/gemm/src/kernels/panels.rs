//! GEMM micro-kernel for one or two rows of A, which takes several panels of B at once.
//!
//! With so few rows, the FMAs of one panel are not enough to hide their latency. Sums run over k in
//! order with one FMA per k step, as in a tile, so the bits are the same.

use super::tile::{AHEAD, FEW_ROWS, LINE, Tile, finish, step};
use ort_cpu_vector::simd::Simd;
use ort_cpu_vector::simd::steps::Steps;

/// The most panels of a call.
pub(super) const MOST_PANELS: usize = 4;

/// Computes a row of tiles over neighbouring panels that are packed, with all columns.
pub(super) type PanelsFunction = unsafe fn(&[Tile]);

/// The functions of an instruction set for one row, and for two.
pub(super) type FewRows = [PanelsFunction; FEW_ROWS];

/// Returns how many panels the function for `rows` takes.
pub(super) const fn panels_of(rows: usize) -> usize {
    MOST_PANELS / rows
}

/// Computes `ROWS` rows over `PANELS` panels.
///
/// # Safety
///
/// Every pointer of `tiles` must be valid for the rows, k steps and columns that the tile names.
/// The tiles have the same rows of A. Their panels are packed at equal distances, and have
/// `VECTORS * LANES` columns.
#[inline(always)]
pub(super) unsafe fn compute<T: Steps, const ROWS: usize, const VECTORS: usize, const PANELS: usize>(
    steps: T,
    tiles: &[Tile],
) {
    const { assert!(PANELS == panels_of(ROWS) && PANELS > 1) };
    let (s, lanes) = (steps.base(), T::Base::LANES);
    let Some(tiles) = tiles.first_chunk::<PANELS>() else { return };
    let Tile { k, mut a, a_row, a_step, mut b, .. } = tiles[0];
    // SAFETY: both are in the same packed matrix.
    let next = unsafe { tiles[1].b.offset_from(b) }.cast_unsigned();
    let mut sums = [[[s.splat(0.0); VECTORS]; ROWS]; PANELS];
    // SAFETY: the caller guarantees the pointers. `k`, `ROWS` and the width of the panels bound the
    // offsets, so they stay inside the panels.
    unsafe {
        for _ in 0..k {
            for panel in 0..PANELS {
                let b = b.wrapping_add(panel * next);
                for line in 0..(VECTORS * lanes).div_ceil(LINE) {
                    s.prefetch(b.wrapping_add(AHEAD + line * LINE));
                }
                step::<T, ROWS, VECTORS, false>(steps, &mut sums[panel], (a, a_row), b, lanes);
            }
            a = a.wrapping_add(a_step);
            b = b.wrapping_add(VECTORS * lanes);
        }
        for (sums, tile) in sums.into_iter().zip(tiles) {
            finish::<_, ROWS, VECTORS>(s, sums, tile, lanes);
        }
    }
}
