//! Kernel run context: inputs, outputs, workspace and run-time allocation.

use std::sync::Arc;
use std::time::Instant;

use ort_alloc::{Budget, Buffer, Category, DeviceId, HostAllocator, Reservation, SharedBuffer, allocate_in};

use super::CancelToken;
use super::dynamic::{ValueMemory, ask_heap};
use super::interrupt::{self, UNITS_OF_A_TEXT, spend, spending};
use crate::dtype::{DType, Element};
use crate::tensor::{
    CompactString, DeviceRange, Shape, Tensor, TensorMut, TensorView, Value, ValueView, byte_count,
    element_count, heap_bytes,
};
use crate::{Result, ensure, error};

/// The limits of a run: cancellation, deadline, memory, threads.
#[derive(Clone, Debug)]
pub struct RunControl {
    /// The caller's cancellation token.
    pub cancel: CancelToken,
    /// The time at which the run is cancelled.
    pub deadline: Option<Instant>,
    /// The budget for all memory of the session.
    pub budget: Arc<Budget>,
    /// The threads available inside one operator.
    pub threads: usize,
}

impl RunControl {
    /// Returns an error once the run is cancelled or past its deadline. Long loops in kernels poll
    /// this.
    pub fn check(&self) -> Result<()> {
        interrupt::check("the run", &self.cancel, self.deadline)
    }
}

/// Runs the subgraphs of a control-flow node.
pub trait NestedRun {
    /// Runs the subgraph at `index` on these inputs and returns its outputs.
    fn run(&mut self, index: usize, inputs: &[ValueView<'_>]) -> Result<Vec<Value>>;

    /// Infers the shape of an output of the subgraph at `index` for inputs of these shapes, without
    /// running it. Dimensions that do not follow from them are 0. `None` if not even the rank is
    /// known.
    fn output_shape(&self, index: usize, inputs: &[Option<Shape>], output: usize) -> Option<Shape>;
}

/// Copies within the memories of a session's devices.
pub(crate) trait DeviceCopies {
    /// Copies inside a device's memory; `None` if no device of the session owns it.
    fn copy(&self, memory: DeviceId, from: TensorView<'_>, to: TensorMut<'_>) -> Option<Result<()>>;
}

/// The destination of one output.
pub enum OutputSlot<'a> {
    /// The output has no reader.
    Unwanted,
    /// The output has planned memory.
    Ready {
        /// The tensor to write; `None` once the kernel took it.
        tensor: Option<TensorMut<'a>>,
        /// The input that the output aliases and whose elements it holds at first.
        in_place: Option<usize>,
    },
    /// The kernel hands over a value.
    Handed(Option<Value>),
}

/// The inputs of a step. A run reuses the list from step to step.
pub(crate) type InputViews<'a> = Vec<Option<ValueView<'a>>>;

/// The outputs of a step, in a list that is reused as well.
pub(crate) type OutputSlots<'a> = Vec<OutputSlot<'a>>;

/// The elements of an input and an output that may alias.
pub enum Unary<'a, T> {
    /// Separate memory: read the first, write the second.
    Apart(&'a [T], &'a mut [T]),
    /// Shared memory: the slice holds the input and is overwritten with the output.
    InPlace(&'a mut [T]),
}

/// The context of one kernel invocation.
pub struct RunCx<'a> {
    pub(crate) inputs: InputViews<'a>,
    pub(crate) outputs: OutputSlots<'a>,
    pub(crate) workspace: Option<&'a mut [u8]>,
    pub(crate) device_workspace: Option<DeviceRange<'a>>,
    pub(crate) control: &'a RunControl,
    pub(crate) nested: Option<&'a mut (dyn NestedRun + 'a)>,
    /// Allocates values of dynamic size; `None` in a context made by [`RunCx::new`].
    pub(crate) memory: Option<ValueMemory<'a>>,
    /// Copies within device memory; `None` in a context made by [`RunCx::new`].
    pub(crate) copies: Option<&'a dyn DeviceCopies>,
}

impl<'a> RunCx<'a> {
    /// Creates a context without a session: for tests of kernels, and for kernels of a provider
    /// library.
    pub fn new(
        inputs: impl IntoIterator<Item = Option<ValueView<'a>>>,
        outputs: impl IntoIterator<Item = OutputSlot<'a>>,
        workspace: &'a mut [u8],
        control: &'a RunControl,
    ) -> RunCx<'a> {
        RunCx {
            inputs: inputs.into_iter().collect(),
            outputs: outputs.into_iter().collect(),
            workspace: Some(workspace),
            device_workspace: None,
            control,
            nested: None,
            memory: None,
            copies: None,
        }
    }

    /// The number of input positions, including those left out.
    pub fn input_count(&self) -> usize {
        self.inputs.len()
    }

    /// The number of output positions.
    pub fn output_count(&self) -> usize {
        self.outputs.len()
    }

    /// Returns the tensor at a required input.
    pub fn input(&self, index: usize) -> Result<TensorView<'a>> {
        self.input_value(index)?.tensor()
    }

    /// Returns the tensor at an optional input.
    pub fn find_input(&self, index: usize) -> Option<TensorView<'a>> {
        self.inputs.get(index).copied().flatten().and_then(|value| value.tensor().ok())
    }

    /// Returns the value at a required input.
    pub fn input_value(&self, index: usize) -> Result<ValueView<'a>> {
        let value = self.inputs.get(index).copied().flatten();
        value.ok_or_else(|| error!(InvalidArgument, "input {index} is missing"))
    }

    /// Whether an input is present: given, not consumed at compile time, and not overwritten in
    /// place.
    pub fn has_input(&self, index: usize) -> bool {
        matches!(self.inputs.get(index), Some(Some(_)))
    }

    /// Whether an output has a reader.
    pub fn wants(&self, index: usize) -> bool {
        !matches!(self.outputs.get(index), None | Some(OutputSlot::Unwanted))
    }

    /// Takes the tensor to write for an output. It has the inferred shape.
    pub fn output(&mut self, index: usize) -> Result<TensorMut<'a>> {
        match self.outputs.get_mut(index) {
            Some(OutputSlot::Ready { tensor, .. }) => {
                tensor.take().ok_or_else(|| error!(Fail, "output {index} was taken before"))
            }
            Some(OutputSlot::Handed(_)) => Err(error!(
                InvalidArgument,
                "the shape of output {index} cannot be computed from the inputs: their shapes do not match, or a size is too large"
            )),
            _ => Err(error!(Fail, "output {index} has no memory ready")),
        }
    }

    /// The shape of an output in planned memory.
    pub fn output_shape(&self, index: usize) -> Option<&'a [usize]> {
        match self.outputs.get(index) {
            Some(OutputSlot::Ready { tensor: Some(tensor), .. }) => Some(tensor.shape()),
            _ => None,
        }
    }

    /// The input that the output at `index` aliases, if any. The output then holds the input's
    /// elements.
    pub fn in_place(&self, index: usize) -> Option<usize> {
        match self.outputs.get(index) {
            Some(OutputSlot::Ready { in_place, .. }) => *in_place,
            _ => None,
        }
    }

    /// Returns the elements of an input and an output for an elementwise map, in place or not.
    pub fn unary<T: Element>(&mut self, input: usize, output: usize) -> Result<Unary<'a, T>> {
        if self.in_place(output) == Some(input) {
            return Ok(Unary::InPlace(self.output(output)?.as_mut_slice()?));
        }
        let from = self.input(input)?.as_slice()?;
        Ok(Unary::Apart(from, self.output(output)?.as_mut_slice()?))
    }

    /// Hands over an output: a value, or a tensor whose shape only the kernel knows. A value for an
    /// output without a reader is dropped.
    pub fn set(&mut self, index: usize, value: impl Into<Value>) -> Result<()> {
        match self.outputs.get_mut(index) {
            None | Some(OutputSlot::Unwanted) => Ok(()),
            Some(OutputSlot::Handed(slot)) => {
                *slot = Some(value.into());
                Ok(())
            }
            Some(OutputSlot::Ready { .. }) => Err(error!(Fail, "output {index} has memory of the plan")),
        }
    }

    /// Infers the shape of an output of the subgraph at `index` for inputs of these shapes, without
    /// running it. Dimensions that do not follow from them are 0. `None` if not even the rank is
    /// known.
    pub fn subgraph_output(&self, index: usize, inputs: &[Option<Shape>], output: usize) -> Option<Shape> {
        self.nested.as_ref()?.output_shape(index, inputs, output)
    }

    /// Allocates a zeroed host tensor for an output of data-dependent shape, counted in the budget.
    pub fn allocate(&self, dtype: DType, shape: &[usize]) -> Result<NewTensor> {
        let len = byte_count(dtype, shape)?;
        let bytes = len.max(LEAST_TENSOR);
        let buffer = match self.memory {
            Some(memory) => {
                let mut buffer = memory.allocate(DeviceId::HOST, Category::Dynamic, bytes)?;
                // An arena hands out stale bytes. The host allocator returns zeros by itself.
                if memory.is_reused() {
                    interrupt::fill(host_bytes(&mut buffer, bytes)?, 0);
                }
                buffer
            }
            None => {
                let (budget, host) = (&self.control.budget, HostAllocator::global());
                allocate_in(budget, Category::Dynamic, &**host, bytes, 64)?
            }
        };
        Ok(NewTensor { dtype, shape: shape.into(), memory: NewMemory::Host(buffer), len })
    }

    /// As [`Self::allocate`], in the memory of a device. Device memory is uninitialized.
    pub fn allocate_in(&self, device: DeviceId, dtype: DType, shape: &[usize]) -> Result<NewTensor> {
        let memory = self.memory.filter(|_| device != DeviceId::HOST);
        let Some(memory) = memory else { return self.allocate(dtype, shape) };
        let len = byte_count(dtype, shape)?;
        let buffer = memory.allocate(device, Category::Dynamic, len)?.freeze();
        Ok(NewTensor { dtype, shape: shape.into(), memory: NewMemory::Device(buffer), len })
    }

    /// Copies a tensor into a new one in the same memory, from byte `start` on.
    pub fn write(&self, from: &TensorView<'_>, to: &mut NewTensor, start: usize) -> Result<()> {
        let len = byte_count(from.dtype(), from.shape())?;
        let end = start.checked_add(len).filter(|end| *end <= to.len);
        let end = end.ok_or_else(|| {
            error!(Fail, "{len} bytes at offset {start} are out of range for a tensor of {}", to.len)
        })?;
        let buffer = match &mut to.memory {
            NewMemory::Host(buffer) => {
                let bytes = host_bytes(buffer, to.len)?.get_mut(start..end);
                let bytes = bytes.ok_or_else(|| error!(Fail, "a tensor is too short"))?;
                interrupt::copy(from.bytes()?, bytes);
                return Ok(());
            }
            NewMemory::Device(buffer) => buffer,
        };
        let range = DeviceRange { buffer, offset: start, len };
        let to = TensorMut::device(from.dtype(), from.shape(), range);
        let copied = self.copies.and_then(|copies| copies.copy(buffer.device(), *from, to));
        copied.unwrap_or_else(|| Err(error!(Fail, "no device of the session owns {}", buffer.device())))
    }

    /// Reserves bytes that the kernel takes besides its outputs, until the result is dropped.
    pub fn reserve(&self, bytes: usize) -> Result<Reservation> {
        let reserve = || {
            let reservation = self.control.budget.reserve(Category::Dynamic, bytes)?;
            ask_heap(bytes).map(|()| reservation)
        };
        match self.memory {
            Some(ValueMemory { memory, .. }) => memory.reserve_for(reserve),
            None => Ok(reserve()?),
        }
    }

    /// Collects a tensor of strings. The budget counts them as they arrive and for as long as the
    /// tensor lives. If the budget refuses, the remaining strings are only measured, so that the
    /// error names a sufficient limit.
    ///
    /// # Errors
    ///
    /// The iterator does not yield as many strings as the shape has elements, or the budget is too
    /// small.
    pub fn strings<S: Into<CompactString>>(
        &self,
        shape: &[usize],
        texts: impl IntoIterator<Item = S>,
    ) -> Result<Tensor> {
        let count = element_count(shape)?;
        let mut held = self.reserve(count.saturating_mul(size_of::<CompactString>()))?;
        let mut elements = Vec::new();
        let reserved = elements.try_reserve_exact(count);
        reserved.map_err(|_| error!(OutOfMemory, "{count} strings"))?;
        // Reserve in steps of `STRINGS_AHEAD`, because a reservation per string would be slow.
        let (mut counted, mut bytes) = (0usize, 0usize);
        // One string more than needed, to detect an iterator that is too long without draining it.
        let texts = spending(UNITS_OF_A_TEXT, texts).take(count.saturating_add(1));
        let mut texts = texts.map(Into::into);
        while let Some(text) = texts.next() {
            ensure!(elements.len() < count, Fail, "more than {count} strings for shape {shape:?}");
            bytes = bytes.saturating_add(heap_bytes(&text));
            spend(text.len() / 4);
            if bytes > counted {
                let least = bytes - counted;
                let ahead = least.max(STRINGS_AHEAD);
                let (more, reserved) = match self.reserve(ahead) {
                    Ok(reserved) => (ahead, reserved),
                    // Without the slack it may still fit.
                    Err(_) => (least, self.reserve_texts(least, &mut texts)?),
                };
                held.absorb(reserved);
                counted = counted.saturating_add(more);
            }
            elements.push(text);
        }
        held.shrink_to(count.saturating_mul(size_of::<CompactString>()).saturating_add(bytes));
        Tensor::from_held_strings(shape, elements, Some(held))
    }

    /// Reserves the bytes of one string. A refusal also counts all strings that follow, so that one
    /// raise of the limit is enough.
    fn reserve_texts(
        &self,
        bytes: usize,
        rest: &mut impl Iterator<Item = CompactString>,
    ) -> Result<Reservation> {
        self.reserve(bytes).or_else(|_| {
            let rest = rest.fold(0, |sum: usize, text| sum.saturating_add(heap_bytes(&text)));
            self.reserve(bytes.saturating_add(rest))
        })
    }

    /// Copies an input to a value with its own memory, on the same device and counted in the
    /// budget. Strings never change, so a whole tensor of them is shared instead.
    pub fn own_input(&self, index: usize) -> Result<Value> {
        let view = match self.input_value(index)? {
            ValueView::Tensor(view) if view.dtype() != DType::String => view,
            ValueView::Tensor(view) => {
                if let Some(shared) = view.shared_strings() {
                    return Ok(Value::Tensor(shared));
                }
                let texts = view.strings()?.iter().cloned();
                return Ok(Value::Tensor(self.strings(view.shape(), texts)?));
            }
            other => return other.to_value(),
        };
        let mut copy = self.allocate_in(view.memory(), view.dtype(), view.shape())?;
        self.write(&view, &mut copy, 0)?;
        Ok(Value::Tensor(copy.finish()?))
    }

    /// Takes the workspace that the kernel asked for.
    pub fn workspace(&mut self) -> Result<&'a mut [u8]> {
        self.workspace.take().ok_or_else(|| error!(Fail, "the workspace was taken before"))
    }

    /// The workspace in device memory; `None` if the kernel needs none or runs on the host.
    pub fn device_workspace(&self) -> Option<DeviceRange<'a>> {
        self.device_workspace
    }

    /// The limits of this run, for kernels that run another kernel.
    pub fn control(&self) -> &'a RunControl {
        self.control
    }

    /// The threads available to this run.
    pub fn threads(&self) -> usize {
        self.control.threads
    }

    /// Returns an error once the run is cancelled or past its deadline.
    pub fn check(&self) -> Result<()> {
        self.control.check()
    }

    /// Runs the subgraph at `index` of this node.
    pub fn run_subgraph(&mut self, index: usize, inputs: &[ValueView<'_>]) -> Result<Vec<Value>> {
        let nested = self.nested.as_deref_mut();
        let nested = nested.ok_or_else(|| error!(Fail, "the node has no subgraph {index}"))?;
        nested.run(index, inputs)
    }
}

/// Minimum bytes counted for a tensor that a kernel allocates. An empty one still takes a header,
/// and a sequence may hold millions.
pub(crate) const LEAST_TENSOR: usize = 64;

/// Bytes of strings that are reserved ahead at a time.
const STRINGS_AHEAD: usize = 4 << 10;

/// A tensor under construction, with its own memory.
#[derive(Debug)]
pub struct NewTensor {
    dtype: DType,
    shape: Shape,
    memory: NewMemory,
    len: usize,
}

#[derive(Debug)]
enum NewMemory {
    Host(Buffer),
    Device(SharedBuffer),
}

impl NewTensor {
    /// The elements to write, zero at first. Fails on a device.
    pub fn as_mut_slice<T: Element>(&mut self) -> Result<&mut [T]> {
        let NewTensor { dtype, shape, memory, len } = self;
        TensorMut::host(*dtype, shape, memory.bytes_mut(*len)?).as_mut_slice()
    }

    /// The bytes to write, zero at first. Fails on a device.
    pub fn bytes_mut(&mut self) -> Result<&mut [u8]> {
        self.memory.bytes_mut(self.len)
    }

    /// A view of all elements, including those not written yet.
    pub fn view(&self) -> Result<TensorView<'_>> {
        self.first(&self.shape)
    }

    /// A view of the first elements as a tensor of this shape.
    pub fn first<'t>(&'t self, shape: &'t [usize]) -> Result<TensorView<'t>> {
        let len = byte_count(self.dtype, shape)?;
        let too_short = || error!(Fail, "a tensor is too short");
        ensure!(len <= self.len, Fail, "{len} bytes of a tensor of {}", self.len);
        Ok(match &self.memory {
            NewMemory::Host(buffer) => {
                let bytes = buffer.bytes().and_then(|bytes| bytes.get(..len));
                TensorView::host(self.dtype, shape, bytes.ok_or_else(too_short)?)
            }
            NewMemory::Device(buffer) => {
                TensorView::device(self.dtype, shape, DeviceRange { buffer, offset: 0, len })
            }
        })
    }

    /// The memory that the tensor is in.
    pub fn memory(&self) -> DeviceId {
        match &self.memory {
            NewMemory::Host(_) => DeviceId::HOST,
            NewMemory::Device(buffer) => buffer.device(),
        }
    }

    /// Freezes it into a tensor.
    pub fn finish(self) -> Result<Tensor> {
        match self.memory {
            NewMemory::Host(buffer) => Tensor::from_buffer(self.dtype, &self.shape, buffer),
            NewMemory::Device(buffer) => Tensor::from_device(self.dtype, &self.shape, buffer),
        }
    }
}

impl NewMemory {
    fn bytes_mut(&mut self, len: usize) -> Result<&mut [u8]> {
        match self {
            NewMemory::Host(buffer) => host_bytes(buffer, len),
            NewMemory::Device(buffer) => Err(error!(
                Fail,
                "the tensor is in the memory of {}, which the host does not write",
                buffer.device()
            )),
        }
    }
}

fn host_bytes(buffer: &mut Buffer, len: usize) -> Result<&mut [u8]> {
    let bytes = buffer.bytes_mut().and_then(|bytes| bytes.get_mut(..len));
    bytes.ok_or_else(|| error!(Fail, "a host buffer is not the host's"))
}
