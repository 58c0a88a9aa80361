//! What the tests of kernels share: a device, kernels and memory of it.

#![allow(dead_code, reason = "each test uses some of it")]
#![allow(clippy::unwrap_used)]

use std::ffi::{CString, c_void};
use std::ptr::null_mut;

use ort_cuda_emulator::driver::*;

/// A kernel loaded.
pub(crate) struct Kernel(pub(crate) Handle);

pub(crate) fn ready() {
    // SAFETY: all places are valid.
    unsafe {
        assert_eq!(cuInit(0), 0);
        let mut context = null_mut();
        assert_eq!(cuDevicePrimaryCtxRetain(&raw mut context, 0), 0);
        assert_eq!(cuCtxSetCurrent(context), 0);
    }
}

/// A kernel that all devices take.
pub(crate) fn kernel(body: &str, name: &str) -> Kernel {
    kernel_of("sm_80", body, name).unwrap()
}

/// A kernel of a target, or the code with which it is refused.
pub(crate) fn kernel_of(target: &str, body: &str, name: &str) -> Result<Kernel, u32> {
    ready();
    let text = CString::new(format!(".version 8.0\n.target {target}\n.address_size 64\n{body}")).unwrap();
    let name = CString::new(name).unwrap();
    let (mut module, mut function) = (null_mut(), null_mut());
    // SAFETY: all places are valid, the text ends with a zero.
    unsafe {
        match cuModuleLoadData(&raw mut module, text.as_ptr().cast()) {
            0 => assert_eq!(cuModuleGetFunction(&raw mut function, module, name.as_ptr()), 0),
            code => return Err(code),
        }
    }
    Ok(Kernel(function))
}

pub(crate) fn upload<T: Copy>(values: &[T]) -> u64 {
    let mut address = 0;
    let size = size_of_val(values);
    // SAFETY: as many bytes lie there.
    unsafe {
        assert_eq!(cuMemAlloc_v2(&raw mut address, size), 0);
        assert_eq!(cuMemcpyHtoD_v2(address, values.as_ptr().cast(), size), 0);
    }
    address
}

pub(crate) fn download<T: Copy + Default>(address: u64, count: usize) -> Vec<T> {
    let mut out = vec![T::default(); count];
    // SAFETY: as many bytes lie there.
    unsafe { assert_eq!(cuMemcpyDtoH_v2(out.as_mut_ptr().cast(), address, size_of_val(&out[..])), 0) };
    out
}

impl Kernel {
    /// Runs it; all must be fine.
    pub(crate) fn run(&self, grid: u32, block: u32, shared: u32, arguments: &[u64]) {
        assert_eq!(self.launch(grid, block, shared, arguments), 0);
    }

    /// The code of a launch.
    pub(crate) fn launch(&self, grid: u32, block: u32, shared: u32, arguments: &[u64]) -> u32 {
        let pointers: Vec<*const c_void> = arguments.iter().map(|a| (&raw const *a).cast()).collect();
        let parameters = pointers.as_ptr();
        // SAFETY: there is a pointer for every parameter.
        unsafe {
            let none = std::ptr::null();
            cuLaunchKernel(self.0, grid, 1, 1, block, 1, 1, shared, null_mut(), parameters, none)
        }
    }

    /// The code of allowing launches so much shared memory.
    pub(crate) fn allow_shared(&self, bytes: i32) -> u32 {
        // SAFETY: the function is there.
        unsafe { cuFuncSetAttribute(self.0, 8, bytes) }
    }
}
