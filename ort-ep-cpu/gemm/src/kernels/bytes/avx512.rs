//! AVX-512 VNNI 8-bit micro-kernel: tiles of 8 rows by 16 columns, 10 by 32, 8 by 48 or 6 by 64.

use super::ByteKernel;
use super::finish::Finish;
use super::tile::{Requantization, RequantizeFunction, Tile, TileFunction, compute, compute_quantized};
use ort_cpu_vector::simd::bytes::Vnni;

/// Computes a tile of accumulators; see [`compute`].
///
/// # Safety
///
/// As [`compute`]. The CPU has AVX-512 F, BW, DQ, VL and VNNI, AVX2, FMA and F16C.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn tile<const ROWS: usize, const VECTORS: usize, const SIGNED_ROWS: bool>(call: &Tile) {
    // SAFETY: `tile` has the contract of `compute`. `ByteKernel::of` detected the features before
    // it chose this kernel.
    unsafe { compute::<Vnni, ROWS, VECTORS, SIGNED_ROWS>(Vnni::new_unchecked(), call) }
}

/// Computes a tile and requantizes it in registers; see [`compute_quantized`].
///
/// # Safety
///
/// As [`compute_quantized`]. The CPU has AVX-512 F, BW, DQ, VL and VNNI, AVX2, FMA and F16C. Each
/// run of `requantization` has at least one column, and ends at or before column `16 * VECTORS`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn requantize<const ROWS: usize, const VECTORS: usize, const SIGNED_ROWS: bool>(
    call: &Tile,
    requantization: &Requantization<'_>,
) {
    // SAFETY: `requantize` has the contract of `compute_quantized`. `ByteKernel::of` detected the
    // features before it chose this kernel.
    unsafe {
        compute_quantized::<Vnni, ROWS, VECTORS, SIGNED_ROWS>(Vnni::new_unchecked(), call, requantization)
    }
}

/// Runs the epilogue of a tile; see [`super::finish::finish`].
///
/// # Safety
///
/// As [`super::finish::finish`]. The CPU has AVX-512 F, BW, DQ, VL and VNNI, AVX2, FMA and F16C.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn finish(call: &Finish<'_>) {
    // SAFETY: this function has the contract of the one it calls. `ByteKernel::of` detected the
    // features before it chose this kernel.
    unsafe { super::finish::finish(Vnni::new_unchecked(), call) }
}

/// Lists the tile functions by vectors and rows.
macro_rules! table {
    ($function:ident as $type:ty, $signed:literal) => {
        &[
            table!($function as $type, $signed, 1: 1 2 3 4 5 6 7 8),
            table!($function as $type, $signed, 2: 1 2 3 4 5 6 7 8 9 10),
            table!($function as $type, $signed, 3: 1 2 3 4 5 6 7 8),
            table!($function as $type, $signed, 4: 1 2 3 4 5 6),
        ]
    };
    ($function:ident as $type:ty, $signed:literal, $vectors:literal: $($rows:literal)*) => {
        &[$($function::<$rows, $vectors, $signed> as $type),*]
    };
}

pub(super) static KERNEL: ByteKernel = ByteKernel {
    vectors: 3,
    lanes: 16,
    unsigned_rows: table!(tile as TileFunction, false),
    signed_rows: table!(tile as TileFunction, true),
    requantize_unsigned: table!(requantize as RequantizeFunction, false),
    requantize_signed: table!(requantize as RequantizeFunction, true),
    finish,
};
