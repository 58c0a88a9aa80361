//! Small thread-local scratch buffers that survive from call to call.
//!
//! They hold what kernels need besides the planned workspace, so that a repeated run allocates
//! nothing.

use std::any::Any;
use std::cell::RefCell;

/// The largest value that is kept, in bytes. Larger ones are freed after use.
const MOST: usize = 128 << 10;

thread_local! {
    static KEPT: RefCell<Vec<Box<dyn Any>>> = const { RefCell::new(Vec::new()) };
}

/// Scratch that a thread can keep. The next user sees the contents that the last one left.
pub trait ThreadScratch: Default + 'static {
    /// Returns the heap bytes that the value holds.
    fn bytes(&self) -> usize;
}

/// Calls `task` with a free value of this thread, or with a new one if none is free.
pub fn with_thread_scratch<K: ThreadScratch, R>(task: impl FnOnce(&mut K) -> R) -> R {
    // The value leaves the list during the call, so that a nested call on this thread gets another
    // one.
    let found = KEPT.with_borrow_mut(|kept| {
        let place = kept.iter().position(|value| value.is::<K>())?;
        kept.swap_remove(place).downcast::<K>().ok()
    });
    let mut value = found.unwrap_or_default();
    let result = task(&mut value);
    if value.bytes() <= MOST {
        KEPT.with_borrow_mut(|kept| kept.push(value));
    }
    result
}

impl ThreadScratch for () {
    fn bytes(&self) -> usize {
        0
    }
}

impl<T: 'static> ThreadScratch for Vec<T> {
    fn bytes(&self) -> usize {
        self.capacity() * size_of::<T>()
    }
}

impl<A: ThreadScratch, B: ThreadScratch> ThreadScratch for (A, B) {
    fn bytes(&self) -> usize {
        self.0.bytes() + self.1.bytes()
    }
}

impl<A: ThreadScratch, B: ThreadScratch, C: ThreadScratch> ThreadScratch for (A, B, C) {
    fn bytes(&self) -> usize {
        self.0.bytes() + self.1.bytes() + self.2.bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_user_gets_the_memory_of_the_last() {
        let start = |len: usize| {
            with_thread_scratch(|scratch: &mut Vec<u64>| {
                scratch.resize(len, 0);
                (scratch.capacity(), scratch.as_ptr())
            })
        };
        assert_eq!(start(100), start(90));
        let (capacity, _) = start(MOST);
        assert!(capacity >= MOST && start(10).0 < MOST, "what is too large is not kept");
        // A nested user gets a buffer of its own.
        let outer = with_thread_scratch(|outer: &mut Vec<u64>| {
            outer.resize(10, 0);
            (outer.as_ptr(), start(10).1)
        });
        assert_ne!(outer.0, outer.1);
    }
}
