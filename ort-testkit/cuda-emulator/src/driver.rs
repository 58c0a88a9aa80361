//! The CUDA driver API, restricted to the functions that a provider calls.

#![allow(non_snake_case, reason = "the names are the driver's")]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_void};
use std::sync::Arc;

use parking_lot::Mutex;

use crate::bulk::TensorMap;
use crate::code;
use crate::memory::Memory;
use crate::parse::Module;

/// Defines the C functions of a library above the driver. A body returns a `Status`, whose error is
/// the function's result.
macro_rules! library_api {
    ($(fn $name:ident($($argument:ident: $ty:ty),* $(,)?) $body:block)*) => {
        $(
            #[doc = concat!("The library's `", stringify!($name), "`.")]
            ///
            /// # Safety
            ///
            /// As for the library's function: pointers are valid or null where that is allowed.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($argument: $ty),*) -> c_int {
                let call = || -> Status { $body };
                call().err().unwrap_or(0)
            }
        )*
    };
}

mod dnn;
mod launch;
mod lt;
mod queue;
mod routine;
use launch::{LaunchSize, error_text, load, start};
use queue::{Event, From, Op, Stream, ask, finish_streams};

/// A context, stream, event, module or function, as an opaque pointer.
pub type Handle = *mut c_void;

type Done = Result<(), u32>;

struct Loaded {
    module: Arc<(Module, String)>,
    /// The handles of the kernels.
    kernels: Vec<u64>,
}

struct Kernel {
    module: u64,
    number: usize,
    /// The limit on the dynamic shared memory of a launch, in bytes.
    dynamic: usize,
}

struct Driver {
    ready: bool,
    sticky: u32,
    memory: Memory,
    next: u64,
    streams: BTreeMap<u64, Stream>,
    events: BTreeMap<u64, Event>,
    graphs: BTreeMap<u64, Arc<Vec<Op>>>,
    executables: BTreeMap<u64, Arc<Vec<Op>>>,
    pools: BTreeMap<u64, pools::Pool>,
    modules: BTreeMap<u64, Loaded>,
    kernels: BTreeMap<u64, Kernel>,
}

static DRIVER: Mutex<Driver> = Mutex::new(Driver {
    ready: false,
    sticky: 0,
    memory: Memory::new(),
    next: 0x1_0000,
    streams: BTreeMap::new(),
    events: BTreeMap::new(),
    graphs: BTreeMap::new(),
    executables: BTreeMap::new(),
    pools: BTreeMap::new(),
    modules: BTreeMap::new(),
    kernels: BTreeMap::new(),
});
const CONTEXT: u64 = 0xC000;
const SHARED_DEFAULT: usize = 48 << 10;

thread_local! {
    static CONTEXTS: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

fn setting<T: std::str::FromStr>(name: &str, otherwise: T) -> T {
    std::env::var(name).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(otherwise)
}

fn devices() -> i32 {
    setting("ORT_CUDA_EMULATOR_DEVICES", 1)
}

fn limit() -> u64 {
    setting("ORT_CUDA_EMULATOR_MEMORY", 8 << 30)
}

/// Whether the device has memory pools.
fn has_pools() -> i32 {
    setting("ORT_CUDA_EMULATOR_POOLS", 1)
}

fn capability() -> (i32, i32) {
    let text = setting("ORT_CUDA_EMULATOR_CAPABILITY", "8.0".to_owned());
    let (major, minor) = text.split_once('.').unwrap_or((&text, "0"));
    (major.parse().unwrap_or(8), minor.parse().unwrap_or(0))
}

/// The maximum shared memory of a block in bytes (NVIDIA, "CUDA C++ Programming Guide", "Compute
/// Capabilities").
fn most_shared() -> usize {
    let kib = match capability() {
        (..=7, _) => 64,
        (8, 0 | 7) => 163,
        (8, _) | (12.., _) => 99,
        _ => 227,
    };
    kib << 10
}

/// The locked driver.
type Guard = parking_lot::MutexGuard<'static, Driver>;

/// Locks the driver after `cuInit`, unless a kernel failed: then every call returns that error.
fn ready() -> Result<Guard, u32> {
    let driver = DRIVER.lock();
    match (driver.ready, driver.sticky) {
        (false, _) => Err(code::NOT_INITIALIZED),
        (true, 0) => Ok(driver),
        (true, sticky) => Err(sticky),
    }
}

/// Locks the driver if a context is current.
fn current() -> Result<Guard, u32> {
    let driver = ready()?;
    let some = CONTEXTS.with_borrow(|stack| stack.last().is_some_and(|context| *context != 0));
    if some { Ok(driver) } else { Err(code::INVALID_CONTEXT) }
}

impl Driver {
    fn handle(&mut self) -> u64 {
        self.next += 16;
        self.next
    }

    fn stream(&self, stream: Handle) -> Done {
        // 0 to 2 are the handles of the default streams.
        let known = (stream as u64) < 3 || self.streams.contains_key(&(stream as u64));
        if known { Ok(()) } else { Err(code::INVALID_HANDLE) }
    }

    fn within(&self, address: u64, size: usize) -> Done {
        if size == 0 || self.memory.holds(address, size as u64) { Ok(()) } else { Err(code::INVALID_VALUE) }
    }
}

fn put<T>(to: *mut T, value: T) -> Done {
    if to.is_null() {
        return Err(code::INVALID_VALUE);
    }
    // SAFETY: `to` is not null, and the driver's API requires a valid pointer for a result.
    unsafe { to.write(value) };
    Ok(())
}

/// Copies the first `count` values of a list of the caller's.
fn list<T: Copy>(from: *const T, count: usize) -> Result<Vec<T>, u32> {
    if from.is_null() && count > 0 {
        return Err(code::INVALID_VALUE);
    }
    // SAFETY: `from` is not null, and the driver's API requires `count` values there.
    Ok((0..count).map(|at| unsafe { *from.add(at) }).collect())
}

fn device(number: i32) -> Done {
    if (0..devices()).contains(&number) { Ok(()) } else { Err(code::INVALID_DEVICE) }
}

fn copy(to: u64, from: u64, size: usize) -> Done {
    if size > 0 && (to == 0 || from == 0) {
        return Err(code::INVALID_VALUE);
    }
    if size > 0 {
        // SAFETY: the callers looked up device sides with `within` or `held`; the driver's API
        // requires a valid range on the host.
        unsafe { std::ptr::copy(from as *const u8, to as *mut u8, size) };
    }
    Ok(())
}

macro_rules! api {
    ($(fn $name:ident($($argument:ident: $ty:ty),* $(,)?) $body:block)*) => {
        $(
            #[doc = concat!("The driver's `", stringify!($name), "`.")]
            ///
            /// # Safety
            ///
            /// As for the driver's function: pointers are valid or null where that is allowed.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($argument: $ty),*) -> u32 {
                let call = || -> Done { $body };
                match call() {
                    Ok(()) => 0,
                    Err(code) => code,
                }
            }
        )*
    };
}

mod pools;
pub use pools::*;

mod streams;
pub use dnn::*;
pub use lt::*;
pub use streams::*;

api! {
    fn cuInit(flags: u32) {
        if flags != 0 {
            return Err(code::INVALID_VALUE);
        }
        if devices() <= 0 {
            return Err(code::NO_DEVICE);
        }
        DRIVER.lock().ready = true;
        Ok(())
    }
    // CUDA 12.8: 1000 times the major version, and 10 times the minor one.
    fn cuDriverGetVersion(version: *mut i32) { put(version, 12080) }
    fn cuDeviceGetCount(count: *mut i32) { drop(ready()?); put(count, devices()) }
    fn cuDeviceGet(to: *mut i32, ordinal: i32) { drop(ready()?); device(ordinal)?; put(to, ordinal) }
    fn cuDeviceGetName(name: *mut c_char, length: i32, number: i32) {
        drop(ready()?);
        device(number)?;
        if name.is_null() || length <= 0 {
            return Err(code::INVALID_VALUE);
        }
        let bytes = b"PTX emulator";
        let count = bytes.len().min(length as usize - 1);
        copy(name as u64, bytes.as_ptr() as u64, count)?;
        put(name.wrapping_add(count), 0)
    }
    fn cuDeviceTotalMem_v2(bytes: *mut usize, number: i32) {
        drop(ready()?);
        device(number)?;
        put(bytes, limit() as usize)
    }
    fn cuDeviceGetAttribute(value: *mut i32, attribute: i32, number: i32) {
        drop(ready()?);
        device(number)?;
        let (major, minor) = capability();
        // The numbers of `CUdevice_attribute`.
        put(value, match attribute {
            1..=3 => 1024,
            4 => 64,
            5 => i32::MAX,
            6 | 7 => 65535,
            8 => SHARED_DEFAULT as i32,
            10 => 32,
            12 => 65536,
            13 => 1_000_000,
            16 => 4,
            39 => 2048,
            41 => 1,
            75 => major,
            76 => minor,
            81 => most_shared() as i32 + 1024,
            97 => most_shared() as i32,
            115 => has_pools(),
            _ => 0,
        })
    }
    fn cuDeviceGetUuid(uuid: *mut [u8; 16], number: i32) {
        drop(ready()?);
        device(number)?;
        put(uuid, *b"PTX emulator\0\0\0\0")
    }
    fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], number: i32) {
        drop(ready()?);
        device(number)?;
        put(uuid, *b"PTX emulator\0\0\0\0")
    }
    fn cuDevicePrimaryCtxRetain(context: *mut Handle, number: i32) {
        drop(ready()?);
        device(number)?;
        put(context, (CONTEXT + number as u64 * 16) as Handle)
    }
    fn cuDevicePrimaryCtxRelease_v2(number: i32) { drop(ready()?); device(number) }
    fn cuDevicePrimaryCtxSetFlags_v2(number: i32, _flags: u32) { drop(ready()?); device(number) }
    fn cuCtxSetCurrent(context: Handle) {
        drop(ready()?);
        CONTEXTS.with_borrow_mut(|stack| {
            stack.pop();
            stack.push(context as u64);
        });
        Ok(())
    }
    fn cuCtxGetCurrent(context: *mut Handle) {
        drop(ready()?);
        put(context, CONTEXTS.with_borrow(|stack| stack.last().copied().unwrap_or(0)) as Handle)
    }
    fn cuCtxPushCurrent_v2(context: Handle) {
        drop(ready()?);
        CONTEXTS.with_borrow_mut(|stack| stack.push(context as u64));
        Ok(())
    }
    fn cuCtxPopCurrent_v2(context: *mut Handle) {
        drop(ready()?);
        let Some(top) = CONTEXTS.with_borrow_mut(Vec::pop) else { return Err(code::INVALID_CONTEXT) };
        if context.is_null() { Ok(()) } else { put(context, top as Handle) }
    }
    fn cuCtxGetDevice(number: *mut i32) {
        drop(current()?);
        let context = CONTEXTS.with_borrow(|stack| stack.last().copied().unwrap_or(CONTEXT));
        put(number, (context.saturating_sub(CONTEXT) / 16) as i32)
    }
    fn cuCtxSynchronize() {
        current()?.uncaptured()?;
        pools::waited(finish_streams(|_| true))
    }
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        let driver = current()?;
        put(free, limit().saturating_sub(driver.memory.used()) as usize)?;
        put(total, limit() as usize)
    }
    fn cuMemAlloc_v2(address: *mut u64, size: usize) {
        let mut driver = current()?;
        driver.uncaptured()?;
        if size == 0 {
            return Err(code::INVALID_VALUE);
        }
        put(address, driver.memory.allocate(size as u64, true, limit()).ok_or(code::OUT_OF_MEMORY)?)
    }
    fn cuMemFree_v2(address: u64) {
        // The guard is dropped at the end of this statement: `finish_streams` locks the driver
        // itself.
        current()?.uncaptured()?;
        // Like the driver's, it waits for all work that may use the memory.
        finish_streams(|_| true)?;
        let mut driver = current()?;
        if address == 0 || driver.memory.free(address, true) { Ok(()) } else { Err(code::INVALID_VALUE) }
    }
    fn cuMemAllocHost_v2(pointer: *mut Handle, size: usize) { pinned(pointer, size) }
    fn cuMemHostAlloc(pointer: *mut Handle, size: usize, _flags: u32) { pinned(pointer, size) }
    fn cuMemFreeHost(pointer: Handle) {
        let mut driver = current()?;
        driver.uncaptured()?;
        let piece = driver.memory.piece(pointer as u64).ok_or(code::INVALID_VALUE)?;
        if driver.is_used(pointer as u64, piece) {
            eprintln!("CUDA emulator: pinned memory is freed while a copy uses it");
            return Err(code::INVALID_VALUE);
        }
        if driver.memory.free(pointer as u64, false) { Ok(()) } else { Err(code::INVALID_VALUE) }
    }
    fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, size: usize) {
        let driver = current()?;
        driver.within(to, size)?;
        let mut bytes = vec![0u8; size];
        // Copied now, because the caller may overwrite pageable memory as soon as the call returns.
        copy(bytes.as_mut_ptr() as u64, from as u64, size)?;
        let from = From::Bytes(bytes.into());
        ask(driver, std::ptr::null_mut(), Op::Copy { to, from, size, pageable: false })
    }
    fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, size: usize) {
        let driver = current()?;
        driver.within(from, size)?;
        let (to, from) = (to as u64, From::Address(from));
        ask(driver, std::ptr::null_mut(), Op::Copy { to, from, size, pageable: true })
    }
    fn cuMemcpyDtoD_v2(to: u64, from: u64, size: usize) {
        let driver = current()?;
        driver.within(from, size)?;
        driver.within(to, size)?;
        let from = From::Address(from);
        ask(driver, std::ptr::null_mut(), Op::Copy { to, from, size, pageable: false })
    }
    fn cuMemsetD8_v2(to: u64, value: u8, size: usize) {
        let driver = current()?;
        driver.within(to, size)?;
        ask(driver, std::ptr::null_mut(), Op::Fill { to, value, size })
    }
    fn cuTensorMapEncodeTiled(
        to: *mut [u64; 16],
        element: u32,
        rank: u32,
        address: *mut c_void,
        sizes: *const u64,
        steps: *const u64,
        boxes: *const u32,
        element_steps: *const u32,
        interleave: u32,
        swizzle: u32,
        promotion: u32,
        fill: u32,
    ) {
        drop(ready()?);
        if capability() < (9, 0) {
            return Err(code::NOT_SUPPORTED);
        }
        let axes = rank as usize;
        if !(1..=5).contains(&axes) || !(to as u64).is_multiple_of(64) {
            return Err(code::INVALID_VALUE);
        }
        let (sizes, steps) = (list(sizes, axes)?, list(steps, axes - 1)?);
        let (boxes, element_steps) = (list(boxes, axes)?, list(element_steps, axes)?);
        // Only what our kernels use: no element strides, no interleaving, no NaN fill out of
        // bounds.
        if element_steps.iter().any(|step| *step != 1) || interleave != 0 || promotion > 3 || fill != 0 {
            return Err(code::INVALID_VALUE);
        }
        // In the order of `CUtensorMapDataType`.
        let width = [1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4].get(element as usize).copied();
        // The order of `CUtensorMapSwizzle`: none, 32, 64 and 128 bytes, in chunks of 16 bytes.
        let mixes = [1, 2, 4, 8].get(swizzle as usize).copied();
        let (Some(width), Some(mixes)) = (width, mixes) else { return Err(code::INVALID_VALUE) };
        let boxes = boxes.into_iter().map(u64::from).collect();
        let map = TensorMap { address: address as u64, width, sizes, steps, boxes, mixes };
        put(to, map.words().ok_or(code::INVALID_VALUE)?)
    }
    fn cuModuleLoadData(module: *mut Handle, image: *const c_void) {
        load(module, image).map_err(|fault| {
            eprintln!("CUDA emulator: {}", fault.message);
            fault.code
        })
    }
    fn cuModuleLoadDataEx(
        module: *mut Handle,
        image: *const c_void,
        count: u32,
        options: *const u32,
        values: *const *mut c_void,
    ) {
        load(module, image).map_err(|fault| {
            let (mut log, mut size, mut size_at) = (0, 0, None);
            for at in 0..if options.is_null() || values.is_null() { 0 } else { count as usize } {
                // SAFETY: both pointers are not null, and the driver's API requires `count` options
                // and values.
                let (option, value) = unsafe { (*options.add(at), *values.add(at)) };
                // `CU_JIT_ERROR_LOG_BUFFER` and `CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES`.
                match option {
                    5 => log = value as u64,
                    6 => (size, size_at) = (value as u64 as u32 as usize, Some(at)),
                    _ => {}
                }
            }
            if log != 0 && size > 0 {
                let kept = fault.message.len().min(size - 1);
                // Both destinations are the caller's, so a failure to write them does not change
                // the error.
                let _ = copy(log, fault.message.as_ptr() as u64, kept);
                let _ = put((log as *mut u8).wrapping_add(kept), 0);
                if let Some(at) = size_at {
                    // The driver returns the size that it filled in the option's value.
                    let _ = put(values.wrapping_add(at).cast_mut().cast::<u32>(), kept as u32 + 1);
                }
            } else {
                eprintln!("CUDA emulator: {}", fault.message);
            }
            fault.code
        })
    }
    fn cuModuleUnload(module: Handle) {
        current()?.uncaptured()?;
        finish_streams(|_| true)?;
        let mut driver = current()?;
        let loaded = driver.modules.remove(&(module as u64)).ok_or(code::INVALID_HANDLE)?;
        for kernel in loaded.kernels {
            driver.kernels.remove(&kernel);
        }
        for global in &loaded.module.0.globals {
            driver.memory.free(global.address, true);
        }
        Ok(())
    }
    fn cuModuleGetFunction(function: *mut Handle, module: Handle, name: *const c_char) {
        let mut driver = current()?;
        let key = module as u64;
        let name = text(name).ok_or(code::INVALID_VALUE)?;
        let loaded = driver.modules.get(&key).ok_or(code::INVALID_HANDLE)?;
        let found = loaded.module.0.functions.iter().position(|f| f.entry && f.name == name);
        let number = found.ok_or(code::NOT_FOUND)?;
        let is_it = |handle: &&u64| driver.kernels.get(handle).is_some_and(|kernel| kernel.number == number);
        if let Some(known) = loaded.kernels.iter().find(is_it) {
            return put(function, *known as Handle);
        }
        // A kernel that does not ask for more has 48 KiB of shared memory, its static variables
        // included.
        let dynamic = SHARED_DEFAULT.saturating_sub(loaded.module.0.functions[number].shared);
        let handle = driver.handle();
        driver.kernels.insert(handle, Kernel { module: key, number, dynamic });
        if let Some(loaded) = driver.modules.get_mut(&key) {
            loaded.kernels.push(handle);
        }
        put(function, handle as Handle)
    }
    fn cuModuleGetGlobal_v2(address: *mut u64, size: *mut usize, module: Handle, name: *const c_char) {
        let driver = current()?;
        let name = text(name).ok_or(code::INVALID_VALUE)?;
        let loaded = driver.modules.get(&(module as u64)).ok_or(code::INVALID_HANDLE)?;
        let found = loaded.module.0.globals.iter().find(|g| g.name == name).ok_or(code::NOT_FOUND)?;
        if !address.is_null() {
            put(address, found.address)?;
        }
        if size.is_null() { Ok(()) } else { put(size, found.data.len()) }
    }
    fn cuFuncSetAttribute(function: Handle, attribute: i32, value: i32) {
        let mut driver = current()?;
        let kernel = driver.kernels.get(&(function as u64)).ok_or(code::INVALID_HANDLE)?;
        let loaded = driver.modules.get(&kernel.module).ok_or(code::INVALID_HANDLE)?;
        let own = loaded.module.0.functions[kernel.number].shared;
        let fits = usize::try_from(value).is_ok_and(|value| value + own <= most_shared());
        match driver.kernels.get_mut(&(function as u64)) {
            Some(kernel) if attribute == 8 && fits => kernel.dynamic = value as usize,
            _ if attribute == 8 => return Err(code::INVALID_VALUE),
            _ => {}
        }
        Ok(())
    }
    fn cuFuncGetAttribute(value: *mut i32, attribute: i32, function: Handle) {
        let driver = current()?;
        let kernel = driver.kernels.get(&(function as u64)).ok_or(code::INVALID_HANDLE)?;
        let loaded = driver.modules.get(&kernel.module).ok_or(code::INVALID_HANDLE)?;
        let function = &loaded.module.0.functions[kernel.number];
        // The numbers of `CUfunction_attribute`.
        put(value, match attribute {
            0 => 1024,
            1 => function.shared as i32,
            3 => function.local as i32,
            4 => 32,
            5 | 6 => capability().0 * 10 + capability().1,
            8 => kernel.dynamic as i32,
            _ => 0,
        })
    }
    fn cuLaunchKernel(
        function: Handle,
        grid_x: u32,
        grid_y: u32,
        grid_z: u32,
        block_x: u32,
        block_y: u32,
        block_z: u32,
        shared: u32,
        stream: Handle,
        parameters: *const *const c_void,
        extra: *const *const c_void,
    ) {
        let grid = [grid_x, grid_y, grid_z];
        let block = [block_x, block_y, block_z];
        start(function, LaunchSize { grid, block, dynamic: shared as usize }, stream, parameters, extra)
    }
    fn cuGetErrorName(error: u32, name: *mut *const c_char) {
        let (found, _) = error_text(error);
        put(name, found.map_or(std::ptr::null(), CStr::as_ptr))?;
        if found.is_some() { Ok(()) } else { Err(code::INVALID_VALUE) }
    }
    fn cuGetErrorString(error: u32, text: *mut *const c_char) {
        let (name, found) = error_text(error);
        put(text, if name.is_some() { found.as_ptr() } else { std::ptr::null() })?;
        if name.is_some() { Ok(()) } else { Err(code::INVALID_VALUE) }
    }
}

/// Allocates pinned memory.
fn pinned(pointer: *mut Handle, size: usize) -> Done {
    let mut driver = current()?;
    driver.uncaptured()?;
    let address = driver.memory.allocate(size as u64, false, 0).ok_or(code::OUT_OF_MEMORY)?;
    put(pointer, address as Handle)
}

fn text(name: *const c_char) -> Option<String> {
    if name.is_null() {
        return None;
    }
    // SAFETY: `name` is not null, and the driver's API requires a string that ends with a zero.
    unsafe { CStr::from_ptr(name) }.to_str().ok().map(str::to_owned)
}
