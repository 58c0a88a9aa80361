//! A pointwise convolution and the depthwise one that reads it, as one: what lies between is never whole in memory.
//!
//! A task has some channels of one image and goes down it in bands of rows. For a band the product makes the rows between that
//! its windows reach first, behind those that stay from the band before; then the filter of each channel reads them.
//! Threads share nothing but the image, and nothing is computed twice.

use std::ops::Range;

use parking_lot::Mutex;

use super::part;
use crate::gemm::{
    AOperand, BOperand, BSource, Cpu, Gemm, GemmError, Origin, PackedA, Pairing, Step, Strided, Weight,
    check_steps, pack_a, workspace_len_beside_ready,
};
use crate::parallel::{LineBlock, Lines};
use crate::vector::activation::Activation;
use crate::vector::depthwise::DepthwisePlan;
use crate::vector::window::Window;

/// Channels of one product: whole tiles, few enough that what they make of a band is still in a near cache when it is read.
const CHANNELS: usize = 16;

/// The same where the image is turned into pairs for each product.
const CHANNELS_OF_PAIRS: usize = 64;

/// Columns of one product, about: enough to repay the call.
const COLUMNS: usize = 1024;

/// Rows of results that are computed together: a band has a multiple of them.
const ROWS: usize = 4;

/// Values between that a task keeps, at most, if it has more than the channels of one product: a part of the second-level cache.
const KEPT: usize = 64 << 10;

/// Tasks for each thread, to even out unequal speeds.
const TASKS_PER_THREAD: usize = 2;

/// Multiplications worth a thread of their own.
const WORTH_A_THREAD: usize = 1 << 19;

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
    /// What [`pack`] wrote.
    pub(crate) pointwise: &'a [f32],
    /// The epilogue of the pointwise one: bias and activation.
    pub(crate) epilogue: &'a [Step<'a>],
    /// The filters of the depthwise one (C, h, w).
    pub(crate) depthwise: &'a [f32],
    /// Its bias.
    pub(crate) bias: Option<&'a [f32]>,
    /// Its activation.
    pub(crate) activation: Activation,
}

/// Channels of one product.
fn at_once(cpu: Cpu) -> usize {
    if Pairing::of(cpu).is_some() { CHANNELS_OF_PAIRS } else { CHANNELS }
}

/// Values that packed weights of `filters` by `channels` take.
pub(crate) fn packed_len(cpu: Cpu, [filters, channels]: [usize; 2]) -> usize {
    let (whole, rest) = (filters / at_once(cpu), filters % at_once(cpu));
    let len = |rows: usize| if rows == 0 { 0 } else { PackedA::len(cpu, rows, channels) };
    whole.saturating_mul(len(at_once(cpu))).saturating_add(len(rest))
}

/// Packs the weights of the pointwise convolution, those of each product by themselves.
///
/// # Errors
///
/// When a slice is too short.
pub(crate) fn pack<T: Weight>(
    cpu: Cpu,
    [filters, channels]: [usize; 2],
    weights: &[T],
    packed: &mut [f32],
) -> Result<(), GemmError> {
    let (needed, len) = (filters * channels, weights.len());
    let weights =
        weights.get(..needed).ok_or(GemmError::TooShort { what: "pointwise weights", needed, len })?;
    let (needed, len) = (packed_len(cpu, [filters, channels]), packed.len());
    let packed =
        packed.get_mut(..needed).ok_or(GemmError::TooShort { what: "packed weights", needed, len })?;
    if needed == 0 {
        return Ok(());
    }
    let parts = weights.chunks(at_once(cpu) * channels);
    for (weights, packed) in parts.zip(packed.chunks_mut(PackedA::len(cpu, at_once(cpu), channels))) {
        pack_a(cpu, weights, [weights.len() / channels, channels], [channels, 1], packed)?;
    }
    Ok(())
}

/// Some rows of the result, and the rows between that their windows reach.
#[derive(Clone, Debug)]
struct Band {
    rows: Range<usize>,
    between: Range<usize>,
    /// Of those between, the ones that the band before did not reach.
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
    cpu: Cpu,
    /// Rows of a band.
    rows: usize,
    /// From one channel between to the next, for the rows of a band.
    plane: usize,
    /// Channels of a task.
    channels: usize,
    /// Threads, each with a slot of the workspace.
    threads: usize,
    /// Values of a slot: rows between, and the scratch of a product and of a plane.
    slot: [usize; 3],
}

impl Cut {
    fn new(cpu: Cpu, geometry: SeparableGeometry) -> Cut {
        let SeparableGeometry { batch, channels, filters, window } = geometry;
        let wanted = COLUMNS / (window.input[1] * window.strides[0]).max(1);
        let rows = (wanted / ROWS * ROWS).max(ROWS).min(window.output[0].max(1));
        let mut cut = Cut { geometry, cpu, rows, plane: 0, channels: 0, threads: 1, slot: [0; 3] };
        let one = Cpu { threads: 1, ..cpu };
        let (mut tallest, mut scratch, mut product) = (0, 0, 0);
        for band in cut.bands() {
            tallest = tallest.max(band.between.len());
            scratch = scratch.max(DepthwisePlan::new(cpu.isa, band.window).scratch_len());
            for rows in [at_once(cpu).min(filters), filters % at_once(cpu)] {
                let shape = [rows, band.fresh.len() * window.input[1], channels];
                product = product.max(workspace_len_beside_ready(one, 1, shape, BSource::Rows));
            }
        }
        // A distance of whole lines, not of a power of two: that would put all channels in the same sets of a cache.
        cut.plane = (tallest * window.input[1]).next_multiple_of(16) + 16;
        let parts = filters.div_ceil(at_once(cpu)).max(1);
        let steps = channels + window.kernel.iter().product::<usize>();
        let work = [window.input[0], window.input[1], filters, steps, batch];
        let work = work.iter().fold(1_usize, |work, size| work.saturating_mul(*size));
        let threads = cpu.threads.min(work / WORTH_A_THREAD).max(1);
        let fair = parts.div_ceil((threads * TASKS_PER_THREAD).div_ceil(batch.max(1)));
        let fair = if threads == 1 { parts } else { fair };
        cut.channels = fair.min(KEPT / (at_once(cpu) * cut.plane)).max(1) * at_once(cpu);
        cut.threads = threads.min(batch * filters.div_ceil(cut.channels)).max(1);
        let between = cut.channels.min(filters) * cut.plane;
        cut.slot = [between, product, scratch].map(|len| len.next_multiple_of(16));
        cut
    }

    fn slot_len(&self) -> usize {
        self.slot.iter().fold(16, |sum: usize, len| sum.saturating_add(*len))
    }

    fn bands(&self) -> impl Iterator<Item = Band> + use<> {
        let (window, rows) = (self.geometry.window, self.rows);
        (0..window.output[0]).step_by(rows).map(move |first| Band::new(window, first, rows))
    }
}

impl Band {
    /// The band from row `first` on, of those of `count` rows.
    fn new(window: Window, first: usize, count: usize) -> Band {
        let rows = first..(first + count).min(window.output[0]);
        let reach = (window.kernel[0] - 1) * window.dilations[0] + 1;
        let place = |padded: usize| padded.saturating_sub(window.pads[0]).min(window.input[0]);
        let start = |row: usize| place(row * window.strides[0]);
        // Behind the last place that the rows before `row` reach.
        let end = |row: usize| if row == 0 { 0 } else { place((row - 1) * window.strides[0] + reach) };
        let between = start(first)..end(rows.end);
        let own = Window {
            input: [between.len(), window.input[1]],
            output: [rows.len(), window.output[1]],
            pads: [window.pads[0].saturating_sub(first * window.strides[0]), window.pads[1]],
            ..window
        };
        let fresh = between.start.max(end(first))..between.end;
        let moved = between.start - start(first.saturating_sub(count));
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
    part("images", input.image, 0, batch * channels * between)?;
    part("packed weights", input.pointwise, 0, packed_len(cpu, [filters, channels]))?;
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
    let lines = Lines::new(output, [batch, filters, 1], [filters * plane, plane, plane], plane);
    let lines = lines.ok_or(GemmError::Shape("a convolution's result is too short"))?;
    if batch * filters * plane == 0 {
        return Ok(());
    }
    let failure = Mutex::new(None);
    lines.for_each_block(cut.threads, [cut.channels, 1], (workspace, cut.slot_len()), |lines, slot| {
        if let Err(error) = cut.run(&input, lines, slot) {
            *failure.lock() = Some(error);
        }
    });
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
        let (between, rest) = slot.split_at_mut(self.slot[0]);
        let (product, scratch) = rest.split_at_mut(self.slot[1]);
        let (taps, image) = (kernel[0] * kernel[1], self.geometry.channels * height * width);
        let image = &input.image[lines.outer * image..][..image];
        let channels = lines.ranges[0].clone();
        for band in self.bands() {
            let plan = DepthwisePlan::new(self.cpu.isa, band.window);
            let parts = channels.clone().step_by(at_once(self.cpu));
            for (first, planes) in parts.zip(between.chunks_mut(at_once(self.cpu) * self.plane)) {
                let part = first..(first + at_once(self.cpu)).min(channels.end);
                let planes = &mut planes[..part.len() * self.plane];
                self.fill(input, (image, &band), (part.clone(), planes), product)?;
                for (channel, plane) in part.zip(planes.chunks(self.plane)) {
                    let from = &plane[..band.between.len() * width];
                    let filter = &input.depthwise[channel * taps..][..taps];
                    let bias = input.bias.map_or(0.0, |bias| bias[channel]);
                    let to =
                        &mut lines.line([channel, 0])[band.rows.start * columns..band.rows.end * columns];
                    plan.run(from, filter, bias, input.activation, to, scratch);
                }
            }
        }
        Ok(())
    }

    /// Makes the rows of a band between, for the channels of one product.
    fn fill(
        &self,
        input: &SeparableInput<'_>,
        (image, band): (&[f32], &Band),
        (channels, planes): (Range<usize>, &mut [f32]),
        product: &mut [f32],
    ) -> Result<(), GemmError> {
        let SeparableGeometry { channels: steps, window: Window { input: [height, width], .. }, .. } =
            self.geometry;
        let stay = (band.fresh.start - band.between.start) * width;
        let moved = band.moved * width;
        if stay > 0 && moved > 0 {
            planes.chunks_mut(self.plane).for_each(|plane| plane.copy_within(moved..moved + stay, 0));
        }
        if band.fresh.is_empty() {
            return Ok(());
        }
        let columns = band.fresh.len() * width;
        let image = image.get(band.fresh.start * width..).unwrap_or(&[]);
        let right = BOperand::Plain(Strided::new(image, [steps, columns], [height * width, 1])?);
        let cpu = Cpu { threads: 1, ..self.cpu };
        let weights = channels.start / at_once(cpu) * PackedA::len(cpu, at_once(cpu), steps);
        let weights = input.pointwise.get(weights..).unwrap_or(&[]);
        let left = AOperand::Packed(PackedA::new(cpu, weights, channels.len(), steps)?);
        let origin = Origin { bias_row: channels.start, residual_row: channels.start };
        let gemm = Gemm { epilogue: input.epilogue, origin, ..Gemm::new(left, right) };
        gemm.run(cpu, &mut planes[stay..], self.plane, product)
    }
}
