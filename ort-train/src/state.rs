//! What a training keeps from step to step: parameters, statistics, the optimizer's states, sums of
//! gradients.
//!
//! Each tensor lies where the stage that had it last wanted it: in memory of the host, or of the
//! device that updates it.

use std::collections::BTreeMap;
use std::sync::Arc;

use ort_alloc::DeviceId;
use ort_core::ep::Device;
use ort_core::session::SharedMemory;
use ort_core::tensor::{Tensor, TensorBuffer};
use ort_core::{Result, Within, advise, error};

/// Tensors by name. While a stage runs, it has those that it needs.
pub(crate) struct State {
    tensors: BTreeMap<String, TensorBuffer>,
    memory: SharedMemory,
}

impl State {
    /// No tensors yet, for sessions on these devices.
    pub(crate) fn new(devices: &[Arc<dyn Device>]) -> State {
        State { tensors: BTreeMap::new(), memory: SharedMemory::of(devices) }
    }

    pub(crate) fn devices(&self) -> &[Arc<dyn Device>] {
        self.memory.devices()
    }

    pub(crate) fn insert(&mut self, name: String, buffer: TensorBuffer) {
        self.tensors.insert(name, buffer);
    }

    pub(crate) fn take(&mut self, name: &str) -> Result<TensorBuffer> {
        self.tensors.remove(name).ok_or_else(|| error!(Fail, "the training has no tensor '{name}'"))
    }

    /// Whether the tensor is here rather than lent to the stage that is entered.
    pub(crate) fn holds(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Has a tensor in this memory. Where there is no room it stays where it is.
    pub(crate) fn bring(&mut self, name: &str, memory: DeviceId) -> Result<()> {
        let there = self.get(name)?;
        if there.memory() != memory {
            let copy = self.memory.copy_in(memory, there).within(|| format!("tensor '{name}'"))?;
            self.insert(name.to_string(), copy);
        }
        Ok(())
    }

    pub(crate) fn get(&self, name: &str) -> Result<&TensorBuffer> {
        self.tensors.get(name).ok_or_else(|| {
            let known = self.tensors.keys().map(String::as_str);
            error!(InvalidArgument, "the training has no tensor '{name}'")
                .help(advise("tensors", name, known))
        })
    }

    /// A copy in memory of the host.
    pub(crate) fn tensor(&self, name: &str) -> Result<Tensor> {
        self.on_host(self.get(name)?)?.tensor()
    }

    /// A copy of one of the tensors in memory of the host.
    pub(crate) fn on_host(&self, buffer: &TensorBuffer) -> Result<TensorBuffer> {
        self.memory.copy_in(DeviceId::HOST, buffer)
    }

    /// Overwrites a tensor with one of its type and shape.
    pub(crate) fn write(&mut self, name: &str, from: &Tensor) -> Result<()> {
        self.get(name)?;
        let State { tensors, memory } = self;
        tensors.get_mut(name).map_or(Ok(()), |buffer| memory.copy(from, buffer))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, &TensorBuffer)> {
        self.tensors.iter().map(|(name, buffer)| (name.as_str(), buffer))
    }
}
