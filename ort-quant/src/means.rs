//! Means of the channels of values, for the bias correction of static models.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::session::{RunOptions, Session, ValueObserver};
use ort_core::tensor::{TensorView, Value};

use crate::mask::{MaskedObserver, TokenMask, run_observed};

/// Sums are in fixed point, so that they do not depend on the order of the samples.
const UNITS: f64 = (1_u64 << 60) as f64;

/// Which axis of a value has the channels of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ChannelAxis {
    /// The second one, as for convolutions.
    Second,
    /// The last one, as for matrices.
    Last,
}

/// The means and the mean squares of the channels of a value.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChannelMeans {
    sums: Vec<i128>,
    squares: Vec<i128>,
    /// The elements of each channel.
    count: u64,
    /// Whether the number of channels changed, or an element was NaN or infinite.
    is_unusable: bool,
}

impl ChannelMeans {
    /// Takes the elements of a value: `channels` runs of `inner` elements, again and again.
    pub fn observe(&mut self, values: &[f32], (channels, inner): (usize, usize)) {
        if values.is_empty() || channels * inner == 0 {
            return;
        }
        if self.count == 0 {
            self.sums = vec![0; channels];
            self.squares = vec![0; channels];
        }
        self.is_unusable |= self.sums.len() != channels || !values.len().is_multiple_of(channels * inner);
        if self.is_unusable {
            return;
        }
        for block in values.chunks_exact(channels * inner) {
            let sums = self.sums.iter_mut().zip(&mut self.squares);
            for ((sum, squares), run) in sums.zip(block.chunks_exact(inner)) {
                for value in run {
                    self.is_unusable |= !value.is_finite();
                    // The products are exact, and the conversions saturate.
                    let value = f64::from(*value);
                    *sum = sum.saturating_add((value * UNITS) as i128);
                    *squares = squares.saturating_add((value * value * UNITS) as i128);
                }
            }
            self.count += inner as u64;
        }
    }

    /// The mean of each channel. `None` if nothing was seen, if the number of channels changed, or
    /// if an element was NaN or infinite.
    pub fn means(&self) -> Option<Vec<f64>> {
        self.over_count(&self.sums)
    }

    /// The mean of the squares of each channel.
    pub fn mean_squares(&self) -> Option<Vec<f64>> {
        self.over_count(&self.squares)
    }

    fn over_count(&self, sums: &[i128]) -> Option<Vec<f64>> {
        let is_known = self.count > 0 && !self.is_unusable;
        is_known.then(|| sums.iter().map(|sum| *sum as f64 / UNITS / self.count as f64).collect())
    }
}

/// The means of the channels of the values of a model.
#[derive(Debug)]
pub struct MeanCalibration {
    means: Mutex<Means>,
    mask: Option<Arc<TokenMask>>,
}

/// The means by value and axis.
pub type Means = BTreeMap<(String, ChannelAxis), ChannelMeans>;

impl MeanCalibration {
    /// Creates means of these values, from [`Quantizer::bias_inputs`]. Other values are not
    /// observed.
    ///
    /// [`Quantizer::bias_inputs`]: crate::Quantizer::bias_inputs
    pub fn new(inputs: impl IntoIterator<Item = (String, ChannelAxis)>) -> MeanCalibration {
        let means = inputs.into_iter().map(|input| (input, ChannelMeans::default()));
        MeanCalibration { means: Mutex::new(means.collect()), mask: None }
    }

    /// Leaves out what a mask says is padding.
    #[must_use]
    pub fn masked(mut self, mask: Option<Arc<TokenMask>>) -> MeanCalibration {
        self.mask = mask;
        self
    }

    /// Runs a sample and observes it. Returns the outputs. The session is that of
    /// [`Calibration::session`](crate::Calibration::session).
    ///
    /// # Errors
    ///
    /// As [`Session::run`], or the sample has no valid mask.
    pub fn run(&self, session: &Session, inputs: &[(&str, Value)]) -> Result<Vec<(String, Value)>> {
        run_observed(self, self.mask.as_deref(), (session, inputs, &RunOptions::default()))
    }

    /// The means. A value that no run has reached has none.
    pub fn into_means(self) -> Means {
        self.means.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ValueObserver for MeanCalibration {
    fn observe(&self, name: &str, tensor: TensorView<'_>) {
        let mut means = self.means.lock().unwrap_or_else(PoisonError::into_inner);
        for axis in [ChannelAxis::Second, ChannelAxis::Last] {
            let Some(channels) = means.get_mut(&(name.to_string(), axis)) else { continue };
            let place = match axis {
                ChannelAxis::Second => 1,
                ChannelAxis::Last => tensor.rank().wrapping_sub(1),
            };
            let Some(count) = tensor.shape().get(place).copied() else { continue };
            let inner = tensor.shape().iter().skip(place + 1).product();
            if tensor.dtype() == DType::F32
                && let Ok(values) = tensor.to_cow::<f32>()
            {
                channels.observe(&values, (count, inner));
            }
        }
    }
}

impl MaskedObserver for MeanCalibration {
    fn wants(&self, name: &str) -> bool {
        let means = self.means.lock().unwrap_or_else(PoisonError::into_inner);
        means.keys().any(|(value, _)| value == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn channels_have_the_means_of_their_elements() {
        let values: Vec<f32> = (0..2 * 3 * 4_u16).map(|step| f32::from(step * 37 % 19) / 4.0 - 2.0).collect();
        for (channels, inner) in [(3, 4), (24, 1), (4, 1), (1, 6)] {
            let mut all = ChannelMeans::default();
            all.observe(&values, (channels, inner));
            for channel in 0..channels {
                let of = |place: &usize| place / inner % channels == channel;
                let own: Vec<f64> = (0..24).filter(of).map(|place| f64::from(values[place])).collect();
                let mean = own.iter().sum::<f64>() / own.len() as f64;
                let square = own.iter().map(|value| value * value).sum::<f64>() / own.len() as f64;
                assert!((all.means().unwrap()[channel] - mean).abs() < 1e-12, "{channels} {inner}");
                assert!((all.mean_squares().unwrap()[channel] - square).abs() < 1e-12);
            }
            let mut parts = ChannelMeans::default();
            values.chunks(channels * inner).rev().for_each(|part| parts.observe(part, (channels, inner)));
            assert_eq!(parts, all);
        }
        let mut mixed = ChannelMeans::default();
        mixed.observe(&values, (3, 4));
        mixed.observe(&values, (4, 3));
        assert_eq!((mixed.means(), ChannelMeans::default().means()), (None, None));
        let mut infinite = ChannelMeans::default();
        infinite.observe(&[1.0, f32::INFINITY], (2, 1));
        assert_eq!(infinite.means(), None);
    }
}
