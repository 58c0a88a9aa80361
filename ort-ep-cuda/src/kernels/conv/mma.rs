//! The division of convolutions for tensor cores: tiles, and split-K parts.

use ort_core::Result;
use ort_core::dtype::DType;

use super::super::gemm::mma_suffix;
use crate::driver::Limits;
use crate::launch::{OpCx, Operand};

/// Bytes of depth that a tensor core kernel multiplies per iteration.
const OF_TURN: usize = 64;
/// The least number of iterations worth a block of its own.
const TURNS: usize = 8;

/// How the work is divided for tensor cores.
pub(in crate::kernels) struct MmaDivision {
    /// The type's suffix in entry names, and the tile of a block.
    pub(in crate::kernels) suffix: &'static str,
    pub(in crate::kernels) tile: &'static MmaTile,
    /// All blocks, the blocks along filters and along columns, and the split-K parts.
    pub(in crate::kernels) blocks: usize,
    pub(in crate::kernels) down: usize,
    pub(in crate::kernels) across: usize,
    pub(in crate::kernels) parts: usize,
}

/// A block's tile, as in `cu/conv_cores.cuh`: filters by columns. A column is a position, or
/// whatever else a filter has results for.
pub(in crate::kernels) struct MmaTile {
    pub(in crate::kernels) name: &'static str,
    filters: usize,
    columns: usize,
    pub(in crate::kernels) threads: u32,
}

const LARGE: MmaTile = MmaTile { name: "large", filters: 128, columns: 128, threads: 256 };
const SMALL: MmaTile = MmaTile { name: "small", filters: 64, columns: 64, threads: 128 };
const FEW: MmaTile = MmaTile { name: "few", filters: 32, columns: 128, threads: 128 };

impl MmaDivision {
    /// Divides `groups` GEMMs of `filters` by `columns` results over this depth. Returns `None` if
    /// tensor cores do not support the type.
    pub(in crate::kernels) fn new(
        limits: &Limits,
        dtype: DType,
        groups: usize,
        [filters, columns, depth]: [usize; 3],
    ) -> Result<Option<MmaDivision>> {
        let Some(suffix) = mma_suffix(limits, dtype)? else { return Ok(None) };
        let blocks = |tile: &MmaTile| [filters.div_ceil(tile.filters), columns.div_ceil(tile.columns)];
        let count = |tile: &MmaTile| blocks(tile).into_iter().fold(groups, usize::saturating_mul);
        let processors = limits.processors as usize;
        let tile = match filters {
            // A tile of 64 filters would be half empty.
            ..=32 => &FEW,
            // Large tiles only if every multiprocessor gets one.
            65.. if count(&LARGE) >= processors => &LARGE,
            _ => &SMALL,
        };
        let [down, across] = blocks(tile);
        // Split-K: if the blocks do not keep all multiprocessors busy, each accumulates a part of
        // the depth.
        let turns = depth.saturating_mul(dtype.byte_len(1).unwrap_or(0)).div_ceil(OF_TURN);
        let wanted = processors.saturating_mul(2).checked_div(count(tile)).unwrap_or(1);
        let parts = wanted.min(turns / TURNS).max(1);
        Ok(Some(MmaDivision { suffix, tile, blocks: count(tile), down, across, parts }))
    }

    /// Returns the division's fields of the kernels' `Convolution` structure.
    pub(in crate::kernels) fn words(&self) -> [usize; 3] {
        [self.down, self.across, self.parts]
    }

    /// Reserves the partial accumulators in the workspace; `None` without split-K.
    pub(in crate::kernels) fn parts(&self, cx: &OpCx<'_>, taken: &mut usize) -> Result<Option<Operand>> {
        let shape = [self.parts, cx.output(0)?.count()];
        Ok((self.parts > 1).then(|| cx.workspace(taken, DType::F32, &shape)))
    }
}
