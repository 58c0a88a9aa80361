//! `NhwcMaxPool`: max pooling of 8-bit quantized NHWC images.

use ort_core::dtype::DType;
use ort_core::ep::{CompileCx, Executable, KernelDef, NodeView, RunCx};
use ort_core::ops::nn::geometry::{WindowAxis, Windows};
use ort_core::spec::MICROSOFT;
use ort_core::{Result, error, for_each_type};

use super::pool_windows::windows_of_pool;
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::quantized_byte::QuantizedByte;
use ort_cpu_threads::interrupt::spend;
use ort_cpu_threads::parallel::for_each_row_chunk_mut;
use ort_cpu_vector::simd::{Isa, Simd, SimdOp, dispatch};

cpu_kernels![KernelDef { domain: MICROSOFT, op: "NhwcMaxPool", when: is_plane, make, ..KernelDef::BASE }];

/// The fewest values of the result that are worth a task.
const GRAIN: usize = 1 << 14;

/// Returns whether the image has two spatial axes.
fn is_plane(node: &NodeView<'_>) -> bool {
    node.attrs().ints("kernel_shape").is_ok_and(|kernel| kernel.len() == 2)
}

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let (windows, dtype) = (windows_of_pool(&cx.node)?, cx.node.dtype(0).unwrap_or(DType::U8));
    for_each_type!(
        dtype in [U8, I8],
        T => Ok(Box::new(move |cx: &mut RunCx<'_>| run::<T>(cx, &windows))),
        else => Err(error!(NotImplemented, "quantized values of type {} are not supported", dtype.name())),
    )
}

fn run<T: QuantizedByte + Ord>(cx: &mut RunCx<'_>, windows: &Windows) -> Result<()> {
    let (isa, threads, image) = (Isa::current(), cx.threads(), cx.input(0)?);
    let [_, height, width, channels] = *image.shape() else {
        return Err(error!(InvalidArgument, "an image of shape {:?}", image.shape()));
    };
    let axes = windows.on(&[height, width])?;
    let [y, x] = axes[..] else { return Err(error!(Fail, "a plane has {} axes", axes.len())) };
    let (image, result) = (image.as_slice::<T>()?, cx.output(0)?.as_mut_slice::<T>()?);
    // A line of the image, and a row of the result: [width, channels].
    let (line, row) = (width * channels, x.output * channels);
    if result.is_empty() {
        return Ok(());
    }
    for_each_row_chunk_mut(threads, result, row, GRAIN.div_ceil(row), |first, rows| {
        for (at, to) in rows.chunks_exact_mut(row).enumerate() {
            let (image, at) =
                (&image[(first + at) / y.output * height * line..][..height * line], (first + at) % y.output);
            dispatch(isa, Row { axes: [&y, &x], at, channels, image, to });
        }
    });
    Ok(())
}

/// Returns the places along an axis where the taps of a window meet the image.
fn places(axis: &WindowAxis, at: usize) -> impl Iterator<Item = usize> {
    let WindowAxis { input, kernel, stride, dilation, pads, .. } = *axis;
    let place = move |tap: usize| (at * stride + tap * dilation).checked_sub(pads[0]);
    (0..kernel).filter_map(place).filter(move |place| *place < input)
}

/// One row of windows, for dispatch to SIMD code.
struct Row<'a, T> {
    axes: [&'a WindowAxis; 2],
    at: usize,
    channels: usize,
    image: &'a [T],
    to: &'a mut [T],
}

impl<T: QuantizedByte + Ord> SimdOp for Row<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let ([y, x], channels) = (self.axes, self.channels);
        // A window outside of the image has no maximum, so it gets the least value.
        self.to.fill(T::nearest(f32::MIN));
        // By image rows, so that each line is read in order for all windows of the row.
        for row in places(y, self.at) {
            spend(self.to.len() * x.kernel / 16);
            let line = &self.image[row * x.input * channels..][..x.input * channels];
            for (at, to) in self.to.chunks_exact_mut(channels).enumerate() {
                for column in places(x, at) {
                    let from = &line[column * channels..][..channels];
                    to.iter_mut().zip(from).for_each(|(to, from)| *to = (*to).max(*from));
                }
            }
        }
    }
}
