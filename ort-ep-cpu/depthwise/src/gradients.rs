//! Gradients of a depthwise convolution, plane by plane.
//!
//! These are plain loops that the compiler vectorizes for each instruction set. A sum has [`LANES`]
//! partial sums on all of them, so the results are bit-identical.

use ort_cpu_threads::interrupt::spend;
use ort_cpu_vector::simd::{Isa, Simd, SimdOp, dispatch};
use ort_cpu_vector::window::Window;

/// Partial sums of each tap's gradient.
pub const LANES: usize = 16;

/// Accumulates the gradient of each tap over one plane, given the upstream gradient of the plane's
/// results. Each tap has [`LANES`] adjacent partial sums.
///
/// # Panics
/// If a slice's length does not match the window.
pub fn add_filter_gradient(isa: Isa, window: &Window, from: &[f32], upstream: &[f32], sums: &mut [f32]) {
    check(window, [from.len(), upstream.len(), sums.len() / LANES]);
    dispatch(isa, Filter { window, from, upstream, sums });
}

/// Writes the gradient of one plane from the filter and the upstream gradient of the plane's
/// results.
///
/// # Panics
/// If a slice's length does not match the window.
pub fn plane_gradient(isa: Isa, window: &Window, weights: &[f32], upstream: &[f32], to: &mut [f32]) {
    check(window, [to.len(), upstream.len(), weights.len()]);
    dispatch(isa, GradientPlane { window, weights, upstream, to });
}

fn check(window: &Window, lens: [usize; 3]) {
    let needed = [window.input, window.output, window.kernel].map(|[height, width]| height * width);
    assert_eq!(lens, needed, "a plane, its results and a filter have the window's sizes");
}

/// A run of results in a row, and the inputs that a tap reads for them.
#[derive(Clone, Copy)]
struct Run {
    tap: usize,
    /// The first result.
    first: usize,
    len: usize,
    /// The input of the first result. The others are a stride apart.
    place: usize,
}

/// Calls `each` for every run, row by row and tap by tap.
#[inline(always)]
fn for_each_run(window: &Window, mut each: impl FnMut(Run)) {
    let Window { input, output, kernel, strides, dilations, pads } = *window;
    // Division is slow, and most strides are 1.
    let windows = |len: usize| if strides[1] == 1 { len } else { len.div_ceil(strides[1]) };
    for y in 0..output[0] {
        for tap_y in 0..kernel[0] {
            let row = (y * strides[0] + tap_y * dilations[0]).checked_sub(pads[0]);
            // Rows of the padding contribute nothing.
            let Some(row) = row.filter(|row| *row < input[0]) else { continue };
            for tap_x in 0..kernel[1] {
                let shift = tap_x * dilations[1];
                let first = windows(pads[1].saturating_sub(shift));
                let end = windows((input[1] + pads[1]).saturating_sub(shift)).min(output[1]);
                if first < end {
                    let place = row * input[1] + first * strides[1] + shift - pads[1];
                    let (tap, first, len) = (tap_y * kernel[1] + tap_x, y * output[1] + first, end - first);
                    spend(len);
                    each(Run { tap, first, len, place });
                }
            }
        }
    }
}

struct Filter<'a> {
    window: &'a Window,
    from: &'a [f32],
    upstream: &'a [f32],
    sums: &'a mut [f32],
}

impl SimdOp for Filter<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let Filter { window, from, upstream, sums } = self;
        let stride = window.strides[1];
        for_each_run(window, |Run { tap, first, len, place }| {
            // An array of fixed length, so that the compiler keeps the partial sums in registers.
            let Some((sums, _)) = sums[tap * LANES..].split_first_chunk_mut::<LANES>() else { return };
            let upstream = &upstream[first..][..len];
            if stride == 1 {
                add_products(sums, upstream, &from[place..][..len]);
                return;
            }
            let from = &from[place..][..(len - 1) * stride + 1];
            for (upstream, from) in upstream.chunks(LANES).zip(from.chunks(LANES * stride)) {
                let products = upstream.iter().zip(from.iter().step_by(stride));
                sums.iter_mut().zip(products).for_each(|(sum, (a, b))| *sum += a * b);
            }
        });
    }
}

#[inline(always)]
fn add_products(sums: &mut [f32; LANES], a: &[f32], b: &[f32]) {
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a.iter().zip(b) {
        sums.iter_mut().zip(a.iter().zip(b)).for_each(|(sum, (a, b))| *sum += a * b);
    }
    sums.iter_mut().zip(a_rest.iter().zip(b_rest)).for_each(|(sum, (a, b))| *sum += a * b);
}

struct GradientPlane<'a> {
    window: &'a Window,
    weights: &'a [f32],
    upstream: &'a [f32],
    to: &'a mut [f32],
}

impl SimdOp for GradientPlane<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let GradientPlane { window, weights, upstream, to } = self;
        let stride = window.strides[1];
        // Windows overlap, so the gradient of an input is a sum over taps. It is added run by run,
        // in a fixed order.
        to.fill(0.0);
        for_each_run(window, |Run { tap, first, len, place }| {
            let (weight, upstream) = (weights[tap], &upstream[first..][..len]);
            if stride == 1 {
                to[place..][..len].iter_mut().zip(upstream).for_each(|(to, value)| *to += weight * value);
                return;
            }
            let to = to[place..].iter_mut().step_by(stride);
            to.zip(upstream).for_each(|(to, value)| *to += weight * value);
        });
    }
}
