//! Bindings: inputs and outputs of a session tied to memory once, and run many times.
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

use ort_alloc::{Budget, DeviceId};

use super::bound_run::Prepared;
use super::{Session, ValueSpec, check_type};
use crate::dim::Dim;
use crate::ep::{Device, guard};
use crate::ir::ValueType;
use crate::run::frame::Tables;
use crate::run::transfer::{Transfers, check_reachable, find, is_on_device, readable, value_on_host};
use crate::seeded::HashMap;
use crate::tensor::{Tensor, TensorBuffer, Value, ValueView};
use crate::{Error, Result, Within, advise, ensure, error};

/// The names and types of a session's inputs and outputs, and what else its bindings need.
pub(super) struct Signature {
    pub(super) inputs: Vec<ValueSpec>,
    pub(super) outputs: Vec<ValueSpec>,
    /// The places of inputs and of outputs by name.
    places: [HashMap<String, usize>; 2],
    /// The defaults of inputs.
    defaults: Vec<Option<Value>>,
    devices: Vec<Arc<dyn Device>>,
    /// What copies from the devices count against.
    budget: Arc<Budget>,
}

/// The places of names.
fn places(specs: &[ValueSpec]) -> HashMap<String, usize> {
    specs.iter().map(|spec| spec.name.clone()).zip(0..).collect()
}

impl Signature {
    /// The place of an input.
    fn input(&self, name: &str) -> Result<usize> {
        self.places[0].get(name).copied().ok_or_else(|| unknown("input", &self.inputs, name))
    }

    /// The place of an output.
    fn output(&self, name: &str) -> Result<usize> {
        self.places[1].get(name).copied().ok_or_else(|| unknown("output", &self.outputs, name))
    }

    fn transfers(&self) -> Transfers<'_> {
        Transfers { devices: &self.devices, budget: &self.budget }
    }
}

/// What an input is bound to.
#[derive(Debug)]
pub enum InputSource {
    /// A value, which is read where it lies: nodes on the device whose memory that is read it
    /// there, for others it is copied once in each run.
    Value(Value),
    /// A tensor that the binding holds and lets be written between runs.
    Buffer(TensorBuffer),
}

/// Where an output goes.
#[derive(Debug)]
pub enum OutputTarget {
    /// Into this tensor, in memory of the host or of a device, whose type and shape must be the
    /// output's.
    Buffer(TensorBuffer),
    /// Into memory of this device, of whatever size the run finds; from there the caller may bind
    /// it as an input. The session allocates it, and uses it again in the next run where the caller
    /// holds nothing of it any more.
    Device(DeviceId),
    /// Into the memory of the input of this name, which is bound to a [`TensorBuffer`]: a cache
    /// that is read as `past` and written as `present`.
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

/// What an output is bound to; its memory is among the binding's buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bound {
    Buffer,
    /// Memory that the session allocates.
    Memory(DeviceId),
    /// The buffer of the input at this position.
    Input(usize),
}

/// The memory that runs of one session read and write.
///
/// Values in memory of a device stay there: an input is read, and an output left, where it lies, so
/// that runs whose outputs are the inputs of the next, of the same or of another session on the
/// device, copy nothing and wait for nothing. What the host reads of such an input, and what the
/// host computes of such an output, is copied once in each run ([`Session::upload`],
/// [`Session::buffer_on`], [`Session::to_host`]).
///
/// On the CPU nothing is copied: inputs are read where they lie and outputs computed where they go.
/// The exceptions are inputs that are not aligned for their type, which are copied once when they
/// are bound, and outputs that are themselves an input, a constant or known from the shapes, or
/// whose kernel allocates (control flow), which are copied at the end.
///
/// After the first runs a run allocates nothing, as long as shapes stay, no output has a size that
/// only the run tells, and the caller keeps the [`RunOptions`](super::RunOptions), whose token is a
/// small allocation. Another shape is planned anew, once for each: a cache that grows by
/// concatenation has another shape in each step, one in a buffer of its greatest length has not.
/// Buffers of the caller are not counted in the session's budget.
///
/// A run that fails may have written to bound memory, a cache included.
pub struct IoBinding {
    pub(super) signature: Arc<Signature>,
    /// By input: the value it is bound to; none for those in buffers.
    pub(super) inputs: Vec<Option<Value>>,
    pub(super) outputs: Vec<Option<Bound>>,
    /// The inputs whose memory holds an output.
    shared: HashSet<usize>,
    /// For each input, then for each output, the memory it has here.
    pub(super) buffers: Vec<Option<TensorBuffer>>,
    /// Outputs of the last run that are not in buffers.
    pub(super) results: Vec<Option<Value>>,
    /// Whether the last run finished, so that outputs are there.
    pub(super) has_run: bool,
    pub(super) prepared: Option<Prepared>,
    pub(super) tables: Tables,
}

impl Session {
    /// A binding without outputs, in which inputs have their defaults.
    pub fn io_binding(&self) -> IoBinding {
        let signature = self.signature.get_or_init(|| {
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
    /// ([`Self::input_mut`]). What it was bound to before is let go of.
    ///
    /// # Errors
    ///
    /// There is no such input, its type or a size differs from the model's, its memory is none of
    /// the session's, or an output is bound to it.
    pub fn bind_input(&mut self, name: &str, source: impl Into<InputSource>) -> Result<()> {
        let index = self.signature.input(name)?;
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
                InputSource::Value(value) => (Some(readable(&value, self.signature.transfers())?), None),
                InputSource::Buffer(buffer) => (None, Some(buffer)),
            };
            *place = value;
            self.set_buffer(index, buffer);
        }
        self.prepared = None;
        Ok(())
    }

    /// Binds an output to a tensor, to the memory of a device, or to that of an input. Outputs that
    /// are not bound are not computed.
    ///
    /// # Errors
    ///
    /// There is no such output, it is bound already, its type or a size differs from the model's,
    /// the device is none of the session's or the output no tensor of numbers that it could hold,
    /// or the input has no [`TensorBuffer`] or holds an output already.
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
            OutputTarget::Device(DeviceId::HOST) => (Bound::Memory(DeviceId::HOST), None),
            OutputTarget::Device(device) => {
                find(&self.signature.devices, device).within(|| format!("output '{name}'"))?;
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
        self.prepared = None;
        self.has_run = false;
        Ok(())
    }

    /// The position of an input that may hold an output.
    fn input_to_share(&self, output: &str, input: &str) -> Result<usize> {
        let index = self.signature.input(input)?;
        ensure!(
            matches!(self.buffers.get(index), Some(Some(_))),
            InvalidArgument,
            help = "bind the input to a TensorBuffer first",
            "output '{output}' cannot be in the memory of input '{input}', which is bound to no buffer to write"
        );
        ensure!(
            !self.shared.contains(&index),
            InvalidArgument,
            help = "bind it to a buffer of its own",
            "output '{output}' cannot be in the memory of input '{input}': another output is"
        );
        Ok(index)
    }

    fn set_buffer(&mut self, place: usize, buffer: Option<TensorBuffer>) {
        if let Some(to) = self.buffers.get_mut(place) {
            *to = buffer;
        }
    }

    /// The buffer of an input, to be written before the next run.
    ///
    /// # Errors
    ///
    /// There is no such input, or it is not bound to a [`TensorBuffer`].
    pub fn input_mut(&mut self, name: &str) -> Result<&mut TensorBuffer> {
        let index = self.signature.input(name)?;
        let buffer = self.buffers.get_mut(index).and_then(Option::as_mut);
        buffer.ok_or_else(|| {
            error!(InvalidArgument, "input '{name}' is bound to no buffer to write")
                .help("bind it to a TensorBuffer")
        })
    }

    /// An output of the last run, where it lies.
    ///
    /// # Errors
    ///
    /// There is no such output, it is not bound, or nothing was run since it was bound.
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
        if let Some(Some(value)) = self.results.get(index) {
            return Ok(value.view());
        }
        let buffer = self.buffers.get(self.place_of(bound, index)).and_then(Option::as_ref);
        let buffer = buffer.ok_or_else(|| error!(Fail, "output '{name}' has no memory"))?;
        Ok(ValueView::Tensor(buffer.view()))
    }

    /// The place of an output's buffer.
    pub(super) fn place_of(&self, bound: Bound, index: usize) -> usize {
        match bound {
            Bound::Input(input) => input,
            Bound::Buffer | Bound::Memory(_) => self.inputs.len() + index,
        }
    }

    /// The bound outputs of the last run, in the model's order. They share the memory that is
    /// bound: while one of a caller's buffer lives, the next run is refused; memory of the session
    /// is left to it and new memory taken.
    ///
    /// # Errors
    ///
    /// Nothing was run since an output was bound.
    pub fn get_outputs(&self) -> Result<Vec<(String, Value)>> {
        self.each_output(IoBinding::shared)
    }

    /// One of [`Self::get_outputs`].
    ///
    /// # Errors
    ///
    /// There is no such output, it is not bound, or nothing was run since it was bound.
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

    /// The bound outputs of the last run, in the model's order, copied to memory of the host of
    /// their own. What is on a device is waited for.
    ///
    /// # Errors
    ///
    /// Nothing was run since an output was bound.
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

    /// Lets go of what inputs are bound to; those with a default have it again. Outputs in the
    /// memory of inputs are let go of, too.
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

    /// Takes the buffers out that inputs are bound to, by name; nothing is bound afterwards, and
    /// inputs with defaults have those. For buffers that several sessions use in turn.
    pub fn take_buffers(&mut self) -> Vec<(String, TensorBuffer)> {
        let inputs = self.buffers.iter_mut().zip(&self.signature.inputs);
        let taken = inputs.filter_map(|(buffer, spec)| Some((spec.name.clone(), buffer.take()?))).collect();
        self.clear_binding_inputs();
        self.clear_binding_outputs();
        taken
    }

    /// Lets go of what outputs are bound to, and of those of the last run.
    pub fn clear_binding_outputs(&mut self) {
        self.outputs.fill(None);
        self.shared.clear();
        self.results.fill(None);
        let count = self.inputs.len();
        self.buffers.iter_mut().skip(count).for_each(|buffer| *buffer = None);
        self.prepared = None;
        self.has_run = false;
    }

    /// Waits until bound inputs are where the session's devices read them: copies to and
    /// computations on a device may still be under way. Runs on the device come after them in any
    /// case.
    ///
    /// # Errors
    ///
    /// What a device failed at meanwhile.
    pub fn synchronize_inputs(&self) -> Result<()> {
        self.signature.devices.iter().try_for_each(|device| guard::synchronize(&**device))
    }

    /// Waits until the session's devices have written the outputs. Whoever reads them on the
    /// device, or copies them from there, need not.
    ///
    /// # Errors
    ///
    /// What a device failed at meanwhile.
    pub fn synchronize_outputs(&self) -> Result<()> {
        self.synchronize_inputs()
    }
}

fn unknown(kind: &str, specs: &[ValueSpec], name: &str) -> Error {
    let names = specs.iter().map(|spec| spec.name.as_str());
    let kinds = if kind == "input" { "inputs" } else { "outputs" };
    error!(InvalidArgument, "the model has no {kind} '{name}'").help(advise(kinds, name, names))
}

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

/// Refuses ranks and fixed sizes that differ from the declared ones. Symbolic sizes are compared
/// when it runs.
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
