//! Normalization of rows and channels.

use super::elementwise::{Unary, unary, unary_in_place};
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

/// Computes the moments of a row in two passes.
pub fn moments(isa: Isa, row: &[f32], epsilon: f32) -> Moments {
    // Differences from the first value keep a common offset from costing precision.
    let mean = reduce::mean_by_differences(isa, row);
    let variance = reduce::sum_squared_deviations(isa, mean, row) / row.len() as f64;
    Moments { mean, inv_std_dev: (1.0 / (variance + f64::from(epsilon)).sqrt()) as f32 }
}

/// Computes the moments of RMS normalization.
pub fn root_mean_square(isa: Isa, row: &[f32], epsilon: f32) -> Moments {
    let mean_square = reduce::sum_squares(isa, row) / row.len() as f64;
    Moments { mean: 0.0, inv_std_dev: (1.0 / (mean_square + f64::from(epsilon)).sqrt()) as f32 }
}

struct Normalize<'a> {
    places: Places<'a>,
    moments: Moments,
    scale: Option<&'a [f32]>,
    bias: Option<&'a [f32]>,
}

impl SimdOp for Normalize<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let len = self.places.len();
        let (mean, factor) = (s.splat(self.moments.mean), s.splat(self.moments.inv_std_dev));
        for block in (0..len).step_by(PIECE) {
            // Work is counted piece by piece, so that a deadline stops a long row.
            if len - block > PIECE {
                spend(PIECE);
            }
            for at in (block..len.min(block + PIECE)).step_by(S::LANES) {
                let count = (len - at).min(S::LANES);
                // The mean goes first: with values far from zero, `x * factor - mean * factor`
                // would cancel digits.
                let mut y = s.mul(s.sub(self.places.load(s, at, count, 0.0), mean), factor);
                y = match (self.scale, self.bias) {
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
    }
}

/// Computes `to[i] = (from[i] - mean) * inv_std_dev * scale[i] + bias[i]`.
///
/// # Panics
/// If the lengths differ.
pub fn normalize(
    isa: Isa,
    moments: Moments,
    scale: Option<&[f32]>,
    bias: Option<&[f32]>,
    from: &[f32],
    to: &mut [f32],
) {
    normalize_places(isa, moments, scale, bias, Places::apart(from, to));
}

/// Like [`normalize`], in place.
///
/// # Panics
/// If the lengths differ.
pub fn normalize_in_place(
    isa: Isa,
    moments: Moments,
    scale: Option<&[f32]>,
    bias: Option<&[f32]>,
    row: &mut [f32],
) {
    normalize_places(isa, moments, scale, bias, Places::same(row));
}

fn normalize_places(
    isa: Isa,
    moments: Moments,
    scale: Option<&[f32]>,
    bias: Option<&[f32]>,
    places: Places<'_>,
) {
    let fits = |factor: Option<&[f32]>| factor.is_none_or(|factor| factor.len() == places.len());
    assert!(fits(scale) && fits(bias), "scale and bias have the row's length");
    dispatch(isa, Normalize { places, moments, scale, bias });
}

/// Layer normalization of one row.
///
/// # Panics
/// If the lengths differ.
pub fn layer_norm_row(
    isa: Isa,
    (scale, bias): (Option<&[f32]>, Option<&[f32]>),
    epsilon: f32,
    from: &[f32],
    to: &mut [f32],
) -> Moments {
    let moments = moments(isa, from, epsilon);
    normalize(isa, moments, scale, bias, from, to);
    moments
}

/// RMS normalization of one row.
///
/// # Panics
/// If the lengths differ.
pub fn rms_norm_row(isa: Isa, scale: Option<&[f32]>, epsilon: f32, from: &[f32], to: &mut [f32]) -> Moments {
    let moments = root_mean_square(isa, from, epsilon);
    normalize(isa, moments, scale, None, from, to);
    moments
}

/// The parameters of batch normalization for one channel.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Channel {
    /// The factor of the normalized value.
    pub scale: f32,
    /// The term that is added last.
    pub bias: f32,
    /// The mean that is subtracted.
    pub mean: f32,
    /// The variance that the divisor is computed from.
    pub variance: f32,
}

impl Channel {
    /// Returns the normalization as one multiplication and addition.
    pub fn affine(self, epsilon: f32) -> Unary {
        // The four constants are folded in double precision, so that the factor and the term are
        // rounded once.
        let scale = f64::from(self.scale) / (f64::from(self.variance) + f64::from(epsilon)).sqrt();
        let shift = f64::from(self.bias) - f64::from(self.mean) * scale;
        Unary::Affine { scale: scale as f32, shift: shift as f32 }
    }
}

/// Batch normalization of one channel's plane.
///
/// # Panics
/// If the lengths differ.
pub fn batch_norm_plane(isa: Isa, channel: Channel, epsilon: f32, from: &[f32], to: &mut [f32]) {
    unary(isa, channel.affine(epsilon), from, to);
}

/// Like [`batch_norm_plane`], in place.
pub fn batch_norm_plane_in_place(isa: Isa, channel: Channel, epsilon: f32, plane: &mut [f32]) {
    unary_in_place(isa, channel.affine(epsilon), plane);
}

/// Instance normalization of one channel's plane, by its own moments.
///
/// # Panics
/// If the lengths differ.
pub fn instance_norm_plane(
    isa: Isa,
    (scale, bias): (f32, f32),
    epsilon: f32,
    from: &[f32],
    to: &mut [f32],
) -> Moments {
    let moments = moments(isa, from, epsilon);
    normalize(isa, moments, None, None, from, to);
    unary_in_place(isa, Unary::Affine { scale, shift: bias }, to);
    moments
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
                for (scaled, biased) in [(false, false), (true, false), (false, true), (true, true)] {
                    let scale_used = scaled.then_some(&scale[..]);
                    let bias_used = biased.then_some(&bias[..]);
                    let moments = layer_norm_row(isa, (scale_used, bias_used), 1e-5, &row, &mut to);
                    let factor = |i: usize| if scaled { f64::from(scale[i]) } else { 1.0 };
                    let term = |i: usize| if biased { f64::from(bias[i]) } else { 0.0 };
                    close(&to, &|i, x| (x - mean) * inverse * factor(i) + term(i));
                    assert!((f64::from(moments.mean) - mean).abs() < 1e-4);
                    let mut in_place = row.clone();
                    normalize_in_place(isa, moments, scale_used, bias_used, &mut in_place);
                    assert_eq!(to, in_place);
                }
                rms_norm_row(isa, Some(&scale), 1e-5, &row, &mut to);
                close(&to, &|i, x| x * inverse_square * f64::from(scale[i]));
                instance_norm_plane(isa, (2.0, -1.0), 1e-5, &row, &mut to);
                close(&to, &|_, x| (x - mean) * inverse * 2.0 - 1.0);
                let channel = Channel { scale: 2.0, bias: 1.0, mean: 999.0, variance: 4.0 };
                batch_norm_plane(isa, channel, 0.5, &row, &mut to);
                let want = |x: f64| (x - 999.0) / 4.5_f64.sqrt() * 2.0 + 1.0;
                for index in 0..len {
                    assert!((f64::from(to[index]) - want(f64::from(row[index]))).abs() < 2e-4);
                }
            }
        }
    }
}
