//! Module loading and kernel launches, and the names of error codes.

use std::ffi::{CStr, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::queue::{Op, ask};
use super::{Done, Handle, Loaded, capability, copy, current, limit, put, setting, text};
use crate::contract::contract;
use crate::decode::Place;
use crate::exec::{Launch, launch};
use crate::parse::parse;
use crate::{Fault, code};

pub(super) fn load(handle: *mut Handle, image: *const c_void) -> Result<(), Fault> {
    let plain = |code| Fault::new(code, format!("error {code}"));
    let mut driver = current().map_err(plain)?;
    let Some(text) = text(image.cast()) else {
        return Err(Fault::new(code::INVALID_IMAGE, "the image is no text"));
    };
    if !text.contains(".version") {
        return Err(Fault::new(code::INVALID_IMAGE, "the image is no PTX"));
    }
    let text = contract(&text);
    let (major, minor) = capability();
    let memory = &mut driver.memory;
    let mut placed = Vec::new();
    let parsed = parse(&text, (major * 10 + minor) as u32, &mut |global| {
        // A variable without bytes needs an address, too, and `allocate` refuses a size of zero.
        let address = memory.allocate(global.data.len().max(1) as u64, true, limit())?;
        placed.push(address);
        Some(address)
    });
    let module = match parsed {
        Ok(module) => module,
        // A module that does not load must not leak the variables placed before the error.
        Err(fault) => {
            for address in placed {
                memory.free(address, true);
            }
            return Err(fault);
        }
    };
    for global in &module.globals {
        copy(global.address, global.data.as_ptr() as u64, global.data.len()).map_err(plain)?;
    }
    let key = driver.handle();
    driver.modules.insert(key, Loaded { module: Arc::new((module, text)), kernels: Vec::new() });
    put(handle, key as Handle).map_err(plain)
}

/// A queued launch.
pub(super) struct Job {
    pub(super) module: u64,
    code: Arc<(crate::parse::Module, String)>,
    entry: usize,
    grid: [u32; 3],
    block: [u32; 3],
    dynamic: usize,
    /// Copied at the call, because the caller may overwrite its parameters afterwards.
    parameters: Vec<u8>,
}

/// The size of a launch.
pub(super) struct LaunchSize {
    pub(super) grid: [u32; 3],
    pub(super) block: [u32; 3],
    /// Bytes of dynamic shared memory.
    pub(super) dynamic: usize,
}

pub(super) fn start(
    function: Handle,
    size: LaunchSize,
    stream: Handle,
    parameters: *const *const c_void,
    extra: *const *const c_void,
) -> Done {
    let LaunchSize { grid, block, dynamic } = size;
    let driver = current()?;
    driver.stream(stream)?;
    let kernel = driver.kernels.get(&(function as u64)).ok_or(code::INVALID_HANDLE)?;
    let loaded = driver.modules.get(&kernel.module).ok_or(code::INVALID_HANDLE)?;
    let code = Arc::clone(&loaded.module);
    let (module, entry, most) = (kernel.module, kernel.number, kernel.dynamic);
    let kernel = &code.0.functions[entry];
    let threads = block.iter().map(|n| u64::from(*n)).product::<u64>();
    // The limits on grids and blocks are the same for all compute capabilities.
    let fits = grid.iter().chain(&block).all(|n| *n > 0)
        && grid[0] <= i32::MAX as u32
        && grid[1..].iter().all(|n| *n <= 65535)
        && threads <= 1024
        && block[2] <= 64
        && (kernel.max_threads == 0 || threads <= u64::from(kernel.max_threads))
        && dynamic <= most
        && extra.is_null();
    if !fits || parameters.is_null() && !kernel.formals.is_empty() {
        return Err(code::INVALID_VALUE);
    }
    let mut bytes = Vec::new();
    for (at, (place, size)) in kernel.formals.iter().enumerate() {
        // The parser puts the `.param` space, and so the parameters of a kernel, into local
        // memory.
        let Place::Local(offset) = place else { return Err(code::INVALID_VALUE) };
        bytes.resize(bytes.len().max(*offset as usize + size), 0u8);
        // SAFETY: `parameters` is not null if the kernel has any, and the driver's API requires one
        // pointer for each.
        let from = unsafe { *parameters.add(at) };
        copy(bytes[*offset as usize..].as_mut_ptr() as u64, from as u64, *size)?;
    }
    let job = Job { module, code, entry, grid, block, dynamic, parameters: bytes };
    ask(driver, stream, Op::Launch(Arc::new(job)))
}

/// Runs a launch with `table` as the accessible memory, the start and end of each allocation.
/// Returns the number of instructions executed.
pub(super) fn execute(job: &Job, table: Vec<(u64, u64)>) -> Result<u64, Fault> {
    let all = Launch {
        functions: &job.code.0.functions,
        entry: job.entry,
        text: &job.code.1,
        grid: job.grid,
        block: job.block,
        dynamic: job.dynamic,
        parameters: job.parameters.clone(),
        table,
        budget: setting("ORT_CUDA_EMULATOR_STEPS", 200e9) as u64,
        apart: setting("ORT_CUDA_EMULATOR_APART", 0) != 0,
        steps: AtomicU64::new(0),
    };
    launch(&all).map(|()| all.steps.load(Ordering::Relaxed))
}

pub(super) fn error_text(error: u32) -> (Option<&'static CStr>, &'static CStr) {
    let (name, text) = match error {
        0 => (c"CUDA_SUCCESS", c"no error"),
        code::INVALID_VALUE => (c"CUDA_ERROR_INVALID_VALUE", c"invalid argument"),
        code::OUT_OF_MEMORY => (c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory"),
        code::NOT_INITIALIZED => (c"CUDA_ERROR_NOT_INITIALIZED", c"initialization error"),
        code::NO_DEVICE => (c"CUDA_ERROR_NO_DEVICE", c"no CUDA-capable device is detected"),
        code::INVALID_DEVICE => (c"CUDA_ERROR_INVALID_DEVICE", c"invalid device ordinal"),
        code::INVALID_IMAGE => (c"CUDA_ERROR_INVALID_IMAGE", c"device kernel image is invalid"),
        code::INVALID_CONTEXT => (c"CUDA_ERROR_INVALID_CONTEXT", c"invalid device context"),
        code::INVALID_PTX => (c"CUDA_ERROR_INVALID_PTX", c"a PTX JIT compilation failed"),
        code::UNSUPPORTED_PTX_VERSION => (
            c"CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
            c"the provided PTX was compiled with an unsupported toolchain.",
        ),
        code::INVALID_HANDLE => (c"CUDA_ERROR_INVALID_HANDLE", c"invalid resource handle"),
        code::ILLEGAL_STATE => {
            (c"CUDA_ERROR_ILLEGAL_STATE", c"the operation cannot be performed in the present state")
        }
        code::NOT_FOUND => (c"CUDA_ERROR_NOT_FOUND", c"named symbol not found"),
        code::ILLEGAL_ADDRESS => (c"CUDA_ERROR_ILLEGAL_ADDRESS", c"an illegal memory access was encountered"),
        code::LAUNCH_TIMEOUT => (c"CUDA_ERROR_LAUNCH_TIMEOUT", c"the launch timed out and was terminated"),
        code::MISALIGNED_ADDRESS => (c"CUDA_ERROR_MISALIGNED_ADDRESS", c"misaligned address"),
        code::LAUNCH_FAILED => (c"CUDA_ERROR_LAUNCH_FAILED", c"unspecified launch failure"),
        code::NOT_SUPPORTED => (c"CUDA_ERROR_NOT_SUPPORTED", c"operation not supported"),
        code::STREAM_CAPTURE_UNSUPPORTED => {
            (c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", c"operation not permitted when stream is capturing")
        }
        code::STREAM_CAPTURE_INVALIDATED => (
            c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
            c"operation failed due to a previous error during capture",
        ),
        code::STREAM_CAPTURE_ISOLATION => (
            c"CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
            c"dependency created on uncaptured work in another stream",
        ),
        code::STREAM_CAPTURE_WRONG_THREAD => (
            c"CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
            c"attempt to terminate a thread-local capture sequence from another thread",
        ),
        _ => return (None, c""),
    };
    (Some(name), text)
}
