//! How products are cut for warpgroups, which devices of compute capability 9.0 have: `cu/warpgroups.cuh`.

use ort_core::dtype::DType;

use crate::driver::Limits;

/// Steps that a block multiplies in a turn.
const STEPS: usize = 64;
/// The bytes that all parts of sums may take.
const MOST_PARTS: usize = 8 << 20;
/// Turns that are worth a part.
const TURNS: usize = 4;
/// Shared memory of a processor, and what a block takes beside its own (CUDA C++ Programming Guide, "Compute Capabilities").
const OF_PROCESSOR: usize = 228 << 10;
const OF_BLOCK: usize = 1 << 10;

/// Clock cycles, as an H100 takes them: from reading to multiplying, of the beginning and the end of a block, and of adding up parts.
const LATENCY: usize = 1000;
const BLOCK: usize = 2000;
const JOIN: usize = 3500;

/// What a block computes: its name in entries, its rows and columns, its threads, and how many tiles of both sides it has memory for.
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
const WIDE: Tile = Tile { name: "wide", rows: 64, columns: 128, threads: 128, stages: 4 };
const TALL: Tile = Tile { name: "tall", rows: 128, columns: 64, threads: 256, stages: 4 };
const SMALL: Tile = Tile { name: "small", rows: 64, columns: 64, threads: 128, stages: 6 };

/// The tiles of `cu/gemm_warpgroups.cuh`.
pub(super) const OF_PRODUCTS: &[&Tile] = &[&LARGE, &SQUARE, &WIDE, &SMALL];
/// Those of `cu/conv_pixels_warpgroups.cuh`.
pub(super) const OF_CONVOLUTIONS: &[&Tile] = &[&LARGE, &SQUARE, &TALL, &SMALL];

impl Tile {
    fn stage(&self) -> usize {
        (self.rows + self.columns) * 2 * STEPS
    }

    /// The bytes of shared memory of a block; tiles begin at a multiple of 1024.
    pub(super) fn shared(&self) -> u32 {
        (self.stages * self.stage() + 1024) as u32
    }

    /// The clock cycles that a processor takes for `blocks` blocks of `turns` turns each. Those of a turn are what tensor cores take for it, or
    /// reading it at 64 bytes a cycle, or what its bytes are waited for beside the tiles of all blocks that a processor has at a time.
    fn cycles(&self, blocks: usize, turns: usize) -> usize {
        let at_a_time = blocks.min(OF_PROCESSOR / (self.shared() as usize + OF_BLOCK)).max(1);
        let multiplying = self.rows * self.columns / 32;
        let turn = multiplying.max(self.stage() / 64).max(LATENCY / (self.stages - 2) / at_a_time);
        blocks * turns * turn + blocks.div_ceil(at_a_time) * BLOCK
    }
}

/// A product, cut: its blocks down and across, those of all matrices, and the parts that sums are computed in.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Cut {
    pub(super) tile: &'static Tile,
    pub(super) down: usize,
    pub(super) across: usize,
    pub(super) blocks: usize,
    pub(super) parts: usize,
}

/// The name in entries of what warpgroups multiply, where the device has them.
pub(super) fn suffix_of(limits: &Limits, dtype: DType) -> Option<&'static str> {
    match dtype {
        DType::F16 if limits.has_warpgroups() => Some("f16"),
        DType::BF16 if limits.has_warpgroups() => Some("bf16"),
        _ => None,
    }
}

/// The fastest cut of `products` GEMMs of these rows, columns and steps; in several parts only where there may be.
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
        let join = if parts > 1 { JOIN + parts * bytes / processors / 32 } else { 0 };
        let cycles = tile.cycles(of_processor.min(1 << 24), turns.div_ceil(parts)).saturating_add(join);
        (cycles, Cut { tile, down, across, blocks, parts })
    });
    cuts.min_by_key(|(cycles, _)| *cycles).map(|(_, cut)| cut)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows, columns and steps on 132 processors: the tile, and the parts.
    #[test]
    fn tiles_are_as_large_as_keeps_all_processors_busy() {
        let limits = Limits { capability: 90, processors: 132, tf32: true };
        let cases = [
            ([4096, 4096, 4096], "large", 1),
            ([128, 768, 768], "small", 1),
            ([128, 768, 3072], "small", 5),
            ([4096, 3072, 768], "large", 1),
        ];
        for (sizes, name, parts) in cases {
            let cut = cut(&limits, OF_PRODUCTS, 1, sizes, true).unwrap();
            assert_eq!((cut.tile.name, cut.parts), (name, parts), "{sizes:?}: {cut:?}");
        }
        let whole = cut(&limits, OF_PRODUCTS, 1, [128, 768, 3072], false).unwrap();
        assert_eq!(whole.parts, 1);
    }

    #[test]
    fn blocks_fit_a_processor() {
        for tile in OF_PRODUCTS.iter().chain(OF_CONVOLUTIONS) {
            assert!(tile.shared() <= 227 << 10, "{tile:?}");
        }
    }
}
