//! Layer normalization and RMS normalization of rows.

use super::places::{Places, load};
use super::reduce;
use crate::simd::{Isa, Simd, SimdOp, dispatch};
use ort_cpu_threads::interrupt::{PIECE, spend};

/// The moments that a row is normalized by.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Moments {
    /// The mean; 0 for RMS normalization.
    pub mean: f32,
    /// `1 / sqrt(variance + epsilon)`, with the population's variance.
    pub inv_std_dev: f32,
}

/// A normalization of rows: `(x - mean) * inv_std_dev * scale + bias`.
#[derive(Debug, Clone, Copy)]
pub struct RowNorm<'a> {
    /// Whether the mean is subtracted, as in layer normalization. RMS normalization takes the mean
    /// square for the variance.
    pub centers: bool,
    /// The term that keeps the divisor from 0.
    pub epsilon: f32,
    /// The factor of each normalized value; none for 1.
    pub scale: Option<&'a [f32]>,
    /// The term that is added last; none for 0.
    pub bias: Option<&'a [f32]>,
}

impl RowNorm<'_> {
    /// Normalizes a row.
    ///
    /// # Panics
    /// If the lengths of rows, scale and bias differ.
    pub fn apply(self, isa: Isa, from: &[f32], to: &mut [f32]) -> Moments {
        self.apply_to(isa, Places::apart(from, to))
    }

    /// Normalizes a row in place.
    ///
    /// # Panics
    /// If the lengths of row, scale and bias differ.
    pub fn apply_in_place(self, isa: Isa, row: &mut [f32]) -> Moments {
        self.apply_to(isa, Places::same(row))
    }

    fn apply_to(self, isa: Isa, places: Places<'_>) -> Moments {
        let fits = |factor: Option<&[f32]>| factor.is_none_or(|factor| factor.len() == places.len());
        assert!(fits(self.scale) && fits(self.bias), "scale and bias have the row's length");
        dispatch(isa, Normalize { norm: self, places })
    }

    #[inline(always)]
    fn moments<S: Simd>(&self, s: S, row: &[f32]) -> Moments {
        let (mean, variance) = match self.centers {
            true => reduce::mean_and_variance(s, row),
            false => (0.0, reduce::mean_square(s, row)),
        };
        Moments { mean, inv_std_dev: (1.0 / (variance + f64::from(self.epsilon)).sqrt()) as f32 }
    }
}

struct Normalize<'a> {
    norm: RowNorm<'a>,
    places: Places<'a>,
}

impl SimdOp for Normalize<'_> {
    type Output = Moments;
    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) -> Moments {
        let moments = self.norm.moments(s, self.places.source());
        let factors = [s.splat(moments.mean), s.splat(moments.inv_std_dev)];
        let len = self.places.len();
        for block in (0..len).step_by(PIECE) {
            // Work is counted piece by piece, so that a deadline stops a long row.
            if len - block > PIECE {
                spend(PIECE);
            }
            let end = len.min(block + PIECE);
            let whole = block + (end - block) / S::LANES * S::LANES;
            for at in (block..whole).step_by(S::LANES) {
                self.vector(s, factors, at, S::LANES);
            }
            if whole < end {
                self.vector(s, factors, whole, end - whole);
            }
        }
        moments
    }
}

impl Normalize<'_> {
    /// Normalizes `count` values from `at` on, at most a vector.
    #[inline(always)]
    fn vector<S: Simd>(&mut self, s: S, [mean, factor]: [S::F32; 2], at: usize, count: usize) {
        // The mean goes first: with values far from zero, `x * factor - mean * factor` would cancel
        // digits.
        let mut y = s.mul(s.sub(self.places.load(s, at, count, 0.0), mean), factor);
        y = match (self.norm.scale, self.norm.bias) {
            (None, None) => y,
            (Some(scale), None) => s.mul(y, load(s, scale, at, count, 0.0)),
            (None, Some(bias)) => s.add(y, load(s, bias, at, count, 0.0)),
            (Some(scale), Some(bias)) => {
                s.mul_add(y, load(s, scale, at, count, 0.0), load(s, bias, at, count, 0.0))
            }
        };
        self.places.store(s, at, count, y);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn norms_agree_with_double_precision() {
        for isa in Isa::available() {
            for len in (1..100).chain([768, 4096]) {
                // A mean far from zero would ruin a one-pass variance.
                let row: Vec<f32> = (0..len).map(|i| 1000.0 + (i as f32 * 0.7).sin()).collect();
                let scale: Vec<f32> = (0..len).map(|i| 1.0 + (i % 10) as f32 * 0.01).collect();
                let bias: Vec<f32> = (0..len).map(|i| 0.5 - (i % 7) as f32 * 0.1).collect();
                let n = len as f64;
                let mean = row.iter().map(|x| f64::from(*x)).sum::<f64>() / n;
                let variance = row.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>() / n;
                let square = row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / n;
                let (inverse, inverse_square) =
                    (1.0 / (variance + 1e-5).sqrt(), 1.0 / (square + 1e-5).sqrt());
                let mut to = vec![0.0; len];
                // Only the rounding of the mean, times the factor, may differ.
                let tolerance = 5e-5 * inverse + 1e-5;
                let close = |to: &[f32], want: &dyn Fn(usize, f64) -> f64| {
                    for index in 0..len {
                        let (got, want) = (f64::from(to[index]), want(index, f64::from(row[index])));
                        assert!(
                            (got - want).abs() <= tolerance * (1.0 + want.abs()),
                            "{isa:?} {len}: {got} {want}"
                        );
                    }
                };
                for (centers, scaled, biased) in
                    (0..8).map(|bits| (bits & 1 == 0, bits & 2 == 0, bits & 4 == 0))
                {
                    let scale_used = scaled.then_some(&scale[..]);
                    let bias_used = biased.then_some(&bias[..]);
                    let norm = RowNorm { centers, epsilon: 1e-5, scale: scale_used, bias: bias_used };
                    let moments = norm.apply(isa, &row, &mut to);
                    let factor = |i: usize| if scaled { f64::from(scale[i]) } else { 1.0 };
                    let term = |i: usize| if biased { f64::from(bias[i]) } else { 0.0 };
                    let (origin, inverse) = if centers { (mean, inverse) } else { (0.0, inverse_square) };
                    close(&to, &|i, x| (x - origin) * inverse * factor(i) + term(i));
                    assert!((f64::from(moments.mean) - origin).abs() < 1e-4);
                    let mut in_place = row.clone();
                    assert_eq!(norm.apply_in_place(isa, &mut in_place), moments);
                    assert_eq!(to, in_place);
                }
            }
        }
    }
}
