//! AVX-512 with VNNI: tiles of 8 rows by 48 columns.

use super::ByteKernel;
use super::finish::Finish;
use super::tile::{Tile, TileFunction, compute};
use crate::simd::bytes::Vnni;

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn tile<const ROWS: usize, const VECTORS: usize, const SIGNED_ROWS: bool>(call: &Tile) {
    // SAFETY: passed on; the caller has found the CPU to have these features.
    unsafe { compute::<Vnni, ROWS, VECTORS, SIGNED_ROWS>(Vnni::new_unchecked(), call) }
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

pub(super) static KERNEL: ByteKernel = ByteKernel {
    rows: 8,
    vectors: 3,
    lanes: 16,
    unsigned_rows: UNSIGNED_ROWS.as_flattened(),
    signed_rows: SIGNED_ROWS.as_flattened(),
    finish,
};
