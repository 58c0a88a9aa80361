//! `OrtAllocator`: the allocator of the library, and those of callers.
//!
//! Names, arrays and tensors that a caller asks for come from the allocator that the caller passes.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ffi::{c_char, c_void};
use std::ptr::{NonNull, null_mut};

use ort_sys::{ORT_API_VERSION, OrtAllocator, OrtKeyValuePairs, OrtMemoryInfo};

use crate::entry::{In, Object, Out, entries, guarded_value};
use crate::key_values::KeyValues;
use crate::memory_info::{HOST, MemoryInfo};
use crate::status::{Failure, Outcome, code, invalid, of_client};

/// A cache line, and an AVX-512 register.
const ALIGNMENT: usize = 64;

/// Alignment of the block behind an allocation. glibc clears blocks of larger alignment by hand,
/// and so touches their pages.
const BLOCK_ALIGNMENT: usize = 16;

/// What stands before the bytes of an allocation: `Free` gets no size.
#[derive(Clone, Copy)]
struct Header {
    block: NonNull<u8>,
    size: usize,
}

/// Returns zeroed memory, or null for no bytes and where there is not enough.
pub(crate) fn allocate(len: usize) -> *mut u8 {
    let size = len.checked_add(size_of::<Header>() + ALIGNMENT);
    let layout = size.and_then(|size| Layout::from_size_align(size, BLOCK_ALIGNMENT).ok());
    let Some(layout) = layout.filter(|_| len > 0) else { return null_mut() };
    // SAFETY: the layout is not empty.
    let Some(block) = NonNull::new(unsafe { alloc_zeroed(layout) }) else { return null_mut() };
    let start = block.as_ptr();
    let padding = (start.addr() + size_of::<Header>()).next_multiple_of(ALIGNMENT) - start.addr();
    // SAFETY: the padding is at most the header and the alignment, which the layout adds to `len`.
    let bytes = unsafe { start.add(padding) };
    // SAFETY: the padding has room for the header, and ends at a multiple of its alignment.
    unsafe { bytes.cast::<Header>().sub(1).write(Header { block, size: layout.size() }) };
    bytes
}

/// The bytes that [`allocate`] returned, without what it adds.
///
/// # Safety
///
/// The pointer comes from [`allocate`], is not null and was not freed.
pub(crate) unsafe fn usable(bytes: *mut u8) -> i64 {
    // SAFETY: `allocate` wrote the header there.
    let Header { size, .. } = unsafe { bytes.cast::<Header>().sub(1).read() };
    i64::try_from(size - size_of::<Header>() - ALIGNMENT).unwrap_or(i64::MAX)
}

/// Frees what [`allocate`] returned; null is allowed.
///
/// # Safety
///
/// The pointer comes from [`allocate`] and was not freed.
pub(crate) unsafe fn free(bytes: *mut u8) {
    if bytes.is_null() {
        return;
    }
    // SAFETY: `allocate` wrote the header there.
    let Header { block, size } = unsafe { bytes.cast::<Header>().sub(1).read() };
    // SAFETY: `allocate` made the block with this layout.
    unsafe { dealloc(block.as_ptr(), Layout::from_size_align_unchecked(size, BLOCK_ALIGNMENT)) }
}

extern "system" fn alloc_entry(_: *mut OrtAllocator, len: usize) -> *mut c_void {
    guarded_value(|| allocate(len).cast(), null_mut())
}

extern "system" fn reserve_entry(_: *const OrtAllocator, len: usize) -> *mut c_void {
    guarded_value(|| allocate(len).cast(), null_mut())
}

extern "system" fn free_entry(_: *mut OrtAllocator, bytes: *mut c_void) {
    // SAFETY: callers give back what `alloc_entry` or `reserve_entry` returned, once.
    guarded_value(|| unsafe { free(bytes.cast()) }, ());
}

extern "system" fn info_entry(_: *const OrtAllocator) -> *const OrtMemoryInfo {
    (&raw const HOST).cast()
}

pub(crate) const OURS: OrtAllocator = OrtAllocator {
    version: ORT_API_VERSION,
    Alloc: Some(alloc_entry),
    Free: Some(free_entry),
    Info: Some(info_entry),
    Reserve: Some(reserve_entry),
    GetStats: None,
    AllocOnStream: None,
    Shrink: None,
};

/// The allocator of the library.
static DEFAULT: OrtAllocator = OURS;

/// The default allocator, which callers never release.
pub(crate) fn default_allocator() -> *mut OrtAllocator {
    // Callers read its fields, and change none.
    (&raw const DEFAULT).cast_mut()
}

/// The default allocator as one that a caller passes.
pub(crate) fn default_handle() -> Allocator {
    Allocator(default_allocator())
}

/// An allocator that a caller passes.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Allocator(*mut OrtAllocator);

// SAFETY: the header demands that allocators may be called from any thread.
unsafe impl Send for Allocator {}
// SAFETY: as above.
unsafe impl Sync for Allocator {}

impl Allocator {
    pub(crate) fn is_null(&self) -> bool {
        self.0.is_null()
    }

    /// An allocator of this library.
    pub(crate) fn of(allocator: *mut OrtAllocator) -> Allocator {
        Allocator(allocator)
    }

    fn table(&self) -> Outcome<&OrtAllocator> {
        if self.0.is_null() {
            return invalid("the allocator is null; take GetAllocatorWithDefaultOptions");
        }
        // Of an older allocator only the first fields exist, and these functions read no others.
        // SAFETY: it is not null, and the caller keeps it alive.
        Ok(unsafe { &*self.0 })
    }

    /// Returns memory of the allocator; null for no bytes.
    pub(crate) fn allocate(&self, len: usize) -> Outcome<*mut u8> {
        let table = self.table()?;
        let Some(alloc) = table.Alloc else { return invalid("the allocator has no function Alloc") };
        // SAFETY: the caller's function gets the caller's object.
        let bytes: *mut u8 = unsafe { alloc(self.0, len) }.cast();
        match bytes.is_null() && len > 0 {
            false => Ok(bytes),
            true => Err(Failure::new(code::FAIL, format!("the allocator has no {len} bytes"))),
        }
    }

    /// Gives memory back to the allocator.
    pub(crate) fn free(&self, bytes: *mut u8) -> Outcome {
        let table = self.table()?;
        let Some(free) = table.Free else { return invalid("the allocator has no function Free") };
        // SAFETY: the caller gives back what the allocator returned, once.
        unsafe { free(self.0, bytes.cast()) };
        Ok(())
    }

    /// Where the allocator's memory lies.
    pub(crate) fn info(&self) -> Outcome<In<MemoryInfo>> {
        let table = self.table()?;
        let Some(info) = table.Info else { return invalid("the allocator has no function Info") };
        // SAFETY: as in `allocate`.
        Ok(In::of(unsafe { info(self.0) }.cast()))
    }

    /// Returns a text with a zero at its end, in memory of the allocator.
    pub(crate) fn text(&self, text: &[u8]) -> Outcome<*mut c_char> {
        let bytes = self.allocate(text.len() + 1)?;
        // SAFETY: the allocator returned memory for the text and the zero.
        unsafe {
            bytes.copy_from_nonoverlapping(text.as_ptr(), text.len());
            bytes.add(text.len()).write(0);
        }
        Ok(bytes.cast())
    }

    /// Returns an array with these elements, in memory of the allocator; null for none.
    pub(crate) fn array<T: Copy>(&self, elements: &[T]) -> Outcome<*mut T> {
        if elements.is_empty() {
            return Ok(null_mut());
        }
        let array = self.allocate(size_of_val(elements))?.cast::<T>();
        for (place, element) in elements.iter().enumerate() {
            // SAFETY: the allocator returned memory for all elements, perhaps not aligned.
            unsafe { array.add(place).write_unaligned(*element) };
        }
        Ok(array)
    }
}

/// Memory of an allocator, which gets it back.
pub(crate) struct Allocated {
    pub(crate) bytes: *mut u8,
    pub(crate) allocator: Allocator,
}

// SAFETY: it only keeps the memory until it is dropped; allocators may be called from any thread.
unsafe impl Send for Allocated {}
// SAFETY: as above.
unsafe impl Sync for Allocated {}

impl Drop for Allocated {
    fn drop(&mut self) {
        // The allocator outlives its memory, and had the function when it was given.
        let _ = self.allocator.free(self.bytes);
    }
}

entries! {
    /// 75
    fn AllocatorAlloc(allocator: Allocator, len: usize, out: Out<*mut c_void>) {
        let out = out.place()?;
        out.put(allocator.allocate(len)?.cast());
        Ok(())
    }

    /// 76
    fn AllocatorFree(allocator: Allocator, bytes: *mut c_void) {
        allocator.free(bytes.cast())
    }

    /// 77
    fn AllocatorGetInfo(allocator: Allocator, out: Out<In<MemoryInfo>>) {
        let out = out.place()?;
        out.put(allocator.info()?);
        Ok(())
    }

    /// 78
    fn GetAllocatorWithDefaultOptions(out: Out<*mut OrtAllocator>) {
        out.place()?.put(default_allocator());
        Ok(())
    }

    /// 319. Without the function there are none.
    fn AllocatorGetStats(allocator: Allocator, out: Out<*mut OrtKeyValuePairs>) {
        let out = out.place()?;
        let table = allocator.table()?;
        // Allocators of older versions do not have the field.
        let stats = if table.version >= 23 { table.GetStats } else { None };
        let Some(stats) = stats else {
            out.put(Object::give(KeyValues::default()).cast());
            return Ok(());
        };
        let mut pairs = null_mut();
        // SAFETY: the caller's function gets the caller's object, and a place for its answer.
        let status = unsafe { stats(allocator.0, &raw mut pairs) };
        of_client(status)?;
        out.put(pairs);
        Ok(())
    }
}

/// The object behind a pointer to the library's own memory info.
pub(crate) fn host_info() -> *const Object<MemoryInfo> {
    &raw const HOST
}
