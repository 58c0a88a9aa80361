//! The driver's library, as far as the provider calls it: safe functions whose errors say what was asked and what the driver answered.
//!
//! The library is found when it is first asked for, so that a build needs nothing of CUDA and a machine without a GPU gets an error
//! instead of a process that does not start. `cudarc` has the declarations; it panics where it does not find the library or a function of
//! it, so both are looked for here before.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr;
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys::{self, CUresult};
use libloading::Library;
use ort_core::{Error, Result, ensure, error};
use parking_lot::Mutex;

/// The variable with the path of the driver's library, where that of the system is not to be taken.
pub(crate) const DRIVER_VARIABLE: &str = "ORT_CUDA_DRIVER";
/// What the driver's library is called.
#[cfg(windows)]
const NAMES: [&str; 1] = ["nvcuda.dll"];
#[cfg(not(windows))]
const NAMES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];
/// The functions that are called.
const FUNCTIONS: [&str; 25] = [
    "cuInit",
    "cuDriverGetVersion",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDeviceTotalMem_v2",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxSetCurrent",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemGetInfo_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
    "cuModuleLoadDataEx",
    "cuModuleUnload",
    "cuModuleGetFunction",
    "cuLaunchKernel",
    "cuGetErrorName",
    "cuGetErrorString",
];
/// The oldest driver that takes the kernels, as `cuDriverGetVersion` tells it: PTX 8.1 came with CUDA 12.1.
const OLDEST: i32 = 12010;

/// What bounds a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The compute capability: 80 is 8.0.
    pub capability: u32,
    /// The streaming multiprocessors.
    pub processors: u32,
}

/// The driver, loaded and ready.
#[derive(Debug)]
pub(crate) struct Driver {
    version: i32,
}

impl Driver {
    /// The driver of this process, loaded at the first call; the error says what was looked for and found.
    pub(crate) fn get() -> Result<&'static Driver> {
        static DRIVER: OnceLock<Result<Driver>> = OnceLock::new();
        DRIVER.get_or_init(Driver::load).as_ref().map_err(Error::clone)
    }

    fn load() -> Result<Driver> {
        static LIBRARY: OnceLock<Library> = OnceLock::new();
        let (name, library) = find()?;
        for function in FUNCTIONS {
            // SAFETY: the symbol is only looked for, never called through this type.
            let found = unsafe { library.get::<*const c_void>(function.as_bytes()) };
            if found.is_err() {
                return Err(error!(
                    EpFail,
                    "{name} has no function {function}: the NVIDIA driver is too old"
                )
                .help(new_driver()));
            }
        }
        // A library that is loaded under one of its names is found again under that name.
        LIBRARY.get_or_init(|| library);
        // SAFETY: loading the driver's library runs its initialisers, which may run anywhere.
        let is_found = unsafe { sys::is_culib_present() };
        ensure!(is_found, EpFail, "{name} is there, but is not found by its usual names");
        // SAFETY: no context is needed; the flags must be 0.
        check(unsafe { sys::cuInit(0) }, "cuInit").map_err(|problem| problem.help(NO_DEVICE))?;
        let mut version = 0;
        // SAFETY: writes one integer.
        check(unsafe { sys::cuDriverGetVersion(&mut version) }, "cuDriverGetVersion")?;
        let (major, minor) = (version / 1000, version % 1000 / 10);
        if version < OLDEST {
            return Err(
                error!(EpFail, "the NVIDIA driver is one for CUDA {major}.{minor}").help(new_driver())
            );
        }
        Ok(Driver { version })
    }

    /// The version of CUDA that the driver is for, as people write it.
    pub(crate) fn version(&self) -> String {
        format!("{}.{}", self.version / 1000, self.version % 1000 / 10)
    }

    /// How many devices there are.
    pub(crate) fn count(&self) -> Result<usize> {
        let mut count = 0;
        // SAFETY: writes one integer.
        check(unsafe { sys::cuDeviceGetCount(&mut count) }, "cuDeviceGetCount")?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    /// The device at an index.
    pub(crate) fn device(&self, index: usize) -> Result<PhysicalDevice> {
        let ordinal =
            c_int::try_from(index).map_err(|_| error!(InvalidArgument, "there is no device {index}"))?;
        let mut device = 0;
        // SAFETY: writes one handle.
        check(unsafe { sys::cuDeviceGet(&mut device, ordinal) }, "cuDeviceGet")?;
        Ok(PhysicalDevice(device))
    }
}

/// What to do where there is no device.
pub(crate) const NO_DEVICE: &str =
    "see whether `nvidia-smi` lists a device, and whether CUDA_VISIBLE_DEVICES hides it";

fn new_driver() -> String {
    format!("install an NVIDIA driver for CUDA {}.{} or newer", OLDEST / 1000, OLDEST % 1000 / 10)
}

/// The driver's library and the name by which it was found.
fn find() -> Result<(String, Library)> {
    let own = std::env::var(DRIVER_VARIABLE).ok().filter(|path| !path.is_empty());
    let names: Vec<String> = match own {
        Some(path) => vec![path],
        None => NAMES.map(str::to_owned).to_vec(),
    };
    let mut tried = Vec::new();
    for name in names {
        // SAFETY: loading the driver's library runs its initialisers, which may run anywhere.
        match unsafe { Library::new(&name) } {
            Ok(library) => return Ok((name, library)),
            Err(problem) => tried.push(format!("{name}: {problem}")),
        }
    }
    Err(error!(EpFail, "there is no NVIDIA driver: {}", tried.join("; ")).help(format!(
        "{}, or name its library in the variable {DRIVER_VARIABLE}; the other providers need none",
        new_driver()
    )))
}

/// An error for anything but success.
fn check(code: CUresult, what: &str) -> Result<()> {
    match code {
        CUresult::CUDA_SUCCESS => Ok(()),
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => Err(error!(OutOfMemory, "{what}: {}", describe(code))),
        _ => Err(error!(EpFail, "{what}: {}", describe(code))),
    }
}

/// The driver's own words for a code.
fn describe(code: CUresult) -> String {
    let text = |of: unsafe fn(CUresult, *mut *const c_char) -> CUresult| {
        let mut text = ptr::null();
        // SAFETY: the driver answers with a string that lives as long as it does, or with none.
        let answered = unsafe { of(code, &mut text) } == CUresult::CUDA_SUCCESS && !text.is_null();
        // SAFETY: it ends with a zero, and is not null.
        answered.then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
    };
    match (text(sys::cuGetErrorName), text(sys::cuGetErrorString)) {
        (Some(name), Some(words)) => format!("{name} ({words})"),
        _ => format!("error {}", code as i32),
    }
}

/// A device as the driver counts them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PhysicalDevice(sys::CUdevice);

impl PhysicalDevice {
    /// Its own name.
    pub(crate) fn name(self) -> Result<String> {
        let mut name = [0 as c_char; 256];
        // SAFETY: the driver writes at most so many characters; the last one of the buffer stays zero.
        let code = unsafe { sys::cuDeviceGetName(name.as_mut_ptr(), name.len() as c_int - 1, self.0) };
        check(code, "cuDeviceGetName")?;
        // SAFETY: the buffer ends with a zero at the latest.
        Ok(unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned())
    }

    /// Bytes of memory.
    pub(crate) fn memory(self) -> Result<usize> {
        let mut bytes = 0;
        // SAFETY: writes one number.
        check(unsafe { sys::cuDeviceTotalMem_v2(&mut bytes, self.0) }, "cuDeviceTotalMem")?;
        Ok(bytes)
    }

    /// What bounds it.
    pub(crate) fn limits(self) -> Result<Limits> {
        use sys::CUdevice_attribute_enum as Attribute;
        let attribute = |which| {
            let mut value = 0;
            // SAFETY: writes one integer.
            check(unsafe { sys::cuDeviceGetAttribute(&mut value, which, self.0) }, "cuDeviceGetAttribute")?;
            Ok::<u32, Error>(u32::try_from(value).unwrap_or(0))
        };
        let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let processors = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        Ok(Limits { capability: 10 * major + minor, processors })
    }
}

/// A device's primary context with a stream: everything that is asked of it is done in the order of the calls.
#[derive(Debug)]
pub(crate) struct Context {
    device: PhysicalDevice,
    context: sys::CUcontext,
    stream: sys::CUstream,
    /// What broke the context, once something did.
    lost: Mutex<Option<Error>>,
}

// SAFETY: the driver's handles may be used from any thread; every call sets the context of its thread first.
unsafe impl Send for Context {}
// SAFETY: as above; the driver serialises calls of several threads.
unsafe impl Sync for Context {}

impl Context {
    /// The primary context of a device, which all users of the device in this process share.
    pub(crate) fn open(device: PhysicalDevice) -> Result<Arc<Context>> {
        let mut context = ptr::null_mut();
        // SAFETY: writes one handle, which is released when the context is dropped.
        check(unsafe { sys::cuDevicePrimaryCtxRetain(&mut context, device.0) }, "cuDevicePrimaryCtxRetain")?;
        let mut opened = Context { device, context, stream: ptr::null_mut(), lost: Mutex::default() };
        opened.enter()?;
        let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: writes one handle, which is destroyed when the context is dropped.
        check(unsafe { sys::cuStreamCreate(&mut opened.stream, flags) }, "cuStreamCreate")?;
        Ok(Arc::new(opened))
    }

    /// The error that broke the context: nothing can run in it any more.
    pub(crate) fn check_present(&self) -> Result<()> {
        self.lost.lock().clone().map_or(Ok(()), Err)
    }

    /// Makes this the context of the calling thread.
    fn enter(&self) -> Result<()> {
        self.check_present()?;
        // SAFETY: the context was retained and not released yet.
        self.check(unsafe { sys::cuCtxSetCurrent(self.context) }, "cuCtxSetCurrent")
    }

    /// An error for anything but success. What no later call gets over is remembered.
    fn check(&self, code: CUresult, what: &str) -> Result<()> {
        let result = check(code, what);
        if let Err(problem) = &result
            && is_sticky(code)
        {
            let problem = problem.clone().help(
                "the device's context is broken for this process: start a new one; compute-sanitizer finds the access",
            );
            self.lost.lock().get_or_insert(problem);
        }
        result
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
            // SAFETY: the address came from `allocate`, whose caller frees it once; the driver waits for what uses it.
            let code = unsafe { sys::cuMemFree_v2(address) };
            if let Err(problem) = self.check(code, "cuMemFree") {
                tracing::debug!("{problem}");
            }
        }
    }

    /// Copies bytes to the device. They may be changed when it returns.
    pub(crate) fn upload(&self, from: &[u8], to: u64) -> Result<()> {
        self.enter()?;
        // SAFETY: the source is readable for so many bytes, and pageable: the driver has read it when the call returns. The target
        // lies in live memory of this context, which the driver checks.
        let code = unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.as_ptr().cast(), from.len(), self.stream) };
        self.check(code, "cuMemcpyHtoD")?;
        // A buffer that the system has pinned for itself is read later.
        self.synchronize()
    }

    /// Copies bytes from the device, after all that was asked for before.
    pub(crate) fn download(&self, from: u64, to: &mut [u8]) -> Result<()> {
        self.enter()?;
        // SAFETY: the target is writable for so many bytes and stays borrowed until the stream is done, below.
        let code = unsafe { sys::cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from, to.len(), self.stream) };
        self.check(code, "cuMemcpyDtoH")?;
        self.synchronize()
    }

    /// Copies bytes within the device.
    pub(crate) fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<()> {
        self.enter()?;
        // SAFETY: both lie in live memory of this context, which the driver checks.
        let code = unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes, self.stream) };
        self.check(code, "cuMemcpyDtoD")
    }

    /// Waits for all that was asked for.
    pub(crate) fn synchronize(&self) -> Result<()> {
        self.enter()?;
        // SAFETY: the stream is live.
        self.check(unsafe { sys::cuStreamSynchronize(self.stream) }, "cuStreamSynchronize")
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
        // SAFETY: the text ends with a zero; there are two options with a value each, as the driver wants them: the address of a buffer and
        // its size in the place of an address.
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

    /// Launches a function with parameters that lie at these addresses.
    pub(crate) fn launch(
        &self,
        function: Function,
        [grid, block]: [[u32; 3]; 2],
        params: &[Vec<u64>],
    ) -> Result<()> {
        self.enter()?;
        let mut addresses: Vec<*mut c_void> =
            params.iter().map(|param| param.as_ptr().cast_mut().cast()).collect();
        let ([gx, gy, gz], [bx, by, bz]) = (grid, block);
        // SAFETY: the function is of a module that its caller keeps loaded, and takes these parameters, which the driver copies before it
        // returns. That the kernel stays within its tensors follows from its code.
        let code = unsafe {
            sys::cuLaunchKernel(
                function.0,
                gx,
                gy,
                gz,
                bx,
                by,
                bz,
                0,
                self.stream,
                addresses.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        self.check(code, "cuLaunchKernel")
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // At the end of a process the driver may be gone already, and answers so: nothing is left to do then.
        if self.enter().is_ok() && !self.stream.is_null() {
            // SAFETY: the stream is live, and nobody uses it any more.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.stream) };
        }
        // SAFETY: it was retained once.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device.0) };
    }
}

/// Whether a context that reported this can do nothing any more (CUDA Driver API, "CUresult": errors that leave the process in an
/// inconsistent state).
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
#[derive(Clone, Copy, Debug)]
pub(crate) struct Function(sys::CUfunction);

// SAFETY: as for the context.
unsafe impl Send for Function {}
// SAFETY: as for the context.
unsafe impl Sync for Function {}
