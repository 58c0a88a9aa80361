//! Owned memory regions: exclusive ([`Buffer`]) and shared ([`SharedBuffer`]).

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use bytes::Bytes;
use smallvec::SmallVec;

use crate::arena::{ArenaBlock, ReservedBlock};
use crate::recycle::Recycled;
use crate::region::{ForeignRegion, HeapRegion, PageRegion};
use crate::{DeviceId, Reservation};

/// The location of a buffer's bytes.
#[derive(Clone, Copy)]
pub(crate) enum Address {
    /// The first byte, in initialised memory of this process that no other buffer covers.
    Host(NonNull<u8>),
    /// A device handle, meaningful only to the device, and the offset of the first byte in its
    /// memory.
    Opaque { handle: u64, offset: usize },
}

// SAFETY: an address is only a number here. Memory is accessed only through `Buffer::bytes` and
// `Buffer::bytes_mut`, whose borrows of the owning buffer exclude data races.
unsafe impl Send for Address {}
// SAFETY: as above; through a shared address memory is only read.
unsafe impl Sync for Address {}

impl Address {
    /// Returns the address `bytes` further on, which must be inside the same region.
    pub(crate) fn advanced(self, bytes: usize) -> Self {
        match self {
            // Wrapping arithmetic keeps this safe. A caller that leaves the region gets a pointer
            // that it may not dereference.
            Self::Host(pointer) => {
                let moved = pointer.as_ptr().wrapping_add(bytes);
                Self::Host(NonNull::new(moved).unwrap_or(pointer))
            }
            Self::Opaque { handle, offset } => Self::Opaque { handle, offset: offset + bytes },
        }
    }
}

/// The owner of a buffer's memory. Each kind frees it in its own `Drop`.
///
/// An enum, although a `Box<dyn Send + Sync>` would free this file of the allocators: the box costs
/// a heap allocation for each buffer, and a run makes one for every value that the plan does not
/// place.
pub(crate) enum Origin {
    /// An empty buffer owns nothing.
    Empty,
    Heap(#[expect(dead_code, reason = "held to be dropped")] HeapRegion),
    Pages(#[expect(dead_code, reason = "held to be dropped")] PageRegion),
    Arena(#[expect(dead_code, reason = "held to be dropped")] ArenaBlock),
    Reserved(#[expect(dead_code, reason = "held to be dropped")] ReservedBlock),
    Device(#[expect(dead_code, reason = "held to be dropped")] DeviceRegion),
    Recycled(#[expect(dead_code, reason = "held to be dropped")] Recycled),
    Foreign(ForeignRegion),
}

/// Calls the release function of opaque device memory once.
pub(crate) struct DeviceRegion {
    handle: u64,
    release: Option<Box<dyn FnOnce(u64) + Send + Sync>>,
}

impl Drop for DeviceRegion {
    fn drop(&mut self) {
        if let Some(release) = self.release.take() {
            release(self.handle);
        }
    }
}

/// An exclusively owned memory region. Dropping it returns the memory to its source.
///
/// Host memory exposes its bytes, which are always initialised. Memory that the host cannot access
/// exposes a handle, an offset and a length; only the device's copy function moves bytes in and
/// out.
pub struct Buffer {
    address: Address,
    len: usize,
    device: DeviceId,
    // Fields drop in this order: free the memory before the budget counts it as available.
    origin: Origin,
    reservations: SmallVec<[Reservation; 1]>,
}

impl Buffer {
    pub(crate) fn new(address: Address, len: usize, device: DeviceId, origin: Origin) -> Self {
        Self { address, len, device, origin, reservations: SmallVec::new() }
    }

    /// Creates an empty buffer, without allocating.
    pub fn empty(device: DeviceId) -> Self {
        let address = match device {
            DeviceId::HOST => Address::Host(NonNull::<AlignedByte>::dangling().cast()),
            _ => Address::Opaque { handle: 0, offset: 0 },
        };
        Self::new(address, 0, device, Origin::Empty)
    }

    /// Wraps memory that the host cannot access. `release` receives the handle when the buffer is
    /// dropped.
    pub fn opaque(
        device: DeviceId,
        len: usize,
        handle: u64,
        release: Box<dyn FnOnce(u64) + Send + Sync>,
    ) -> Self {
        let origin = Origin::Device(DeviceRegion { handle, release: Some(release) });
        Self::new(Address::Opaque { handle, offset: 0 }, len, device, origin)
    }

    /// Returns the requested length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the device that owns the memory.
    pub fn device(&self) -> DeviceId {
        self.device
    }

    /// Returns the bytes, or `None` for memory that the host cannot access.
    pub fn bytes(&self) -> Option<&[u8]> {
        let Address::Host(pointer) = self.address else {
            return None;
        };
        // SAFETY: `Address::Host` guarantees `len` initialised bytes for as long as `origin` lives,
        // and that no other buffer covers them, so writing needs `&mut self`. An empty buffer's
        // pointer is dangling but aligned, which suffices for an empty slice.
        Some(unsafe { std::slice::from_raw_parts(pointer.as_ptr(), self.len) })
    }

    /// Returns the bytes for writing, or `None` for memory that the host cannot access or that its
    /// owner lends read-only.
    pub fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        let Address::Host(pointer) = self.address else {
            return None;
        };
        if matches!(&self.origin, Origin::Foreign(region) if !region.is_writable) {
            return None;
        }
        // SAFETY: as in `bytes`, and `&mut self` makes this the only reference to the region.
        Some(unsafe { std::slice::from_raw_parts_mut(pointer.as_ptr(), self.len) })
    }

    /// Returns the device's handle, or `None` for host memory. The buffer starts
    /// [`offset`](Self::offset) bytes into the handle's memory.
    pub fn handle(&self) -> Option<u64> {
        match self.address {
            Address::Host(_) => None,
            Address::Opaque { handle, .. } => Some(handle),
        }
    }

    /// Returns the offset in bytes in the handle's memory; 0 for host memory.
    pub fn offset(&self) -> usize {
        match self.address {
            Address::Host(_) => 0,
            Address::Opaque { offset, .. } => offset,
        }
    }

    /// Attaches a reservation, which is released together with the memory.
    #[must_use]
    pub fn with_reservation(mut self, reservation: Reservation) -> Self {
        self.reservations.push(reservation);
        self
    }

    /// Returns the attached reservations.
    pub fn reservations(&self) -> &[Reservation] {
        &self.reservations
    }

    /// Makes the buffer shareable and read-only, zero-copy.
    pub fn freeze(self) -> SharedBuffer {
        SharedBuffer { buffer: Arc::new(self) }
    }

    pub(crate) fn address(&self) -> Address {
        self.address
    }
}

/// A type whose alignment empty host buffers take, so that they are aligned like full ones.
#[repr(align(64))]
struct AlignedByte {
    _byte: u8,
}

impl fmt::Debug for Buffer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = formatter.debug_struct("Buffer");
        text.field("device", &self.device).field("len", &self.len);
        if let Address::Opaque { handle, offset } = self.address {
            text.field("handle", &handle).field("offset", &offset);
        }
        let origin = match self.origin {
            Origin::Empty => "empty",
            Origin::Heap(_) => "heap",
            Origin::Pages(_) => "pages",
            Origin::Arena(_) => "arena",
            Origin::Reserved(_) => "reserved",
            Origin::Device(_) => "device",
            Origin::Recycled(_) => "recycled",
            Origin::Foreign(_) => "foreign",
        };
        text.field("origin", &origin).finish_non_exhaustive()
    }
}

/// A shared read-only buffer. Clones share the memory; dropping the last one frees it.
///
/// It keeps nothing alive but its own memory, with one exception: a buffer from an
/// [`Arena`](crate::Arena) keeps the arena alive. So allocate what outlives a run from the device's
/// allocator, not from an arena.
#[derive(Clone, Debug)]
pub struct SharedBuffer {
    buffer: Arc<Buffer>,
}

impl SharedBuffer {
    /// Returns the buffer for reading.
    pub fn as_buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.buffer.len()
    }

    /// Returns whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.buffer.is_empty()
    }

    /// Returns the device that owns the memory.
    pub fn device(&self) -> DeviceId {
        self.buffer.device()
    }

    /// Returns the bytes, or `None` for memory that the host cannot access.
    pub fn as_slice(&self) -> Option<&[u8]> {
        self.buffer.bytes()
    }

    /// Returns the bytes as an owned, zero-copy view that keeps this buffer alive, or `None` for
    /// memory that the host cannot access.
    pub fn bytes(&self) -> Option<Bytes> {
        self.buffer.bytes()?;
        Some(Bytes::from_owner(HostView(Arc::clone(&self.buffer))))
    }

    /// Returns the device's handle, or `None` for host memory.
    pub fn handle(&self) -> Option<u64> {
        self.buffer.handle()
    }

    /// Returns the offset in bytes in the handle's memory; 0 for host memory.
    pub fn offset(&self) -> usize {
        self.buffer.offset()
    }

    /// Returns the buffer for writing if nothing else shares it, else `None`.
    pub fn get_mut(&mut self) -> Option<&mut Buffer> {
        Arc::get_mut(&mut self.buffer)
    }

    /// Makes the buffer exclusive again if nothing else shares it.
    ///
    /// # Errors
    ///
    /// Returns the shared buffer unchanged if a clone or a view from [`bytes`](Self::bytes) is
    /// alive.
    pub fn try_into_mut(self) -> Result<Buffer, Self> {
        Arc::try_unwrap(self.buffer).map_err(|buffer| Self { buffer })
    }
}

impl From<Buffer> for SharedBuffer {
    fn from(buffer: Buffer) -> Self {
        buffer.freeze()
    }
}

/// The owner of a view made by [`SharedBuffer::bytes`].
struct HostView(Arc<Buffer>);

impl AsRef<[u8]> for HostView {
    fn as_ref(&self) -> &[u8] {
        // `SharedBuffer::bytes` makes views of host memory only, so the default is never used.
        self.0.bytes().unwrap_or_default()
    }
}
