//! Device memory: regions from the driver, and the addresses of tensors in them. The arena on top
//! of it is `ort-alloc`'s.

use std::sync::Arc;

use ort_alloc::{AllocError, Allocator, Arena, ArenaConfig, Buffer, DeviceId, Stats};
use ort_core::tensor::DeviceRange;
use ort_core::{ErrorKind, Result};
use ort_gpu::memory::{check_alignment, count_allocation, locate};
use parking_lot::Mutex;

use crate::queue::Queue;

/// Creates the arena of one device, over regions of the driver's memory.
pub(crate) fn arena(id: DeviceId, queue: &Arc<Queue>, config: ArenaConfig) -> Arena {
    let regions = Regions { id, queue: queue.clone(), stats: Arc::default() };
    Arena::new(Arc::new(regions), config)
}

/// Returns the address of a tensor's range, or `None` if the range is empty.
pub(crate) fn address(id: DeviceId, range: DeviceRange<'_>) -> Result<Option<u64>> {
    Ok(locate(id, &range)?.map(|(base, offset)| base + offset as u64))
}

/// An allocator straight from the driver.
struct Regions {
    id: DeviceId,
    queue: Arc<Queue>,
    stats: Arc<Mutex<Stats>>,
}

impl Allocator for Regions {
    fn device(&self) -> DeviceId {
        self.id
    }

    fn allocate(&self, bytes: usize, alignment: usize) -> Result<Buffer, AllocError> {
        check_alignment(self.id, alignment)?;
        // The driver refuses to allocate 0 bytes.
        if bytes == 0 {
            return Ok(Buffer::empty(self.id));
        }
        let address = self.queue.allocate(bytes).map_err(|problem| match problem.kind() {
            ErrorKind::OutOfMemory => AllocError::OutOfMemory {
                requested: bytes,
                available: self.queue.context().memory().ok().map(|(free, _)| free),
                device: self.id,
            },
            _ => AllocError::Unsupported { device: self.id, reason: problem.to_string() },
        })?;
        let mut stats = self.stats.lock();
        count_allocation(&mut stats, bytes);
        // Freed regions return to the driver at once, so none is held beyond those in use.
        stats.total_allocated = stats.in_use;
        let (queue, counted) = (self.queue.clone(), self.stats.clone());
        let release = move |address| {
            queue.free(address);
            let mut stats = counted.lock();
            stats.in_use -= bytes;
            stats.total_allocated = stats.in_use;
        };
        Ok(Buffer::opaque(self.id, bytes, address, Box::new(release)))
    }

    fn stats(&self) -> Stats {
        *self.stats.lock()
    }

    fn trim(&self) -> usize {
        // A freed region is back with the driver already.
        0
    }
}
