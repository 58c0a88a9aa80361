//! Persistent tensors: parameters, running statistics, optimizer state, gradient accumulators.
//!
//! Each tensor stays in the memory where the last stage wanted it: on the host or on the device
//! that updates it. So it is transferred only if the next stage runs elsewhere.

use std::collections::BTreeMap;
use std::sync::Arc;

use ort_alloc::DeviceId;
use ort_core::ep::Device;
use ort_core::session::SharedMemory;
use ort_core::tensor::{Tensor, TensorBuffer};
use ort_core::{Result, Within, advise, error};

/// Tensors by name. While a stage is attached, its binding owns the tensors that it needs, and they
/// are missing here.
pub(crate) struct State {
    tensors: BTreeMap<String, TensorBuffer>,
    memory: SharedMemory,
}

impl State {
    /// Creates an empty state for sessions on these devices.
    pub(crate) fn new(devices: &[Arc<dyn Device>]) -> State {
        State { tensors: BTreeMap::new(), memory: SharedMemory::of(devices) }
    }

    /// The devices whose memories may hold the tensors.
    pub(crate) fn devices(&self) -> &[Arc<dyn Device>] {
        self.memory.devices()
    }

    pub(crate) fn insert(&mut self, name: String, buffer: TensorBuffer) {
        self.tensors.insert(name, buffer);
    }

    /// Removes a tensor, for a stage that binds it.
    pub(crate) fn take(&mut self, name: &str) -> Result<TensorBuffer> {
        self.tensors.remove(name).ok_or_else(|| error!(Fail, "the training run has no tensor '{name}'"))
    }

    /// Whether the tensor is here and not lent to the attached stage.
    pub(crate) fn holds(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Moves a tensor to this memory. If the copy fails, for example because the memory is full,
    /// the tensor stays where it is.
    pub(crate) fn bring(&mut self, name: &str, memory: DeviceId) -> Result<()> {
        let there = self.get(name)?;
        if there.memory() != memory {
            let copy = self.memory.copy_in(memory, there).within(|| format!("tensor '{name}'"))?;
            self.insert(name.to_string(), copy);
        }
        Ok(())
    }

    /// Borrows a tensor. If there is none of that name, the error suggests similar names.
    pub(crate) fn get(&self, name: &str) -> Result<&TensorBuffer> {
        self.tensors.get(name).ok_or_else(|| {
            let known = self.tensors.keys().map(String::as_str);
            error!(InvalidArgument, "the training run has no tensor '{name}'")
                .help(advise("tensors", name, known))
        })
    }

    /// Copies a tensor to the host.
    pub(crate) fn tensor(&self, name: &str) -> Result<Tensor> {
        self.on_host(self.get(name)?)?.tensor()
    }

    /// Copies the buffer of one of these tensors to the host.
    pub(crate) fn on_host(&self, buffer: &TensorBuffer) -> Result<TensorBuffer> {
        self.memory.copy_in(DeviceId::HOST, buffer)
    }

    /// Overwrites a tensor in place with one of the same type and shape.
    pub(crate) fn write(&mut self, name: &str, from: &Tensor) -> Result<()> {
        self.get(name)?;
        let State { tensors, memory } = self;
        tensors.get_mut(name).map_or(Ok(()), |buffer| memory.copy(from, buffer))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, &TensorBuffer)> {
        self.tensors.iter().map(|(name, buffer)| (name.as_str(), buffer))
    }
}

/// The name of an optimizer state tensor in the trainer's state and in checkpoints.
pub(crate) fn state_name(parameter: &str, kind: &str) -> String {
    format!("{parameter}.{kind}")
}

/// The name of a parameter's gradient accumulator.
pub(crate) fn gradient_name(parameter: &str) -> String {
    format!("{parameter}.gradient")
}
