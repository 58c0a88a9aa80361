//! Block sizes by cache, and how a product is cut into tasks.

use super::blocks::STEPS_ALIGNED;
use super::kernels::{Grid, Kernel, SlotLens};
use super::{BSource, Cpu};

/// The most steps in a block, by how many are in an element: a panel of B then fits the
/// second-level cache many times over, and C is visited seldom enough.
pub(crate) const STEPS: usize = 384;

/// Values in the blocks of A and of B that should stay in the second-level cache together.
const BLOCK_A: usize = 64 << 10;
const BLOCK_B: usize = 96 << 10;

/// The same of B where A has at most as many values as `FEW_WEIGHTS`: such a product waits for
/// memory in any case, and the block may be most of what a small convolution takes. It is a
/// multiple of the widths of all kernels.
const BLOCK_B_OF_FEW_WEIGHTS: usize = 36 << 10;
const FEW_WEIGHTS: usize = 8 << 10;

/// Columns done before going on to the next steps, so that C is still in the cache then.
const COLUMNS: usize = 768;

/// Rows up to which B is read where it lies: its values are then used too seldom to pay for a copy.
const DIRECT_ROWS: usize = 512;

/// The same where the rows of B lie a multiple of `CONFLICT` values apart, so that they compete for
/// the same few cache sets.
const DIRECT_ROWS_IN_CONFLICT: usize = 16;
const CONFLICT: usize = 4096;

/// Tasks for each thread when the cut is free, to even out unequal speeds.
const TASKS_PER_THREAD: usize = 8;

/// Multiplications worth a thread of their own: waking one costs some microseconds.
const WORTH_A_THREAD: usize = 1 << 19;

/// How many values of workspace a batch of `count` products of `shape` (M, N, K) needs.
pub fn workspace_len(cpu: Cpu, count: usize, shape: [usize; 3], source: BSource) -> usize {
    let grid = grid(cpu, count, shape, (false, source));
    grid.threads * grid.slot.len()
}

/// The same for left sides that are packed or of pairs.
pub(crate) fn workspace_len_beside_ready(
    cpu: Cpu,
    count: usize,
    shape: [usize; 3],
    source: BSource,
) -> usize {
    let grid = grid(cpu, count, shape, (true, source));
    grid.threads * grid.slot.len()
}

/// Chooses blocks and parts. The steps of a block depend on K alone, so that sums do too. Left
/// sides that are not ready are converted in the workspace where elements are pairs.
pub(super) fn grid(cpu: Cpu, count: usize, shape: [usize; 3], (is_ready, source): (bool, BSource)) -> Grid {
    let [m, n, k] = shape;
    let kernel = Kernel::of(cpu);
    let height = kernel.height(m);
    let (tiles, panels) = (m.div_ceil(height).max(1), n.div_ceil(kernel.width()).max(1));
    let steps = k.div_ceil(k.div_ceil(STEPS * kernel.terms()).max(1)).max(1);
    // An element does not reach over the end of a block.
    let steps = steps.next_multiple_of(kernel.terms());
    // Weights in blocks are widened from whole blocks on.
    let steps = if source == BSource::Blocks { steps.next_multiple_of(STEPS_ALIGNED) } else { steps };
    let elements = kernel.elements(steps);
    let packs = match source {
        BSource::Packed => false,
        _ if kernel.terms() > 1 => true,
        BSource::Rows if n.is_multiple_of(CONFLICT) => m > DIRECT_ROWS_IN_CONFLICT,
        BSource::Rows => m > DIRECT_ROWS && n > 1,
        BSource::Strided | BSource::Im2col | BSource::Blocks => true,
    };
    let block = if packs && m.saturating_mul(k) <= FEW_WEIGHTS { BLOCK_B_OF_FEW_WEIGHTS } else { BLOCK_B };
    let at_once = (block / (elements * kernel.width())).max(2);
    let panels_at_once = match packs {
        true => panels.div_ceil(panels.div_ceil(at_once)),
        false if k > steps => COLUMNS.div_ceil(kernel.width()),
        false if source == BSource::Rows => at_once,
        false => panels,
    };
    let work = m.saturating_mul(n).saturating_mul(k.max(1)).saturating_mul(count);
    let threads = cpu.threads.min(work / WORTH_A_THREAD).clamp(1, tiles * panels * count.max(1));
    let is_cut = !packs && threads > 1 && count < threads;
    let columns_first = is_cut && is_ready && source == BSource::Rows && by_columns(threads, n);
    let rows_first = is_cut && !columns_first && prefers_rows(shape, source);
    let parts = match (rows_first, source) {
        (false, _) if columns_first => [TASKS_PER_THREAD.min(tiles), threads.min(panels)],
        (false, _) => parts(threads, count, [tiles, panels], packs),
        (true, BSource::Packed) => [(threads * TASKS_PER_THREAD).min(tiles), 1],
        (true, _) => [threads.min(tiles), TASKS_PER_THREAD.min(panels)],
    };
    let panels_at_once = panels_at_once.min(panels.div_ceil(parts[1])).max(1);
    let tiles_at_once = (BLOCK_A / (elements * height)).max(1);
    let slot = SlotLens {
        block: if packs { panels_at_once * kernel.width() * elements } else { 0 },
        left: if is_ready || kernel.terms() == 1 { 0 } else { tiles_at_once.min(tiles) * height * elements },
        stage: if is_ready && !packs { 0 } else { kernel.stage_len() },
    };
    Grid {
        isa: cpu.isa,
        count,
        shape,
        parts,
        rows_first,
        steps,
        tiles_at_once,
        panels_at_once,
        threads,
        packs,
        slot,
    }
}

/// Pixels of an image for each thread from which on products and depthwise convolutions cut it
/// across. Planes of fewer pixels begin and end within cache lines that two threads would then
/// write: at 14 by 14 pixels that takes longer than what it saves.
const LEAST_PIXELS: usize = 1024;

/// Whether each thread had better have columns of its own, the pixels of a part of an image. What
/// one operator writes there is what the next reads there, so that it comes from the core's own
/// cache.
pub(crate) fn by_columns(threads: usize, columns: usize) -> bool {
    columns / threads.max(1) >= LEAST_PIXELS
}

/// Whether threads had better have rows of their own than columns: where they share the smaller
/// operand, and where what they write, channel by channel or row by row, is what they read next.
fn prefers_rows([m, n, k]: [usize; 3], source: BSource) -> bool {
    match source {
        BSource::Packed => m > n,
        BSource::Rows => m > k,
        BSource::Strided | BSource::Im2col | BSource::Blocks => false,
    }
}

/// Cuts columns first; rows only where columns are too few, since parts that share columns pack the
/// same block of B.
fn parts(threads: usize, count: usize, [tiles, panels]: [usize; 2], packs: bool) -> [usize; 2] {
    if threads <= 1 {
        return [1, 1];
    }
    let wanted = (threads * TASKS_PER_THREAD).div_ceil(count.max(1));
    let columns = wanted.min(panels);
    let wanted_rows = match packs {
        true => threads.div_ceil(count * columns),
        false => wanted.div_ceil(columns),
    };
    [wanted_rows.clamp(1, tiles), columns]
}
