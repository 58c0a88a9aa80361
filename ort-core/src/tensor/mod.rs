//! Tensors and other ONNX values: immutable, cheap to clone, contiguous in row-major order.

mod array;
mod buffer;
mod compare;
mod data;
mod dlpack;
mod shape;
pub(crate) mod types;
mod value;
mod value_view;
mod view;

pub use buffer::TensorBuffer;
pub use compact_str::CompactString;
pub use compare::{Tolerance, compare};
pub(crate) use data::{Data, heap_bytes};
pub use shape::{Shape, byte_count, element_count};
pub(crate) use shape::{element_byte_range, in_words, saturating_product};
pub use value::{MapKeys, MapValue, OptionalValue, SequenceValue, SparseTensor, Value};
pub use value_view::ValueView;
pub use view::{DeviceRange, TensorMut, TensorView};

use std::sync::Arc;

use bytes::Bytes;
use ort_alloc::{Buffer, DeviceId, Reservation, SharedBuffer};

use crate::dtype::{CastOptions, DType, Element, convert};
use crate::{Result, ensure, error};
use data::Texts;

/// An immutable tensor: element type, shape, and a shared slice of memory.
///
/// Cloning shares the memory. Host memory may be a slice of a mapped file, and may be unaligned.
///
/// ```
/// use ort_core::tensor::Tensor;
/// let tensor = Tensor::from_slice(&[2, 2], &[1.0f32, 2.0, 3.0, 4.0])?;
/// assert_eq!(tensor.shape(), [2, 2]);
/// assert_eq!(tensor.to_vec::<f32>()?, [1.0, 2.0, 3.0, 4.0]);
/// # Ok::<(), ort_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Tensor {
    dtype: DType,
    shape: Shape,
    data: Data,
}

impl Tensor {
    /// Creates a tensor over `bytes` in host memory: little-endian, packed like `raw_data` in the
    /// ONNX specification. The length must be exact.
    pub fn from_bytes(dtype: DType, shape: &[usize], bytes: Bytes) -> Result<Tensor> {
        let expected = byte_count(dtype, shape)?;
        ensure!(
            bytes.len() == expected,
            InvalidArgument,
            "a {} tensor of shape {shape:?} takes {expected} bytes, got {}",
            dtype.name(),
            bytes.len()
        );
        Ok(Tensor { dtype, shape: Shape::from_slice(shape), data: Data::Host(bytes) })
    }

    /// Creates a tensor that takes over a buffer in host or device memory.
    pub fn from_buffer(dtype: DType, shape: &[usize], buffer: Buffer) -> Result<Tensor> {
        let expected = byte_count(dtype, shape)?;
        // No bytes means device memory, which a tensor need not fill.
        if buffer.bytes().is_none() {
            ensure!(buffer.len() >= expected, InvalidArgument, "a device buffer is smaller than its tensor");
            return Ok(Tensor {
                dtype,
                shape: Shape::from_slice(shape),
                data: Data::Device(buffer.freeze(), 0),
            });
        }
        let bytes = buffer.freeze().bytes().ok_or_else(|| error!(Fail, "a host buffer is not the host's"))?;
        ensure!(bytes.len() >= expected, InvalidArgument, "a buffer is smaller than its tensor");
        // The slice drops the rest of a buffer that is longer, because `byte_count` reads this
        // length.
        Ok(Tensor { dtype, shape: Shape::from_slice(shape), data: Data::Host(bytes.slice(..expected)) })
    }

    /// Creates a tensor in device memory that the host cannot read.
    pub(crate) fn from_device(dtype: DType, shape: &[usize], buffer: SharedBuffer) -> Result<Tensor> {
        Tensor::from_device_at(dtype, shape, (buffer, 0))
    }

    /// Same as [`from_device`](Self::from_device), from a byte offset on.
    pub(crate) fn from_device_at(
        dtype: DType,
        shape: &[usize],
        (buffer, offset): (SharedBuffer, usize),
    ) -> Result<Tensor> {
        let end = offset.checked_add(byte_count(dtype, shape)?);
        ensure!(
            end.is_some_and(|end| end <= buffer.len()),
            InvalidArgument,
            "a device buffer is smaller than its tensor"
        );
        Ok(Tensor { dtype, shape: Shape::from_slice(shape), data: Data::Device(buffer, offset) })
    }

    /// Creates a tensor with a copy of `elements`.
    pub fn from_slice<T: Element>(shape: &[usize], elements: &[T]) -> Result<Tensor> {
        Tensor::from_vec(shape, elements.to_vec())
    }

    /// Creates a tensor that takes over `elements` without a copy.
    pub fn from_vec<T: Element>(shape: &[usize], elements: Vec<T>) -> Result<Tensor> {
        // `Bytes` takes byte vectors only. An owner keeps the elements where they are, and so their
        // alignment.
        struct Owner<T>(Vec<T>);
        impl<T: Element> AsRef<[u8]> for Owner<T> {
            fn as_ref(&self) -> &[u8] {
                bytemuck::cast_slice(&self.0)
            }
        }
        Tensor::from_bytes(T::DTYPE, shape, Bytes::from_owner(Owner(elements)))
    }

    /// Creates a boolean tensor.
    pub fn from_bools(shape: &[usize], elements: &[bool]) -> Result<Tensor> {
        let bytes: Vec<u8> = elements.iter().map(|&element| u8::from(element)).collect();
        Tensor::from_bytes(DType::Bool, shape, Bytes::from(bytes))
    }

    /// Creates a string tensor. Strings of up to 24 bytes are kept where they stand, without memory
    /// of their own. A longer `String` keeps its memory.
    pub fn from_strings<S: Into<CompactString>>(shape: &[usize], elements: Vec<S>) -> Result<Tensor> {
        // The conversion of a list of `CompactString` is none.
        let elements = elements.into_iter().map(Into::into).collect();
        Tensor::from_held_strings(shape, elements, None)
    }

    /// Same as [`from_strings`](Self::from_strings), with a reservation that counts the bytes
    /// against a budget for as long as they live.
    pub(crate) fn from_held_strings(
        shape: &[usize],
        elements: Vec<CompactString>,
        held: Option<Reservation>,
    ) -> Result<Tensor> {
        let expected = element_count(shape)?;
        ensure!(
            elements.len() == expected,
            InvalidArgument,
            "a string tensor of shape {shape:?} has {expected} elements, got {}",
            elements.len()
        );
        // The reservation lives in the list, so it ends with the last tensor that shares the
        // strings.
        Ok(Tensor::of_texts(shape, Arc::new(Texts { texts: elements, _held: held })))
    }

    /// Creates a tensor of all strings of a list, which has as many as the shape says.
    fn of_texts(shape: &[usize], texts: Arc<Texts>) -> Tensor {
        let all = 0..texts.len();
        Tensor { dtype: DType::String, shape: Shape::from_slice(shape), data: Data::Strings(texts, all) }
    }

    /// Creates a tensor of rank 0.
    pub fn scalar<T: Element>(element: T) -> Result<Tensor> {
        Tensor::from_vec(&[], vec![element])
    }

    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the sizes of the dimensions.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Returns the number of elements.
    pub fn element_count(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns the size of the elements in bytes. A string counts 24 bytes, and its memory if it is
    /// longer.
    pub fn byte_count(&self) -> usize {
        match &self.data {
            Data::Host(bytes) => bytes.len(),
            Data::Strings(texts, range) => {
                texts.part(range).iter().map(|text| size_of::<CompactString>() + heap_bytes(text)).sum()
            }
            Data::Device(..) => self.dtype.byte_len(self.element_count()).unwrap_or(0),
        }
    }

    /// Returns the raw bytes, if the tensor is numeric and in host memory.
    pub fn bytes(&self) -> Option<&Bytes> {
        match &self.data {
            Data::Host(bytes) => Some(bytes),
            _ => None,
        }
    }

    /// Returns where the raw bytes begin. Tensors that share their memory have the same address.
    pub(crate) fn address(&self) -> Option<usize> {
        self.bytes().map(|bytes| bytes.as_ptr().addr())
    }

    /// Returns the device whose memory holds the elements; [`DeviceId::HOST`] if the host can read
    /// them.
    pub fn memory(&self) -> DeviceId {
        self.view().memory()
    }

    /// Returns the elements of a string tensor.
    pub fn strings(&self) -> Result<&[CompactString]> {
        match &self.data {
            Data::Strings(texts, range) => Ok(texts.part(range)),
            _ => Err(error!(InvalidArgument, "a {} tensor holds no strings", self.dtype.name())),
        }
    }

    /// Copies the elements, whatever their alignment.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        self.view().to_vec()
    }

    /// Converts the elements to doubles; a complex element becomes two.
    ///
    /// # Errors
    /// Strings, and tensors that are not in host memory.
    ///
    /// ```
    /// use ort_core::tensor::Tensor;
    /// assert_eq!(Tensor::from_slice(&[2], &[1i8, -2])?.to_doubles()?, [1.0, -2.0]);
    /// # Ok::<(), ort_core::Error>(())
    /// ```
    pub fn to_doubles(&self) -> Result<Vec<f64>> {
        let (dtype, count) = match self.dtype() {
            // A complex element is two floats in a row, and `convert` refuses complex to real.
            DType::C64 => (DType::F32, self.element_count() * 2),
            DType::C128 => (DType::F64, self.element_count() * 2),
            dtype => (dtype, self.element_count()),
        };
        let (view, mut doubles) = (self.view(), vec![0f64; count]);
        let bytes = bytemuck::cast_slice_mut(&mut doubles);
        convert(dtype, view.bytes()?, DType::F64, bytes, count, CastOptions::default())
            .map_err(|problem| error!(InvalidArgument, "{problem}"))?;
        Ok(doubles)
    }

    /// Calls `visit` with each element as a double, in order; a complex element counts as two.
    /// Converts block by block, without a copy of the whole tensor.
    ///
    /// # Errors
    /// Strings, and tensors that are not in host memory.
    ///
    /// ```
    /// use ort_core::tensor::Tensor;
    /// let mut sum = 0.0;
    /// Tensor::from_slice(&[3], &[1i8, -2, 7])?.for_each_double(|number| sum += number)?;
    /// assert_eq!(sum, 6.0);
    /// # Ok::<(), ort_core::Error>(())
    /// ```
    pub fn for_each_double(&self, mut visit: impl FnMut(f64)) -> Result<()> {
        // 8 KiB of doubles stay in L1. A multiple of 8, so blocks of packed types start on a byte.
        const AT_ONCE: usize = 1 << 10;
        let (dtype, count) = match self.dtype() {
            DType::C64 => (DType::F32, self.element_count() * 2),
            DType::C128 => (DType::F64, self.element_count() * 2),
            dtype => (dtype, self.element_count()),
        };
        let (view, mut doubles) = (self.view(), vec![0f64; AT_ONCE.min(count)]);
        let step = dtype.byte_len(AT_ONCE).unwrap_or(1).max(1);
        // `first < count` by construction of the range, so `count - first` does not wrap.
        for (bytes, first) in view.bytes()?.chunks(step).zip((0..count).step_by(AT_ONCE)) {
            let some = doubles.get_mut(..AT_ONCE.min(count - first)).unwrap_or(&mut []);
            let to = bytemuck::cast_slice_mut(some);
            convert(dtype, bytes, DType::F64, to, AT_ONCE.min(count - first), CastOptions::default())
                .map_err(|problem| error!(InvalidArgument, "{problem}"))?;
            some.iter().for_each(|number| visit(*number));
        }
        Ok(())
    }

    /// Returns the same elements under another shape of equal element count.
    pub fn reshape(&self, shape: &[usize]) -> Result<Tensor> {
        ensure!(
            element_count(shape)? == self.element_count(),
            InvalidArgument,
            "shape {:?} cannot be viewed as {shape:?}",
            self.shape()
        );
        Ok(Tensor { dtype: self.dtype, shape: Shape::from_slice(shape), data: self.data.clone() })
    }

    /// Returns the view that kernels read.
    pub fn view(&self) -> TensorView<'_> {
        TensorView::of(self.dtype, &self.shape, &self.data)
    }

    /// Returns the elements from `element_offset` on under another shape, sharing the memory.
    pub(crate) fn slice(&self, element_offset: usize, shape: &[usize]) -> Result<Tensor> {
        let count = element_count(shape)?;
        let data = match &self.data {
            Data::Host(bytes) => {
                let range = self.view().byte_range(element_offset, count)?;
                Data::Host(bytes.slice(range))
            }
            Data::Strings(texts, range) => {
                let start = range.start.saturating_add(element_offset);
                let end = start.saturating_add(count);
                ensure!(end <= range.end, Fail, "a view reaches past its tensor");
                Data::Strings(texts.clone(), start..end)
            }
            Data::Device(buffer, offset) => {
                // Only `from_device_at` makes tensors inside a device buffer, because it checks the
                // range.
                ensure!(element_offset == 0, Fail, "a device tensor is not sliced in the middle");
                Data::Device(buffer.clone(), *offset)
            }
        };
        Ok(Tensor { dtype: self.dtype, shape: Shape::from_slice(shape), data })
    }

    /// Returns whether the memory is aligned for slices of the element type. True for anything but
    /// numeric tensors in host memory.
    pub fn is_aligned(&self) -> bool {
        self.view().is_aligned()
    }

    /// Returns a copy with its own memory, aligned for the type. Only host memory is copied:
    /// strings and device tensors are returned as they are.
    pub fn to_owned_copy(&self) -> Result<Tensor> {
        match &self.data {
            Data::Host(bytes) => {
                // A `u128` buffer is aligned for every element type.
                let mut words = vec![0u128; bytes.len().div_ceil(16)];
                for (to, from) in bytemuck::cast_slice_mut::<u128, u8>(&mut words).iter_mut().zip(bytes) {
                    *to = *from;
                }
                struct Owner(Vec<u128>, usize);
                impl AsRef<[u8]> for Owner {
                    fn as_ref(&self) -> &[u8] {
                        let bytes: &[u8] = bytemuck::cast_slice(&self.0);
                        bytes.get(..self.1).unwrap_or(bytes)
                    }
                }
                Tensor::from_bytes(self.dtype, &self.shape, Bytes::from_owner(Owner(words, bytes.len())))
            }
            _ => Ok(self.clone()),
        }
    }
}

impl TensorView<'_> {
    /// Returns a tensor that shares these strings, which never change, if they are all of a list. A
    /// tensor of a part would keep the whole list alive.
    pub(crate) fn shared_strings(&self) -> Option<Tensor> {
        self.whole_list().map(|texts| Tensor::of_texts(self.shape(), texts.clone()))
    }

    /// Copies the elements into a new tensor in host memory. Strings are shared if they are those
    /// of a whole tensor.
    pub fn to_tensor(&self) -> Result<Tensor> {
        match self.dtype() {
            DType::String => match self.shared_strings() {
                Some(shared) => Ok(shared),
                None => Tensor::from_strings(self.shape(), self.strings()?.to_vec()),
            },
            dtype => {
                let bytes = Bytes::copy_from_slice(self.bytes()?);
                Tensor::from_bytes(dtype, self.shape(), bytes)?.to_owned_copy()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_checked() {
        assert!(Tensor::from_slice(&[2, 3], &[1.0f32; 5]).is_err());
        assert!(Tensor::from_strings(&[2], vec!["a"]).is_err());
        assert!(element_count(&[usize::MAX, 2]).is_err());
    }

    #[test]
    fn unaligned_bytes_read_right() -> Result<()> {
        let mut bytes = vec![0u8];
        bytes.extend([1.5f32, -2.0].iter().flat_map(|value| value.to_le_bytes()));
        let tensor = Tensor::from_bytes(DType::F32, &[2], Bytes::from(bytes).slice(1..))?;
        assert_eq!(tensor.to_vec::<f32>()?, [1.5, -2.0]);
        assert_eq!(tensor.to_owned_copy()?.view().as_slice::<f32>()?, [1.5, -2.0]);
        Ok(())
    }
}
