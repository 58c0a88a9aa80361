//! AVX-512 with VNNI: tiles of 8 rows by 48 columns, or of 6 by 64.

use super::ByteKernel;
use super::finish::Finish;
use super::tile::{Coding, CodingFunction, Tile, TileFunction, compute, compute_codes};
use crate::simd::bytes::Vnni;

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn tile<const ROWS: usize, const VECTORS: usize, const SIGNED_ROWS: bool>(call: &Tile) {
    // SAFETY: passed on; the caller has found the CPU to have these features.
    unsafe { compute::<Vnni, ROWS, VECTORS, SIGNED_ROWS>(Vnni::new_unchecked(), call) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn coded<const ROWS: usize, const VECTORS: usize>(call: &Tile, coding: &Coding<'_>) {
    // SAFETY: passed on; the caller has found the CPU to have these features.
    unsafe { compute_codes::<Vnni, ROWS, VECTORS>(Vnni::new_unchecked(), call, coding) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn finish(call: &Finish<'_>) {
    // SAFETY: passed on; the caller has found the CPU to have these features.
    unsafe { super::finish::finish(Vnni::new_unchecked(), call) }
}

macro_rules! row {
    ($signed:literal, $($rows:literal)*) => {
        [$([tile::<$rows, 1, $signed> as TileFunction, tile::<$rows, 2, $signed>, tile::<$rows, 3, $signed>]),*]
    };
}

static UNSIGNED_ROWS: [[TileFunction; 3]; 8] = row!(false, 1 2 3 4 5 6 7 8);
static SIGNED_ROWS: [[TileFunction; 3]; 8] = row!(true, 1 2 3 4 5 6 7 8);

macro_rules! coded {
    ($($rows:literal)*) => {
        [$([coded::<$rows, 1> as CodingFunction, coded::<$rows, 2>, coded::<$rows, 3>]),*]
    };
}

static CODED_ROWS: [[CodingFunction; 3]; 8] = coded!(1 2 3 4 5 6 7 8);
static CODED_WIDE: [CodingFunction; 6] =
    [coded::<1, 4>, coded::<2, 4>, coded::<3, 4>, coded::<4, 4>, coded::<5, 4>, coded::<6, 4>];

pub(super) static KERNEL: ByteKernel = ByteKernel {
    rows: 8,
    vectors: 3,
    lanes: 16,
    unsigned_rows: UNSIGNED_ROWS.as_flattened(),
    signed_rows: SIGNED_ROWS.as_flattened(),
    coded_rows: CODED_ROWS.as_flattened(),
    coded_wide: &CODED_WIDE,
    finish,
};
