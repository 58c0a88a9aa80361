//! Host memory: small regions from the heap, large ones as pages of their own that really go back.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

use crate::allocator::Counters;
use crate::buffer::{Address, Origin};
use crate::{AllocError, Allocator, Buffer, DeviceId, Stats, heap};

/// Every host region starts at a multiple of this: a cache line, and one vector of the widest kind.
pub const HOST_ALIGNMENT: usize = 64;

/// Regions from this size on are mapped by themselves. It is also the size of a huge page.
pub const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Memory of this process.
///
/// Regions of [`HUGE_PAGE_BYTES`] or more are anonymous mappings that ask for huge pages (first
/// touch of small pages costs several times as much) and are unmapped when dropped, so that
/// resident memory falls at once. Smaller ones come zeroed from the heap.
#[derive(Clone, Debug, Default)]
pub struct HostAllocator {
    counters: Arc<Counters>,
}

impl HostAllocator {
    /// An allocator with counters of its own.
    pub fn new() -> Self {
        Self::default()
    }

    /// The process-wide allocator.
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

    /// Asks the heap to return its free pages. Large regions have gone back already.
    fn trim(&self) -> usize {
        let before = resident_bytes();
        heap::give_back();
        before.saturating_sub(resident_bytes())
    }
}

/// Has the heap return its free pages when it is dropped. As the last field of a structure it does
/// so after all others are gone: glibc keeps pages between what is still in use.
#[derive(Debug)]
#[non_exhaustive]
pub struct TrimOnDrop {}

impl TrimOnDrop {
    /// What trims the host's heap once.
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

/// Resident memory of this process in bytes; 0 where the system does not tell.
fn resident_bytes() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = text.split_whitespace().nth(1).and_then(|field| field.parse::<usize>().ok()).unwrap_or(0);
    pages.saturating_mul(page_bytes())
}

/// Has writes beyond the limit on the size of files (`ulimit -f`) fail with an error, where the
/// system would end the process with `SIGXFSZ`. It changes the whole process, so that it is for
/// programs, at their start.
pub fn fail_writes_beyond_file_size_limit() {
    #[cfg(unix)]
    {
        // SAFETY: ignoring a signal runs no code of ours, and nothing else in this process relies
        // on that signal.
        unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    }
}

/// Size of a memory page in bytes.
pub(crate) fn page_bytes() -> usize {
    #[cfg(unix)]
    {
        static PAGE_BYTES: OnceLock<usize> = OnceLock::new();
        *PAGE_BYTES.get_or_init(|| {
            // SAFETY: `sysconf` only reads a constant of the system.
            let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
            usize::try_from(bytes).ok().filter(|bytes| bytes.is_power_of_two()).unwrap_or(4096)
        })
    }
    #[cfg(not(unix))]
    {
        4096
    }
}

/// `value` rounded up to a multiple of the power of two `alignment`; `None` on overflow.
pub(crate) fn round_up(value: usize, alignment: usize) -> Option<usize> {
    Some(value.checked_add(alignment - 1)? & !(alignment - 1))
}

/// A zeroed region of the heap.
pub(crate) struct HeapRegion {
    pointer: NonNull<u8>,
    layout: Layout,
    counters: Arc<Counters>,
}

// SAFETY: the heap may be freed from any thread, and the pointer is used for nothing but freeing
// here.
unsafe impl Send for HeapRegion {}
// SAFETY: a shared reference to the region gives no access to its memory.
unsafe impl Sync for HeapRegion {}

impl HeapRegion {
    fn allocate(bytes: usize, alignment: usize, counters: Arc<Counters>) -> Option<Self> {
        let layout = Layout::from_size_align(bytes, alignment).ok()?;
        // SAFETY: the caller has answered requests of no bytes already, so the layout's size is not
        // 0.
        let pointer = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        counters.allocated(bytes);
        Some(Self { pointer, layout, counters })
    }
}

impl Drop for HeapRegion {
    fn drop(&mut self) {
        // SAFETY: `pointer` came from `alloc_zeroed` with this very layout, and is freed once.
        unsafe { dealloc(self.pointer.as_ptr(), self.layout) };
        self.counters.freed(self.layout.size());
    }
}

/// Anonymous pages of their own.
pub(crate) struct PageRegion {
    pointer: NonNull<u8>,
    bytes: usize,
    counters: Arc<Counters>,
}

// SAFETY: a mapping may be unmapped from any thread, and the pointer is used for nothing but
// unmapping here.
unsafe impl Send for PageRegion {}
// SAFETY: a shared reference to the region gives no access to its memory.
unsafe impl Sync for PageRegion {}

#[cfg(unix)]
impl PageRegion {
    /// Maps at least `bytes` bytes at a multiple of a huge page.
    fn map(bytes: usize, alignment: usize, counters: Arc<Counters>) -> Option<Self> {
        let alignment = alignment.max(HUGE_PAGE_BYTES);
        // The last, partial huge page is completed only where that wastes little: memory matters
        // more than speed.
        let whole = round_up(bytes, HUGE_PAGE_BYTES)?;
        let bytes = if whole - bytes <= bytes / 64 { whole } else { round_up(bytes, page_bytes())? };
        let mapped = bytes.checked_add(alignment).filter(|&mapped| mapped <= isize::MAX as usize)?;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANON;
        // SAFETY: a new anonymous mapping at an address that the system picks touches nothing that
        // exists.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), mapped, protection, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            return None;
        }
        let base = base.cast::<u8>();
        let head = base.align_offset(alignment);
        let tail = mapped - head - bytes;
        let start = base.wrapping_add(head);
        // SAFETY: head and tail are whole pages of the mapping just made (base, alignment and bytes
        // are multiples of a page), and nothing refers to them yet. Where unmapping fails, address
        // space stays taken, nothing worse.
        unsafe {
            if head > 0 {
                libc::munmap(base.cast(), head);
            }
            if tail > 0 {
                libc::munmap(start.wrapping_add(bytes).cast(), tail);
            }
        }
        #[cfg(target_os = "linux")]
        // SAFETY: advice about pages that this function owns. It is a wish: a kernel without huge
        // pages refuses.
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
        // SAFETY: the pages were mapped by `map`, belong to this region alone, and are unmapped
        // once.
        unsafe { libc::munmap(self.pointer.as_ptr().cast(), self.bytes) };
        self.counters.freed(self.bytes);
    }
}

#[cfg(not(unix))]
impl PageRegion {
    /// Without anonymous mappings every region comes from the heap.
    fn map(_bytes: usize, _alignment: usize, _counters: Arc<Counters>) -> Option<Self> {
        None
    }
}
