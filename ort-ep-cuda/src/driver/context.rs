//! A device's context: its memory, its code, and what broke it.

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
    /// What broke the context, once something did.
    lost: Mutex<Option<Error>>,
    pub(crate) counts: Counts,
}

/// What was asked of a device since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Kernels that were launched one by one.
    pub launches: u64,
    /// Calls of NVIDIA's libraries, one by one.
    pub routines: u64,
    /// CUDA graphs that were captured.
    pub captures: u64,
    /// CUDA graphs that were launched.
    pub replays: u64,
    /// Calls that waited until the device had done something.
    pub waits: u64,
    /// Bytes of pinned memory of the host that are held now.
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
    /// One more.
    pub(crate) fn add(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

// SAFETY: the driver's handles may be used from any thread; every call sets the context of its
// thread first.
unsafe impl Send for Context {}
// SAFETY: as above; the driver serialises calls of several threads.
unsafe impl Sync for Context {}

impl Context {
    /// The primary context of a device.
    pub(crate) fn open(device: PhysicalDevice) -> Result<Arc<Context>> {
        let mut context = ptr::null_mut();
        // SAFETY: writes one handle, which is released when the context is dropped.
        check(unsafe { sys::cuDevicePrimaryCtxRetain(&mut context, device.0) }, "cuDevicePrimaryCtxRetain")?;
        Ok(Arc::new(Context { device, context, lost: Mutex::default(), counts: Counts::default() }))
    }

    /// The counters as they are now.
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

    /// The error that broke the context: nothing can run in it any more.
    pub(crate) fn check_present(&self) -> Result<()> {
        self.lost.lock().clone().map_or(Ok(()), Err)
    }

    /// Whether this is the context of a handle.
    pub(super) fn is(&self, context: sys::CUcontext) -> bool {
        self.context == context
    }

    /// The device's number.
    pub(super) fn device(&self) -> sys::CUdevice {
        self.device.0
    }

    /// Makes this the context of the calling thread.
    pub(crate) fn enter(&self) -> Result<()> {
        self.check_present()?;
        // SAFETY: the context was retained and not released yet.
        self.check(unsafe { sys::cuCtxSetCurrent(self.context) }, "cuCtxSetCurrent")
    }

    /// An error for anything but success. What no later call gets over is remembered.
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

    /// Free and total bytes of the device's memory.
    pub(crate) fn memory(&self) -> Result<(usize, usize)> {
        self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two numbers.
        self.check(unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) }, "cuMemGetInfo")?;
        Ok((free, total))
    }

    /// The address of new memory.
    pub(crate) fn allocate(&self, bytes: usize) -> Result<u64> {
        self.enter()?;
        let mut address = 0;
        // SAFETY: writes one address, which is freed by `free`.
        self.check(unsafe { sys::cuMemAlloc_v2(&mut address, bytes) }, "cuMemAlloc")?;
        Ok(address)
    }

    /// Gives memory back, once what uses it is done. A context that broke has given it back itself.
    pub(crate) fn free(&self, address: u64) {
        if self.enter().is_ok() {
            // SAFETY: the address came from `allocate`, whose caller frees it once; the driver
            // waits for what uses it.
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
        // SAFETY: the text ends with a zero; there are two options with a value each, as the driver
        // wants them: the address of a buffer and its size in the place of an address.
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
        // At the end of a process the driver may be gone already, and answers so: nothing is left
        // to do then. SAFETY: it was retained once.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device.0) };
    }
}

/// Whether a context that reported this can do nothing any more (CUDA Driver API, "CUresult":
/// errors that leave the process in an inconsistent state).
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

/// Compiled code.
#[derive(Debug)]
pub(crate) struct Module {
    context: Arc<Context>,
    module: sys::CUmodule,
}

// SAFETY: as for the context.
unsafe impl Send for Module {}
// SAFETY: as for the context.
unsafe impl Sync for Module {}

impl Module {
    /// An entry.
    pub(crate) fn function(&self, entry: &str) -> Result<Function> {
        self.context.enter()?;
        let name = CString::new(entry).map_err(|_| error!(Fail, "a zero in the name of a kernel"))?;
        let mut function = ptr::null_mut();
        // SAFETY: writes one handle, which lives as long as the module.
        let code = unsafe { sys::cuModuleGetFunction(&mut function, self.module, name.as_ptr()) };
        self.context.check(code, &format!("cuModuleGetFunction of '{entry}'"))?;
        Ok(Function(function))
    }

    /// Allows launches of an entry `bytes` of dynamic shared memory, beside the static ones that it
    /// declares.
    pub(crate) fn allow_shared(&self, function: Function, bytes: u32) -> Result<()> {
        self.context.enter()?;
        let most = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let bytes = i32::try_from(bytes).unwrap_or(i32::MAX);
        // SAFETY: the function is one of this module.
        self.context.check(unsafe { sys::cuFuncSetAttribute(function.0, most, bytes) }, "cuFuncSetAttribute")
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: the module is live, and what was launched of it is waited for by the driver.
            let _ = unsafe { sys::cuModuleUnload(self.module) };
        }
    }
}

/// An entry of a module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Function(pub(super) sys::CUfunction);

// SAFETY: as for the context.
unsafe impl Send for Function {}
// SAFETY: as for the context.
unsafe impl Sync for Function {}
