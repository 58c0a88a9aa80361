//! Stencil kernels: each result reads several neighbouring elements, in registers. They are the
//! inner loops of depthwise convolution.
//!
//! Masked stores are slow on some CPUs, so these loops avoid them. If a row has at least a vector
//! of results, its last vector is moved back and overlaps results that are computed twice. If it
//! has fewer, whole vectors are stored in row order, and the next row overwrites what is beyond its
//! predecessor. Loads go a little beyond what a result needs, so inputs have slack at their end.

use ort_cpu_vector::simd::slices::UnaryOp;
use ort_cpu_vector::simd::{SLACK, Simd};

/// Rows of a convolution's input, with [`SLACK`] after the last.
#[derive(Clone, Copy)]
pub struct Input<'a> {
    /// All rows.
    pub values: &'a [f32],
    /// Stride from the input of one output row to the next.
    pub stride: usize,
}

/// The weights of a filter, and its bias.
#[derive(Clone, Copy)]
pub struct Filter<'a> {
    /// One weight per tap.
    pub weights: &'a [f32],
    /// The initial value of the accumulator.
    pub bias: f32,
}

/// The taps of a filter: where each reads, and its weight.
#[derive(Clone, Copy)]
pub struct Taps<'a> {
    /// The offset that each tap reads at, relative to the first result.
    pub offsets: &'a [usize],
    /// The weights and the bias.
    pub filter: Filter<'a>,
}

/// The taps of as many filters as a vector has lanes, one for each channel.
#[derive(Clone, Copy)]
pub struct ChannelTaps<'a> {
    /// The offset that each tap reads at, in vectors.
    pub offsets: &'a [usize],
    /// A vector of weights per tap.
    pub weights: &'a [f32],
    /// A vector of initial values.
    pub bias: &'a [f32],
}

/// Stores a vector of a row, of which `rest` values from `at` on are wanted. Stores it whole unless
/// the slice ends before that.
///
/// # Safety
/// `out` has `len` values, and `at + rest <= len`.
#[inline(always)]
pub(super) unsafe fn store_in_order<S: Simd>(
    s: S,
    out: *mut f32,
    len: usize,
    at: usize,
    rest: usize,
    value: S::F32,
) {
    if at + S::LANES <= len {
        // SAFETY: the whole vector is inside the output.
        unsafe { s.store_ptr(out.add(at), value) };
    } else {
        // SAFETY: the caller guarantees `rest` values from `at` on.
        unsafe { s.store_partial_ptr(out.add(at), rest, value) };
    }
}

/// `out[i] = epilogue(bias + sum over t of weights[t] * input[offsets[t] + i])`. May write all of
/// `out`, of which `len` values are results.
///
/// # Panics
/// If `input` or `out` does not hold [`SLACK`] more than `len` results need.
#[inline(always)]
pub fn taps<S: Simd, E: UnaryOp>(
    s: S,
    input: &[f32],
    taps: Taps<'_>,
    epilogue: E,
    (out, len): (&mut [f32], usize),
) {
    let last = taps.offsets.iter().copied().max().unwrap_or(0);
    assert!(taps.offsets.len() == taps.filter.weights.len(), "each offset has its weight");
    assert!(last + len + SLACK <= input.len() && len + SLACK <= out.len(), "there is slack");
    let (from, to) = (input.as_ptr(), out.as_mut_ptr());
    let mut at = 0;
    while at < len {
        // SAFETY: the vectors start before `len`, and the assertion checked that both slices have
        // slack after it.
        at += unsafe {
            // Up to four vectors share the broadcast of each weight.
            match (len - at).div_ceil(S::LANES) {
                1 => tap_block::<S, E, 1>(s, from.add(at), S::LANES, taps, epilogue, to.add(at)),
                2 => tap_block::<S, E, 2>(s, from.add(at), S::LANES, taps, epilogue, to.add(at)),
                3 => tap_block::<S, E, 3>(s, from.add(at), S::LANES, taps, epilogue, to.add(at)),
                _ => tap_block::<S, E, 4>(s, from.add(at), S::LANES, taps, epilogue, to.add(at)),
            }
        };
    }
}

/// Computes `N` adjacent vectors of results. Returns how many values these are.
///
/// # Safety
/// `N` vectors can be read at each offset, and written.
#[inline(always)]
unsafe fn tap_block<S: Simd, E: UnaryOp, const N: usize>(
    s: S,
    from: *const f32,
    stride: usize,
    taps: Taps<'_>,
    epilogue: E,
    to: *mut f32,
) -> usize {
    // SAFETY: the caller guarantees `N` readable vectors at each offset.
    let sums = unsafe { tap_sums::<S, N>(s, from, stride, taps) };
    for (part, sum) in sums.into_iter().enumerate() {
        // SAFETY: the caller guarantees `N` writable vectors.
        unsafe { s.store_ptr(to.add(part * S::LANES), epilogue.apply(s, sum)) };
    }
    N * S::LANES
}

/// Returns the sums of `N` vectors that are `stride` apart.
///
/// # Safety
/// `N` vectors can be read at each offset.
#[inline(always)]
unsafe fn tap_sums<S: Simd, const N: usize>(
    s: S,
    from: *const f32,
    stride: usize,
    taps: Taps<'_>,
) -> [S::F32; N] {
    let mut sums = [s.splat(taps.filter.bias); N];
    for (offset, weight) in taps.offsets.iter().zip(taps.filter.weights) {
        let weight = s.splat(*weight);
        for (part, sum) in sums.iter_mut().enumerate() {
            // SAFETY: the caller guarantees `N` readable vectors at each offset.
            let x = unsafe { s.load_ptr(from.add(offset + part * stride)) };
            *sum = s.mul_add(x, weight, *sum);
        }
    }
    sums
}

/// Computes `R` rows: `out[r * width + i] = epilogue(bias + sum)` for `i < width`, with the sum
/// over t of `weights[t] * input[offsets[t] + r * stride + i]`. May write beyond these rows, within
/// `out`.
///
/// # Panics
/// If `input` does not hold [`SLACK`] more than is needed, or `out` does not hold its rows.
#[inline(always)]
pub fn tap_rows<S: Simd, E: UnaryOp, const R: usize>(
    s: S,
    input: Input<'_>,
    taps: Taps<'_>,
    epilogue: E,
    (out, width): (&mut [f32], usize),
) {
    let last = taps.offsets.iter().copied().max().unwrap_or(0);
    assert!(taps.offsets.len() == taps.filter.weights.len(), "each offset has its weight");
    assert!(last + (R - 1) * input.stride + width + SLACK <= input.values.len(), "there is slack");
    assert!(R * width <= out.len(), "the output holds its rows");
    let (from, to, len) = (input.values.as_ptr(), out.as_mut_ptr(), out.len());
    let mut next = 0;
    while next < width {
        // The last vector overlaps the one before it instead of being masked.
        let at = if next + S::LANES > width { width.saturating_sub(S::LANES) } else { next };
        // SAFETY: the assertions checked that the input holds each row and slack after the last.
        // `at + rest` is inside each row of the output.
        unsafe {
            let sums = tap_sums::<S, R>(s, from.add(at), input.stride, taps);
            for (row, sum) in sums.into_iter().enumerate() {
                store_in_order(s, to, len, row * width + at, width - at, epilogue.apply(s, sum));
            }
        }
        next += S::LANES;
    }
}

/// NHWC taps: `N` adjacent results for as many channels as a vector has lanes. Offsets and strides
/// count vectors of one value per channel.
///
/// `out[i] = epilogue(bias + sum over t of weights[t] * input[offsets[t] + i * step])`.
///
/// # Panics
/// If a slice does not hold what is read or written.
#[inline(always)]
pub fn channel_taps<S: Simd, E: UnaryOp, const N: usize>(
    s: S,
    input: &[f32],
    step: usize,
    taps: ChannelTaps<'_>,
    epilogue: E,
    out: &mut [f32],
) {
    let ChannelTaps { offsets, weights, bias } = taps;
    let last = offsets.iter().copied().max().unwrap_or(0);
    assert!((last + (N - 1) * step + 1) * S::LANES <= input.len(), "the input holds all places");
    assert!(offsets.len() * S::LANES <= weights.len(), "each offset has its weights");
    assert!(N * S::LANES <= out.len(), "the output holds all results");
    let (from, weights) = (input.as_ptr(), weights.as_ptr());
    let mut sums = [s.load(bias, 0); N];
    for (tap, offset) in offsets.iter().enumerate() {
        // SAFETY: the assertions checked that each offset has a vector of weights, and that the
        // input holds everything that an offset reaches.
        unsafe {
            let weight = s.load_ptr(weights.add(tap * S::LANES));
            for (part, sum) in sums.iter_mut().enumerate() {
                let x = s.load_ptr(from.add((offset + part * step) * S::LANES));
                *sum = s.mul_add(x, weight, *sum);
            }
        }
    }
    for (part, sum) in sums.into_iter().enumerate() {
        s.store(out, part * S::LANES, epilogue.apply(s, sum));
    }
}

/// Pads a row: writes `left` times `fill`, then `source`, then `fill` up to `columns`. May write up
/// to a vector more.
///
/// # Panics
/// If `target` does not hold `columns` and [`SLACK`].
#[inline(always)]
pub fn pad_row<S: Simd>(
    s: S,
    source: &[f32],
    (left, columns): (usize, usize),
    fill: f32,
    target: &mut [f32],
) {
    assert!(columns + SLACK <= target.len(), "there is slack");
    let to = target.as_mut_ptr();
    let padding = s.splat(fill);
    let left = left.min(columns);
    let used = source.len().min(columns - left);
    // SAFETY: every vector starts before `columns`, and the assertion checked the slack after it.
    // The loads are inside the source.
    unsafe {
        for at in (0..left).step_by(S::LANES) {
            s.store_ptr(to.add(at), padding);
        }
        let mut at = 0;
        while at + S::LANES <= used {
            s.store_ptr(to.add(left + at), s.load_ptr(source.as_ptr().add(at)));
            at += S::LANES;
        }
        if at < used {
            let rest = s.load_partial_ptr(source.as_ptr().add(at), used - at, fill);
            s.store_ptr(to.add(left + at), rest);
            at += S::LANES;
        }
        for at in (left + at..columns).step_by(S::LANES) {
            s.store_ptr(to.add(at), padding);
        }
    }
}

/// [`pad_row`] with zeros for a stride of 2: elements at even distance from the first padding go to
/// `even`, the others to `odd`, `columns` each.
///
/// # Panics
/// If a target does not hold `columns` and [`SLACK`].
#[inline(always)]
pub fn pad_row_by_two<S: Simd>(
    s: S,
    source: &[f32],
    left: usize,
    columns: usize,
    even: &mut [f32],
    odd: &mut [f32],
) {
    assert!(columns + SLACK <= even.len() && columns + SLACK <= odd.len(), "there is slack");
    // With odd padding, the row's first value goes to the odd positions.
    let (first_start, second_start) = (left.div_ceil(2) - left % 2, left.div_ceil(2));
    let (first, second) = if left.is_multiple_of(2) { (even, odd) } else { (odd, even) };
    let (first, second) = (first.as_mut_ptr(), second.as_mut_ptr());
    let zero = s.splat(0.0);
    // SAFETY: every vector starts before `columns`, and the assertion checked the slack after it.
    // `load_rest` stays inside the source.
    unsafe {
        for at in (0..second_start.min(columns)).step_by(S::LANES) {
            s.store_ptr(first.add(at), zero);
            s.store_ptr(second.add(at), zero);
        }
        let mut pair = 0;
        while first_start + pair < columns {
            let low = load_rest(s, source, 2 * pair);
            let high = load_rest(s, source, 2 * pair + S::LANES);
            let (low, high) = s.part_even_odd(low, high);
            s.store_ptr(first.add(first_start + pair), low);
            if second_start + pair < columns {
                s.store_ptr(second.add(second_start + pair), high);
            }
            pair += S::LANES;
        }
    }
}

/// Loads a vector of `source[at..]`, with zeros after its end.
#[inline(always)]
fn load_rest<S: Simd>(s: S, source: &[f32], at: usize) -> S::F32 {
    if at + S::LANES <= source.len() {
        s.load(source, at)
    } else if at < source.len() {
        s.load_partial(source, at, source.len() - at, 0.0)
    } else {
        s.splat(0.0)
    }
}

/// Copies rows that are `stride` apart, with [`SLACK`] after the last, to contiguous rows.
///
/// # Panics
/// If `from` does not hold its rows and slack.
#[inline(always)]
pub fn close_rows<S: Simd>(s: S, from: &[f32], stride: usize, (out, width): (&mut [f32], usize)) {
    let rows = out.len() / width.max(1);
    assert!(rows.saturating_sub(1) * stride + width + SLACK <= from.len(), "there is slack");
    let (to, len) = (out.as_mut_ptr(), out.len());
    for row in 0..rows {
        for at in (0..width).step_by(S::LANES) {
            // SAFETY: the vector starts inside its row, and the assertion checked the slack after
            // the last row. `rest` is inside the output.
            unsafe {
                let values = s.load_ptr(from.as_ptr().add(row * stride + at));
                let rest = (width - at).min(S::LANES);
                store_in_order(s, to, len, row * width + at, rest, values);
            }
        }
    }
}
