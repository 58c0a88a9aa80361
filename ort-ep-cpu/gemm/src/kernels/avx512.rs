//! AVX-512 micro-kernel: tiles of 8 rows by 48 columns, with masks at the edges.

use super::columns::{self, FewColumns};
use super::panels;
use super::tile::{AddRows, Tile, TileFunction, add_rows, compute, dot};
use super::{CopyRows, Kernel, copy_rows};
use ort_cpu_vector::simd::steps::Singles;
use ort_cpu_vector::simd::{Avx2, Avx512};

functions!(
    Avx512::new_unchecked(),
    target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
);

/// Rows of a tile.
const ROWS: usize = 8;

/// Computes few columns of some tiles; see [`columns::compute`]. The rows of a tile fill a vector
/// of AVX2.
///
/// # Safety
///
/// As [`columns::compute`], and the CPU has the features that this function enables.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn columns(tiles: &[Tile]) {
    // SAFETY: `columns` has the contract of `compute`, and `Kernel::of` detected the features
    // before it chose this kernel.
    unsafe { columns::compute::<_, _, ROWS>(Avx2::new_unchecked(), Avx512::new_unchecked(), tiles) }
}

static WHOLE: [TileFunction; 24] = tiles!(false, 3: 1 2 3 4 5 6 7 8);
static PARTIAL: [TileFunction; 24] = tiles!(true, 3: 1 2 3 4 5 6 7 8);

pub(super) static KERNEL: Kernel = Kernel {
    rows: ROWS,
    vectors: 3,
    lanes: 16,
    whole: &WHOLE,
    partial: &PARTIAL,
    add_rows: rows,
    dot: inner,
    copy_rows: copies,
    transpose: super::avx2::transpose,
    few_rows: [panels::<1, 3, 4>, panels::<2, 3, 2>],
    few_columns: Some(FewColumns { rows: ROWS, compute: columns, beside: None }),
    pairs: None,
};
