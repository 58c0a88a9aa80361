//! Quantized convolution of one plane with one filter.
//!
//! A lane computes dot products of four bytes, so one step covers four neighbors along a row.

use ort_cpu_threads::interrupt::spend;
use ort_cpu_vector::conv_window::Window;
use ort_cpu_vector::simd::bytes::{ByteLanes, ByteOp, Lanes, WINDOWS_REACH, dispatch_bytes};
use ort_cpu_vector::simd::{Isa, Simd};

/// The most groups of four taps in a filter.
const MAX_TAPS: usize = 32;

/// The taps of one filter, in groups of four along a row, with the terms of its accumulators.
#[derive(Clone, Copy, Debug)]
pub struct QuantizedTaps {
    /// The weights of each group, and ones in the same positions.
    weights: [[i32; 2]; MAX_TAPS],
    /// Added to each accumulator.
    term: i32,
    /// Multiplied by the sum of the window's bytes, then added to the accumulator.
    minus_zero: i32,
}

/// Requantization: `round(clamp(sum * factor, least, greatest)) + zero`.
#[derive(Clone, Copy, Debug)]
pub struct Requantize {
    factor: f32,
    zero: i32,
    least: f32,
    greatest: f32,
}

/// A plane of quantized values.
#[derive(Clone, Copy, Debug)]
pub struct SourcePlane<'a> {
    /// The values.
    pub bytes: &'a [u8],
    /// XORed with each byte, to turn signed values into unsigned ones.
    pub flip: u8,
}

/// The destination of a plane's accumulators.
#[derive(Debug)]
pub enum PlaneTarget<'a> {
    /// They are stored as they are.
    Accumulators(&'a mut [i32]),
    /// They become floats: `sum * factor + bias`.
    Numbers {
        /// The plane.
        values: &'a mut [f32],
        /// The factor of the filter.
        factor: f32,
        /// The bias of the filter.
        bias: f32,
    },
    /// They are requantized.
    Quantized(&'a mut [u8], Requantize),
}

impl Requantize {
    /// Requantizes with `factor` around the zero point `zero`, to the range of `i8` or `u8`.
    pub fn new(factor: f32, zero: i32, signed: bool) -> Requantize {
        let (least, greatest) = if signed { (-128, 127) } else { (0, 255) };
        Requantize { factor, zero, least: (least - zero) as f32, greatest: (greatest - zero) as f32 }
    }
}

/// Returns the number of groups of four taps in a row of the kernel.
fn groups(window: &Window) -> usize {
    window.kernel[2].div_ceil(4)
}

impl QuantizedTaps {
    /// Returns whether this module can compute a window: over planes, without dilation along rows,
    /// at stride 1 or 2, with few enough taps.
    pub fn fits(window: &Window) -> bool {
        let is_flat =
            window.input[0] == 1 && window.kernel[0] == 1 && window.output[0] == 1 && window.pad[0] == 0;
        is_flat
            && (window.dilation[2] == 1 || window.kernel[2] == 1)
            // The window loads that feed a dot product exist for these strides.
            && matches!(window.stride[2], 1 | 2)
            && window.kernel[1].saturating_mul(groups(window)) <= MAX_TAPS
    }

    /// Takes the taps of a filter whose weights are signed and four bytes apart.
    pub fn new(window: &Window, weights: &[u8], [term, minus_zero]: [i32; 2]) -> QuantizedTaps {
        let width = window.kernel[2];
        let mut taps = QuantizedTaps { weights: [[0; 2]; MAX_TAPS], term, minus_zero };
        for y in 0..window.kernel[1] {
            for group in 0..groups(window) {
                let at = |index: usize| (4 * group + index < width).then_some(4 * group + index);
                // Taps that pad a group of four have weights of zero.
                let weight = |index: usize| at(index).map_or(0, |x| weights[(y * width + x) * 4]);
                // With these ones, a dot product sums the bytes of the window, which the filter's
                // zero point multiplies.
                let one = |index: usize| at(index).map_or(0, |_| 1);
                let places = [0, 1, 2, 3];
                taps.weights[y * groups(window) + group] =
                    [i32::from_ne_bytes(places.map(weight)), i32::from_ne_bytes(places.map(one))];
            }
        }
        taps
    }
}

/// Returns the number of rows of a padded plane, and the bytes in each.
fn padded(window: &Window) -> [usize; 2] {
    let rows =
        (window.output[1].max(1) - 1) * window.stride[1] + (window.kernel[1] - 1) * window.dilation[1] + 1;
    let bytes = (window.output[2].max(1) - 1) * window.stride[2] + window.kernel[2];
    [rows, bytes]
}

/// Returns the bytes of scratch for a plane.
pub fn plane_len(window: &Window) -> usize {
    let [rows, bytes] = padded(window);
    // A vector reads up to its last lane, whose column may be far past the last one.
    // Whole cache lines, so that the planes of two threads share none.
    let len = rows.saturating_mul(bytes).saturating_add(3 * WINDOWS_REACH);
    len.checked_next_multiple_of(64).unwrap_or(usize::MAX)
}

/// Convolves one plane. Before the first plane, the caller fills `scratch` with the padding value.
/// No plane overwrites the padding.
///
/// # Panics
///
/// If a slice is shorter than the window requires.
pub fn convolve_plane(
    isa: Isa,
    window: &Window,
    image: SourcePlane<'_>,
    taps: &QuantizedTaps,
    to: PlaneTarget<'_>,
    scratch: &mut [u8],
) {
    // The padded copy costs little: a plane is read once per tap, from cache.
    place(window, image, scratch);
    let scratch = &*scratch;
    dispatch_bytes(isa, QuantizedPlane { window, taps, scratch, to });
}

/// Copies the image into the padded plane.
fn place(window: &Window, image: SourcePlane<'_>, scratch: &mut [u8]) {
    let SourcePlane { bytes: image, flip } = image;
    let [rows, bytes] = padded(window);
    let ([_, height, width], [_, pad_y, pad_x]) = (window.input, window.pad);
    let count = width.min(bytes.saturating_sub(pad_x));
    if count == 0 {
        return;
    }
    let image_rows = image.chunks_exact(width).take(height.min(rows.saturating_sub(pad_y)));
    for (y, from) in image_rows.enumerate() {
        let to = &mut scratch[(pad_y + y) * bytes + pad_x..][..count];
        match flip {
            0 => copy_row(&from[..count], to),
            _ => to.iter_mut().zip(from).for_each(|(to, from)| *to = from ^ flip),
        }
    }
}

/// Copies a row into one of equal length. Rows are often too short for a library call to pay.
#[inline(always)]
fn copy_row(from: &[u8], to: &mut [u8]) {
    match from.len() {
        16.. => copy_by::<16>(from, to),
        8..=15 => copy_by::<8>(from, to),
        4..=7 => copy_by::<4>(from, to),
        _ => to.iter_mut().zip(from).for_each(|(to, from)| *to = *from),
    }
}

/// Copies `BYTES` bytes at a time. The last copy may overlap the one before.
#[inline(always)]
fn copy_by<const BYTES: usize>(from: &[u8], to: &mut [u8]) {
    // Overlapping copies need no loop for the rest.
    let last = from.len() - BYTES;
    for at in (0..last).step_by(BYTES) {
        to[at..at + BYTES].copy_from_slice(&from[at..at + BYTES]);
    }
    to[last..last + BYTES].copy_from_slice(&from[last..last + BYTES]);
}

/// One padded plane.
struct QuantizedPlane<'a> {
    window: &'a Window,
    taps: &'a QuantizedTaps,
    scratch: &'a [u8],
    to: PlaneTarget<'a>,
}

impl ByteOp for QuantizedPlane<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: ByteLanes>(self, lanes: L) {
        let simd = lanes.base();
        match self.to {
            PlaneTarget::Accumulators(to) => rows(
                lanes,
                self.window,
                self.taps,
                self.scratch,
                #[inline(always)]
                |at, count, sum| lanes.store_i32(to, at, count, sum),
            ),
            PlaneTarget::Numbers { values, factor, bias } => {
                let (factor, bias) = (simd.splat(factor), simd.splat(bias));
                rows(
                    lanes,
                    self.window,
                    self.taps,
                    self.scratch,
                    #[inline(always)]
                    |at, count, sum| {
                        let value = simd.add(simd.mul(simd.to_f32(sum), factor), bias);
                        if count == L::Base::LANES {
                            simd.store(values, at, value);
                        } else {
                            simd.store_partial(values, at, count, value);
                        }
                    },
                );
            }
            PlaneTarget::Quantized(to, Requantize { factor, zero, least, greatest }) => {
                let (factor, zero) = (simd.splat(factor), simd.splat_i32(zero));
                let (least, greatest) = (simd.splat(least), simd.splat(greatest));
                rows(
                    lanes,
                    self.window,
                    self.taps,
                    self.scratch,
                    #[inline(always)]
                    |at, count, sum| {
                        let value = simd.mul(simd.to_f32(sum), factor);
                        let value = simd.min_or_second(simd.max_or_second(value, least), greatest);
                        // The next row overwrites what is stored past the end of a row, and whole
                        // vectors are stored faster.
                        let whole = L::Base::LANES;
                        let count = if to.len().saturating_sub(at) >= whole { whole } else { count };
                        lanes.store_low_bytes(to, at, count, simd.add_i32(simd.to_i32(value), zero));
                    },
                );
            }
        }
    }
}

/// Computes all rows, one after another. `store` takes a position, a number of accumulators, and
/// the accumulators.
#[inline(always)]
fn rows<L: ByteLanes>(
    lanes: L,
    window: &Window,
    taps: &QuantizedTaps,
    scratch: &[u8],
    mut store: impl FnMut(usize, usize, Lanes<L>),
) {
    // 3-by-3 filters without a zero point are by far the most common.
    let is_three = taps.minus_zero == 0 && [window.kernel[1], groups(window)] == [3, 1];
    match (window.stride[2] == 1, is_three) {
        (true, true) => three_taps::<L, 1>(lanes, window, taps, scratch, &mut store),
        (false, true) => three_taps::<L, 2>(lanes, window, taps, scratch, &mut store),
        (true, false) => any_taps::<L, 1>(lanes, window, taps, scratch, &mut store),
        (false, false) => any_taps::<L, 2>(lanes, window, taps, scratch, &mut store),
    }
}

/// Handles kernels of three rows of up to four weights, without a zero point. The weights stay in
/// registers.
#[inline(always)]
fn three_taps<L: ByteLanes, const STRIDE: usize>(
    lanes: L,
    window: &Window,
    taps: &QuantizedTaps,
    scratch: &[u8],
    store: &mut impl FnMut(usize, usize, Lanes<L>),
) {
    let ([_, height, width], simd) = (window.output, lanes.base());
    let pitch = padded(window)[1];
    let [first, second, third] = [taps.weights[0][0], taps.weights[1][0], taps.weights[2][0]];
    let weights = [simd.splat_i32(first), simd.splat_i32(second), simd.splat_i32(third)];
    let term = simd.splat_i32(taps.term);
    for y in 0..height {
        spend(width);
        let rows = [0, 1, 2].map(|tap| &scratch[(y * window.stride[1] + tap * window.dilation[1]) * pitch..]);
        let whole = width - width % L::Base::LANES;
        for x in (0..whole).step_by(L::Base::LANES) {
            let sum = three_rows::<L, STRIDE>(lanes, rows, weights, term, x);
            store(y * width + x, L::Base::LANES, sum);
        }
        if whole < width {
            let sum = three_rows::<L, STRIDE>(lanes, rows, weights, term, whole);
            store(y * width + whole, width - whole, sum);
        }
    }
}

/// Accumulates the windows from `x` on.
#[inline(always)]
fn three_rows<L: ByteLanes, const STRIDE: usize>(
    lanes: L,
    rows: [&[u8]; 3],
    weights: [Lanes<L>; 3],
    mut sum: Lanes<L>,
    x: usize,
) -> Lanes<L> {
    for row in 0..3 {
        sum = lanes.dot(sum, lanes.windows::<STRIDE>(rows[row], x * STRIDE), weights[row]);
    }
    sum
}

/// Handles any number of taps.
#[inline(always)]
fn any_taps<L: ByteLanes, const STRIDE: usize>(
    lanes: L,
    window: &Window,
    taps: &QuantizedTaps,
    scratch: &[u8],
    store: &mut impl FnMut(usize, usize, Lanes<L>),
) {
    let ([_, height, width], simd) = (window.output, lanes.base());
    let (pitch, groups) = (padded(window)[1], groups(window));
    let minus_zero = simd.splat_i32(taps.minus_zero);
    for y in 0..height {
        spend(width * window.kernel[1] * groups / 4);
        let mut x = 0;
        while x < width {
            let count = (width - x).min(L::Base::LANES);
            let (mut sum, mut whole) = (simd.splat_i32(taps.term), simd.splat_i32(0));
            for tap in 0..window.kernel[1] {
                let row = (y * window.stride[1] + tap * window.dilation[1]) * pitch;
                for group in 0..groups {
                    let [weights, ones] = taps.weights[tap * groups + group];
                    let bytes = lanes.windows::<STRIDE>(scratch, row + x * STRIDE + 4 * group);
                    sum = lanes.dot(sum, bytes, simd.splat_i32(weights));
                    whole = lanes.dot(whole, bytes, simd.splat_i32(ones));
                }
            }
            store(y * width + x, count, simd.add_i32(sum, lanes.mul_i32(whole, minus_zero)));
            x += count;
        }
    }
}
