//! Memory that is dropped leaves the process. Alone in its file, so that no other test moves the
//! numbers.

#![cfg(target_os = "linux")]

use std::sync::Arc;

use ort_alloc::{AllocError, Allocator, Arena, ArenaConfig, HostAllocator};

const MIB: usize = 1 << 20;

/// Resident memory of this process in MiB.
fn resident_mib() -> usize {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or_default();
    line.split_whitespace().next().and_then(|text| text.parse::<usize>().ok()).unwrap_or(0) >> 10
}

#[test]
fn resident_memory_falls_when_buffers_go() -> Result<(), AllocError> {
    let start = resident_mib();
    assert!(start > 0);
    let host = Arc::new(HostAllocator::new());
    let mut large = host.allocate(100 * MIB, 64)?;
    large.bytes_mut().unwrap_or_default().fill(1);
    assert!(resident_mib() >= start + 95);
    drop(large);
    assert!(resident_mib() <= start + 5, "{} MiB, {start} before", resident_mib());

    let arena = Arena::new(Arc::clone(&host) as Arc<dyn Allocator>, ArenaConfig::default());
    let mut pieces = (0..40).map(|_| arena.allocate(2 * MIB, 64)).collect::<Result<Vec<_>, _>>()?;
    pieces.iter_mut().for_each(|piece| piece.bytes_mut().unwrap_or_default().fill(1));
    drop(pieces);
    assert!(resident_mib() >= start + 75, "an arena keeps what it has until it is trimmed");
    assert!(arena.trim() >= 80 * MIB);
    assert!(resident_mib() <= start + 5, "{} MiB, {start} before", resident_mib());

    // The heap keeps what is below a live block. A trim of the allocator gives that back, too.
    let mut small = (0..1000).map(|_| host.allocate(50_000, 64)).collect::<Result<Vec<_>, _>>()?;
    small.iter_mut().for_each(|piece| piece.bytes_mut().unwrap_or_default().fill(1));
    let last = small.pop();
    assert!(resident_mib() >= start + 40);
    drop(small);
    host.trim();
    assert!(resident_mib() <= start + 8, "{} MiB, {start} before", resident_mib());
    drop(last);
    Ok(())
}
