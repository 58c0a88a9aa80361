//! NHWC convolutions of float16 and bfloat16 with few channels, typically the first layer
//! (`cu/conv_pixels_rows.cuh`).

use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ops::nn::problem::{NO_AXIS, PixelLayout};

use super::super::gemm::mma_suffix;
use super::shape::{Conv, FEW_FILTERS};
use crate::driver::Limits;
use crate::launch::{Launch, OpCx, Operand};

/// The most elements in a row of a window. With more channels, 16 bytes hold mostly one tap, and
/// the general kernels do as well.
const MOST_STEPS: usize = 64;
/// The shared memory limit of a block in bytes, so that several blocks fit on a multiprocessor.
const MOST_SHARED: usize = 64 << 10;
const THREADS: u32 = 128;
/// Blocks per multiprocessor; they loop over the tiles.
const BLOCKS: usize = 4;

/// How such a convolution is divided.
pub(super) struct RowTiles {
    suffix: &'static str,
    /// A tile: positions and filters, and how many of the positions are adjacent in a row.
    positions: usize,
    filters: usize,
    columns: usize,
    /// The tiles of an image, down and across.
    down: usize,
    across: usize,
    blocks: [usize; 2],
    shared: usize,
}

impl RowTiles {
    /// Divides a convolution, or returns `None` if other kernels compute it.
    pub(super) fn new(conv: &Conv, limits: &Limits, dtype: DType) -> Result<Option<RowTiles>> {
        let Some(suffix) = mma_suffix(limits, dtype)?.filter(|_| dtype != DType::F32) else {
            return Ok(None);
        };
        let [flat, height, width] = conv.axes;
        let steps = width.kernel.saturating_mul(conv.channels);
        let is_fit = conv.layout == PixelLayout::ChannelsLast
            && !conv.transposed
            && conv.groups == 1
            && conv.filters > FEW_FILTERS
            && !conv.channels.is_multiple_of(8)
            && steps <= MOST_STEPS
            && flat == NO_AXIS
            && height.dilation == 1
            && width.dilation == 1;
        if !is_fit {
            return Ok(None);
        }
        let shape = |positions: usize, columns: usize| {
            [height.output.div_ceil(positions / columns), width.output.div_ceil(columns)]
        };
        let tiles = |positions: usize, columns: usize| {
            shape(positions, columns).into_iter().fold(conv.batch, usize::saturating_mul)
        };
        let best = |positions: usize| {
            let widths = [16, 32, 64, 128].into_iter().filter(|columns| *columns <= positions);
            widths.min_by_key(|columns| tiles(positions, *columns)).unwrap_or(16)
        };
        // Large tiles only if every block gets at least one.
        let processors = limits.processors as usize;
        let positions = if tiles(128, best(128)) >= BLOCKS * processors { 128 } else { 64 };
        let (columns, filters) = (best(positions), if conv.filters <= 32 { 32 } else { 64 });
        let ([down, across], count) = (shape(positions, columns), tiles(positions, columns));
        let blocks = [count.min(BLOCKS * processors), conv.filters.div_ceil(filters)];
        let padded = steps.next_multiple_of(8);
        let step = width.stride * conv.channels;
        // Mirrors `RowTile` and `filter_pitch` of the kernel.
        let pitch = ((columns - 1) * step + padded + 3) / 2 * 2;
        let rows = (positions / columns - 1) * height.stride + height.kernel;
        let of_filters = filters * ((height.kernel * padded / 8) | 1) * 8;
        let shared = 2 * (of_filters + rows * pitch * (1 + step % 2));
        let tiles = RowTiles { suffix, positions, filters, columns, down, across, blocks, shared };
        Ok((shared <= MOST_SHARED).then_some(tiles))
    }

    pub(super) fn launch(
        &self,
        conv: &Conv,
        cx: &OpCx<'_>,
        [bias, addend]: [Option<&Operand>; 2],
    ) -> Result<Launch> {
        let (family, suffix) = ("conv_pixels_cores", self.suffix);
        let entry = format!("conv_pixels_rows_{}_{}_{suffix}", self.positions, self.filters);
        let [blocks, of_filters] = self.blocks;
        let launch = Launch::of_type(family, suffix, entry)?
            .grid([blocks, of_filters, 1])?
            .block([THREADS, 1, 1])
            .shared(self.shared as u32)
            .tensor(cx.input(0)?)
            .tensor(cx.input(1)?)
            .find_tensor(bias)
            .find_tensor(addend)
            .tensor(cx.output(0)?);
        conv.with_epilogue(launch, cx, [self.down, self.across, 1])?.uint(self.columns)
    }
}
