//! The allocators that `CreateAllocator` makes. Each counts what it gives.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicI64, Ordering};

use ort_sys::{OrtAllocator, OrtKeyValuePairs, OrtStatusPtr};

use crate::allocator::{OURS, allocate, default_allocator, free, usable};
use crate::entry::{In, Object, Out, entries, guarded, guarded_value};
use crate::key_values::KeyValues;
use crate::memory_info::MemoryInfo;
use crate::session::Session;
use crate::status::invalid;

/// An allocator of C, and its counters behind the table that C reads.
#[repr(C)]
struct SessionAllocator {
    table: OrtAllocator,
    in_use: AtomicI64,
    most_in_use: AtomicI64,
    largest: AtomicI64,
    allocations: AtomicI64,
}

/// The allocator behind the pointer of C.
fn of<'a>(allocator: *const OrtAllocator) -> &'a SessionAllocator {
    // SAFETY: only the functions of `TABLE` call this, with the object that has the table.
    unsafe { &*allocator.cast() }
}

fn count(allocator: &SessionAllocator, bytes: i64) {
    let now = allocator.in_use.fetch_add(bytes, Ordering::Relaxed) + bytes;
    if bytes > 0 {
        allocator.most_in_use.fetch_max(now, Ordering::Relaxed);
        allocator.largest.fetch_max(bytes, Ordering::Relaxed);
        allocator.allocations.fetch_add(1, Ordering::Relaxed);
    }
}

fn give(allocator: &SessionAllocator, len: usize) -> *mut c_void {
    let bytes = allocate(len);
    if !bytes.is_null() {
        // SAFETY: `allocate` returned the bytes.
        count(allocator, unsafe { usable(bytes) });
    }
    bytes.cast()
}

extern "system" fn alloc_entry(allocator: *mut OrtAllocator, len: usize) -> *mut c_void {
    guarded_value(|| give(of(allocator), len), null_mut())
}

extern "system" fn reserve_entry(allocator: *const OrtAllocator, len: usize) -> *mut c_void {
    guarded_value(|| give(of(allocator), len), null_mut())
}

extern "system" fn free_entry(allocator: *mut OrtAllocator, bytes: *mut c_void) {
    let take_back = || {
        if !bytes.is_null() {
            // SAFETY: callers give back what `give` returned, once.
            unsafe {
                count(of(allocator), -usable(bytes.cast()));
                free(bytes.cast());
            }
        }
    };
    guarded_value(take_back, ());
}

extern "system" fn stats_entry(
    allocator: *const OrtAllocator,
    out: *mut *mut OrtKeyValuePairs,
) -> OrtStatusPtr {
    guarded("GetStats", || {
        let mut out = Out::of(out);
        let place = out.place()?;
        let allocator = of(allocator);
        let read = |counter: &AtomicI64| counter.load(Ordering::Relaxed);
        let (in_use, allocations) = (read(&allocator.in_use), read(&allocator.allocations));
        // The names of ONNX Runtime. There are no arenas, and no limit.
        let stats = [
            ("InUse", in_use),
            ("Limit", -1),
            ("MaxAllocSize", read(&allocator.largest)),
            ("MaxInUse", read(&allocator.most_in_use)),
            ("NumAllocs", allocations),
            ("NumArenaExtensions", 0),
            ("NumArenaShrinkages", 0),
            ("NumReserves", 0),
            ("RequestedInUse", in_use),
            ("TotalAllocated", in_use),
        ];
        let mut pairs = KeyValues::default();
        stats.iter().for_each(|(key, value)| pairs.set(key.as_bytes(), value.to_string().as_bytes()));
        place.put(Object::give(pairs).cast());
        Ok(())
    })
}

const TABLE: OrtAllocator = OrtAllocator {
    Alloc: Some(alloc_entry),
    Free: Some(free_entry),
    Reserve: Some(reserve_entry),
    GetStats: Some(stats_entry),
    ..OURS
};

entries! {
    /// 131
    fn CreateAllocator(session: In<Session>, info: In<MemoryInfo>, out: Out<*mut OrtAllocator>) {
        let out = out.place()?;
        session.get()?;
        if !info.get()?.is_host() {
            return invalid("No requested allocator available: the session runs on the CPU");
        }
        let zero = || AtomicI64::new(0);
        let allocator = SessionAllocator {
            table: TABLE,
            in_use: zero(),
            most_in_use: zero(),
            largest: zero(),
            allocations: zero(),
        };
        out.put(Box::into_raw(Box::new(allocator)).cast());
        Ok(())
    }

    /// 132
    fn ReleaseAllocator(allocator: *mut OrtAllocator) -> (), else (), {
        if !allocator.is_null() && allocator != default_allocator() {
            // SAFETY: `CreateAllocator` made it, and the caller gives it back once.
            drop(unsafe { Box::from_raw(allocator.cast::<SessionAllocator>()) });
        }
    }
}
