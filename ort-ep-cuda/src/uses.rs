//! What of the device's memory may still be read or written by calls that were asked for: a copy on
//! a stream of its own waits for these calls where it writes there, and for nothing elsewhere.

use std::collections::BTreeMap;

/// Bytes that are one thing here. Copies wait without need where a neighbour in the same page is in
/// use.
const PAGE: u64 = 256 << 10;

/// The last calls on the memory of one device.
#[derive(Debug, Default)]
pub(crate) struct Uses {
    /// Calls so far.
    calls: u64,
    /// Calls up to this one are known to be done.
    done: u64,
    /// By the address of a region: the last call on each of its pages.
    regions: BTreeMap<u64, Vec<u64>>,
}

impl Uses {
    /// A new region of so many bytes, which no call uses.
    pub(crate) fn add(&mut self, address: u64, bytes: usize) {
        self.regions.insert(address, vec![0; (bytes as u64).div_ceil(PAGE) as usize]);
    }

    /// A region is gone.
    pub(crate) fn remove(&mut self, address: u64) {
        self.regions.remove(&address);
    }

    /// A call on this memory.
    pub(crate) fn call(&mut self, memory: &[(u64, u64)]) {
        self.calls += 1;
        let call = self.calls;
        for &(address, bytes) in memory {
            self.pages(address, bytes).for_each(|page| *page = call);
        }
    }

    /// The number of the last call.
    pub(crate) fn last(&self) -> u64 {
        self.calls
    }

    /// Calls up to one are done.
    pub(crate) fn end(&mut self, call: u64) {
        self.done = self.done.max(call);
    }

    /// Whether a call on some of this memory may not be done.
    pub(crate) fn is_busy(&mut self, address: u64, bytes: u64) -> bool {
        let done = self.done;
        self.pages(address, bytes).any(|page| *page > done)
    }

    fn pages(&mut self, address: u64, bytes: u64) -> impl Iterator<Item = &mut u64> {
        let region = self.regions.range_mut(..=address).next_back();
        let found = region.and_then(|(start, pages)| {
            let (first, end) = ((address - start) / PAGE, (address - start + bytes).div_ceil(PAGE));
            pages.get_mut(first as usize..end as usize)
        });
        found.into_iter().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_busy_until_its_last_call_is_done() {
        let mut uses = Uses::default();
        uses.add(1 << 30, 1 << 20);
        uses.add(2 << 30, 100);
        assert!(!uses.is_busy(1 << 30, 1 << 20));
        uses.call(&[(1 << 30, PAGE + 1)]);
        uses.call(&[(2 << 30, 100)]);
        let page = |index: u64| (1 << 30) + index * PAGE;
        assert!(uses.is_busy(page(0), 1) && uses.is_busy(page(1), 1) && !uses.is_busy(page(2), 2 * PAGE));
        uses.end(1);
        assert!(!uses.is_busy(page(0), 4 * PAGE) && uses.is_busy((2 << 30) + 50, 1));
        uses.end(uses.last());
        assert!(!uses.is_busy(2 << 30, 100));
        uses.remove(1 << 30);
        uses.call(&[(1 << 30, 8)]);
        assert!(!uses.is_busy(1 << 30, 8));
    }
}
