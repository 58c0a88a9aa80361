//! A pointwise convolution and the depthwise one that reads it, as one: what lies between is never
//! whole in memory.
//!
//! A task has some channels of one image, or of a part of its rows, and goes down it in bands of
//! rows. For a band the product makes the rows between that its windows reach first, behind those
//! that stay from the band before; then the filter of each channel reads them. Several threads cut
//! an image across, as those of the products before and behind do: what a core has written is then
//! in its own cache for what comes next. The few rows between that windows of two parts reach are
//! computed for both.

use std::ops::Range;

use parking_lot::Mutex;

use super::{part, parts_of_image};
use crate::gemm::{
    AOperand, BOperand, BSource, Cpu, Gemm, GemmError, Origin, PackedA, Pairing, Step, Strided, check_steps,
    workspace_len_beside_ready,
};
use crate::parallel::{LineBlock, Lines};
use crate::vector::activation::Activation;
use crate::vector::depthwise::DepthwisePlan;
use crate::vector::window::Window;

/// How much a task has at a time, about, and how many tasks there are.
#[derive(Clone, Copy)]
struct Sizes {
    /// Columns of a product.
    columns: usize,
    /// Values between: a part of the second-level cache.
    values: usize,
    /// Tasks for each thread at least, to even out unequal speeds.
    tasks: usize,
}

/// A panel of weights for much of an image. With half as many columns the calls of products show: a
/// fiftieth of the time for images of 112 by 112, measured with AVX-512.
const OF_NUMBERS: Sizes = Sizes { columns: 3200, values: 25 << 10, tasks: 4 };

/// Each product turns its part of the image into pairs, so that it had better have many rows.
const OF_PAIRS: Sizes = Sizes { columns: 800, values: 100 << 10, tasks: 1 };

/// Rows of results that are computed together: a band has a multiple of them.
const ROWS: usize = 4;

/// Bands of an image at most: padding has no bound, and each band is looked at when memory is
/// planned.
const MOST_BANDS: usize = 4096;

/// Multiplications of a product worth a thread of their own, and how many of them take as long as
/// one of a filter.
const WORTH_A_THREAD: usize = 1 << 19;
const STEPS_IN_A_TAP: usize = 4;

/// The sizes of both convolutions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SeparableGeometry {
    /// Images.
    pub(crate) batch: usize,
    /// Channels of an image.
    pub(crate) channels: usize,
    /// Channels between the two, and of the result.
    pub(crate) filters: usize,
    /// The windows of the depthwise convolution.
    pub(crate) window: Window,
}

/// What the two convolutions read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SeparableInput<'a> {
    /// The images (N, K, H, W).
    pub(crate) image: &'a [f32],
    /// The weights of the pointwise one (C, K), packed.
    pub(crate) pointwise: PackedA<'a>,
    /// Its epilogue: bias and activation.
    pub(crate) epilogue: &'a [Step<'a>],
    /// The filters of the depthwise one (C, h, w).
    pub(crate) depthwise: &'a [f32],
    /// Its bias.
    pub(crate) bias: Option<&'a [f32]>,
    /// Its activation.
    pub(crate) activation: Activation,
}

/// Some rows of the result, and the rows between that their windows reach.
#[derive(Clone, Debug)]
struct Band {
    rows: Range<usize>,
    between: Range<usize>,
    /// Of those between, the ones that the band before did not reach; all for the first band of a
    /// task.
    fresh: Range<usize>,
    /// How many rows the others move up.
    moved: usize,
    /// The windows on these rows alone.
    window: Window,
}

/// How the work is cut.
#[derive(Clone, Copy, Debug)]
struct Cut {
    geometry: SeparableGeometry,
    /// What a task computes with.
    cpu: Cpu,
    /// Rows of a band, and of the part of an image that a task has.
    rows: usize,
    part: usize,
    /// From one channel between to the next, for the rows of a band.
    plane: usize,
    /// Panels of weights, and as many channels, of a task.
    panels: usize,
    channels: usize,
    /// Threads, each with a slot of the workspace.
    threads: usize,
    /// Values of a slot: rows between, and the scratch of a product and of a plane.
    slot: [usize; 3],
}

impl Cut {
    fn new(cpu: Cpu, geometry: SeparableGeometry) -> Cut {
        let SeparableGeometry { batch, channels, filters, window } = geometry;
        let one = Cpu { threads: 1, ..cpu };
        let height = PackedA::height_of(cpu, filters);
        let sizes = if Pairing::of(cpu).is_some() { OF_PAIRS } else { OF_NUMBERS };
        let rows = sizes.columns / (window.input[1] * window.strides[0]).max(1);
        let rows = (rows / ROWS * ROWS).max(ROWS).max(window.output[0].div_ceil(MOST_BANDS));
        let rows = rows.min(window.output[0].max(1));
        let steps = channels + STEPS_IN_A_TAP * window.kernel[0] * window.kernel[1];
        let work = [batch, window.input[0], window.input[1], filters, steps];
        let work = work.iter().fold(1_usize, |work, size| work.saturating_mul(*size));
        let threads = cpu.threads.min(work / WORTH_A_THREAD).max(1);
        let parts = parts_of_image(threads, batch, window.output);
        let part = window.output[0].div_ceil(parts).max(1);
        let mut cut =
            Cut { geometry, cpu: one, rows, part, plane: 0, panels: 1, channels: 0, threads, slot: [0; 3] };
        let tallest = cut.bands().map(|band| band.between.len()).max().unwrap_or(0);
        // A distance of whole lines, and not of a power of two: that would put all channels in the
        // same sets of a cache.
        cut.plane = (tallest * window.input[1]).next_multiple_of(16) + 16;
        let tasks = if threads > 1 { (threads * sizes.tasks).div_ceil(batch.max(1) * parts) } else { 1 };
        let fair = filters.div_ceil(height).div_ceil(tasks);
        cut.panels = fair.min(sizes.values / (height * cut.plane)).max(1);
        cut.channels = cut.panels * height;
        cut.threads = threads.min(batch * parts * filters.div_ceil(cut.channels)).max(1);
        cut.slot = cut.slot_lens();
        cut
    }

    /// Values of the parts of a slot, in whole lines.
    fn slot_lens(&self) -> [usize; 3] {
        let SeparableGeometry { channels, filters, window, .. } = self.geometry;
        let most = self.channels.min(filters);
        // What is left over may be the only task that packs.
        let counts = [most, if most > 0 { filters % most } else { 0 }];
        let (mut product, mut scratch) = (0, 0);
        for band in self.bands() {
            scratch = scratch.max(DepthwisePlan::new(self.cpu.isa, band.window).scratch_len());
            for rows in counts {
                let shape = [rows, band.fresh.len() * window.input[1], channels];
                product = product.max(workspace_len_beside_ready(self.cpu, 1, shape, BSource::Rows));
            }
        }
        [most * self.plane, product, scratch].map(|len| len.next_multiple_of(16))
    }

    fn slot_len(&self) -> usize {
        self.slot.iter().fold(16, |sum: usize, len| sum.saturating_add(*len))
    }

    /// The bands of all parts of an image.
    fn bands(&self) -> impl Iterator<Item = Band> + use<> {
        let (cut, height) = (*self, self.geometry.window.output[0]);
        (0..height)
            .step_by(self.part)
            .flat_map(move |first| cut.bands_of(first..(first + cut.part).min(height)))
    }

    /// The bands of one part: these rows of the result.
    fn bands_of(&self, part: Range<usize>) -> impl Iterator<Item = Band> + use<> {
        let (window, count, end) = (self.geometry.window, self.rows, part.end);
        part.clone().step_by(count).map(move |first| {
            let before = first.saturating_sub(count).max(part.start)..first;
            Band::new(window, before, first..(first + count).min(end))
        })
    }
}

impl Band {
    /// The band of these rows, behind that of the rows `before`.
    fn new(window: Window, before: Range<usize>, rows: Range<usize>) -> Band {
        let ((there, _), (between, own)) = (window.band(before.clone()), window.band(rows.clone()));
        let (fresh, moved) = match before.is_empty() {
            true => (between.clone(), 0),
            false => (between.start.max(there.end)..between.end, between.start - there.start),
        };
        Band { rows, between, fresh, moved, window: own }
    }
}

/// Values of workspace that [`forward`] needs.
pub(crate) fn workspace_len(cpu: Cpu, geometry: SeparableGeometry) -> usize {
    let cut = Cut::new(cpu, geometry);
    cut.threads.saturating_mul(cut.slot_len())
}

/// Computes both convolutions into `output` (N, C, H, W).
///
/// # Errors
///
/// When a slice is too short.
pub(crate) fn forward(
    cpu: Cpu,
    geometry: SeparableGeometry,
    input: SeparableInput<'_>,
    output: &mut [f32],
    workspace: &mut [f32],
) -> Result<(), GemmError> {
    let SeparableGeometry { batch, channels, filters, window } = geometry;
    let [between, plane] = [window.input, window.output].map(|[height, width]| height * width);
    if AOperand::Packed(input.pointwise).shape() != [filters, channels] {
        return Err(GemmError::Shape("pointwise weights are not as many as the channels"));
    }
    part("images", input.image, 0, batch * channels * between)?;
    part("depthwise weights", input.depthwise, 0, filters * window.kernel[0] * window.kernel[1])?;
    part("a bias", input.bias.unwrap_or(&[]), 0, if input.bias.is_some() { filters } else { 0 })?;
    check_steps(input.epilogue, [filters, filters, between])?;
    let cut = Cut::new(cpu, geometry);
    let (needed, len) = (cut.threads * cut.slot_len(), workspace.len());
    let workspace = workspace.get_mut(..needed).ok_or(GemmError::TooShort {
        what: "a convolution's workspace",
        needed,
        len,
    })?;
    let [height, width] = window.output;
    let lines = Lines::new(output, [batch, height, filters], [filters * plane, width, plane], width);
    let lines = lines.ok_or(GemmError::Shape("a convolution's result is too short"))?;
    if batch * filters * plane == 0 {
        return Ok(());
    }
    let failure = Mutex::new(None);
    lines.for_each_block(
        cut.threads,
        [cut.part, cut.channels],
        (workspace, cut.slot_len()),
        |lines, slot| {
            if let Err(error) = cut.run(&input, lines, slot) {
                *failure.lock() = Some(error);
            }
        },
    );
    failure.into_inner().map_or(Ok(()), Err)
}

impl Cut {
    /// One task: the channels of `lines`, band by band.
    fn run(
        &self,
        input: &SeparableInput<'_>,
        mut lines: LineBlock<'_, f32>,
        slot: &mut [f32],
    ) -> Result<(), GemmError> {
        let Window { input: [height, width], output: [_, columns], kernel, .. } = self.geometry.window;
        let (planes, rest) = slot.split_at_mut(self.slot[0]);
        let (product, scratch) = rest.split_at_mut(self.slot[1]);
        let (taps, image) = (kernel[0] * kernel[1], self.geometry.channels * height * width);
        let image = &input.image[lines.outer * image..][..image];
        let [part, channels] = lines.ranges.clone();
        let planes = &mut planes[..channels.len() * self.plane];
        for band in self.bands_of(part.clone()) {
            self.fill(input, (image, &band), (channels.start, planes), product)?;
            let plan = DepthwisePlan::new(self.cpu.isa, band.window);
            for (channel, plane) in channels.clone().zip(planes.chunks(self.plane)) {
                let from = &plane[..band.between.len() * width];
                let filter = &input.depthwise[channel * taps..][..taps];
                let bias = input.bias.map_or(0.0, |bias| bias[channel]);
                let rows = band.rows.start - part.start..band.rows.end - part.start;
                let to = &mut lines.adjacent_lines(channel)[rows.start * columns..rows.end * columns];
                plan.run(from, filter, bias, input.activation, to, scratch);
            }
        }
        Ok(())
    }

    /// Makes the rows of a band between, for the planes of the channels from `first` on.
    fn fill(
        &self,
        input: &SeparableInput<'_>,
        (image, band): (&[f32], &Band),
        (first, planes): (usize, &mut [f32]),
        product: &mut [f32],
    ) -> Result<(), GemmError> {
        let Window { input: [height, width], .. } = self.geometry.window;
        let stay = (band.fresh.start - band.between.start) * width;
        let moved = band.moved * width;
        if stay > 0 && moved > 0 {
            planes.chunks_mut(self.plane).for_each(|plane| plane.copy_within(moved..moved + stay, 0));
        }
        if band.fresh.is_empty() {
            return Ok(());
        }
        let shape = [self.geometry.channels, band.fresh.len() * width];
        let image = image.get(band.fresh.start * width..).unwrap_or(&[]);
        let right = BOperand::Plain(Strided::new(image, shape, [height * width, 1])?);
        let panel = first / input.pointwise.height();
        let left = AOperand::Packed(input.pointwise.panels(panel..panel + self.panels));
        let origin = Origin { bias_row: first, residual_row: first };
        let gemm = Gemm { epilogue: input.epilogue, origin, ..Gemm::new(left, right) };
        gemm.run(self.cpu, &mut planes[stay..], self.plane, product)
    }
}
