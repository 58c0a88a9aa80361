//! Foreign memory: buffers over memory of another owner, which they keep alive.

use std::ptr::NonNull;

use crate::buffer::{Address, Origin};
use crate::region::ForeignRegion;
use crate::{AllocError, Buffer, DeviceId, SharedBuffer};

impl Buffer {
    /// Creates a buffer over `len` bytes at `pointer`, which `owner` keeps valid. The owner is
    /// dropped together with the buffer. No bytes are copied or freed here.
    ///
    /// ```
    /// use ort_alloc::Buffer;
    ///
    /// let mut elements = vec![1u8, 2, 3];
    /// let (pointer, len) = (elements.as_mut_ptr(), elements.len());
    /// // SAFETY: the vector owns the bytes, does not move them, and only the buffer reaches them.
    /// let mut buffer = unsafe { Buffer::foreign(pointer, len, elements) }?;
    /// buffer.bytes_mut().unwrap_or_default().fill(7);
    /// assert_eq!(buffer.bytes(), Some(&[7, 7, 7][..]));
    /// # Ok::<(), ort_alloc::AllocError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`AllocError::Unsupported`] for a null pointer to a non-empty region, and for a region that
    /// exceeds the address space.
    ///
    /// # Safety
    ///
    /// From this call until `owner` is dropped, the `len` bytes at `pointer` must be initialised,
    /// accessible from any thread for reading and writing, and must not move. While a reference to
    /// bytes of the buffer exists (a run holds such references), no one may access them in another
    /// way. Between such uses their owner may.
    pub unsafe fn foreign(
        pointer: *mut u8,
        len: usize,
        owner: impl Send + Sync + 'static,
    ) -> Result<Buffer, AllocError> {
        foreign(pointer, len, ForeignRegion { owner: Box::new(owner), is_writable: true })
    }
}

impl SharedBuffer {
    /// Creates a read-only buffer over `len` bytes at `pointer`, which `owner` keeps valid. The
    /// owner is dropped with the last clone or view. The buffer never becomes writable.
    ///
    /// # Errors
    ///
    /// [`AllocError::Unsupported`] for a null pointer to a non-empty region, and for a region that
    /// exceeds the address space.
    ///
    /// # Safety
    ///
    /// From this call until `owner` is dropped, the `len` bytes at `pointer` must be initialised,
    /// readable from any thread, and must not move. While a reference to bytes of the buffer exists
    /// (a run holds such references), no one may write them. Between such uses their owner may.
    pub unsafe fn foreign(
        pointer: *const u8,
        len: usize,
        owner: impl Send + Sync + 'static,
    ) -> Result<SharedBuffer, AllocError> {
        let region = ForeignRegion { owner: Box::new(owner), is_writable: false };
        Ok(foreign(pointer.cast_mut(), len, region)?.freeze())
    }
}

fn foreign(pointer: *mut u8, len: usize, region: ForeignRegion) -> Result<Buffer, AllocError> {
    let unsupported =
        |reason: &str| AllocError::Unsupported { device: DeviceId::HOST, reason: reason.to_owned() };
    let ends_inside = (pointer as usize).checked_add(len).is_some() && isize::try_from(len).is_ok();
    if !ends_inside {
        return Err(unsupported("the region reaches past the end of the address space"));
    }
    match NonNull::new(pointer) {
        Some(pointer) => {
            Ok(Buffer::new(Address::Host(pointer), len, DeviceId::HOST, Origin::Foreign(region)))
        }
        None if len == 0 => Ok(Buffer::empty(DeviceId::HOST)),
        None => Err(unsupported("the pointer to the region is null")),
    }
}
