//! Pinned memory of the host, which the device reads and writes on its own while the host goes on.

use std::ptr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use cudarc::driver::sys;
use ort_core::{Result, ensure};

use super::{Context, Event, Stream};

/// What parts begin at multiples of, so that copies are of whole transactions.
const ALIGNMENT: usize = 256;

/// A piece of pinned memory with the event of the last copy from or to it.
#[derive(Debug)]
pub(crate) struct Staged {
    context: Arc<Context>,
    memory: *mut u8,
    len: usize,
    /// Bytes at its beginning that copies may still read.
    used: usize,
    copied: Event,
}

// SAFETY: as for the context; the memory is this one's alone.
unsafe impl Send for Staged {}
// SAFETY: whoever shares one can do nothing with it.
unsafe impl Sync for Staged {}

impl Staged {
    /// So many bytes.
    pub(crate) fn new(context: &Arc<Context>, len: usize) -> Result<Staged> {
        let copied = Event::new(context)?;
        context.enter()?;
        let mut memory = ptr::null_mut();
        // SAFETY: writes one address, which is freed when this is dropped; there are no flags.
        let code = unsafe { sys::cuMemHostAlloc(&mut memory, len, 0) };
        context.check(code, "cuMemHostAlloc")?;
        context.counts.pinned_bytes.fetch_add(len, Ordering::Relaxed);
        Ok(Staged { context: context.clone(), memory: memory.cast(), len, used: 0, copied })
    }

    /// Bytes that nothing reads.
    pub(crate) fn room(&self) -> usize {
        self.len.saturating_sub(self.used)
    }

    /// Copies bytes, as many as there is room for at most, to the device. They may be changed when
    /// it returns.
    pub(crate) fn send(&mut self, bytes: &[u8], to: u64, stream: &Stream) -> Result<()> {
        ensure!(bytes.len() <= self.room(), Fail, "{} bytes where {} are free", bytes.len(), self.room());
        self.context.enter()?;
        // SAFETY: so many bytes are there, and no copy reads them.
        let from = unsafe {
            let from = self.memory.add(self.used);
            from.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            from
        };
        // SAFETY: the source stays as it is until the event is waited for. The target lies in live
        // memory of this context, which the driver checks.
        let code = unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.cast(), bytes.len(), stream.stream) };
        self.context.check(code, "cuMemcpyHtoD")?;
        self.used = (self.used + bytes.len()).next_multiple_of(ALIGNMENT);
        self.copied.record(stream)
    }

    /// Waits until nothing reads it any more.
    pub(crate) fn clear(&mut self) -> Result<()> {
        if self.used > 0 {
            self.copied.wait()?;
            self.used = 0;
        }
        Ok(())
    }

    /// Lets bytes be copied from the device to its beginning.
    pub(crate) fn receive(&mut self, from: u64, bytes: usize, stream: &Stream) -> Result<()> {
        ensure!(self.used == 0 && bytes <= self.len, Fail, "{bytes} bytes where {} are free", self.room());
        self.context.enter()?;
        // SAFETY: so many bytes are there, and nobody reads them until the event is waited for.
        let code = unsafe { sys::cuMemcpyDtoHAsync_v2(self.memory.cast(), from, bytes, stream.stream) };
        self.context.check(code, "cuMemcpyDtoH")?;
        self.used = bytes;
        self.copied.record(stream)
    }

    /// Waits for what [`Self::receive`] was asked for, and copies it.
    pub(crate) fn take(&mut self, to: &mut [u8]) -> Result<()> {
        ensure!(to.len() == self.used, Fail, "{} bytes where {} were received", to.len(), self.used);
        self.clear()?;
        // SAFETY: the device has written so many bytes, and writes no more.
        unsafe { to.as_mut_ptr().copy_from_nonoverlapping(self.memory, to.len()) };
        Ok(())
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        // What a broken context holds is not known: its memory stays.
        if self.clear().is_ok() && self.context.enter().is_ok() {
            // SAFETY: it was allocated with this context, and no copy uses it any more.
            let _ = unsafe { sys::cuMemFreeHost(self.memory.cast()) };
            self.context.counts.pinned_bytes.fetch_sub(self.len, Ordering::Relaxed);
        }
    }
}
