//! Maximum and average pooling of one channel's plane.
//!
//! In two dimensions both are separable: first the rows of a window are combined into one, then the
//! positions of that row. [`pool_nd`] is a plain loop over any number of axes.

use super::places::{load, store};
use super::reduce;
use super::window::Window;
use crate::simd::{Isa, SLACK, Simd, SimdOp, dispatch};
use ort_cpu_threads::interrupt::spend;

/// The reduction of a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pool {
    /// The greatest value; NaN if any is NaN; -inf if the window is all padding.
    Max,
    /// The sum divided by the number of positions that count.
    Average {
        /// Whether padding counts. Positions beyond the padding never do.
        count_include_pad: bool,
    },
}

/// The plan for all planes of one pooling.
#[derive(Debug, Clone)]
pub struct PoolPlan {
    window: Window,
    pool: Pool,
    /// How many positions count, for each output row and column.
    counts: [Vec<f32>; 2],
}

/// Returns how many positions of a window count along one axis.
fn count_places(pool: Pool, axis: &PoolAxis, output: usize) -> usize {
    let include_pad = pool == Pool::Average { count_include_pad: true };
    let (start, end) = match include_pad {
        true => (0, axis.pads[0] + axis.input + axis.pads[1]),
        false => (axis.pads[0], axis.pads[0] + axis.input),
    };
    // Ceil mode may place the last window beyond the padding. Positions there never count.
    let places = (0..axis.kernel).map(|tap| output * axis.stride + tap * axis.dilation);
    places.filter(|place| (start..end).contains(place)).count()
}

/// Returns how many f32 of scratch a plane needs. It takes no plan, because a plan allocates
/// memory.
pub fn scratch_len(window: &Window) -> usize {
    BAND.saturating_mul(row_len(window))
}

/// Returns the length of a padded row and the slack after it.
pub(super) fn row_len(window: &Window) -> usize {
    window.extent(1).max(window.pads[1] + window.input[1]) + 2 * SLACK
}

impl PoolPlan {
    /// Plans the pooling of planes; `end_pads` is the padding below and on the right.
    pub fn new(window: Window, end_pads: [usize; 2], pool: Pool) -> PoolPlan {
        let counts = [0, 1].map(|axis| {
            let along = PoolAxis {
                input: window.input[axis],
                output: window.output[axis],
                kernel: window.kernel[axis],
                stride: window.strides[axis],
                dilation: window.dilations[axis],
                pads: [window.pads[axis], end_pads[axis]],
            };
            (0..along.output).map(|output| count_places(pool, &along, output) as f32).collect()
        });
        PoolPlan { window, pool, counts }
    }

    /// Pools one plane. `scratch` holds at least [`scratch_len`] values of any content.
    ///
    /// # Panics
    /// If a slice's length does not match the window.
    pub fn run(&self, isa: Isa, from: &[f32], to: &mut [f32], scratch: &mut [f32]) {
        let Window { input, output, .. } = self.window;
        assert_eq!(from.len(), input[0] * input[1], "the input plane");
        assert_eq!(to.len(), output[0] * output[1], "the output plane");
        if !to.is_empty() {
            dispatch(isa, PoolPlane { plan: self, from, to, scratch });
        }
    }
}

struct PoolPlane<'a> {
    plan: &'a PoolPlan,
    from: &'a [f32],
    to: &'a mut [f32],
    scratch: &'a mut [f32],
}

impl SimdOp for PoolPlane<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.plan.pool {
            // The kind is a constant of the loops, so that they contain no branch.
            Pool::Max => pool_rows::<S, true>(s, self),
            Pool::Average { .. } => pool_rows::<S, false>(s, self),
        }
    }
}

#[inline(always)]
fn combine<S: Simd, const MAX: bool>(s: S, a: S::F32, b: S::F32) -> S::F32 {
    if MAX { s.max(a, b) } else { s.add(a, b) }
}

/// Output rows that go through both steps together. What the first step stores has then reached the
/// cache when the second loads it.
const BAND: usize = 8;

#[inline(always)]
fn pool_rows<S: Simd, const MAX: bool>(s: S, plane: PoolPlane<'_>) {
    let PoolPlane { plan, from, to, scratch } = plane;
    let Window { output: [rows, columns], pads: [_, left], .. } = plan.window;
    let len = row_len(&plan.window);
    let scratch = &mut scratch[..BAND.min(rows) * len];
    // From here on, only the range between the padding on both sides is written.
    scratch.fill(if MAX { f32::NEG_INFINITY } else { 0.0 });
    for band in (0..rows).step_by(BAND) {
        let band = band..rows.min(band + BAND);
        spend(band.len() * (len * plan.window.kernel[0] + columns * plan.window.kernel[1]) / 8);
        for (y, combined) in band.clone().zip(scratch.chunks_exact_mut(len)) {
            combine_rows::<S, MAX>(s, &plan.window, y, from, &mut combined[left..]);
        }
        for (y, combined) in band.zip(scratch.chunks_exact(len)) {
            let counts = (!MAX).then_some((plan.counts[0][y], &plan.counts[1][..]));
            pool_columns::<S, MAX>(s, &plan.window, combined, counts, (&mut to[y * columns..], columns));
        }
    }
}

/// Combines the input rows of a window's taps. It may write up to a vector past the width.
#[inline(always)]
fn combine_rows<S: Simd, const MAX: bool>(
    s: S,
    window: &Window,
    y: usize,
    from: &[f32],
    combined: &mut [f32],
) {
    let Window { input: [height, width], kernel: [taps, _], dilations: [dilation, _], .. } = *window;
    let (start, top) = (y * window.strides[0], window.pads[0]);
    let identity = if MAX { f32::NEG_INFINITY } else { 0.0 };
    // Only taps inside the plane are visited.
    let first = top.saturating_sub(start).div_ceil(dilation);
    let end = (top + height).saturating_sub(start).div_ceil(dilation).min(taps);
    for at in (0..width).step_by(S::LANES) {
        let count = (width - at).min(S::LANES);
        let mut sum = s.splat(identity);
        for tap in first..end {
            let row = start + tap * dilation - top;
            sum = combine::<S, MAX>(s, sum, load(s, from, row * width + at, count, identity));
        }
        s.store(combined, at, sum);
    }
}

/// Combines the taps of each output from a padded row with slack, and divides by the counts of the
/// row and of each column. It may write up to a vector past the row.
#[inline(always)]
fn pool_columns<S: Simd, const MAX: bool>(
    s: S,
    window: &Window,
    padded: &[f32],
    counts: Option<(f32, &[f32])>,
    (result, len): (&mut [f32], usize),
) {
    let (stride, dilation, taps) = (window.strides[1], window.dilations[1], window.kernel[1]);
    let identity = if MAX { f32::NEG_INFINITY } else { 0.0 };
    // Vector loads exist for strides 1 and 2 only.
    if stride > 2 {
        for (x, value) in result[..len].iter_mut().enumerate() {
            let places = (0..taps).map(|tap| padded[x * stride + tap * dilation]);
            let sum = if MAX { places.fold(identity, crate::simd::max_or_nan) } else { places.sum() };
            *value = counts.map_or(sum, |(row, columns)| sum / (row * columns[x]));
        }
        return;
    }
    for at in (0..len).step_by(S::LANES) {
        let mut sum = s.splat(identity);
        for tap in 0..taps {
            let place = at * stride + tap * dilation;
            let x = if stride == 1 { s.load(padded, place) } else { s.load_even_odd(padded, place).0 };
            sum = combine::<S, MAX>(s, sum, x);
        }
        let count = (len - at).min(S::LANES);
        if let Some((row, columns)) = counts {
            // Counts of rows and columns multiply, because a window is a rectangle. Missing lanes
            // count as 1, so that nothing divides by zero.
            sum = s.div(sum, s.mul(s.splat(row), load(s, columns, at, count, 1.0)));
        }
        // A whole vector is stored if the next rows will overwrite the excess.
        let count = if result.len() - at >= S::LANES { S::LANES } else { count };
        store(s, result, at, count, sum);
    }
}

/// Returns the mean of a plane.
pub fn global_average(isa: Isa, plane: &[f32]) -> f32 {
    reduce::mean(isa, plane)
}

/// Returns the greatest value of a plane; NaN if any is NaN.
pub fn global_max(isa: Isa, plane: &[f32]) -> f32 {
    reduce::max(isa, plane)
}

/// One axis of a pooling.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolAxis {
    /// The size of the input.
    pub input: usize,
    /// The size of the output.
    pub output: usize,
    /// The size of the kernel.
    pub kernel: usize,
    /// The step from one output to the next; at least 1.
    pub stride: usize,
    /// The step from one tap to the next; at least 1.
    pub dilation: usize,
    /// The padding before and after.
    pub pads: [usize; 2],
}

/// The indices of the maxima.
#[derive(Debug)]
pub struct Indices<'a> {
    /// The index of each output's maximum in the flat input, the first of equals. It is `base` for
    /// a window of padding.
    pub values: &'a mut [i64],
    /// Added to each index within this plane.
    pub base: i64,
    /// Whether the first axis is the contiguous one instead of the last (ONNX's `storage_order` 1).
    pub column_major: bool,
}

/// Pools one plane of any number of axes, one value at a time. Only [`Pool::Max`] fills the
/// indices.
///
/// # Panics
/// If a slice's length does not match the axes.
pub fn pool_nd(
    pool: Pool,
    axes: &[PoolAxis],
    from: &[f32],
    to: &mut [f32],
    mut indices: Option<Indices<'_>>,
) {
    assert_eq!(from.len(), axes.iter().map(|axis| axis.input).product::<usize>(), "the input plane");
    assert_eq!(to.len(), axes.iter().map(|axis| axis.output).product::<usize>(), "the output plane");
    let taps: usize = axes.iter().map(|axis| axis.kernel).product();
    let mut position = vec![0; axes.len()];
    for (place, result) in to.iter_mut().enumerate() {
        spend(4 * taps);
        unflatten(place, axes.iter().map(|axis| axis.output), &mut position);
        let mut best: Option<(f32, usize)> = None;
        // This loop takes windows of any size, so it sums in double precision.
        let mut sum = 0.0_f64;
        for tap in 0..taps {
            let Some([flat, column_major]) = input_place(axes, &position, tap) else { continue };
            let x = from[flat];
            sum += f64::from(x);
            // The first maximum wins, and NaN is greater than any number.
            let replaces = best.is_none_or(|(value, _)| x > value || (x.is_nan() && !value.is_nan()));
            if replaces {
                let column_major = indices.as_ref().is_some_and(|i| i.column_major).then_some(column_major);
                best = Some((x, column_major.unwrap_or(flat)));
            }
        }
        match pool {
            Pool::Max => {
                *result = best.map_or(f32::NEG_INFINITY, |(value, _)| value);
                if let Some(indices) = &mut indices {
                    indices.values[place] = indices.base + best.map_or(0, |(_, index)| index as i64);
                }
            }
            Pool::Average { .. } => {
                let counts = axes.iter().zip(&position).map(|(axis, at)| count_places(pool, axis, *at));
                *result = (sum / counts.product::<usize>() as f64) as f32;
            }
        }
    }
}

/// Writes the coordinates of a flat index, last axis fastest.
fn unflatten(
    mut flat: usize,
    sizes: impl DoubleEndedIterator<Item = usize> + ExactSizeIterator,
    out: &mut [usize],
) {
    for (size, coordinate) in sizes.rev().zip(out.iter_mut().rev()) {
        *coordinate = flat % size;
        flat /= size;
    }
}

/// Returns the flat index of the input that a tap reads, row-major and column-major; none if it is
/// padding.
fn input_place(axes: &[PoolAxis], position: &[usize], mut tap: usize) -> Option<[usize; 2]> {
    let (mut flat, mut step) = (0, 1);
    let mut column_major = 0;
    for (axis, at) in axes.iter().zip(position).rev() {
        let along = tap % axis.kernel;
        tap /= axis.kernel;
        let place = (at * axis.stride + along * axis.dilation).checked_sub(axis.pads[0])?;
        if place >= axis.input {
            return None;
        }
        flat += place * step;
        step *= axis.input;
        column_major = column_major * axis.input + place;
    }
    Some([flat, column_major])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// input, kernel, strides, dilations, pads before, pads after, one more output (ceil mode)
    type Case = ([usize; 2], [usize; 2], [usize; 2], [usize; 2], [usize; 2], [usize; 2], bool);

    const CASES: [Case; 9] = [
        ([112, 112], [3, 3], [2, 2], [1, 1], [1, 1], [1, 1], false),
        ([13, 13], [3, 3], [2, 2], [1, 1], [0, 0], [0, 0], false),
        ([14, 15], [2, 2], [2, 2], [1, 1], [0, 0], [0, 0], true),
        ([35, 33], [3, 3], [1, 1], [1, 1], [1, 1], [1, 1], false),
        ([20, 50], [5, 4], [1, 2], [2, 3], [2, 4], [1, 3], false),
        ([9, 40], [2, 7], [3, 3], [1, 2], [1, 3], [0, 5], true),
        ([1, 64], [1, 8], [1, 4], [1, 1], [0, 2], [0, 2], false),
        ([7, 7], [7, 7], [1, 1], [1, 1], [0, 0], [0, 0], false),
        ([1, 1], [3, 3], [1, 1], [1, 1], [1, 1], [1, 1], false),
    ];

    #[test]
    fn separable_pooling_agrees_with_the_plain_loop() {
        let pools = [
            Pool::Max,
            Pool::Average { count_include_pad: false },
            Pool::Average { count_include_pad: true },
        ];
        for isa in Isa::available() {
            for (input, kernel, strides, dilations, pads, after, ceil) in CASES {
                let axes: Vec<PoolAxis> = (0..2)
                    .map(|axis| {
                        let span =
                            input[axis] + pads[axis] + after[axis] - (kernel[axis] - 1) * dilations[axis] - 1;
                        let output =
                            if ceil { span.div_ceil(strides[axis]) } else { span / strides[axis] } + 1;
                        PoolAxis {
                            input: input[axis],
                            output,
                            kernel: kernel[axis],
                            stride: strides[axis],
                            dilation: dilations[axis],
                            pads: [pads[axis], after[axis]],
                        }
                    })
                    .collect();
                let output = [axes[0].output, axes[1].output];
                let window = Window { input, output, kernel, strides, dilations, pads };
                let from: Vec<f32> = (0..input[0] * input[1]).map(|i| (i as f32 * 1.3).sin() - 0.5).collect();
                for pool in pools {
                    let plan = PoolPlan::new(window, after, pool);
                    let mut scratch = vec![f32::NAN; scratch_len(&plan.window)];
                    let (mut to, mut want) =
                        (vec![0.0; output[0] * output[1]], vec![0.0; output[0] * output[1]]);
                    plan.run(isa, &from, &mut to, &mut scratch);
                    pool_nd(pool, &axes, &from, &mut want, None);
                    for (got, want) in to.iter().zip(&want) {
                        let same = got == want || (got.is_nan() && want.is_nan());
                        assert!(
                            same || (got - want).abs() < 2e-6,
                            "{isa:?} {window:?} {pool:?}: {got} {want}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn maxima_and_their_indices() {
        // Values of onnxruntime for MaxPool of [[1, 5, 2], [7, 3, 4]] with a 2 x 2 kernel and
        // padding of 1 at the start.
        let axis = |input| PoolAxis { input, output: input, kernel: 2, stride: 1, dilation: 1, pads: [1, 0] };
        let axes = [axis(2), axis(3)];
        let from = [1.0, 5.0, 2.0, 7.0, 3.0, 4.0];
        for (column_major, want) in [(false, [0, 1, 1, 3, 3, 1]), (true, [0, 2, 2, 1, 1, 2])] {
            let (mut to, mut values) = ([0.0; 6], [0; 6]);
            let indices = Indices { values: &mut values, base: 100, column_major };
            pool_nd(Pool::Max, &axes, &from, &mut to, Some(indices));
            assert_eq!(to, [1.0, 5.0, 5.0, 7.0, 7.0, 5.0]);
            assert_eq!(values, want.map(|index| index + 100));
        }
    }

    #[test]
    fn places_beyond_the_padding_are_never_counted() {
        // Values of onnxruntime for AveragePool with ceil_mode: the last window reaches beyond the
        // padding.
        let window = Window {
            input: [1, 6],
            output: [1, 4],
            kernel: [1, 3],
            strides: [1, 2],
            dilations: [1, 1],
            pads: [0, 1],
        };
        let from = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0];
        for (count_include_pad, want) in
            [(false, [1.5, 14.0 / 3.0, 56.0 / 3.0, 32.0]), (true, [1.0, 14.0 / 3.0, 56.0 / 3.0, 16.0])]
        {
            let plan = PoolPlan::new(window, [0, 1], Pool::Average { count_include_pad });
            for isa in Isa::available() {
                let (mut to, mut scratch) = ([0.0; 4], vec![0.0; scratch_len(&plan.window)]);
                plan.run(isa, &from, &mut to, &mut scratch);
                assert_eq!(to, want);
            }
        }
    }

    #[test]
    fn nan_is_the_maximum_and_global_pools_are_reductions() {
        for isa in Isa::available() {
            let window = Window {
                input: [1, 40],
                output: [1, 40],
                kernel: [1, 3],
                strides: [1, 1],
                dilations: [1, 1],
                pads: [0, 1],
            };
            let mut from = vec![1.0; 40];
            from[20] = f32::NAN;
            let plan = PoolPlan::new(window, [0, 1], Pool::Max);
            let (mut to, mut scratch) = (vec![0.0; 40], vec![0.0; scratch_len(&plan.window)]);
            plan.run(isa, &from, &mut to, &mut scratch);
            for (x, value) in to.iter().enumerate() {
                assert_eq!(value.is_nan(), (19..22).contains(&x), "{isa:?} {x}");
            }
            assert_eq!(global_average(isa, &[1.0, 2.0, 6.0]), 3.0);
            assert_eq!(global_max(isa, &[1.0, 7.0, 6.0]), 7.0);
        }
    }
}
