//! Session signature: the inputs and outputs by name, with their types and defaults, for IO
//! bindings.

use std::sync::Arc;

use ort_alloc::Budget;

use super::value_spec::ValueSpec;
use crate::ep::Device;
use crate::run::transfer::Transfers;
use crate::seeded::HashMap;
use crate::tensor::Value;
use crate::{Error, Result, advise, error};

/// The inputs and outputs of a session, and its devices and budget, for its bindings.
pub(super) struct Signature {
    pub(super) inputs: Vec<ValueSpec>,
    pub(super) outputs: Vec<ValueSpec>,
    /// The index of each input, and the index of each output, by name.
    pub(super) places: [HashMap<String, usize>; 2],
    /// The default of each input that has one.
    pub(super) defaults: Vec<Option<Value>>,
    pub(super) devices: Vec<Arc<dyn Device>>,
    /// The budget for copies from the devices.
    pub(super) budget: Arc<Budget>,
}

/// Maps names to indices.
pub(super) fn places(specs: &[ValueSpec]) -> HashMap<String, usize> {
    specs.iter().map(|spec| spec.name.clone()).zip(0..).collect()
}

impl Signature {
    /// The index of an input.
    pub(super) fn input(&self, name: &str) -> Result<usize> {
        self.places[0].get(name).copied().ok_or_else(|| unknown("input", &self.inputs, name))
    }

    /// The index of an output.
    pub(super) fn output(&self, name: &str) -> Result<usize> {
        self.places[1].get(name).copied().ok_or_else(|| unknown("output", &self.outputs, name))
    }

    pub(super) fn transfers(&self) -> Transfers<'_> {
        Transfers { devices: &self.devices, budget: &self.budget }
    }
}

fn unknown(kind: &str, specs: &[ValueSpec], name: &str) -> Error {
    let names = specs.iter().map(|spec| spec.name.as_str());
    let kinds = if kind == "input" { "inputs" } else { "outputs" };
    error!(InvalidArgument, "the model has no {kind} '{name}'").help(advise(kinds, name, names))
}
