//! Freed pages of the heap leave the process, whichever heap it is. Alone in its file, so that no
//! other test moves the numbers.

#![cfg(target_os = "linux")]

use ort_alloc::{Allocator, Heap, HostAllocator};

#[global_allocator]
static HEAP: Heap = Heap;

/// The bytes of this process's resident memory that no file backs.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("RssAnon"));
    line.and_then(|line| line.split_whitespace().nth(1)?.parse::<usize>().ok()).unwrap_or(0) << 10
}

#[test]
fn freed_pages_go_back() {
    const COUNT: usize = 1 << 14;
    let host = HostAllocator::new();
    host.trim();
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
    host.trim();
    let after = resident();
    assert!(after < before + (full - before) / 4, "{before} bytes, {full}, then {after}");
    assert!(!pieces.is_empty());
}
