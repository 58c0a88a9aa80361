//! Host memory: small regions from the heap, large ones as anonymous mappings that are unmapped
//! when dropped.

use std::sync::{Arc, OnceLock};

use crate::buffer::{Address, Origin};
use crate::fork::get_or_init;
use crate::region::{HOST_ALIGNMENT, HUGE_PAGE_BYTES, HeapRegion, PageRegion, page_bytes};
use crate::stats::Counters;
use crate::{AllocError, Allocator, Buffer, DeviceId, Stats, heap};

/// The allocator of host memory.
///
/// Regions of [`HUGE_PAGE_BYTES`] or more are anonymous mappings with huge pages, because first
/// touch of small pages costs several times as much. They are unmapped when dropped, so resident
/// memory falls at once. Smaller regions are zeroed heap memory.
#[derive(Clone, Debug, Default)]
pub struct HostAllocator {
    counters: Arc<Counters>,
}

impl HostAllocator {
    /// Creates an allocator with its own counters.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the process-wide allocator.
    pub fn global() -> &'static Arc<Self> {
        static GLOBAL: OnceLock<Arc<HostAllocator>> = OnceLock::new();
        get_or_init(&GLOBAL, Arc::default)
    }
}

impl Allocator for HostAllocator {
    fn device(&self) -> DeviceId {
        DeviceId::HOST
    }

    fn allocate(&self, bytes: usize, alignment: usize) -> Result<Buffer, AllocError> {
        AllocError::check_alignment(DeviceId::HOST, alignment)?;
        let alignment = alignment.max(HOST_ALIGNMENT);
        if bytes == 0 {
            return Ok(Buffer::empty(DeviceId::HOST));
        }
        let out_of_memory =
            || AllocError::OutOfMemory { requested: bytes, available: None, device: DeviceId::HOST };
        let counters = Arc::clone(&self.counters);
        let (pointer, origin) = if cfg!(unix) && bytes >= HUGE_PAGE_BYTES {
            let region = PageRegion::map(bytes, alignment, counters).ok_or_else(out_of_memory)?;
            (region.pointer, Origin::Pages(region))
        } else {
            let region = HeapRegion::allocate(bytes, alignment, counters).ok_or_else(out_of_memory)?;
            (region.pointer, Origin::Heap(region))
        };
        Ok(Buffer::new(Address::Host(pointer), bytes, DeviceId::HOST, origin))
    }

    fn stats(&self) -> Stats {
        self.counters.stats()
    }

    /// Makes the heap return its free pages. Large regions are unmapped already.
    fn trim(&self) -> usize {
        let before = resident_bytes();
        heap::give_back();
        before.saturating_sub(resident_bytes())
    }
}

/// Trims the host heap when dropped. Put it last in a struct, so that it runs after the other
/// fields have been freed: glibc cannot return pages between allocations that are in use.
#[derive(Debug)]
#[non_exhaustive]
pub struct TrimOnDrop {}

impl TrimOnDrop {
    /// Creates a guard that trims the host heap once.
    #[must_use]
    pub fn new() -> Self {
        Self {}
    }
}

impl Default for TrimOnDrop {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for TrimOnDrop {
    fn drop(&mut self) {
        HostAllocator::global().trim();
    }
}

/// Returns the resident memory of this process in bytes, or 0 if the system does not report it.
fn resident_bytes() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = text.split_whitespace().nth(1).and_then(|field| field.parse::<usize>().ok()).unwrap_or(0);
    pages.saturating_mul(page_bytes())
}

/// Makes a write beyond the file size limit (`ulimit -f`) fail with an error instead of killing the
/// process with `SIGXFSZ`. This affects the whole process, so only programs should call it, at
/// startup.
pub fn fail_writes_beyond_file_size_limit() {
    #[cfg(unix)]
    {
        // SAFETY: ignoring a signal runs no code of ours, and nothing else in this process relies
        // on `SIGXFSZ`.
        unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    }
}
