//! Memory of others: buffers over it keep its owner as long as they live, and no longer.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ort_alloc::{AllocError, Buffer, SharedBuffer};

/// Counts how often it is dropped.
struct Owner {
    bytes: Box<[u8]>,
    dropped: Arc<AtomicUsize>,
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.dropped.fetch_add(1, Ordering::Relaxed);
    }
}

fn owner(dropped: &Arc<AtomicUsize>) -> Owner {
    Owner { bytes: vec![1, 2, 3, 4].into(), dropped: dropped.clone() }
}

#[test]
fn the_owner_goes_with_the_last_view() -> Result<(), AllocError> {
    let dropped = Arc::new(AtomicUsize::new(0));
    let owner = owner(&dropped);
    let (pointer, len) = (owner.bytes.as_ptr(), owner.bytes.len());
    // SAFETY: the owner keeps its bytes where they are, and nothing writes them.
    let mut buffer = unsafe { SharedBuffer::foreign(pointer, len, owner) }?;
    assert_eq!(buffer.as_slice().map(<[u8]>::as_ptr), Some(pointer), "nothing is copied");
    let view = buffer.bytes().map(|bytes| bytes.slice(1..3));
    assert!(buffer.get_mut().is_none(), "the view holds it, too");
    drop(buffer);
    assert_eq!(dropped.load(Ordering::Relaxed), 0);
    assert_eq!(view.as_deref(), Some(&[2, 3][..]));
    drop(view);
    assert_eq!(dropped.load(Ordering::Relaxed), 1);
    Ok(())
}

#[test]
fn what_is_lent_for_reading_is_never_written() -> Result<(), AllocError> {
    let dropped = Arc::new(AtomicUsize::new(0));
    let owner = owner(&dropped);
    let (pointer, len) = (owner.bytes.as_ptr(), owner.bytes.len());
    // SAFETY: as above.
    let buffer = unsafe { SharedBuffer::foreign(pointer, len, owner) }?;
    let mut alone = buffer.try_into_mut().map_err(|_| "nobody else holds it").expect("it is alone");
    assert!(alone.bytes_mut().is_none());
    assert_eq!(alone.bytes(), Some(&[1, 2, 3, 4][..]));
    Ok(())
}

#[test]
fn what_is_lent_for_writing_is_written_in_place() -> Result<(), AllocError> {
    let dropped = Arc::new(AtomicUsize::new(0));
    let mut owner = owner(&dropped);
    let (pointer, len) = (owner.bytes.as_mut_ptr(), owner.bytes.len());
    // SAFETY: the owner is inside the buffer, and nothing else reaches the bytes.
    let mut buffer = unsafe { Buffer::foreign(pointer, len, owner) }?;
    buffer.bytes_mut().expect("it is writable").fill(9);
    let mut shared = buffer.freeze();
    shared.get_mut().and_then(Buffer::bytes_mut).expect("nobody else holds it")[0] = 8;
    assert_eq!(shared.as_slice(), Some(&[8, 9, 9, 9][..]));
    drop(shared);
    assert_eq!(dropped.load(Ordering::Relaxed), 1);
    Ok(())
}

#[test]
fn impossible_regions_are_refused_and_their_owner_let_go() {
    let dropped = Arc::new(AtomicUsize::new(0));
    let null = std::ptr::null_mut();
    for (pointer, len) in [(null, 4), (64 as *mut u8, usize::MAX), (64 as *mut u8, isize::MAX as usize + 1)] {
        // SAFETY: no such region exists, and the call refuses it without touching it.
        let refused = unsafe { Buffer::foreign(pointer, len, owner(&dropped)) };
        assert!(matches!(refused, Err(AllocError::Unsupported { .. })), "{len}");
    }
    assert_eq!(dropped.load(Ordering::Relaxed), 3);
    // SAFETY: there are no bytes to be valid.
    let empty = unsafe { Buffer::foreign(null, 0, owner(&dropped)) };
    assert!(empty.is_ok_and(|buffer| buffer.is_empty()));
}
