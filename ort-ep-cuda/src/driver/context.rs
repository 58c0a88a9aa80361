//! A device's primary context: its memory, its modules, and the error that broke it.

use std::ffi::{CStr, CString, c_void};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use cudarc::driver::sys::{self, CUresult};
use ort_core::{Error, Result, error};
use parking_lot::Mutex;

use super::{PhysicalDevice, check};

/// A device's primary context, which all users of the device in this process share.
#[derive(Debug)]
pub(crate) struct Context {
    device: PhysicalDevice,
    context: sys::CUcontext,
    /// The error that broke the context, if any.
    lost: Mutex<Option<Error>>,
    pub(crate) counts: Counts,
}

/// Counters of the work submitted to a device since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Kernels launched individually.
    pub launches: u64,
    /// Library calls made individually.
    pub routines: u64,
    /// CUDA graphs captured.
    pub captures: u64,
    /// CUDA graphs replayed.
    pub replays: u64,
    /// Calls in which the host waited for the device.
    pub waits: u64,
    /// Bytes of page-locked host memory held now.
    pub pinned_bytes: usize,
}

#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) launches: AtomicU64,
    pub(crate) routines: AtomicU64,
    pub(crate) captures: AtomicU64,
    pub(crate) replays: AtomicU64,
    pub(crate) waits: AtomicU64,
    pub(crate) pinned_bytes: AtomicUsize,
}

impl Counts {
    /// Increments a counter.
    pub(crate) fn add(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

// SAFETY: driver handles may be used from any thread; `enter` makes the context current on the
// calling thread before each call.
unsafe impl Send for Context {}
// SAFETY: as above, and the driver serialises concurrent calls.
unsafe impl Sync for Context {}

impl Context {
    /// Retains the primary context of a device.
    pub(crate) fn open(device: PhysicalDevice) -> Result<Arc<Context>> {
        let mut context = ptr::null_mut();
        // SAFETY: the driver writes one handle, which `Drop` releases.
        check(unsafe { sys::cuDevicePrimaryCtxRetain(&mut context, device.0) }, "cuDevicePrimaryCtxRetain")?;
        Ok(Arc::new(Context { device, context, lost: Mutex::default(), counts: Counts::default() }))
    }

    /// Returns a snapshot of the counters.
    pub(crate) fn counters(&self) -> Counters {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Counters {
            launches: count(&self.counts.launches),
            routines: count(&self.counts.routines),
            captures: count(&self.counts.captures),
            replays: count(&self.counts.replays),
            waits: count(&self.counts.waits),
            pinned_bytes: self.counts.pinned_bytes.load(Ordering::Relaxed),
        }
    }

    /// Returns the error that broke the context: nothing can run in it any more.
    pub(crate) fn check_present(&self) -> Result<()> {
        self.lost.lock().clone().map_or(Ok(()), Err)
    }

    /// Whether this is the context of a handle.
    pub(super) fn is(&self, context: sys::CUcontext) -> bool {
        self.context == context
    }

    /// The device's handle.
    pub(super) fn device(&self) -> sys::CUdevice {
        self.device.0
    }

    /// Makes this the current context of the calling thread.
    pub(crate) fn enter(&self) -> Result<()> {
        self.check_present()?;
        // SAFETY: `open` retained the context, and only `Drop` releases it.
        self.check(unsafe { sys::cuCtxSetCurrent(self.context) }, "cuCtxSetCurrent")
    }

    /// Turns anything but success into an error. An error that breaks the context is remembered.
    pub(super) fn check(&self, code: CUresult, what: &str) -> Result<()> {
        check(code, what).map_err(|problem| {
            if !is_sticky(code) {
                return problem;
            }
            let problem = problem.help(
                "the device's context is broken for this process: start a new one; compute-sanitizer finds the access",
            );
            self.lost.lock().get_or_insert(problem).clone()
        })
    }

    /// Returns the free and total bytes of the device's memory.
    pub(crate) fn memory(&self) -> Result<(usize, usize)> {
        self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the driver writes two numbers.
        self.check(unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) }, "cuMemGetInfo")?;
        Ok((free, total))
    }

    /// Allocates memory, and returns its address.
    pub(crate) fn allocate(&self, bytes: usize) -> Result<u64> {
        self.enter()?;
        let mut address = 0;
        // SAFETY: the driver writes one address, which `free` frees.
        self.check(unsafe { sys::cuMemAlloc_v2(&mut address, bytes) }, "cuMemAlloc")?;
        Ok(address)
    }

    /// Frees memory once the work that uses it is done. A broken context has freed it already.
    pub(crate) fn free(&self, address: u64) {
        if self.enter().is_ok() {
            // SAFETY: the address came from `allocate`, and its owner frees it once. The driver
            // waits for the work that uses it.
            let code = unsafe { sys::cuMemFree_v2(address) };
            if let Err(problem) = self.check(code, "cuMemFree") {
                tracing::debug!("{problem}");
            }
        }
    }

    /// Compiles PTX for the device.
    pub(crate) fn load(self: &Arc<Context>, ptx: &str) -> Result<Module> {
        self.enter()?;
        let text = CString::new(ptx).map_err(|_| error!(Fail, "a zero in the text of a kernel"))?;
        let mut log = vec![0u8; 4096];
        let mut options = [
            sys::CUjit_option_enum::CU_JIT_ERROR_LOG_BUFFER,
            sys::CUjit_option_enum::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
        ];
        let mut values: [*mut c_void; 2] = [log.as_mut_ptr().cast(), ptr::without_provenance_mut(log.len())];
        let mut module = ptr::null_mut();
        // SAFETY: `text` is NUL-terminated. There are two options, and each has a value as the
        // driver expects it: the address of `log`, and its size passed as a pointer.
        let code = unsafe {
            sys::cuModuleLoadDataEx(
                &mut module,
                text.as_ptr().cast(),
                options.len() as u32,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        self.check(code, "cuModuleLoadData").map_err(|problem| {
            let said = CStr::from_bytes_until_nul(&log).map(CStr::to_string_lossy).unwrap_or_default();
            problem.help(format!("the driver's compiler says: {said}"))
        })?;
        Ok(Module { context: self.clone(), module })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // At process exit the driver may be gone already and says so; nothing is left to do then.
        // SAFETY: `open` retained the context once.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device.0) };
    }
}

/// Whether an error leaves the context unusable (CUDA Driver API, "CUresult": errors that leave the
/// process in an inconsistent state).
fn is_sticky(code: CUresult) -> bool {
    use CUresult::*;
    matches!(
        code,
        CUDA_ERROR_ILLEGAL_ADDRESS
            | CUDA_ERROR_LAUNCH_FAILED
            | CUDA_ERROR_LAUNCH_TIMEOUT
            | CUDA_ERROR_ILLEGAL_INSTRUCTION
            | CUDA_ERROR_INVALID_ADDRESS_SPACE
            | CUDA_ERROR_INVALID_PC
            | CUDA_ERROR_MISALIGNED_ADDRESS
            | CUDA_ERROR_HARDWARE_STACK_ERROR
            | CUDA_ERROR_ECC_UNCORRECTABLE
            | CUDA_ERROR_ASSERT
            | CUDA_ERROR_CONTEXT_IS_DESTROYED
            | CUDA_ERROR_DEINITIALIZED
    )
}

/// A compiled module.
#[derive(Debug)]
pub(crate) struct Module {
    context: Arc<Context>,
    module: sys::CUmodule,
}

// SAFETY: driver handles may be used from any thread, as for `Context`.
unsafe impl Send for Module {}
// SAFETY: as for `Context`.
unsafe impl Sync for Module {}

impl Module {
    /// Looks up an entry.
    pub(crate) fn function(&self, entry: &str) -> Result<Function> {
        self.context.enter()?;
        let name = CString::new(entry).map_err(|_| error!(Fail, "a zero in the name of a kernel"))?;
        let mut function = ptr::null_mut();
        // SAFETY: the driver writes one handle, which lives as long as the module.
        let code = unsafe { sys::cuModuleGetFunction(&mut function, self.module, name.as_ptr()) };
        self.context.check(code, &format!("cuModuleGetFunction of '{entry}'"))?;
        Ok(Function(function))
    }

    /// Allows launches of an entry `bytes` of dynamic shared memory, beside the static shared
    /// memory it declares.
    pub(crate) fn allow_shared(&self, function: Function, bytes: u32) -> Result<()> {
        self.context.enter()?;
        let most = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let bytes = i32::try_from(bytes).unwrap_or(i32::MAX);
        // SAFETY: the function came from this module, which is loaded.
        self.context.check(unsafe { sys::cuFuncSetAttribute(function.0, most, bytes) }, "cuFuncSetAttribute")
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: the module is loaded, and the driver waits for its running kernels.
            let _ = unsafe { sys::cuModuleUnload(self.module) };
        }
    }
}

/// A kernel entry of a module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Function(pub(super) sys::CUfunction);

// SAFETY: driver handles may be used from any thread, as for `Context`.
unsafe impl Send for Function {}
// SAFETY: as for `Context`.
unsafe impl Sync for Function {}
