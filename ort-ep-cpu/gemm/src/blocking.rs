//! Cache blocking (MC, KC and NC in BLIS terms) and the split of a GEMM into tasks.

use super::blocks::STEPS_ALIGNED;
use super::cpu::ROWS_PER_READ;
use super::kernels::{Grid, Kernel, STEPS, SlotLens};
use super::{Cpu, RhsSource};

/// The elements of the A block and of the B block, which should stay in L2 together.
const LHS_BLOCK: usize = 64 << 10;
const RHS_BLOCK: usize = 96 << 10;

/// The B block if A has at most `FEW_WEIGHTS` elements. Such a GEMM is bound by memory anyway, and
/// the block may be most of the memory that a small convolution needs. The value is a multiple of
/// every kernel's panel width.
const RHS_BLOCK_OF_FEW_WEIGHTS: usize = 36 << 10;
const FEW_WEIGHTS: usize = 8 << 10;

/// The least columns of a panel of a quantized B if A has few weights: two vectors of AVX2.
const LEAST_WIDTH: usize = 16;

/// NC if B is not packed: columns that finish a k block before any of them starts the next, so that
/// C is still in cache then.
const COLUMNS: usize = 768;

/// The maximum number of rows for which B is read in place. Each value of B is then used too seldom
/// to pay for packing.
const DIRECT_ROWS: usize = 512;

/// The same limit if the row stride of B is a multiple of `CONFLICT` elements. Its rows then
/// compete for the same few cache sets.
const DIRECT_ROWS_IN_CONFLICT: usize = 16;
const CONFLICT: usize = 4096;

/// The most columns of several panels that one thread packs for fewer rows, and how many rows it
/// takes. Each of several threads would have to pack them.
const COLUMNS_OF_ONE_THREAD: usize = 64;
const ROWS_OF_ONE_THREAD: usize = 96;

/// Tasks per thread if the split is free, to balance threads of unequal speed.
const TASKS_PER_THREAD: usize = 8;

/// The most columns that are not split over threads if there are more rows, as in the last layers
/// of nets for images. There are not enough panels to give all threads the same work, and each
/// thread would read all weights.
const FEW_COLUMNS: usize = 128;

/// The least rows for which each thread may pack the few columns again.
const ROWS_THAT_REPAY_PACKING: usize = 256;

/// The least tiles of a task with so few columns.
const TILES_OF_FEW_COLUMNS: usize = 4;

/// Multiply-adds that are worth a thread of their own: waking one costs some microseconds.
const WORTH_A_THREAD: usize = 1 << 19;

/// Returns the `f32` elements of workspace for a batch of `count` GEMMs of `shape` (M, N, K).
pub fn workspace_len(cpu: Cpu, count: usize, shape: [usize; 3], source: RhsSource) -> usize {
    let grid = grid(cpu, count, shape, (false, source));
    grid.threads * grid.slot.len()
}

/// The same if A is packed or already in bf16 pairs.
pub fn workspace_len_beside_ready(cpu: Cpu, count: usize, shape: [usize; 3], source: RhsSource) -> usize {
    let grid = grid(cpu, count, shape, (true, source));
    grid.threads * grid.slot.len()
}

/// Chooses block sizes and the split into tasks. The k block depends on K alone, so that the
/// summation order, and with it the bits of the result, does not depend on the split. If elements
/// are bf16 pairs and A is not packed, it is converted in the workspace.
pub(super) fn grid(cpu: Cpu, count: usize, shape: [usize; 3], (is_ready, source): (bool, RhsSource)) -> Grid {
    let [m, n, k] = shape;
    let kernel = Kernel::of(cpu);
    let height = kernel.height(m);
    let has_few_weights = m.saturating_mul(k) <= FEW_WEIGHTS;
    // An element's bits do not depend on the width of its panel, so few rows may have narrow ones.
    let width = match source {
        RhsSource::Quantized if has_few_weights => {
            kernel.width().min(LEAST_WIDTH.next_multiple_of(kernel.lanes))
        }
        _ => kernel.width(),
    };
    let (tiles, panels) = (m.div_ceil(height).max(1), n.div_ceil(width).max(1));
    let steps = k.div_ceil(k.div_ceil(STEPS * kernel.terms()).max(1)).max(1);
    // An element must not straddle two k blocks.
    let steps = steps.next_multiple_of(kernel.terms());
    // Block-quantized weights are dequantized in whole blocks.
    let steps = if source == RhsSource::Blocks { steps.next_multiple_of(STEPS_ALIGNED) } else { steps };
    let elements = kernel.elements(steps);
    // B is packed if the kernel cannot read it in place, or if its elements are reused often enough
    // to pay for the copy.
    let packs = match source {
        RhsSource::Packed => false,
        _ if kernel.terms() > 1 => true,
        RhsSource::Rows if n.is_multiple_of(CONFLICT) => m > DIRECT_ROWS_IN_CONFLICT,
        RhsSource::Rows if cpu.threads == 1 && panels > 2 && n <= COLUMNS_OF_ONE_THREAD => {
            m >= ROWS_OF_ONE_THREAD
        }
        RhsSource::Rows => m > DIRECT_ROWS && n > 1,
        RhsSource::Strided | RhsSource::Im2col | RhsSource::Blocks | RhsSource::Quantized => true,
    };
    let block = if packs && has_few_weights { RHS_BLOCK_OF_FEW_WEIGHTS } else { RHS_BLOCK };
    let at_once = match source {
        // Dequantized panels are memory that the float matrix, packed ahead, would not take.
        RhsSource::Quantized => 1,
        // At least two panels, so that each block of A is read for more than one.
        _ => (block / (elements * width)).max(2),
    };
    // A packed block bounds memory. Without packing only the caches matter: C must stay in cache
    // between k blocks, or rows of B between tiles.
    let panels_at_once = match packs {
        true => panels.div_ceil(panels.div_ceil(at_once)),
        false if k > steps => COLUMNS.div_ceil(width),
        false if source == RhsSource::Rows => at_once,
        false => panels,
    };
    let work = m.max(ROWS_PER_READ).saturating_mul(n).saturating_mul(k.max(1)).saturating_mul(count);
    // A thread needs enough work to repay its wake-up, and a tile to work on.
    let threads = cpu.threads.min(work / WORTH_A_THREAD).clamp(1, tiles * panels * count.max(1));
    // A batch with a GEMM for each thread needs no split inside a GEMM.
    let is_cut = !packs && threads > 1 && count < threads;
    let columns_first = is_cut && is_ready && source == RhsSource::Rows && by_columns(threads, n);
    let rows_alone =
        threads > 1 && count < threads && (is_ready || packs) && keeps_columns(shape, packs, source);
    let rows_first = is_cut && !columns_first && (rows_alone || prefers_rows(shape, source));
    let parts = match (rows_first, source) {
        // Each task packs all of B.
        _ if rows_alone && packs => [threads.min(tiles), 1],
        _ if rows_alone => {
            let tasks = (tiles / TILES_OF_FEW_COLUMNS / threads).clamp(1, TASKS_PER_THREAD);
            [(threads * tasks).min(tiles), 1]
        }
        (false, _) if columns_first => [TASKS_PER_THREAD.min(tiles), threads.min(panels)],
        (false, _) => parts(threads, count, [tiles, panels], packs),
        (true, RhsSource::Packed) => [(threads * TASKS_PER_THREAD).min(tiles), 1],
        (true, _) => [threads.min(tiles), TASKS_PER_THREAD.min(panels)],
    };
    // A task packs no more panels than it has. This bounds the workspace of small GEMMs.
    let panels_at_once = panels_at_once.min(panels.div_ceil(parts[1])).max(1);
    let tiles_at_once = (LHS_BLOCK / (elements * height)).max(1);
    let slot = SlotLens {
        block: if packs { panels_at_once * width * elements } else { 0 },
        lhs: if is_ready || kernel.terms() == 1 { 0 } else { tiles_at_once.min(tiles) * height * elements },
        stage: if is_ready && !packs { 0 } else { kernel.stage_len() },
    };
    Grid {
        isa: cpu.isa,
        count,
        shape,
        width,
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

/// Pixels of an image per thread from which on GEMMs and depthwise convolutions split an image by
/// columns. In smaller planes, two threads write to the same cache lines (false sharing). At 14 by
/// 14 pixels that costs more than the split gains.
const LEAST_PIXELS: usize = 1024;

/// Whether each thread should have columns of its own, that is, pixels of a part of an image. What
/// one operator writes there is what the next one reads there, so it comes from the core's own
/// cache.
pub fn by_columns(threads: usize, columns: usize) -> bool {
    columns / threads.max(1) >= LEAST_PIXELS
}

/// Whether only rows should be split, beside an A that is packed.
fn keeps_columns([m, n, _]: [usize; 3], packs: bool, source: RhsSource) -> bool {
    let is_image = matches!(source, RhsSource::Rows | RhsSource::Im2col);
    is_image && n <= FEW_COLUMNS.min(m) && (!packs || m >= ROWS_THAT_REPAY_PACKING)
}

/// Whether threads should split rows instead of columns. Rows are better if threads then share the
/// smaller operand. They are also better if a thread's output, by channel or by row, is its next
/// input.
fn prefers_rows([m, n, k]: [usize; 3], source: RhsSource) -> bool {
    match source {
        RhsSource::Packed => m > n,
        RhsSource::Rows => m > k,
        RhsSource::Strided | RhsSource::Im2col | RhsSource::Blocks | RhsSource::Quantized => false,
    }
}

/// Splits columns first. Rows are split only if there are too few columns, because parts that share
/// columns pack the same block of B again.
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
