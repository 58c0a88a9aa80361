//! Uploads on a stream of their own that the compute stream does not wait for yet: what is computed
//! waits for those to its own memory, and a later one may go on beside it.

use std::collections::VecDeque;

use ort_core::Result;

/// The most that are known one by one.
const MOST: usize = 32;

/// Uploads in the order in which they were asked for, each with an event behind it.
#[derive(Debug)]
pub(crate) struct Uploads<E> {
    pending: VecDeque<Upload<E>>,
    /// Events that nobody waits for any more.
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
    /// Whether the compute stream has to wait for those that there are before there is one more.
    pub(crate) fn is_full(&self) -> bool {
        self.pending.len() >= MOST
    }

    /// An event for the next one, where there is one already.
    pub(crate) fn free_event(&mut self) -> Option<E> {
        self.free.pop()
    }

    /// One more, with the event behind it.
    pub(crate) fn add(&mut self, address: u64, bytes: u64, done: E) {
        self.pending.push_back(Upload { address, bytes, done });
    }

    /// Waits for the last one to memory that is told, and with it for all before it.
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
        // what a call reads, the event that it waits for, the events that are free then
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
