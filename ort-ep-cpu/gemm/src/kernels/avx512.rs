//! AVX-512 micro-kernel: tiles of 8 rows by 48 columns, with masks at the edges.

use super::tile::{AddRows, Tile, TileFunction, add_rows, compute, dot};
use super::{CopyRows, Kernel, copy_rows};
use ort_cpu_vector::simd::Avx512;
use ort_cpu_vector::simd::steps::Singles;

functions!(
    Avx512::new_unchecked(),
    target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
);

static WHOLE: [TileFunction; 24] = tiles!(false, 3: 1 2 3 4 5 6 7 8);
static PARTIAL: [TileFunction; 24] = tiles!(true, 3: 1 2 3 4 5 6 7 8);

pub(super) static KERNEL: Kernel = Kernel {
    rows: 8,
    vectors: 3,
    lanes: 16,
    whole: &WHOLE,
    partial: &PARTIAL,
    add_rows: rows,
    dot: inner,
    copy_rows: copies,
    transpose: super::avx2::transpose,
    pairs: None,
};
