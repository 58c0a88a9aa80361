//! Softmax and log-softmax of rows, and of blocks whose reduction axis is before other axes.
//!
//! `softmax(x) = exp(x - max) / sum(exp(x - max))`. As in NumPy, the result is NaN for a row of
//! only -inf, or with +inf or NaN.

use super::elementwise::{Unary, unary_in_place};
use super::places::{Places, load};
use super::reduce;
use crate::simd::{Isa, Simd, SimdOp, dispatch, math};
use ort_cpu_threads::interrupt::{PIECE, spend};

/// Selects softmax or log-softmax.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Softmax {
    /// Softmax.
    Linear,
    /// The logarithm of softmax, more precise than a logarithm taken afterwards.
    Log,
}

/// Vectors that are summed before the sum goes on in double precision.
const BLOCK: usize = 64;

/// Sums `exp(x - max)`, and stores it for `Softmax::Linear`.
struct ExpSum<'p, 'a> {
    places: &'p mut Places<'a>,
    kind: Softmax,
    max: f32,
}

impl SimdOp for ExpSum<'_, '_> {
    type Output = f64;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f64 {
        let len = self.places.len();
        let max = s.splat(self.max);
        let mut total = 0.0;
        for block in (0..len).step_by(BLOCK * S::LANES) {
            // The last block counts no work: callers count short rows as a part of their task.
            if len - block > BLOCK * S::LANES {
                spend(2 * BLOCK * S::LANES);
            }
            let mut sum = s.splat(0.0);
            for at in (block..len.min(block + BLOCK * S::LANES)).step_by(S::LANES) {
                let count = (len - at).min(S::LANES);
                // Lanes past the row add exp(-inf) = 0, or NaN to a row whose sum is NaN anyway.
                let x = self.places.load(s, at, count, f32::NEG_INFINITY);
                let power = math::exp_nonpositive(s, s.sub(x, max));
                sum = s.add(sum, power);
                if self.kind == Softmax::Linear {
                    self.places.store(s, at, count, power);
                }
            }
            // A lane adds at most `BLOCK` terms in single precision, so the error does not grow
            // with the row.
            total += f64::from(s.horizontal_sum(sum));
        }
        total
    }
}

/// Stores `x - max - log_sum`.
struct Subtract<'p, 'a> {
    places: &'p mut Places<'a>,
    max: f32,
    log_sum: f32,
}

impl SimdOp for Subtract<'_, '_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let len = self.places.len();
        for block in (0..len).step_by(PIECE) {
            if len - block > PIECE {
                spend(PIECE);
            }
            for at in (block..len.min(block + PIECE)).step_by(S::LANES) {
                let count = (len - at).min(S::LANES);
                let x = self.places.load(s, at, count, 0.0);
                let shifted = s.sub(s.sub(x, s.splat(self.max)), s.splat(self.log_sum));
                self.places.store(s, at, count, shifted);
            }
        }
    }
}

fn softmax_places(isa: Isa, kind: Softmax, mut places: Places<'_>) {
    // Without the maximum, `exp` would overflow from 89 on. Finding it takes a pass of its own,
    // after which a row is in cache.
    let max = reduce::max(isa, places.source());
    let sum = dispatch(isa, ExpSum { places: &mut places, kind, max });
    match kind {
        Softmax::Linear => {
            // One division per row instead of one per element.
            let scale = (1.0 / sum) as f32;
            unary_in_place(isa, Unary::Affine { scale, shift: 0.0 }, places.target());
        }
        Softmax::Log => {
            let log_sum = sum.ln() as f32;
            dispatch(isa, Subtract { places: &mut places, max, log_sum });
        }
    }
}

/// Softmax of one row.
///
/// # Panics
/// If the lengths differ.
pub fn softmax_row(isa: Isa, kind: Softmax, from: &[f32], to: &mut [f32]) {
    softmax_places(isa, kind, Places::apart(from, to));
}

/// Softmax of one row in place.
pub fn softmax_row_in_place(isa: Isa, kind: Softmax, row: &mut [f32]) {
    softmax_places(isa, kind, Places::same(row));
}

struct Columns<'a> {
    kind: Softmax,
    places: Places<'a>,
    inner: usize,
}

impl SimdOp for Columns<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let mut column = 0;
        // Four vectors of adjacent columns read whole cache lines of each row and hide the latency
        // of `exp`.
        while column + 4 * S::LANES <= self.inner {
            self.strip::<S, 4>(s, column, S::LANES);
            column += 4 * S::LANES;
        }
        while column < self.inner {
            self.strip::<S, 1>(s, column, (self.inner - column).min(S::LANES));
            column += S::LANES;
        }
    }
}

impl Columns<'_> {
    /// Computes the softmax of `N` vectors of adjacent columns, of `count` values each.
    #[inline(always)]
    fn strip<S: Simd, const N: usize>(&mut self, s: S, column: usize, count: usize) {
        let (len, inner) = (self.places.len(), self.inner);
        // Rows of a strip between two calls of `spend`.
        const ROWS: usize = 1 << 10;
        let units = N * S::LANES * ROWS.min(len / inner);
        let bands = || (column..len).step_by(ROWS * inner).inspect(move |_| spend(units));
        let starts = |band: usize| (band..len.min(band + ROWS * inner)).step_by(inner);
        let place = |start: usize, part: usize| start + part * S::LANES;
        let mut max = [s.splat(f32::NEG_INFINITY); N];
        for band in bands() {
            for start in starts(band) {
                for part in 0..N {
                    max[part] = s.max(max[part], self.places.load(s, place(start, part), count, 0.0));
                }
            }
        }
        let mut sum = [s.splat(0.0); N];
        for band in bands() {
            for start in starts(band) {
                for part in 0..N {
                    let x = self.places.load(s, place(start, part), count, 0.0);
                    let power = math::exp_nonpositive(s, s.sub(x, max[part]));
                    sum[part] = s.add(sum[part], power);
                    if self.kind == Softmax::Linear {
                        self.places.store(s, place(start, part), count, power);
                    }
                }
            }
        }
        // A column has one accumulator in single precision: rows are far apart, so a second pass
        // over blocks would cost more than it gains.
        let mut last = sum;
        for last in &mut last {
            *last = match self.kind {
                Softmax::Linear => s.div(s.splat(1.0), *last),
                Softmax::Log => math::log(s, *last),
            };
        }
        for band in bands() {
            for start in starts(band) {
                for part in 0..N {
                    let at = place(start, part);
                    let result = match self.kind {
                        Softmax::Linear => s.mul(load(s, self.places.target(), at, count, 0.0), last[part]),
                        Softmax::Log => {
                            s.sub(s.sub(self.places.load(s, at, count, 0.0), max[part]), last[part])
                        }
                    };
                    self.places.store(s, at, count, result);
                }
            }
        }
    }
}

/// Softmax over the first axis of a block of `[axis, inner]`: of each column of a matrix with
/// `inner` columns.
///
/// # Panics
/// If the lengths differ or are not multiples of `inner`.
pub fn softmax_columns(isa: Isa, kind: Softmax, inner: usize, from: &[f32], to: &mut [f32]) {
    columns(isa, kind, inner, Places::apart(from, to));
}

/// Like [`softmax_columns`], in place.
///
/// # Panics
/// If the length is not a multiple of `inner`.
pub fn softmax_columns_in_place(isa: Isa, kind: Softmax, inner: usize, data: &mut [f32]) {
    columns(isa, kind, inner, Places::same(data));
}

fn columns(isa: Isa, kind: Softmax, inner: usize, places: Places<'_>) {
    if places.len() == 0 {
        return;
    }
    assert!(inner > 0 && places.len().is_multiple_of(inner), "the block is a matrix");
    dispatch(isa, Columns { kind, places, inner });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reference(kind: Softmax, row: &[f32]) -> Vec<f64> {
        let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let powers: Vec<f64> = row.iter().map(|x| (f64::from(*x) - f64::from(max)).exp()).collect();
        let sum: f64 = powers.iter().sum();
        let shifted = row.iter().map(|x| f64::from(*x) - f64::from(max));
        match kind {
            Softmax::Linear => powers.iter().map(|power| power / sum).collect(),
            Softmax::Log => shifted.map(|x| x - sum.ln()).collect(),
        }
    }

    /// The subtraction of the maximum rounds at up to 64, which is 4e-6 of the power.
    fn check(isa: Isa, kind: Softmax, got: &[f32], want: &[f64]) {
        let absolute = if kind == Softmax::Log { 1e-7 } else { 1e-30 };
        for (got, want) in got.iter().zip(want) {
            let got = f64::from(*got);
            let same = got == *want || (got.is_nan() && want.is_nan());
            assert!(same || (got - want).abs() <= 6e-6 * want.abs() + absolute, "{isa:?}: {got} {want}");
        }
    }

    #[test]
    fn rows_and_columns_agree_with_double_precision() {
        let special = [f32::NEG_INFINITY, 0.5, f32::INFINITY, f32::NAN];
        for isa in Isa::available() {
            for kind in [Softmax::Linear, Softmax::Log] {
                for len in (0..100).chain([2000]) {
                    for variant in 0..6 {
                        let mut row: Vec<f32> =
                            (0..len).map(|i| ((i + 7) as f32 * 0.9).sin() * 30.0).collect();
                        match variant {
                            0..4 if len > 0 => row[len / 2] = special[variant],
                            4 => row.fill(f32::NEG_INFINITY),
                            _ => {}
                        }
                        let want = reference(kind, &row);
                        let mut to = vec![0.0; len];
                        softmax_row(isa, kind, &row, &mut to);
                        check(isa, kind, &to, &want);
                        softmax_columns(isa, kind, 1, &row, &mut to);
                        check(isa, kind, &to, &want);
                        softmax_row_in_place(isa, kind, &mut row);
                        check(isa, kind, &row, &want);
                    }
                }
                for (axis, inner) in [(1, 5), (3, 16), (7, 77), (40, 130), (0, 3)] {
                    let block: Vec<f32> = (0..axis * inner).map(|i| (i as f32 * 0.77).cos() * 20.0).collect();
                    let mut in_place = block.clone();
                    softmax_columns_in_place(isa, kind, inner, &mut in_place);
                    for column in 0..inner {
                        let values: Vec<f32> = block.iter().skip(column).step_by(inner).copied().collect();
                        let got: Vec<f32> = in_place.iter().skip(column).step_by(inner).copied().collect();
                        check(isa, kind, &got, &reference(kind, &values));
                    }
                }
            }
        }
    }
}
