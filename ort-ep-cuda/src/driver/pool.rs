//! A stream-ordered memory pool.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys;
use ort_core::Result;

use super::{Context, Stream};

/// A pool of our own: other users of the device in this process have theirs.
#[derive(Debug)]
pub(crate) struct Pool {
    context: Arc<Context>,
    pool: sys::CUmemoryPool,
}

// SAFETY: driver handles may be used from any thread, as for `Context`.
unsafe impl Send for Pool {}
// SAFETY: as for `Context`.
unsafe impl Sync for Pool {}

impl Pool {
    /// Creates a pool that releases free memory beyond the threshold whenever the host synchronizes
    /// with the device.
    pub(crate) fn new(context: &Arc<Context>, release_threshold: u64) -> Result<Pool> {
        context.enter()?;
        let location = sys::CUmemLocation {
            type_: sys::CUmemLocationType_enum::CU_MEM_LOCATION_TYPE_DEVICE,
            id: context.device(),
        };
        let properties = sys::CUmemPoolProps {
            allocType: sys::CUmemAllocationType_enum::CU_MEM_ALLOCATION_TYPE_PINNED,
            handleTypes: sys::CUmemAllocationHandleType_enum::CU_MEM_HANDLE_TYPE_NONE,
            location,
            win32SecurityAttributes: ptr::null_mut(),
            reserved: [0; 64],
        };
        let mut pool = ptr::null_mut();
        // SAFETY: the driver writes one handle, which `Drop` destroys; `properties` outlives the
        // call.
        context.check(unsafe { sys::cuMemPoolCreate(&mut pool, &properties) }, "cuMemPoolCreate")?;
        let pool = Pool { context: context.clone(), pool };
        let mut threshold = release_threshold;
        let attribute = sys::CUmemPool_attribute_enum::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        // SAFETY: this attribute is a 64-bit number, which the driver reads during the call.
        let code = unsafe {
            sys::cuMemPoolSetAttribute(pool.pool, attribute, (&raw mut threshold).cast::<c_void>())
        };
        context.check(code, "cuMemPoolSetAttribute")?;
        Ok(pool)
    }

    /// Allocates memory for work submitted to the stream from here on, and returns its address.
    pub(crate) fn allocate(&self, bytes: usize, stream: &Stream) -> Result<u64> {
        self.context.enter()?;
        let mut address = 0;
        // SAFETY: the driver writes one address, which `free` frees. Pool and stream are live and
        // belong to one context.
        let code = unsafe { sys::cuMemAllocFromPoolAsync(&mut address, bytes, self.pool, stream.stream) };
        self.context.check(code, "cuMemAllocFromPoolAsync")?;
        Ok(address)
    }

    /// Frees memory once the stream has done its earlier work. A broken context has freed it
    /// already.
    pub(crate) fn free(&self, address: u64, stream: &Stream) {
        if self.context.enter().is_ok() {
            // SAFETY: the address came from `allocate`, and its owner frees it once.
            let code = unsafe { sys::cuMemFreeAsync(address, stream.stream) };
            if let Err(problem) = self.context.check(code, "cuMemFreeAsync") {
                tracing::debug!("{problem}");
            }
        }
    }

    /// Returns the bytes of device memory that the pool holds, free ones included.
    pub(crate) fn reserved(&self) -> Result<usize> {
        self.context.enter()?;
        let mut bytes = 0u64;
        let attribute = sys::CUmemPool_attribute_enum::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT;
        // SAFETY: this attribute is a 64-bit number, which the driver writes.
        let code =
            unsafe { sys::cuMemPoolGetAttribute(self.pool, attribute, (&raw mut bytes).cast::<c_void>()) };
        self.context.check(code, "cuMemPoolGetAttribute")?;
        Ok(usize::try_from(bytes).unwrap_or(usize::MAX))
    }

    /// Releases free memory until the pool holds at most `bytes`.
    pub(crate) fn trim_to(&self, bytes: usize) -> Result<()> {
        self.context.enter()?;
        // SAFETY: the pool is live until `Drop`.
        self.context.check(unsafe { sys::cuMemPoolTrimTo(self.pool, bytes) }, "cuMemPoolTrimTo")
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: the pool is live. The driver completes pending frees when their streams reach
            // them.
            let _ = unsafe { sys::cuMemPoolDestroy(self.pool) };
        }
    }
}
