//! How products are cut for warpgroups, which devices of compute capability 9.0 have:
//! `cu/warpgroups.cuh`.

use ort_core::dtype::DType;

use crate::driver::Limits;

/// Steps that a block multiplies in a turn.
const STEPS: usize = 64;
/// The bytes that all parts of sums may take.
const MOST_PARTS: usize = 8 << 20;
/// Turns that are worth a part.
const TURNS: usize = 4;
/// Shared memory of a processor, and what a block takes beside its own (CUDA C++ Programming Guide,
/// "Compute Capabilities").
const OF_PROCESSOR: usize = 228 << 10;
const OF_BLOCK: usize = 1 << 10;

/// Clock cycles, as an H100 takes them: of the beginning and the end of a block, of each thread and
/// of each sum of a thread there; of a turn, which waits for itself; and of a launch that adds up
/// parts.
const BLOCK: usize = 1500;
const THREAD: usize = 7;
const SUM: usize = 45;
const TURN: usize = 400;
const JOIN: usize = 4000;
/// Bytes that a block copies in a cycle, and all blocks of a processor; bytes of parts that are
/// written and added up in a cycle of a processor.
const ALONE: usize = 36;
const TOGETHER: usize = 40;
const OF_PARTS: usize = 4;
/// Results that a thread adds up of their parts, as `OF_JOIN` of `cu/warpgroups.cuh`.
const OF_JOIN: usize = 4;

/// What a block computes: its name in entries, its rows and columns, its threads, and how many
/// tiles of both sides it has memory for.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Tile {
    pub(super) name: &'static str,
    rows: usize,
    columns: usize,
    pub(super) threads: u32,
    stages: usize,
}

const LARGE: Tile = Tile { name: "large", rows: 128, columns: 256, threads: 256, stages: 4 };
const SQUARE: Tile = Tile { name: "square", rows: 128, columns: 128, threads: 256, stages: 3 };
const TALL: Tile = Tile { name: "tall", rows: 128, columns: 64, threads: 256, stages: 4 };
const SMALL: Tile = Tile { name: "small", rows: 64, columns: 64, threads: 128, stages: 6 };
const NARROW: Tile = Tile { name: "narrow", rows: 64, columns: 32, threads: 128, stages: 8 };

/// The tiles of products whose right side's steps lie side by side, and of convolutions.
pub(super) const OF_NEAR_STEPS: &[&Tile] = &[&LARGE, &SQUARE, &TALL, &SMALL, &NARROW];
/// Those of products whose right side's columns lie side by side: 64 at least, as swizzled rows
/// have.
pub(super) const OF_NEAR_COLUMNS: &[&Tile] = &[&LARGE, &SQUARE, &TALL, &SMALL];

impl Tile {
    fn stage(&self) -> usize {
        (self.rows + self.columns) * 2 * STEPS
    }

    /// The bytes of shared memory of a block; tiles begin at a multiple of 1024.
    pub(super) fn shared(&self) -> u32 {
        (self.stages * self.stage() + 1024) as u32
    }

    /// The clock cycles that a processor takes for `blocks` blocks of `turns` turns each, as many
    /// at a time as it has memory for.
    fn cycles(&self, blocks: usize, turns: usize) -> usize {
        let at_a_time = blocks.min(OF_PROCESSOR / (self.shared() as usize + OF_BLOCK)).max(1);
        let sums = self.rows * self.columns;
        let threads = self.threads as usize;
        let block = BLOCK + THREAD * threads + SUM * sums / threads;
        let alone = TURN.max(self.stage() / ALONE);
        // Tensor cores multiply 32 sums by a turn's steps in a cycle.
        let turn = |blocks: usize| alone.max(blocks * (self.stage() / TOGETHER).max(sums / 32));
        let of = |blocks: usize| if blocks == 0 { 0 } else { block + turns * turn(blocks) };
        blocks / at_a_time * of(at_a_time) + of(blocks % at_a_time)
    }
}

/// A product, cut: its blocks down and across, those of all matrices, and the parts that sums are
/// computed in.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Cut {
    pub(super) tile: &'static Tile,
    pub(super) down: usize,
    pub(super) across: usize,
    pub(super) blocks: usize,
    pub(super) parts: usize,
}

/// The threads that add up the parts of this number of results.
pub(super) fn joining(results: usize) -> usize {
    results.div_ceil(OF_JOIN)
}

/// The name in entries of what warpgroups multiply, where the device has them.
pub(super) fn suffix_of(limits: &Limits, dtype: DType) -> Option<&'static str> {
    match dtype {
        DType::F16 if limits.has_warpgroups() => Some("f16"),
        DType::BF16 if limits.has_warpgroups() => Some("bf16"),
        _ => None,
    }
}

/// The fastest cut of `products` GEMMs of these rows, columns and steps; in several parts only
/// where there may be.
pub(super) fn cut(
    limits: &Limits,
    tiles: &[&'static Tile],
    products: usize,
    [rows, columns, depth]: [usize; 3],
    may_part: bool,
) -> Option<Cut> {
    let processors = (limits.processors as usize).max(1);
    let turns = depth.div_ceil(STEPS);
    let bytes = products.saturating_mul(rows).saturating_mul(columns).saturating_mul(4).max(1);
    let most = if may_part { (MOST_PARTS / bytes).min(turns / TURNS).max(1) } else { 1 };
    let cuts = tiles.iter().flat_map(|tile| (1..=most).map(move |parts| (*tile, parts)));
    let cuts = cuts.map(|(tile, parts)| {
        let (down, across) = (rows.div_ceil(tile.rows), columns.div_ceil(tile.columns));
        let blocks = products.saturating_mul(down).saturating_mul(across);
        let of_processor = blocks.saturating_mul(parts).div_ceil(processors);
        let join = if parts > 1 { JOIN + parts * bytes / processors / OF_PARTS } else { 0 };
        let cycles = tile.cycles(of_processor.min(1 << 24), turns.div_ceil(parts)).saturating_add(join);
        (cycles, Cut { tile, down, across, blocks, parts })
    });
    cuts.min_by_key(|(cycles, _)| *cycles).map(|(_, cut)| cut)
}

#[cfg(test)]
mod tests {
    use super::*;

    const H100: Limits = Limits { capability: 90, processors: 132, tf32: true };

    fn assert_cuts(tiles: &[&'static Tile], cases: &[([usize; 3], &str, usize)]) {
        for (sizes, name, parts) in cases {
            let cut = cut(&H100, tiles, 1, *sizes, true).unwrap();
            assert_eq!((cut.tile.name, cut.parts), (*name, *parts), "{sizes:?}: {cut:?}");
        }
    }

    /// Rows, columns and steps of BERT with 128 tokens: the tile and the parts that an H100 took
    /// the least time for of all, or 1% more.
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

    /// Those of ResNet-50 with one image. Narrow tiles were measured without parts, and for
    /// products of one tap.
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
