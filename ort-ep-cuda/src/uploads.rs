//! Pending uploads on their own stream. A call on the compute stream waits only for the uploads to
//! its own memory, so later uploads overlap with it.

use std::collections::VecDeque;

use ort_core::Result;

/// The most uploads tracked individually.
const MOST: usize = 32;

/// Uploads in submission order, each followed by an event.
#[derive(Debug)]
pub(crate) struct Uploads<E> {
    pending: VecDeque<Upload<E>>,
    /// Events that no one waits for any more, for reuse.
    free: Vec<E>,
}

#[derive(Debug)]
struct Upload<E> {
    address: u64,
    bytes: u64,
    done: E,
}

impl<E> Default for Uploads<E> {
    fn default() -> Uploads<E> {
        Uploads { pending: VecDeque::new(), free: Vec::new() }
    }
}

impl<E> Uploads<E> {
    /// Whether the compute stream must wait for the pending uploads before another one is added.
    pub(crate) fn is_full(&self) -> bool {
        self.pending.len() >= MOST
    }

    /// Returns an event for reuse, if there is one.
    pub(crate) fn free_event(&mut self) -> Option<E> {
        self.free.pop()
    }

    /// Adds an upload and the event recorded after it.
    pub(crate) fn add(&mut self, address: u64, bytes: u64, done: E) {
        self.pending.push_back(Upload { address, bytes, done });
    }

    /// Calls `wait_for` with the event of the last upload that `of` selects. Uploads are in stream
    /// order, so this covers all earlier ones as well.
    pub(crate) fn take(
        &mut self,
        of: impl Fn(u64, u64) -> bool,
        wait_for: impl FnOnce(&E) -> Result<()>,
    ) -> Result<()> {
        let Some(last) = self.pending.iter().rposition(|upload| of(upload.address, upload.bytes)) else {
            return Ok(());
        };
        if let Some(upload) = self.pending.get(last) {
            wait_for(&upload.done)?;
        }
        // The stream is in order: with this upload all earlier ones are done, so their events are
        // free too.
        self.free.extend(self.pending.drain(..=last).map(|upload| upload.done));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_computed_waits_for_its_own_uploads_alone() -> Result<()> {
        let mut uploads = Uploads::default();
        for (event, address) in [(1, 1000), (2, 2000), (3, 1000), (4, 3000)] {
            uploads.add(address, 100, event);
        }
        let mut waited = Vec::new();
        // what a call reads, the event that it waits for, the number of reusable events afterwards
        let cases =
            [(2050, Some(2), 2), (2050, None, 2), (1000, Some(3), 3), (5000, None, 3), (3099, Some(4), 4)];
        for (read, event, free) in cases {
            waited.clear();
            let of = |address, bytes| (address..address + bytes).contains(&read);
            uploads.take(of, |event| {
                waited.push(*event);
                Ok(())
            })?;
            assert_eq!((waited.first().copied(), uploads.free.len()), (event, free), "{read}");
        }
        Ok(())
    }
}
