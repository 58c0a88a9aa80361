//! The global allocator for small regions: which one a program uses, and how each returns free
//! pages.
//!
//! A library leaves this choice to the program. With this crate's feature `mimalloc` or `jemalloc`,
//! [`Heap`] is that allocator, and trimming makes it return its free pages. The program installs
//! it:
//!
//! ```
//! #[global_allocator]
//! static HEAP: ort_alloc::Heap = ort_alloc::Heap;
//! # fn main() {}
//! ```

#[cfg(all(feature = "mimalloc", feature = "jemalloc"))]
compile_error!("a program has one heap: take the feature `mimalloc` or the feature `jemalloc`, not both");

/// The allocator to install with `#[global_allocator]`: mimalloc or jemalloc with the feature of
/// that name, else the system's.
#[cfg(feature = "mimalloc")]
pub use mimalloc::MiMalloc as Heap;
/// The allocator to install with `#[global_allocator]`: mimalloc or jemalloc with the feature of
/// that name, else the system's.
#[cfg(not(any(feature = "mimalloc", feature = "jemalloc")))]
pub use std::alloc::System as Heap;
/// The allocator to install with `#[global_allocator]`: mimalloc or jemalloc with the feature of
/// that name, else the system's.
#[cfg(all(feature = "jemalloc", not(feature = "mimalloc")))]
pub use tikv_jemallocator::Jemalloc as Heap;

/// Makes the heap return its free pages. Trims glibc's heap too, because C code uses it even with
/// another global allocator, and so does a program that did not install [`Heap`].
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

/// Flushes this thread's cache, then purges the free pages of all arenas.
#[cfg(all(feature = "jemalloc", not(feature = "mimalloc")))]
fn purge() {
    // 4096 is `MALLCTL_ARENAS_ALL`.
    for name in [c"thread.tcache.flush", c"arena.4096.purge"] {
        let none: *mut std::ffi::c_void = std::ptr::null_mut();
        // SAFETY: the name is zero-terminated. These controls read and write no values, hence the
        // null pointers.
        unsafe { tikv_jemalloc_sys::mallctl(name.as_ptr(), none, none.cast(), none, 0) };
    }
}
