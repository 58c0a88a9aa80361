//! Cooperative interruption, as `pool.rs` and the kernels see it; the models of `ort-loom` have the
//! same names.

pub(crate) use ort_core::ep::interrupt::{
    Interrupted, Pace, TASK_UNITS, UNITS_OF_A_TEXT, Watch, copy, current, fill, follow, spend, spending,
};

/// How much of a long slice is done between two counts of work. A shorter one costs nothing, and
/// blocks of a power of two stay whole.
pub(crate) const PIECE: usize = 1 << 14;

/// The pieces of a long slice, counted as work.
#[inline]
pub(crate) fn pieces<T>(slice: &[T]) -> impl Iterator<Item = &[T]> {
    slice.chunks(PIECE).inspect(|piece| count(piece.len()))
}

/// [`pieces`] to be changed.
#[inline]
pub(crate) fn pieces_mut<T>(slice: &mut [T]) -> impl Iterator<Item = &mut [T]> {
    slice.chunks_mut(PIECE).inspect(|piece| count(piece.len()))
}

#[inline]
fn count(len: usize) {
    if len == PIECE {
        spend(PIECE);
    }
}

/// Counts a text that is read. `RunCx` counts texts that are written, as a tensor takes them.
#[inline]
pub(crate) fn spend_text(text: &str) {
    spend(UNITS_OF_A_TEXT + text.len());
}

/// Work between two counts of a loop whose steps are too short to be counted each.
const BLOCK: usize = 1 << 12;

/// Calls `step` this many times, some nanoseconds each, and counts whole blocks of them as work.
/// The caller counts what is less than a block.
#[inline(always)]
pub(crate) fn in_blocks(steps: usize, mut step: impl FnMut()) {
    let mut left = steps;
    while left > BLOCK {
        (0..BLOCK).for_each(|_| step());
        left -= BLOCK;
        spend(4 * BLOCK);
    }
    (0..left).for_each(|_| step());
}
