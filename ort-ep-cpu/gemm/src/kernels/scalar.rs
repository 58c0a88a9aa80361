//! Portable micro-kernel in plain Rust: tiles of 4 rows by 8 columns, which the compiler may
//! vectorise for its baseline target.

use super::panels;
use super::tile::{AddRows, Tile, TileFunction, add_rows, compute, dot};
use super::{CopyRows, Kernel, copy_rows, transpose_plain};
use ort_cpu_vector::simd::Portable;
use ort_cpu_vector::simd::steps::Singles;

functions!(Portable);

static WHOLE: [TileFunction; 8] = tiles!(false, 2: 1 2 3 4);
static PARTIAL: [TileFunction; 8] = tiles!(true, 2: 1 2 3 4);

pub(super) static KERNEL: Kernel = Kernel {
    rows: 4,
    vectors: 2,
    lanes: 4,
    whole: &WHOLE,
    partial: &PARTIAL,
    add_rows: rows,
    dot: inner,
    copy_rows: copies,
    transpose: transpose_plain,
    few_rows: [panels::<1, 2, 4>, panels::<2, 2, 2>],
    few_columns: None,
    pairs: None,
};
