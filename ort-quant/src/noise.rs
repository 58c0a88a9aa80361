//! Signal and noise of quantized values.

/// The energy of values, and of what quantization changed in them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Noise {
    /// The sum of the squares of the values.
    pub signal: f64,
    /// The sum of the squares of the differences.
    pub error: f64,
}

impl Noise {
    /// The ratio of signal to noise in decibels: 20 dB are a relative error of 10 %. Infinite if
    /// nothing changed, and NaN if there is no signal either.
    pub fn decibels(&self) -> f64 {
        10.0 * (self.signal / self.error).log10()
    }

    /// The root of the ratio of noise to signal.
    pub fn relative(&self) -> f64 {
        (self.error / self.signal).sqrt()
    }

    /// Adds a value, and what it became.
    #[inline]
    pub(crate) fn add(&mut self, value: f32, became: f32) {
        let difference = f64::from(became) - f64::from(value);
        self.signal += f64::from(value) * f64::from(value);
        self.error += difference * difference;
    }

    /// Adds values, and what they became, in eight sums that do not wait for each other.
    #[inline]
    pub(crate) fn add_all(&mut self, values: &[f32], became: &[f32]) {
        let ((values, rest), (became, became_rest)) = (values.as_chunks::<8>(), became.as_chunks::<8>());
        let (mut signals, mut errors) = ([0.0_f64; 8], [0.0_f64; 8]);
        for (values, became) in values.iter().zip(became) {
            let sums = signals.iter_mut().zip(&mut errors);
            for ((signal, error), (value, became)) in sums.zip(values.iter().zip(became)) {
                let (value, became) = (f64::from(*value), f64::from(*became));
                *signal += value * value;
                *error += (became - value) * (became - value);
            }
        }
        self.signal += signals.iter().sum::<f64>();
        self.error += errors.iter().sum::<f64>();
        rest.iter().zip(became_rest).for_each(|(value, became)| self.add(*value, *became));
    }

    /// The sum of two.
    #[must_use]
    pub(crate) fn plus(self, other: Noise) -> Noise {
        Noise { signal: self.signal + other.signal, error: self.error + other.error }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenth_of_noise_is_twenty_decibels() {
        let mut noise = Noise::default();
        noise.add(3.0, 3.3);
        noise.add(-4.0, -4.4);
        assert!((noise.decibels() - 20.0).abs() < 1e-5, "{}", noise.decibels());
        assert!((noise.relative() - 0.1).abs() < 1e-6);
        let (values, became) = ([3.0, -4.0, 0.5].repeat(7), [3.3, -4.4, 0.25].repeat(7));
        let (mut one_by_one, mut together) = (Noise::default(), Noise::default());
        values.iter().zip(&became).for_each(|(value, became)| one_by_one.add(*value, *became));
        together.add_all(&values, &became);
        assert!((one_by_one.signal - together.signal).abs() < 1e-12 * one_by_one.signal);
        assert!((one_by_one.error - together.error).abs() < 1e-12 * one_by_one.error);
        let nothing = Noise { signal: 1.0, error: 0.0 };
        assert_eq!(nothing.plus(Noise::default()).decibels(), f64::INFINITY);
        assert!(Noise::default().decibels().is_nan());
    }
}
