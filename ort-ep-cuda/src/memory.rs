//! Device memory: regions from the driver, and the addresses of tensors in them. The arena on top
//! of it is `ort-alloc`'s.

use std::sync::Arc;

use ort_alloc::{AllocError, Allocator, Arena, ArenaConfig, Buffer, DeviceId, Stats};
use ort_core::tensor::DeviceRange;
use ort_core::{ErrorKind, Result, ensure, error};
use parking_lot::Mutex;

use crate::queue::Queue;

/// The alignment of the driver's allocations (CUDA C++ Programming Guide, "Device Memory Accesses":
/// at least 256 bytes).
pub(crate) const ALIGNMENT: usize = 256;

/// Creates the arena of one device, over regions of the driver's memory.
pub(crate) fn arena(id: DeviceId, queue: &Arc<Queue>, config: ArenaConfig) -> Arena {
    let regions = Regions { id, queue: queue.clone(), stats: Arc::default() };
    Arena::new(Arc::new(regions), config)
}

/// Returns the address of a tensor's range, or `None` if the range is empty.
pub(crate) fn address(id: DeviceId, range: DeviceRange<'_>) -> Result<Option<u64>> {
    let owner = range.buffer.device();
    ensure!(owner == id, Fail, "memory of {owner} was handed to {id}");
    if range.len == 0 {
        return Ok(None);
    }
    ensure!(range.offset + range.len <= range.buffer.len(), Fail, "a range ends beyond its buffer");
    let handle = range.buffer.handle().ok_or_else(|| error!(Fail, "a device buffer has no address"))?;
    Ok(Some(handle + (range.buffer.offset() + range.offset) as u64))
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
        // The driver guarantees no larger alignment.
        if !alignment.is_power_of_two() || alignment > ALIGNMENT {
            let reason = format!("an alignment of {alignment} bytes");
            return Err(AllocError::Unsupported { device: self.id, reason });
        }
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
        stats.num_allocs += 1;
        stats.in_use += bytes;
        stats.total_allocated = stats.in_use;
        stats.max_in_use = stats.max_in_use.max(stats.in_use);
        stats.max_alloc_size = stats.max_alloc_size.max(bytes);
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
