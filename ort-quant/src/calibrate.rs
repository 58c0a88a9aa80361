//! Calibration: runs of a model on samples, in which observers see the values.
//!
//! A value is observed while the run has it in memory, so that a calibration takes the plan of a
//! run, and the observers, whatever the number of samples.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use half::f16;
use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::rewrite::{Level, Optimizer};
use ort_core::session::{RunOptions, Session, SessionBuilder, ValueObserver};
use ort_core::tensor::{TensorView, Value};

use crate::observe::{Observer, Wanted};

/// The observers of the values of a model.
#[derive(Debug)]
pub struct Calibration {
    observers: Mutex<BTreeMap<String, Observer>>,
}

impl Calibration {
    /// Creates observers for these values. Other values are not observed.
    pub fn new<N: Into<String>>(names: impl IntoIterator<Item = N>, wanted: Wanted) -> Calibration {
        let observers = names.into_iter().map(|name| (name.into(), Observer::new(wanted)));
        Calibration { observers: Mutex::new(observers.collect()) }
    }

    /// Builds a session in which each value of the model is computed, so that it can be observed:
    /// without rewrites, whatever level the builder has. It has to run on the CPU.
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
        session.run_with(inputs, &RunOptions { observer: Some(self), ..RunOptions::default() })
    }

    /// The observers by the names of their values. A value that no run has reached has seen no
    /// element.
    pub fn into_observers(self) -> BTreeMap<String, Observer> {
        self.observers.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ValueObserver for Calibration {
    fn observe(&self, name: &str, tensor: TensorView<'_>) {
        let mut observers = self.observers.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(observer) = observers.get_mut(name) else { return };
        match tensor.dtype() {
            DType::F32 => {
                if let Ok(values) = tensor.to_cow::<f32>() {
                    observer.observe(&values);
                }
            }
            DType::F16 => {
                if let Ok(values) = tensor.to_cow::<f16>() {
                    observer.observe_half(&values);
                }
            }
            // No other type is quantized.
            _ => {}
        }
    }
}
