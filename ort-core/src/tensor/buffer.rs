//! Tensors that can be written: memory for bound inputs and outputs.

use std::ops::Range;

use ort_alloc::{Allocator, Buffer, DeviceId, HostAllocator, SharedBuffer};

use super::{Data, DeviceRange, Shape, Tensor, TensorMut, TensorView, byte_count};
use crate::dtype::{DType, Element};
use crate::{Result, ensure, error};

/// A tensor that can be written, as long as nobody else holds its memory: by the host, or by
/// kernels of the device whose memory it is
/// ([`Session::buffer_on`](crate::session::Session::buffer_on)).
///
/// ```
/// use ort_core::dtype::DType;
/// use ort_core::tensor::TensorBuffer;
///
/// let mut buffer = TensorBuffer::new(DType::F32, &[2, 2])?;
/// buffer.as_mut_slice::<f32>()?.copy_from_slice(&[1.0, 2.0, 3.0, 4.0]);
/// let tensor = buffer.tensor()?;
/// assert_eq!(tensor.to_vec::<f32>()?, [1.0, 2.0, 3.0, 4.0]);
/// assert!(buffer.as_mut_slice::<f32>().is_err(), "the tensor holds the memory, too");
/// drop(tensor);
/// assert!(buffer.as_mut_slice::<f32>().is_ok());
/// # Ok::<(), ort_core::Error>(())
/// ```
#[derive(Debug)]
pub struct TensorBuffer {
    dtype: DType,
    shape: Shape,
    /// Where its bytes begin in the memory, and how many they are.
    start: usize,
    len: usize,
    memory: SharedBuffer,
}

impl TensorBuffer {
    /// A tensor of zeros. No budget counts it: it is the caller's.
    ///
    /// # Errors
    ///
    /// The type has no fixed size, or the memory cannot be had.
    pub fn new(dtype: DType, shape: &[usize]) -> Result<TensorBuffer> {
        let buffer = HostAllocator::global().allocate(byte_count(dtype, shape)?, 64)?;
        TensorBuffer::from_buffer(dtype, shape, buffer)
    }

    /// A tensor that takes over a buffer, which may be longer than the tensor; of
    /// [`Buffer::foreign`], for example.
    ///
    /// # Errors
    ///
    /// The buffer is too small, not aligned for the type, or only to be read.
    pub fn from_buffer(dtype: DType, shape: &[usize], mut buffer: Buffer) -> Result<TensorBuffer> {
        let len = byte_count(dtype, shape)?;
        ensure!(
            buffer.len() >= len,
            InvalidArgument,
            help = "give a buffer of that size",
            "a {} tensor of shape {shape:?} takes {len} bytes, the buffer has {}",
            dtype.name(),
            buffer.len()
        );
        if buffer.bytes().is_none() {
            return Ok(TensorBuffer { dtype, shape: shape.into(), start: 0, len, memory: buffer.freeze() });
        }
        let Some(bytes) = buffer.bytes_mut() else {
            return Err(
                error!(InvalidArgument, "the buffer is only read").help("give memory that can be written")
            );
        };
        let alignment = dtype.byte_size().unwrap_or(1);
        ensure!(
            (bytes.as_ptr() as usize).is_multiple_of(alignment),
            InvalidArgument,
            help = "give a buffer that begins at such an address",
            "a {} tensor begins at a multiple of {alignment} bytes, the buffer does not",
            dtype.name()
        );
        Ok(TensorBuffer { dtype, shape: shape.into(), start: 0, len, memory: buffer.freeze() })
    }

    /// A copy of a tensor.
    ///
    /// # Errors
    ///
    /// The tensor is of strings or not in memory of the host, or the memory cannot be had.
    pub fn copy_of(tensor: &Tensor) -> Result<TensorBuffer> {
        let view = tensor.view();
        let mut copy = TensorBuffer::new(view.dtype(), view.shape())?;
        copy.bytes_mut()?.copy_from_slice(view.bytes()?);
        Ok(copy)
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The sizes of the dimensions.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The bytes of its elements.
    pub fn byte_count(&self) -> usize {
        self.len
    }

    /// The elements, to read.
    pub fn view(&self) -> TensorView<'_> {
        match self.memory.as_slice() {
            Some(bytes) => {
                TensorView::host(self.dtype, &self.shape, bytes.get(self.range()).unwrap_or_default())
            }
            None => TensorView::device(self.dtype, &self.shape, self.device_range()),
        }
    }

    /// The memory that the elements are in.
    pub fn memory(&self) -> DeviceId {
        self.view().memory()
    }

    /// Its bytes in memory of a device.
    fn device_range(&self) -> DeviceRange<'_> {
        DeviceRange { buffer: &self.memory, offset: self.start, len: self.len }
    }

    /// The elements as a slice to write. Booleans are written with [`Self::bytes_mut`].
    ///
    /// # Errors
    ///
    /// The type is another, a tensor made by [`Self::tensor`] still holds the memory, or it is a
    /// device's.
    pub fn as_mut_slice<T: Element>(&mut self) -> Result<&mut [T]> {
        self.view_mut()?.as_mut_slice()
    }

    /// The bytes to write.
    ///
    /// # Errors
    ///
    /// A tensor made by [`Self::tensor`] still holds the memory, or it is a device's.
    pub fn bytes_mut(&mut self) -> Result<&mut [u8]> {
        self.view_mut()?.bytes_mut()
    }

    pub(crate) fn view_mut(&mut self) -> Result<TensorMut<'_>> {
        let range = self.range();
        let held = || {
            error!(InvalidArgument, "the memory is still held by a tensor that was made of it")
                .help("drop that tensor first, or copy what you want to keep")
        };
        if self.memory.as_slice().is_none() {
            self.memory.get_mut().ok_or_else(held)?;
            return Ok(TensorMut::device(self.dtype, &self.shape, self.device_range()));
        }
        let bytes = self.memory.get_mut().and_then(Buffer::bytes_mut);
        let bytes = bytes.and_then(|bytes| bytes.get_mut(range)).ok_or_else(held)?;
        Ok(TensorMut::host(self.dtype, &self.shape, bytes))
    }

    /// The same, where nobody else holds the memory.
    pub(crate) fn alone(mut self) -> Option<TensorBuffer> {
        self.memory.get_mut().is_some().then_some(self)
    }

    /// A tensor over the same memory. While it lives, the memory is not written.
    ///
    /// # Errors
    ///
    /// None that a buffer of this type leads to: its memory is long enough.
    pub fn tensor(&self) -> Result<Tensor> {
        let data = match self.memory.bytes() {
            Some(bytes) => Data::Host(bytes.slice(self.range())),
            None => {
                ensure!(self.start == 0, Fail, "a device tensor is not sliced in the middle");
                Data::Device(self.memory.clone(), 0)
            }
        };
        Ok(Tensor { dtype: self.dtype, shape: self.shape.clone(), data })
    }

    fn range(&self) -> Range<usize> {
        self.start..self.start + self.len
    }

    /// A tensor of this shape from byte `start` of the memory on, in the place of this one: another
    /// part, or all of it again.
    pub(crate) fn part(self, start: usize, shape: &[usize]) -> Result<TensorBuffer> {
        let len = byte_count(self.dtype, shape)?;
        let memory = self.memory.as_slice().map_or(0, <[u8]>::len);
        let fits = start.checked_add(len).is_some_and(|end| end <= memory);
        ensure!(fits, Fail, "{len} bytes from byte {start} on are not in a memory of {memory} bytes");
        Ok(TensorBuffer { shape: shape.into(), start, len, ..self })
    }

    /// The buffer, where nobody else holds it.
    pub(super) fn into_buffer(self) -> Result<Buffer> {
        self.memory.try_into_mut().map_err(|_| {
            error!(InvalidArgument, "the memory is still held by a tensor that was made of it")
                .help("drop that tensor first")
        })
    }

    /// Another shape of as many bytes for the same memory.
    pub(crate) fn with_shape(self, shape: &[usize]) -> Result<TensorBuffer> {
        ensure!(byte_count(self.dtype, shape)? == self.len, Fail, "{shape:?} takes another number of bytes");
        Ok(TensorBuffer { shape: shape.into(), ..self })
    }
}
