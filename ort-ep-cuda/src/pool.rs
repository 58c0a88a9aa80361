//! The device's memory out of a pool of the driver's: it is allocated and freed in the order of the
//! compute stream, and nobody waits.
//!
//! It takes the place of the arena. What one run frees the next gets at once; what stays free goes
//! back to the system by the rules of the pool's options, which are ONNX Runtime's.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ort_alloc::arena::GRANULE;
use ort_alloc::{AllocError, Allocator, Buffer, DeviceId, Stats};
use ort_core::{ErrorKind, Result};
use parking_lot::Mutex;

use crate::driver::Pool;
use crate::memory::ALIGNMENT;
use crate::queue::Queue;

/// The options of a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PoolConfig {
    /// What it may hold that is free when somebody waits for the device.
    pub(crate) release_threshold: u64,
    /// What a trim leaves of it.
    pub(crate) keep_on_shrink: usize,
}

/// The memory of one device: a pool.
pub(crate) struct PoolMemory(Arc<Shared>);

struct Shared {
    id: DeviceId,
    queue: Arc<Queue>,
    pool: Pool,
    config: PoolConfig,
    limit: Option<usize>,
    stats: Mutex<Stats>,
    /// What the pool held after the last trim for the limit, if that is more than the limit.
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
    /// Counts bytes before they are allocated, so that no two calls together pass the limit.
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

    /// Counts what was allocated.
    fn allocated(&self, bytes: usize) {
        let mut stats = self.stats.lock();
        stats.num_allocs += 1;
        stats.max_in_use = stats.max_in_use.max(stats.in_use);
        stats.max_alloc_size = stats.max_alloc_size.max(bytes);
    }

    /// Waits for what was freed, and gives back what is free beyond so many bytes; returns how many
    /// went.
    fn trim_to(&self, bytes: usize) -> usize {
        let held = || self.pool.reserved().unwrap_or(0);
        let before = held();
        self.queue.settle();
        if let Err(problem) = self.pool.trim_to(bytes) {
            tracing::debug!("the pool is not trimmed: {problem}");
        }
        let gone = before.saturating_sub(held());
        self.stats.lock().num_arena_shrinkages += u64::from(gone > 0);
        gone
    }

    /// Gives back what is free beyond the limit, as far as the pool can: it holds whole blocks of
    /// the driver's granularity (32 MiB), each of which stays as long as any of it is in use. What
    /// a trim leaves is not trimmed again until the pool grows, as each one waits for the device.
    fn trim_to_limit(&self, limit: usize) {
        let Ok(held) = self.pool.reserved() else { return };
        if held > limit && held > self.held_beyond.load(Ordering::Relaxed) {
            self.trim_to(limit);
        }
        let left = self.pool.reserved().unwrap_or(held);
        self.held_beyond.store(if left > limit { left } else { 0 }, Ordering::Relaxed);
    }

    /// The address of so many bytes; where there are none, what is free goes back first.
    fn address(&self, bytes: usize) -> Result<u64> {
        match self.queue.allocate_in(&self.pool, bytes) {
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
        if !alignment.is_power_of_two() || alignment > ALIGNMENT {
            let reason = format!("an alignment of {alignment} bytes");
            return Err(AllocError::Unsupported { device: shared.id, reason });
        }
        if bytes == 0 {
            return Ok(Buffer::empty(shared.id));
        }
        let out_of_memory =
            |available| AllocError::OutOfMemory { requested: bytes, available, device: shared.id };
        let rounded = bytes.checked_next_multiple_of(GRANULE).ok_or_else(|| out_of_memory(None))?;
        shared.take(bytes, rounded)?;
        let address = shared.address(rounded).map_err(|problem| {
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
            owner.queue.free_in(&owner.pool, address, rounded);
            owner.give_back(rounded);
        };
        Ok(Buffer::opaque(shared.id, bytes, address, Box::new(release)))
    }

    fn stats(&self) -> Stats {
        let stats = *self.0.stats.lock();
        Stats { total_allocated: self.0.pool.reserved().unwrap_or(stats.in_use), ..stats }
    }

    /// Gives back what is free, but for what the option keeps.
    fn trim(&self) -> usize {
        self.0.trim_to(self.0.config.keep_on_shrink)
    }
}
