//! Device memory from a stream-ordered driver pool: allocations and frees follow the compute
//! stream, so the host never waits for them.
//!
//! The pool replaces the arena. Memory freed by one run is available to the next at once. Memory
//! that stays free returns to the system as the pool's options say, which are ONNX Runtime's.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ort_alloc::arena::GRANULE;
use ort_alloc::{AllocError, Allocator, Buffer, DeviceId, Stats};
use ort_core::{ErrorKind, Result};
use ort_gpu::memory::check_alignment;
use parking_lot::Mutex;

use crate::driver::Pool;
use crate::options::PoolConfig;
use crate::queue::Queue;

/// The allocator of one device, backed by a pool.
pub(crate) struct PoolMemory(Arc<Shared>);

struct Shared {
    id: DeviceId,
    queue: Arc<Queue>,
    pool: Pool,
    config: PoolConfig,
    limit: Option<usize>,
    stats: Mutex<Stats>,
    /// What the pool held after the last trim to the limit, if that exceeded the limit; else 0.
    held_beyond: AtomicUsize,
}

impl PoolMemory {
    pub(crate) fn new(
        id: DeviceId,
        queue: &Arc<Queue>,
        config: PoolConfig,
        limit: Option<usize>,
    ) -> Result<PoolMemory> {
        let pool = Pool::new(queue.context(), config.release_threshold)?;
        let stats = Mutex::new(Stats { limit, ..Stats::default() });
        let held_beyond = AtomicUsize::new(0);
        let shared = Shared { id, queue: queue.clone(), pool, config, limit, stats, held_beyond };
        Ok(PoolMemory(Arc::new(shared)))
    }
}

impl Shared {
    /// Charges bytes against the limit before they are allocated, so that concurrent calls cannot
    /// exceed it together.
    fn take(&self, requested: usize, bytes: usize) -> Result<(), AllocError> {
        let mut stats = self.stats.lock();
        let available = self.limit.unwrap_or(usize::MAX).saturating_sub(stats.in_use);
        if bytes > available {
            return Err(AllocError::OutOfMemory { requested, available: Some(available), device: self.id });
        }
        stats.in_use += bytes;
        Ok(())
    }

    fn give_back(&self, bytes: usize) {
        self.stats.lock().in_use -= bytes;
    }

    /// Records a successful allocation in the statistics.
    fn allocated(&self, bytes: usize) {
        let mut stats = self.stats.lock();
        stats.num_allocs += 1;
        stats.max_in_use = stats.max_in_use.max(stats.in_use);
        stats.max_alloc_size = stats.max_alloc_size.max(bytes);
    }

    /// Waits for pending frees, then returns free memory to the system until the pool holds at most
    /// `bytes`. Returns how many bytes it released.
    fn trim_to(&self, bytes: usize) -> usize {
        let held = || self.pool.reserved().unwrap_or(0);
        let before = held();
        // A free is stream-ordered: the driver can release the memory only once the stream has
        // reached it.
        self.queue.settle();
        if let Err(problem) = self.pool.trim_to(bytes) {
            tracing::debug!("the pool is not trimmed: {problem}");
        }
        let gone = before.saturating_sub(held());
        self.stats.lock().num_arena_shrinkages += u64::from(gone > 0);
        gone
    }

    /// Returns memory beyond the limit to the system, where possible. The pool holds whole blocks
    /// of the driver's granularity (32 MiB), and a block stays while any byte of it is in use.
    /// Since each trim waits for the device, we do not trim again until the pool has grown past
    /// what the last trim left.
    fn trim_to_limit(&self, limit: usize) {
        let Ok(held) = self.pool.reserved() else { return };
        if held > limit && held > self.held_beyond.load(Ordering::Relaxed) {
            self.trim_to(limit);
        }
        let left = self.pool.reserved().unwrap_or(held);
        self.held_beyond.store(if left > limit { left } else { 0 }, Ordering::Relaxed);
    }

    /// Allocates from the pool; if memory is short, it releases all free blocks and tries again.
    fn address(&self, bytes: usize) -> Result<u64> {
        match self.queue.allocate_in(&self.pool, bytes) {
            // A second try can succeed only if the trim released something.
            Err(problem) if problem.kind() == ErrorKind::OutOfMemory && self.trim_to(0) > 0 => {
                self.queue.allocate_in(&self.pool, bytes)
            }
            allocated => allocated,
        }
    }
}

impl Allocator for PoolMemory {
    fn device(&self) -> DeviceId {
        self.0.id
    }

    fn allocate(&self, bytes: usize, alignment: usize) -> Result<Buffer, AllocError> {
        let shared = &self.0;
        check_alignment(shared.id, alignment)?;
        if bytes == 0 {
            return Ok(Buffer::empty(shared.id));
        }
        let out_of_memory =
            |available| AllocError::OutOfMemory { requested: bytes, available, device: shared.id };
        // The arena's granule, so that both allocators account for the same sizes.
        let rounded = bytes.checked_next_multiple_of(GRANULE).ok_or_else(|| out_of_memory(None))?;
        shared.take(bytes, rounded)?;
        let address = shared.address(rounded).map_err(|problem| {
            // The bytes were charged before the allocation, so a failure returns them.
            shared.give_back(rounded);
            match problem.kind() {
                ErrorKind::OutOfMemory => {
                    out_of_memory(shared.queue.context().memory().ok().map(|(free, _)| free))
                }
                _ => AllocError::Unsupported { device: shared.id, reason: problem.to_string() },
            }
        })?;
        shared.allocated(rounded);
        if let Some(limit) = shared.limit {
            shared.trim_to_limit(limit);
        }
        let owner = shared.clone();
        let release = move |address| {
            // The free follows the submitted work in stream order, so the host need not wait for
            // it.
            owner.queue.free_in(&owner.pool, address, rounded);
            owner.give_back(rounded);
        };
        Ok(Buffer::opaque(shared.id, bytes, address, Box::new(release)))
    }

    fn stats(&self) -> Stats {
        let stats = *self.0.stats.lock();
        Stats { total_allocated: self.0.pool.reserved().unwrap_or(stats.in_use), ..stats }
    }

    /// Releases free memory except what [`PoolConfig::keep_on_shrink`] keeps.
    fn trim(&self) -> usize {
        self.0.trim_to(self.0.config.keep_on_shrink)
    }
}
