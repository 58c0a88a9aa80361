//! Owned regions of memory: exclusive ([`Buffer`]) and shared ([`SharedBuffer`]).

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use bytes::Bytes;
use smallvec::SmallVec;

use crate::arena::{ArenaBlock, ReservedBlock};
use crate::foreign::ForeignRegion;
use crate::host::{HeapRegion, PageRegion};
use crate::recycle::Recycled;
use crate::{DeviceId, Reservation};

/// Where the bytes of a buffer are.
#[derive(Clone, Copy)]
pub(crate) enum Address {
    /// The first byte, in memory of this process that is initialised and that no other buffer
    /// covers.
    Host(NonNull<u8>),
    /// A handle that only its device understands, and the distance of the first byte from its
    /// start.
    Opaque { handle: u64, offset: usize },
}

// SAFETY: an address is only a number here. Every read goes through `Buffer::bytes` and every write
// through `Buffer::bytes_mut`, whose borrows of the owning buffer give the usual guarantees to
// other threads.
unsafe impl Send for Address {}
// SAFETY: as above; a shared address gives shared reads only.
unsafe impl Sync for Address {}

impl Address {
    /// The address `bytes` further on, which must still be inside the same region.
    pub(crate) fn advanced(self, bytes: usize) -> Self {
        match self {
            // Wrapping arithmetic keeps this safe; a caller that leaves the region gets a pointer
            // it may not read.
            Self::Host(pointer) => {
                let moved = pointer.as_ptr().wrapping_add(bytes);
                Self::Host(NonNull::new(moved).unwrap_or(pointer))
            }
            Self::Opaque { handle, offset } => Self::Opaque { handle, offset: offset + bytes },
        }
    }
}

/// What gets the memory back when the buffer is dropped. Each kind frees in its own `Drop`.
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

/// Calls the release function of opaque memory once.
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

/// An owned region of memory that nobody else reads or writes; dropping it returns it to where it
/// came from.
///
/// Host memory shows its bytes, which are always initialised. Memory that the host cannot touch
/// shows a handle, an offset in it and a length, and only its device's copy function moves bytes in
/// and out.
pub struct Buffer {
    address: Address,
    len: usize,
    device: DeviceId,
    // Fields drop in this order: the memory goes back before the budget hears of it.
    origin: Origin,
    reservations: SmallVec<[Reservation; 1]>,
}

impl Buffer {
    pub(crate) fn new(address: Address, len: usize, device: DeviceId, origin: Origin) -> Self {
        Self { address, len, device, origin, reservations: SmallVec::new() }
    }

    /// A buffer of no bytes, which costs nothing.
    pub fn empty(device: DeviceId) -> Self {
        let address = match device {
            DeviceId::HOST => Address::Host(NonNull::<AlignedByte>::dangling().cast()),
            _ => Address::Opaque { handle: 0, offset: 0 },
        };
        Self::new(address, 0, device, Origin::Empty)
    }

    /// Wraps memory that the host cannot touch. `release` gets the handle back when the buffer is
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

    /// Length in bytes, as asked for.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The device whose memory this is.
    pub fn device(&self) -> DeviceId {
        self.device
    }

    /// The bytes, or `None` for memory that the host cannot touch.
    pub fn bytes(&self) -> Option<&[u8]> {
        let Address::Host(pointer) = self.address else {
            return None;
        };
        // SAFETY: a host address is valid for `len` initialised bytes for as long as `origin`
        // lives, and this buffer is the only one over them, so writing needs `&mut self`. An empty
        // buffer's pointer is dangling but aligned, which a slice of no bytes allows.
        Some(unsafe { std::slice::from_raw_parts(pointer.as_ptr(), self.len) })
    }

    /// The bytes for writing, or `None` for memory that the host cannot touch or that its owner
    /// lends for reading only.
    pub fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        let Address::Host(pointer) = self.address else {
            return None;
        };
        if matches!(&self.origin, Origin::Foreign(region) if !region.is_writable) {
            return None;
        }
        // SAFETY: as in `bytes`, and `&mut self` makes this the only reference into the region.
        Some(unsafe { std::slice::from_raw_parts_mut(pointer.as_ptr(), self.len) })
    }

    /// The device's handle, or `None` for host memory. The buffer starts [`offset`](Self::offset)
    /// bytes into it.
    pub fn handle(&self) -> Option<u64> {
        match self.address {
            Address::Host(_) => None,
            Address::Opaque { handle, .. } => Some(handle),
        }
    }

    /// Distance in bytes from the start of the handle's memory; 0 for host memory.
    pub fn offset(&self) -> usize {
        match self.address {
            Address::Host(_) => 0,
            Address::Opaque { offset, .. } => offset,
        }
    }

    /// Lets the buffer carry a reservation, which is given back with the memory.
    #[must_use]
    pub fn with_reservation(mut self, reservation: Reservation) -> Self {
        self.reservations.push(reservation);
        self
    }

    /// The reservations that this buffer carries.
    pub fn reservations(&self) -> &[Reservation] {
        &self.reservations
    }

    /// Makes the buffer shareable and read-only. No bytes move.
    pub fn freeze(self) -> SharedBuffer {
        SharedBuffer { buffer: Arc::new(self) }
    }

    pub(crate) fn address(&self) -> Address {
        self.address
    }
}

/// Gives empty host buffers an address with the alignment that full ones have.
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

/// A buffer that many can read and nobody can write. Cloning shares; the last one to go frees the
/// memory.
///
/// It keeps its own memory alive and nothing else, except that a buffer from an
/// [`Arena`](crate::Arena) keeps that arena, so what leaves a run for good should come from the
/// device's allocator and not from an arena.
#[derive(Clone, Debug)]
pub struct SharedBuffer {
    buffer: Arc<Buffer>,
}

impl SharedBuffer {
    /// The buffer for reading.
    pub fn as_buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.buffer.len()
    }

    /// Whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.buffer.is_empty()
    }

    /// The device whose memory this is.
    pub fn device(&self) -> DeviceId {
        self.buffer.device()
    }

    /// The bytes, or `None` for memory that the host cannot touch.
    pub fn as_slice(&self) -> Option<&[u8]> {
        self.buffer.bytes()
    }

    /// The bytes as an owned, cheaply cloned view that keeps this buffer alive, without a copy;
    /// `None` for memory that the host cannot touch.
    pub fn bytes(&self) -> Option<Bytes> {
        self.buffer.bytes()?;
        Some(Bytes::from_owner(HostView(Arc::clone(&self.buffer))))
    }

    /// The device's handle, or `None` for host memory.
    pub fn handle(&self) -> Option<u64> {
        self.buffer.handle()
    }

    /// Distance in bytes from the start of the handle's memory; 0 for host memory.
    pub fn offset(&self) -> usize {
        self.buffer.offset()
    }

    /// The buffer for writing, as long as nobody else holds it; else `None`.
    pub fn get_mut(&mut self) -> Option<&mut Buffer> {
        Arc::get_mut(&mut self.buffer)
    }

    /// Makes the buffer exclusive again if nobody else holds it.
    ///
    /// # Errors
    ///
    /// Gives the shared buffer back where a clone or a view from [`bytes`](Self::bytes) is alive.
    pub fn try_into_mut(self) -> Result<Buffer, Self> {
        Arc::try_unwrap(self.buffer).map_err(|buffer| Self { buffer })
    }
}

impl From<Buffer> for SharedBuffer {
    fn from(buffer: Buffer) -> Self {
        buffer.freeze()
    }
}

/// The owner behind a view made by [`SharedBuffer::bytes`].
struct HostView(Arc<Buffer>);

impl AsRef<[u8]> for HostView {
    fn as_ref(&self) -> &[u8] {
        // Views are only made of host memory, so the default never stands in for bytes that exist.
        self.0.bytes().unwrap_or_default()
    }
}
