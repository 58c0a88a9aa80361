//! Plain Rust: tiles of 4 rows by 8 columns.

use super::ByteKernel;
use super::finish::Finish;
use super::tile::{Tile, TileFunction, compute};
use crate::simd::Portable;

unsafe fn tile<const ROWS: usize, const VECTORS: usize, const SIGNED_ROWS: bool>(call: &Tile) {
    // SAFETY: passed on.
    unsafe { compute::<Portable, ROWS, VECTORS, SIGNED_ROWS>(Portable, call) }
}

unsafe fn finish(call: &Finish<'_>) {
    // SAFETY: passed on.
    unsafe { super::finish::finish(Portable, call) }
}

macro_rules! row {
    ($signed:literal, $($rows:literal)*) => {
        [$([tile::<$rows, 1, $signed> as TileFunction, tile::<$rows, 2, $signed>]),*]
    };
}

static UNSIGNED_ROWS: [[TileFunction; 2]; 4] = row!(false, 1 2 3 4);
static SIGNED_ROWS: [[TileFunction; 2]; 4] = row!(true, 1 2 3 4);

pub(super) static KERNEL: ByteKernel = ByteKernel {
    rows: 4,
    vectors: 2,
    lanes: 4,
    unsigned_rows: UNSIGNED_ROWS.as_flattened(),
    signed_rows: SIGNED_ROWS.as_flattened(),
    coded_rows: &[],
    coded_wide: &[],
    finish,
};
