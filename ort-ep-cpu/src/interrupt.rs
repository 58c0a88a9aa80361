//! Cooperative interruption, as `pool.rs` and the kernels see it; the models of `ort-loom` have the same names.

pub(crate) use ort_core::ep::interrupt::{
    Interrupted, Pace, TASK_UNITS, Watch, current, follow, spend, spending,
};

/// Work between two counts of a loop whose steps are too short to be counted each.
const BLOCK: usize = 1 << 12;

/// Calls `step` this many times, some nanoseconds each, and counts whole blocks of them as work. The
/// caller counts what is less than a block.
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
