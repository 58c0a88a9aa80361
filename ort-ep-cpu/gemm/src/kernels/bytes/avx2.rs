//! AVX2 8-bit micro-kernel: tiles of 4 rows by 16 columns. Bytes are widened to 16 bits, so that no
//! product saturates.

use super::ByteKernel;
use super::finish::Finish;
use super::tile::{Tile, TileFunction, compute};
use ort_cpu_vector::simd::Avx2;

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn tile<const ROWS: usize, const VECTORS: usize, const SIGNED_ROWS: bool>(call: &Tile) {
    // SAFETY: `tile` has the contract of `compute`. `ByteKernel::of` chose this kernel only after
    // `Isa::widest` detected the features.
    unsafe { compute::<Avx2, ROWS, VECTORS, SIGNED_ROWS>(Avx2::new_unchecked(), call) }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn finish(call: &Finish<'_>) {
    // SAFETY: this function has the contract of the one it calls. `ByteKernel::of` chose this
    // kernel only after `Isa::widest` detected the features.
    unsafe { super::finish::finish(Avx2::new_unchecked(), call) }
}

/// Lists the tile functions by vectors and rows.
macro_rules! table {
    ($signed:literal) => {
        &[table!($signed, 1: 1 2 3 4), table!($signed, 2: 1 2 3 4)]
    };
    ($signed:literal, $vectors:literal: $($rows:literal)*) => {
        &[$(tile::<$rows, $vectors, $signed> as TileFunction),*]
    };
}

pub(super) static KERNEL: ByteKernel = ByteKernel {
    vectors: 2,
    lanes: 8,
    unsigned_rows: table!(false),
    signed_rows: table!(true),
    coded_unsigned: &[],
    coded_signed: &[],
    finish,
};
