//! A recycling allocator: freed regions are cached for the next request of similar size.

use std::cmp::Reverse;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use crate::buffer::Origin;
use crate::fork::Mutex;
use crate::{AllocError, Allocator, Buffer, DeviceId, HOST_ALIGNMENT, HUGE_PAGE_BYTES, HostAllocator, Stats};

/// Smaller regions come from the heap, which has them at hand.
const LEAST: usize = 64 << 10;

/// The most bytes in cached regions.
const MOST_WAITING: usize = 32 << 20;

/// The number of [`Recycler::sweep`] calls at which a cached region is evicted.
const PATIENCE: u32 = 2;

/// Host memory for buffers that are freed and allocated again in similar sizes, such as outputs of
/// runs.
///
/// The kernel clears new pages one by one on first touch, which takes longer than filling them. So
/// a dropped buffer of 64 KiB up to [`HUGE_PAGE_BYTES`] is cached for the next request, which finds
/// its old bytes. All other sizes go to [`HostAllocator`]. At most 32 MiB are cached. A request
/// that misses the cache evicts about its own size, so that changing sizes do not accumulate.
/// [`sweep`](Self::sweep) evicts regions that are not reused. A buffer does not keep the recycler
/// alive; without the recycler it is freed at once.
pub struct Recycler {
    this: Weak<Recycler>,
    most_waiting: AtomicUsize,
    /// Whether a region has ever been cached. Until then, a sweep needs no lock.
    is_used: AtomicBool,
    waiting: Mutex<Vec<Waiting>>,
}

/// A cached region, and the sweeps it has survived.
struct Waiting {
    region: Box<Buffer>,
    sweeps: u32,
}

impl Recycler {
    /// Creates a recycler with an empty cache.
    pub fn new() -> Arc<Recycler> {
        Arc::new_cyclic(|this| Recycler {
            this: this.clone(),
            most_waiting: AtomicUsize::new(MOST_WAITING),
            is_used: AtomicBool::new(false),
            waiting: Mutex::default(),
        })
    }

    /// Evicts regions that have been cached since before the previous call.
    pub fn sweep(&self) {
        if !self.is_used.load(Ordering::Relaxed) {
            return;
        }
        let mut waiting = self.waiting.lock();
        waiting.iter_mut().for_each(|region| region.sweeps += 1);
        waiting.retain(|region| region.sweeps < PATIENCE);
    }

    /// Limits the cache to `bytes`, and to 32 MiB at most.
    pub fn set_most_waiting(&self, bytes: usize) {
        self.most_waiting.store(bytes.min(MOST_WAITING), Ordering::Relaxed);
    }

    /// Returns the bytes in cached regions.
    pub fn waiting_bytes(&self) -> usize {
        self.waiting.lock().iter().map(|waiting| waiting.region.len()).sum()
    }

    /// Takes the smallest cached region that holds `bytes` and is at most a quarter larger.
    fn take(&self, bytes: usize) -> Option<Box<Buffer>> {
        let mut waiting = self.waiting.lock();
        let fits = |len: usize| len >= bytes && len - bytes <= bytes / 4;
        let places = waiting.iter().enumerate().filter(|(_, waiting)| fits(waiting.region.len()));
        let (place, _) = places.min_by_key(|(_, waiting)| waiting.region.len())?;
        // The order does not matter: `make_room` sorts by age.
        Some(waiting.swap_remove(place).region)
    }

    /// Evicts regions, longest cached first, until at least `bytes` are evicted, so that allocating
    /// that many does not increase memory.
    fn make_room(&self, bytes: usize) {
        let mut waiting = self.waiting.lock();
        waiting.sort_by_key(|waiting| Reverse(waiting.sweeps));
        let mut room = 0_usize;
        waiting.retain(|waiting| {
            let stays = room >= bytes;
            room = room.saturating_add(waiting.region.len());
            stays
        });
    }

    fn put(&self, region: Box<Buffer>) {
        let mut waiting = self.waiting.lock();
        let all: usize = waiting.iter().map(|waiting| waiting.region.len()).sum();
        if all.saturating_add(region.len()) <= self.most_waiting.load(Ordering::Relaxed) {
            self.is_used.store(true, Ordering::Relaxed);
            waiting.push(Waiting { region, sweeps: 0 });
        }
    }
}

/// Rounds up by at most a sixteenth, so that sizes that grow from request to request, such as KV
/// caches, find the previous region.
fn rounded(bytes: usize) -> usize {
    bytes.next_multiple_of(1 << (bytes / 16).max(1).ilog2())
}

impl Allocator for Recycler {
    fn device(&self) -> DeviceId {
        DeviceId::HOST
    }

    fn allocate(&self, bytes: usize, alignment: usize) -> Result<Buffer, AllocError> {
        let host = HostAllocator::global();
        if !(LEAST..HUGE_PAGE_BYTES).contains(&bytes) || alignment > HOST_ALIGNMENT {
            return host.allocate(bytes, alignment);
        }
        AllocError::check_alignment(DeviceId::HOST, alignment)?;
        let region = match self.take(bytes) {
            Some(region) => region,
            None => {
                let bytes = rounded(bytes);
                self.make_room(bytes);
                Box::new(host.allocate(bytes, alignment)?)
            }
        };
        // The region is at least `bytes` long, and only the buffer over it accesses its memory.
        let (address, home) = (region.address(), self.this.clone());
        let origin = Origin::Recycled(Recycled { region: Some(region), home });
        Ok(Buffer::new(address, bytes, DeviceId::HOST, origin))
    }

    fn stats(&self) -> Stats {
        HostAllocator::global().stats()
    }

    fn trim(&self) -> usize {
        // Taken out, so that the regions are freed after the lock.
        let waiting = std::mem::take(&mut *self.waiting.lock());
        waiting.iter().map(|waiting| waiting.region.len()).sum()
    }
}

/// A region in use, at least as long as the buffer over it.
pub(crate) struct Recycled {
    region: Option<Box<Buffer>>,
    home: Weak<Recycler>,
}

impl Drop for Recycled {
    fn drop(&mut self) {
        if let (Some(region), Some(home)) = (self.region.take(), self.home.upgrade()) {
            home.put(region);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_request_of_nearly_the_size_gets_what_was_dropped() -> Result<(), AllocError> {
        // (first request, second request, whether the second gets the first one's memory)
        for (first, second, same) in [
            (100_000, 100_000, true),
            (396_288, 399_360, true),
            (100_000, 90_000, true),
            (100_000, 70_000, false),
            (200_000, 100_000, false),
            (100_000, 200_000, false),
        ] {
            let recycler = Recycler::new();
            let mut buffer = recycler.allocate(first, 64)?;
            buffer.bytes_mut().unwrap_or_default().fill(7);
            drop(buffer);
            let waiting = recycler.waiting.lock().len();
            assert_eq!(waiting, 1, "{first}");
            let buffer = recycler.allocate(second, 64)?;
            assert_eq!(buffer.len(), second);
            assert_eq!(recycler.waiting_bytes(), 0, "{first} {second}");
            // Heap memory is zeroed, a recycled region is not.
            let byte = buffer.bytes().and_then(|bytes| bytes.first().copied());
            assert_eq!(byte, Some(if same { 7 } else { 0 }), "{first} {second}");
        }
        Ok(())
    }

    #[test]
    fn changing_sizes_do_not_add_up() -> Result<(), AllocError> {
        // (cached sizes, request, bytes left in the cache)
        for (sizes, request, left) in [
            (&[1 << 20, 1 << 17][..], 1 << 18, 1 << 17),
            (&[1 << 17, 1 << 20], 1 << 18, 0),
            (&[1 << 16, 1 << 16, 1 << 16], 1 << 17, 1 << 16),
            (&[1 << 16, 1 << 17], 1 << 20, 0),
            (&[1 << 16, 1 << 17], 1 << 17, 1 << 16),
        ] {
            let recycler = Recycler::new();
            let buffers =
                sizes.iter().map(|&bytes| recycler.allocate(bytes, 64)).collect::<Result<Vec<_>, _>>()?;
            drop(buffers);
            let _buffer = recycler.allocate(request, 64)?;
            assert_eq!(recycler.waiting_bytes(), left, "{sizes:?} {request}");
        }
        Ok(())
    }

    #[test]
    fn what_nobody_takes_goes_back() -> Result<(), AllocError> {
        let recycler = Recycler::new();
        drop(recycler.allocate(100_000, 64)?);
        for left in [1, 0] {
            recycler.sweep();
            assert_eq!(recycler.waiting.lock().len(), left);
        }
        let buffers = (0..40).map(|_| recycler.allocate(1 << 20, 64)).collect::<Result<Vec<_>, _>>()?;
        let outlives = recycler.allocate(1 << 20, 64)?;
        // Small and large regions are not cached.
        drop([recycler.allocate(1000, 64)?, recycler.allocate(4 << 20, 64)?]);
        assert!(recycler.waiting.lock().is_empty());
        drop(buffers);
        assert_eq!(recycler.waiting.lock().len(), 32);
        assert_eq!(recycler.waiting_bytes(), 32 << 20);
        assert_eq!(recycler.trim(), 32 << 20);
        recycler.set_most_waiting(100_000);
        drop(recycler.allocate(200_000, 64)?);
        assert_eq!(recycler.waiting_bytes(), 0);
        assert!(recycler.waiting.lock().is_empty());
        drop(recycler);
        assert_eq!(outlives.len(), 1 << 20);
        Ok(())
    }
}
