//! Statistics of the inputs of layers: the energy of each column, and the Hessian where there is
//! memory for it.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use half::f16;
use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::session::{RunOptions, Session, ValueObserver};
use ort_core::tensor::{TensorView, Value};

use super::patches::InputView;
use crate::hessian::Hessian;
use crate::observe::Channels;
use crate::parallel;

/// Inputs of layers that share their statistics, because they are multiplied with the same weight.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PruneInput {
    pub(crate) values: Vec<(String, InputView)>,
    /// The columns of the weight, for each group of a convolution.
    pub(crate) columns: usize,
    pub(crate) groups: usize,
    pub(crate) has_hessian: bool,
}

impl PruneInput {
    /// The names of the values.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.values.iter().map(|(name, _)| name.as_str())
    }

    /// Whether the Hessian is observed, too.
    pub fn has_hessian(&self) -> bool {
        self.has_hessian
    }

    /// The bytes that the Hessians and their factors take.
    pub(crate) fn bytes(&self) -> usize {
        // As those of `HessianInput`.
        self.columns.saturating_mul(self.columns).saturating_mul(12).saturating_mul(self.groups)
    }
}

/// The statistics of one group.
#[derive(Debug)]
pub(crate) struct GroupStatistics {
    channels: Channels,
    pub(crate) hessian: Option<Hessian>,
}

impl GroupStatistics {
    fn observe(&mut self, rows: &[f32], columns: usize) {
        self.channels.observe(rows, columns);
        if let Some(hessian) = &mut self.hessian {
            hessian.observe(rows, columns);
        }
    }

    /// The norms of the columns. `None` if there were no rows, or not of this length, or if an
    /// element was NaN or infinite.
    pub(crate) fn norms(&self, columns: usize) -> Option<Vec<f64>> {
        self.channels.ranges().filter(|ranges| ranges.len() == columns)?;
        Some(self.channels.mean_squares().into_iter().map(f64::sqrt).collect())
    }

    /// Whether there were rows, and all of them were zero.
    pub(crate) fn is_idle(&self, columns: usize) -> bool {
        self.norms(columns).is_some_and(|norms| norms.iter().all(|norm| *norm == 0.0))
    }

    /// The Hessian, if it says something about this number of columns.
    pub(crate) fn usable_hessian(&self, columns: usize) -> Option<&Hessian> {
        self.hessian.as_ref().filter(|hessian| hessian.channels() == columns && hessian.is_usable())
    }
}

/// The statistics of a calibration.
#[derive(Debug, Default)]
pub struct PruneStatistics {
    places: BTreeMap<String, Vec<(InputView, usize)>>,
    all: Vec<Vec<GroupStatistics>>,
    columns: Vec<usize>,
}

impl PruneStatistics {
    /// Statistics of no rows.
    pub fn new(inputs: &[PruneInput]) -> PruneStatistics {
        let mut places: BTreeMap<String, Vec<(InputView, usize)>> = BTreeMap::new();
        for (place, input) in inputs.iter().enumerate() {
            for (name, view) in &input.values {
                places.entry(name.clone()).or_default().push((view.clone(), place));
            }
        }
        let group = |input: &PruneInput| GroupStatistics {
            channels: Channels::default(),
            hessian: input.has_hessian.then(|| Hessian::new(input.columns)),
        };
        let all = inputs.iter().map(|input| (0..input.groups).map(|_| group(input)).collect()).collect();
        PruneStatistics { places, all, columns: inputs.iter().map(|input| input.columns).collect() }
    }

    /// Adds a value. Others than those of the inputs are left out.
    pub fn observe(&mut self, name: &str, values: &[f32], shape: &[usize]) {
        for (view, place) in self.places.get(name).into_iter().flatten() {
            let (Some(groups), Some(columns)) = (self.all.get_mut(*place), self.columns.get(*place)) else {
                continue;
            };
            let is_seen = match view {
                InputView::Rows => {
                    let last = shape.last().copied().unwrap_or(1);
                    groups.iter_mut().for_each(|group| group.observe(values, last));
                    Some(())
                }
                InputView::Patches(patches) => patches.each(values, shape, *columns, |group, rows| {
                    if let Some(group) = groups.get_mut(group) {
                        group.observe(rows, *columns);
                    }
                }),
            };
            if is_seen.is_none() {
                // A value of another shape makes all of them unusable, as a row of another length.
                groups.iter_mut().for_each(|group| group.observe(&[f32::NAN], 1));
            }
        }
    }

    /// The statistics of an input.
    pub(crate) fn get(&self, name: &str, view: &InputView) -> Option<&[GroupStatistics]> {
        let (_, place) = self.places.get(name)?.iter().find(|(other, _)| other == view)?;
        self.all.get(*place).map(Vec::as_slice)
    }
}

/// Runs of a model that observe the inputs of layers.
#[derive(Debug)]
pub struct PruneCalibration {
    statistics: Mutex<PruneStatistics>,
}

impl PruneCalibration {
    /// Creates statistics of these inputs, from [`Pruner::inputs`](crate::Pruner::inputs).
    pub fn new(inputs: &[PruneInput]) -> PruneCalibration {
        PruneCalibration { statistics: Mutex::new(PruneStatistics::new(inputs)) }
    }

    /// Runs a sample and observes it. Returns the outputs. The session is that of
    /// [`Calibration::session`](crate::Calibration::session).
    ///
    /// # Errors
    ///
    /// As [`Session::run`].
    pub fn run(&self, session: &Session, inputs: &[(&str, Value)]) -> Result<Vec<(String, Value)>> {
        session.run_with(inputs, &RunOptions { observer: Some(self), ..RunOptions::default() })
    }

    /// The statistics. A value that no run has reached has those of no rows.
    pub fn into_statistics(self) -> PruneStatistics {
        self.statistics.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ValueObserver for PruneCalibration {
    fn observe(&self, name: &str, tensor: TensorView<'_>) {
        let mut statistics = self.statistics.lock().unwrap_or_else(PoisonError::into_inner);
        if !statistics.places.contains_key(name) {
            return;
        }
        match tensor.dtype() {
            DType::F32 => {
                if let Ok(values) = tensor.to_cow::<f32>() {
                    statistics.observe(name, &values, tensor.shape());
                }
            }
            DType::F16 => {
                if let Ok(values) = tensor.to_cow::<f16>() {
                    let wide: Vec<f32> = values.iter().map(|value| value.to_f32()).collect();
                    statistics.observe(name, &wide, tensor.shape());
                }
            }
            // Layers of other types are not pruned.
            _ => {}
        }
    }
}

/// The energy of a layer's outputs, and of what pruning changes in them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct OutputEnergy {
    signal: f64,
    error: f64,
}

/// The outputs by which the energy is measured: it takes the square of the columns for each.
const OUTPUTS: usize = 64;

impl OutputEnergy {
    /// The energy of evenly spread rows of a matrix, all of them up to 64.
    pub(crate) fn of(before: &[f32], after: &[f32], columns: usize, hessian: &Hessian) -> OutputEnergy {
        let rows = before.len() / columns.max(1);
        let count = rows.min(OUTPUTS);
        let mut energies = vec![OutputEnergy::default(); count];
        let threads = parallel::threads_for(count * columns * columns / 16);
        let share = count.div_ceil(threads.max(1)).max(1);
        let jobs: Vec<(usize, &mut [OutputEnergy])> = energies.chunks_mut(share).enumerate().collect();
        parallel::for_each(jobs, |(job, energies)| {
            for (index, energy) in energies.iter_mut().enumerate() {
                let row = (job * share + index) * rows / count;
                let range = row * columns..(row + 1) * columns;
                let (Some(before), Some(after)) = (before.get(range.clone()), after.get(range)) else {
                    continue;
                };
                let wide = |values: &[f32]| -> Vec<f64> { values.iter().copied().map(f64::from).collect() };
                let (before, after) = (wide(before), wide(after));
                let change: Vec<f64> = before.iter().zip(&after).map(|(one, other)| other - one).collect();
                *energy = OutputEnergy { signal: hessian.form(&before), error: hessian.form(&change) };
            }
        });
        energies.into_iter().fold(OutputEnergy::default(), OutputEnergy::plus)
    }

    pub(crate) fn plus(self, other: OutputEnergy) -> OutputEnergy {
        OutputEnergy { signal: self.signal + other.signal, error: self.error + other.error }
    }

    /// The norm of the change over that of the outputs.
    pub(crate) fn relative(&self) -> Option<f64> {
        // Rounding may leave a little below zero.
        let share = self.error.max(0.0) / self.signal;
        (self.signal > 0.0 && share.is_finite()).then(|| share.sqrt())
    }
}
