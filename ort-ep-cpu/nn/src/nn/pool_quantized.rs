//! Quantized average pooling, NCHW or NHWC.
//!
//! These are `QLinearAveragePool` and `QLinearGlobalAveragePool`. Values are summed in the order of
//! their places. The zero point is added after rounding, as in `QuantizeLinear`, because an odd one
//! would send ties the other way.

use std::ops::Range;

use ort_core::dtype::DType;
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, RunCx};
use ort_core::ops::nn::geometry::{WindowAxis, Windows};
use ort_core::spec::MICROSOFT;
use ort_core::{Result, error, for_each_type};
use smallvec::SmallVec;

use super::pool_windows::windows_of_pool;
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::quantized_byte::{QuantizedByte, scale, zero};
use ort_cpu_kernel::units::{for_each_unit, part_count};
use ort_cpu_kernel::workspace::{bytes_of, scratch};
use ort_cpu_threads::interrupt::{self, PIECE, pieces_mut, spend, spending};
use ort_cpu_threads::parallel::for_each_chunk_mut;
use ort_cpu_vector::simd::{Isa, Simd, SimdOp, dispatch};

cpu_kernels![
    KernelDef {
        domain: MICROSOFT,
        op: "QLinearAveragePool",
        make: |cx| {
            let windows = windows_of_pool(&cx.node)?;
            let include_pad = cx.attrs().flag("count_include_pad")?;
            make(cx, Some(windows), include_pad)
        },
        ..KernelDef::BASE
    },
    KernelDef {
        domain: MICROSOFT,
        op: "QLinearGlobalAveragePool",
        make: |cx| make(cx, None, false),
        ..KernelDef::BASE
    },
];

fn make(cx: &mut CompileCx<'_>, windows: Option<Windows>, include_pad: bool) -> Result<Box<dyn Executable>> {
    let dtype = cx.node.dtype(0).unwrap_or(DType::U8);
    let channels_last = cx.attrs().flag("channels_last")?;
    Ok(Box::new(Average { windows, include_pad, channels_last, dtype }))
}

struct Average {
    /// None for global pooling.
    windows: Option<Windows>,
    include_pad: bool,
    channels_last: bool,
    dtype: DType,
}

/// Images with spatial sizes `places`. Each place holds `inner` adjacent channels, which are
/// averaged independently.
struct Images<'a> {
    outer: usize,
    places: &'a [usize],
    inner: usize,
}

/// Scales and zero points of the input (`x`) and the output (`y`).
#[derive(Clone, Copy)]
struct PoolScales {
    x: f32,
    x_zero: f32,
    y: f32,
    y_zero: f32,
}

impl Average {
    fn images<'a>(&self, shape: &'a [usize]) -> Result<Images<'a>> {
        match (shape, self.channels_last) {
            ([batch, places @ .., channels], true) => Ok(Images { outer: *batch, places, inner: *channels }),
            ([batch, channels, places @ ..], false) => {
                let outer = batch.checked_mul(*channels);
                let outer = outer.ok_or_else(|| error!(InvalidArgument, "an image of shape {shape:?}"))?;
                Ok(Images { outer, places, inner: 1 })
            }
            _ => Err(error!(InvalidArgument, "an image of shape {shape:?}")),
        }
    }

    /// Returns the windows on the images. None if one window covers each whole image; then
    /// [`means`] sums quantized values exactly, in integers.
    fn axes(&self, images: &Images<'_>) -> Result<Option<Vec<WindowAxis>>> {
        let Some(windows) = &self.windows else { return Ok(None) };
        let axes = windows.on(images.places)?;
        // Pooling with one window over the image is global pooling under another name.
        let is_whole = axes.iter().all(|axis| axis.kernel == axis.input && axis.pads == [0, 0]);
        Ok((!is_whole).then_some(axes))
    }

    /// Returns how many places of each window count along an axis.
    fn counts(&self, axis: &WindowAxis) -> Vec<f32> {
        let count = |at: usize| if self.include_pad { axis.kernel } else { covered(axis, at).len() };
        spending(4, 0..axis.output).map(|at| count(at) as f32).collect()
    }

    fn run_quantized<T: QuantizedByte>(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let scales = PoolScales {
            x: scale(cx, 1)?,
            x_zero: zero::<T>(cx, 2)?,
            y: scale(cx, 3)?,
            y_zero: zero::<T>(cx, 4)?,
        };
        let (isa, threads) = (Isa::current(), cx.threads());
        let sums = scratch::<f32>(cx.workspace()?)?;
        let image = cx.input(0)?;
        let images = self.images(image.shape())?;
        let quantized = image.as_slice::<T>()?;
        let result = cx.output(0)?.as_mut_slice::<T>()?;
        if result.is_empty() {
            return Ok(());
        }
        let axes = self.axes(&images)?;
        let Some((last, leading)) = axes.as_deref().and_then(<[_]>::split_last) else {
            means(isa, threads, (quantized, &images), result, scales);
            return Ok(());
        };
        let (inner, include_pad, counts) = (images.inner, self.include_pad, self.counts(last));
        let rows = Rows { leading, last, inner, include_pad, counts, scales };
        let row = last.output * images.inner;
        let sums = (sums, row.next_multiple_of(16));
        let per_image: usize = images.places.iter().product::<usize>() * images.inner;
        let rows_per_image: usize = leading.iter().map(|axis| axis.output).product();
        for_each_unit(threads, (result, row), sums, |unit, to, sums| {
            let image = &quantized[unit / rows_per_image * per_image..][..per_image];
            dispatch(isa, OneRow { rows: &rows, at: unit % rows_per_image, image, sums, to });
        });
        Ok(())
    }
}

impl Executable for Average {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        let images = self.images(shapes.input(0))?;
        let Some(axes) = self.axes(&images)? else { return Ok(0) };
        let Some((last, leading)) = axes.split_last() else { return Ok(0) };
        let row = last.output.checked_mul(images.inner).and_then(|row| row.checked_next_multiple_of(16));
        let rows = leading.iter().map(|axis| axis.output).fold(images.outer, usize::saturating_mul);
        bytes_of::<f32>(row.unwrap_or(usize::MAX).saturating_mul(part_count(shapes.threads, rows)))
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let dtype = self.dtype;
        for_each_type!(
            dtype in [U8, I8],
            T => self.run_quantized::<T>(cx),
            else => Err(error!(NotImplemented, "quantized values of type {} are not supported", dtype.name())),
        )
    }
}

/// Average pooling of rows of windows: those along the last axis at one position of the leading
/// ones.
struct Rows<'a> {
    leading: &'a [WindowAxis],
    last: &'a WindowAxis,
    inner: usize,
    include_pad: bool,
    /// How many places of each window count along the last axis.
    counts: Vec<f32>,
    scales: PoolScales,
}

/// Returns the places of the image that a window covers along an axis.
fn covered(axis: &WindowAxis, at: usize) -> Range<usize> {
    let first = at * axis.stride;
    // Clamped on both sides: a window that lies in the padding covers no place.
    let place = |padded: usize| padded.saturating_sub(axis.pads[0]).min(axis.input);
    place(first)..place(first + axis.kernel)
}

/// The widest kernel that is summed tap by tap over all windows of a row. Wider ones are summed
/// window by window.
const NARROW: usize = 16;

impl Rows<'_> {
    /// Returns the rows of the image, in order, that the windows of a result row cover.
    fn image_rows(&self, mut at: usize) -> SmallVec<[usize; 16]> {
        let mut place: SmallVec<[usize; 3]> = SmallVec::new();
        for axis in self.leading.iter().rev() {
            place.push(at % axis.output);
            at /= axis.output;
        }
        let mut rows: SmallVec<[usize; 16]> = std::iter::once(0).collect();
        for (axis, at) in self.leading.iter().zip(place.into_iter().rev()) {
            // Axis by axis: each row so far continues with the places that the window covers.
            let next =
                rows.iter().flat_map(|row| covered(axis, at).map(move |place| row * axis.input + place));
            rows = next.collect();
        }
        rows
    }

    /// Returns how many places a window covers along the leading axes, padding included.
    fn kernel_rows(&self) -> usize {
        self.leading.iter().map(|axis| axis.kernel).fold(1, usize::saturating_mul)
    }

    /// Adds the dequantized values of an image row to the sums of the windows.
    #[inline(always)]
    fn add<T: QuantizedByte>(&self, row: &[T], sums: &mut [f32]) {
        let (axis, inner) = (self.last, self.inner);
        let PoolScales { x, x_zero, .. } = self.scales;
        if axis.kernel > NARROW || inner > 1 {
            // A block makes about `PIECE` additions, which bounds the time between two calls of
            // `spend`.
            let at_once = (PIECE / axis.kernel.saturating_mul(inner).max(1)).max(1);
            for (block, sums) in sums.chunks_mut(at_once * inner).enumerate() {
                spend(sums.len() * axis.kernel / 4);
                for (at, sums) in (block * at_once..).zip(sums.chunks_exact_mut(inner)) {
                    for quantized in covered(axis, at).map(|place| &row[place * inner..][..inner]) {
                        for (sum, value) in sums.iter_mut().zip(quantized) {
                            *sum += (value.number() - x_zero) * x;
                        }
                    }
                }
            }
            return;
        }
        for tap in 0..axis.kernel {
            // The windows whose tap is inside the image.
            // The first window whose tap is at or behind `place`.
            let window = |place: usize| (place + axis.pads[0]).saturating_sub(tap).div_ceil(axis.stride);
            let windows = window(0).min(axis.output)..window(axis.input).min(axis.output);
            let Some(first) = (windows.start * axis.stride + tap).checked_sub(axis.pads[0]) else { continue };
            let (Some(sums), Some(row)) = (sums.get_mut(windows), row.get(first..)) else { continue };
            for (piece, sums) in sums.chunks_mut(PIECE).enumerate() {
                spend(sums.len() / 4);
                let row = row.get(piece * PIECE * axis.stride..).unwrap_or(&[]);
                // A constant stride of 1 vectorizes; `step_by` does not.
                if axis.stride == 1 {
                    for (sum, value) in sums.iter_mut().zip(row) {
                        *sum += (value.number() - x_zero) * x;
                    }
                } else {
                    for (sum, value) in sums.iter_mut().zip(row.iter().step_by(axis.stride)) {
                        *sum += (value.number() - x_zero) * x;
                    }
                }
            }
        }
    }

    /// Quantizes the averages of a row of windows; `leading` places count along the leading axes.
    #[inline(always)]
    fn finish<T: QuantizedByte>(&self, leading: f32, sums: &[f32], to: &mut [T]) {
        let PoolScales { y, y_zero, .. } = self.scales;
        let quantize =
            |sum: f32, count: f32| T::nearest((sum / (leading * count) / y).round_ties_even() + y_zero);
        if self.inner == 1 {
            let pieces = pieces_mut(to).zip(sums.chunks(PIECE)).zip(self.counts.chunks(PIECE));
            for ((to, sums), counts) in pieces {
                for ((to, sum), count) in to.iter_mut().zip(sums).zip(counts) {
                    *to = quantize(*sum, *count);
                }
            }
            return;
        }
        let windows = to.chunks_exact_mut(self.inner).zip(sums.chunks_exact(self.inner));
        for ((to, sums), count) in spending(self.inner, windows.zip(&self.counts)) {
            to.iter_mut().zip(sums).for_each(|(to, sum)| *to = quantize(*sum, *count));
        }
    }
}

/// One row of the result, for dispatch to SIMD code.
struct OneRow<'a, T> {
    rows: &'a Rows<'a>,
    at: usize,
    image: &'a [T],
    sums: &'a mut [f32],
    to: &'a mut [T],
}

impl<T: QuantizedByte> SimdOp for OneRow<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let (rows, width) = (self.rows, self.rows.last.input * self.rows.inner);
        let sums = &mut self.sums[..self.to.len()];
        interrupt::fill(sums, 0.0);
        let image_rows = rows.image_rows(self.at);
        for row in &image_rows {
            rows.add(&self.image[row * width..][..width], sums);
        }
        // Windows that reach into the padding divide by the places that they cover, or by all.
        let leading = if rows.include_pad { rows.kernel_rows() } else { image_rows.len() };
        rows.finish(leading as f32, sums, self.to);
    }
}

/// Quantized values in one task.
const TASK: usize = 1 << 14;
/// Channels that are summed at a time in NHWC.
const BLOCK: usize = 64;
/// Places between two calls of [`spend`] in NHWC.
const PLACES: usize = 1 << 8;

/// Quantizes the means of whole images. The sums are integers, so they are exact.
fn means<T: QuantizedByte>(
    isa: Isa,
    threads: usize,
    (quantized, images): (&[T], &Images<'_>),
    result: &mut [T],
    scales: PoolScales,
) {
    let count: usize = images.places.iter().product();
    // One multiplication per channel requantizes and divides by the count.
    // `count` of 0 makes this infinite or NaN; an image without places has no defined mean.
    let ratio = scales.x / (scales.y * count as f32);
    // The zero points are subtracted at once from the integer sum.
    let zeros = scales.x_zero as i64 * count as i64;
    let quantize = |sum: i64| T::nearest(((sum - zeros) as f32 * ratio).round_ties_even() + scales.y_zero);
    if images.inner == 1 {
        // The number of images that make up a task.
        let many = (TASK / count.max(1)).max(1);
        for_each_chunk_mut(threads, result, many, |chunk, to| {
            for (at, to) in to.iter_mut().enumerate() {
                let quantized = &quantized[(chunk * many + at) * count..][..count];
                *to = quantize(dispatch(isa, Sum { quantized }));
            }
        });
        return;
    }
    // [places, channels] for each image.
    let size = count * images.inner;
    for (image, to) in result.chunks_mut(images.inner).enumerate() {
        let quantized = &quantized[image * size..][..size];
        for_each_chunk_mut(threads, to, BLOCK, |block, to| {
            // 64 bits: an image may have more places than 32-bit sums of bytes allow.
            let mut sums = [0_i64; BLOCK];
            let sums = &mut sums[..to.len()];
            dispatch(isa, SumBlock { quantized, inner: images.inner, first: block * BLOCK, sums });
            to.iter_mut().zip(sums).for_each(|(to, sum)| *to = quantize(*sum));
        });
    }
}

/// Sums adjacent quantized values.
struct Sum<'a, T> {
    quantized: &'a [T],
}

impl<T: QuantizedByte> SimdOp for Sum<'_, T> {
    type Output = i64;

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> i64 {
        // The sum of this many values fits in 32 bits.
        const MANY: usize = 1 << 16;
        let sum = |quantized: &[T]| quantized.iter().map(|value| value.integer()).sum::<i32>();
        let chunks = self.quantized.chunks(MANY).inspect(|quantized| spend(quantized.len() / 4));
        chunks.map(|quantized| i64::from(sum(quantized))).sum()
    }
}

/// Sums a block of channels over all places.
struct SumBlock<'a, T> {
    quantized: &'a [T],
    inner: usize,
    first: usize,
    sums: &'a mut [i64],
}

impl<T: QuantizedByte> SimdOp for SumBlock<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for places in self.quantized.chunks(PLACES * self.inner) {
            spend(PLACES * self.sums.len());
            for place in places.chunks_exact(self.inner) {
                let quantized = place.iter().skip(self.first);
                self.sums
                    .iter_mut()
                    .zip(quantized)
                    .for_each(|(sum, value)| *sum += i64::from(value.integer()));
            }
        }
    }
}
