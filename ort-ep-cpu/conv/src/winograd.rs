//! Winograd convolution for 3-by-3 kernels with strides of 1 (see [`ort_cpu_vector::winograd`]).
//!
//! A block of tiles at a time goes through three steps. The input transform comes first. Then one
//! GEMM per point of a tile sums over the channels, with tiles as rows and filters as columns. The
//! output transform turns those accumulators into results. Blocks are sized so that both operands
//! of the GEMMs stay in L2. If the transformed weights stay there too, each thread takes whole
//! blocks through all steps; otherwise the threads share each step of a block.
//!
//! bf16 GEMMs round the transformed inputs and weights. For tiles of 2 by 2, whose transforms add 4
//! inputs, that costs about as much accuracy as rounding the inputs. For larger tiles it would cost
//! far more, so they stay in `f32`.

use std::ops::Range;

use super::ConvGeometry;
use super::input::{Input, operands, origin, part};
use ort_cpu_gemm::{
    Activation, Batch, Cpu, Gemm, GemmError, LhsOperand, Origin, PackedRhs, Pairing, Precision, RhsOperand,
    Step, Strided, Weight, apply_steps, check_steps, run_batch,
};
use ort_cpu_threads::parallel::{RowBlock, StridedRows, for_each_chunk_mut};
use ort_cpu_vector::activation::Clamp;
use ort_cpu_vector::simd::MAX_LANES;
use ort_cpu_vector::transpose::{self, strided};
use ort_cpu_vector::winograd::{self, Finish, MOST_REACH, Points, Tile, TileRow, lanes};

/// Elements of the points of a block, which stay in the L2 of each thread.
const BLOCK: usize = 192 << 10;

/// The block size if the transformed weights are at most twice `BLOCK`. Measurements show that
/// reading them for twice as many blocks is then free.
const BLOCK_OF_FEW_WEIGHTS: usize = BLOCK / 2;

/// The minimum number of tiles in a block, so that each read of the transformed weights serves
/// several rows of the GEMM.
const FEWEST_TILES: usize = 16;

/// The minimum number of blocks per thread if blocks are not shared.
const BLOCKS_PER_THREAD: usize = 6;

/// The maximum number of tiles in a row that are transformed at a time, and the input columns that
/// they cover.
const RUN: usize = 16;
const RUN_COLUMNS: usize = RUN * (MOST_REACH - 2) + 2;

/// Spare columns at the end of a row of inputs, so that whole squares can be transposed.
const SQUARE: usize = 8;

/// The inputs of a run of tiles, for as many channels as there are lanes.
type Pixels = [f32; MOST_REACH * (RUN_COLUMNS + SQUARE) * MAX_LANES];

/// Whether Winograd convolution applies.
pub(super) fn supports(geometry: &ConvGeometry) -> bool {
    let window = &geometry.window;
    let plane = window.input[0] == 1 && window.output[0] == 1 && window.pad[0] == 0;
    plane && window.kernel == [1, 3, 3] && window.stride == [1; 3] && window.dilation == [1; 3]
}

/// The error if Winograd is requested for a convolution that it does not support.
pub(super) fn refused() -> GemmError {
    GemmError::Shape("a convolution is not one of 3 by 3 with strides of 1")
}

/// Returns what the GEMMs compute with, if the session uses `cpu`: only tiles of 2 by 2 with an
/// even number of channels may use bf16.
pub(super) fn gemm_cpu(cpu: Cpu, geometry: &ConvGeometry, tile: Tile) -> Cpu {
    match tile == Tile::Two && geometry.group_channels().is_multiple_of(2) {
        true => cpu,
        false => cpu.in_precision(Precision::Fp32),
    }
}

/// Returns the tile size for which Winograd is fastest, by measurement, or `None` if it is not.
pub(super) fn preferred(cpu: Cpu, geometry: &ConvGeometry) -> Option<Tile> {
    /// Fewer channels or filters do not pay for the transforms.
    const FEWEST: usize = 16;
    /// The same for bf16 pairs, which leave less to save.
    const FEWEST_IN_PAIRS: usize = 64;
    /// The transformed weights grow by 4 (tiles of 4 by 4) or by 16/9 (2 by 2). A factor of 4 only
    /// pays if there are few.
    const MOST_FOR_FOUR: usize = 128 * 128;
    /// More weights than this must be read for many tiles, because reading them takes longest.
    const MOST_FOR_FEW_TILES: usize = 256 * 256;
    const MANY_TILES: usize = 32;
    let (channels, filters) = (geometry.group_channels(), geometry.group_filters());
    let paired = Pairing::of(cpu).is_some();
    let fewest = if paired { FEWEST_IN_PAIRS } else { FEWEST };
    if !supports(geometry) || channels.min(filters) < fewest || paired && !channels.is_multiple_of(2) {
        return None;
    }
    let [_, height, width] = geometry.window.output;
    let tiles = |tile: Tile| height.div_ceil(tile.side()) * width.div_ceil(tile.side());
    // Multiply-adds per channel and filter, including those of tiles that reach beyond the image.
    let products = |tile: Tile| tiles(tile) * tile.points();
    // The larger tile must save a third of the multiply-adds.
    let four = channels * filters <= MOST_FOR_FOUR && 3 * products(Tile::Four) < 2 * products(Tile::Two);
    let tile = if four && !paired { Tile::Four } else { Tile::Two };
    let many = geometry.batch * tiles(tile) >= MANY_TILES;
    // Direct convolution needs nine multiply-adds per pixel. Winograd must save a quarter of them.
    let pays = products(tile) * 4 < height * width * 9 * 3;
    (pays && (many || channels * filters <= MOST_FOR_FEW_TILES)).then_some(tile)
}

/// The tiles of a convolution, and how they are split into blocks.
#[derive(Clone, Copy)]
struct Tiling {
    tile: Tile,
    channels: usize,
    filters: usize,
    /// Tiles down and across an image.
    size: [usize; 2],
    /// Tiles of all images.
    count: usize,
    /// Tiles of a block.
    block: usize,
    /// Whether a block is whole rows of tiles and belongs to one thread.
    by_rows: bool,
    /// Channels per element of a point.
    terms: usize,
    /// Strides from one point of a tile to the next, and from one tile to the next.
    point: usize,
    stride: usize,
    /// Stride from one tile's accumulators to the next tile's.
    accumulator: usize,
}

impl Tiling {
    fn new(cpu: Cpu, geometry: &ConvGeometry, tile: Tile) -> Self {
        let (channels, filters) = (geometry.group_channels(), geometry.group_filters());
        let [_, height, width] = geometry.window.output;
        let size = [height.div_ceil(tile.side()), width.div_ceil(tile.side())];
        let count = geometry.batch * size[0] * size[1];
        let terms = if Pairing::of(cpu).is_some() { 2 } else { 1 };
        let (point, accumulator) =
            (channels.next_multiple_of(MAX_LANES) / terms, filters.next_multiple_of(MAX_LANES));
        // GEMM rows at a multiple of the page size would compete for the same cache sets, so a
        // vector of padding is added.
        let stride = tile.points() * point + MAX_LANES;
        let mut tiling = Tiling {
            tile,
            channels,
            filters,
            size,
            count,
            block: 0,
            by_rows: false,
            terms,
            point,
            stride,
            accumulator,
        };
        let weights = tile.points() * channels * filters / terms;
        let values = if weights <= 2 * BLOCK { BLOCK_OF_FEW_WEIGHTS } else { BLOCK };
        let most = values / (tile.points() * (point + accumulator)).max(1);
        // Enough blocks that the threads finish together.
        let rows = (most / size[1].max(1))
            .min(size[0] * geometry.batch / (BLOCKS_PER_THREAD * cpu.threads))
            .min(size[0]);
        // The weights stay in each core's L2, so threads need not share blocks.
        if cpu.threads > 1 && rows > 0 && weights <= BLOCK {
            return Tiling { block: rows * size[1], by_rows: true, ..tiling };
        }
        let most = (most * cpu.threads).max(FEWEST_TILES);
        let block = count.div_ceil(count.div_ceil(most).max(1));
        // Whole rows of tiles, if a block has more than one.
        let block = if block > size[1] { block.next_multiple_of(size[1].max(1)) } else { block };
        tiling.block = block.min(count);
        tiling
    }

    /// Returns the elements of the points of a block, and of the accumulators.
    fn lens(&self) -> [usize; 2] {
        [self.block * self.stride, self.tile.points() * self.block * self.accumulator]
    }

    /// Splits a range of tiles into runs within rows.
    fn runs(self, tiles: Range<usize>) -> impl Iterator<Item = Run> {
        let [rows, columns] = self.size;
        let mut next = tiles.start;
        std::iter::from_fn(move || {
            let column = next % columns.max(1);
            let count = (columns - column).min(RUN).min(tiles.end - next);
            let run = Run { first: next, row: next / columns.max(1) % rows.max(1), column, count };
            next += count;
            (count > 0).then_some(run)
        })
    }
}

/// Adjacent tiles in a row of an image.
struct Run {
    /// The index of the first tile among all tiles.
    first: usize,
    row: usize,
    column: usize,
    count: usize,
}

/// Returns the length of the packed weights of a group.
pub(super) fn group_len(cpu: Cpu, geometry: &ConvGeometry, tile: Tile) -> usize {
    tile.points() * PackedRhs::len(cpu, geometry.group_channels(), geometry.group_filters())
}

/// Transforms and packs the weights of one group: for each point, a B of channels by filters.
pub(super) fn pack<T: Weight>(
    cpu: Cpu,
    geometry: &ConvGeometry,
    tile: Tile,
    weights: &[T],
    packed: &mut [f32],
) {
    const POINTS: usize = MOST_REACH * MOST_REACH * MAX_LANES;
    let (channels, filters) = (geometry.group_channels(), geometry.group_filters());
    let (width, lanes, pairing) = (PackedRhs::len(cpu, 1, 1), lanes(cpu.isa), Pairing::of(cpu));
    let terms = if pairing.is_some() { 2 } else { 1 };
    // The panels of all points that hold the same filters are packed together, because one
    // transform yields all of them.
    let points = packed.chunks_mut(PackedRhs::len(cpu, channels, filters));
    let mut points: Vec<_> = points.map(|point| point.chunks_mut(PackedRhs::len(cpu, channels, 1))).collect();
    let panels = filters.div_ceil(width);
    let mut panels: Vec<Vec<&mut [f32]>> =
        (0..panels).map(|_| points.iter_mut().filter_map(Iterator::next).collect()).collect();
    for_each_chunk_mut(cpu.threads, &mut panels, 1, |panel, points| {
        let (mut taps, mut values) = ([0.0; 9 * MAX_LANES], [0.0; 2 * POINTS]);
        for first in (0..width).step_by(lanes) {
            let filter = panel * width + first;
            for channel in (0..channels).step_by(terms) {
                for (term, values) in values.chunks_exact_mut(POINTS).enumerate().take(terms) {
                    for lane in 0..lanes {
                        // Lanes beyond the last filter transform zeros, which pad the panel.
                        let inside = filter + lane < filters;
                        let from = ((filter + lane) * channels + channel + term) * 9;
                        for tap in 0..9 {
                            taps[tap * lanes + lane] = if inside { weights[from + tap].widen() } else { 0.0 };
                        }
                    }
                    winograd::kernel(cpu.isa, tile, &taps, values, lanes);
                }
                for (point, to) in points.iter_mut().flatten().enumerate() {
                    let to = &mut to[channel / terms * width + first..][..lanes];
                    let from = &values[point * lanes..];
                    match pairing {
                        Some(pairing) => pairing.of_rows((from, POINTS), [2, lanes], to),
                        None => to.copy_from_slice(&from[..lanes]),
                    }
                }
            }
        }
    });
}

/// Returns the `f32` elements of workspace that [`forward`] needs.
pub(super) fn workspace_len(cpu: Cpu, geometry: &ConvGeometry, tile: Tile) -> usize {
    let tiling = Tiling::new(cpu, geometry, tile);
    let slots = if tiling.by_rows { cpu.threads } else { 1 };
    slots * tiling.lens().iter().sum::<usize>()
}

/// Computes the convolution with weights that [`pack`] wrote for each group.
pub(super) fn forward(
    cpu: Cpu,
    geometry: &ConvGeometry,
    tile: Tile,
    input: Input,
    output: &mut [f32],
    workspace: &mut [f32],
) -> Result<(), GemmError> {
    if !supports(geometry) {
        return Err(refused());
    }
    let tiling = Tiling::new(cpu, geometry, tile);
    let pixels = geometry.window.output_len();
    let (needed, len) = (geometry.batch * geometry.filters * pixels, output.len());
    let output = output.get_mut(..needed).ok_or(GemmError::TooShort { what: "a result", needed, len })?;
    check_steps(input.epilogue, [geometry.filters, geometry.batch * geometry.filters, pixels])?;
    let (needed, len) = (workspace_len(cpu, geometry, tile), workspace.len());
    let short = GemmError::TooShort { what: "a convolution's workspace", needed, len };
    let workspace = workspace.get_mut(..needed).ok_or(short)?;
    if tiling.by_rows {
        // Each thread takes blocks of its own, so its GEMMs are not split further.
        let one = Cpu { threads: 1, ..cpu };
        return (0..geometry.groups).try_for_each(|group| {
            let block = Block { cpu: one, geometry, tiling, input, group, tiles: 0..0 };
            block.for_each_rows(cpu.threads, output, workspace)
        });
    }
    // One thread, or weights too large for the L2 of each core: all threads share each step, so the
    // weights are read once per block.
    let (points, accumulators) = workspace.split_at_mut(tiling.lens()[0]);
    for group in 0..geometry.groups {
        for first in (0..tiling.count).step_by(tiling.block.max(1)) {
            let tiles = first..(first + tiling.block).min(tiling.count);
            let block = Block { cpu, geometry, tiling, input, group, tiles };
            block.transform_places(points)?;
            block.multiply(points, accumulators)?;
            block.transform_output(accumulators, output)?;
        }
    }
    Ok(())
}

/// Some tiles of a group, over all its channels.
struct Block<'a> {
    cpu: Cpu,
    geometry: &'a ConvGeometry,
    tiling: Tiling,
    input: Input<'a>,
    group: usize,
    tiles: Range<usize>,
}

impl Block<'_> {
    /// Tiles of an image.
    fn image_tiles(&self) -> usize {
        self.tiling.size[0] * self.tiling.size[1]
    }

    /// Returns the index of an image's group among all of them.
    fn index(&self, image: usize) -> usize {
        image * self.geometry.groups + self.group
    }

    /// Returns the channels of one group of one image, and the group's packed weights.
    fn operands(&self, index: usize) -> Result<(&[f32], &[f32]), GemmError> {
        let weights_len = group_len(self.cpu, self.geometry, self.tiling.tile);
        operands(self.geometry, &self.input, weights_len, index)
    }

    /// Computes all results of the group. Each thread processes some rows of tiles at a time.
    fn for_each_rows(
        &self,
        threads: usize,
        output: &mut [f32],
        workspace: &mut [f32],
    ) -> Result<(), GemmError> {
        let Tiling { tile, filters, size, .. } = self.tiling;
        let [_, height, width] = self.geometry.window.output;
        let plane = height * width;
        let strides = [self.geometry.filters * plane, plane, width];
        let results = StridedRows::new(
            &mut output[self.group * filters * plane..],
            [self.geometry.batch, filters, height],
            strides,
            width,
        )
        .ok_or(GemmError::Shape("the planes of a result overlap"))?;
        // All operands are checked here, so that the threads cannot fail.
        self.operands(self.index(self.geometry.batch - 1))?;
        let rows = self.tiling.block / size[1].max(1);
        let [points, accumulators] = self.tiling.lens();
        results.for_each_block(
            threads,
            [filters, rows * tile.side()],
            (workspace, points + accumulators),
            |mut to, scratch| {
                let (points, accumulators) = scratch.split_at_mut(points);
                let of_image = to.outer * self.image_tiles();
                let [first, end] = [to.ranges[1].start / tile.side(), to.ranges[1].end.div_ceil(tile.side())]
                    .map(|row| of_image + row * size[1]);
                let block = Block { tiles: first..end, ..*self };
                if block.transform_places(points).and_then(|()| block.multiply(points, accumulators)).is_ok()
                {
                    block.transform_output_rows(accumulators, &mut to);
                }
            },
        );
        Ok(())
    }

    fn transform_places(&self, points: &mut [f32]) -> Result<(), GemmError> {
        let (tiling, lanes) = (&self.tiling, lanes(self.cpu.isa));
        // All images are checked here, so that the threads cannot fail.
        let last = self.index(self.geometry.batch - 1);
        self.operands(last)?;
        let count = self.tiles.len();
        // At most a row of tiles, so that a run is not cut, but enough chunks for all threads.
        let chunk = tiling.size[1].min(count.div_ceil(self.cpu.threads));
        let points = &mut points[..count * tiling.stride];
        for_each_chunk_mut(self.cpu.threads, points, chunk * tiling.stride, |index, points| {
            let mut pixels: Pixels = [0.0; _];
            let first = self.tiles.start + index * chunk;
            for run in tiling.runs(first..first + points.len() / tiling.stride) {
                let image = self.index(run.first / self.image_tiles());
                let Ok((image, _)) = self.operands(image) else { return };
                // Neighbouring tiles share two columns of input. `SQUARE` more are slack for the
                // transposition.
                let columns = run.count * tiling.tile.side() + 2 + SQUARE;
                for channel in (0..tiling.channels).step_by(lanes) {
                    self.read_places(&run, image, channel, (&mut pixels, columns));
                    let at = (run.first - first) * tiling.stride + channel / tiling.terms;
                    let to = Points { values: &mut points[at..], tile: tiling.stride, point: tiling.point };
                    let paired = tiling.terms > 1;
                    let row = TileRow { tile: tiling.tile, tiles: run.count, columns };
                    winograd::input(self.cpu.isa, paired, row, &pixels, to);
                }
            }
        });
        Ok(())
    }

    /// Reads the inputs that a run covers, for some channels, with the channels contiguous and
    /// zeros beyond the image.
    fn read_places(&self, run: &Run, image: &[f32], channel: usize, (pixels, columns): (&mut Pixels, usize)) {
        let Tiling { tile, channels, .. } = self.tiling;
        let ([_, height, width], [_, top, left]) = (self.geometry.window.input, self.geometry.window.pad);
        let (lanes, plane) = (lanes(self.cpu.isa), height * width);
        let count = (channels - channel).min(lanes);
        let wanted = run.count * tile.side() + 2;
        let first = (run.column * tile.side()).wrapping_sub(left) as isize;
        let before = (-first).clamp(0, wanted as isize) as usize;
        let end = (width as isize - first).clamp(before as isize, wanted as isize) as usize;
        for (row, pixels) in pixels.chunks_mut(columns * lanes).take(tile.reach()).enumerate() {
            let y = (run.row * tile.side() + row).wrapping_sub(top);
            if y >= height || before == end {
                pixels.fill(0.0);
                continue;
            }
            let from = &image[channel * plane + y * width + (first + before as isize) as usize..];
            // Reading whole squares is faster. The excess columns are overwritten below.
            let whole = (end - before).next_multiple_of(SQUARE);
            // The last channels of an image have no slack behind them.
            let fits = (count - 1) * plane + whole <= from.len();
            let read = if fits { whole } else { end - before };
            let matrix =
                transpose::Strided { rows: count, columns: read, from_stride: plane, to_stride: lanes };
            pixels[..before * lanes].fill(0.0);
            strided(self.cpu.isa, &matrix, from, &mut pixels[before * lanes..]);
            pixels[end * lanes..].fill(0.0);
        }
    }

    /// Runs one GEMM per point, which sums over the channels.
    fn multiply(&self, points: &[f32], accumulators: &mut [f32]) -> Result<(), GemmError> {
        let Tiling { tile, channels, filters, terms, point, stride, accumulator, .. } = self.tiling;
        let (rows, packed) = (self.tiles.len(), PackedRhs::len(self.cpu, channels, filters));
        let (_, weights) = self.operands(self.group)?;
        // One GEMM per point. Its rows are the tiles, `stride` apart, because the transform writes
        // all points of a tile next to each other.
        let problem = |index: usize| {
            let len = (rows - 1) * stride + channels / terms;
            let places = part("transformed places", points, index * point, len)?;
            let lhs = match terms {
                1 => Strided::new(places, [rows, channels], [stride, 1])?,
                _ => Strided::of_pairs(places, [rows, channels], stride)?,
            };
            let rhs = part("packed weights", weights, index * packed, packed)?;
            let rhs = PackedRhs::new(self.cpu, rhs, channels, filters)?;
            Ok(Gemm::new(LhsOperand::Plain(lhs), RhsOperand::Packed(rhs)))
        };
        let results = Batch {
            values: accumulators,
            count: tile.points(),
            row_stride: accumulator,
            batch_stride: rows * accumulator,
        };
        // Weights are packed and points are read in place, so the GEMMs need no workspace.
        run_batch(self.cpu, &problem, results, &mut [])
    }

    fn transform_output(&self, accumulators: &[f32], output: &mut [f32]) -> Result<(), GemmError> {
        let (tiling, lanes) = (&self.tiling, lanes(self.cpu.isa));
        let (plane, tiles) = (self.geometry.window.output_len(), self.image_tiles());
        let planes = tiling.filters * plane;
        for image in self.tiles.start / tiles..self.tiles.end.div_ceil(tiles) {
            // A block may begin and end within an image.
            let of_image = (image * tiles).max(self.tiles.start)..((image + 1) * tiles).min(self.tiles.end);
            let index = self.index(image);
            let (epilogue, origin) = (self.input.epilogue, origin(self.geometry, index));
            let output = &mut output[index * planes..][..planes];
            for_each_chunk_mut(self.cpu.threads, output, lanes * plane, |block, planes| {
                let (mut pixels, filter): (Pixels, _) = ([0.0; _], block * lanes);
                let count = planes.len() / plane;
                let (finish, rest) = in_registers(epilogue, origin.bias_row + filter, count);
                for run in tiling.runs(of_image.clone()) {
                    let at = (run.first - self.tiles.start) * tiling.accumulator + filter;
                    let point = self.tiles.len() * tiling.accumulator;
                    let from = Points { values: &accumulators[at..], tile: tiling.accumulator, point };
                    let columns = run.count * tiling.tile.side();
                    let row = TileRow { tile: tiling.tile, tiles: run.count, columns };
                    winograd::output(self.cpu.isa, row, from, finish, &mut pixels);
                    self.write_places(&run, &pixels, planes, (rest, origin, filter));
                }
            });
        }
        Ok(())
    }

    /// Output transform of rows of tiles of an image, to rows of its results.
    fn transform_output_rows(&self, accumulators: &[f32], to: &mut RowBlock<'_, f32>) {
        let (tiling, lanes, side) = (&self.tiling, lanes(self.cpu.isa), self.tiling.tile.side());
        let [_, height, width] = self.geometry.window.output;
        let origin = origin(self.geometry, self.index(to.outer));
        let point = self.tiles.len() * tiling.accumulator;
        let (mut pixels, mut turned): (Pixels, Pixels) = ([0.0; _], [0.0; _]);
        for filter in (0..tiling.filters).step_by(lanes) {
            let count = lanes.min(tiling.filters - filter);
            let (finish, rest) = in_registers(self.input.epilogue, origin.bias_row + filter, count);
            for run in tiling.runs(self.tiles.clone()) {
                let from = &accumulators[(run.first - self.tiles.start) * tiling.accumulator + filter..];
                let from = Points { values: from, tile: tiling.accumulator, point };
                let (columns, first) = (run.count * side, run.column * side);
                let row = TileRow { tile: tiling.tile, tiles: run.count, columns };
                winograd::output(self.cpu.isa, row, from, finish, &mut pixels);
                let wanted = columns.min(width - first);
                for (index, y) in (run.row * side..height.min((run.row + 1) * side)).enumerate() {
                    let matrix = transpose::Strided {
                        rows: wanted,
                        columns: count,
                        from_stride: lanes,
                        to_stride: wanted,
                    };
                    strided(self.cpu.isa, &matrix, &pixels[index * columns * lanes..], &mut turned);
                    for (at, values) in turned.chunks_exact(wanted).take(count).enumerate() {
                        let row = &mut to.row([filter + at, y])[first..first + wanted];
                        row.copy_from_slice(values);
                        apply_steps(rest, origin, [filter + at, y * width + first], row);
                    }
                }
            }
        }
    }

    /// Writes the results of a run to the planes of some filters and applies the rest of the
    /// epilogue.
    fn write_places(
        &self,
        run: &Run,
        pixels: &[f32],
        planes: &mut [f32],
        (rest, origin, filter): (&[Step], Origin, usize),
    ) {
        let ([_, height, width], side) = (self.geometry.window.output, self.tiling.tile.side());
        let (lanes, plane, columns) = (lanes(self.cpu.isa), height * width, run.count * side);
        let (first, row) = (run.column * side, run.row * side);
        let (count, rows) = (columns.min(width - first), side.min(height - row));
        // Rows that are contiguous on both sides are written as one.
        let (count, rows) =
            if count == width && columns == width { (count * rows, 1) } else { (count, rows) };
        for index in 0..rows {
            let at = (row + index) * width + first;
            let matrix = transpose::Strided {
                rows: count,
                columns: planes.len() / plane,
                from_stride: lanes,
                to_stride: plane,
            };
            strided(self.cpu.isa, &matrix, &pixels[index * columns * lanes..], &mut planes[at..]);
            if !rest.is_empty() {
                for (index, plane) in planes.chunks_mut(plane).enumerate() {
                    apply_steps(rest, origin, [filter + index, at], &mut plane[at..at + count]);
                }
            }
        }
    }
}

/// Splits an epilogue into what the output transform does in registers, for `count` rows from row
/// `first` on, and the rest.
fn in_registers<'a>(epilogue: &'a [Step<'a>], first: usize, count: usize) -> (Finish, &'a [Step<'a>]) {
    let mut finish = Finish { bias: [0.0; MAX_LANES], clamp: Clamp::NONE };
    let mut rest = epilogue;
    if let [Step::RowBias(bias), behind @ ..] = rest {
        finish.bias[..count].copy_from_slice(&bias[first..][..count]);
        rest = behind;
    }
    let (min, max) = match rest {
        [Step::Activate(Activation::Relu), ..] => (0.0, f32::INFINITY),
        [Step::Activate(Activation::Clip { min, max }), ..] => (*min, *max),
        _ => return (finish, rest),
    };
    finish.clamp = Clamp { min, max };
    (finish, &rest[1..])
}
