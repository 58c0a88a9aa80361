//! Hazard tracking for device memory: which ranges pending calls may still read or write. A copy on
//! another stream waits only for the calls that use the memory it writes.

use std::collections::BTreeMap;

/// The tracking granularity in bytes. A copy may wait needlessly if another allocation in the same
/// page is in use.
const PAGE: u64 = 256 << 10;

/// The last call on each page of one device's memory.
#[derive(Debug, Default)]
pub(crate) struct Hazards {
    /// The number of calls so far.
    calls: u64,
    /// Calls up to this number are known to be done.
    done: u64,
    /// The last call on each page, per region, keyed by the region's address.
    regions: BTreeMap<u64, Vec<u64>>,
}

impl Hazards {
    /// Adds a region that no call uses yet.
    pub(crate) fn add(&mut self, address: u64, bytes: usize) {
        // Calls count from 1, so 0 means that no call has used the page.
        self.regions.insert(address, vec![0; (bytes as u64).div_ceil(PAGE) as usize]);
    }

    /// Removes a region.
    pub(crate) fn remove(&mut self, address: u64) {
        self.regions.remove(&address);
    }

    /// Records a call on this memory.
    pub(crate) fn call(&mut self, memory: &[(u64, u64)]) {
        self.calls += 1;
        let call = self.calls;
        for &(address, bytes) in memory {
            self.pages(address, bytes).for_each(|page| *page = call);
        }
    }

    /// Returns the number of the last call.
    pub(crate) fn last(&self) -> u64 {
        self.calls
    }

    /// Records that calls up to `call` are done.
    pub(crate) fn end(&mut self, call: u64) {
        self.done = self.done.max(call);
    }

    /// Whether a call on this memory may still be running.
    pub(crate) fn is_busy(&mut self, address: u64, bytes: u64) -> bool {
        let done = self.done;
        self.pages(address, bytes).any(|page| *page > done)
    }

    fn pages(&mut self, address: u64, bytes: u64) -> impl Iterator<Item = &mut u64> {
        // Regions do not overlap, so the last one at or before the address is the only candidate.
        let region = self.regions.range_mut(..=address).next_back();
        let found = region.and_then(|(start, pages)| {
            let (first, end) = ((address - start) / PAGE, (address - start + bytes).div_ceil(PAGE));
            pages.get_mut(first as usize..end as usize)
        });
        // Memory outside of all regions is not tracked.
        found.into_iter().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_busy_until_its_last_call_is_done() {
        let mut uses = Hazards::default();
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
