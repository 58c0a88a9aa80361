//! Memory that somebody else owns: buffers over it that keep its owner alive.

use std::ptr::NonNull;

use crate::buffer::{Address, Origin};
use crate::{AllocError, Buffer, DeviceId, SharedBuffer};

/// The owner of memory that was not allocated here; dropping it is how the memory goes back.
pub(crate) struct ForeignRegion {
    #[expect(dead_code, reason = "held to be dropped")]
    owner: Box<dyn Send + Sync>,
    pub(crate) is_writable: bool,
}

impl Buffer {
    /// A buffer over `len` bytes at `pointer` that `owner` keeps valid. The owner is dropped with
    /// the buffer, and no earlier; nothing is copied or freed here.
    ///
    /// ```
    /// use ort_alloc::Buffer;
    ///
    /// let mut elements = vec![1u8, 2, 3];
    /// let (pointer, len) = (elements.as_mut_ptr(), elements.len());
    /// // SAFETY: the vector owns the bytes, does not move them, and nobody else reaches them inside the buffer.
    /// let mut buffer = unsafe { Buffer::foreign(pointer, len, elements) }?;
    /// buffer.bytes_mut().unwrap_or_default().fill(7);
    /// assert_eq!(buffer.bytes(), Some(&[7, 7, 7][..]));
    /// # Ok::<(), ort_alloc::AllocError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`AllocError::Unsupported`] for a null pointer with bytes, and for a length that no region
    /// can have.
    ///
    /// # Safety
    ///
    /// From this call until `owner` is dropped, the `len` bytes from `pointer` on must be
    /// initialised, readable and writable from any thread, and must stay where they are. While a
    /// reference to bytes of the buffer exists (a run that uses it holds such references), nobody
    /// reads or writes them in another way; between such uses their owner may.
    pub unsafe fn foreign(
        pointer: *mut u8,
        len: usize,
        owner: impl Send + Sync + 'static,
    ) -> Result<Buffer, AllocError> {
        foreign(pointer, len, ForeignRegion { owner: Box::new(owner), is_writable: true })
    }
}

impl SharedBuffer {
    /// A buffer to read over `len` bytes at `pointer` that `owner` keeps valid. The owner is
    /// dropped with the last clone or view. It never becomes writable.
    ///
    /// # Errors
    ///
    /// [`AllocError::Unsupported`] for a null pointer with bytes, and for a length that no region
    /// can have.
    ///
    /// # Safety
    ///
    /// From this call until `owner` is dropped, the `len` bytes from `pointer` on must be
    /// initialised, readable from any thread, and must stay where they are. While a reference to
    /// bytes of the buffer exists (a run that uses it holds such references), nobody writes them;
    /// between such uses their owner may.
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
