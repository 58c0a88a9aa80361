//! Writable tensors: memory for bound inputs and outputs.

use std::ops::Range;

use ort_alloc::{Allocator, Buffer, DeviceId, HostAllocator, SharedBuffer};

use super::{Data, DeviceRange, Shape, Tensor, TensorMut, TensorView, byte_count};
use crate::dtype::{DType, Element};
use crate::{Result, ensure, error};

/// A tensor that can be written while nothing else shares its memory. The writer is the host, or
/// kernels of the device that owns the memory
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
    /// The byte range of the elements in the memory.
    start: usize,
    len: usize,
    memory: SharedBuffer,
}

impl TensorBuffer {
    /// Creates a tensor of zeros. It belongs to the caller and counts against no budget.
    ///
    /// # Errors
    ///
    /// The type has no fixed size, or the allocation fails.
    pub fn new(dtype: DType, shape: &[usize]) -> Result<TensorBuffer> {
        // 64 bytes are a cache line and an AVX-512 register.
        let buffer = HostAllocator::global().allocate(byte_count(dtype, shape)?, 64)?;
        TensorBuffer::from_buffer(dtype, shape, buffer)
    }

    /// Creates a tensor that takes over a buffer, which may be longer than the tensor: one from
    /// [`Buffer::foreign`], for example.
    ///
    /// # Errors
    ///
    /// The buffer is too small, misaligned for the type, or read-only.
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
        // The host has no address of device memory, so its alignment is left to the device's
        // allocator.
        if buffer.bytes().is_none() {
            return Ok(TensorBuffer {
                dtype,
                shape: Shape::from_slice(shape),
                start: 0,
                len,
                memory: buffer.freeze(),
            });
        }
        let Some(bytes) = buffer.bytes_mut() else {
            return Err(
                error!(InvalidArgument, "the buffer is read-only").help("give memory that can be written")
            );
        };
        // Packed types are read byte by byte and fit any address.
        let alignment = dtype.byte_size().unwrap_or(1);
        ensure!(
            (bytes.as_ptr() as usize).is_multiple_of(alignment),
            InvalidArgument,
            help = "give a buffer that begins at such an address",
            "a {} tensor begins at a multiple of {alignment} bytes, the buffer does not",
            dtype.name()
        );
        Ok(TensorBuffer { dtype, shape: Shape::from_slice(shape), start: 0, len, memory: buffer.freeze() })
    }

    /// Creates a copy of a tensor.
    ///
    /// # Errors
    ///
    /// The tensor contains strings or is not in host memory, or the allocation fails.
    pub fn copy_of(tensor: &Tensor) -> Result<TensorBuffer> {
        let view = tensor.view();
        let mut copy = TensorBuffer::new(view.dtype(), view.shape())?;
        copy.bytes_mut()?.copy_from_slice(view.bytes()?);
        Ok(copy)
    }

    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the sizes of the dimensions.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Returns the size of the elements in bytes.
    pub fn byte_count(&self) -> usize {
        self.len
    }

    /// Returns a read-only view of the elements.
    pub fn view(&self) -> TensorView<'_> {
        match self.memory.as_slice() {
            Some(bytes) => {
                TensorView::host(self.dtype, &self.shape, bytes.get(self.range()).unwrap_or_default())
            }
            None => TensorView::device(self.dtype, &self.shape, self.device_range()),
        }
    }

    /// Returns the device whose memory holds the elements.
    pub fn memory(&self) -> DeviceId {
        self.view().memory()
    }

    /// Returns the bytes in device memory.
    fn device_range(&self) -> DeviceRange<'_> {
        DeviceRange { buffer: &self.memory, offset: self.start, len: self.len }
    }

    /// Returns the elements as a mutable slice. For booleans use [`Self::bytes_mut`].
    ///
    /// # Errors
    ///
    /// The type differs, a tensor made by [`Self::tensor`] still shares the memory, or it is device
    /// memory.
    pub fn as_mut_slice<T: Element>(&mut self) -> Result<&mut [T]> {
        self.view_mut()?.as_mut_slice()
    }

    /// Returns the bytes as a mutable slice.
    ///
    /// # Errors
    ///
    /// A tensor made by [`Self::tensor`] still shares the memory, or it is device memory.
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
            // Only proves that no tensor shares the memory: device memory has no bytes to lend.
            self.memory.get_mut().ok_or_else(held)?;
            return Ok(TensorMut::device(self.dtype, &self.shape, self.device_range()));
        }
        let bytes = self.memory.get_mut().and_then(Buffer::bytes_mut);
        let bytes = bytes.and_then(|bytes| bytes.get_mut(range)).ok_or_else(held)?;
        Ok(TensorMut::host(self.dtype, &self.shape, bytes))
    }

    /// Returns the buffer itself if nothing else shares its memory.
    pub(crate) fn alone(mut self) -> Option<TensorBuffer> {
        self.memory.get_mut().is_some().then_some(self)
    }

    /// Returns a tensor that shares the memory. While it exists, the buffer cannot be written.
    ///
    /// # Errors
    ///
    /// None in practice: the memory of a buffer is always long enough.
    pub fn tensor(&self) -> Result<Tensor> {
        // The tensor shares the memory, which makes `get_mut` refuse until it is dropped.
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

    /// Turns this into a tensor of another shape that starts at byte `start` of the same memory.
    /// The new range need not lie in the old one.
    pub(crate) fn part(self, start: usize, shape: &[usize]) -> Result<TensorBuffer> {
        let len = byte_count(self.dtype, shape)?;
        // Device memory counts as empty, so parts exist in host memory only.
        let memory = self.memory.as_slice().map_or(0, <[u8]>::len);
        let fits = start.checked_add(len).is_some_and(|end| end <= memory);
        ensure!(fits, Fail, "{len} bytes at offset {start} are out of range for a memory of {memory} bytes");
        Ok(TensorBuffer { shape: Shape::from_slice(shape), start, len, ..self })
    }

    /// Returns the underlying buffer, if nothing else shares it.
    pub(crate) fn into_buffer(self) -> Result<Buffer> {
        self.memory.try_into_mut().map_err(|_| {
            error!(InvalidArgument, "the memory is still held by a tensor that was made of it")
                .help("drop that tensor first")
        })
    }

    /// Returns the same memory under another shape of equal byte size.
    pub(crate) fn with_shape(self, shape: &[usize]) -> Result<TensorBuffer> {
        // Bytes, not elements, because the range of the memory stays as it is.
        ensure!(
            byte_count(self.dtype, shape)? == self.len,
            Fail,
            "shape {shape:?} takes a different number of bytes"
        );
        Ok(TensorBuffer { shape: Shape::from_slice(shape), ..self })
    }
}
