//! Borrowed tensors, as kernels see them: elements with type and shape.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use compact_str::CompactString;
use ort_alloc::{DeviceId, SharedBuffer};

use super::data::{Data, Texts};
use super::shape::{element_byte_range, element_count};
use crate::dtype::{DType, Element};
use crate::interrupt::spending;
use crate::{Result, ensure, error};

/// A borrowed read-only tensor.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    dtype: DType,
    shape: &'a [usize],
    data: ViewData<'a>,
}

/// The storage of a borrowed tensor's elements.
#[derive(Clone, Copy, Debug)]
enum ViewData<'a> {
    Host(&'a [u8]),
    /// Strings, and the list that they are a part of, if it is known.
    Strings(&'a [CompactString], Option<&'a Arc<Texts>>),
    Device(DeviceRange<'a>),
}

/// A byte range of a device buffer.
#[derive(Clone, Copy, Debug)]
pub struct DeviceRange<'a> {
    /// The buffer, whose handle only its device understands.
    pub buffer: &'a SharedBuffer,
    /// The first byte.
    pub offset: usize,
    /// The number of bytes.
    pub len: usize,
}

impl<'a> TensorView<'a> {
    /// Creates a view of host memory.
    pub fn host(dtype: DType, shape: &'a [usize], bytes: &'a [u8]) -> TensorView<'a> {
        TensorView { dtype, shape, data: ViewData::Host(bytes) }
    }

    /// Creates a view of device memory.
    pub fn device(dtype: DType, shape: &'a [usize], range: DeviceRange<'a>) -> TensorView<'a> {
        TensorView { dtype, shape, data: ViewData::Device(range) }
    }

    /// Creates a view of strings.
    pub fn of_strings(shape: &'a [usize], strings: &'a [CompactString]) -> TensorView<'a> {
        TensorView { dtype: DType::String, shape, data: ViewData::Strings(strings, None) }
    }

    pub(super) fn of(dtype: DType, shape: &'a [usize], data: &'a Data) -> TensorView<'a> {
        let data = match data {
            Data::Host(bytes) => ViewData::Host(bytes),
            Data::Strings(texts, range) => ViewData::Strings(texts.part(range), Some(texts)),
            Data::Device(buffer, offset) => {
                // The buffer may be longer than this tensor.
                let bytes = dtype.byte_len(shape.iter().product()).unwrap_or(buffer.len());
                // `Tensor::slice` does not check the size of a device tensor, so the range is cut
                // to the buffer.
                let len = bytes.min(buffer.len().saturating_sub(*offset));
                ViewData::Device(DeviceRange { buffer, offset: *offset, len })
            }
        };
        TensorView { dtype, shape, data }
    }

    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the sizes of the dimensions.
    pub fn shape(&self) -> &'a [usize] {
        self.shape
    }

    /// Returns the number of dimensions.
    pub fn rank(&self) -> usize {
        self.shape.len()
    }

    /// Returns the number of elements.
    pub fn element_count(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns the same elements under another shape of equal element count.
    pub fn with_shape<'b>(self, shape: &'b [usize]) -> TensorView<'b>
    where
        'a: 'b,
    {
        TensorView { dtype: self.dtype, shape, data: self.data }
    }

    /// Returns the elements as a slice. Fails if the type differs, or the memory is not host memory
    /// or not aligned for `T`. Kernels that read weights directly from the file use
    /// [`Self::to_cow`].
    pub fn as_slice<T: Element>(&self) -> Result<&'a [T]> {
        ensure!(
            self.dtype == T::DTYPE,
            InvalidArgument,
            "expected a {} tensor, got {}",
            T::DTYPE.name(),
            self.dtype.name()
        );
        // The checked cast also refuses a `bool` whose byte is neither 0 nor 1, as files may
        // contain.
        bytemuck::checked::try_cast_slice(self.bytes()?).map_err(|_| {
            error!(Fail, "a {} tensor is not aligned in memory, or not valid", self.dtype.name())
        })
    }

    /// Returns the elements, copied only if they are not aligned for `T`.
    pub fn to_cow<T: Element>(&self) -> Result<Cow<'a, [T]>> {
        match self.as_slice() {
            // `as_slice` cannot copy, so any failure leads to `to_vec`, which reports the actual
            // fault.
            Ok(slice) => Ok(Cow::Borrowed(slice)),
            Err(_) => Ok(Cow::Owned(self.to_vec()?)),
        }
    }

    /// Copies the elements, whatever their alignment. Any byte of a boolean but 0 is true.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        ensure!(
            self.dtype == T::DTYPE,
            InvalidArgument,
            "expected a {} tensor, got {}",
            T::DTYPE.name(),
            self.dtype.name()
        );
        let bytes = self.bytes()?;
        let is_bool = T::DTYPE == DType::Bool;
        let read = |chunk: &[u8]| {
            // Memory of callers holds other bytes than 0 and 1, as NumPy's views do.
            let chunk = if is_bool && chunk != [0] { &[1] } else { chunk };
            bytemuck::checked::try_pod_read_unaligned(chunk)
                .map_err(|_| error!(InvalidArgument, "an element is not a valid {}", T::DTYPE.name()))
        };
        // `spending` counts the elements, so that a deadline interrupts the copy of a large tensor.
        spending(1, bytes.chunks_exact(size_of::<T>())).map(read).collect()
    }

    /// Returns the element of a tensor with exactly one.
    pub fn to_scalar<T: Element>(&self) -> Result<T> {
        let elements = self.to_vec::<T>()?;
        match elements.as_slice() {
            [element] => Ok(*element),
            _ => Err(error!(InvalidArgument, "expected one element, got shape {:?}", self.shape)),
        }
    }

    /// Returns the elements of an integer or boolean tensor of any width as `i64`.
    pub fn to_ints(&self) -> Result<Vec<i64>> {
        self.collect_ints()
    }

    /// Same as [`to_ints`](Self::to_ints), into any collection, such as a small vector that stays
    /// off the heap.
    pub fn collect_ints<C: FromIterator<i64>>(&self) -> Result<C> {
        fn each<const N: usize, C: FromIterator<i64>>(bytes: &[u8], read: impl Fn([u8; N]) -> i64) -> C {
            spending(1, bytes.as_chunks::<N>().0).map(|element| read(*element)).collect()
        }
        let bytes = self.bytes()?;
        Ok(match self.dtype {
            // ONNX stores `raw_data` in little-endian order.
            DType::I64 => each(bytes, i64::from_le_bytes),
            DType::I32 => each(bytes, |element| i32::from_le_bytes(element).into()),
            DType::I16 => each(bytes, |element| i16::from_le_bytes(element).into()),
            DType::I8 => each(bytes, |element| i8::from_le_bytes(element).into()),
            DType::U8 => each(bytes, |element| u8::from_le_bytes(element).into()),
            DType::Bool => each(bytes, |[byte]| i64::from(byte != 0)),
            DType::U16 => each(bytes, |element| u16::from_le_bytes(element).into()),
            DType::U32 => each(bytes, |element| u32::from_le_bytes(element).into()),
            DType::U64 => {
                // Saturates: a wrapped number would pass for a negative axis or size.
                each(bytes, |element| i64::try_from(u64::from_le_bytes(element)).unwrap_or(i64::MAX))
            }
            other => return Err(error!(InvalidArgument, "expected integers, got {}", other.name())),
        })
    }

    /// Returns the bytes of a tensor in host memory.
    pub fn bytes(&self) -> Result<&'a [u8]> {
        match self.data {
            ViewData::Host(bytes) => Ok(bytes),
            ViewData::Strings(..) => Err(error!(InvalidArgument, "expected numbers, got strings")),
            ViewData::Device(range) => {
                let device = range.buffer.device();
                Err(error!(Fail, "the tensor is in the memory of {device}, which the host does not read")
                    .help("copy it to the host: `Session::to_host`"))
            }
        }
    }

    /// Returns the elements of a string tensor.
    pub fn strings(&self) -> Result<&'a [CompactString]> {
        match self.data {
            ViewData::Strings(strings, _) => Ok(strings),
            _ => Err(error!(InvalidArgument, "expected strings, got {}", self.dtype.name())),
        }
    }

    /// Returns the list that these strings are all of, if it is known.
    pub(super) fn whole_list(&self) -> Option<&'a Arc<Texts>> {
        match self.data {
            ViewData::Strings(strings, Some(texts)) if strings.len() == texts.len() => Some(texts),
            _ => None,
        }
    }

    /// Returns the device memory of a tensor that is not in host memory.
    pub fn device_range(&self) -> Option<DeviceRange<'a>> {
        match self.data {
            ViewData::Device(range) => Some(range),
            _ => None,
        }
    }

    /// Returns the device whose memory holds the elements.
    pub fn memory(&self) -> DeviceId {
        self.device_range().map_or(DeviceId::HOST, |range| range.buffer.device())
    }

    /// Returns whether the host can read the elements.
    pub fn is_host(&self) -> bool {
        !matches!(self.data, ViewData::Device(_))
    }

    /// Returns whether the memory is aligned for slices of the element type. True for anything but
    /// numbers in host memory.
    pub fn is_aligned(&self) -> bool {
        let ViewData::Host(bytes) = self.data else { return true };
        // Complex types are aligned by their whole size, because kernels that only move elements
        // read them as integers of that size.
        bytes.as_ptr().addr().is_multiple_of(self.dtype.byte_size().unwrap_or(1))
    }

    /// Returns the byte range of `count` elements from `offset` on. Packed types must start on a
    /// byte.
    pub(crate) fn byte_range(&self, offset: usize, count: usize) -> Result<Range<usize>> {
        element_byte_range(self.dtype, offset, count)
    }
}

/// A borrowed tensor to write.
#[derive(Debug)]
pub struct TensorMut<'a> {
    dtype: DType,
    shape: &'a [usize],
    data: MutData<'a>,
}

#[derive(Debug)]
enum MutData<'a> {
    Host(&'a mut [u8]),
    Device(DeviceRange<'a>),
}

impl<'a> TensorMut<'a> {
    /// Creates a writable tensor in host memory. The bytes must be aligned, and as long as the
    /// shape requires.
    pub fn host(dtype: DType, shape: &'a [usize], bytes: &'a mut [u8]) -> TensorMut<'a> {
        TensorMut { dtype, shape, data: MutData::Host(bytes) }
    }

    /// Creates a writable tensor in device memory.
    pub fn device(dtype: DType, shape: &'a [usize], range: DeviceRange<'a>) -> TensorMut<'a> {
        TensorMut { dtype, shape, data: MutData::Device(range) }
    }

    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the sizes of the dimensions.
    pub fn shape(&self) -> &'a [usize] {
        self.shape
    }

    /// Returns the number of elements.
    pub fn element_count(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns the elements as a mutable slice. Their initial content is unspecified, unless the
    /// output is in place. Write booleans as bytes with [`Self::bytes_mut`], because unspecified
    /// bytes may be invalid booleans.
    pub fn as_mut_slice<T: Element>(self) -> Result<&'a mut [T]> {
        ensure!(
            self.dtype == T::DTYPE,
            InvalidArgument,
            "expected a {} output, got {}",
            T::DTYPE.name(),
            self.dtype.name()
        );
        let dtype = self.dtype;
        bytemuck::checked::try_cast_slice_mut(self.bytes_mut()?)
            .map_err(|_| error!(Fail, "a {} output is not aligned in memory", dtype.name()))
    }

    /// Returns the bytes of an output in host memory.
    pub fn bytes_mut(self) -> Result<&'a mut [u8]> {
        match self.data {
            MutData::Host(bytes) => Ok(bytes),
            MutData::Device(range) => {
                let device = range.buffer.device();
                Err(error!(Fail, "the tensor is in the memory of {device}, which the host does not write")
                    .help("copy to it from a tensor of the host: `Session::update_inplace`"))
            }
        }
    }

    /// Returns the device memory of an output that is not in host memory.
    pub fn device_range(&self) -> Option<DeviceRange<'a>> {
        match self.data {
            MutData::Device(range) => Some(range),
            MutData::Host(_) => None,
        }
    }

    /// Returns the device whose memory the elements are written to.
    pub fn memory(&self) -> DeviceId {
        self.device_range().map_or(DeviceId::HOST, |range| range.buffer.device())
    }

    pub(crate) fn check_length(&self) -> Result<()> {
        if let MutData::Host(bytes) = &self.data {
            let expected = self.dtype.byte_len(element_count(self.shape)?);
            // Kernels index outputs by shape, so a shorter buffer would fail in the middle of a
            // kernel.
            ensure!(expected == Some(bytes.len()), Fail, "an output's buffer does not fit its shape");
        }
        Ok(())
    }
}
