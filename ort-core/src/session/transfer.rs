//! Transfers: tensors in the memories of a session's devices, and copies between them.

use std::sync::Arc;

use ort_alloc::DeviceId;

use super::Session;
use crate::Result;
use crate::dtype::DType;
use crate::ep::Device;
use crate::run::transfer::{check_reachable, on_host};
use crate::tensor::{Tensor, TensorBuffer, Value, ValueView, byte_count};

impl Session {
    /// The devices of the session, in the order of its providers. [`Device::memory`] names the
    /// memory of each, for [`Self::upload`] and
    /// [`IoBinding::bind_output`](super::IoBinding::bind_output).
    pub fn devices(&self) -> &[Arc<dyn Device>] {
        &self.executor.compiled.devices
    }

    /// Copies a tensor to the memory of one of the session's devices, or to the host. Corresponds
    /// to ONNX Runtime's `OrtValue.ortvalue_from_numpy`. The copy counts in the session's budget as
    /// an output until it is dropped.
    ///
    /// ```no_run
    /// use ort_core::session::{Model, RunOptions, Session};
    /// use ort_core::tensor::{Tensor, Value};
    ///
    /// let session = Session::builder(&Model::load("step.onnx")?).provider("wgpu").provider("cpu").build()?;
    /// let gpu = session.devices()[0].memory();
    /// let mut state = session.upload(&Tensor::from_slice(&[1, 64], &[0.0f32; 64])?, gpu)?;
    /// let mut binding = session.io_binding();
    /// binding.bind_output("next", gpu)?;
    /// for _ in 0..5 {
    ///     binding.bind_input("state", state)?;
    ///     session.run_with_binding(&mut binding, &RunOptions::default())?;
    ///     // The value stays on the device, and no call waits for the device to finish.
    ///     state = binding.get_outputs()?[0].1.tensor()?.clone();
    /// }
    /// println!("{:?}", session.to_host(&Value::Tensor(state))?.tensor()?.to_vec::<f32>()?);
    /// # Ok::<(), ort_core::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The tensor holds strings, either memory belongs to no device of the session, or the device
    /// has too little free memory.
    pub fn upload(&self, tensor: &Tensor, device: DeviceId) -> Result<Tensor> {
        check_reachable(self.devices(), ValueView::Tensor(tensor.view()))?;
        let memory = self.executor.output_memory(device, byte_count(tensor.dtype(), tensor.shape())?)?;
        self.executor.transfers().copied(tensor.view(), memory)
    }

    /// Returns the value in host memory. Tensors in host memory are shared. Tensors on the
    /// session's devices are copied once the device has computed them.
    ///
    /// # Errors
    ///
    /// A tensor is in memory of another device, or there is not enough memory.
    pub fn to_host(&self, value: &Value) -> Result<Value> {
        on_host(value, &|tensor| self.upload(tensor, DeviceId::HOST))
    }

    /// Allocates memory of one of the session's devices, or of the host, for a tensor that runs
    /// write: an output, or a cache that is both input and output. Its initial content is
    /// unspecified. The memory counts in the session's budget as an output until it is dropped.
    /// Corresponds to ONNX Runtime's `OrtValue.ortvalue_from_shape_and_type`.
    ///
    /// # Errors
    ///
    /// The type has no fixed size, the session does not have the device, or the device has too
    /// little free memory.
    pub fn buffer_on(&self, device: DeviceId, dtype: DType, shape: &[usize]) -> Result<TensorBuffer> {
        TensorBuffer::from_buffer(
            dtype,
            shape,
            self.executor.output_memory(device, byte_count(dtype, shape)?)?,
        )
    }

    /// Copies a tensor into a buffer of its type and shape, between any memories of the session.
    /// Corresponds to ONNX Runtime's `OrtValue.update_inplace`.
    ///
    /// # Errors
    ///
    /// Type or shape differ, either memory belongs to no device of the session, or a tensor still
    /// holds the buffer's memory.
    pub fn update_inplace(&self, buffer: &mut TensorBuffer, tensor: &Tensor) -> Result<()> {
        self.executor.transfers().copy(tensor.view(), buffer.view_mut()?)
    }
}
