//! Reductions of a contiguous row, and of many rows into one.
//!
//! Sums are taken in blocks whose results are added in double precision. The error therefore grows
//! with the size of a block and not of the row. The order depends only on the length and the
//! instruction set.

use super::elementwise::{Binary, Operand, binary_in_place};
use crate::simd::slices::{BinaryOp, UnaryOp, fold, fold_with};
use crate::simd::{Isa, MAX_LANES, Simd, SimdOp, dispatch, max_or_nan, min_or_nan};
use ort_cpu_threads::interrupt::pieces;

/// Values in a block. Each lane of the four partial sums adds at most 64 of them.
const BLOCK: usize = 1024;

#[derive(Clone, Copy)]
struct Identity;

impl UnaryOp for Identity {
    #[inline(always)]
    fn apply<S: Simd>(self, _: S, x: S::F32) -> S::F32 {
        x
    }
}

/// `(x - mean)^2`.
#[derive(Clone, Copy)]
struct SquaredDeviation(f32);

impl UnaryOp for SquaredDeviation {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, x: S::F32) -> S::F32 {
        let deviation = s.sub(x, s.splat(self.0));
        s.mul(deviation, deviation)
    }
}

/// `x - origin`.
#[derive(Clone, Copy)]
struct Deviation(f32);

impl UnaryOp for Deviation {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, x: S::F32) -> S::F32 {
        s.sub(x, s.splat(self.0))
    }
}

#[derive(Clone, Copy)]
struct Magnitude;

impl UnaryOp for Magnitude {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, x: S::F32) -> S::F32 {
        s.abs(x)
    }
}

#[derive(Clone, Copy)]
struct Add;

impl BinaryOp for Add {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, a: S::F32, b: S::F32) -> S::F32 {
        s.add(a, b)
    }
}

#[derive(Clone, Copy)]
struct Times;

impl BinaryOp for Times {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, a: S::F32, b: S::F32) -> S::F32 {
        s.mul(a, b)
    }
}

#[derive(Clone, Copy)]
struct Greater;

impl BinaryOp for Greater {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, a: S::F32, b: S::F32) -> S::F32 {
        s.max(a, b)
    }
}

#[derive(Clone, Copy)]
struct Lesser;

impl BinaryOp for Lesser {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, a: S::F32, b: S::F32) -> S::F32 {
        s.min(a, b)
    }
}

struct Sum<'a, M> {
    map: M,
    row: &'a [f32],
}

impl<M: UnaryOp> SimdOp for Sum<'_, M> {
    type Output = f64;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f64 {
        let mut total = 0.0;
        for block in pieces(self.row).flat_map(|piece| piece.chunks(BLOCK)) {
            // Lanes are added in a fixed tree, so that the result does not depend on how a loop
            // over them is compiled.
            let lanes = fold_with(s, self.map, Add, 0.0, block);
            let lane = |i: usize| f64::from(lanes[i]);
            let quarters: [f64; 4] =
                std::array::from_fn(|i| lane(i) + lane(i + 4) + (lane(i + 8) + lane(i + 12)));
            total += quarters[0] + quarters[1] + (quarters[2] + quarters[3]);
        }
        total
    }
}

/// Returns the sum, in double precision.
pub fn sum(isa: Isa, row: &[f32]) -> f64 {
    dispatch(isa, Sum { map: Identity, row })
}

/// Returns the sum of the magnitudes.
pub fn sum_magnitudes(isa: Isa, row: &[f32]) -> f64 {
    dispatch(isa, Sum { map: Magnitude, row })
}

/// Returns the sum of the squares.
pub fn sum_squares(isa: Isa, row: &[f32]) -> f64 {
    dispatch(isa, Sum { map: SquaredDeviation(0.0), row })
}

/// Returns the sum of the squared differences from `mean`.
pub fn sum_squared_deviations(isa: Isa, mean: f32, row: &[f32]) -> f64 {
    dispatch(isa, Sum { map: SquaredDeviation(mean), row })
}

/// Returns the mean of the squares of a row.
#[inline(always)]
pub(super) fn mean_square<S: Simd>(s: S, row: &[f32]) -> f64 {
    Sum { map: SquaredDeviation(0.0), row }.run(s) / row.len() as f64
}

/// Returns the mean of a row, and the population's variance, in two passes.
#[inline(always)]
pub(super) fn mean_and_variance<S: Simd>(s: S, row: &[f32]) -> (f32, f64) {
    // Differences from a value of the row keep a common offset from costing precision. Any value
    // serves as the origin, and the first needs no pass to find.
    let (first, len) = (row.first().copied().unwrap_or(0.0), row.len() as f64);
    let mean = (f64::from(first) + Sum { map: Deviation(first), row }.run(s) / len) as f32;
    (mean, Sum { map: SquaredDeviation(mean), row }.run(s) / len)
}

/// Returns the mean; NaN for an empty row.
pub fn mean(isa: Isa, row: &[f32]) -> f32 {
    (sum(isa, row) / row.len() as f64) as f32
}

/// Writes the mean of each row of `len` values.
///
/// # Panics
/// If `rows` does not hold a row for each result.
pub fn means(isa: Isa, rows: &[f32], len: usize, to: &mut [f32]) {
    assert_eq!(rows.len(), to.len() * len, "a row for each mean");
    if len == 0 || len > BLOCK {
        for (index, to) in to.iter_mut().enumerate() {
            *to = mean(isa, &rows[index * len..][..len]);
        }
        return;
    }
    dispatch(isa, Means { rows, len, to });
}

/// The means of rows of at most a block. They are too short for calls of their own, and for double
/// precision to matter.
struct Means<'a> {
    rows: &'a [f32],
    len: usize,
    to: &'a mut [f32],
}

impl SimdOp for Means<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (row, to) in self.rows.chunks_exact(self.len).zip(self.to) {
            let mut sums = [s.splat(0.0); 4];
            let mut at = 0;
            while at + 4 * S::LANES <= row.len() {
                for (part, sum) in sums.iter_mut().enumerate() {
                    *sum = s.add(*sum, s.load(row, at + part * S::LANES));
                }
                at += 4 * S::LANES;
            }
            for sum in &mut sums {
                let count = (row.len() - at).min(S::LANES);
                *sum = s.add(*sum, s.load_partial(row, at, count, 0.0));
                at += count;
            }
            let sum = s.add(s.add(sums[0], sums[1]), s.add(sums[2], sums[3]));
            *to = s.horizontal_sum(sum) / row.len() as f32;
        }
    }
}

/// Returns the product; 1 for an empty row.
pub fn product(isa: Isa, row: &[f32]) -> f32 {
    fold(isa, Identity, Times, 1.0, row).into_iter().product()
}

/// Combines all lanes, in halves.
fn horizontal(lanes: [f32; MAX_LANES], combine: impl Fn(f32, f32) -> f32) -> f32 {
    let eight: [f32; 8] = std::array::from_fn(|i| combine(lanes[i], lanes[i + 8]));
    let four: [f32; 4] = std::array::from_fn(|i| combine(eight[i], eight[i + 4]));
    combine(combine(four[0], four[2]), combine(four[1], four[3]))
}

/// Returns the greatest value; NaN if any is NaN; -inf for an empty row.
pub fn max(isa: Isa, row: &[f32]) -> f32 {
    let lowest = f32::NEG_INFINITY;
    let of_piece = |piece| horizontal(fold(isa, Identity, Greater, lowest, piece), max_or_nan);
    pieces(row).map(of_piece).fold(lowest, max_or_nan)
}

/// Returns the least value; NaN if any is NaN; +inf for an empty row.
pub fn min(isa: Isa, row: &[f32]) -> f32 {
    let highest = f32::INFINITY;
    let of_piece = |piece| horizontal(fold(isa, Identity, Lesser, highest, piece), min_or_nan);
    pieces(row).map(of_piece).fold(highest, min_or_nan)
}

/// Computes `out[i] = function(out[i], row[i])`, one step of a reduction over rows. To keep the
/// error of sums of many rows small, sum blocks of rows separately.
///
/// # Panics
/// If the lengths differ.
pub fn accumulate(isa: Isa, function: Binary, out: &mut [f32], row: &[f32]) {
    binary_in_place(isa, function, out, Operand::Slice(row));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reductions_agree_with_double_precision() {
        for isa in Isa::available() {
            for len in (0..100).chain([1023, 1024, 1025, 5000, 100_003]) {
                let row: Vec<f32> = (0..len).map(|i| 1.0 + (i as f32 * 0.7).sin()).collect();
                let wide = || row.iter().map(|x| f64::from(*x));
                let close = |got: f64, want: f64| {
                    assert!((got - want).abs() <= 2e-6 * want.abs() + 1e-12, "{isa:?} {len}: {got} {want}")
                };
                close(sum(isa, &row), wide().sum());
                close(sum_magnitudes(isa, &row), wide().sum());
                close(sum_squares(isa, &row), wide().map(|x| x * x).sum());
                close(sum_squared_deviations(isa, 0.5, &row), wide().map(|x| (x - 0.5).powi(2)).sum());
                let mut both = [0.0; 2];
                let twice: Vec<f32> = row.iter().chain(&row).copied().collect();
                means(isa, &twice, len, &mut both);
                assert!(len > 0 || both.iter().all(|mean| mean.is_nan()));
                both.iter()
                    .filter(|_| len > 0)
                    .for_each(|mean| close(f64::from(*mean) * len as f64, wide().sum()));
                let few = &row[..len.min(60)];
                close(f64::from(product(isa, few)), few.iter().map(|x| f64::from(*x)).product());
                assert_eq!(max(isa, &row), row.iter().copied().fold(f32::NEG_INFINITY, f32::max));
                assert_eq!(min(isa, &row), row.iter().copied().fold(f32::INFINITY, f32::min));
            }
        }
    }

    #[test]
    fn a_nan_anywhere_is_the_extreme() {
        for isa in Isa::available() {
            for len in 1..100 {
                for place in 0..len {
                    let mut row = vec![1.0; len];
                    row[place] = f32::NAN;
                    assert!(max(isa, &row).is_nan() && min(isa, &row).is_nan(), "{isa:?} {len} {place}");
                }
            }
        }
    }
}
