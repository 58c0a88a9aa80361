//! Kernels that read several neighbouring places for each result, in registers: the inside of depthwise convolution.
//!
//! Both read a little beyond what a result needs when the last vector is partial, so their input has slack at its end.

use super::Simd;
use super::slices::UnaryOp;

/// `out[i] = epilogue(bias + sum over t of weights[t] * input[offsets[t] + i])`.
///
/// # Panics
/// If `input` does not hold `LANES` values more than the last place that is read.
#[inline(always)]
pub fn taps<S: Simd, E: UnaryOp>(
    s: S,
    input: &[f32],
    (offsets, weights): (&[usize], &[f32]),
    bias: f32,
    epilogue: E,
    out: &mut [f32],
) {
    let last = offsets.iter().copied().max().unwrap_or(0);
    assert!(offsets.len() == weights.len(), "each offset has its weight");
    assert!(last + out.len() + S::LANES <= input.len(), "the input has a vector of slack");
    let (from, to, len) = (input.as_ptr(), out.as_mut_ptr(), out.len());
    let bias = s.splat(bias);
    let mut at = 0;
    while at + 4 * S::LANES <= len {
        let mut sums = [bias; 4];
        for (offset, weight) in offsets.iter().zip(weights) {
            let weight = s.splat(*weight);
            for (part, sum) in sums.iter_mut().enumerate() {
                // SAFETY: the input holds all places that any offset reaches from `at` on.
                let x = unsafe { s.load_ptr(from.add(offset + at + part * S::LANES)) };
                *sum = s.mul_add(x, weight, *sum);
            }
        }
        for (part, sum) in sums.into_iter().enumerate() {
            // SAFETY: four vectors from `at` on are within the output.
            unsafe { s.store_ptr(to.add(at + part * S::LANES), epilogue.apply(s, sum)) };
        }
        at += 4 * S::LANES;
    }
    while at < len {
        let mut sums = [bias, s.splat(0.0)];
        for (index, (offset, weight)) in offsets.iter().zip(weights).enumerate() {
            // SAFETY: the input has a vector of slack beyond what `out.len()` results read.
            let x = unsafe { s.load_ptr(from.add(offset + at)) };
            // Two sums halve the wait of each addition for the one before.
            sums[index % 2] = s.mul_add(x, s.splat(*weight), sums[index % 2]);
        }
        let sum = epilogue.apply(s, s.add(sums[0], sums[1]));
        let rest = (len - at).min(S::LANES);
        // SAFETY: `rest` values from `at` on are within the output.
        unsafe { s.store_partial_ptr(to.add(at), rest, sum) };
        at += S::LANES;
    }
}

/// `R` rows at once of a convolution with a `K` by `K` kernel and stride 1: every input vector is loaded once for all rows that
/// use it.
///
/// `out[r * out_stride + i] = epilogue(bias + sum of weights[ky * K + kx] * input[(r + ky) * stride + kx + i])`
/// for `i < width`.
///
/// # Panics
/// If `input` does not hold `LANES` values more than the last place that is read, or `out` not its rows.
#[inline(always)]
pub fn square_rows<S: Simd, E: UnaryOp, const K: usize, const R: usize>(
    s: S,
    (input, stride): (&[f32], usize),
    (weights, bias): (&[f32], f32),
    epilogue: E,
    (out, out_stride): (&mut [f32], usize),
    width: usize,
) {
    assert!(weights.len() == K * K, "the kernel is a square");
    assert!((R + K - 2) * stride + K + width + S::LANES <= input.len(), "the input has a vector of slack");
    assert!((R - 1) * out_stride + width <= out.len(), "the output holds its rows");
    let (from, to) = (input.as_ptr(), out.as_mut_ptr());
    let mut kernel = [[s.splat(0.0); K]; K];
    for (row, values) in kernel.iter_mut().zip(weights.chunks_exact(K)) {
        for (weight, value) in row.iter_mut().zip(values) {
            *weight = s.splat(*value);
        }
    }
    let bias = s.splat(bias);
    let mut at = 0;
    while at < width {
        let mut sums = [bias; R];
        for input_row in 0..R + K - 1 {
            for kx in 0..K {
                // SAFETY: the input holds `K - 1` rows more than `R` and a vector of slack.
                let x = unsafe { s.load_ptr(from.add(input_row * stride + kx + at)) };
                for (row, sum) in sums.iter_mut().enumerate() {
                    if row <= input_row && input_row < row + K {
                        *sum = s.mul_add(x, kernel[input_row - row][kx], *sum);
                    }
                }
            }
        }
        let rest = (width - at).min(S::LANES);
        for (row, sum) in sums.into_iter().enumerate() {
            let sum = epilogue.apply(s, sum);
            // SAFETY: `rest` values of each row from `at` on are within the output.
            unsafe { s.store_partial_ptr(to.add(row * out_stride + at), rest, sum) };
        }
        at += S::LANES;
    }
}

/// Parts `from` into its values at even and at odd places; `even` may be one longer than `odd`.
///
/// # Panics
/// If the lengths of `even` and `odd` do not add up to `from`'s.
#[inline(always)]
pub fn part_even_odd<S: Simd>(s: S, from: &[f32], even: &mut [f32], odd: &mut [f32]) {
    assert!(even.len() + odd.len() == from.len() && even.len() - odd.len() <= 1);
    let pairs = odd.len();
    let mut at = 0;
    while at + S::LANES <= pairs {
        // SAFETY: `LANES` pairs from `2 * at` on are within the source, and `LANES` values in each target.
        unsafe {
            let (low, high) = s.load_even_odd_ptr(from.as_ptr().add(2 * at));
            s.store_ptr(even.as_mut_ptr().add(at), low);
            s.store_ptr(odd.as_mut_ptr().add(at), high);
        }
        at += S::LANES;
    }
    for index in at..pairs {
        even[index] = from[2 * index];
        odd[index] = from[2 * index + 1];
    }
    if even.len() > pairs {
        even[pairs] = from[2 * pairs];
    }
}
