//! The heap of small regions: which ones a program may take, and how each gives free pages back.
//!
//! A library leaves the choice to the program. With the feature `mimalloc` or `jemalloc` of this crate, [`Heap`] is that allocator, and trimming knows how
//! to ask it for its free pages; the program makes it its own:
//!
//! ```
//! #[global_allocator]
//! static HEAP: ort_alloc::Heap = ort_alloc::Heap;
//! # fn main() {}
//! ```

#[cfg(all(feature = "mimalloc", feature = "jemalloc"))]
compile_error!("a program has one heap: take the feature `mimalloc` or the feature `jemalloc`, not both");

/// The allocator that a program may make its own with `#[global_allocator]`: mimalloc or jemalloc with the feature of that name, else the system's.
#[cfg(feature = "mimalloc")]
pub use mimalloc::MiMalloc as Heap;
/// The allocator that a program may make its own with `#[global_allocator]`: mimalloc or jemalloc with the feature of that name, else the system's.
#[cfg(not(any(feature = "mimalloc", feature = "jemalloc")))]
pub use std::alloc::System as Heap;
/// The allocator that a program may make its own with `#[global_allocator]`: mimalloc or jemalloc with the feature of that name, else the system's.
#[cfg(all(feature = "jemalloc", not(feature = "mimalloc")))]
pub use tikv_jemallocator::Jemalloc as Heap;

/// Asks the heap for its free pages. Where there is another one, glibc's still serves C code, and a program that did not take the other.
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
        // SAFETY: the name ends in a zero byte, and these controls read and write no values, which the null pointers say.
        unsafe { tikv_jemalloc_sys::mallctl(name.as_ptr(), none, none.cast(), none, 0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[global_allocator]
    static HEAP: Heap = Heap;

    /// Whatever the heap is, what was freed goes back when it is asked.
    #[test]
    #[cfg(target_os = "linux")]
    fn freed_pages_go_back() {
        const COUNT: usize = 1 << 14;
        let resident = || {
            let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
            let line = status.lines().find(|line| line.starts_with("RssAnon"));
            line.and_then(|line| line.split_whitespace().nth(1)?.parse::<usize>().ok()).unwrap_or(0) << 10
        };
        give_back();
        let before = resident();
        let mut pieces: Vec<Vec<u8>> = (0..COUNT).map(|_| vec![1; 4000]).collect();
        let full = resident();
        assert!(full > before + COUNT * 3000, "{before} bytes, then {full}");
        // One in a hundred stays, so that nothing is free up to the end.
        let mut index = 0;
        pieces.retain(|_| {
            index += 1;
            index % 100 == 0
        });
        give_back();
        let after = resident();
        assert!(after < before + (full - before) / 4, "{before} bytes, {full}, then {after}");
        assert!(!pieces.is_empty());
    }
}
