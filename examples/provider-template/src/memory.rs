//! The device's memory: blocks of bytes behind numbers. A real device asks its driver for them.

use std::collections::BTreeMap;
use std::sync::Arc;

use ort_alloc::{AllocError, Allocator, Buffer, DeviceId, Stats};
use ort_core::ep::new_device_id;
use ort_core::tensor::DeviceRange;
use ort_core::{Result, ensure, error};
use parking_lot::Mutex;

/// The largest alignment that the device gives; blocks here begin nowhere in particular, so that
/// any will do.
const ALIGNMENT: usize = 256;

/// The memory of one device.
#[derive(Clone)]
pub(crate) struct Memory {
    device: DeviceId,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    blocks: BTreeMap<u64, Vec<u8>>,
    next: u64,
    stats: Stats,
}

impl Memory {
    /// Memory of at most `limit` bytes.
    pub(crate) fn new(limit: Option<usize>) -> Memory {
        let state = State { stats: Stats { limit, ..Stats::default() }, ..State::default() };
        Memory { device: new_device_id(), state: Arc::new(Mutex::new(state)) }
    }

    /// The bytes of a range, as the host or a kernel reads them.
    pub(crate) fn read(&self, range: DeviceRange<'_>) -> Result<Vec<u8>> {
        self.with(range, |bytes| bytes.to_vec())
    }

    /// Writes the bytes of a range.
    pub(crate) fn write(&self, range: DeviceRange<'_>, from: &[u8]) -> Result<()> {
        ensure!(from.len() == range.len, Fail, "{} bytes into a place of {}", from.len(), range.len);
        self.with(range, |bytes| bytes.copy_from_slice(from))
    }

    fn with<T>(&self, range: DeviceRange<'_>, work: impl FnOnce(&mut [u8]) -> T) -> Result<T> {
        if range.len == 0 {
            return Ok(work(&mut []));
        }
        let start = range.buffer.offset() + range.offset;
        let mut state = self.state.lock();
        let block = range.buffer.handle().and_then(|handle| state.blocks.get_mut(&handle));
        let bytes = block.and_then(|block| block.get_mut(start..start + range.len));
        Ok(work(bytes.ok_or_else(|| error!(Fail, "a tensor is not in the device's memory"))?))
    }
}

impl Allocator for Memory {
    fn device(&self) -> DeviceId {
        self.device
    }

    fn allocate(&self, bytes: usize, alignment: usize) -> Result<Buffer, AllocError> {
        if !alignment.is_power_of_two() || alignment > ALIGNMENT {
            let reason = format!("an alignment of {alignment} bytes");
            return Err(AllocError::Unsupported { device: self.device, reason });
        }
        if bytes == 0 {
            return Ok(Buffer::empty(self.device));
        }
        let mut state = self.state.lock();
        let available = state.stats.limit.map(|limit| limit.saturating_sub(state.stats.in_use));
        if available.is_some_and(|available| available < bytes) {
            return Err(AllocError::OutOfMemory { requested: bytes, available, device: self.device });
        }
        state.next += 1;
        let handle = state.next;
        state.blocks.insert(handle, vec![0; bytes]);
        let stats = &mut state.stats;
        stats.num_allocs += 1;
        stats.in_use += bytes;
        stats.total_allocated = stats.in_use;
        stats.max_in_use = stats.max_in_use.max(stats.in_use);
        stats.max_alloc_size = stats.max_alloc_size.max(bytes);
        let owner = self.state.clone();
        let release = move |handle| {
            let mut state = owner.lock();
            state.blocks.remove(&handle);
            state.stats.in_use -= bytes;
            state.stats.total_allocated = state.stats.in_use;
        };
        Ok(Buffer::opaque(self.device, bytes, handle, Box::new(release)))
    }

    fn stats(&self) -> Stats {
        self.state.lock().stats
    }

    fn trim(&self) -> usize {
        0
    }
}
