//! Fourier transforms `DFT` and `STFT`, in double precision and for any length.

use bytemuck::zeroed_vec;
use num_complex::Complex64;
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, RunCx};
use ort_core::tensor::TensorView;
use ort_core::{Result, ensure, error, for_each_type};
use rustfft::FftDirection;

use super::fft::{FftPlan, Footprint};
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::heap::{WithHeap, elements};
use ort_cpu_kernel::layout::normalize_axis;
use ort_cpu_kernel::number::Real;
use ort_cpu_kernel::number::to_f64s;
use ort_cpu_threads::interrupt::{fill, spending};
use ort_cpu_threads::parallel::for_each_row_chunk_mut;

cpu_kernels![
    KernelDef { op: "DFT", make: make_dft, ..KernelDef::BASE },
    KernelDef { op: "STFT", make: make_stft, ..KernelDef::BASE },
];

/// Work units for reading or writing one number.
const UNITS_OF_A_POINT: usize = 4;

/// A signal of complex numbers, or of real parts only.
struct Signal<'a, T> {
    elements: &'a [T],
    /// Reals per element: 1 or 2.
    parts: usize,
}

impl<'a, T: Real> Signal<'a, T> {
    fn new(view: TensorView<'a>, parts: usize) -> Result<Signal<'a, T>> {
        ensure!(parts == 1 || parts == 2, InvalidArgument, "complex numbers of {parts} parts");
        Ok(Signal { elements: view.as_slice::<T>()?, parts })
    }

    fn at(&self, place: usize) -> Complex64 {
        let part = |index: usize| self.elements[place * self.parts + index].to_f64();
        Complex64::new(part(0), if self.parts == 2 { part(1) } else { 0.0 })
    }
}

#[derive(Clone, Copy)]
struct Transform {
    inverse: bool,
    onesided: bool,
}

fn make_dft(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let transform =
        Transform { inverse: cx.attrs().flag("inverse")?, onesided: cx.attrs().flag("onesided")? };
    // The axis is an input. If it is absent, the last signal axis applies.
    let axis = match cx.node.node.inputs.get(2).copied().flatten() {
        None => Some(-2),
        Some(_) => cx.constant(2).and_then(|axis| axis.to_ints().ok()?.first().copied()),
    };
    let has_length = cx.node.node.inputs.get(1).copied().flatten().is_some();
    let half = transform.onesided && !transform.inverse;
    let bound = move |shapes: &IoShapes<'_>| {
        if elements(shapes.output(0)) == 0 {
            return 0;
        }
        // A one-sided spectrum fits two lengths. If the node has no length input, the signal has
        // the length.
        let is_cut = half && has_length;
        let shape = if half && !has_length { shapes.input(0) } else { shapes.output(0) };
        let axis = axis.and_then(|axis| normalize_axis(axis, shape.len()).ok());
        // If the axis is known only at run time, bound all of them.
        let sizes = match axis.and_then(|axis| shape.get(axis..=axis)) {
            Some(size) => size,
            None => shape,
        };
        let bytes = |&size: &usize| {
            let lines = elements(shapes.output(0)).checked_div(size).unwrap_or(0);
            transform_bytes(size, is_cut, shapes.threads.min(lines.max(1)))
        };
        sizes.iter().map(bytes).max().unwrap_or(0)
    };
    let run = move |cx: &mut RunCx<'_>| {
        let dtype = cx.input(0)?.dtype();
        for_each_type!(dtype in FLOATS, T => run_dft::<T>(cx, transform), else => {
            Err(error!(NotImplemented, "transforming {}", dtype.name()))
        })
    };
    Ok(Box::new(WithHeap { bound, run }))
}

/// Returns the scratch bytes of transforms whose results have `size` elements along the axis: the
/// plan, and for each thread a line and the FFT's scratch. With `half`, the result is the first
/// half of the spectrum.
fn transform_bytes(size: usize, half: bool, threads: usize) -> usize {
    // Half a spectrum comes from an even or an odd length.
    let longest = size.saturating_mul(2);
    let lengths = match half {
        true => longest.saturating_sub(2).max(1)..=longest.saturating_sub(1).max(1),
        false => size..=size,
    };
    let bytes = |length: usize| {
        let Footprint { plan, scratch } = Footprint::of(length);
        let all = plan.saturating_add(scratch.saturating_add(length).saturating_mul(threads));
        all.saturating_mul(size_of::<Complex64>())
    };
    lengths.map(bytes).max().unwrap_or(0)
}

fn first_int(cx: &RunCx<'_>, index: usize) -> Result<Option<i64>> {
    let Some(view) = cx.find_input(index) else { return Ok(None) };
    let values = view.to_ints()?;
    let value = values.first().copied();
    value.map(Some).ok_or_else(|| error!(InvalidArgument, "input {index} is empty"))
}

fn run_dft<T: Real>(cx: &mut RunCx<'_>, transform: Transform) -> Result<()> {
    let input = cx.input(0)?;
    let shape = input.shape();
    let [signal_shape @ .., parts] = shape else {
        return Err(error!(InvalidArgument, "a signal without dimensions"));
    };
    let axis = normalize_axis(first_int(cx, 2)?.unwrap_or(-2), shape.len())?;
    ensure!(axis < signal_shape.len(), InvalidArgument, "the last axis holds real and imaginary parts");
    let size = signal_shape[axis];
    let length = match first_int(cx, 1)? {
        Some(length) => usize::try_from(length).map_err(|_| {
            error!(InvalidArgument, "the length of the transform is {length}, expected 1 or more")
        })?,
        // Without a length, the result of a one-sided spectrum has an even one.
        None if transform.inverse && transform.onesided => 2 * size.saturating_sub(1),
        None => size,
    };
    let inner: usize = signal_shape[axis + 1..].iter().product();
    let signal = Signal::<T>::new(input, *parts)?;
    let output = cx.output(0)?;
    let output_size = output.shape().get(axis).copied().unwrap_or(0);
    let real_output = transform.inverse && transform.onesided;
    let output_parts = if real_output { 1 } else { 2 };
    let to = output.as_mut_slice::<T>()?;
    if to.is_empty() || length == 0 {
        return Ok(());
    }
    let direction = if transform.inverse { FftDirection::Inverse } else { FftDirection::Forward };
    let fft = FftPlan::plan(length, direction);
    // Like NumPy's `fft` and `ifft`, which the standard's evaluator calls.
    let factor = if transform.inverse { 1.0 / length as f64 } else { 1.0 };
    let block = output_size * inner * output_parts;
    for_each_row_chunk_mut(cx.threads(), to, block, 1, |first, blocks| {
        let mut line = zeroed_vec::<Complex64>(length);
        let mut scratch = zeroed_vec(fft.scratch_len());
        for (index, to) in blocks.chunks_exact_mut(block).enumerate() {
            for column in 0..inner {
                let start = (first + index) * size * inner + column;
                read_line(&signal, start, [size, inner], real_output, &mut line);
                fft.process(&mut line, &mut scratch);
                let values = line.iter().take(output_size).enumerate();
                for (place, value) in spending(UNITS_OF_A_POINT, values) {
                    let at = (place * inner + column) * output_parts;
                    to[at] = T::from_f64(value.re * factor);
                    if output_parts == 2 {
                        to[at + 1] = T::from_f64(value.im * factor);
                    }
                }
            }
        }
    });
    Ok(())
}

/// Reads a line, truncated or zero-padded. With `half`, conjugates complete a one-sided spectrum.
fn read_line<T: Real>(
    signal: &Signal<'_, T>,
    start: usize,
    [size, inner]: [usize; 2],
    half: bool,
    line: &mut [Complex64],
) {
    let length = line.len();
    // More bins than half a spectrum are ignored.
    let given = if half { size.min(length / 2 + 1) } else { size.min(length) };
    fill(line, Complex64::ZERO);
    for (place, value) in spending(UNITS_OF_A_POINT, line.iter_mut().take(given).enumerate()) {
        *value = signal.at(start + place * inner);
    }
    if half {
        // The spectrum of a real signal is real at index 0 and, for an even length, in the middle.
        line[0].im = 0.0;
        if length.is_multiple_of(2) {
            line[length / 2].im = 0.0;
        }
        for place in spending(UNITS_OF_A_POINT, 1..length.div_ceil(2)) {
            line[length - place] = line[place].conj();
        }
    }
}

/// The output's shape says whether the spectrum is one-sided.
fn make_stft(_: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let bound = |shapes: &IoShapes<'_>| {
        let &[_, _, bins, _] = shapes.output(0) else { return 0 };
        // A frame is as long as the window, or as the transform. The window is converted to `f64`.
        let window = shapes.input(2).first().copied().unwrap_or(0);
        if elements(shapes.output(0)) == 0 {
            return window.saturating_mul(size_of::<f64>());
        }
        let whole = transform_bytes(window.max(bins), false, shapes.threads);
        whole
            .max(transform_bytes(bins, true, shapes.threads))
            .saturating_add(window.max(bins.saturating_mul(2)).saturating_mul(16))
    };
    let run = |cx: &mut RunCx<'_>| {
        let dtype = cx.input(0)?.dtype();
        for_each_type!(dtype in FLOATS, T => run_stft::<T>(cx), else => {
            Err(error!(NotImplemented, "transforming {}", dtype.name()))
        })
    };
    Ok(Box::new(WithHeap { bound, run }))
}

fn run_stft<T: Real>(cx: &mut RunCx<'_>) -> Result<()> {
    let input = cx.input(0)?;
    let (samples, parts) = match input.shape() {
        &[_, samples] => (samples, 1),
        &[_, samples, parts] => (samples, parts),
        shape => return Err(error!(InvalidArgument, "a signal of shape {shape:?}")),
    };
    let positive = |value: i64| usize::try_from(value).ok().filter(|&value| value > 0);
    let step = first_int(cx, 1)?.and_then(positive);
    let step = step.ok_or_else(|| error!(InvalidArgument, "frame_step must be a positive number"))?;
    let window = cx.find_input(2).map(|window| to_f64s(&window)).transpose()?;
    let length = match (first_int(cx, 3)?, &window) {
        (Some(length), _) => positive(length).unwrap_or(0),
        (None, Some(window)) => window.len(),
        (None, None) => samples,
    };
    ensure!(
        length > 0 && length <= samples,
        InvalidArgument,
        "the frame length is {length}, but the signal has {samples} samples"
    );
    if cx.output_shape(0).is_some_and(|shape| shape.contains(&0)) {
        return Ok(());
    }
    let window = window.unwrap_or_else(|| vec![1.0; length]);
    ensure!(window.len() == length, InvalidArgument, "a window of {} for frames of {length}", window.len());
    let signal = Signal::<T>::new(input, parts)?;
    let output = cx.output(0)?;
    let &[_, frames, bins, 2] = output.shape() else {
        return Err(error!(Fail, "the output has shape {:?}", output.shape()));
    };
    // The last frame ends inside of the signal, so `signal.at` does too.
    let fits = bins <= length && frames.saturating_sub(1).saturating_mul(step) <= samples - length;
    ensure!(fits, Fail, "{frames} frames of {bins} bins in {samples} samples");
    let fft = FftPlan::plan(length, FftDirection::Forward);
    for_each_row_chunk_mut(cx.threads(), output.as_mut_slice::<T>()?, bins * 2, 1, |first, rows| {
        let mut line = zeroed_vec::<Complex64>(length);
        let mut scratch = zeroed_vec(fft.scratch_len());
        for (index, to) in rows.chunks_exact_mut(bins * 2).enumerate() {
            let (batch, frame) = ((first + index) / frames, (first + index) % frames);
            let start = batch * samples + frame * step;
            let values = line.iter_mut().zip(&window).enumerate();
            for (place, (value, weight)) in spending(UNITS_OF_A_POINT, values) {
                *value = signal.at(start + place) * weight;
            }
            fft.process(&mut line, &mut scratch);
            for (value, to) in spending(UNITS_OF_A_POINT, line.iter().zip(to.chunks_exact_mut(2))) {
                to[0] = T::from_f64(value.re);
                to[1] = T::from_f64(value.im);
            }
        }
    });
    Ok(())
}
