//! The device's memory: buffers behind handles, and those that wait to be used again.

use std::sync::Arc;

use ort_alloc::{AllocError, Allocator, Buffer, DeviceId, Stats};
use ort_core::tensor::DeviceRange;
use ort_core::{ErrorKind, Result, ensure, error};
use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use crate::bindings::BindGroups;
use crate::gpu::Gpu;

/// Buffers begin at multiples of it, as every device demands of bindings at most.
const ALIGNMENT: usize = 256;

/// The memory of one device.
#[derive(Clone)]
pub(crate) struct Memory {
    id: DeviceId,
    gpu: Arc<Gpu>,
    groups: Arc<BindGroups>,
    table: Arc<Mutex<Table>>,
}

#[derive(Default)]
struct Table {
    live: FxHashMap<u64, wgpu::Buffer>,
    /// Released and not yet used again, the oldest first.
    idle: Vec<(u64, wgpu::Buffer)>,
    next: u64,
    stats: Stats,
}

/// Some bytes of a buffer.
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

    /// What a range of a tensor is; none for a range of no bytes.
    pub(crate) fn resolve(&self, range: DeviceRange<'_>) -> Result<Option<Region>> {
        let owner = range.buffer.device();
        ensure!(owner == self.id, Fail, "memory of {owner} was handed to {}", self.id);
        if range.len == 0 {
            return Ok(None);
        }
        ensure!(range.offset + range.len <= range.buffer.len(), Fail, "a range ends beyond its buffer");
        let handle = range.buffer.handle().ok_or_else(|| error!(Fail, "a device buffer has no handle"))?;
        let table = self.table.lock();
        let buffer = table.live.get(&handle).cloned();
        let buffer = buffer.ok_or_else(|| error!(Fail, "the memory of a tensor was given back"))?;
        let offset = range.buffer.offset() + range.offset;
        Ok(Some(Region { handle, buffer, offset, len: range.len }))
    }

    /// Gives idle buffers back to the device until `needed` more bytes are under the limit, or all of them.
    fn give_back(&self, table: &mut Table, keep: impl Fn(&Table) -> bool) -> usize {
        let mut freed = 0;
        while !table.idle.is_empty() && !keep(table) {
            let (handle, buffer) = table.idle.remove(0);
            freed += buffer.size() as usize;
            table.stats.total_allocated -= buffer.size() as usize;
            self.groups.forget(handle);
        }
        freed
    }

    /// An idle buffer that serves a request without wasting more than it takes.
    fn idle(table: &mut Table, bytes: usize) -> Option<(u64, wgpu::Buffer)> {
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
        if !alignment.is_power_of_two() || alignment > ALIGNMENT {
            let reason = format!("an alignment of {alignment} bytes");
            return Err(AllocError::Unsupported { device: self.id, reason });
        }
        if bytes == 0 {
            return Ok(Buffer::empty(self.id));
        }
        let size = bytes.next_multiple_of(ALIGNMENT);
        let mut table = self.table.lock();
        let (handle, buffer) = match Memory::idle(&mut table, size) {
            Some(found) => found,
            None => {
                // What is smaller will not serve requests like this one.
                table.idle.sort_by_key(|(_, buffer)| buffer.size());
                let limit = table.stats.limit.unwrap_or(usize::MAX);
                self.give_back(&mut table, |table| {
                    let first = table.idle.first().map_or(usize::MAX, |(_, buffer)| buffer.size() as usize);
                    first > size && table.stats.total_allocated.saturating_add(size) <= limit
                });
                let available = limit.saturating_sub(table.stats.total_allocated);
                let refused =
                    |available| AllocError::OutOfMemory { requested: size, available, device: self.id };
                if available < size {
                    return Err(refused(Some(available)));
                }
                let usage =
                    wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST;
                let buffer = self.gpu.buffer(size, usage).map_err(|problem| match problem.kind() {
                    ErrorKind::OutOfMemory => refused(None),
                    _ => AllocError::Unsupported { device: self.id, reason: problem.to_string() },
                })?;
                table.stats.total_allocated += size;
                table.next += 1;
                (table.next, buffer)
            }
        };
        let held = buffer.size() as usize;
        let stats = &mut table.stats;
        stats.num_allocs += 1;
        stats.in_use += held;
        stats.max_in_use = stats.max_in_use.max(stats.in_use);
        stats.max_alloc_size = stats.max_alloc_size.max(held);
        table.live.insert(handle, buffer);
        let owner = Arc::clone(&self.table);
        let release = move |handle| {
            let mut table = owner.lock();
            if let Some(buffer) = table.live.remove(&handle) {
                table.stats.in_use -= buffer.size() as usize;
                table.idle.push((handle, buffer));
            }
        };
        Ok(Buffer::opaque(self.id, bytes, handle, Box::new(release)))
    }

    fn stats(&self) -> Stats {
        self.table.lock().stats
    }

    fn trim(&self) -> usize {
        let mut table = self.table.lock();
        self.give_back(&mut table, |_| false)
    }
}
