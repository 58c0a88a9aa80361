//! The storage of a tensor's elements.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use ort_alloc::{Reservation, SharedBuffer};
use smol_str::SmolStr;

/// The storage of a tensor's elements.
#[derive(Clone, Debug)]
pub(crate) enum Data {
    Host(Bytes),
    /// A shared list of strings, and the range of the elements in it.
    Strings(Arc<Texts>, Range<usize>),
    /// Device memory, and the byte offset of the elements in it.
    Device(SharedBuffer, usize),
}

/// Strings that tensors share, with the reservation that charges their bytes to a run's budget.
#[derive(Debug)]
pub(crate) struct Texts {
    pub(super) texts: Vec<SmolStr>,
    pub(super) _held: Option<Reservation>,
}

impl Texts {
    pub(crate) fn len(&self) -> usize {
        self.texts.len()
    }

    pub(crate) fn part(&self, range: &Range<usize>) -> &[SmolStr] {
        // `from_held_strings` and `slice` keep the range inside the list, so the fallback is never
        // taken.
        self.texts.get(range.clone()).unwrap_or(&[])
    }
}

/// The heap bytes of a string besides the `SmolStr` itself: the text with two counters of 8 bytes,
/// as malloc rounds them, to multiples of 16 bytes with a header of 8. Strings that share a text
/// count it each.
pub(crate) fn heap_bytes(text: &SmolStr) -> usize {
    match text.is_heap_allocated() {
        true => text.len().saturating_add(24).next_multiple_of(16),
        false => 0,
    }
}
