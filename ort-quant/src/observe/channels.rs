//! Statistics of the channels of a value: of each position along its last axis, over all rows.

/// The unit of the sums of squares. In fixed point the sum does not depend on the order of its
/// terms, and so neither on threads nor on the order of the samples.
const UNITS: f64 = (1_u64 << 60) as f64;

/// The statistics of the channels of a value.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Channels {
    lows: Vec<f32>,
    highs: Vec<f32>,
    squares: Vec<i128>,
    rows: u64,
    /// Whether the number of channels changed, or an element was NaN or infinite.
    is_unusable: bool,
}

impl Channels {
    /// Takes the elements of a value with this many channels.
    pub fn observe(&mut self, values: &[f32], channels: usize) {
        if values.is_empty() || channels == 0 {
            return;
        }
        if self.rows == 0 {
            self.lows = vec![0.0; channels];
            self.highs = vec![0.0; channels];
            self.squares = vec![0; channels];
        }
        self.is_unusable |= self.lows.len() != channels || !values.len().is_multiple_of(channels);
        if self.is_unusable {
            return;
        }
        for row in values.chunks_exact(channels) {
            self.rows += 1;
            let extremes = self.lows.iter_mut().zip(&mut self.highs).zip(&mut self.squares);
            for (value, ((low, high), squares)) in row.iter().zip(extremes) {
                self.is_unusable |= !value.is_finite();
                *low = low.min(*value);
                *high = high.max(*value);
                // The product is exact, and the conversion saturates.
                let square = f64::from(*value) * f64::from(*value);
                *squares = squares.saturating_add((square * UNITS) as i128);
            }
        }
    }

    /// The number of rows seen.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// The range of each channel, extended to contain 0. `None` if nothing was seen, if the number
    /// of channels changed, or if an element was NaN or infinite.
    pub fn ranges(&self) -> Option<Vec<(f32, f32)>> {
        let is_known = self.rows > 0 && !self.is_unusable;
        is_known.then(|| self.lows.iter().copied().zip(self.highs.iter().copied()).collect())
    }

    /// The mean of the squares of each channel.
    pub fn mean_squares(&self) -> Vec<f64> {
        let rows = self.rows.max(1) as f64;
        self.squares.iter().map(|sum| *sum as f64 / UNITS / rows).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn channels_have_ranges_and_mean_squares() {
        let (rows, channels) = (50, 3);
        let values: Vec<f32> =
            (0..rows * channels).map(|step| (step * 37 % 101) as f32 / 8.0 - 3.0).collect();
        let mut all = Channels::default();
        all.observe(&values, channels);
        for channel in 0..channels {
            let column: Vec<f32> = values.iter().skip(channel).step_by(channels).copied().collect();
            let low = column.iter().copied().fold(0.0, f32::min);
            let high = column.iter().copied().fold(0.0, f32::max);
            assert_eq!(all.ranges().unwrap()[channel], (low, high));
            let squares: f64 = column.iter().map(|value| f64::from(*value).powi(2)).sum();
            assert!((all.mean_squares()[channel] - squares / rows as f64).abs() < 1e-12);
        }
        // Parts in another order are the same.
        let mut parts = Channels::default();
        values.chunks(channels).rev().for_each(|row| parts.observe(row, channels));
        assert_eq!(parts, all);
    }

    #[test]
    fn rows_of_other_lengths_and_infinities_leave_no_statistics() {
        assert_eq!(Channels::default().ranges(), None);
        for (values, channels) in
            [(&[1.0, 2.0][..], 1), (&[1.0, f32::INFINITY][..], 2), (&[f32::NAN, 0.0][..], 2)]
        {
            let mut seen = Channels::default();
            seen.observe(&[1.0, 2.0], 2);
            seen.observe(values, channels);
            assert_eq!(seen.ranges(), None);
        }
    }
}
