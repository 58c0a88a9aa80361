//! Device allocator: storage buffers behind opaque handles, with a pool of idle buffers.

use std::sync::Arc;

use ort_alloc::{AllocError, Allocator, Buffer, DeviceId, Stats};
use ort_core::tensor::DeviceRange;
use ort_core::{ErrorKind, Result, error};
use ort_gpu::memory::{ALIGNMENT, check_alignment, count_allocation, locate};
use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use crate::bindings::BindGroups;
use crate::gpu::Gpu;

/// The bound of the idle pool, as a multiple of the high-water mark of reused bytes. The largest
/// buffer, idle or new, counts instead if it is larger.
const MOST_IDLE: usize = 2;

/// The allocator of one device.
#[derive(Clone)]
pub(crate) struct Memory {
    id: DeviceId,
    gpu: Arc<Gpu>,
    groups: Arc<BindGroups>,
    table: Arc<Mutex<Table>>,
}

#[derive(Default)]
struct Table {
    live: FxHashMap<u64, Live>,
    /// Released buffers, the oldest first.
    idle: Vec<(u64, wgpu::Buffer)>,
    next: u64,
    stats: Stats,
    /// Bytes of live buffers that came from the idle pool, and their high-water mark. Constants are
    /// allocated once and stay, so they do not count.
    recycled: usize,
    most_recycled: usize,
}

struct Live {
    buffer: wgpu::Buffer,
    was_idle: bool,
}

/// A byte range of a buffer.
#[derive(Clone, Debug)]
pub(crate) struct Region {
    pub(crate) handle: u64,
    pub(crate) buffer: wgpu::Buffer,
    pub(crate) offset: usize,
    pub(crate) len: usize,
}

impl Memory {
    pub(crate) fn new(id: DeviceId, gpu: Arc<Gpu>, groups: Arc<BindGroups>, limit: Option<usize>) -> Memory {
        let stats = Stats { limit, ..Stats::default() };
        Memory { id, gpu, groups, table: Arc::new(Mutex::new(Table { stats, ..Table::default() })) }
    }

    /// Resolves a tensor's range to its buffer; `None` for an empty range.
    pub(crate) fn resolve(&self, range: DeviceRange<'_>) -> Result<Option<Region>> {
        let Some((handle, offset)) = locate(self.id, &range)? else { return Ok(None) };
        let table = self.table.lock();
        let buffer = table.live.get(&handle).map(|live| live.buffer.clone());
        let buffer = buffer.ok_or_else(|| error!(Fail, "the memory of a tensor was given back"))?;
        Ok(Some(Region { handle, buffer, offset, len: range.len }))
    }

    /// Frees idle buffers, the oldest first, until `keep` holds. Returns the bytes freed.
    fn give_back(&self, table: &mut Table, keep: impl Fn(&Table) -> bool) -> usize {
        let mut freed = 0;
        while !table.idle.is_empty() && !keep(table) {
            let (handle, buffer) = table.idle.remove(0);
            freed += buffer.size() as usize;
            table.stats.total_allocated -= buffer.size() as usize;
            // A cached bind group would keep the buffer's memory alive.
            self.groups.forget(handle);
        }
        freed
    }

    /// Creates a buffer. First frees idle buffers until the pool is within its bound and the total
    /// within the limit.
    fn make(&self, table: &mut Table, size: usize) -> Result<wgpu::Buffer, AllocError> {
        let limit = table.stats.limit.unwrap_or(usize::MAX);
        let largest = table.idle.iter().map(|(_, buffer)| buffer.size() as usize).fold(size, usize::max);
        let most_idle = table.most_recycled.max(largest).saturating_mul(MOST_IDLE);
        self.give_back(table, |table| {
            // What is held and not in use is idle.
            let held = table.stats.total_allocated;
            held - table.stats.in_use <= most_idle && held.saturating_add(size) <= limit
        });
        let available = limit.saturating_sub(table.stats.total_allocated);
        let refused = |available| AllocError::OutOfMemory { requested: size, available, device: self.id };
        if available < size {
            return Err(refused(Some(available)));
        }
        let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST;
        let is_short =
            |made: &Result<_>| made.as_ref().is_err_and(|problem| problem.kind() == ErrorKind::OutOfMemory);
        let mut made = self.gpu.buffer(size, usage);
        // The driver may run out before our own limit is reached. Drop the whole pool and retry
        // once.
        if is_short(&made) && size <= self.gpu.limits.buffer && self.give_back(table, |_| false) > 0 {
            made = self.gpu.buffer(size, usage);
        }
        let buffer = made.map_err(|problem| match problem.kind() {
            ErrorKind::OutOfMemory => refused(None),
            _ => AllocError::Unsupported { device: self.id, reason: problem.to_string() },
        })?;
        table.stats.total_allocated += size;
        Ok(buffer)
    }

    /// Takes the best fitting idle buffer, of at most twice the requested size.
    fn idle(table: &mut Table, bytes: usize) -> Option<(u64, wgpu::Buffer)> {
        // At least half of a reused buffer is used.
        let fits =
            |buffer: &wgpu::Buffer| (bytes..=bytes.saturating_mul(2)).contains(&(buffer.size() as usize));
        let fitting = table.idle.iter().enumerate().filter(|(_, (_, buffer))| fits(buffer));
        let best = fitting.min_by_key(|(_, (_, buffer))| buffer.size())?.0;
        Some(table.idle.remove(best))
    }
}

impl Allocator for Memory {
    fn device(&self) -> DeviceId {
        self.id
    }

    fn allocate(&self, bytes: usize, alignment: usize) -> Result<Buffer, AllocError> {
        check_alignment(self.id, alignment)?;
        if bytes == 0 {
            // `resolve` returns `None` for an empty range, so nothing looks for a buffer.
            return Ok(Buffer::empty(self.id));
        }
        // The padding lets shaders and copies access the last element as a whole word.
        let size = bytes.checked_next_multiple_of(ALIGNMENT).ok_or(AllocError::OutOfMemory {
            requested: bytes,
            available: None,
            device: self.id,
        })?;
        let _exclusive = self.gpu.exclusive();
        let mut table = self.table.lock();
        let found = Memory::idle(&mut table, size);
        let was_idle = found.is_some();
        let (handle, buffer) = match found {
            // The handle stays that of the buffer, because bind groups are cached by handle.
            Some(found) => found,
            None => {
                let buffer = self.make(&mut table, size)?;
                table.next += 1;
                (table.next, buffer)
            }
        };
        let held = buffer.size() as usize;
        if was_idle {
            table.recycled += held;
            table.most_recycled = table.most_recycled.max(table.recycled);
        }
        count_allocation(&mut table.stats, held);
        table.live.insert(handle, Live { buffer, was_idle });
        let owner = Arc::clone(&self.table);
        // Returns the buffer to the pool. Queue order makes reuse safe while earlier commands still
        // use it.
        let release = move |handle| {
            let mut table = owner.lock();
            if let Some(Live { buffer, was_idle }) = table.live.remove(&handle) {
                let held = buffer.size() as usize;
                table.stats.in_use -= held;
                table.recycled -= if was_idle { held } else { 0 };
                table.idle.push((handle, buffer));
            }
        };
        Ok(Buffer::opaque(self.id, bytes, handle, Box::new(release)))
    }

    fn stats(&self) -> Stats {
        self.table.lock().stats
    }

    fn trim(&self) -> usize {
        let _exclusive = self.gpu.exclusive();
        let mut table = self.table.lock();
        self.give_back(&mut table, |_| false)
    }
}
