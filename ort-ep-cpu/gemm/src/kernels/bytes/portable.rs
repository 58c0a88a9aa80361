//! Portable 8-bit micro-kernel in plain Rust: tiles of 4 rows by 8 columns.

use super::ByteKernel;
use super::finish::Finish;
use super::tile::{Tile, TileFunction, compute};
use ort_cpu_vector::simd::Portable;

unsafe fn tile<const ROWS: usize, const VECTORS: usize, const SIGNED_ROWS: bool>(call: &Tile) {
    // SAFETY: `tile` has the contract of `compute`, and `Portable` needs no special instructions.
    unsafe { compute::<Portable, ROWS, VECTORS, SIGNED_ROWS>(Portable, call) }
}

unsafe fn finish(call: &Finish<'_>) {
    // SAFETY: this function has the contract of the one it calls, and `Portable` needs no special
    // instructions.
    unsafe { super::finish::finish(Portable, call) }
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
    lanes: 4,
    unsigned_rows: table!(false),
    signed_rows: table!(true),
    coded_unsigned: &[],
    coded_signed: &[],
    finish,
};
