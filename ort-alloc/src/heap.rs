//! The heap of small regions: which ones a program may take, and how each gives free pages back.
//!
//! A library leaves the choice to the program. With the feature `mimalloc` or `jemalloc` of this
//! crate, [`Heap`] is that allocator, and trimming knows how to ask it for its free pages; the
//! program makes it its own:
//!
//! ```
//! #[global_allocator]
//! static HEAP: ort_alloc::Heap = ort_alloc::Heap;
//! # fn main() {}
//! ```

#[cfg(all(feature = "mimalloc", feature = "jemalloc"))]
compile_error!("a program has one heap: take the feature `mimalloc` or the feature `jemalloc`, not both");

/// The allocator that a program may make its own with `#[global_allocator]`: mimalloc or jemalloc
/// with the feature of that name, else the system's.
#[cfg(feature = "mimalloc")]
pub use mimalloc::MiMalloc as Heap;
/// The allocator that a program may make its own with `#[global_allocator]`: mimalloc or jemalloc
/// with the feature of that name, else the system's.
#[cfg(not(any(feature = "mimalloc", feature = "jemalloc")))]
pub use std::alloc::System as Heap;
/// The allocator that a program may make its own with `#[global_allocator]`: mimalloc or jemalloc
/// with the feature of that name, else the system's.
#[cfg(all(feature = "jemalloc", not(feature = "mimalloc")))]
pub use tikv_jemallocator::Jemalloc as Heap;

/// Asks the heap for its free pages. Where there is another one, glibc's still serves C code, and a
/// program that did not take the other.
pub(crate) fn give_back() {
    #[cfg(feature = "mimalloc")]
    // SAFETY: `mi_collect` takes no pointers and may be called from any thread.
    unsafe {
        libmimalloc_sys::mi_collect(true);
    }
    #[cfg(all(feature = "jemalloc", not(feature = "mimalloc")))]
    purge();
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: `malloc_trim` takes no pointers and may be called from any thread.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Empties this thread's cache, then gives back the free pages of all arenas.
#[cfg(all(feature = "jemalloc", not(feature = "mimalloc")))]
fn purge() {
    // 4096 stands for all arenas: `MALLCTL_ARENAS_ALL`.
    for name in [c"thread.tcache.flush", c"arena.4096.purge"] {
        let none: *mut std::ffi::c_void = std::ptr::null_mut();
        // SAFETY: the name ends in a zero byte, and these controls read and write no values, which
        // the null pointers say.
        unsafe { tikv_jemalloc_sys::mallctl(name.as_ptr(), none, none.cast(), none, 0) };
    }
}
