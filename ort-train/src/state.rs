//! What a training keeps from step to step: parameters, statistics, the optimizer's states, sums of gradients.

use std::collections::BTreeMap;

use ort_core::tensor::TensorBuffer;
use ort_core::{Result, advise, error};

/// Tensors by name. While a stage runs, it has those that it needs.
#[derive(Debug, Default)]
pub(crate) struct State(BTreeMap<String, TensorBuffer>);

impl State {
    pub(crate) fn insert(&mut self, name: String, buffer: TensorBuffer) {
        self.0.insert(name, buffer);
    }

    pub(crate) fn take(&mut self, name: &str) -> Result<TensorBuffer> {
        self.0.remove(name).ok_or_else(|| error!(Fail, "the training has no tensor '{name}'"))
    }

    pub(crate) fn get(&self, name: &str) -> Result<&TensorBuffer> {
        self.0.get(name).ok_or_else(|| self.unknown(name))
    }

    pub(crate) fn get_mut(&mut self, name: &str) -> Result<&mut TensorBuffer> {
        if !self.0.contains_key(name) {
            return Err(self.unknown(name));
        }
        self.0.get_mut(name).ok_or_else(|| error!(Fail, "a tensor is gone"))
    }

    fn unknown(&self, name: &str) -> ort_core::Error {
        let known = self.0.keys().map(String::as_str);
        error!(InvalidArgument, "the training has no tensor '{name}'").help(advise("tensors", name, known))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, &TensorBuffer)> {
        self.0.iter().map(|(name, buffer)| (name.as_str(), buffer))
    }
}
