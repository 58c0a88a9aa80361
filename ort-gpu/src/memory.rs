//! Device memory behind opaque buffers: the location of a tensor, and an allocator's bookkeeping.

use ort_alloc::{AllocError, DeviceId, Stats};
use ort_core::tensor::DeviceRange;
use ort_core::{Result, ensure, error};

/// The alignment of allocations. CUDA guarantees at least 256 bytes (CUDA C++ Programming Guide,
/// "Device Memory Accesses"), and 256 is the most that WebGPU lets a device demand for bindings.
pub const ALIGNMENT: usize = 256;

/// Returns the handle of a tensor's buffer, and the offset of the tensor behind that handle in
/// bytes; `None` if the range is empty.
///
/// # Errors
///
/// The memory is another device's, or the range exceeds its buffer.
pub fn locate(id: DeviceId, range: &DeviceRange<'_>) -> Result<Option<(u64, usize)>> {
    let owner = range.buffer.device();
    ensure!(owner == id, Fail, "memory of {owner} was handed to {id}");
    // Nothing reads or writes an empty range, so it needs no handle.
    if range.len == 0 {
        return Ok(None);
    }
    ensure!(range.offset + range.len <= range.buffer.len(), Fail, "a range ends beyond its buffer");
    let handle = range.buffer.handle().ok_or_else(|| error!(Fail, "a device buffer has no handle"))?;
    // The buffer may itself be a part of the memory behind the handle.
    Ok(Some((handle, range.buffer.offset() + range.offset)))
}

/// Refuses an alignment that is not a power of two, or larger than [`ALIGNMENT`].
///
/// # Errors
///
/// [`AllocError::Unsupported`].
pub fn check_alignment(device: DeviceId, alignment: usize) -> Result<(), AllocError> {
    if alignment.is_power_of_two() && alignment <= ALIGNMENT {
        return Ok(());
    }
    Err(AllocError::Unsupported { device, reason: format!("an alignment of {alignment} bytes") })
}

/// Counts a new allocation of `bytes` that is in use.
pub fn count_allocation(stats: &mut Stats, bytes: usize) {
    stats.num_allocs += 1;
    stats.in_use += bytes;
    stats.max_in_use = stats.max_in_use.max(stats.in_use);
    stats.max_alloc_size = stats.max_alloc_size.max(bytes);
}
