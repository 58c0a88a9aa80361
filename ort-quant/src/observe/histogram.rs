//! Streaming histograms of bounded size whose result does not depend on the order of the values.
//!
//! The bins of a sign divide `0..extent` evenly, and `extent` is a power of two. If a value does
//! not fit, neighbouring bins are added in pairs and `extent` doubles. Because bins are halves of
//! later bins, a value lands in the same bin whether it came before or after. So histograms of
//! parts of the data add up exactly.

use super::exact_sum::power_of_two;

/// The bins of each sign. Two signs take 32 KiB.
pub const BINS: usize = 2048;

/// The counts of finite values other than zero.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Histogram {
    /// The logarithm of the extent. It has no meaning while the bins are empty.
    exponent: i32,
    /// Negative values by magnitude.
    negative: Vec<u64>,
    positive: Vec<u64>,
    is_empty: bool,
}

impl Default for Histogram {
    fn default() -> Self {
        Histogram { exponent: 0, negative: vec![0; BINS], positive: vec![0; BINS], is_empty: true }
    }
}

impl Histogram {
    /// Counts values. Zeros, NaN and infinities are left out. `largest` is the largest magnitude
    /// among the values that count.
    pub(crate) fn add(&mut self, values: &[f32], largest: f32) {
        if largest == 0.0 {
            return;
        }
        self.reach(exponent_above(largest));
        let per_unit = self.bins_per_unit();
        for value in values {
            if *value == 0.0 || !value.is_finite() {
                continue;
            }
            // Exact, because the factor is a power of two.
            let bin = (f64::from(value.abs()) * per_unit) as usize;
            let bins = if *value < 0.0 { &mut self.negative } else { &mut self.positive };
            if let Some(count) = bins.get_mut(bin) {
                *count += 1;
            }
        }
    }

    /// Adds the counts of another histogram.
    pub(crate) fn merge(&mut self, other: &Histogram) {
        if other.is_empty {
            return;
        }
        self.reach(other.exponent);
        let mut other = other.clone();
        other.reach(self.exponent);
        let pairs = [(&mut self.negative, &other.negative), (&mut self.positive, &other.positive)];
        for (bins, more) in pairs {
            bins.iter_mut().zip(more).for_each(|(count, more)| *count += more);
        }
    }

    /// The counts of negative values by magnitude, and of positive ones. Both have [`BINS`] bins.
    pub fn bins(&self) -> (&[u64], &[u64]) {
        (&self.negative, &self.positive)
    }

    /// The width of a bin.
    pub fn width(&self) -> f64 {
        power_of_two(self.exponent) / BINS as f64
    }

    /// The number of counted values.
    pub fn count(&self) -> u64 {
        self.negative.iter().chain(&self.positive).sum()
    }

    fn bins_per_unit(&self) -> f64 {
        BINS as f64 * power_of_two(-self.exponent)
    }

    /// Extends the bins to magnitudes below 2^`exponent`.
    fn reach(&mut self, exponent: i32) {
        if self.is_empty {
            (self.exponent, self.is_empty) = (exponent, false);
        }
        while self.exponent < exponent {
            halve(&mut self.negative);
            halve(&mut self.positive);
            self.exponent += 1;
        }
    }
}

/// Adds neighbouring bins in pairs.
fn halve(bins: &mut Vec<u64>) {
    let sums: Vec<u64> = bins.chunks(2).map(|pair| pair.iter().sum()).collect();
    bins.clear();
    bins.extend(sums);
    bins.resize(BINS, 0);
}

/// The least exponent whose power of two is above a positive, finite magnitude.
fn exponent_above(magnitude: f32) -> i32 {
    // As a float64 no float32 is subnormal.
    let exponent = (f64::from(magnitude).to_bits() >> 52) as i32 - 1023;
    exponent + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(parts: &[&[f32]]) -> Histogram {
        let mut histogram = Histogram::default();
        for part in parts {
            let finite = part.iter().filter(|value| value.is_finite());
            histogram.add(part, finite.fold(0.0, |most, value| most.max(value.abs())));
        }
        histogram
    }

    #[test]
    fn a_value_at_the_extent_gets_a_wider_bin() {
        for (value, exponent) in [(1.0, 1), (0.999_999_94, 0), (2.0, 2), (f32::MAX, 128), (1e-45, -148)] {
            let histogram = of(&[&[value, -value]]);
            assert_eq!(histogram.exponent, exponent, "{value}");
            assert_eq!(histogram.count(), 2);
            let bin = (f64::from(value) / histogram.width()) as usize;
            assert_eq!((histogram.positive[bin], histogram.negative[bin]), (1, 1));
        }
    }

    #[test]
    fn order_and_parts_make_no_difference() {
        let values: Vec<f32> = (0..4000_u16).map(|i| (f32::from(i) * 0.37).sin() * f32::from(i)).collect();
        let mut reversed = values.clone();
        reversed.reverse();
        let whole = of(&[&values]);
        assert_eq!(whole, of(&[&reversed]));
        let parts: Vec<&[f32]> = values.chunks(7).collect();
        assert_eq!(whole, of(&parts));
        let mut merged = of(&[&values[..100]]);
        merged.merge(&of(&[&values[100..]]));
        assert_eq!(whole, merged);
        let mut other_way = of(&[&values[100..]]);
        other_way.merge(&of(&[&values[..100]]));
        assert_eq!(whole, other_way);
        other_way.merge(&Histogram::default());
        assert_eq!(whole, other_way);
    }

    #[test]
    fn what_is_not_a_number_is_left_out() {
        let histogram = of(&[&[f32::NAN, f32::INFINITY, 0.0, -0.0, 3.0]]);
        assert_eq!(histogram.count(), 1);
        assert_eq!(of(&[&[0.0], &[f32::NAN]]), Histogram::default());
    }
}
