//! Cooperative cancellation, as `pool.rs` and the kernels use it.
//!
//! The `ort-loom` models define the same names, so that they can compile `pool.rs` against their
//! own version.

pub use ort_core::ep::interrupt::{
    Interrupted, Pace, TASK_UNITS, UNITS_OF_A_TEXT, Watch, copy, current, fill, follow, spend, spending,
};

/// How many elements of a long slice are processed between two deadline checks. Shorter slices are
/// not counted at all. A power of two keeps power-of-two blocks whole.
pub const PIECE: usize = 1 << 14;

/// Splits a slice into pieces and counts each whole piece as work.
#[inline]
pub fn pieces<T>(slice: &[T]) -> impl Iterator<Item = &[T]> {
    slice.chunks(PIECE).inspect(|piece| count(piece.len()))
}

/// Like [`pieces`], for mutable slices.
#[inline]
pub fn pieces_mut<T>(slice: &mut [T]) -> impl Iterator<Item = &mut [T]> {
    slice.chunks_mut(PIECE).inspect(|piece| count(piece.len()))
}

#[inline]
fn count(len: usize) {
    if len == PIECE {
        spend(PIECE);
    }
}

/// Counts reading a string as work. `RunCx` counts the strings that a kernel writes, when the
/// tensor takes them.
#[inline]
pub fn spend_text(text: &str) {
    spend(UNITS_OF_A_TEXT + text.len());
}

/// Iterations between two counts, for loops whose iterations are too short to be counted one by
/// one.
const BLOCK: usize = 1 << 12;

/// Calls `step` `steps` times and counts each full block as work. `step` should take only a few
/// nanoseconds. The caller counts the remainder that is shorter than a block.
#[inline(always)]
pub fn in_blocks(steps: usize, mut step: impl FnMut()) {
    let mut left = steps;
    while left > BLOCK {
        (0..BLOCK).for_each(|_| step());
        left -= BLOCK;
        spend(4 * BLOCK);
    }
    (0..left).for_each(|_| step());
}
