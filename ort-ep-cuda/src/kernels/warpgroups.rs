//! Cost model that divides GEMMs for warpgroups, which devices of compute capability 9.0 have
//! (`cu/warpgroups.cuh`).

use ort_core::dtype::DType;

use crate::driver::Limits;

/// Depth that a block multiplies per iteration.
const STEPS: usize = 64;
/// The most bytes of split-K partial sums.
const MOST_PARTS: usize = 8 << 20;
/// The least iterations worth a split-K part.
const TURNS: usize = 4;
/// Shared memory of a multiprocessor (CUDA C++ Programming Guide, "Compute Capabilities").
const OF_PROCESSOR: usize = 228 << 10;
/// Shared memory that a block takes beside its own.
const OF_BLOCK: usize = 1 << 10;

/// Cost in clock cycles, measured on an H100: prologue and epilogue of a block.
const BLOCK: usize = 1500;
/// The same per thread of a block.
const THREAD: usize = 7;
/// The same per accumulator of a thread.
const SUM: usize = 45;
/// Cycles of an iteration that waits for itself.
const TURN: usize = 400;
/// Cycles of the launch that adds up split-K parts.
const JOIN: usize = 4000;
/// Bytes per cycle that a single block copies.
const ALONE: usize = 36;
/// Bytes per cycle that all blocks of a multiprocessor copy together.
const TOGETHER: usize = 40;
/// Bytes of split-K parts that a multiprocessor writes and adds up per cycle.
const OF_PARTS: usize = 4;
/// Results per thread when split-K parts are added up, as `OF_JOIN` of `cu/warpgroups.cuh`.
const OF_JOIN: usize = 4;

/// A block's tile: its name in entries, rows, columns, threads, and pipeline stages.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct GroupTile {
    pub(super) name: &'static str,
    rows: usize,
    columns: usize,
    pub(super) threads: u32,
    stages: usize,
}

const LARGE: GroupTile = GroupTile { name: "large", rows: 128, columns: 256, threads: 256, stages: 4 };
const SQUARE: GroupTile = GroupTile { name: "square", rows: 128, columns: 128, threads: 256, stages: 3 };
const TALL: GroupTile = GroupTile { name: "tall", rows: 128, columns: 64, threads: 256, stages: 4 };
const SMALL: GroupTile = GroupTile { name: "small", rows: 64, columns: 64, threads: 128, stages: 6 };
const NARROW: GroupTile = GroupTile { name: "narrow", rows: 64, columns: 32, threads: 128, stages: 8 };

/// The tiles for a right operand that is contiguous along the depth, and for convolutions.
pub(super) const OF_NEAR_STEPS: &[&GroupTile] = &[&LARGE, &SQUARE, &TALL, &SMALL, &NARROW];
/// The tiles for a right operand that is contiguous along its columns: at least 64 of them, the
/// width of a swizzled row.
pub(super) const OF_NEAR_COLUMNS: &[&GroupTile] = &[&LARGE, &SQUARE, &TALL, &SMALL];

impl GroupTile {
    fn stage(&self) -> usize {
        (self.rows + self.columns) * 2 * STEPS
    }

    /// Returns the shared memory of a block in bytes. Tiles start at a multiple of 1024, hence the
    /// extra 1024.
    pub(super) fn shared(&self) -> u32 {
        (self.stages * self.stage() + 1024) as u32
    }

    /// Returns the clock cycles of a multiprocessor for `blocks` blocks of `turns` iterations each;
    /// its memory limits how many run at a time.
    fn cycles(&self, blocks: usize, turns: usize) -> usize {
        let at_a_time = blocks.min(OF_PROCESSOR / (self.shared() as usize + OF_BLOCK)).max(1);
        let sums = self.rows * self.columns;
        let threads = self.threads as usize;
        let block = BLOCK + THREAD * threads + SUM * sums / threads;
        let alone = TURN.max(self.stage() / ALONE);
        // Per cycle, the tensor cores accumulate an iteration's depth into 32 results.
        let turn = |blocks: usize| alone.max(blocks * (self.stage() / TOGETHER).max(sums / 32));
        let of = |blocks: usize| if blocks == 0 { 0 } else { block + turns * turn(blocks) };
        blocks / at_a_time * of(at_a_time) + of(blocks % at_a_time)
    }
}

/// A divided GEMM: tile, blocks down and across, the blocks of all matrices, and the split-K parts.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct GroupDivision {
    pub(super) tile: &'static GroupTile,
    pub(super) down: usize,
    pub(super) across: usize,
    pub(super) blocks: usize,
    pub(super) parts: usize,
}

/// Returns the threads that add up the parts of this number of results.
pub(super) fn joining(results: usize) -> usize {
    results.div_ceil(OF_JOIN)
}

/// Returns the type suffix of warpgroup entries, if the device has them for the type.
pub(super) fn suffix_of(limits: &Limits, dtype: DType) -> Option<&'static str> {
    match dtype {
        DType::F16 if limits.has_warpgroups() => Some("f16"),
        DType::BF16 if limits.has_warpgroups() => Some("bf16"),
        _ => None,
    }
}

/// Returns the fastest division of `products` GEMMs of these rows, columns and depth. It uses
/// split-K only if `may_part`.
pub(super) fn cut(
    limits: &Limits,
    tiles: &[&'static GroupTile],
    products: usize,
    [rows, columns, depth]: [usize; 3],
    may_part: bool,
) -> Option<GroupDivision> {
    let processors = (limits.processors as usize).max(1);
    let turns = depth.div_ceil(STEPS);
    let bytes = products.saturating_mul(rows).saturating_mul(columns).saturating_mul(4).max(1);
    // Partial sums must fit the workspace limit, and each part needs enough iterations.
    let most = if may_part { (MOST_PARTS / bytes).min(turns / TURNS).max(1) } else { 1 };
    let cuts = tiles.iter().flat_map(|tile| (1..=most).map(move |parts| (*tile, parts)));
    let cuts = cuts.map(|(tile, parts)| {
        let (down, across) = (rows.div_ceil(tile.rows), columns.div_ceil(tile.columns));
        let blocks = products.saturating_mul(down).saturating_mul(across);
        let of_processor = blocks.saturating_mul(parts).div_ceil(processors);
        let join = if parts > 1 { JOIN + parts * bytes / processors / OF_PARTS } else { 0 };
        let cycles = tile.cycles(of_processor.min(1 << 24), turns.div_ceil(parts)).saturating_add(join);
        (cycles, GroupDivision { tile, down, across, blocks, parts })
    });
    cuts.min_by_key(|(cycles, _)| *cycles).map(|(_, cut)| cut)
}

#[cfg(test)]
mod tests {
    use super::*;

    const H100: Limits = Limits { capability: 90, processors: 132, tf32: true };

    fn assert_cuts(tiles: &[&'static GroupTile], cases: &[([usize; 3], &str, usize)]) {
        for (sizes, name, parts) in cases {
            let cut = cut(&H100, tiles, 1, *sizes, true).unwrap();
            assert_eq!((cut.tile.name, cut.parts), (*name, *parts), "{sizes:?}: {cut:?}");
        }
    }

    /// Rows, columns and depth in BERT with 128 tokens. The expected tile and parts took the least
    /// time of all on an H100, or at most 1% more.
    #[test]
    fn cuts_of_near_columns_are_the_fastest_measured() {
        let cases = [
            ([128, 768, 768], "small", 1),
            ([128, 3072, 768], "small", 1),
            ([128, 768, 3072], "small", 5),
            ([128, 2304, 768], "small", 1),
            ([4096, 4096, 4096], "large", 1),
            ([4096, 3072, 768], "large", 1),
        ];
        assert_cuts(OF_NEAR_COLUMNS, &cases);
        let whole = cut(&H100, OF_NEAR_COLUMNS, 1, [128, 768, 3072], false).unwrap();
        assert_eq!(whole.parts, 1);
    }

    /// The GEMMs of ResNet-50 with one image. Narrow tiles were measured without split-K, and for
    /// pointwise convolutions.
    #[test]
    fn cuts_of_near_steps_are_the_fastest_measured() {
        let products = [
            ([3136, 64, 64], "narrow", 1),
            ([3136, 256, 64], "small", 1),
            ([3136, 64, 256], "narrow", 1),
            ([3136, 128, 256], "narrow", 1),
            ([784, 512, 128], "narrow", 1),
            ([784, 128, 512], "narrow", 1),
            ([784, 256, 512], "narrow", 1),
            ([196, 1024, 256], "narrow", 1),
            ([196, 256, 1024], "narrow", 1),
            ([196, 512, 1024], "narrow", 1),
            ([49, 2048, 512], "narrow", 1),
            ([49, 512, 2048], "narrow", 8),
        ];
        let convolutions = [
            ([3136, 64, 576], "narrow", 1),
            ([784, 128, 1152], "narrow", 1),
            ([784, 512, 256], "narrow", 1),
            ([196, 256, 2304], "narrow", 4),
            ([196, 1024, 512], "narrow", 1),
            ([49, 512, 4608], "narrow", 8),
            ([49, 2048, 1024], "narrow", 1),
        ];
        assert_cuts(OF_NEAR_STEPS, &products);
        assert_cuts(OF_NEAR_STEPS, &convolutions);
    }

    #[test]
    fn blocks_fit_a_processor() {
        for tile in OF_NEAR_STEPS {
            assert!(tile.shared() <= 227 << 10, "{tile:?}");
        }
    }
}
