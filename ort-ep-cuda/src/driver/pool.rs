//! A pool of the device's memory that a stream allocates and frees in its order.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys;
use ort_core::Result;

use super::{Context, Stream};

/// A pool of the provider's own: others in the process have theirs.
#[derive(Debug)]
pub(crate) struct Pool {
    context: Arc<Context>,
    pool: sys::CUmemoryPool,
}

// SAFETY: as for the context.
unsafe impl Send for Pool {}
// SAFETY: as for the context.
unsafe impl Sync for Pool {}

impl Pool {
    /// A pool that gives back what is free beyond so many bytes whenever somebody waits for the
    /// device.
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
        // SAFETY: writes one handle, which is destroyed when this is dropped; the record lives
        // through the call.
        context.check(unsafe { sys::cuMemPoolCreate(&mut pool, &properties) }, "cuMemPoolCreate")?;
        let pool = Pool { context: context.clone(), pool };
        let mut threshold = release_threshold;
        let attribute = sys::CUmemPool_attribute_enum::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        // SAFETY: this attribute is a number of 64 bits, which is read during the call.
        let code = unsafe {
            sys::cuMemPoolSetAttribute(pool.pool, attribute, (&raw mut threshold).cast::<c_void>())
        };
        context.check(code, "cuMemPoolSetAttribute")?;
        Ok(pool)
    }

    /// The address of memory that what the stream is asked for from here on may use.
    pub(crate) fn allocate(&self, bytes: usize, stream: &Stream) -> Result<u64> {
        self.context.enter()?;
        let mut address = 0;
        // SAFETY: writes one address, which is freed by `free`; pool and stream are live and of one
        // context.
        let code = unsafe { sys::cuMemAllocFromPoolAsync(&mut address, bytes, self.pool, stream.stream) };
        self.context.check(code, "cuMemAllocFromPoolAsync")?;
        Ok(address)
    }

    /// Gives memory back once the stream has done what it was asked for. A context that broke has
    /// given it back itself.
    pub(crate) fn free(&self, address: u64, stream: &Stream) {
        if self.context.enter().is_ok() {
            // SAFETY: the address came from `allocate`, whose caller frees it once.
            let code = unsafe { sys::cuMemFreeAsync(address, stream.stream) };
            if let Err(problem) = self.context.check(code, "cuMemFreeAsync") {
                tracing::debug!("{problem}");
            }
        }
    }

    /// The bytes that it holds of the device's memory, free ones included.
    pub(crate) fn reserved(&self) -> Result<usize> {
        self.context.enter()?;
        let mut bytes = 0u64;
        let attribute = sys::CUmemPool_attribute_enum::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT;
        // SAFETY: this attribute is a number of 64 bits, which is written.
        let code =
            unsafe { sys::cuMemPoolGetAttribute(self.pool, attribute, (&raw mut bytes).cast::<c_void>()) };
        self.context.check(code, "cuMemPoolGetAttribute")?;
        Ok(usize::try_from(bytes).unwrap_or(usize::MAX))
    }

    /// Gives back what is free, until it holds so many bytes.
    pub(crate) fn trim_to(&self, bytes: usize) -> Result<()> {
        self.context.enter()?;
        // SAFETY: the pool is live.
        self.context.check(unsafe { sys::cuMemPoolTrimTo(self.pool, bytes) }, "cuMemPoolTrimTo")
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: the pool is live; what was asked to be freed of it goes when its stream gets
            // there.
            let _ = unsafe { sys::cuMemPoolDestroy(self.pool) };
        }
    }
}
