//! The [`Allocator`] trait.

use crate::{AllocError, Buffer, DeviceId, Stats};

/// A source of memory on one device.
pub trait Allocator: Send + Sync {
    /// Returns the device whose memory this allocates.
    fn device(&self) -> DeviceId;

    /// Allocates exactly `bytes` bytes at a multiple of `alignment`.
    ///
    /// # Errors
    ///
    /// [`AllocError::OutOfMemory`] or [`AllocError::BudgetExceeded`] if there is not enough memory,
    /// and [`AllocError::Unsupported`] if `alignment` is not a power of two or exceeds what the
    /// device supports.
    fn allocate(&self, bytes: usize, alignment: usize) -> Result<Buffer, AllocError>;

    /// Returns the counters.
    fn stats(&self) -> Stats;

    /// Returns unused memory to the operating system or the underlying allocator. Returns the
    /// number of bytes released.
    fn trim(&self) -> usize;
}
