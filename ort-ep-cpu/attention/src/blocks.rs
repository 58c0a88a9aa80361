//! Streamed scores: the sizes of blocks and scratch.

use ort_core::ops::nn::attention::problem::SdpaSizes;
use ort_cpu_gemm::{Cpu, Pairing};
use ort_cpu_vector::simd::attention::WIDTH;

use super::attention::group;

/// Keys in a block: the scores of a panel then stay in L1.
pub(crate) const KEYS: usize = 128;

/// The maximum number of panels in a task. They share the loads of keys and values.
pub(crate) const PANELS: usize = 4;

/// Tasks per thread, to balance uneven work.
const TASKS_PER_THREAD: usize = 4;

/// Returns the heads and the queries of a task.
pub(crate) fn block(sizes: &SdpaSizes, threads: usize) -> [usize; 2] {
    let group = group(sizes).max(1);
    // All query heads of a key head fit in one panel, so they share one pass over the keys.
    if sizes.queries.saturating_mul(group) <= WIDTH {
        return [group, sizes.queries.max(1)];
    }
    let whole = sizes.queries.div_ceil(WIDTH);
    let wanted = (threads * TASKS_PER_THREAD).div_ceil((sizes.batch * sizes.heads).max(1));
    // More panels per task share more loads of keys and values, but leave fewer tasks for the
    // threads.
    let panels = (whole / wanted.max(1)).clamp(1, PANELS);
    // Tasks of nearly equal size, in whole vectors.
    let tasks = whole.div_ceil(panels);
    let queries = sizes.queries.div_ceil(tasks).next_multiple_of(16);
    [1, queries]
}

/// Returns the `f32` elements of scratch, regardless of the number of keys. `is_half` says that
/// keys or values are not `f32`, and `grid` has the sizes of a [`GridBias`](super::GridBias), or 0.
pub(crate) fn scratch_len(sizes: &SdpaSizes, cpu: Cpu, is_half: bool, grid: [usize; 2]) -> usize {
    cpu.threads.max(1) * part_len(sizes, cpu, is_half, grid)
}

/// Returns the scratch of one thread.
pub(crate) fn part_len(sizes: &SdpaSizes, cpu: Cpu, is_half: bool, grid: [usize; 2]) -> usize {
    let SdpaSizes { size, value_size, .. } = *sizes;
    let [heads, queries] = block(sizes, cpu.threads);
    let panels = (heads * queries).div_ceil(WIDTH);
    let wide = if is_half { KEYS * (size + value_size) } else { 0 };
    let scores = WIDTH * KEYS.max(value_size).max(size);
    let [row, pairs] = match Pairing::of(cpu) {
        Some(_) => [size.div_ceil(2), pairs_len(sizes).iter().sum()],
        None => [size, 0],
    };
    let biases = grid[0] + grid[1];
    panels * WIDTH * (row + value_size + biases)
        + scores
        + 2 * WIDTH * KEYS
        + (wide + pairs).next_multiple_of(16)
}

/// Returns the bf16 pairs of a block of keys, and of a block of values.
pub(crate) fn pairs_len(sizes: &SdpaSizes) -> [usize; 2] {
    [KEYS * sizes.size.div_ceil(2), KEYS / 2 * sizes.value_size]
}
