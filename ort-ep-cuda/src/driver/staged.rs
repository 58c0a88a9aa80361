//! Page-locked host memory, which the device reads and writes by DMA while the host goes on.

use std::ptr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use cudarc::driver::sys;
use ort_core::{Result, ensure};

use super::{Context, Event, Stream};

/// The alignment of parts within a buffer, so that copies use whole memory transactions.
const ALIGNMENT: usize = 256;

/// A page-locked buffer, with the event of the last copy from or to it.
#[derive(Debug)]
pub(crate) struct Staged {
    context: Arc<Context>,
    memory: *mut u8,
    len: usize,
    /// Bytes at its start that a copy may still read or write.
    used: usize,
    copied: Event,
}

// SAFETY: driver handles may be used from any thread, as for `Context`; this value alone owns the
// memory.
unsafe impl Send for Staged {}
// SAFETY: a shared reference gives no access to the memory: only `room` takes one.
unsafe impl Sync for Staged {}

impl Staged {
    /// Allocates `len` bytes.
    pub(crate) fn new(context: &Arc<Context>, len: usize) -> Result<Staged> {
        let copied = Event::new(context)?;
        context.enter()?;
        let mut memory = ptr::null_mut();
        // SAFETY: the driver writes one address, which `Drop` frees; there are no flags.
        let code = unsafe { sys::cuMemHostAlloc(&mut memory, len, 0) };
        context.check(code, "cuMemHostAlloc")?;
        context.counts.pinned_bytes.fetch_add(len, Ordering::Relaxed);
        Ok(Staged { context: context.clone(), memory: memory.cast(), len, used: 0, copied })
    }

    /// Returns the bytes that no copy uses.
    pub(crate) fn room(&self) -> usize {
        self.len.saturating_sub(self.used)
    }

    /// Copies bytes to the device, at most [`Self::room`] of them. The caller may overwrite them
    /// when it returns.
    pub(crate) fn send(&mut self, bytes: &[u8], to: u64, stream: &Stream) -> Result<()> {
        ensure!(bytes.len() <= self.room(), Fail, "{} bytes where {} are free", bytes.len(), self.room());
        self.context.enter()?;
        // SAFETY: the check above ensured that the bytes fit after the first `used` ones, and no
        // copy reads there.
        let from = unsafe {
            let from = self.memory.add(self.used);
            from.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            from
        };
        // SAFETY: the source does not change until `clear` has waited for the event. The target is
        // live memory of this context, which the driver checks.
        let code = unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.cast(), bytes.len(), stream.stream) };
        self.context.check(code, "cuMemcpyHtoD")?;
        self.used = (self.used + bytes.len()).next_multiple_of(ALIGNMENT);
        self.copied.record(stream)
    }

    /// Waits until no copy uses the buffer.
    pub(crate) fn clear(&mut self) -> Result<()> {
        if self.used > 0 {
            self.copied.wait()?;
            self.used = 0;
        }
        Ok(())
    }

    /// Enqueues a copy from the device to the start of the buffer.
    pub(crate) fn receive(&mut self, from: u64, bytes: usize, stream: &Stream) -> Result<()> {
        ensure!(self.used == 0 && bytes <= self.len, Fail, "{bytes} bytes where {} are free", self.room());
        self.context.enter()?;
        // SAFETY: the check above ensured that the bytes fit. `take` waits for the event before it
        // reads.
        let code = unsafe { sys::cuMemcpyDtoHAsync_v2(self.memory.cast(), from, bytes, stream.stream) };
        self.context.check(code, "cuMemcpyDtoH")?;
        self.used = bytes;
        self.copied.record(stream)
    }

    /// Waits for the copy that [`Self::receive`] enqueued, and copies the bytes out.
    pub(crate) fn take(&mut self, to: &mut [u8]) -> Result<()> {
        ensure!(to.len() == self.used, Fail, "{} bytes where {} were received", to.len(), self.used);
        self.clear()?;
        // SAFETY: `receive` filled `used` bytes, which the check above compared; `clear` waited for
        // the copy.
        unsafe { to.as_mut_ptr().copy_from_nonoverlapping(self.memory, to.len()) };
        Ok(())
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        // If the context is broken, copies may be in an unknown state, so we leak the memory.
        if self.clear().is_ok() && self.context.enter().is_ok() {
            // SAFETY: it was allocated in this context, and `clear` waited for the last copy.
            let _ = unsafe { sys::cuMemFreeHost(self.memory.cast()) };
            self.context.counts.pinned_bytes.fetch_sub(self.len, Ordering::Relaxed);
        }
    }
}
