//! Pools of memory that streams allocate and free in their order.
//!
//! A piece is there from where its stream reaches the allocation to where it reaches the end:
//! whatever uses it before or after is a fault, however late streams do what they were asked for.
//!
//! As the driver's, a pool takes memory from the device in large blocks, of which many pieces may
//! be, and gives back a block once all of it is free.

use super::queue::{Op, ask};
use super::{Done, Driver, Handle, current, limit, put};
use crate::code;

/// What a pool keeps when somebody waits.
pub(super) struct Pool {
    threshold: u64,
}

const RELEASE_THRESHOLD: u32 = 4;
const RESERVED: u32 = 5;
const USED: u32 = 7;

/// The beginning of the driver's record: a pinned allocation of no handle type on a device.
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
        // SAFETY: the caller of the driver gives a record, which begins with these.
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
        // SAFETY: the caller of the driver gives a number of 64 bits for this attribute.
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
            // What pools keep is given back before there is nothing left.
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
    /// Somebody has waited: pools give back what they have beyond their threshold, or all that is
    /// free.
    pub(super) fn release_pools(&mut self, all: bool) {
        let keeps: Vec<(u64, u64)> = self
            .pools
            .iter()
            .map(|(pool, Pool { threshold })| (*pool, if all { 0 } else { *threshold }))
            .collect();
        keeps.into_iter().for_each(|(pool, keep)| self.memory.trim(pool, keep));
    }
}

/// The same for a call that has waited.
pub(super) fn waited(done: Done) -> Done {
    done?;
    current()?.release_pools(false);
    Ok(())
}
