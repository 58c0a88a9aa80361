//! AVX2 and FMA micro-kernel: tiles of 6 rows by 16 columns, with masked loads and stores at the
//! edges.

use core::arch::x86_64::*;

use super::columns::{self, FewColumns};
use super::panels;
use super::tile::{AddRows, Tile, TileFunction, add_rows, compute, dot};
use super::{CopyRows, Kernel, Transpose, copy_rows, transpose_plain};
use ort_cpu_vector::simd::Avx2;
use ort_cpu_vector::simd::steps::Singles;

functions!(Avx2::new_unchecked(), target_feature(enable = "avx2,fma,f16c"));

/// Rows of a tile.
const ROWS: usize = 6;

/// Computes few columns of some tiles; see [`columns::compute`].
///
/// # Safety
///
/// As [`columns::compute`], and the CPU has the features that this function enables.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn columns(tiles: &[Tile]) {
    // SAFETY: `columns` has the contract of `compute`, and `Kernel::of` detected the features
    // before it chose this kernel.
    unsafe { columns::compute::<_, _, ROWS>(Avx2::new_unchecked(), Avx2::new_unchecked(), tiles) }
}

/// Computes tiles and a column beside them; see [`columns::beside`].
///
/// # Safety
///
/// As [`columns::beside`], and the CPU has the features that this function enables.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn beside(tile: &mut Tile, column: &mut Tile) {
    // SAFETY: `beside` has the contract of the function that it calls, and `Kernel::of` detected
    // the features before it chose this kernel.
    unsafe { columns::beside::<_, ROWS, 2>(Avx2::new_unchecked(), tile, column) }
}

/// Transposes in squares of 8 by 8, with a scalar loop for the rest.
///
/// # Safety
///
/// The CPU has AVX2 and FMA. `from` is valid for reading `rows` rows of `columns` values that start
/// `from_row` apart. `to` is valid for writing `columns` rows of `rows` values that start `to_row`
/// apart. Both are aligned for `f32` (vectors need no more), and they do not overlap.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn transpose(call: &Transpose) {
    let (rows, columns) = (call.rows & !7, call.columns & !7);
    // SAFETY: the squares are inside the matrix, and the caller guarantees that both matrices are
    // valid.
    unsafe {
        for row in (0..rows).step_by(8) {
            for column in (0..columns).step_by(8) {
                let from = call.from.add(row * call.from_row + column);
                let to = call.to.add(column * call.to_row + row);
                transpose_square(from, call.from_row, to, call.to_row);
            }
        }
        if columns < call.columns {
            let from = call.from.add(columns);
            let to = call.to.add(columns * call.to_row);
            transpose_plain(&Transpose { from, to, columns: call.columns - columns, ..*call });
        }
        if rows < call.rows {
            let from = call.from.add(rows * call.from_row);
            let to = call.to.add(rows);
            transpose_plain(&Transpose { from, to, rows: call.rows - rows, columns, ..*call });
        }
    }
}

/// Transposes one square of 8 by 8 in registers.
///
/// # Safety
///
/// Needs AVX2, and both squares must be valid.
#[inline(always)]
unsafe fn transpose_square(from: *const f32, from_row: usize, to: *mut f32, to_row: usize) {
    // SAFETY: the caller guarantees that both squares are valid.
    unsafe {
        let mut row = [_mm256_setzero_ps(); 8];
        for index in 0..8 {
            row[index] = _mm256_loadu_ps(from.add(index * from_row));
        }
        let mut pair = [_mm256_setzero_ps(); 8];
        for index in 0..4 {
            pair[2 * index] = _mm256_unpacklo_ps(row[2 * index], row[2 * index + 1]);
            pair[2 * index + 1] = _mm256_unpackhi_ps(row[2 * index], row[2 * index + 1]);
        }
        let mut quad = [_mm256_setzero_ps(); 8];
        for half in 0..2 {
            let (low, high) = (4 * half, 4 * half + 2);
            quad[low] = _mm256_shuffle_ps::<0x44>(pair[low], pair[high]);
            quad[low + 1] = _mm256_shuffle_ps::<0xEE>(pair[low], pair[high]);
            quad[low + 2] = _mm256_shuffle_ps::<0x44>(pair[low + 1], pair[high + 1]);
            quad[low + 3] = _mm256_shuffle_ps::<0xEE>(pair[low + 1], pair[high + 1]);
        }
        for index in 0..4 {
            let near = _mm256_permute2f128_ps::<0x20>(quad[index], quad[index + 4]);
            let far = _mm256_permute2f128_ps::<0x31>(quad[index], quad[index + 4]);
            _mm256_storeu_ps(to.add(index * to_row), near);
            _mm256_storeu_ps(to.add((index + 4) * to_row), far);
        }
    }
}

static WHOLE: [TileFunction; 12] = tiles!(false, 2: 1 2 3 4 5 6);
static PARTIAL: [TileFunction; 12] = tiles!(true, 2: 1 2 3 4 5 6);

pub(super) static KERNEL: Kernel = Kernel {
    rows: ROWS,
    vectors: 2,
    lanes: 8,
    whole: &WHOLE,
    partial: &PARTIAL,
    add_rows: rows,
    dot: inner,
    copy_rows: copies,
    transpose,
    few_rows: [panels::<1, 2, 4>, panels::<2, 2, 2>],
    few_columns: Some(FewColumns { rows: ROWS, compute: columns, beside: Some(beside) }),
    pairs: None,
};
