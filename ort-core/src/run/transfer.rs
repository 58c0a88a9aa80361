//! Transfers: copies of tensors between the memories that a session works on.

use std::sync::Arc;

use ort_alloc::{Budget, Buffer, Category, DeviceId, HostAllocator, allocate_in};

use super::Executor;
use super::frame::Frame;
use crate::dtype::DType;
use crate::ep::dynamic::{DEVICE_ALIGNMENT, RunMemory};
use crate::ep::{Device, guard};
use crate::plan::Storage;
use crate::program::Origin;
use crate::tensor::{
    MapValue, OptionalValue, SequenceValue, SparseTensor, Tensor, TensorBuffer, TensorMut, TensorView, Value,
    ValueView, byte_count,
};
use crate::{Result, Within, ensure, error};

/// The devices that copy, and the budget for the staging buffer of a transfer between two of them.
#[derive(Clone, Copy)]
pub(crate) struct Transfers<'a> {
    pub(crate) devices: &'a [Arc<dyn Device>],
    pub(crate) budget: &'a Arc<Budget>,
}

impl Transfers<'_> {
    /// Copies a tensor to one of the same type and shape. A transfer between two devices is staged
    /// through the host.
    pub(crate) fn copy(&self, from: TensorView<'_>, to: TensorMut<'_>) -> Result<()> {
        ensure!(
            from.dtype() == to.dtype() && from.shape() == to.shape(),
            InvalidArgument,
            help = "give a tensor of that type and shape, or bind the output to a device, where it may have any size",
            "cannot write {}{:?} to a buffer of {}{:?}",
            from.dtype(),
            from.shape(),
            to.dtype(),
            to.shape()
        );
        match (from.memory(), to.memory()) {
            (DeviceId::HOST, DeviceId::HOST) => {
                to.bytes_mut()?.copy_from_slice(from.bytes()?);
                Ok(())
            }
            // A device copies within its memory, and to and from the host.
            (one, other) if one == other || other == DeviceId::HOST => {
                guard::copy(find(self.devices, one)?, from, to)
            }
            (DeviceId::HOST, other) => guard::copy(find(self.devices, other)?, from, to),
            (one, other) => {
                let (one, other) = (find(self.devices, one)?, find(self.devices, other)?);
                let bytes = byte_count(from.dtype(), from.shape())?;
                let host = &**HostAllocator::global();
                let mut between = allocate_in(self.budget, Category::Workspace, host, bytes, 64)?;
                let between = between.bytes_mut().ok_or_else(no_host_memory)?;
                guard::copy(one, from, TensorMut::host(from.dtype(), from.shape(), &mut *between))?;
                guard::copy(other, TensorView::host(from.dtype(), from.shape(), between), to)
            }
        }
    }

    /// Copies a tensor into `memory`.
    pub(crate) fn copied(&self, from: TensorView<'_>, memory: Buffer) -> Result<Tensor> {
        let mut copy = TensorBuffer::from_buffer(from.dtype(), from.shape(), memory)?;
        self.copy(from, copy.view_mut()?)?;
        copy.tensor()
    }
}

/// Memory on devices and on the host, for tensors that several sessions on these devices use in
/// turn ([`open_devices`](crate::session::open_devices)). The tensors count in no session's budget.
pub struct SharedMemory {
    devices: Vec<Arc<dyn Device>>,
    budget: Arc<Budget>,
}

impl SharedMemory {
    /// Creates shared memory over these devices and the host.
    pub fn of(devices: &[Arc<dyn Device>]) -> SharedMemory {
        SharedMemory { devices: devices.to_vec(), budget: Budget::new(None) }
    }

    /// The devices.
    pub fn devices(&self) -> &[Arc<dyn Device>] {
        &self.devices
    }

    /// Allocates a buffer for a tensor. Host memory is zeroed; the contents of device memory are
    /// unspecified.
    ///
    /// # Errors
    ///
    /// The type has no fixed size, `memory` belongs to another device, or there is not enough of
    /// it.
    pub fn buffer(&self, memory: DeviceId, dtype: DType, shape: &[usize]) -> Result<TensorBuffer> {
        if memory == DeviceId::HOST {
            return TensorBuffer::new(dtype, shape);
        }
        let allocator = guard::allocator(find(&self.devices, memory)?)?;
        let bytes = byte_count(dtype, shape)?;
        let buffer = allocate_in(&self.budget, Category::Output, &*allocator, bytes, DEVICE_ALIGNMENT)?;
        TensorBuffer::from_buffer(dtype, shape, buffer)
    }

    /// Copies a tensor into a buffer of the same type and shape, between any two memories.
    ///
    /// # Errors
    ///
    /// Type or shape differ, either memory belongs to another device, or a tensor still holds the
    /// buffer's memory.
    pub fn copy(&self, from: &Tensor, to: &mut TensorBuffer) -> Result<()> {
        let transfers = Transfers { devices: &self.devices, budget: &self.budget };
        transfers.copy(from.view(), to.view_mut()?)
    }

    /// Copies the contents of a buffer to a new buffer in `memory`.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::buffer`] and [`Self::copy`].
    pub fn copy_in(&self, memory: DeviceId, from: &TensorBuffer) -> Result<TensorBuffer> {
        let mut copy = self.buffer(memory, from.dtype(), from.shape())?;
        self.copy(&from.tensor()?, &mut copy)?;
        Ok(copy)
    }
}

/// Finds the device that owns `memory`.
pub(crate) fn find(devices: &[Arc<dyn Device>], memory: DeviceId) -> Result<&dyn Device> {
    let device = devices.iter().find(|device| device.memory() == memory);
    device.map(|device| &**device).ok_or_else(|| {
        let own = devices.iter().filter(|device| device.memory() != DeviceId::HOST);
        let own = own.map(|device| format!(", {} ({})", device.memory(), device.info().provider));
        error!(
            InvalidArgument,
            "the session has no memory of {memory}; its memories are host{}",
            own.collect::<String>()
        )
        .help("name one of these, or copy the tensor to the host with a session on its device: `Session::to_host`")
    })
}

/// Refuses values in the memory of a device that is not the session's.
pub(crate) fn check_reachable(devices: &[Arc<dyn Device>], value: ValueView<'_>) -> Result<()> {
    match value.tensor() {
        Ok(tensor) if !tensor.is_host() => find(devices, tensor.memory()).map(|_| ()),
        _ => Ok(()),
    }
}

/// Returns the value with all its tensors in host memory. Calls `to_host` for each tensor that is
/// not there yet.
pub(crate) fn on_host(value: &Value, to_host: &dyn Fn(&Tensor) -> Result<Tensor>) -> Result<Value> {
    let tensor = |tensor: &Tensor| if tensor.view().is_host() { Ok(tensor.clone()) } else { to_host(tensor) };
    Ok(match value {
        Value::Tensor(of) => Value::Tensor(tensor(of)?),
        Value::Sequence(SequenceValue { element_type, elements }) => {
            let elements = elements.iter().map(|element| on_host(element, to_host)).collect::<Result<_>>()?;
            Value::Sequence(SequenceValue { element_type: element_type.clone(), elements })
        }
        Value::Optional(OptionalValue { element_type, element }) => {
            let element = element.as_ref().map(|element| on_host(element, to_host).map(Box::new));
            Value::Optional(OptionalValue {
                element_type: element_type.clone(),
                element: element.transpose()?,
            })
        }
        Value::Map(MapValue { keys, values }) => {
            Value::Map(MapValue { keys: keys.clone(), values: Box::new(on_host(values, to_host)?) })
        }
        Value::Sparse(sparse) => Value::Sparse(Box::new(SparseTensor {
            values: tensor(&sparse.values)?,
            indices: tensor(&sparse.indices)?,
            shape: sparse.shape.clone(),
        })),
    })
}

/// Returns a value in the form that runs read: aligned. Tensors inside sequences, optionals, maps
/// and sparse tensors are copied to the host if they are on a device.
pub(crate) fn readable(value: &Value, transfers: Transfers<'_>) -> Result<Value> {
    match value {
        Value::Tensor(_) => value.to_aligned(),
        _ => value_on_host(value, transfers)?.to_aligned(),
    }
}

/// Returns the value in host memory.
pub(crate) fn value_on_host(value: &Value, transfers: Transfers<'_>) -> Result<Value> {
    on_host(value, &|tensor| {
        let bytes = byte_count(tensor.dtype(), tensor.shape())?;
        let host = &**HostAllocator::global();
        let memory = allocate_in(transfers.budget, Category::Output, host, bytes, 64)?;
        transfers.copied(tensor.view(), memory)
    })
}

fn no_host_memory() -> crate::Error {
    error!(Fail, "host memory is not the host's")
}

impl Executor {
    /// The transfers of the session, on its budget.
    pub(crate) fn transfers(&self) -> Transfers<'_> {
        Transfers { devices: &self.compiled.devices, budget: &self.budget }
    }

    /// Allocates memory for an output outside of a run.
    pub(crate) fn output_memory(&self, device: DeviceId, bytes: usize) -> Result<Buffer> {
        let budget = &self.budget;
        // Packed weights have to stay, because this call does not hold the weight lock exclusively.
        let memory =
            RunMemory { dynamic: &self.kept.dynamic, budget, evict: &|bytes| self.evict(bytes, false) };
        if device == DeviceId::HOST {
            let allocate = || allocate_in(budget, Category::Output, self.output_allocator(), bytes, 64);
            return memory.reserve_for(allocate);
        }
        find(&self.compiled.devices, device)?;
        memory.allocate_outside(device, Category::Output, bytes)
    }
}

impl Frame<'_> {
    /// The transfers of the run, on its budget.
    fn transfers(&self) -> Transfers<'_> {
        Transfers { devices: self.env.devices, budget: &self.env.control.budget }
    }

    /// Copies each input in device memory to the host if steps read it elsewhere, too.
    pub(crate) fn copy_given(&mut self) -> Result<()> {
        for &slot in &self.program.given {
            let (Some(planned), Some(known)) =
                (self.plan.slots.get(slot.index()), self.program.slots.get(slot.index()))
            else {
                continue;
            };
            let (Storage::Own | Storage::Dynamic, Origin::Given(index)) = (&planned.storage, &known.origin)
            else {
                continue;
            };
            let name = || format!("input '{}'", self.program.graph.value(known.value).name);
            let buffer = self.bound.get(*index).and_then(Option::as_ref);
            let value = self.given.get(*index).or(buffer.map(|buffer| ValueView::Tensor(buffer.view())));
            let from = value.ok_or_else(|| error!(Fail, "{} is not given", name()))?.tensor()?;
            let category = match planned.is_output {
                true => Category::Output,
                false => Category::Slab,
            };
            let memory = self.value_memory(DeviceId::HOST, category, from)?;
            let copy = self.transfers().copied(from, memory).within(name)?;
            if let Some(owned) = self.owned.get_mut(slot.index()) {
                *owned = Some(Value::Tensor(copy));
            }
        }
        Ok(())
    }

    /// Copies a tensor to the memory of `device`, on the run's budget.
    pub(crate) fn copied_to(
        &self,
        from: TensorView<'_>,
        device: DeviceId,
        category: Category,
    ) -> Result<Tensor> {
        self.transfers().copied(from, self.value_memory(device, category, from)?)
    }

    /// Allocates memory for a copy of a tensor, on the run's budget.
    fn value_memory(&self, device: DeviceId, category: Category, of: TensorView<'_>) -> Result<Buffer> {
        let bytes = byte_count(of.dtype(), of.shape())?;
        let (budget, memory) = (&self.env.control.budget, self.env.memory);
        if (device, category) == (DeviceId::HOST, Category::Output) {
            return memory.reserve_for(|| allocate_in(budget, category, self.env.outputs, bytes, 64));
        }
        memory.allocate_outside(device, category, bytes)
    }

    /// Delivers an output to its bound buffer, unless it was computed there. Without a buffer,
    /// returns the output as a value in the memory `wanted`.
    pub(crate) fn deliver(&mut self, output: usize, place: usize, wanted: DeviceId) -> Result<Option<Value>> {
        let (program, plan) = (self.program, self.plan);
        let slot = *plan.outputs.get(output).ok_or_else(|| error!(Fail, "there is no output {output}"))?;
        let planned = plan.slots.get(slot.index()).map(|planned| &planned.storage);
        if matches!(planned, Some(Storage::Bound(bound)) if *bound == place) {
            return Ok(None);
        }
        let Some(mut buffer) = self.bound.get_mut(place).and_then(Option::take) else {
            let memory = program.slots.get(slot.index()).map(|slot| slot.memory);
            let is_computed = self.owned.get(slot.index()).is_some_and(Option::is_some);
            // In this case `take_output` shares a value that has memory of its own, and copies any
            // other value on the host.
            if memory == Some(wanted) && (is_computed || wanted == DeviceId::HOST) {
                return self.take_output(slot).and_then(|value| self.detach(value)).map(Some);
            }
            let from = self.output_view(slot)?.tensor()?;
            let memory = self.value_memory(wanted, Category::Output, from)?;
            return Ok(Some(Value::Tensor(self.transfers().copied(from, memory)?)));
        };
        let copied = self
            .output_view(slot)
            .and_then(|value| self.transfers().copy(value.tensor()?, buffer.view_mut()?));
        // Put the buffer back even if the copy failed.
        if let Some(home) = self.bound.get_mut(place) {
            *home = Some(buffer);
        }
        copied.map(|()| None)
    }
}
