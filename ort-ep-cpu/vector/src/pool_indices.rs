//! Max pooling of one channel's plane, with the indices of the maxima.
//!
//! Like max pooling alone, it takes two steps: the greatest value of each column of a window and
//! its row, then the greatest of these. Among equal values the first row counts, and in that row
//! the first column, as in a loop over the window.

use super::places::{load, store};
use super::pool::{Indices, row_len};
use super::window::Window;
use crate::simd::{Isa, MAX_LANES, Simd, SimdOp, dispatch};
use ort_cpu_threads::interrupt::spend;

/// Pools one plane; `scratch` holds at least [`super::pool::scratch_len`] values of any content.
///
/// # Panics
/// If a slice's length does not match the window.
pub fn max_and_indices(
    isa: Isa,
    window: &Window,
    (from, scratch): (&[f32], &mut [f32]),
    to: &mut [f32],
    indices: Indices<'_>,
) {
    let Window { input, output, .. } = *window;
    assert_eq!(from.len(), input[0] * input[1], "the input plane");
    assert_eq!(to.len(), output[0] * output[1], "the output plane");
    assert_eq!(indices.values.len(), to.len(), "an index for each value");
    if !to.is_empty() {
        dispatch(isa, IndexedPlane { window, from, scratch, to, indices });
    }
}

struct IndexedPlane<'a> {
    window: &'a Window,
    from: &'a [f32],
    scratch: &'a mut [f32],
    to: &'a mut [f32],
    indices: Indices<'a>,
}

/// Values, and the input row of each; infinity if it is padding.
struct Greatest<T> {
    value: T,
    row: T,
}

impl SimdOp for IndexedPlane<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let IndexedPlane { window, from, scratch, to, mut indices } = self;
        let (len, left, columns) = (row_len(window), window.pads[1], window.output[1]);
        let (value, row) = scratch[..2 * len].split_at_mut(len);
        // From here on, only the range between the padding on both sides is written.
        value.fill(f32::NEG_INFINITY);
        // Infinity marks padding: it is above no row, so any input replaces it.
        row.fill(f32::INFINITY);
        for (y, (to, at)) in to.chunks_exact_mut(columns).zip((0..).step_by(columns)).enumerate() {
            spend((len * window.kernel[0] + columns * window.kernel[1]) / 4);
            let greatest = Greatest { value: &mut value[left..], row: &mut row[left..] };
            greatest_of_columns(s, window, y, from, greatest);
            let padded = Greatest { value: &*value, row: &*row };
            greatest_of_windows(s, window, &padded, to, (&mut indices, at));
        }
    }
}

/// Returns 1 in lanes where `new` replaces `best`, else 0. NaN is greater than any number.
#[inline(always)]
fn replaces<S: Simd>(s: S, new: &Greatest<S::F32>, best: &Greatest<S::F32>) -> S::F32 {
    let (zero, one) = (s.splat(0.0), s.splat(1.0));
    let is_above = s.select(s.lt(new.row, best.row), one, zero);
    let among_numbers = s.select(s.eq(new.value, best.value), is_above, zero);
    let among_numbers = s.select(s.lt(best.value, new.value), one, among_numbers);
    let of_nan = s.select(s.is_nan(best.value), is_above, one);
    s.select(s.is_nan(new.value), of_nan, among_numbers)
}

/// Finds the greatest value in each column of the windows of output row `y`.
#[inline(always)]
fn greatest_of_columns<S: Simd>(s: S, window: &Window, y: usize, from: &[f32], to: Greatest<&mut [f32]>) {
    let Window { input: [height, width], kernel: [taps, _], dilations: [dilation, _], .. } = *window;
    let (start, top) = (y * window.strides[0], window.pads[0]);
    // Only taps inside the plane are visited.
    let first = top.saturating_sub(start).div_ceil(dilation);
    let end = (top + height).saturating_sub(start).div_ceil(dilation).min(taps);
    for at in (0..width).step_by(S::LANES) {
        let count = (width - at).min(S::LANES);
        let mut best = Greatest { value: s.splat(f32::NEG_INFINITY), row: s.splat(f32::INFINITY) };
        for tap in first..end {
            let row = start + tap * dilation - top;
            let value = load(s, from, row * width + at, count, f32::NEG_INFINITY);
            // Rows are kept as floats, which select and compare like the values. They are exact up
            // to 2^24.
            let new = Greatest { value, row: s.splat(row as f32) };
            let is_new = s.lt(s.splat(0.0), replaces(s, &new, &best));
            best.value = s.select(is_new, new.value, best.value);
            best.row = s.select(is_new, new.row, best.row);
        }
        store(s, to.value, at, count, best.value);
        store(s, to.row, at, count, best.row);
    }
}

/// Finds the greatest value of each window of a row, given those of its columns in padded rows with
/// slack.
#[inline(always)]
fn greatest_of_windows<S: Simd>(
    s: S,
    window: &Window,
    padded: &Greatest<&[f32]>,
    to: &mut [f32],
    (indices, offset): (&mut Indices<'_>, usize),
) {
    let ([height, width], left) = (window.input, window.pads[1]);
    let (stride, dilation, taps) = (window.strides[1], window.dilations[1], window.kernel[1]);
    for at in (0..to.len()).step_by(S::LANES) {
        let count = (to.len() - at).min(S::LANES);
        let mut best = Greatest { value: s.splat(f32::NEG_INFINITY), row: s.splat(f32::INFINITY) };
        let mut column = s.splat(0.0);
        for tap in 0..taps {
            let place = at * stride + tap * dilation;
            let new = Greatest {
                value: load_strided(s, padded.value, place, stride),
                row: load_strided(s, padded.row, place, stride),
            };
            let is_new = s.lt(s.splat(0.0), replaces(s, &new, &best));
            best.value = s.select(is_new, new.value, best.value);
            best.row = s.select(is_new, new.row, best.row);
            column = s.select(is_new, s.splat((tap * dilation) as f32), column);
        }
        store(s, to, at, count, best.value);
        let (rows, columns) = (s.to_array(best.row), s.to_array(column));
        let places = rows.iter().zip(&columns).zip(at..).zip(&mut indices.values[offset + at..][..count]);
        for (((row, column), x), index) in places {
            // Rows and columns become indices one by one: 64-bit integers have no vector type here.
            let found = || {
                let (row, column) = (*row as usize, x * stride + *column as usize - left);
                if indices.column_major { column * height + row } else { row * width + column }
            };
            *index = indices.base + if row.is_finite() { found() as i64 } else { 0 };
        }
    }
}

/// Loads a vector of values that are `stride` apart. Lanes past the row belong to no output.
#[inline(always)]
fn load_strided<S: Simd>(s: S, from: &[f32], at: usize, stride: usize) -> S::F32 {
    match stride {
        1 => s.load(from, at),
        2 => s.load_even_odd(from, at).0,
        _ => {
            let mut lanes = [0.0; MAX_LANES];
            let values = from[at..].iter().step_by(stride);
            lanes.iter_mut().zip(values).take(S::LANES).for_each(|(lane, value)| *lane = *value);
            s.from_array(&lanes)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::{Pool, PoolAxis, pool_nd, scratch_len};

    #[test]
    fn the_first_of_the_greatest_as_in_the_plain_loop() {
        // input, kernel, strides, dilations, pads before
        let cases = [
            ([32, 32], [3, 3], [2, 2], [1, 1], [1, 1]),
            ([13, 37], [3, 2], [1, 1], [2, 3], [2, 1]),
            ([20, 50], [5, 4], [1, 3], [2, 3], [2, 4]),
            ([1, 64], [1, 8], [1, 4], [1, 1], [0, 2]),
            ([2, 2], [2, 2], [2, 2], [1, 1], [0, 0]),
            ([1, 1], [3, 3], [1, 1], [1, 1], [2, 2]),
        ];
        for (input, kernel, strides, dilations, pads) in cases {
            let axes = [0, 1].map(|axis| {
                let span = input[axis] + 2 * pads[axis] - (kernel[axis] - 1) * dilations[axis] - 1;
                PoolAxis {
                    input: input[axis],
                    output: span / strides[axis] + 1,
                    kernel: kernel[axis],
                    stride: strides[axis],
                    dilation: dilations[axis],
                    pads: [pads[axis]; 2],
                }
            });
            let output = axes.map(|axis| axis.output);
            let window = Window { input, output, kernel, strides, dilations, pads };
            // Many values are equal, some are NaN, some are infinite.
            let from: Vec<f32> = (0..input[0] * input[1])
                .map(|place| match place * 7 % 31 {
                    3 => f32::NAN,
                    4..=9 => f32::NEG_INFINITY,
                    other => (other % 5) as f32 - 2.0,
                })
                .collect();
            let size = output[0] * output[1];
            for column_major in [false, true] {
                let (mut want, mut want_indices) = (vec![0.0; size], vec![0; size]);
                let indices = Indices { values: &mut want_indices, base: 100, column_major };
                pool_nd(Pool::Max, &axes, &from, &mut want, Some(indices));
                for isa in Isa::available() {
                    let (mut to, mut found) = (vec![0.0; size], vec![0; size]);
                    let mut scratch = vec![f32::NAN; scratch_len(&window)];
                    let indices = Indices { values: &mut found, base: 100, column_major };
                    max_and_indices(isa, &window, (&from, &mut scratch), &mut to, indices);
                    assert_eq!(found, want_indices, "{isa:?} {window:?} {column_major}");
                    let same = |(a, b): (&f32, &f32)| a == b || (a.is_nan() && b.is_nan());
                    assert!(to.iter().zip(&want).all(same), "{isa:?} {window:?}: {to:?} {want:?}");
                }
            }
        }
    }
}
