//! IO binding: binds the inputs and outputs of a session to memory once, for many runs.
//!
//! A binding checks names, types and fixed sizes when a value is bound. The run checks what depends
//! on several bound values (`bound_run`).
//!
//! ```no_run
//! use ort_core::dtype::DType;
//! use ort_core::session::{Model, RunOptions, Session};
//! use ort_core::tensor::TensorBuffer;
//!
//! let session = Session::builder(&Model::load("model.onnx")?).build()?;
//! let mut binding = session.io_binding();
//! binding.bind_input("input", TensorBuffer::new(DType::F32, &[1, 3, 224, 224])?)?;
//! binding.bind_output("output", TensorBuffer::new(DType::F32, &[1, 1000])?)?;
//! for image in [0.0f32, 0.5, 1.0] {
//!     binding.input_mut("input")?.as_mut_slice::<f32>()?.fill(image);
//!     session.run_with_binding(&mut binding, &RunOptions::default())?;
//!     println!("{:?}", binding.output("output")?.tensor()?.as_slice::<f32>()?.first());
//! }
//! # Ok::<(), ort_core::Error>(())
//! ```

use std::collections::HashSet;
use std::sync::Arc;

use ort_alloc::DeviceId;
use ort_alloc::fork::get_or_init;

use super::Session;
use super::signature::{Signature, places};
use super::value_spec::check_type;
use crate::dim::{Bindings, Dim};
use crate::ep::guard;
use crate::ir::ValueType;
use crate::plan::RunPlan;
use crate::run::inputs::is_on_device;
use crate::run::tables::Tables;
use crate::run::transfer::{check_reachable, find, readable, value_on_host};
use crate::tensor::{Tensor, TensorBuffer, Value, ValueView};
use crate::{Result, Within, ensure, error};

/// The source of an input.
#[derive(Debug)]
pub enum InputSource {
    /// A value that is read in place. Nodes on the device that holds it read it there; for other
    /// nodes each run copies it once.
    Value(Value),
    /// A tensor that the binding owns and that the caller can write between runs.
    Buffer(TensorBuffer),
}

/// The destination of an output.
#[derive(Debug)]
pub enum OutputTarget {
    /// This tensor, in host or device memory. Its type and shape must be those of the output.
    Buffer(TensorBuffer),
    /// Memory of this device, which the session allocates in the size that the run determines. The
    /// next run reuses the memory unless the caller still holds the output. The output can be bound
    /// as an input without a copy.
    Device(DeviceId),
    /// The buffer of the input with this name, which must be bound to a [`TensorBuffer`]. For
    /// example, a KV cache is read as `past` and written as `present` in one buffer.
    Input(String),
}

impl From<Value> for InputSource {
    fn from(value: Value) -> InputSource {
        InputSource::Value(value)
    }
}

impl From<Tensor> for InputSource {
    fn from(tensor: Tensor) -> InputSource {
        InputSource::Value(tensor.into())
    }
}

impl From<TensorBuffer> for InputSource {
    fn from(buffer: TensorBuffer) -> InputSource {
        InputSource::Buffer(buffer)
    }
}

impl From<TensorBuffer> for OutputTarget {
    fn from(buffer: TensorBuffer) -> OutputTarget {
        OutputTarget::Buffer(buffer)
    }
}

impl From<DeviceId> for OutputTarget {
    fn from(device: DeviceId) -> OutputTarget {
        OutputTarget::Device(device)
    }
}

/// The destination of a bound output. Its memory is in [`IoBinding::buffers`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bound {
    Buffer,
    /// Memory that the session allocates.
    Memory(DeviceId),
    /// The buffer of the input at this index.
    Input(usize),
}

/// The plan for a binding, valid until something else is bound.
pub(super) struct Prepared {
    pub(super) plan: Arc<RunPlan>,
    pub(super) bindings: Bindings,
    /// The session that made the plan, if the bound values contradict the dimension names.
    /// Otherwise the binding's own session made it.
    pub(super) independent: Option<Arc<Session>>,
}

/// The memory that the runs of one session read and write.
///
/// Values in device memory stay there: inputs are read in place and outputs are left in place. If
/// the outputs of a run are the inputs of the next, on this or another session on the same device,
/// nothing is copied and no call waits. If the host reads such an input or computes such an output,
/// each run copies it once. [`Session::upload`], [`Session::buffer_on`] and [`Session::to_host`]
/// place values on devices and read them back.
///
/// On the CPU a binding is zero-copy, with two exceptions. An input that is not aligned for its
/// type is copied once, when it is bound. Some outputs are copied at the end of the run: those that
/// are an input or a constant, those that follow from the shapes, and those that their kernel
/// allocates (control flow).
///
/// After the first runs, a run allocates nothing under three conditions. The shapes stay the same,
/// no output has a size known only at run time, and the caller reuses its
/// [`RunOptions`](super::RunOptions), whose token is a small allocation. Each new shape is planned
/// once. A KV cache that grows by concatenation has a new shape in each step; a cache in a buffer
/// of its maximum length does not. Buffers of the caller do not count in the session's budget.
///
/// A failed run may have written to bound memory, including caches.
pub struct IoBinding {
    pub(super) signature: Arc<Signature>,
    /// The value that each input is bound to; `None` for those in buffers.
    pub(super) inputs: Vec<Option<Value>>,
    pub(super) outputs: Vec<Option<Bound>>,
    /// The indices of the inputs whose memory also holds an output.
    shared: HashSet<usize>,
    /// The memory that the binding owns: one entry for each input, then one for each output.
    pub(super) buffers: Vec<Option<TensorBuffer>>,
    /// The outputs of the last run that are not in buffers.
    pub(super) results: Vec<Option<Value>>,
    /// Whether the last run succeeded, so that the outputs can be read.
    pub(super) has_run: bool,
    pub(super) prepared: Option<Prepared>,
    pub(super) tables: Tables,
}

impl Session {
    /// Returns a binding in which no output is bound, and each input with a default is bound to it.
    pub fn io_binding(&self) -> IoBinding {
        let signature = get_or_init(&self.signature, || {
            let graph = &self.executor.compiled.program.graph;
            let default = |id| graph.input_defaults.get(id).map(|tensor| Value::Tensor(tensor.clone()));
            let (inputs, outputs) = (self.inputs(), self.outputs());
            Arc::new(Signature {
                places: [places(&inputs), places(&outputs)],
                inputs,
                outputs,
                defaults: graph.inputs.iter().map(default).collect(),
                devices: self.executor.compiled.devices.clone(),
                budget: self.executor.budget.clone(),
            })
        });
        let outputs = signature.outputs.len();
        IoBinding {
            signature: signature.clone(),
            inputs: signature.defaults.clone(),
            outputs: vec![None; outputs],
            shared: HashSet::new(),
            buffers: (0..signature.inputs.len() + outputs).map(|_| None).collect(),
            results: vec![None; outputs],
            has_run: false,
            prepared: None,
            tables: Tables::default(),
        }
    }
}

impl IoBinding {
    /// Binds an input to a value, or to a buffer that can be written between runs
    /// ([`Self::input_mut`]). The previous value or buffer is dropped.
    ///
    /// # Errors
    ///
    /// There is no such input, its type or a fixed size differs from the model's, its memory
    /// belongs to no device of the session, or an output is bound to the input.
    pub fn bind_input(&mut self, name: &str, source: impl Into<InputSource>) -> Result<()> {
        let index = self.signature.input(name)?;
        // Rebinding the input would drop the buffer into which the output is written.
        ensure!(
            !self.shared.contains(&index),
            InvalidArgument,
            help = "clear the outputs first: `clear_binding_outputs`",
            "an output is bound to the memory of input '{name}'"
        );
        let source = source.into();
        let view = match &source {
            InputSource::Value(value) => value.view(),
            InputSource::Buffer(buffer) => ValueView::Tensor(buffer.view()),
        };
        if let (Some(spec), Some(place)) = (self.signature.inputs.get(index), self.inputs.get_mut(index)) {
            check_type(name, &spec.ty, &view)?;
            check_reachable(&self.signature.devices, view).within(|| format!("input '{name}'"))?;
            check_sizes(("input", name), &spec.ty, view)?;
            let (value, buffer) = match source {
                // Realign once here, instead of in each run.
                InputSource::Value(value) => (Some(readable(&value, self.signature.transfers())?), None),
                InputSource::Buffer(buffer) => (None, Some(buffer)),
            };
            // Both are set, because the input may have been bound to the other kind before.
            *place = value;
            self.set_buffer(index, buffer);
        }
        self.prepared = None;
        Ok(())
    }

    /// Binds an output to a tensor, to the memory of a device, or to the memory of an input.
    /// Outputs that are not bound are not computed.
    ///
    /// # Errors
    ///
    /// There is no such output, it is bound already, or its type or a fixed size differs from the
    /// model's. The session does not have the device, or the device cannot hold the output, because
    /// it is not a numeric tensor. The input is not bound to a [`TensorBuffer`], or another output
    /// is bound to it.
    pub fn bind_output(&mut self, name: &str, target: impl Into<OutputTarget>) -> Result<()> {
        let index = self.signature.output(name)?;
        ensure!(
            self.outputs.get(index) == Some(&None),
            InvalidArgument,
            help = "clear the outputs first: `clear_binding_outputs`",
            "output '{name}' is bound already"
        );
        let Some(spec) = self.signature.outputs.get(index) else { return Ok(()) };
        let (bound, buffer) = match target.into() {
            OutputTarget::Buffer(buffer) => {
                check_dtype(name, &spec.ty, buffer.view().dtype())?;
                check_sizes(("output", name), &spec.ty, ValueView::Tensor(buffer.view()))?;
                check_reachable(&self.signature.devices, ValueView::Tensor(buffer.view()))
                    .within(|| format!("output '{name}'"))?;
                (Bound::Buffer, Some(buffer))
            }
            // Host values may have any type, so there is nothing to check.
            OutputTarget::Device(DeviceId::HOST) => (Bound::Memory(DeviceId::HOST), None),
            OutputTarget::Device(device) => {
                find(&self.signature.devices, device).within(|| format!("output '{name}'"))?;
                // Device memory holds types of fixed size only: no strings, sequences or maps.
                ensure!(
                    spec.ty.dtype().is_some_and(|dtype| dtype.bits().is_some()),
                    InvalidArgument,
                    help = "bind it to `DeviceId::HOST`",
                    "output '{name}' is {}, which the memory of {device} does not hold",
                    spec.ty
                );
                (Bound::Memory(device), None)
            }
            OutputTarget::Input(input) => (Bound::Input(self.input_to_share(name, &input)?), None),
        };
        if let Some(place) = self.outputs.get_mut(index) {
            *place = Some(bound);
        }
        if let Bound::Input(input) = bound {
            self.shared.insert(input);
        }
        self.set_buffer(self.inputs.len() + index, buffer);
        // The plan was made without this output, and the last run did not compute it.
        self.prepared = None;
        self.has_run = false;
        Ok(())
    }

    /// Returns the index of an input whose buffer may hold an output.
    fn input_to_share(&self, output: &str, input: &str) -> Result<usize> {
        let index = self.signature.input(input)?;
        ensure!(
            matches!(self.buffers.get(index), Some(Some(_))),
            InvalidArgument,
            help = "bind the input to a TensorBuffer first",
            "output '{output}' cannot be in the memory of input '{input}', which is not bound to a buffer"
        );
        ensure!(
            !self.shared.contains(&index),
            InvalidArgument,
            help = "bind it to a buffer of its own",
            "output '{output}' cannot be in the memory of input '{input}': another output is"
        );
        Ok(index)
    }

    /// Sets the buffer at an index of [`IoBinding::buffers`].
    fn set_buffer(&mut self, place: usize, buffer: Option<TensorBuffer>) {
        if let Some(to) = self.buffers.get_mut(place) {
            *to = buffer;
        }
    }

    /// Returns the buffer of an input, to be written before the next run.
    ///
    /// # Errors
    ///
    /// There is no such input, or it is not bound to a [`TensorBuffer`].
    pub fn input_mut(&mut self, name: &str) -> Result<&mut TensorBuffer> {
        let index = self.signature.input(name)?;
        let buffer = self.buffers.get_mut(index).and_then(Option::as_mut);
        buffer.ok_or_else(|| {
            error!(InvalidArgument, "input '{name}' is not bound to a buffer")
                .help("bind it to a TensorBuffer")
        })
    }

    /// Returns an output of the last run, in place.
    ///
    /// # Errors
    ///
    /// There is no such output, it is not bound, or there was no run since it was bound.
    pub fn output(&self, name: &str) -> Result<ValueView<'_>> {
        self.output_at(self.signature.output(name)?)
    }

    fn output_at(&self, index: usize) -> Result<ValueView<'_>> {
        let name = self.signature.outputs.get(index).map_or("", |spec| &spec.name);
        let bound = self.outputs.get(index).copied().flatten();
        let bound = bound.ok_or_else(|| {
            error!(InvalidArgument, "output '{name}' is not bound").help("bind it first: `bind_output`")
        })?;
        ensure!(
            self.has_run,
            InvalidArgument,
            help = "run it first: `Session::run_with_binding`",
            "output '{name}' is not computed"
        );
        // Outputs that the run allocated are in `results`, not in buffers.
        if let Some(Some(value)) = self.results.get(index) {
            return Ok(value.view());
        }
        let buffer = self.buffers.get(self.place_of(bound, index)).and_then(Option::as_ref);
        let buffer = buffer.ok_or_else(|| error!(Fail, "output '{name}' has no memory"))?;
        Ok(ValueView::Tensor(buffer.view()))
    }

    /// The index of an output's memory in [`IoBinding::buffers`].
    pub(super) fn place_of(&self, bound: Bound, index: usize) -> usize {
        match bound {
            Bound::Input(input) => input,
            Bound::Buffer | Bound::Memory(_) => self.inputs.len() + index,
        }
    }

    /// Returns the bound outputs of the last run, in the model's order. They share the bound
    /// memory. While an output in a caller's buffer is alive, the next run is refused. If the
    /// session allocated the memory, the next run allocates new memory instead.
    ///
    /// # Errors
    ///
    /// There was no run since an output was bound.
    pub fn get_outputs(&self) -> Result<Vec<(String, Value)>> {
        self.each_output(IoBinding::shared)
    }

    /// Returns one of [`Self::get_outputs`].
    ///
    /// # Errors
    ///
    /// There is no such output, it is not bound, or there was no run since it was bound.
    pub fn shared_output(&self, name: &str) -> Result<Value> {
        let index = self.signature.output(name)?;
        self.output_at(index)?;
        let bound = self.outputs.get(index).copied().flatten();
        bound.map_or_else(|| Err(error!(Fail, "output '{name}' is gone")), |bound| self.shared(index, bound))
    }

    fn shared(&self, index: usize, bound: Bound) -> Result<Value> {
        if let Some(Some(value)) = self.results.get(index) {
            return Ok(value.clone());
        }
        let buffer = self.buffers.get(self.place_of(bound, index)).and_then(Option::as_ref);
        let buffer = buffer.ok_or_else(|| error!(Fail, "an output has no memory"))?;
        Ok(Value::Tensor(buffer.tensor()?))
    }

    /// Returns the bound outputs of the last run, in the model's order, each copied to host memory
    /// of its own. Waits until devices have computed their outputs.
    ///
    /// # Errors
    ///
    /// There was no run since an output was bound.
    pub fn copy_outputs_to_cpu(&self) -> Result<Vec<(String, Value)>> {
        let transfers = self.signature.transfers();
        self.each_output(|binding, index, bound| {
            let view = binding.output_at(index)?;
            match is_on_device(&view) {
                true => value_on_host(&binding.shared(index, bound)?, transfers),
                false => view.to_value(),
            }
        })
    }

    fn each_output(
        &self,
        value: impl Fn(&IoBinding, usize, Bound) -> Result<Value>,
    ) -> Result<Vec<(String, Value)>> {
        let mut values = Vec::new();
        for (index, (spec, bound)) in self.signature.outputs.iter().zip(&self.outputs).enumerate() {
            if let Some(bound) = bound {
                self.output_at(index)?;
                values.push((spec.name.clone(), value(self, index, *bound)?));
            }
        }
        Ok(values)
    }

    /// Unbinds all inputs; inputs with a default are bound to it again. Outputs in the memory of
    /// inputs are unbound as well.
    pub fn clear_binding_inputs(&mut self) {
        self.inputs.clone_from(&self.signature.defaults);
        let count = self.inputs.len();
        self.buffers.iter_mut().take(count).for_each(|buffer| *buffer = None);
        for bound in &mut self.outputs {
            *bound = bound.filter(|bound| !matches!(bound, Bound::Input(_)));
        }
        self.shared.clear();
        self.prepared = None;
    }

    /// Unbinds one input; an input with a default is bound to it again. An output in the input's
    /// memory is unbound as well.
    ///
    /// # Errors
    ///
    /// There is no such input.
    pub fn unbind_input(&mut self, name: &str) -> Result<()> {
        let index = self.signature.input(name)?;
        if let Some(place) = self.inputs.get_mut(index) {
            *place = self.signature.defaults.get(index).cloned().flatten();
        }
        self.set_buffer(index, None);
        for bound in &mut self.outputs {
            *bound = bound.filter(|bound| !matches!(bound, Bound::Input(input) if *input == index));
        }
        self.shared.remove(&index);
        self.prepared = None;
        Ok(())
    }

    /// Takes the buffers that inputs are bound to, by name. Afterwards only inputs with a default
    /// are bound, to that default. This is for buffers that several sessions use in turn.
    pub fn take_buffers(&mut self) -> Vec<(String, TensorBuffer)> {
        let inputs = self.buffers.iter_mut().zip(&self.signature.inputs);
        let taken = inputs.filter_map(|(buffer, spec)| Some((spec.name.clone(), buffer.take()?))).collect();
        self.clear_binding_inputs();
        self.clear_binding_outputs();
        taken
    }

    /// Unbinds one output and drops its value from the last run. Does nothing if the output is not
    /// bound.
    ///
    /// # Errors
    ///
    /// There is no such output.
    pub fn unbind_output(&mut self, name: &str) -> Result<()> {
        let index = self.signature.output(name)?;
        let bound = self.outputs.get_mut(index).and_then(Option::take);
        if let Some(Bound::Input(input)) = bound {
            self.shared.remove(&input);
        } else if bound.is_some() {
            self.set_buffer(self.inputs.len() + index, None);
        }
        if let Some(result) = self.results.get_mut(index) {
            *result = None;
        }
        self.prepared = None;
        self.has_run = false;
        Ok(())
    }

    /// Unbinds all outputs and drops their values from the last run.
    pub fn clear_binding_outputs(&mut self) {
        self.outputs.fill(None);
        self.shared.clear();
        self.results.fill(None);
        // The buffers of inputs are the first ones, and stay.
        let count = self.inputs.len();
        self.buffers.iter_mut().skip(count).for_each(|buffer| *buffer = None);
        self.prepared = None;
        self.has_run = false;
    }

    /// Waits until all pending copies and computations of bound inputs are done. A run on the same
    /// device needs no call: the device executes it after the pending work.
    ///
    /// # Errors
    ///
    /// An error that a device reported in the meantime.
    pub fn synchronize_inputs(&self) -> Result<()> {
        self.signature.devices.iter().try_for_each(|device| guard::synchronize(&**device))
    }

    /// Waits until the session's devices have written the outputs. No call is needed before a
    /// device reads the outputs, or before they are copied to the host.
    ///
    /// # Errors
    ///
    /// An error that a device reported in the meantime.
    pub fn synchronize_outputs(&self) -> Result<()> {
        self.synchronize_inputs()
    }
}

/// Refuses an output that is not a tensor of this type.
fn check_dtype(name: &str, expected: &ValueType, dtype: crate::dtype::DType) -> Result<()> {
    match expected.dtype() {
        Some(expected) if expected != dtype => Err(error!(
            InvalidArgument,
            "output '{name}' is {}, it cannot be bound to {}",
            expected.name(),
            dtype.name()
        )
        .help("bind it to a tensor of its type")),
        Some(_) => Ok(()),
        None => Err(error!(InvalidArgument, "output '{name}' is {expected}, it cannot be bound to a tensor")
            .help("bind it to `DeviceId::HOST`")),
    }
}

/// Refuses ranks and fixed sizes that differ from the declared ones. The run checks symbolic sizes.
fn check_sizes((kind, name): (&str, &str), expected: &ValueType, value: ValueView<'_>) -> Result<()> {
    let (Some(formal), Ok(tensor)) = (expected.shape(), value.tensor()) else { return Ok(()) };
    let agree = |(dim, &size): (&Dim, &usize)| dim.as_constant().is_none_or(|n| n == size as i64);
    ensure!(
        formal.len() == tensor.rank() && formal.iter().zip(tensor.shape()).all(agree),
        InvalidArgument,
        help = "the sizes must be those of the model",
        "{kind} '{name}' is {expected}, it cannot be bound to shape {:?}",
        tensor.shape()
    );
    Ok(())
}
