//! Regions of host memory that free themselves: heap memory, anonymous mappings, and memory of
//! another owner.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::Arc;
#[cfg(unix)]
use std::sync::OnceLock;

use crate::fork::get_or_init;
use crate::stats::Counters;

/// The minimum alignment of host regions: a cache line and the widest vector.
pub const HOST_ALIGNMENT: usize = 64;

/// Regions of this size or more are mapped individually. It is also the size of a huge page.
pub const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Returns the size of a memory page in bytes.
pub(crate) fn page_bytes() -> usize {
    #[cfg(unix)]
    {
        static PAGE_BYTES: OnceLock<usize> = OnceLock::new();
        *get_or_init(&PAGE_BYTES, || {
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

/// The alignment that heaps give to every region of more than a few bytes.
const HEAP_ALIGNMENT: usize = 16;

/// Smaller regions are aligned within a larger one. C's `posix_memalign` allocates more as well,
/// but frees both ends again, which takes longer than a small kernel.
const LEAST_ALIGNED_BYTES: usize = 4096;

/// A zeroed heap region.
pub(crate) struct HeapRegion {
    pub(crate) pointer: NonNull<u8>,
    bytes: usize,
    /// What the heap gave, with `layout`.
    base: NonNull<u8>,
    layout: Layout,
    counters: Arc<Counters>,
}

// SAFETY: heap memory may be freed from any thread, and the pointer is only used for that here.
unsafe impl Send for HeapRegion {}
// SAFETY: a shared reference to the region gives no access to its memory.
unsafe impl Sync for HeapRegion {}

impl HeapRegion {
    pub(crate) fn allocate(bytes: usize, alignment: usize, counters: Arc<Counters>) -> Option<Self> {
        let is_small = bytes < LEAST_ALIGNED_BYTES && alignment == HOST_ALIGNMENT;
        let layout = match is_small {
            true => Layout::from_size_align(bytes + alignment - HEAP_ALIGNMENT, HEAP_ALIGNMENT),
            false => Layout::from_size_align(bytes, alignment),
        };
        let layout = layout.ok()?;
        // SAFETY: the size is not 0, because `HostAllocator::allocate` answers empty requests
        // before.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        let offset = if is_small { base.align_offset(alignment) } else { 0 };
        // SAFETY: `base` is a multiple of the heap's alignment, so that the next multiple of
        // `alignment` is at most their difference away, by which the layout is larger.
        let pointer = unsafe { base.add(offset) };
        counters.allocated(bytes);
        Some(Self { pointer, bytes, base, layout, counters })
    }
}

impl Drop for HeapRegion {
    fn drop(&mut self) {
        // SAFETY: `base` came from `alloc_zeroed` with this layout, and is freed only here.
        unsafe { dealloc(self.base.as_ptr(), self.layout) };
        self.counters.freed(self.bytes);
    }
}

/// An anonymous mapping.
pub(crate) struct PageRegion {
    pub(crate) pointer: NonNull<u8>,
    pub(crate) bytes: usize,
    pub(crate) counters: Arc<Counters>,
}

// SAFETY: memory may be unmapped from any thread, and the pointer is only used for that here.
unsafe impl Send for PageRegion {}
// SAFETY: a shared reference to the region gives no access to its memory.
unsafe impl Sync for PageRegion {}

#[cfg(unix)]
impl PageRegion {
    /// Maps at least `bytes` bytes at a multiple of a huge page.
    pub(crate) fn map(bytes: usize, alignment: usize, counters: Arc<Counters>) -> Option<Self> {
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
    pub(crate) fn map(_bytes: usize, _alignment: usize, _counters: Arc<Counters>) -> Option<Self> {
        None
    }
}

/// The owner of foreign memory. Dropping it returns the memory.
pub(crate) struct ForeignRegion {
    #[expect(dead_code, reason = "held to be dropped")]
    pub(crate) owner: Box<dyn Send + Sync>,
    pub(crate) is_writable: bool,
}
