//! Observers: statistics of a value over the runs of a calibration, of bounded size.
//!
//! An observer takes a few hundred bytes, and 32 KiB more with a histogram, whatever the number of
//! samples. Its result does not depend on the order of the samples, and observers of parts of the
//! data merge exactly.

mod channels;
mod exact_sum;
mod histogram;

use half::f16;
use half::slice::HalfFloatSliceExt;

pub use self::channels::Channels;
use self::exact_sum::ExactSum;
pub use self::histogram::{BINS, Histogram};

/// What an observer collects besides the extremes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// A histogram, for percentiles, entropy and the least squared error.
    pub histogram: bool,
    /// Mean and standard deviation.
    pub moments: bool,
}

/// The statistics of one value.
#[derive(Clone, Debug, Default)]
pub struct Observer {
    counts: Counts,
    extremes: Option<Extremes>,
    /// The sums of the extremes of each observation.
    sums: [ExactSum; 2],
    /// The observations, such as runs, with at least one finite element.
    observations: u64,
    histogram: Option<Histogram>,
    moments: Option<[ExactSum; 2]>,
}

/// How many elements were seen, by what they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// All elements.
    pub elements: u64,
    /// Elements that are 0.
    pub zeros: u64,
    /// Elements that are NaN.
    pub nan: u64,
    /// Elements that are infinite.
    pub infinite: u64,
}

/// The least and the greatest finite element.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Extremes {
    /// The least.
    pub low: f32,
    /// The greatest.
    pub high: f32,
}

/// Mean and standard deviation of the finite elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Moments {
    /// The mean.
    pub mean: f64,
    /// The standard deviation of the population.
    pub deviation: f64,
}

/// The elements that are widened at a time.
const CHUNK: usize = 1024;

impl Observer {
    /// Creates an observer that has seen nothing.
    pub fn new(wanted: Wanted) -> Observer {
        Observer {
            histogram: wanted.histogram.then(Histogram::default),
            moments: wanted.moments.then(Default::default),
            ..Observer::default()
        }
    }

    /// Takes the elements of the value in one run.
    ///
    /// NaN and infinities are counted, and are part of no statistic: a single one would make every
    /// range useless.
    pub fn observe(&mut self, values: &[f32]) {
        let seen = self.observe_part(values);
        self.end_observation(seen);
    }

    /// [`Self::observe`] for float16.
    pub fn observe_half(&mut self, values: &[f16]) {
        let seen = self.observe_half_part(values);
        self.end_observation(seen);
    }

    /// Takes some of the elements of an observation, and returns their extremes.
    pub(crate) fn observe_half_part(&mut self, values: &[f16]) -> Option<Extremes> {
        let mut seen = None;
        let mut wide = [0.0; CHUNK];
        for part in values.chunks(CHUNK) {
            if let Some(wide) = wide.get_mut(..part.len()) {
                part.convert_to_f32_slice(wide);
                seen = joined(seen, self.observe_part(wide));
            }
        }
        seen
    }

    /// Adds what another observer of the same statistics has seen.
    pub fn merge(&mut self, other: &Observer) {
        let more = other.counts;
        self.counts.elements += more.elements;
        self.counts.zeros += more.zeros;
        self.counts.nan += more.nan;
        self.counts.infinite += more.infinite;
        self.extremes = joined(self.extremes, other.extremes);
        self.observations += other.observations;
        self.sums.iter_mut().zip(&other.sums).for_each(|(sum, more)| sum.merge(more));
        if let (Some(histogram), Some(more)) = (&mut self.histogram, &other.histogram) {
            histogram.merge(more);
        }
        if let (Some(sums), Some(more)) = (&mut self.moments, &other.moments) {
            sums.iter_mut().zip(more).for_each(|(sum, more)| sum.merge(more));
        }
    }

    /// How many elements were seen.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// The finite elements.
    pub(crate) fn finite(&self) -> u64 {
        let Counts { elements, nan, infinite, .. } = self.counts;
        elements - nan - infinite
    }

    /// The least and the greatest element. `None` if no element was finite, because the value was
    /// never computed, or was empty.
    pub fn extremes(&self) -> Option<Extremes> {
        self.extremes
    }

    /// The means of the least and of the greatest element of each observation.
    pub fn mean_extremes(&self) -> Option<(f64, f64)> {
        let [low, high] = &self.sums;
        let count = self.observations as f64;
        (self.observations > 0).then(|| (low.value() / count, high.value() / count))
    }

    /// The histogram, if it was wanted.
    pub fn histogram(&self) -> Option<&Histogram> {
        self.histogram.as_ref()
    }

    /// Mean and standard deviation, if they were wanted and an element was finite.
    pub fn moments(&self) -> Option<Moments> {
        let [sum, squares] = self.moments.as_ref()?;
        let count = self.finite();
        if count == 0 {
            return None;
        }
        let mean = sum.value() / count as f64;
        // The sums are exact, so only this difference can cancel.
        let variance = squares.value() / count as f64 - mean * mean;
        Some(Moments { mean, deviation: variance.max(0.0).sqrt() })
    }

    /// Takes some of the elements of an observation, and returns their extremes.
    pub(crate) fn observe_part(&mut self, values: &[f32]) -> Option<Extremes> {
        let mut extremes = Extremes { low: f32::INFINITY, high: f32::NEG_INFINITY };
        let (mut zeros, mut nan, mut infinite) = (0_u64, 0_u64, 0_u64);
        for value in values {
            zeros += u64::from(*value == 0.0);
            nan += u64::from(value.is_nan());
            infinite += u64::from(value.is_infinite());
            let is_low = *value < extremes.low && *value > f32::NEG_INFINITY;
            let is_high = *value > extremes.high && *value < f32::INFINITY;
            extremes.low = if is_low { *value } else { extremes.low };
            extremes.high = if is_high { *value } else { extremes.high };
        }
        self.counts.elements += values.len() as u64;
        self.counts.zeros += zeros;
        self.counts.nan += nan;
        self.counts.infinite += infinite;
        if values.len() as u64 == nan + infinite {
            return None;
        }
        if let Some(histogram) = &mut self.histogram {
            histogram.add(values, extremes.high.max(-extremes.low));
        }
        if let Some([sum, squares]) = &mut self.moments {
            for value in values.iter().filter(|value| value.is_finite()) {
                let value = f64::from(*value);
                sum.add(value);
                squares.add(value * value);
            }
        }
        Some(extremes)
    }

    /// Ends an observation, of which these are the extremes.
    pub(crate) fn end_observation(&mut self, seen: Option<Extremes>) {
        let Some(Extremes { low, high }) = seen else { return };
        self.extremes = joined(self.extremes, seen);
        self.observations += 1;
        let [lows, highs] = &mut self.sums;
        lows.add(f64::from(low));
        highs.add(f64::from(high));
    }
}

/// The extremes of two sets.
pub(crate) fn joined(one: Option<Extremes>, other: Option<Extremes>) -> Option<Extremes> {
    let (Some(a), Some(b)) = (one, other) else { return one.or(other) };
    Some(Extremes { low: a.low.min(b.low), high: a.high.max(b.high) })
}

/// An exponential moving average of extremes: `e + constant * (new - e)`.
///
/// Unlike an [`Observer`], it depends on the order of the samples. onnxruntime.quantization merges
/// successive calibrations in this way.
#[derive(Clone, Copy, Debug)]
pub struct MovingAverage {
    /// The weight of what is new.
    pub constant: f64,
    /// The average so far.
    pub extremes: Option<(f64, f64)>,
}

impl MovingAverage {
    /// Creates an average of nothing. ONNX Runtime's default for `constant` is 0.01.
    pub fn new(constant: f64) -> MovingAverage {
        MovingAverage { constant, extremes: None }
    }

    /// Merges the extremes of a calibration.
    pub fn merge(&mut self, (low, high): (f64, f64)) {
        let moved = |old: f64, new: f64| old + self.constant * (new - old);
        self.extremes = Some(match self.extremes {
            Some((old_low, old_high)) => (moved(old_low, low), moved(old_high, high)),
            None => (low, high),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Wanted = Wanted { histogram: true, moments: true };

    #[test]
    fn what_is_not_finite_is_counted_apart() {
        let mut observer = Observer::new(ALL);
        observer.observe(&[f32::NAN, f32::INFINITY]);
        observer.observe(&[]);
        assert_eq!((observer.extremes(), observer.mean_extremes(), observer.moments()), (None, None, None));
        observer.observe(&[f32::NEG_INFINITY, -2.0, 0.0, f32::NAN, 4.0]);
        let counts = Counts { elements: 7, zeros: 1, nan: 2, infinite: 2 };
        assert_eq!(observer.counts(), counts);
        assert_eq!(observer.extremes(), Some(Extremes { low: -2.0, high: 4.0 }));
        assert_eq!(observer.mean_extremes(), Some((-2.0, 4.0)));
        assert_eq!(observer.histogram().map(Histogram::count), Some(2));
        let deviation = (56.0_f64 / 9.0).sqrt();
        let found = observer.moments().unwrap();
        assert!((found.deviation - deviation).abs() < 1e-15 && (found.mean - 2.0 / 3.0).abs() < 1e-16);
    }

    #[test]
    fn merged_observers_are_one_observer_of_all() {
        let sample = |n: u16| (0..n).map(|i| f32::from(i * n) * 0.3 - 7.0).collect::<Vec<f32>>();
        let samples: Vec<Vec<f32>> = (1..20).map(sample).collect();
        let of = |samples: &mut dyn Iterator<Item = &Vec<f32>>| {
            let mut observer = Observer::new(ALL);
            samples.for_each(|sample| observer.observe(sample));
            observer
        };
        let whole = of(&mut samples.iter());
        let mut halves = of(&mut samples[9..].iter().rev());
        halves.merge(&of(&mut samples[..9].iter()));
        assert_eq!(whole.counts(), halves.counts());
        assert_eq!(whole.extremes(), halves.extremes());
        assert_eq!(whole.mean_extremes(), halves.mean_extremes());
        assert_eq!(whole.histogram(), halves.histogram());
        assert_eq!(whole.moments(), halves.moments());
    }

    #[test]
    fn float16_is_observed_as_its_float32() {
        let wide: Vec<f32> =
            (0..3000_u16).map(|i| f16::from_f32(f32::from(i) * 0.01 - 9.0).to_f32()).collect();
        let narrow: Vec<f16> = wide.iter().map(|value| f16::from_f32(*value)).collect();
        let (mut one, mut other) = (Observer::new(ALL), Observer::new(ALL));
        one.observe(&wide);
        other.observe_half(&narrow);
        assert_eq!(one.extremes(), other.extremes());
        assert_eq!(one.mean_extremes(), other.mean_extremes());
        assert_eq!(one.histogram(), other.histogram());
        assert_eq!(one.moments(), other.moments());
    }

    #[test]
    fn a_moving_average_begins_with_the_first_extremes() {
        let mut average = MovingAverage::new(0.25);
        average.merge((-1.0, 2.0));
        average.merge((-3.0, 6.0));
        assert_eq!(average.extremes, Some((-1.5, 3.0)));
    }
}
