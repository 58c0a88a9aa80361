//! Large GEMMs of float16 and bfloat16 with warpgroups, whose tiles are loaded by TMA
//! (`cu/gemm_maps.cuh`).

use ort_core::Result;
use ort_gpu::gemm::StridedTensor;

use super::product::{FEW_ROWS, Product};
use crate::driver::Boxes;
use crate::kernels::warpgroups;
use crate::launch::{Launch, OpCx, Walk};

/// Rows of a tile.
const ROWS: usize = 128;
/// Depth of one iteration.
const STEPS: usize = 64;
/// Pipeline stages: the iterations that a block has shared memory for.
const STAGES: usize = 4;
/// Threads of a block: one producer warpgroup that copies, and two consumer warpgroups that
/// multiply.
const THREADS: u32 = 384;
/// Bytes through which the consumer warps pass results.
const STAGED: usize = 8 * 4096;
/// Bytes of barriers, two per stage.
const BARRIERS: usize = STAGES * 2 * 8;

/// Overhead of an iteration in clock cycles, beside the tensor cores' own, measured on an H100.
const TURN: usize = 64;
/// Overhead per column at the end of a tile in clock cycles, measured on an H100.
const COLUMN: usize = 20;
/// The least utilisation in percent: results requested over results that all multiprocessors
/// compute in whole waves of tiles. Below it, smaller tiles take fewer cycles by the model of
/// `warpgroups.rs`, because they keep more multiprocessors busy.
const LEAST_BUSY: usize = 48;

/// A tile: its name in entries, and its columns.
#[derive(Debug, PartialEq, Eq)]
struct MapTile {
    name: &'static str,
    columns: usize,
}

const TILES: [MapTile; 2] = [MapTile { name: "256", columns: 256 }, MapTile { name: "192", columns: 192 }];

impl MapTile {
    /// Returns the shared memory of a block in bytes. Tiles start at a multiple of 1024, hence the
    /// extra 1024.
    fn shared(&self) -> u32 {
        (STAGES * (ROWS + self.columns) * 2 * STEPS + STAGED + BARRIERS + 1024) as u32
    }

    /// Returns the clock cycles of a multiprocessor for this number of tiles.
    fn cycles(&self, tiles: usize, depth: usize) -> usize {
        // Per cycle, the tensor cores accumulate an iteration's depth into 32 results of a tile.
        let turn = ROWS * self.columns / 32 + TURN;
        tiles.saturating_mul(depth.div_ceil(STEPS) * turn + self.columns * COLUMN)
    }
}

/// A divided GEMM: tiles down and across, and those of all matrices, over which the blocks loop.
#[derive(Debug, PartialEq, Eq)]
struct MapDivision {
    tile: &'static MapTile,
    down: usize,
    across: usize,
    tiles: usize,
}

/// Returns the fastest division of `products` GEMMs of these rows, columns and depth, or `None` if
/// too few multiprocessors would be busy.
fn cut(processors: usize, products: usize, [rows, columns, depth]: [usize; 3]) -> Option<MapDivision> {
    let cuts = TILES.iter().map(|tile| {
        let (down, across) = (rows.div_ceil(ROWS), columns.div_ceil(tile.columns));
        let tiles = products.saturating_mul(down).saturating_mul(across);
        MapDivision { tile, down, across, tiles }
    });
    let turns = |cut: &MapDivision| cut.tiles.div_ceil(processors.max(1));
    let best = cuts.min_by_key(|cut| cut.tile.cycles(turns(cut), depth))?;
    let asked = products as u128 * (rows * columns) as u128;
    let possible = turns(&best) as u128 * (processors * ROWS * best.tile.columns) as u128;
    (asked * 100 >= possible * LEAST_BUSY as u128).then_some(best)
}

/// Returns the TMA boxes of an operand, from its contiguous axis, its rows, its matrices, and the
/// rows of a box.
fn boxes(
    part: &StridedTensor,
    sizes: [usize; 2],
    step: usize,
    matrices: (usize, usize),
    rows: usize,
) -> Boxes {
    let (count, matrix) = matrices;
    // The stride between matrices does not matter if there is only one.
    let matrix = if count == 1 { step * sizes[1] } else { matrix };
    Boxes {
        dtype: part.tensor.dtype,
        sizes: [sizes[0] as u64, sizes[1] as u64, count as u64],
        // The encoding takes strides in bytes, and both types have 2.
        steps: [step, matrix].map(|elements| elements as u64 * 2),
        counts: [STEPS as u32, rows as u32, 1],
    }
}

impl Product {
    /// Returns the launch by warpgroups and TMA. `None` if the device has no TMA, or smaller tiles
    /// are better, or the layout does not fit. Operands and result must be whole vectors, and the
    /// batch must have at most one axis and share no matrix.
    pub(super) fn by_maps(&self, cx: &OpCx<'_>, walk: &Walk, matrices: usize) -> Result<Option<Launch>> {
        let y = &self.gemm.result.tensor;
        let suffix = warpgroups::suffix_of(&cx.limits, y.dtype).filter(|_| cx.limits.has_maps);
        let Some(suffix) = suffix else { return Ok(None) };
        let in_vectors = self.in_vectors(walk, 8);
        let is_near = self.gemm.rhs.column != 1;
        let is_readable =
            in_vectors == [true; 2] && self.gemm.lhs.depth == 1 && (!is_near || self.gemm.rhs.depth == 1);
        let is_writable = self.gemm.result.column == 1
            && self.gemm.result.row.is_multiple_of(8)
            && self.gemm.columns.is_multiple_of(8);
        let step = |index: usize| walk.steps.get(index).and_then(|steps| steps.first()).copied();
        let (a_step, b_step) = (step(0).unwrap_or(1), step(1).unwrap_or(1));
        let is_even = walk.sizes.len() <= 1 && a_step > 0 && b_step > 0;
        if self.gemm.rows <= FEW_ROWS || !is_readable || !is_writable || !is_even || self.gemm.depth == 0 {
            return Ok(None);
        }
        let (rows, columns, depth) = (self.gemm.rows, self.gemm.columns, self.gemm.depth);
        let cut = cut(cx.limits.processors as usize, matrices, [rows, columns, depth]);
        let Some(MapDivision { tile, down, across, tiles }) = cut else { return Ok(None) };
        let of_a = boxes(&self.gemm.lhs, [depth, rows], self.gemm.lhs.row, (matrices, a_step as usize), ROWS);
        let (side, of_b) = if is_near {
            (
                "nt",
                boxes(
                    &self.gemm.rhs,
                    [depth, columns],
                    self.gemm.rhs.column,
                    (matrices, b_step as usize),
                    tile.columns,
                ),
            )
        } else {
            (
                "nn",
                boxes(
                    &self.gemm.rhs,
                    [columns, depth],
                    self.gemm.rhs.depth,
                    (matrices, b_step as usize),
                    STEPS,
                ),
            )
        };
        let entry = format!("gemm_maps_{}_{side}_{suffix}", tile.name);
        let launch = Launch::of_type("gemm_maps", suffix, entry)?
            // Persistent blocks: one per multiprocessor, which loops over the tiles.
            .grid([tiles.min(cx.limits.processors as usize).max(1), 1, 1])?
            .block([THREADS, 1, 1])
            .shared(tile.shared())
            .map(&self.gemm.lhs.tensor, of_a)
            .map(&self.gemm.rhs.tensor, of_b)
            .find_tensor(self.addend(0))
            .find_tensor(self.addend(1))
            .tensor(y);
        Ok(Some(self.with_epilogue(launch, walk, [down, across], in_vectors)?.uint(tiles)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// GEMMs with rows, columns and depth on 132 multiprocessors: the tile that takes less time on
    /// an H100.
    #[test]
    fn large_products_have_the_tile_that_keeps_processors_busy() {
        let cases = [
            (1, [4096, 4096, 4096], Some("256")),
            (1, [8192, 8192, 8192], Some("256")),
            (1, [2048, 2048, 2048], Some("256")),
            (1, [4096, 3072, 768], Some("256")),
            (1, [4096, 768, 768], Some("192")),
            (1, [4096, 768, 3072], Some("192")),
            (1, [1024, 3072, 768], Some("192")),
            (1, [2048, 768, 768], Some("192")),
            (96, [512, 64, 512], None),
            (96, [512, 512, 64], Some("256")),
            (1, [128, 768, 3072], None),
            (1, [3136, 256, 64], None),
            (1, [1024, 768, 3072], None),
        ];
        for (products, sizes, name) in cases {
            let cut = cut(132, products, sizes);
            assert_eq!(cut.as_ref().map(|cut| cut.tile.name), name, "{products} of {sizes:?}: {cut:?}");
        }
        assert_eq!(cut(4, 3, [300, 520, 8]).map(|cut| (cut.down, cut.across, cut.tiles)), Some((3, 3, 27)));
    }

    #[test]
    fn blocks_fit_a_processor() {
        assert!(TILES.iter().all(|tile| tile.shared() <= 227 << 10));
    }
}
