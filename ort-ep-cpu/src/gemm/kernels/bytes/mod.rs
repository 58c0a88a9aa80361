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
const MAX_ROWS: usize = 10;
const MAX_WIDTH: usize = 64;
const MAX_LANES: usize = crate::simd::MAX_LANES;

/// The functions of one instruction set and the shapes of their tiles.
///
/// Tile functions are listed by the vectors in a row of the tile, from one on, and for each by its
/// rows, from one on.
pub(in crate::gemm) struct ByteKernel {
    /// Vectors in a panel of windows.
    vectors: usize,
    /// Sums in a vector.
    lanes: usize,
    /// Rows of unsigned bytes, and of signed ones.
    unsigned_rows: &'static [&'static [TileFunction]],
    signed_rows: &'static [&'static [TileFunction]],
    /// The same for tiles whose sums become codes at once, or none.
    coded_unsigned: &'static [&'static [CodingFunction]],
    coded_signed: &'static [&'static [CodingFunction]],
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

    /// What the place of a packed number depends on.
    pub(in crate::gemm) fn layout(&self) -> String {
        let ByteKernel { vectors, lanes, unsigned_rows, signed_rows, .. } = self;
        format!("{vectors}x{lanes}/{}/{}", unsigned_rows.len(), signed_rows.len())
    }

    /// Columns in a panel of windows.
    pub(in crate::gemm) fn width(&self) -> usize {
        self.vectors * self.lanes
    }

    /// Columns in a panel of a packed matrix of so many columns. Panels are made nearly equal.
    pub(in crate::gemm) fn packed_width(&self, columns: usize) -> usize {
        let (vectors, most) = (columns.div_ceil(self.lanes).max(1), self.unsigned_rows.len().max(1));
        vectors.div_ceil(vectors.div_ceil(most)) * self.lanes
    }

    /// Rows in a tile of so many vectors for a product of so many rows. Tiles are made nearly
    /// equal.
    fn height(&self, rows: usize, vectors: usize) -> usize {
        let most = self.unsigned_rows.get(vectors - 1).map_or(1, |functions| functions.len());
        rows.div_ceil(rows.div_ceil(most.max(1)).max(1)).max(1)
    }
}
