//! Fused pointwise and depthwise convolution: the intermediate tensor is never whole in memory.
//!
//! A task has some channels of one image, or of a part of its rows, and processes it in bands of
//! rows. For each band, the GEMM computes the intermediate rows that its windows read and that the
//! previous band did not compute. Then the depthwise filter of each channel reads them. Several
//! threads split an image by rows, as the GEMMs before and after do, so a core finds in its cache
//! what it wrote. The few intermediate rows that windows of two parts read are computed twice.

use std::ops::Range;

use parking_lot::Mutex;

use super::input::part;
use super::parts_of_image;
use ort_cpu_depthwise::planes::{DepthwisePlan, Planes};
use ort_cpu_gemm::{
    Cpu, Gemm, GemmError, LhsOperand, Origin, PackedLhs, Pairing, RhsOperand, RhsSource, Step, Strided,
    check_steps, workspace_len_beside_ready,
};
use ort_cpu_threads::parallel::{RowBlock, StridedRows};
use ort_cpu_vector::activation::Activation;
use ort_cpu_vector::window::Window;

/// The size of a task's working set, and how many tasks there are.
#[derive(Clone, Copy)]
struct Sizes {
    /// Columns of a GEMM, approximately.
    columns: usize,
    /// Intermediate elements, a part of L2.
    values: usize,
    /// The minimum number of tasks per thread, to balance threads of unequal speed.
    tasks: usize,
}

/// Sizes for `f32`: a panel of weights serves much of an image. With half as many columns, the
/// overhead of the GEMM calls is a fiftieth of the time for images of 112 by 112, measured with
/// AVX-512.
const OF_NUMBERS: Sizes = Sizes { columns: 3200, values: 25 << 10, tasks: 4 };

/// Sizes for bf16: each GEMM converts its part of the image to pairs, so it should have many rows.
const OF_PAIRS: Sizes = Sizes { columns: 800, values: 100 << 10, tasks: 1 };

/// Output rows that are computed together; a band has a multiple of them.
const ROWS: usize = 4;

/// The maximum number of bands of an image. Padding is unbounded, and memory planning visits each
/// band.
const MOST_BANDS: usize = 4096;

/// Multiply-adds of a GEMM that are worth a thread of their own, and how many of them take as long
/// as one depthwise tap.
const WORTH_A_THREAD: usize = 1 << 19;
const STEPS_IN_A_TAP: usize = 4;

/// The sizes of both convolutions.
#[derive(Clone, Copy, Debug)]
pub struct SeparableGeometry {
    /// Images in the batch.
    pub batch: usize,
    /// Channels of an image.
    pub channels: usize,
    /// Intermediate channels, which are also the output channels.
    pub filters: usize,
    /// The windows of the depthwise convolution.
    pub window: Window,
}

/// The operands of the two convolutions.
#[derive(Clone, Copy, Debug)]
pub struct SeparableInput<'a> {
    /// The images (N, K, H, W).
    pub image: &'a [f32],
    /// The packed weights (C, K) of the pointwise convolution.
    pub pointwise: PackedLhs<'a>,
    /// Its epilogue: bias and activation.
    pub epilogue: &'a [Step<'a>],
    /// The filters (C, h, w) of the depthwise convolution.
    pub depthwise: &'a [f32],
    /// Its bias.
    pub bias: Option<&'a [f32]>,
    /// Its activation.
    pub activation: Activation,
}

/// Some output rows, and the intermediate rows that their windows read.
#[derive(Clone, Debug)]
struct Band {
    rows: Range<usize>,
    between: Range<usize>,
    /// The intermediate rows that the previous band did not compute; all of them for the first band
    /// of a task.
    fresh: Range<usize>,
    /// The distance that the other rows move up.
    moved: usize,
    /// The windows on these rows alone.
    window: Window,
}

/// How the work is split.
#[derive(Clone, Copy, Debug)]
struct Cut {
    geometry: SeparableGeometry,
    /// What a task computes with: one thread.
    cpu: Cpu,
    /// Output rows of a band, and of a task's part of an image.
    rows: usize,
    part: usize,
    /// Stride from one intermediate channel to the next, for the rows of a band.
    plane: usize,
    /// Panels of weights of a task, and its channels.
    panels: usize,
    channels: usize,
    /// Threads, each with a slot of the workspace.
    threads: usize,
    /// The elements of a slot: intermediate rows, GEMM workspace, and depthwise scratch.
    slot: [usize; 3],
}

impl Cut {
    fn new(cpu: Cpu, geometry: SeparableGeometry) -> Cut {
        let SeparableGeometry { batch, channels, filters, window } = geometry;
        // A task computes both convolutions of its channels, so what lies between them stays in the
        // core's cache. Its GEMMs are too small to share.
        let one = Cpu { threads: 1, ..cpu };
        let height = PackedLhs::height_of(cpu, filters);
        // The pointwise part packs no image in `f32`, so short GEMMs are cheap there.
        let sizes = if Pairing::of(cpu).is_some() { OF_PAIRS } else { OF_NUMBERS };
        let rows = sizes.columns / (window.input[1] * window.strides[0]).max(1);
        // Whole groups of `ROWS`, but at most `MOST_BANDS` bands.
        let rows = (rows / ROWS * ROWS).max(ROWS).max(window.output[0].div_ceil(MOST_BANDS));
        let rows = rows.min(window.output[0].max(1));
        // A depthwise tap is bound by loads, so it counts as several multiply-adds.
        let steps = channels + STEPS_IN_A_TAP * window.kernel[0] * window.kernel[1];
        let work = [batch, window.input[0], window.input[1], filters, steps];
        let work = work.iter().fold(1_usize, |work, size| work.saturating_mul(*size));
        let threads = cpu.threads.min(work / WORTH_A_THREAD).max(1);
        let parts = parts_of_image(threads, batch, window.output);
        let part = window.output[0].div_ceil(parts).max(1);
        let mut cut =
            Cut { geometry, cpu: one, rows, part, plane: 0, panels: 1, channels: 0, threads, slot: [0; 3] };
        // Bands at the edges of an image read fewer rows. The slot must hold the tallest.
        let tallest = cut.bands().map(|band| band.between.len()).max().unwrap_or(0);
        // The channel stride is whole cache lines, and padded so that it is no power of two, which
        // would put all channels in the same cache sets.
        cut.plane = (tallest * window.input[1]).next_multiple_of(16) + 16;
        let tasks = if threads > 1 { (threads * sizes.tasks).div_ceil(batch.max(1) * parts) } else { 1 };
        let fair = filters.div_ceil(height).div_ceil(tasks);
        // Enough tasks for all threads, with intermediate rows that fit the part of L2.
        cut.panels = fair.min(sizes.values / (height * cut.plane)).max(1);
        cut.channels = cut.panels * height;
        cut.threads = threads.min(batch * parts * filters.div_ceil(cut.channels)).max(1);
        cut.slot = cut.slot_lens();
        cut
    }

    /// Returns the elements of the parts of a slot, in whole cache lines.
    fn slot_lens(&self) -> [usize; 3] {
        let SeparableGeometry { channels, filters, window, .. } = self.geometry;
        let most = self.channels.min(filters);
        // The last task may have fewer channels, and may then be the only one that packs B.
        let counts = [most, if most > 0 { filters % most } else { 0 }];
        let (mut gemm_workspace, mut scratch) = (0, 0);
        for band in self.bands() {
            scratch = scratch.max(DepthwisePlan::new(self.cpu.isa, band.window).scratch_len());
            for rows in counts {
                let shape = [rows, band.fresh.len() * window.input[1], channels];
                gemm_workspace =
                    gemm_workspace.max(workspace_len_beside_ready(self.cpu, 1, shape, RhsSource::Rows));
            }
        }
        [most * self.plane, gemm_workspace, scratch].map(|len| len.next_multiple_of(16))
    }

    fn slot_len(&self) -> usize {
        self.slot.iter().fold(16, |sum: usize, len| sum.saturating_add(*len))
    }

    /// Returns the bands of all parts of an image.
    fn bands(&self) -> impl Iterator<Item = Band> + use<> {
        let (cut, height) = (*self, self.geometry.window.output[0]);
        (0..height)
            .step_by(self.part)
            .flat_map(move |first| cut.bands_of(first..(first + cut.part).min(height)))
    }

    /// Returns the bands of one part, given by its output rows.
    fn bands_of(&self, part: Range<usize>) -> impl Iterator<Item = Band> + use<> {
        let (window, count, end) = (self.geometry.window, self.rows, part.end);
        part.clone().step_by(count).map(move |first| {
            let before = first.saturating_sub(count).max(part.start)..first;
            Band::new(window, before, first..(first + count).min(end))
        })
    }
}

impl Band {
    /// Creates the band of `rows`, which follows that of the rows `before`.
    fn new(window: Window, before: Range<usize>, rows: Range<usize>) -> Band {
        let ((there, _), (between, own)) = (window.band(before.clone()), window.band(rows.clone()));
        // Windows of neighbouring bands overlap. What the band before has computed is moved, not
        // computed twice.
        let (fresh, moved) = match before.is_empty() {
            true => (between.clone(), 0),
            false => (between.start.max(there.end)..between.end, between.start - there.start),
        };
        Band { rows, between, fresh, moved, window: own }
    }
}

/// Returns the `f32` elements of workspace that [`forward`] needs.
pub fn workspace_len(cpu: Cpu, geometry: SeparableGeometry) -> usize {
    let cut = Cut::new(cpu, geometry);
    cut.threads.saturating_mul(cut.slot_len())
}

/// Computes both convolutions into `output` (N, C, H, W).
///
/// # Errors
///
/// If a slice is too short.
pub fn forward(
    cpu: Cpu,
    geometry: SeparableGeometry,
    input: SeparableInput<'_>,
    output: &mut [f32],
    workspace: &mut [f32],
) -> Result<(), GemmError> {
    let SeparableGeometry { batch, channels, filters, window } = geometry;
    let [between, plane] = [window.input, window.output].map(|[height, width]| height * width);
    if LhsOperand::Packed(input.pointwise).shape() != [filters, channels] {
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
    let results = StridedRows::new(output, [batch, height, filters], [filters * plane, width, plane], width);
    let results = results.ok_or(GemmError::Shape("a convolution's result is too short"))?;
    if batch * filters * plane == 0 {
        return Ok(());
    }
    let failure = Mutex::new(None);
    results.for_each_block(
        cut.threads,
        [cut.part, cut.channels],
        (workspace, cut.slot_len()),
        |block, slot| {
            if let Err(error) = cut.run(&input, block, slot) {
                *failure.lock() = Some(error);
            }
        },
    );
    failure.into_inner().map_or(Ok(()), Err)
}

impl Cut {
    /// Runs one task: the channels of `block`, band by band.
    fn run(
        &self,
        input: &SeparableInput<'_>,
        mut block: RowBlock<'_, f32>,
        slot: &mut [f32],
    ) -> Result<(), GemmError> {
        let Window { input: [height, width], output: [_, columns], kernel, .. } = self.geometry.window;
        let (planes, rest) = slot.split_at_mut(self.slot[0]);
        let (gemm_workspace, scratch) = rest.split_at_mut(self.slot[1]);
        let (taps, image) = (kernel[0] * kernel[1], self.geometry.channels * height * width);
        let image = &input.image[block.outer * image..][..image];
        let [part, channels] = block.ranges.clone();
        let planes = &mut planes[..channels.len() * self.plane];
        for band in self.bands_of(part.clone()) {
            self.fill(input, (image, &band), (channels.start, planes), gemm_workspace)?;
            let plan = DepthwisePlan::new(self.cpu.isa, band.window);
            let of_channel = |channel: usize| Planes {
                values: &planes[(channel - channels.start) * self.plane..],
                stride: self.plane,
                weights: &input.depthwise[channel * taps..],
                bias: input.bias.map(|bias| &bias[channel..]),
            };
            if band.rows == part
                && let Some(to) = block.adjacent_planes()
            {
                plan.run(of_channel(channels.start), input.activation, to, scratch);
                continue;
            }
            for channel in channels.clone() {
                let rows = band.rows.start - part.start..band.rows.end - part.start;
                let to = &mut block.adjacent_rows(channel)[rows.start * columns..rows.end * columns];
                plan.run(of_channel(channel), input.activation, to, scratch);
            }
        }
        Ok(())
    }

    /// Computes the intermediate rows of a band, for the planes of the channels from `first` on.
    fn fill(
        &self,
        input: &SeparableInput<'_>,
        (image, band): (&[f32], &Band),
        (first, planes): (usize, &mut [f32]),
        gemm_workspace: &mut [f32],
    ) -> Result<(), GemmError> {
        let Window { input: [height, width], .. } = self.geometry.window;
        let stay = (band.fresh.start - band.between.start) * width;
        let moved = band.moved * width;
        if stay > 0 && moved > 0 {
            // Rows that both bands read move to the front instead of being computed again.
            planes.chunks_mut(self.plane).for_each(|plane| plane.copy_within(moved..moved + stay, 0));
        }
        if band.fresh.is_empty() {
            return Ok(());
        }
        let shape = [self.geometry.channels, band.fresh.len() * width];
        let image = image.get(band.fresh.start * width..).unwrap_or(&[]);
        let rhs = RhsOperand::Plain(Strided::new(image, shape, [height * width, 1])?);
        let panel = first / input.pointwise.height();
        let lhs = LhsOperand::Packed(input.pointwise.panels(panel..panel + self.panels));
        let origin = Origin { bias_row: first, residual_row: first };
        let gemm = Gemm { epilogue: input.epilogue, origin, ..Gemm::new(lhs, rhs) };
        gemm.run(self.cpu, &mut planes[stay..], self.plane, gemm_workspace)
    }
}
