//! Host buffers and what is common to all buffers: alignment, zeros, sharing, and release exactly
//! once.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ort_alloc::{
    AllocError, Allocator, Buffer, DeviceId, HOST_ALIGNMENT, HUGE_PAGE_BYTES, HostAllocator, SharedBuffer,
};

fn assert_thread_safe<T: Send + Sync + 'static>() {}

#[test]
fn buffers_travel_between_threads() {
    assert_thread_safe::<Buffer>();
    assert_thread_safe::<SharedBuffer>();
}

#[test]
fn host_memory_is_zeroed_aligned_and_as_long_as_asked() -> Result<(), AllocError> {
    let host = HostAllocator::new();
    let huge = HUGE_PAGE_BYTES;
    for bytes in [0, 1, 63, 64, 65, 4096, huge - 1, huge, huge + 1, 3 * huge - 5] {
        for alignment in [1, 64, 4096, 2 * huge] {
            let mut buffer = host.allocate(bytes, alignment)?;
            let slice = buffer.bytes_mut().unwrap_or_default();
            assert_eq!(slice.len(), bytes);
            let wanted = if bytes == 0 { HOST_ALIGNMENT } else { alignment.max(HOST_ALIGNMENT) };
            assert!(slice.as_ptr().addr().is_multiple_of(wanted), "{bytes} bytes at {alignment}");
            assert!(slice.iter().all(|&byte| byte == 0));
            slice.fill(0xA5);
        }
    }
    let stats = host.stats();
    assert_eq!((stats.in_use, stats.num_allocs), (0, 36));
    assert!(stats.max_in_use >= 3 * huge - 5 && stats.max_in_use <= 3 * huge);
    Ok(())
}

#[test]
fn what_cannot_be_had_is_an_error() {
    let host = HostAllocator::new();
    for bytes in [usize::MAX, isize::MAX as usize, 1 << 62] {
        assert!(matches!(host.allocate(bytes, 64), Err(AllocError::OutOfMemory { .. })), "{bytes}");
    }
    assert!(matches!(host.allocate(1, 1 << 63), Err(AllocError::OutOfMemory { .. })));
    assert!(matches!(host.allocate(1, 24), Err(AllocError::Unsupported { .. })));
    assert_eq!(host.stats().in_use, 0);
}

#[test]
fn sharing_copies_nothing_and_ends() -> Result<(), AllocError> {
    let host = HostAllocator::new();
    let mut buffer = host.allocate(100, 64)?;
    if let Some(bytes) = buffer.bytes_mut() {
        bytes.copy_from_slice(&[3; 100]);
    }
    let address = buffer.bytes().map(<[u8]>::as_ptr);
    let shared = buffer.freeze();
    let view = shared.bytes().unwrap_or_default();
    assert_eq!((Some(view.as_ptr()), view.len()), (address, 100));
    let Err(shared) = shared.try_into_mut() else { unreachable!("a view is alive") };
    drop(view.slice(10..20));
    drop(view);
    let clone = shared.clone();
    let Err(shared) = shared.try_into_mut() else { unreachable!("a clone is alive") };
    drop(clone);
    assert!(shared.try_into_mut().is_ok_and(|buffer| buffer.bytes() == Some(&[3; 100])));
    assert_eq!(host.stats().in_use, 0);
    Ok(())
}

#[test]
fn opaque_memory_shows_no_bytes_and_is_released_once() {
    let released = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&released);
    let release = move |handle| {
        counter.fetch_add(handle, Ordering::Relaxed);
    };
    let mut buffer = Buffer::opaque(DeviceId(2), 50, 1000, Box::new(release));
    assert_eq!((buffer.handle(), buffer.offset(), buffer.len()), (Some(1000), 0, 50));
    assert_eq!(buffer.device().to_string(), "device 2");
    assert!(buffer.bytes().is_none() && buffer.bytes_mut().is_none());
    let shared = buffer.freeze();
    assert!(shared.bytes().is_none() && shared.as_slice().is_none());
    let other = shared.clone();
    drop(shared);
    assert_eq!(released.load(Ordering::Relaxed), 0);
    drop(other);
    assert_eq!(released.load(Ordering::Relaxed), 1000);
}
