//! Safe bindings to the CUDA driver library. Errors name the function that was called and the
//! driver's answer.
//!
//! The library is loaded on first use. A build therefore needs no CUDA toolkit, and a machine
//! without a GPU gets an error rather than a process that fails to start. `cudarc` supplies the
//! declarations. It panics if the library or one of its functions is missing, so we check for both
//! first.

mod context;
mod graph;
mod map;
mod pool;
mod staged;
mod stream;

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::Path;
use std::ptr;
use std::sync::OnceLock;

use cudarc::driver::sys::{self, CUdevice_attribute_enum as Attribute, CUresult};
use libloading::Library;
use ort_core::{Error, Result, ensure, error};

pub use context::Counters;
pub(crate) use context::{Context, Counts, Function, Module};
pub(crate) use graph::Graph;
pub(crate) use map::Boxes;
pub(crate) use pool::Pool;
pub(crate) use staged::Staged;
pub(crate) use stream::{Call, Event, Launched, RawStream, Routed, Routine, Stream};

/// The environment variable with the path of a driver library to use instead of the system's.
pub(crate) const DRIVER_VARIABLE: &str = "ORT_CUDA_DRIVER";
/// The file names of the driver library.
#[cfg(windows)]
const NAMES: [&str; 1] = ["nvcuda.dll"];
#[cfg(not(windows))]
const NAMES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];
/// The driver functions we call.
const FUNCTIONS: [&str; 49] = [
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
    "cuMemPoolCreate",
    "cuMemPoolDestroy",
    "cuMemPoolSetAttribute",
    "cuMemPoolGetAttribute",
    "cuMemPoolTrimTo",
    "cuMemAllocFromPoolAsync",
    "cuMemFreeAsync",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuStreamGetCtx",
    "cuStreamBeginCapture_v2",
    "cuStreamEndCapture",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuEventElapsedTime",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
    "cuModuleLoadDataEx",
    "cuModuleUnload",
    "cuModuleGetFunction",
    "cuFuncSetAttribute",
    "cuTensorMapEncodeTiled",
    "cuLaunchKernel",
    "cuGetErrorName",
    "cuGetErrorString",
];
/// The oldest driver that accepts the kernels, as `cuDriverGetVersion` reports it: they are PTX
/// 8.1, which came with CUDA 12.1.
const OLDEST: i32 = 12010;

/// The first compute capability whose tensor cores support all types that our mma kernels use.
pub(crate) const TENSOR_CORES: u32 = 80;
/// The only compute capability with warpgroup mma: PTX for `sm_90a` does not run on newer devices.
pub(crate) const WARPGROUPS: u32 = 90;

/// The limits of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The compute capability: 80 means 8.0.
    pub capability: u32,
    /// The number of streaming multiprocessors.
    pub processors: u32,
    /// Whether float32 GEMMs and convolutions may run in TF32 on tensor cores.
    pub tf32: bool,
}

impl Limits {
    /// Whether the device has warpgroup mma (`wgmma`), which exactly one compute capability
    /// supports.
    pub fn has_warpgroups(&self) -> bool {
        self.capability == WARPGROUPS
    }
}

/// The loaded and initialised driver.
#[derive(Debug)]
pub(crate) struct Driver {
    version: i32,
}

impl Driver {
    /// Returns the process's driver, loading it on the first call. The error says what was looked
    /// for and what was found.
    pub(crate) fn get() -> Result<&'static Driver> {
        static DRIVER: OnceLock<Result<Driver>> = OnceLock::new();
        DRIVER.get_or_init(Driver::load).as_ref().map_err(Error::clone)
    }

    fn load() -> Result<Driver> {
        static LIBRARY: OnceLock<Library> = OnceLock::new();
        let (name, library) = find()?;
        // `cudarc` would panic at the first call of a missing function, so we reject an old driver
        // here.
        for function in FUNCTIONS {
            // SAFETY: we only look the symbol up and never call it through this type.
            let found = unsafe { library.get::<*const c_void>(function.as_bytes()) };
            if found.is_err() {
                return Err(error!(
                    EpFail,
                    "{name} has no function {function}: the NVIDIA driver is too old"
                )
                .help(new_driver()));
            }
        }
        // Keep the library loaded: `cudarc` opens it by its usual name, and the loader then returns
        // the copy that is already loaded under that name.
        LIBRARY.get_or_init(|| library);
        // SAFETY: opening the driver library runs its initialisers, which any thread may run.
        let is_found = unsafe { sys::is_culib_present() };
        ensure!(is_found, EpFail, "{name} is there, but is not found by its usual names");
        // SAFETY: `cuInit` needs no context, and its flags must be 0.
        check(unsafe { sys::cuInit(0) }, "cuInit").map_err(|problem| problem.help(NO_DEVICE))?;
        let mut version = 0;
        // SAFETY: the driver writes one integer to `version`.
        check(unsafe { sys::cuDriverGetVersion(&mut version) }, "cuDriverGetVersion")?;
        let (major, minor) = (version / 1000, version % 1000 / 10);
        if version < OLDEST {
            return Err(
                error!(EpFail, "the NVIDIA driver is one for CUDA {major}.{minor}").help(new_driver())
            );
        }
        Ok(Driver { version })
    }

    /// Returns the CUDA version the driver supports, as `major.minor`.
    pub(crate) fn version(&self) -> String {
        format!("{}.{}", self.version / 1000, self.version % 1000 / 10)
    }

    /// Returns the number of devices.
    pub(crate) fn count(&self) -> Result<usize> {
        let mut count = 0;
        // SAFETY: the driver writes one integer to `count`.
        check(unsafe { sys::cuDeviceGetCount(&mut count) }, "cuDeviceGetCount")?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    /// Returns the device at an index.
    pub(crate) fn device(&self, index: usize) -> Result<PhysicalDevice> {
        let ordinal =
            c_int::try_from(index).map_err(|_| error!(InvalidArgument, "there is no device {index}"))?;
        let mut device = 0;
        // SAFETY: the driver writes one handle to `device`.
        check(unsafe { sys::cuDeviceGet(&mut device, ordinal) }, "cuDeviceGet")?;
        Ok(PhysicalDevice(device))
    }
}

/// Advice for a machine on which no device is found.
pub(crate) const NO_DEVICE: &str =
    "see whether `nvidia-smi` lists a device, and whether CUDA_VISIBLE_DEVICES hides it";

fn new_driver() -> String {
    format!("install an NVIDIA driver for CUDA {}.{} or newer", OLDEST / 1000, OLDEST % 1000 / 10)
}

/// Loads the driver library, and returns the name under which it was found.
fn find() -> Result<(String, Library)> {
    let own = std::env::var(DRIVER_VARIABLE).ok().filter(|path| !path.is_empty());
    let names: Vec<String> = match own {
        Some(path) => vec![path],
        None => NAMES.map(str::to_owned).to_vec(),
    };
    let mut tried = Vec::new();
    for name in names {
        // SAFETY: loading the driver library runs its initialisers, which any thread may run.
        match unsafe { Library::new(&name) } {
            Ok(library) => return Ok((name, library)),
            Err(problem) => tried.push(named(&name, &problem.to_string())),
        }
    }
    Err(error!(EpFail, "there is no NVIDIA driver: {}", tried.join("; ")).help(format!(
        "{}, or name its library in the variable {DRIVER_VARIABLE}; the other providers need no driver",
        new_driver()
    )))
}

/// Whether [`DRIVER_VARIABLE`] is unset or names the system's driver: NVIDIA's other libraries work
/// with no other one.
pub(crate) fn takes_the_systems_driver() -> bool {
    let own = std::env::var(DRIVER_VARIABLE).unwrap_or_default();
    let file = Path::new(&own).file_name().unwrap_or_default().to_string_lossy();
    file.is_empty() || NAMES.iter().any(|name| file.starts_with(name))
}

/// Returns the loader's message, with the library's name prepended unless it is already in it.
fn named(name: &str, said: &str) -> String {
    if said.contains(name) { said.to_owned() } else { format!("{name}: {said}") }
}

/// Turns anything but success into an error.
fn check(code: CUresult, what: &str) -> Result<()> {
    match code {
        CUresult::CUDA_SUCCESS => Ok(()),
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => Err(error!(OutOfMemory, "{what}: {}", describe(code))),
        _ => Err(error!(EpFail, "{what}: {}", describe(code))),
    }
}

/// Returns the driver's own name and text for a result code.
fn describe(code: CUresult) -> String {
    let text = |of: unsafe fn(CUresult, *mut *const c_char) -> CUresult| {
        let mut text = ptr::null();
        // SAFETY: the driver writes either a string that lives as long as the library, or null.
        let answered = unsafe { of(code, &mut text) } == CUresult::CUDA_SUCCESS && !text.is_null();
        // SAFETY: `answered` checked that the pointer is not null; the driver's strings are
        // NUL-terminated.
        answered.then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
    };
    match (text(sys::cuGetErrorName), text(sys::cuGetErrorString)) {
        (Some(name), Some(words)) => format!("{name} ({words})"),
        _ => format!("error {}", code as i32),
    }
}

/// A physical device, by the driver's handle.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PhysicalDevice(sys::CUdevice);

impl PhysicalDevice {
    /// Returns the device's name.
    pub(crate) fn name(self) -> Result<String> {
        let mut name = [0 as c_char; 256];
        // SAFETY: the driver writes at most `len - 1` characters, so the last byte of the buffer
        // stays zero.
        let code = unsafe { sys::cuDeviceGetName(name.as_mut_ptr(), name.len() as c_int - 1, self.0) };
        check(code, "cuDeviceGetName")?;
        // SAFETY: the last byte of the buffer is zero (see above), so the string ends inside it.
        Ok(unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned())
    }

    /// Returns the size of the device's memory in bytes.
    pub(crate) fn memory(self) -> Result<usize> {
        let mut bytes = 0;
        // SAFETY: the driver writes one number to `bytes`.
        check(unsafe { sys::cuDeviceTotalMem_v2(&mut bytes, self.0) }, "cuDeviceTotalMem")?;
        Ok(bytes)
    }

    /// Returns the device's limits, with TF32 off.
    pub(crate) fn limits(self) -> Result<Limits> {
        let major = self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let processors = self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        Ok(Limits { capability: 10 * major + minor, processors, tf32: false })
    }

    /// Whether the device supports stream-ordered memory pools.
    pub(crate) fn has_pools(self) -> Result<bool> {
        Ok(self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED)? != 0)
    }

    fn attribute(self, which: Attribute) -> Result<u32> {
        let mut value = 0;
        // SAFETY: the driver writes one integer to `value`.
        check(unsafe { sys::cuDeviceGetAttribute(&mut value, which, self.0) }, "cuDeviceGetAttribute")?;
        Ok(u32::try_from(value).unwrap_or(0))
    }
}
