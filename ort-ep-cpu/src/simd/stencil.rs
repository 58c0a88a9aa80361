//! Kernels that read several neighbouring places for each result, in registers: the inside of
//! depthwise convolution.
//!
//! Masked stores are slow on some CPUs. These loops avoid them: where a row has at least a vector,
//! its last vector is moved back over results that are computed twice; where it has less, whole
//! vectors are stored in row order, and what lies beyond a row is overwritten by the next. Reads go
//! a little beyond what a result needs, so inputs have slack at their end.

use super::Simd;
use super::slices::UnaryOp;

/// How many values beyond the last used one the inputs of this module hold.
pub const SLACK: usize = 2 * super::MAX_LANES;

/// Rows of a convolution's input, with a vector of [`SLACK`] behind the last.
#[derive(Clone, Copy)]
pub struct Input<'a> {
    /// All rows.
    pub values: &'a [f32],
    /// From one output row to the next.
    pub stride: usize,
}

/// The weights and the value that a sum starts with.
#[derive(Clone, Copy)]
pub struct Filter<'a> {
    /// One weight for each tap.
    pub weights: &'a [f32],
    /// What is added to the sum.
    pub bias: f32,
}

/// Stores a vector of a row of which `rest` values from `at` on are wanted: whole where the slice
/// goes on.
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
        // SAFETY: the whole vector is within the output.
        unsafe { s.store_ptr(out.add(at), value) };
    } else {
        // SAFETY: the caller vouches for `rest` values.
        unsafe { s.store_partial_ptr(out.add(at), rest, value) };
    }
}

/// `out[i] = epilogue(bias + sum over t of weights[t] * input[offsets[t] + i])`. It may write all
/// of `out`, of which `len` values are results.
///
/// # Panics
/// If `input` or `out` does not hold [`SLACK`] more than what `len` results need.
#[inline(always)]
pub fn taps<S: Simd, E: UnaryOp>(
    s: S,
    input: &[f32],
    offsets: &[usize],
    filter: Filter<'_>,
    epilogue: E,
    (out, len): (&mut [f32], usize),
) {
    let last = offsets.iter().copied().max().unwrap_or(0);
    assert!(offsets.len() == filter.weights.len(), "each offset has its weight");
    assert!(last + len + SLACK <= input.len() && len + SLACK <= out.len(), "there is slack");
    let (from, to) = (input.as_ptr(), out.as_mut_ptr());
    let mut at = 0;
    while at < len {
        // SAFETY: the vectors start before `len`, so they end within the slack.
        at += unsafe {
            match (len - at).div_ceil(S::LANES) {
                1 => tap_block::<S, E, 1>(s, from.add(at), S::LANES, (offsets, filter), epilogue, to.add(at)),
                2 => tap_block::<S, E, 2>(s, from.add(at), S::LANES, (offsets, filter), epilogue, to.add(at)),
                3 => tap_block::<S, E, 3>(s, from.add(at), S::LANES, (offsets, filter), epilogue, to.add(at)),
                _ => tap_block::<S, E, 4>(s, from.add(at), S::LANES, (offsets, filter), epilogue, to.add(at)),
            }
        };
    }
}

/// `N` adjacent vectors of results. Gives how many values these are.
///
/// # Safety
/// `N` vectors can be read at each offset, and written.
#[inline(always)]
unsafe fn tap_block<S: Simd, E: UnaryOp, const N: usize>(
    s: S,
    from: *const f32,
    stride: usize,
    (offsets, filter): (&[usize], Filter<'_>),
    epilogue: E,
    to: *mut f32,
) -> usize {
    // SAFETY: as the caller promises.
    let sums = unsafe { tap_sums::<S, N>(s, from, stride, offsets, filter) };
    for (part, sum) in sums.into_iter().enumerate() {
        // SAFETY: as the caller promises.
        unsafe { s.store_ptr(to.add(part * S::LANES), epilogue.apply(s, sum)) };
    }
    N * S::LANES
}

/// Sums for `N` vectors that are `stride` apart.
///
/// # Safety
/// `N` vectors can be read at each offset.
#[inline(always)]
unsafe fn tap_sums<S: Simd, const N: usize>(
    s: S,
    from: *const f32,
    stride: usize,
    offsets: &[usize],
    filter: Filter<'_>,
) -> [S::F32; N] {
    let mut sums = [s.splat(filter.bias); N];
    for (offset, weight) in offsets.iter().zip(filter.weights) {
        let weight = s.splat(*weight);
        for (part, sum) in sums.iter_mut().enumerate() {
            // SAFETY: as the caller promises.
            let x = unsafe { s.load_ptr(from.add(offset + part * stride)) };
            *sum = s.mul_add(x, weight, *sum);
        }
    }
    sums
}

/// `R` rows: `out[r * width + i] = epilogue(bias + sum)` for `i < width`, with the sum over t of
/// `weights[t] * input[offsets[t] + r * stride + i]`. It may write beyond these rows, within `out`.
///
/// # Panics
/// If `input` does not hold [`SLACK`] more than what is needed, or `out` not its rows.
#[inline(always)]
pub fn tap_rows<S: Simd, E: UnaryOp, const R: usize>(
    s: S,
    input: Input<'_>,
    offsets: &[usize],
    filter: Filter<'_>,
    epilogue: E,
    (out, width): (&mut [f32], usize),
) {
    let last = offsets.iter().copied().max().unwrap_or(0);
    assert!(offsets.len() == filter.weights.len(), "each offset has its weight");
    assert!(last + (R - 1) * input.stride + width + SLACK <= input.values.len(), "there is slack");
    assert!(R * width <= out.len(), "the output holds its rows");
    let (from, to, len) = (input.values.as_ptr(), out.as_mut_ptr(), out.len());
    let mut next = 0;
    while next < width {
        let at = if next + S::LANES > width { width.saturating_sub(S::LANES) } else { next };
        // SAFETY: the input holds each row and slack behind the last; `at + rest` is within each
        // row of the output.
        unsafe {
            let sums = tap_sums::<S, R>(s, from.add(at), input.stride, offsets, filter);
            for (row, sum) in sums.into_iter().enumerate() {
                store_in_order(s, to, len, row * width + at, width - at, epilogue.apply(s, sum));
            }
        }
        next += S::LANES;
    }
}

/// `N` adjacent results for as many channels as a vector has lanes; places, weights and results are
/// vectors of one value for each channel.
///
/// `out[i] = epilogue(bias + sum over t of weights[t] * input[offsets[t] + i * step])`, all places
/// counting vectors.
///
/// # Panics
/// If a slice does not hold what is read or written.
#[inline(always)]
pub fn channel_taps<S: Simd, E: UnaryOp, const N: usize>(
    s: S,
    (input, step): (&[f32], usize),
    offsets: &[usize],
    (weights, bias): (&[f32], &[f32]),
    epilogue: E,
    out: &mut [f32],
) {
    let last = offsets.iter().copied().max().unwrap_or(0);
    assert!((last + (N - 1) * step + 1) * S::LANES <= input.len(), "the input holds all places");
    assert!(offsets.len() * S::LANES <= weights.len(), "each offset has its weights");
    assert!(N * S::LANES <= out.len(), "the output holds all results");
    let (from, weights) = (input.as_ptr(), weights.as_ptr());
    let mut sums = [s.load(bias, 0); N];
    for (tap, offset) in offsets.iter().enumerate() {
        // SAFETY: each offset has a vector of weights, and the input holds all places that it
        // reaches.
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

/// Writes `left` times `fill`, `source`, and `fill` up to `columns`, at the start of `target`, and
/// up to a vector more.
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
    // SAFETY: every vector starts before `columns`, so it ends within the slack; the loads are
    // within the source.
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

/// [`pad_row`] with zeros for a stride of 2: the places at even distance from the first padding go
/// to `even`, the others to `odd`, `columns` each.
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
    // With odd padding the row's first value goes to the odd places.
    let (first_start, second_start) = (left.div_ceil(2) - left % 2, left.div_ceil(2));
    let (first, second) = if left.is_multiple_of(2) { (even, odd) } else { (odd, even) };
    let (first, second) = (first.as_mut_ptr(), second.as_mut_ptr());
    let zero = s.splat(0.0);
    // SAFETY: every vector starts before `columns`, so it ends within the slack; the loads are
    // within the source.
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

/// A vector of `source[at..]`, with zeros from its end on.
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

/// Copies rows that are `stride` apart and have [`SLACK`] behind the last to rows without gaps.
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
            // SAFETY: the vector starts within its row, so it ends within the slack; the rest is
            // within the output.
            unsafe {
                let values = s.load_ptr(from.as_ptr().add(row * stride + at));
                let rest = (width - at).min(S::LANES);
                store_in_order(s, to, len, row * width + at, rest, values);
            }
        }
    }
}
