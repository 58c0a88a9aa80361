//! Kernels of products of bytes, and the loop that calls them over a block of the result.

mod execute;
mod finish;
mod tile;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

pub(in crate::gemm) use execute::{column_sums, execute};

use finish::FinishFunction;
use tile::{CodingFunction, TileFunction};

use crate::simd::Isa;

/// The most rows and columns in a tile, and lanes in a vector, of any instruction set.
const MAX_ROWS: usize = 8;
const MAX_WIDTH: usize = 64;
const MAX_LANES: usize = crate::simd::MAX_LANES;

/// The functions of one instruction set and the shapes of their tiles.
pub(in crate::gemm) struct ByteKernel {
    /// The most rows in a tile.
    rows: usize,
    /// The most vectors in a row of a tile.
    vectors: usize,
    /// Sums in a vector.
    lanes: usize,
    /// Tile functions by `(rows - 1) * vectors + (vectors - 1)`: rows of unsigned bytes, and of signed ones.
    unsigned_rows: &'static [TileFunction],
    signed_rows: &'static [TileFunction],
    /// The same for signed rows whose sums become codes at once, or none.
    coded_rows: &'static [CodingFunction],
    /// The same for tiles of one vector more, with fewer rows, by `rows - 1`.
    coded_wide: &'static [CodingFunction],
    finish: FinishFunction,
}

impl ByteKernel {
    /// The kernel of `isa`, or of the widest instruction set below it that this CPU has.
    pub(in crate::gemm) fn of(isa: Isa) -> &'static ByteKernel {
        #[cfg(target_arch = "x86_64")]
        {
            let isa = isa.min(Isa::widest());
            if isa == Isa::Avx512 && crate::simd::bytes::has_vnni() {
                return &avx512::KERNEL;
            }
            if isa >= Isa::Avx2 {
                return &avx2::KERNEL;
            }
        }
        let _ = isa;
        &portable::KERNEL
    }

    /// Columns in a panel.
    pub(in crate::gemm) fn width(&self) -> usize {
        self.vectors * self.lanes
    }

    /// Rows in a tile of so many vectors for a product of so many rows. Tiles are made nearly equal.
    fn height(&self, rows: usize, vectors: usize) -> usize {
        let most = if vectors > self.vectors { self.coded_wide.len() } else { self.rows };
        rows.div_ceil(rows.div_ceil(most.max(1)).max(1)).max(1)
    }
}
