//! What a kernel sees when it runs: inputs, outputs, workspace.

use std::sync::Arc;
use std::time::Instant;

use ort_alloc::{Budget, Buffer, Category, DeviceId, HostAllocator, Reservation, SharedBuffer, allocate_in};
use smallvec::SmallVec;

use super::dynamic::{ValueMemory, ask_heap};
use super::interrupt::{self, UNITS_OF_A_TEXT, spend, spending};
use super::{CancelToken, Device, guard};
use crate::dtype::{DType, Element};
use crate::tensor::{
    DeviceRange, Shape, Tensor, TensorMut, TensorView, Value, ValueView, byte_count, element_count,
};
use crate::{Result, ensure, error};

/// What bounds a run: cancellation, a deadline, memory, threads.
#[derive(Clone, Debug)]
pub struct RunControl {
    /// The token that the caller may cancel.
    pub cancel: CancelToken,
    /// When the run gives up.
    pub deadline: Option<Instant>,
    /// What all memory of the session counts against.
    pub budget: Arc<Budget>,
    /// The threads inside one operator.
    pub threads: usize,
}

impl RunControl {
    /// An error once the run is cancelled or late. Long loops inside kernels ask this.
    pub fn check(&self) -> Result<()> {
        interrupt::check("the run", &self.cancel, self.deadline)
    }
}

/// Runs the subgraphs of a control-flow node.
pub trait NestedRun {
    /// Runs the subgraph at `index` on these inputs and returns its outputs.
    fn run(&mut self, index: usize, inputs: &[ValueView<'_>]) -> Result<Vec<Value>>;

    /// The shape of an output of the subgraph at `index` for inputs of these shapes, without
    /// running it; sizes that do not follow from them are 0. None if not even the rank is known.
    fn output_shape(&self, index: usize, inputs: &[Option<Shape>], output: usize) -> Option<Shape>;
}

/// Where one output goes.
pub enum OutputSlot<'a> {
    /// Nobody reads it.
    Unwanted,
    /// Memory is ready; `in_place` names the input whose elements it already holds.
    Ready {
        /// The tensor to write, until the kernel takes it.
        tensor: Option<TensorMut<'a>>,
        /// The input that shares its memory.
        in_place: Option<usize>,
    },
    /// The kernel hands over a value.
    Handed(Option<Value>),
}

/// An input and an output that may be the same memory.
pub enum Unary<'a, T> {
    /// Read one, write the other.
    Apart(&'a [T], &'a mut [T]),
    /// One slice that holds the input and takes the output.
    InPlace(&'a mut [T]),
}

/// The context of one kernel's run.
pub struct RunCx<'a> {
    pub(crate) inputs: SmallVec<[Option<ValueView<'a>>; 16]>,
    pub(crate) outputs: SmallVec<[OutputSlot<'a>; 4]>,
    pub(crate) workspace: Option<&'a mut [u8]>,
    pub(crate) device_workspace: Option<DeviceRange<'a>>,
    pub(crate) control: &'a RunControl,
    pub(crate) nested: Option<&'a mut (dyn NestedRun + 'a)>,
    /// Where values of unknown size go; none where it was made by hand.
    pub(crate) memory: Option<ValueMemory<'a>>,
    /// The devices that copy within their memories.
    pub(crate) devices: &'a [Arc<dyn Device>],
}

impl<'a> RunCx<'a> {
    /// A context made by hand, for tests of kernels.
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
            devices: &[],
        }
    }

    /// The number of input positions, left-out ones counted.
    pub fn input_count(&self) -> usize {
        self.inputs.len()
    }

    /// The number of output positions.
    pub fn output_count(&self) -> usize {
        self.outputs.len()
    }

    /// The tensor at an input that must be given.
    pub fn input(&self, index: usize) -> Result<TensorView<'a>> {
        self.input_value(index)?.tensor()
    }

    /// The tensor at an input that may be left out.
    pub fn find_input(&self, index: usize) -> Option<TensorView<'a>> {
        self.inputs.get(index).copied().flatten().and_then(|value| value.tensor().ok())
    }

    /// The value at an input that must be given.
    pub fn input_value(&self, index: usize) -> Result<ValueView<'a>> {
        let value = self.inputs.get(index).copied().flatten();
        value.ok_or_else(|| error!(InvalidArgument, "input {index} is missing"))
    }

    /// Whether an input is given (and was not consumed when the kernel was made, nor is in place).
    pub fn has_input(&self, index: usize) -> bool {
        matches!(self.inputs.get(index), Some(Some(_)))
    }

    /// Whether somebody reads an output.
    pub fn wants(&self, index: usize) -> bool {
        !matches!(self.outputs.get(index), None | Some(OutputSlot::Unwanted))
    }

    /// Takes the tensor to write at an output. Its shape is what inference says.
    pub fn output(&mut self, index: usize) -> Result<TensorMut<'a>> {
        match self.outputs.get_mut(index) {
            Some(OutputSlot::Ready { tensor, .. }) => {
                tensor.take().ok_or_else(|| error!(Fail, "output {index} was taken before"))
            }
            Some(OutputSlot::Handed(_)) => Err(error!(
                InvalidArgument,
                "the shape of output {index} does not follow from the inputs: they do not fit, or a size is too large"
            )),
            _ => Err(error!(Fail, "output {index} has no memory ready")),
        }
    }

    /// The shape of an output that is ready.
    pub fn output_shape(&self, index: usize) -> Option<&'a [usize]> {
        match self.outputs.get(index) {
            Some(OutputSlot::Ready { tensor: Some(tensor), .. }) => Some(tensor.shape()),
            _ => None,
        }
    }

    /// The input whose elements the output at `index` already holds, because both are the same
    /// memory.
    pub fn in_place(&self, index: usize) -> Option<usize> {
        match self.outputs.get(index) {
            Some(OutputSlot::Ready { in_place, .. }) => *in_place,
            _ => None,
        }
    }

    /// The elements of an input and an output that a map from one to the other needs.
    pub fn unary<T: Element>(&mut self, input: usize, output: usize) -> Result<Unary<'a, T>> {
        if self.in_place(output) == Some(input) {
            return Ok(Unary::InPlace(self.output(output)?.as_mut_slice()?));
        }
        let from = self.input(input)?.as_slice()?;
        Ok(Unary::Apart(from, self.output(output)?.as_mut_slice()?))
    }

    /// Hands over an output: a value, or a tensor whose shape only the kernel knows.
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

    /// The shape of an output of the subgraph at `index` for inputs of these shapes, without
    /// running it; sizes that do not follow from them are 0. None if not even the rank is known.
    pub fn subgraph_output(&self, index: usize, inputs: &[Option<Shape>], output: usize) -> Option<Shape> {
        self.nested.as_ref()?.output_shape(index, inputs, output)
    }

    /// Memory for an output whose shape only the kernel knows, counted in the budget.
    pub fn allocate(&self, dtype: DType, shape: &[usize]) -> Result<NewTensor> {
        let len = byte_count(dtype, shape)?;
        let bytes = len.max(LEAST_TENSOR);
        let buffer = match self.memory {
            Some(memory) => {
                let mut buffer = memory.allocate(DeviceId::HOST, Category::Dynamic, bytes)?;
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

    /// The same in a memory, which on a device holds nothing certain at first.
    pub fn allocate_in(&self, device: DeviceId, dtype: DType, shape: &[usize]) -> Result<NewTensor> {
        let memory = self.memory.filter(|_| device != DeviceId::HOST);
        let Some(memory) = memory else { return self.allocate(dtype, shape) };
        let len = byte_count(dtype, shape)?;
        let buffer = memory.allocate(device, Category::Dynamic, len)?.freeze();
        Ok(NewTensor { dtype, shape: shape.into(), memory: NewMemory::Device(buffer), len })
    }

    /// Copies a tensor to a byte of a new one in the same memory, where its elements lie from there
    /// on.
    pub fn write(&self, from: &TensorView<'_>, to: &mut NewTensor, start: usize) -> Result<()> {
        let len = byte_count(from.dtype(), from.shape())?;
        let end = start.checked_add(len).filter(|end| *end <= to.len);
        let end =
            end.ok_or_else(|| error!(Fail, "{len} bytes from {start} on are beyond a tensor of {}", to.len))?;
        let buffer = match &mut to.memory {
            NewMemory::Host(buffer) => {
                let bytes = host_bytes(buffer, to.len)?.get_mut(start..end);
                let bytes = bytes.ok_or_else(|| error!(Fail, "a tensor is too short"))?;
                interrupt::copy(from.bytes()?, bytes);
                return Ok(());
            }
            NewMemory::Device(buffer) => buffer,
        };
        let device = self.devices.iter().find(|device| device.memory() == buffer.device());
        let device =
            device.ok_or_else(|| error!(Fail, "no device of the session owns {}", buffer.device()))?;
        let range = DeviceRange { buffer, offset: start, len };
        guard::copy(&**device, *from, TensorMut::device(from.dtype(), from.shape(), range))
    }

    /// Counts bytes that the kernel takes besides its outputs, as long as the result lives.
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

    /// A tensor of strings, which the budget counts as they come and for as long as the tensor
    /// lives. The iterator is asked for no more once the budget refuses.
    ///
    /// # Errors
    ///
    /// The iterator does not give as many as the shape has elements, or the budget leaves too
    /// little.
    pub fn strings(&self, shape: &[usize], texts: impl IntoIterator<Item = String>) -> Result<Tensor> {
        let count = element_count(shape)?;
        let mut held = self.reserve(count.saturating_mul(size_of::<String>()))?;
        let mut elements = Vec::new();
        let reserved = elements.try_reserve_exact(count);
        reserved.map_err(|_| error!(OutOfMemory, "{count} strings"))?;
        // What is counted is a little ahead, so that not each string asks the budget.
        let (mut counted, mut bytes) = (0usize, 0usize);
        let mut texts = spending(UNITS_OF_A_TEXT, texts).take(count.saturating_add(1));
        while let Some(text) = texts.next() {
            ensure!(elements.len() < count, Fail, "more than {count} strings for shape {shape:?}");
            bytes = bytes.saturating_add(heap_bytes(&text));
            spend(text.len() / 4);
            if bytes > counted {
                let least = bytes - counted;
                let ahead = least.max(STRINGS_AHEAD);
                let (more, reserved) = match self.reserve(ahead) {
                    Ok(reserved) => (ahead, reserved),
                    Err(_) => (least, self.reserve_texts(least, &mut texts)?),
                };
                held.absorb(reserved);
                counted = counted.saturating_add(more);
            }
            elements.push(text);
        }
        held.shrink_to(count.saturating_mul(size_of::<String>()).saturating_add(bytes));
        Tensor::from_held_strings(shape, elements, Some(held))
    }

    /// Counts the bytes of one text. A refusal names what all that follow take as well, so that
    /// whoever raises the limit does not meet each of them.
    fn reserve_texts(&self, bytes: usize, rest: &mut impl Iterator<Item = String>) -> Result<Reservation> {
        self.reserve(bytes).or_else(|_| {
            let rest = rest.fold(0, |sum: usize, text| sum.saturating_add(heap_bytes(&text)));
            self.reserve(bytes.saturating_add(rest))
        })
    }

    /// An input as a value with memory of its own, where the input is, which the budget counts.
    pub fn own_input(&self, index: usize) -> Result<Value> {
        let view = match self.input_value(index)? {
            ValueView::Tensor(view) if view.dtype() != DType::String => view,
            ValueView::Tensor(view) => {
                let texts = view.strings()?.iter().cloned();
                return Ok(Value::Tensor(self.strings(view.shape(), texts)?));
            }
            other => return other.to_value(),
        };
        let mut copy = self.allocate_in(view.memory(), view.dtype(), view.shape())?;
        self.write(&view, &mut copy, 0)?;
        Ok(Value::Tensor(copy.finish()?))
    }

    /// Takes the scratch memory that the kernel asked for.
    pub fn workspace(&mut self) -> Result<&'a mut [u8]> {
        self.workspace.take().ok_or_else(|| error!(Fail, "the workspace was taken before"))
    }

    /// The scratch memory that a kernel on a device with memory of its own asked for; none where it
    /// asked for none.
    pub fn device_workspace(&self) -> Option<DeviceRange<'a>> {
        self.device_workspace
    }

    /// What bounds this run, for kernels that run another kernel inside.
    pub fn control(&self) -> &'a RunControl {
        self.control
    }

    /// The threads this run may use.
    pub fn threads(&self) -> usize {
        self.control.threads
    }

    /// An error once the run is cancelled or late.
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

/// What a tensor of a kernel's own counts for at least: without bytes of its own it still takes a
/// header, and a sequence may hold millions.
pub(crate) const LEAST_TENSOR: usize = 64;

/// How many bytes of strings are counted at once.
const STRINGS_AHEAD: usize = 4 << 10;

/// What a text takes of the heap beside its handle: heaps hand out multiples of 16 bytes with a
/// header of 8, and 32 at least.
fn heap_bytes(text: &String) -> usize {
    match text.capacity() {
        0 => 0,
        bytes => bytes.saturating_add(8).next_multiple_of(16).max(32),
    }
}

/// A tensor being written, in memory of its own.
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
    /// The elements to write, zero at first. An error on a device.
    pub fn as_mut_slice<T: Element>(&mut self) -> Result<&mut [T]> {
        let NewTensor { dtype, shape, memory, len } = self;
        TensorMut::host(*dtype, shape, memory.bytes_mut(*len)?).as_mut_slice()
    }

    /// The bytes to write, zero at first. An error on a device.
    pub fn bytes_mut(&mut self) -> Result<&mut [u8]> {
        self.memory.bytes_mut(self.len)
    }

    /// All of its elements, as far as they are written.
    pub fn view(&self) -> Result<TensorView<'_>> {
        self.first(&self.shape)
    }

    /// Its first elements, as a tensor of this shape.
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

    /// The memory that it is in.
    pub fn memory(&self) -> DeviceId {
        match &self.memory {
            NewMemory::Host(_) => DeviceId::HOST,
            NewMemory::Device(buffer) => buffer.device(),
        }
    }

    /// The finished tensor.
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
