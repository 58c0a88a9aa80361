//! Calibration: runs of a model on samples, in which observers see the values.
//!
//! A value is observed while the run has it in memory, so that a calibration takes the plan of a
//! run, and the observers, whatever the number of samples.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use half::f16;
use ort_core::dtype::DType;
use ort_core::rewrite::{Level, Optimizer};
use ort_core::session::{RunOptions, Session, SessionBuilder, ValueObserver};
use ort_core::tensor::{TensorView, Value};
use ort_core::{Error, ErrorKind, Result, Within};

use crate::hessian::{Hessian, HessianInput, Hessians};
use crate::mask::{MaskedObserver, TokenMask, run_observed};
use crate::model::Smoothing;
use crate::observe::{Channels, Extremes, Observer, Wanted, joined};

/// The observers of the values of a model.
#[derive(Debug)]
pub struct Calibration {
    /// The position of each value's observer.
    places: BTreeMap<String, usize>,
    observers: Mutex<Vec<Observer>>,
    /// What the channels of a value are multiplied by first; empty for most values.
    factors: Vec<Vec<f32>>,
    mask: Option<Arc<TokenMask>>,
}

/// A run of a calibration.
#[derive(Debug)]
struct ObservedRun<'c> {
    calibration: &'c Calibration,
    /// The extremes of each value in this run, in the order of the observers. A value of a
    /// subgraph may be computed several times in a run, and one of a split batch in parts.
    seen: Mutex<Vec<Option<Extremes>>>,
}

impl Calibration {
    /// Creates observers for these values. Other values are not observed.
    pub fn new<N: Into<String>>(names: impl IntoIterator<Item = N>, wanted: Wanted) -> Calibration {
        let mut places: BTreeMap<String, usize> = names.into_iter().map(|name| (name.into(), 0)).collect();
        places.values_mut().enumerate().for_each(|(index, place)| *place = index);
        let observers: Vec<Observer> = places.values().map(|_| Observer::new(wanted)).collect();
        let factors = vec![Vec::new(); observers.len()];
        Calibration { places, observers: Mutex::new(observers), factors, mask: None }
    }

    /// Leaves out what a mask says is padding.
    #[must_use]
    pub fn masked(mut self, mask: Option<Arc<TokenMask>>) -> Calibration {
        self.mask = mask;
        self
    }

    /// Observes smoothed values as they are after their division.
    #[must_use]
    pub fn smoothed(mut self, smoothing: &Smoothing) -> Calibration {
        for (name, smoothed) in smoothing {
            if let Some(factors) = self.places.get(name).and_then(|place| self.factors.get_mut(*place)) {
                *factors = smoothed.factors();
            }
        }
        self
    }

    /// Builds a session in which each value of the model is computed, so that it can be observed:
    /// without rewrites, whatever level the builder has. It has to run on the CPU, because values
    /// in device memory are not observed.
    ///
    /// # Errors
    ///
    /// As [`SessionBuilder::build`].
    pub fn session(builder: SessionBuilder) -> Result<Session> {
        builder.optimizer(Optimizer::at(Level::Disabled)).build()
    }

    /// Runs a sample and observes it. Returns the outputs.
    ///
    /// # Errors
    ///
    /// As [`Session::run`].
    pub fn run(&self, session: &Session, inputs: &[(&str, Value)]) -> Result<Vec<(String, Value)>> {
        self.run_with(session, inputs, &RunOptions::default())
    }

    /// [`Self::run`] with options, whose observer is replaced.
    ///
    /// # Errors
    ///
    /// As [`Session::run`].
    pub fn run_with(
        &self,
        session: &Session,
        inputs: &[(&str, Value)],
        options: &RunOptions<'_>,
    ) -> Result<Vec<(String, Value)>> {
        let seen = Mutex::new(vec![None; self.places.len()]);
        let run = ObservedRun { calibration: self, seen };
        let outputs = run_observed(&run, self.mask.as_deref(), (session, inputs, options))?;
        let seen = run.seen.into_inner().unwrap_or_else(PoisonError::into_inner);
        locked(&self.observers)
            .iter_mut()
            .zip(seen)
            .for_each(|(observer, seen)| observer.end_observation(seen));
        Ok(outputs)
    }

    /// Observes a value that was computed elsewhere, as that of one run. Returns whether it has an
    /// observer.
    pub fn observe(&self, name: &str, values: &[f32]) -> bool {
        let place = self.places.get(name);
        let mut observers = locked(&self.observers);
        let observer = place.and_then(|place| observers.get_mut(*place));
        observer.is_some_and(|observer| {
            observer.observe(values);
            true
        })
    }

    /// What the observer of a value has seen so far. `None` if the value has no observer.
    pub fn observer(&self, name: &str) -> Option<Observer> {
        locked(&self.observers).get(*self.places.get(name)?).cloned()
    }

    /// The observers by the names of their values. A value that no run has reached has seen no
    /// element.
    pub fn into_observers(self) -> BTreeMap<String, Observer> {
        let observers = self.observers.into_inner().unwrap_or_else(PoisonError::into_inner);
        self.places.into_keys().zip(observers).collect()
    }
}

impl ValueObserver for ObservedRun<'_> {
    fn observe(&self, name: &str, tensor: TensorView<'_>) {
        let Some(place) = self.calibration.places.get(name) else { return };
        let mut observers = locked(&self.calibration.observers);
        let Some(observer) = observers.get_mut(*place) else { return };
        let extremes = match tensor.dtype() {
            DType::F32 => tensor.to_cow::<f32>().ok().and_then(|values| {
                match self.calibration.factors.get(*place).filter(|factors| !factors.is_empty()) {
                    Some(factors) => observe_scaled(observer, &values, factors),
                    None => observer.observe_part(&values),
                }
            }),
            DType::F16 => tensor.to_cow::<f16>().ok().and_then(|values| observer.observe_half_part(&values)),
            // No other type is quantized.
            _ => None,
        };
        if let Some(seen) = locked(&self.seen).get_mut(*place) {
            *seen = joined(*seen, extremes);
        }
    }
}

impl MaskedObserver for ObservedRun<'_> {
    fn wants(&self, name: &str) -> bool {
        self.calibration.places.contains_key(name)
    }
}

/// Observes the rows of a value after the multiplication of its channels.
fn observe_scaled(observer: &mut Observer, values: &[f32], factors: &[f32]) -> Option<Extremes> {
    let mut seen = None;
    let mut scaled = Vec::with_capacity(factors.len());
    for row in values.chunks(factors.len()) {
        scaled.clear();
        scaled.extend(row.iter().zip(factors).map(|(value, factor)| value * factor));
        seen = joined(seen, observer.observe_part(&scaled));
    }
    seen
}

/// The statistics of the channels of values, for [`Smooth`](crate::Smooth).
#[derive(Debug)]
pub struct ChannelCalibration {
    channels: Mutex<BTreeMap<String, Channels>>,
    mask: Option<Arc<TokenMask>>,
}

impl ChannelCalibration {
    /// Creates statistics of these values. Other values are not observed.
    pub fn new<N: Into<String>>(names: impl IntoIterator<Item = N>) -> ChannelCalibration {
        let channels = names.into_iter().map(|name| (name.into(), Channels::default()));
        ChannelCalibration { channels: Mutex::new(channels.collect()), mask: None }
    }

    /// Leaves out what a mask says is padding.
    #[must_use]
    pub fn masked(mut self, mask: Option<Arc<TokenMask>>) -> ChannelCalibration {
        self.mask = mask;
        self
    }

    /// Runs a sample and observes it. Returns the outputs. The session is that of
    /// [`Calibration::session`].
    ///
    /// # Errors
    ///
    /// As [`Session::run`].
    pub fn run(&self, session: &Session, inputs: &[(&str, Value)]) -> Result<Vec<(String, Value)>> {
        run_observed(self, self.mask.as_deref(), (session, inputs, &RunOptions::default()))
    }

    /// The statistics by the names of their values.
    pub fn into_channels(self) -> BTreeMap<String, Channels> {
        self.channels.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ValueObserver for ChannelCalibration {
    fn observe(&self, name: &str, tensor: TensorView<'_>) {
        let mut channels = locked(&self.channels);
        let (Some(channels), Some(last)) = (channels.get_mut(name), tensor.shape().last()) else { return };
        if tensor.dtype() == DType::F32
            && let Ok(values) = tensor.to_cow::<f32>()
        {
            channels.observe(&values, *last);
        }
    }
}

impl MaskedObserver for ChannelCalibration {
    fn wants(&self, name: &str) -> bool {
        locked(&self.channels).contains_key(name)
    }
}

/// The extremes of the channels of values: of each position along the second axis, over the others.
#[derive(Debug)]
pub struct AxisCalibration {
    channels: Mutex<BTreeMap<String, Result<Vec<Option<Extremes>>>>>,
}

impl AxisCalibration {
    /// The axis of the channels. Values of fewer dimensions have one channel.
    const AXIS: usize = 1;

    /// Creates statistics of these values. Other values are not observed.
    pub fn new<N: Into<String>>(names: impl IntoIterator<Item = N>) -> AxisCalibration {
        let channels = names.into_iter().map(|name| (name.into(), Ok(Vec::new())));
        AxisCalibration { channels: Mutex::new(channels.collect()) }
    }

    /// Runs a sample and observes it. Returns the outputs. The session is that of
    /// [`Calibration::session`], and the observer of the options is replaced.
    ///
    /// # Errors
    ///
    /// As [`Session::run`].
    pub fn run_with(
        &self,
        session: &Session,
        inputs: &[(&str, Value)],
        options: &RunOptions<'_>,
    ) -> Result<Vec<(String, Value)>> {
        session.run_with(inputs, &RunOptions { observer: Some(self), ..options.clone() })
    }

    /// Returns the extremes by the names of the values, and forgets them. A channel without a
    /// finite element has none, and a value that was not computed has no channel.
    ///
    /// # Errors
    ///
    /// The number of channels of a value changed.
    pub fn take(&self) -> Result<BTreeMap<String, Vec<Option<Extremes>>>> {
        let mut channels = locked(&self.channels);
        let taken = channels.iter_mut().map(|(name, extremes)| {
            let extremes = std::mem::replace(extremes, Ok(Vec::new()));
            Ok((name.clone(), extremes.within(|| format!("value '{name}'"))?))
        });
        taken.collect()
    }
}

impl ValueObserver for AxisCalibration {
    fn observe(&self, name: &str, tensor: TensorView<'_>) {
        let mut channels = locked(&self.channels);
        let Some(known) = channels.get_mut(name) else { return };
        let Ok(extremes) = known else { return };
        let shape = tensor.shape();
        let count = shape.get(Self::AXIS).copied().unwrap_or(1);
        if extremes.is_empty() {
            extremes.resize(count, None);
        }
        if extremes.len() != count {
            let text = format!("it has {} channels in one run and {count} in another", extremes.len());
            *known = Err(Error::new(ErrorKind::InvalidArgument, text));
            return;
        }
        let inner = match shape.get(Self::AXIS + 1..) {
            Some(inner) => inner.iter().product(),
            // All elements are in the only channel.
            None => usize::MAX,
        };
        match tensor.dtype() {
            DType::F32 => {
                if let Ok(values) = tensor.to_cow::<f32>() {
                    extend_channels(extremes, &values, inner);
                }
            }
            DType::F16 => {
                if let Ok(values) = tensor.to_cow::<f16>() {
                    let wide: Vec<f32> = values.iter().map(|value| value.to_f32()).collect();
                    extend_channels(extremes, &wide, inner);
                }
            }
            // No other type is quantized.
            _ => {}
        }
    }
}

/// Extends the extremes of channels by values, of which `inner` in a row belong to the same one.
fn extend_channels(channels: &mut [Option<Extremes>], values: &[f32], inner: usize) {
    let count = channels.len();
    if count == 0 || inner == 0 {
        return;
    }
    for (row, values) in values.chunks(inner).enumerate() {
        let finite = values.iter().copied().filter(|value| value.is_finite());
        let seen = finite.fold(None, |seen, value| joined(seen, Some(Extremes { low: value, high: value })));
        if let Some(extremes) = channels.get_mut(row % count) {
            *extremes = joined(*extremes, seen);
        }
    }
}

/// The Hessians of the products that read values, for GPTQ and AWQ.
#[derive(Debug)]
pub struct HessianCalibration {
    hessians: Mutex<Hessians>,
    mask: Option<Arc<TokenMask>>,
}

impl HessianCalibration {
    /// Creates Hessians for these values, from [`Quantizer::hessian_inputs`]. Other values are not
    /// observed.
    ///
    /// [`Quantizer::hessian_inputs`]: crate::Quantizer::hessian_inputs
    pub fn new(inputs: &[HessianInput]) -> HessianCalibration {
        HessianCalibration { hessians: Mutex::new(Hessians::new(inputs)), mask: None }
    }

    /// Leaves out what a mask says is padding.
    #[must_use]
    pub fn masked(mut self, mask: Option<Arc<TokenMask>>) -> HessianCalibration {
        self.mask = mask;
        self
    }

    /// Runs a sample and observes it. Returns the outputs. The session is that of
    /// [`Calibration::session`].
    ///
    /// # Errors
    ///
    /// As [`Session::run`].
    pub fn run(&self, session: &Session, inputs: &[(&str, Value)]) -> Result<Vec<(String, Value)>> {
        self.run_with(session, inputs, &RunOptions::default())
    }

    /// [`Self::run`] with options, whose observer is replaced.
    ///
    /// # Errors
    ///
    /// As [`Session::run`].
    pub fn run_with(
        &self,
        session: &Session,
        inputs: &[(&str, Value)],
        options: &RunOptions<'_>,
    ) -> Result<Vec<(String, Value)>> {
        run_observed(self, self.mask.as_deref(), (session, inputs, options))
    }

    /// Calls a function with the Hessian of a value so far, `None` if the value has none.
    pub fn with_hessian<T>(&self, name: &str, call: impl FnOnce(Option<&Hessian>) -> T) -> T {
        call(locked(&self.hessians).get(name))
    }

    /// The Hessians. A value that no run has reached has one of no rows.
    pub fn into_hessians(self) -> Hessians {
        self.hessians.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ValueObserver for HessianCalibration {
    fn observe(&self, name: &str, tensor: TensorView<'_>) {
        let mut hessians = locked(&self.hessians);
        let Some(last) = tensor.shape().last().copied().filter(|_| hessians.contains(name)) else { return };
        match tensor.dtype() {
            DType::F32 => {
                if let Ok(values) = tensor.to_cow::<f32>() {
                    hessians.observe(name, &values, last);
                }
            }
            DType::F16 => {
                if let Ok(values) = tensor.to_cow::<f16>() {
                    let wide: Vec<f32> = values.iter().map(|value| value.to_f32()).collect();
                    hessians.observe(name, &wide, last);
                }
            }
            // Products of other types are not quantized.
            _ => {}
        }
    }
}

impl MaskedObserver for HessianCalibration {
    fn wants(&self, name: &str) -> bool {
        locked(&self.hessians).contains(name)
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn channels_are_along_the_second_axis() {
        // Two rows of three channels, of two elements each.
        let values = [1.0, 2.0, -3.0, 4.0, f32::NAN, f32::INFINITY, 0.0, 9.0, 5.0, -6.0, 7.0, f32::NAN];
        let mut channels = vec![None; 3];
        extend_channels(&mut channels, &values, 2);
        let ends = |low, high| Some(Extremes { low, high });
        assert_eq!(channels, [ends(0.0, 9.0), ends(-6.0, 5.0), ends(7.0, 7.0)]);
        extend_channels(&mut channels, &[-1.0, 1.0, 1.0], 1);
        assert_eq!(channels, [ends(-1.0, 9.0), ends(-6.0, 5.0), ends(1.0, 7.0)]);
        let mut only = vec![None];
        extend_channels(&mut only, &values, usize::MAX);
        assert_eq!(only, [ends(-6.0, 9.0)]);
        extend_channels(&mut [], &values, 2);
        extend_channels(&mut only, &values, 0);
    }

    #[test]
    fn values_of_other_runs_are_observed() {
        let calibration = Calibration::new(["a"], Wanted { histogram: true, moments: false });
        assert!(calibration.observe("a", &[1.0, -2.0]) && calibration.observe("a", &[4.0]));
        assert!(!calibration.observe("b", &[1.0]) && calibration.observer("b").is_none());
        let seen = calibration.observer("a").unwrap();
        assert_eq!(seen.extremes(), Some(Extremes { low: -2.0, high: 4.0 }));
        assert_eq!(seen.mean_extremes(), Some((1.0, 2.5)));
    }
}
