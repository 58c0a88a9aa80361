//! Tensor records of a call, read as the views that kernels take.

use ort_alloc::SharedBuffer;

use super::call::whole;
use crate::dtype::DType;
use crate::ep::abi::decode::{list, read_dtype, read_shape};
use crate::ep::abi::tables::{ORT_PROVIDER_ABSENT, ORT_PROVIDER_HOST, ORT_PROVIDER_SHAPE, OrtProviderTensor};
use crate::tensor::{DeviceRange, Shape, TensorMut, TensorView};
use crate::{Result, ensure};

/// The shape of a tensor record; empty for an absent one.
///
/// # Safety
///
/// `tensor` is a valid record.
pub(super) unsafe fn shape(tensor: &OrtProviderTensor) -> Result<Shape> {
    if tensor.kind == ORT_PROVIDER_ABSENT {
        return Ok(Shape::new());
    }
    // SAFETY: `sizes` has `rank` elements in a valid record.
    read_shape(unsafe { list(tensor.sizes, tensor.rank as usize) })
}

/// Creates a view of a tensor to read.
///
/// # Safety
///
/// The tensor's memory is lent for reading throughout `'a`.
pub(super) unsafe fn read_view<'a>(
    tensor: &OrtProviderTensor,
    shape: &'a [usize],
    nothing: &'a SharedBuffer,
) -> Result<TensorView<'a>> {
    let dtype = checked(tensor, shape)?;
    match tensor.kind {
        ORT_PROVIDER_HOST => {
            // SAFETY: `data` has `bytes` bytes in a valid record, lent for `'a` by this function's
            // contract.
            let bytes = unsafe { list(tensor.data.cast_const().cast(), whole(tensor.bytes)?) };
            Ok(TensorView::host(dtype, shape, bytes))
        }
        // SAFETY: the same for `memory`, a handle from `allocate`.
        _ => Ok(TensorView::device(dtype, shape, unsafe { range(tensor, nothing) }?)),
    }
}

/// Creates a view of a tensor to write.
///
/// # Safety
///
/// The tensor's memory is lent exclusively throughout `'a`.
pub(super) unsafe fn read_mut<'a>(
    tensor: &OrtProviderTensor,
    shape: &'a [usize],
    nothing: &'a SharedBuffer,
) -> Result<TensorMut<'a>> {
    let dtype = checked(tensor, shape)?;
    match tensor.kind {
        // SAFETY: lent exclusively for `'a`, by this function's contract.
        ORT_PROVIDER_HOST => Ok(TensorMut::host(dtype, shape, unsafe { bytes_mut(tensor) }?)),
        // SAFETY: the same for `memory`, a handle from `allocate`.
        _ => Ok(TensorMut::device(dtype, shape, unsafe { range(tensor, nothing) }?)),
    }
}

/// Borrows a host tensor's bytes to write; empty if there are none.
///
/// # Safety
///
/// The tensor's memory is lent exclusively throughout `'a`.
pub(super) unsafe fn bytes_mut<'a>(tensor: &OrtProviderTensor) -> Result<&'a mut [u8]> {
    let len = whole(tensor.bytes)?;
    if len == 0 || tensor.data.is_null() {
        return Ok(&mut []);
    }
    // SAFETY: not null, and lent exclusively for `'a` by this function's contract.
    Ok(unsafe { std::slice::from_raw_parts_mut(tensor.data.cast(), len) })
}

/// Resolves a tensor's device memory, with bounds checked.
///
/// # Safety
///
/// `tensor.memory` is 0, or from `allocate` and not yet released.
pub(super) unsafe fn range<'a>(
    tensor: &OrtProviderTensor,
    nothing: &'a SharedBuffer,
) -> Result<DeviceRange<'a>> {
    let (offset, len) = (whole(tensor.offset)?, whole(tensor.bytes)?);
    // SAFETY: null or valid, by this function's contract.
    let buffer = unsafe { (tensor.memory as *const SharedBuffer).as_ref() };
    let Some(buffer) = buffer.filter(|_| len > 0) else {
        return Ok(DeviceRange { buffer: nothing, offset: 0, len: 0 });
    };
    let fits = offset.checked_add(len).is_some_and(|end| end <= buffer.len());
    ensure!(
        fits,
        Fail,
        "{len} bytes at offset {offset} are out of range for a buffer of {} bytes",
        buffer.len()
    );
    Ok(DeviceRange { buffer, offset, len })
}

/// Returns the element type of a tensor, after a check that its byte count matches the shape.
fn checked(tensor: &OrtProviderTensor, shape: &[usize]) -> Result<DType> {
    ensure!(tensor.kind != ORT_PROVIDER_SHAPE, Fail, "a tensor has no memory");
    let dtype = read_dtype(tensor.element_type)?;
    let expected = crate::tensor::byte_count(dtype, shape)? as u64;
    ensure!(tensor.bytes == expected, Fail, "a tensor has {} bytes, expected {expected}", tensor.bytes);
    Ok(dtype)
}
