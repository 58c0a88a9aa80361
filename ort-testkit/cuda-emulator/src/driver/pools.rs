//! Memory pools with stream-ordered allocation.
//!
//! An allocation is live from the point at which its stream reaches the allocation until it reaches
//! the free. Any use before or after is a fault, however late the streams execute.
//!
//! Like the driver's, a pool takes memory from the device in large blocks that hold many
//! allocations, and returns a block when all of it is free.

use super::queue::{Op, ask};
use super::{Done, Driver, Handle, current, limit, put};
use crate::code;

/// The bytes that a pool keeps at a synchronisation.
pub(super) struct Pool {
    threshold: u64,
}

const RELEASE_THRESHOLD: u32 = 4;
const RESERVED: u32 = 5;
const USED: u32 = 7;

/// The first fields of the driver's struct: a pinned allocation without a handle type on a device.
#[repr(C)]
pub struct PoolProperties {
    allocation: i32,
    handles: i32,
    location: i32,
    device: i32,
}

api! {
    fn cuMemPoolCreate(pool: *mut Handle, properties: *const PoolProperties) {
        let mut driver = current()?;
        if properties.is_null() {
            return Err(code::INVALID_VALUE);
        }
        // SAFETY: `properties` is not null, and the driver's API requires a struct that starts with
        // these fields.
        let PoolProperties { allocation, handles, location, device } = unsafe { properties.read() };
        super::device(device)?;
        if super::has_pools() == 0 {
            return Err(code::NOT_SUPPORTED);
        }
        if [allocation, handles, location] != [1, 0, 1] {
            return Err(code::INVALID_VALUE);
        }
        let handle = driver.handle();
        driver.pools.insert(handle, Pool { threshold: 0 });
        put(pool, handle as Handle)
    }
    fn cuMemPoolDestroy(pool: Handle) {
        let mut driver = current()?;
        driver.pools.remove(&(pool as u64)).ok_or(code::INVALID_HANDLE)?;
        driver.memory.trim(pool as u64, 0);
        Ok(())
    }
    fn cuMemPoolSetAttribute(pool: Handle, attribute: u32, value: *const u64) {
        let mut driver = current()?;
        let pool = driver.pools.get_mut(&(pool as u64)).ok_or(code::INVALID_HANDLE)?;
        if attribute != RELEASE_THRESHOLD || value.is_null() {
            return Err(code::INVALID_VALUE);
        }
        // SAFETY: `value` is not null, and the driver's API requires a 64-bit number for this
        // attribute.
        pool.threshold = unsafe { value.read() };
        Ok(())
    }
    fn cuMemPoolGetAttribute(pool: Handle, attribute: u32, value: *mut u64) {
        let driver = current()?;
        let found = driver.pools.get(&(pool as u64)).ok_or(code::INVALID_HANDLE)?;
        let (reserved, used) = driver.memory.of_pool(pool as u64);
        put(value, match attribute {
            RELEASE_THRESHOLD => found.threshold,
            RESERVED => reserved,
            USED => used,
            _ => return Err(code::INVALID_VALUE),
        })
    }
    fn cuMemPoolTrimTo(pool: Handle, keep: usize) {
        let mut driver = current()?;
        if !driver.pools.contains_key(&(pool as u64)) {
            return Err(code::INVALID_HANDLE);
        }
        driver.memory.trim(pool as u64, keep as u64);
        Ok(())
    }
    fn cuMemAllocFromPoolAsync(address: *mut u64, size: usize, pool: Handle, stream: Handle) {
        let mut driver = current()?;
        driver.uncaptured_stream(stream)?;
        if !driver.pools.contains_key(&(pool as u64)) {
            return Err(code::INVALID_HANDLE);
        }
        if size == 0 {
            return Err(code::INVALID_VALUE);
        }
        let (pool, of) = (pool as u64, stream as u64);
        let mut found = driver.memory.allocate_in(pool, of, size as u64, limit());
        if found.is_none() {
            // Release what pools cache before reporting that the device is out of memory.
            driver.release_pools(true);
            found = driver.memory.allocate_in(pool, of, size as u64, limit());
        }
        let found = found.ok_or(code::OUT_OF_MEMORY)?;
        put(address, found)?;
        ask(driver, stream, Op::Reach { address: found, live: true })
    }
    fn cuMemFreeAsync(address: u64, stream: Handle) {
        let mut driver = current()?;
        driver.uncaptured_stream(stream)?;
        if !driver.memory.ask_free(address, stream as u64) {
            eprintln!("CUDA emulator: memory at {address:#x} is of no pool, or freed twice");
            return Err(code::INVALID_VALUE);
        }
        ask(driver, stream, Op::Reach { address, live: false })
    }
}

impl Driver {
    /// Releases the free memory of pools beyond their threshold, or all that is free.
    pub(super) fn release_pools(&mut self, all: bool) {
        let keeps: Vec<(u64, u64)> = self
            .pools
            .iter()
            .map(|(pool, Pool { threshold })| (*pool, if all { 0 } else { *threshold }))
            .collect();
        keeps.into_iter().for_each(|(pool, keep)| self.memory.trim(pool, keep));
    }
}

/// Does so for a call that synchronised, as the driver does.
pub(super) fn waited(done: Done) -> Done {
    done?;
    current()?.release_pools(false);
    Ok(())
}
