//! Hessians of the errors of products, from the rows of their inputs.
//!
//! If the weights of a product change by `D`, its outputs change by `x D`, of which the squares sum
//! up to `tr(Dᵀ H D)` with `H` the sum of `xᵀ x` over all rows `x`. Its lower triangle is kept.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::parallel;

/// The rows whose products are added in float32, before the sum is added in float64.
const ROWS: usize = 64;
/// The products that are added side by side.
const WIDTH: usize = 32;
/// The products that take as long as an element of [`parallel::threads_for`].
const PRODUCTS_PER_ELEMENT: usize = 16;

/// Inputs of products that share a Hessian, because they are multiplied with the same weight.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HessianInput {
    /// The names of the values.
    pub names: Vec<String>,
    /// The length of their last axis.
    pub channels: usize,
}

impl HessianInput {
    /// The bytes that the Hessian and its factors take.
    pub(crate) fn bytes(&self) -> usize {
        // Half of a square of float64 each for the Hessian and its factor, and of float32 each for
        // the shares and the Hessian over its mean.
        self.channels.saturating_mul(self.channels).saturating_mul(12)
    }
}

/// The sum of `xᵀ x` over the rows of a value.
#[derive(Clone, Debug)]
pub struct Hessian {
    channels: usize,
    /// The lower triangle, row by row.
    sums: Vec<f64>,
    magnitudes: Vec<f64>,
    totals: Vec<f64>,
    rows: u64,
    /// Whether the number of channels changed, or an element was NaN or infinite.
    is_unusable: bool,
}

impl Hessian {
    /// Creates the Hessian of no rows.
    pub fn new(channels: usize) -> Hessian {
        let (magnitudes, totals) = (vec![0.0; channels], vec![0.0; channels]);
        let sums = vec![0.0; triangle(channels)];
        Hessian { channels, sums, magnitudes, totals, rows: 0, is_unusable: false }
    }

    /// Adds the rows of a value whose last axis has this length. The result does not depend on the
    /// number of threads.
    pub fn observe(&mut self, values: &[f32], channels: usize) {
        if values.is_empty() {
            return;
        }
        let is_finite = values.iter().all(|value| value.is_finite());
        self.is_unusable |= channels != self.channels || channels == 0 || !is_finite;
        if self.is_unusable {
            return;
        }
        for row in values.chunks_exact(channels) {
            self.rows += 1;
            let sums = self.magnitudes.iter_mut().zip(&mut self.totals);
            for ((magnitude, total), value) in sums.zip(row) {
                *magnitude += f64::from(value.abs());
                *total += f64::from(*value);
            }
        }
        let products = values.len().saturating_mul(channels) / 2;
        let threads = parallel::threads_for(products / PRODUCTS_PER_ELEMENT);
        let mut jobs = Vec::with_capacity(threads);
        let (mut rest, mut first) = (&mut self.sums[..], 0);
        for part in 1..=threads {
            // Parts of the triangle of about the same area.
            let share = (part as f64 / threads as f64).sqrt();
            let end = if part == threads { channels } else { (channels as f64 * share) as usize };
            let (own, after) = rest.split_at_mut(triangle(end) - triangle(first));
            jobs.push((first..end, own));
            (rest, first) = (after, end);
        }
        parallel::for_each(jobs, |(range, sums)| add_products(values, channels, range, sums));
    }

    /// The rows that were added.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// The length of the last axis of the value.
    pub fn channels(&self) -> usize {
        self.channels
    }

    /// Whether it says something: there were rows, all of one length, finite and not all zero.
    pub(crate) fn is_usable(&self) -> bool {
        let total: f64 = self.diagonal().sum();
        !self.is_unusable && total > 0.0 && total.is_finite()
    }

    /// The sums of the squares of each channel.
    pub(crate) fn diagonal(&self) -> impl Iterator<Item = f64> + '_ {
        (0..self.channels).map(|channel| self.get(channel, channel))
    }

    /// The mean magnitude of each channel.
    pub(crate) fn mean_magnitudes(&self) -> impl Iterator<Item = f64> + '_ {
        let rows = self.rows.max(1) as f64;
        self.magnitudes.iter().map(move |sum| sum / rows)
    }

    /// The mean of each channel.
    pub(crate) fn means(&self) -> impl Iterator<Item = f64> + '_ {
        let rows = self.rows.max(1) as f64;
        self.totals.iter().map(move |sum| sum / rows)
    }

    /// The Hessian of the rows without their mean. What an error changes in the mean of the outputs
    /// is left to a bias.
    pub(crate) fn centered(&self) -> Hessian {
        let mut centered = self.clone();
        let rows = self.rows.max(1) as f64;
        for (channel, total) in self.totals.iter().enumerate() {
            let row = centered.sums.get_mut(triangle(channel)..triangle(channel + 1));
            let pairs = row.unwrap_or_default().iter_mut().zip(&self.totals);
            pairs.for_each(|(sum, other)| *sum -= total * other / rows);
            // Rounding leaves a little of a constant channel, of either sign.
            if let Some(energy) = centered.sums.get_mut(triangle(channel) + channel)
                && *energy < 1e-6 * total * total / rows
            {
                *energy = 0.0;
            }
        }
        centered
    }

    /// The sum of the products of two channels.
    pub(crate) fn get(&self, one: usize, other: usize) -> f64 {
        let (high, low) = (one.max(other), one.min(other));
        self.sums.get(triangle(high) + low).copied().unwrap_or_default()
    }

    /// The quadratic form `w H wᵀ`: the energy of the outputs of a row of weights.
    pub(crate) fn form(&self, weights: &[f64]) -> f64 {
        let rows = weights.iter().enumerate().map(|(row, weight)| {
            let sums = self.sums.get(triangle(row)..triangle(row + 1)).and_then(<[f64]>::split_last);
            let (Some((diagonal, sums)), Some(others)) = (sums, weights.get(..row)) else { return 0.0 };
            weight * (weight * diagonal + 2.0 * dot(sums, others))
        });
        rows.sum()
    }

    /// The mean of the diagonal.
    pub(crate) fn mean_energy(&self) -> f64 {
        self.diagonal().sum::<f64>() / self.channels.max(1) as f64
    }

    /// The lower triangle over the mean of the diagonal, row by row.
    pub(crate) fn over_mean(&self) -> Vec<f32> {
        let mean = self.mean_energy();
        self.sums.iter().map(|sum| (sum / mean) as f32).collect()
    }
}

/// The elements of a lower triangle with this many rows.
pub(crate) fn triangle(rows: usize) -> usize {
    rows * (rows + 1) / 2
}

/// The sum of the products of two lists, in eight sums that do not wait for each other.
pub(crate) fn dot(one: &[f64], other: &[f64]) -> f64 {
    let ((one, one_rest), (other, other_rest)) = (one.as_chunks::<8>(), other.as_chunks::<8>());
    let mut sums = [0.0; 8];
    for (one, other) in one.iter().zip(other) {
        for ((sum, one), other) in sums.iter_mut().zip(one).zip(other) {
            *sum += one * other;
        }
    }
    let rest: f64 = one_rest.iter().zip(other_rest).map(|(one, other)| one * other).sum();
    sums.iter().sum::<f64>() + rest
}

/// Adds products to the rows of a triangle.
fn add_products(values: &[f32], channels: usize, range: Range<usize>, sums: &mut [f64]) {
    for batch in values.chunks(ROWS.saturating_mul(channels)) {
        let mut rest = &mut *sums;
        for channel in range.clone() {
            let Some((row, after)) = rest.split_at_mut_checked(channel + 1) else { return };
            rest = after;
            for (index, part) in row.chunks_mut(WIDTH).enumerate() {
                let products = products(batch, channels, (channel, index * WIDTH));
                part.iter_mut().zip(products).for_each(|(sum, product)| *sum += f64::from(product));
            }
        }
    }
}

/// The sums over all rows of the products of a channel with those from `start` on.
fn products(batch: &[f32], channels: usize, (channel, start): (usize, usize)) -> [f32; WIDTH] {
    let mut products = [0.0; WIDTH];
    for row in batch.chunks_exact(channels) {
        let Some(factor) = row.get(channel) else { continue };
        let others = row.get(start..).unwrap_or_default();
        match others.first_chunk::<WIDTH>() {
            // Of constant length, so that the loop becomes vector instructions.
            Some(others) => {
                products.iter_mut().zip(others).for_each(|(product, other)| *product += factor * other);
            }
            None => products.iter_mut().zip(others).for_each(|(product, other)| *product += factor * other),
        }
    }
    products
}

/// The Hessians of a calibration, by the names of the values.
#[derive(Debug, Default)]
pub struct Hessians {
    pub(crate) places: BTreeMap<String, usize>,
    pub(crate) all: Vec<Hessian>,
}

impl Hessians {
    /// Creates Hessians of no rows.
    pub fn new(inputs: &[HessianInput]) -> Hessians {
        let numbered = inputs.iter().enumerate();
        let places =
            numbered.flat_map(|(place, input)| input.names.iter().map(move |name| (name.clone(), place)));
        let all = inputs.iter().map(|input| Hessian::new(input.channels)).collect();
        Hessians { places: places.collect(), all }
    }

    /// Adds the rows of a value. Others than those of the inputs are left out.
    pub fn observe(&mut self, name: &str, values: &[f32], channels: usize) {
        let place = self.places.get(name).copied();
        if let Some(hessian) = place.and_then(|place| self.all.get_mut(place)) {
            hessian.observe(values, channels);
        }
    }

    /// Whether a value has a Hessian.
    pub fn contains(&self, name: &str) -> bool {
        self.places.contains_key(name)
    }

    /// The Hessian of a value.
    pub fn get(&self, name: &str) -> Option<&Hessian> {
        self.all.get(*self.places.get(name)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Small integers, whose products and sums are exact.
    fn numbers(count: usize) -> Vec<f32> {
        (0..count).map(|step| (step * 7919 % 13) as f32 - 6.0).collect()
    }

    #[test]
    fn a_hessian_is_the_sum_of_outer_products() {
        // Parts of several widths, and batches of rows.
        for (rows, channels) in [(3, 5), (130, 71), (700, 97)] {
            let values = numbers(rows * channels);
            let mut hessian = Hessian::new(channels);
            let (one, other) = values.split_at(rows / 3 * channels);
            hessian.observe(one, channels);
            hessian.observe(other, channels);
            assert_eq!(hessian.rows(), rows as u64);
            for one in 0..channels {
                for other in 0..channels {
                    let products = values.chunks(channels).map(|row| f64::from(row[one] * row[other]));
                    assert_eq!(hessian.get(one, other), products.sum::<f64>(), "{one} {other}");
                }
                let magnitudes: f64 = values.chunks(channels).map(|row| f64::from(row[one].abs())).sum();
                let found = hessian.mean_magnitudes().nth(one).unwrap();
                assert!((found - magnitudes / rows as f64).abs() < 1e-12);
            }
            assert!(hessian.is_usable());
            // The outputs of a row of weights that is the first row of the values.
            let weights: Vec<f64> = values[..channels].iter().copied().map(f64::from).collect();
            let output = |row: &[f32]| -> f64 {
                row.iter().zip(&weights).map(|(value, weight)| f64::from(*value) * weight).sum()
            };
            let energy: f64 = values.chunks(channels).map(|row| output(row).powi(2)).sum();
            assert!((hessian.form(&weights) - energy).abs() < 1e-9 * energy, "{rows} {channels}");
        }
    }

    #[test]
    fn centered_rows_have_mean_zero() {
        let (rows, channels) = (70, 9);
        let mut values = numbers(rows * channels);
        values.iter_mut().skip(4).step_by(channels).for_each(|value| *value = 5.0);
        let mut hessian = Hessian::new(channels);
        hessian.observe(&values, channels);
        let means: Vec<f64> = hessian.means().collect();
        let centered = hessian.centered();
        for one in 0..channels {
            for other in 0..channels {
                let products = values
                    .chunks(channels)
                    .map(|row| (f64::from(row[one]) - means[one]) * (f64::from(row[other]) - means[other]));
                let expected: f64 = products.sum();
                assert!((centered.get(one, other) - expected).abs() < 1e-9, "{one} {other}");
            }
        }
        assert_eq!((means[4], centered.get(4, 4)), (5.0, 0.0));
    }

    #[test]
    fn other_lengths_infinities_and_zeros_are_not_usable() {
        assert!(!Hessian::new(2).is_usable());
        for (values, channels) in
            [(&[1.0, 2.0][..], 1), (&[1.0, f32::INFINITY], 2), (&[f32::NAN, 0.0], 2), (&[0.0, 0.0], 2)]
        {
            let mut hessian = Hessian::new(2);
            hessian.observe(values, channels);
            assert!(!hessian.is_usable(), "{values:?}");
        }
        let mut hessian = Hessian::new(2);
        hessian.observe(&[1.0, 0.0], 2);
        hessian.observe(&[], 2);
        assert!(hessian.is_usable(), "a channel of zeros is no obstacle");
        hessian.observe(&[f32::NAN, 0.0], 2);
        assert!(!hessian.is_usable());
    }

    #[test]
    fn inputs_of_one_weight_share_a_hessian() {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_string()).collect();
        let inputs = [
            HessianInput { names: names(&["a", "b"]), channels: 2 },
            HessianInput { names: names(&["c"]), channels: 1 },
        ];
        let mut hessians = Hessians::new(&inputs);
        hessians.observe("a", &[1.0, 2.0], 2);
        hessians.observe("b", &[3.0, 4.0], 2);
        hessians.observe("other", &[3.0, 4.0], 2);
        assert_eq!(hessians.get("a").unwrap().get(0, 1), 14.0);
        assert_eq!(hessians.get("b").unwrap().rows(), 2);
        assert_eq!(hessians.get("c").unwrap().rows(), 0);
        assert!(hessians.get("other").is_none() && !hessians.contains("other"));
    }
}
