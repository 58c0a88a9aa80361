//! Host memory: small regions from the heap, large ones as anonymous mappings that are unmapped
//! when dropped.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

use crate::allocator::Counters;
use crate::buffer::{Address, Origin};
use crate::{AllocError, Allocator, Buffer, DeviceId, Stats, heap};

/// The minimum alignment of host regions: a cache line and the widest vector.
pub const HOST_ALIGNMENT: usize = 64;

/// Regions of this size or more are mapped individually. It is also the size of a huge page.
pub const HUGE_PAGE_BYTES: usize = 2 << 20;

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
        GLOBAL.get_or_init(Arc::default)
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

/// Returns the size of a memory page in bytes.
pub(crate) fn page_bytes() -> usize {
    #[cfg(unix)]
    {
        static PAGE_BYTES: OnceLock<usize> = OnceLock::new();
        *PAGE_BYTES.get_or_init(|| {
            // SAFETY: `sysconf` only reads a system constant.
            let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
            usize::try_from(bytes).ok().filter(|bytes| bytes.is_power_of_two()).unwrap_or(4096)
        })
    }
    #[cfg(not(unix))]
    {
        4096
    }
}

/// Rounds `value` up to a multiple of the power of two `alignment`; `None` on overflow.
pub(crate) fn round_up(value: usize, alignment: usize) -> Option<usize> {
    Some(value.checked_add(alignment - 1)? & !(alignment - 1))
}

/// A zeroed heap region.
pub(crate) struct HeapRegion {
    pointer: NonNull<u8>,
    layout: Layout,
    counters: Arc<Counters>,
}

// SAFETY: heap memory may be freed from any thread, and the pointer is only used for that here.
unsafe impl Send for HeapRegion {}
// SAFETY: a shared reference to the region gives no access to its memory.
unsafe impl Sync for HeapRegion {}

impl HeapRegion {
    fn allocate(bytes: usize, alignment: usize, counters: Arc<Counters>) -> Option<Self> {
        let layout = Layout::from_size_align(bytes, alignment).ok()?;
        // SAFETY: the size is not 0, because `HostAllocator::allocate` answers empty requests
        // before.
        let pointer = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        counters.allocated(bytes);
        Some(Self { pointer, layout, counters })
    }
}

impl Drop for HeapRegion {
    fn drop(&mut self) {
        // SAFETY: `pointer` came from `alloc_zeroed` with this layout, and is freed only here.
        unsafe { dealloc(self.pointer.as_ptr(), self.layout) };
        self.counters.freed(self.layout.size());
    }
}

/// An anonymous mapping.
pub(crate) struct PageRegion {
    pointer: NonNull<u8>,
    bytes: usize,
    counters: Arc<Counters>,
}

// SAFETY: memory may be unmapped from any thread, and the pointer is only used for that here.
unsafe impl Send for PageRegion {}
// SAFETY: a shared reference to the region gives no access to its memory.
unsafe impl Sync for PageRegion {}

#[cfg(unix)]
impl PageRegion {
    /// Maps at least `bytes` bytes at a multiple of a huge page.
    fn map(bytes: usize, alignment: usize, counters: Arc<Counters>) -> Option<Self> {
        let alignment = alignment.max(HUGE_PAGE_BYTES);
        // Round up to a whole huge page only if that wastes less than 1/64: memory matters more
        // than speed.
        let whole = round_up(bytes, HUGE_PAGE_BYTES)?;
        let bytes = if whole - bytes <= bytes / 64 { whole } else { round_up(bytes, page_bytes())? };
        // `mmap` only aligns to a page, so map more and unmap what is before and after the aligned
        // range.
        let mapped = bytes.checked_add(alignment).filter(|&mapped| mapped <= isize::MAX as usize)?;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANON;
        // SAFETY: a new anonymous mapping at an address that the kernel picks affects no existing
        // memory.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), mapped, protection, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            return None;
        }
        let base = base.cast::<u8>();
        let head = base.align_offset(alignment);
        let tail = mapped - head - bytes;
        let start = base.wrapping_add(head);
        // SAFETY: head and tail are whole pages of the mapping made above, because base, alignment
        // and bytes are multiples of a page. Nothing refers to them yet. If `munmap` fails, only
        // address space is lost.
        unsafe {
            if head > 0 {
                libc::munmap(base.cast(), head);
            }
            if tail > 0 {
                libc::munmap(start.wrapping_add(bytes).cast(), tail);
            }
        }
        #[cfg(target_os = "linux")]
        // SAFETY: the pages were mapped above and belong to this function. Failure is harmless: a
        // kernel without huge pages refuses the advice.
        unsafe {
            libc::madvise(start.cast(), bytes, libc::MADV_HUGEPAGE);
        }
        counters.allocated(bytes);
        Some(Self { pointer: NonNull::new(start)?, bytes, counters })
    }
}

#[cfg(unix)]
impl Drop for PageRegion {
    fn drop(&mut self) {
        // SAFETY: `map` mapped the pages for this region alone, and they are unmapped only here.
        unsafe { libc::munmap(self.pointer.as_ptr().cast(), self.bytes) };
        self.counters.freed(self.bytes);
    }
}

#[cfg(not(unix))]
impl PageRegion {
    /// Fails, because every region comes from the heap on systems without anonymous mappings.
    fn map(_bytes: usize, _alignment: usize, _counters: Arc<Counters>) -> Option<Self> {
        None
    }
}
