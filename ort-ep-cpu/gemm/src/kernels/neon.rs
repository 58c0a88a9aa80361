//! NEON micro-kernel: tiles of 8 rows by 12 columns. Its speed has not been measured.

use super::panels;
use super::tile::{AddRows, Tile, TileFunction, add_rows, compute, dot};
use super::{CopyRows, Kernel, copy_rows, transpose_plain};
use ort_cpu_vector::simd::Neon;
use ort_cpu_vector::simd::steps::Singles;

functions!(Neon);

static WHOLE: [TileFunction; 24] = tiles!(false, 3: 1 2 3 4 5 6 7 8);
static PARTIAL: [TileFunction; 24] = tiles!(true, 3: 1 2 3 4 5 6 7 8);

pub(super) static KERNEL: Kernel = Kernel {
    rows: 8,
    vectors: 3,
    lanes: 4,
    whole: &WHOLE,
    partial: &PARTIAL,
    add_rows: rows,
    dot: inner,
    copy_rows: copies,
    transpose: transpose_plain,
    few_rows: [panels::<1, 3, 4>, panels::<2, 3, 2>],
    few_columns: None,
    pairs: None,
};
