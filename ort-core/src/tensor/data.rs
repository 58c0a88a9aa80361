//! The storage of a tensor's elements.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use compact_str::CompactString;
use ort_alloc::{Reservation, SharedBuffer};

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
    pub(super) texts: Vec<CompactString>,
    pub(super) _held: Option<Reservation>,
}

impl Texts {
    pub(crate) fn len(&self) -> usize {
        self.texts.len()
    }

    pub(crate) fn part(&self, range: &Range<usize>) -> &[CompactString] {
        // `from_held_strings` and `slice` keep the range inside the list, so the fallback is never
        // taken.
        self.texts.get(range.clone()).unwrap_or(&[])
    }
}

/// The heap bytes of a string besides the `CompactString` itself. It models malloc: multiples of 16
/// bytes with a header of 8, at least 32.
pub(crate) fn heap_bytes(text: &CompactString) -> usize {
    match text.is_heap_allocated() {
        true => text.capacity().saturating_add(8).next_multiple_of(16).max(32),
        false => 0,
    }
}
