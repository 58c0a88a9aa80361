//! Device memory behind handles: a private table from numbers to byte vectors.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use ort_alloc::{AllocError, Allocator, Buffer, DeviceId, Stats};
use ort_core::tensor::{DeviceRange, TensorMut, TensorView};
use ort_core::{Result, ensure, error};
use parking_lot::Mutex;

/// The maximum alignment that the device supports, as on GPUs.
const MAX_ALIGNMENT: usize = 256;

/// Counters of the copies to and from a device's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Transfers {
    /// Tensors copied from the host.
    pub uploads: usize,
    /// Tensors copied to the host.
    pub downloads: usize,
    /// Tensors copied within the device's memory.
    pub within: usize,
    /// Bytes copied between host and device.
    pub bytes: usize,
}

/// The memory of one device. Only this file can access the table of its regions.
#[derive(Debug)]
pub(super) struct Memory {
    id: DeviceId,
    table: Arc<Mutex<Table>>,
}

#[derive(Debug, Default)]
struct Table {
    regions: HashMap<u64, Vec<u8>>,
    next: u64,
    stats: Stats,
    transfers: Transfers,
}

impl Memory {
    pub(super) fn new(id: DeviceId, limit: Option<usize>) -> Memory {
        let stats = Stats { limit, ..Stats::default() };
        Memory { id, table: Arc::new(Mutex::new(Table { stats, ..Table::default() })) }
    }

    pub(super) fn transfers(&self) -> Transfers {
        self.table.lock().transfers
    }

    /// Copies between the host and this memory, in either direction, or within it.
    pub(super) fn copy(&self, from: TensorView<'_>, to: TensorMut<'_>) -> Result<()> {
        ensure!(
            from.dtype() == to.dtype() && from.shape() == to.shape(),
            Fail,
            "a copy of {} {:?} into {} {:?}",
            from.dtype().name(),
            from.shape(),
            to.dtype().name(),
            to.shape()
        );
        match (from.device_range(), to.device_range()) {
            (None, Some(range)) => {
                let bytes = from.bytes()?;
                self.write(range, bytes)?;
                self.count(|transfers| transfers.uploads += 1, bytes.len());
            }
            (Some(range), None) => {
                let bytes = self.read(range)?;
                let to = to.bytes_mut()?;
                ensure!(
                    to.len() == bytes.len(),
                    Fail,
                    "cannot copy {} bytes into {} bytes",
                    bytes.len(),
                    to.len()
                );
                to.copy_from_slice(&bytes);
                self.count(|transfers| transfers.downloads += 1, bytes.len());
            }
            (Some(from), Some(to)) => {
                self.write(to, &self.read(from)?)?;
                // Nothing passes between host and device.
                self.count(|transfers| transfers.within += 1, 0);
            }
            (None, None) => return Err(error!(Fail, "neither side of a copy is in the device's memory")),
        }
        Ok(())
    }

    fn count(&self, add: impl FnOnce(&mut Transfers), bytes: usize) {
        let mut table = self.table.lock();
        add(&mut table.transfers);
        table.transfers.bytes += bytes;
    }

    /// Copies the bytes of a range out.
    pub(super) fn read(&self, range: DeviceRange<'_>) -> Result<Vec<u8>> {
        let (handle, bytes) = self.resolve(range)?;
        let table = self.table.lock();
        let region = table.regions.get(&handle).and_then(|region| region.get(bytes));
        region.map(<[u8]>::to_vec).ok_or_else(|| out_of_range(range))
    }

    /// Writes the bytes of a range.
    pub(super) fn write(&self, range: DeviceRange<'_>, bytes: &[u8]) -> Result<()> {
        ensure!(range.len == bytes.len(), Fail, "cannot copy {} bytes into {} bytes", bytes.len(), range.len);
        let (handle, place) = self.resolve(range)?;
        let mut table = self.table.lock();
        let region = table.regions.get_mut(&handle).and_then(|region| region.get_mut(place));
        region.ok_or_else(|| out_of_range(range))?.copy_from_slice(bytes);
        Ok(())
    }

    fn resolve(&self, range: DeviceRange<'_>) -> Result<(u64, Range<usize>)> {
        let owner = range.buffer.device();
        ensure!(owner == self.id, Fail, "memory of {owner} was handed to {}", self.id);
        ensure!(range.offset + range.len <= range.buffer.len(), Fail, "a range ends beyond its buffer");
        let handle = range.buffer.handle().ok_or_else(|| error!(Fail, "a device buffer has no handle"))?;
        let start = range.buffer.offset() + range.offset;
        Ok((handle, start..start + range.len))
    }
}

fn out_of_range(range: DeviceRange<'_>) -> ort_core::Error {
    error!(Fail, "bytes {}+{} are in no live region", range.offset, range.len)
}

impl Allocator for Memory {
    fn device(&self) -> DeviceId {
        self.id
    }

    fn allocate(&self, bytes: usize, alignment: usize) -> Result<Buffer, AllocError> {
        if !alignment.is_power_of_two() || alignment > MAX_ALIGNMENT {
            let reason = format!("an alignment of {alignment} bytes");
            return Err(AllocError::Unsupported { device: self.id, reason });
        }
        let mut table = self.table.lock();
        // This check precedes every addition, so `in_use` never exceeds the limit.
        let available = table.stats.limit.map(|limit| limit - table.stats.in_use);
        if available.is_some_and(|available| available < bytes) {
            return Err(AllocError::OutOfMemory { requested: bytes, available, device: self.id });
        }
        let handle = table.next;
        table.next += 1;
        // Filled with NaN patterns, so that output a kernel does not write cannot pass as right.
        table.regions.insert(handle, vec![0xff; bytes]);
        let stats = &mut table.stats;
        stats.num_allocs += 1;
        stats.in_use += bytes;
        stats.total_allocated = stats.in_use;
        stats.max_in_use = stats.max_in_use.max(stats.in_use);
        stats.max_alloc_size = stats.max_alloc_size.max(bytes);
        // The buffer owns the table as well, so it may outlive its device.
        let owner = Arc::clone(&self.table);
        let release = move |handle| {
            let mut table = owner.lock();
            let freed = table.regions.remove(&handle).map_or(0, |region| region.len());
            table.stats.in_use -= freed;
            table.stats.total_allocated = table.stats.in_use;
        };
        Ok(Buffer::opaque(self.id, bytes, handle, Box::new(release)))
    }

    fn stats(&self) -> Stats {
        self.table.lock().stats
    }

    fn trim(&self) -> usize {
        0
    }
}
