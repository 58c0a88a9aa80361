//! A kernel that leaves its memory fails, and so does all that follows.

use std::ffi::c_void;
use std::ptr::{null, null_mut};

use ort_cuda_emulator::driver::*;

#[test]
fn the_error_stays() {
    let text = c".version 8.0\n.target sm_80\n.address_size 64
        .visible .entry k(.param .u64 a) { .reg .b64 %rd<3>; .reg .b32 %r<2>;
        ld.param.u64 %rd1, [a]; mov.u32 %r1, 1; st.global.u32 [%rd1+16], %r1; ret; }";
    let (mut context, mut module, mut function, mut address) = (null_mut(), null_mut(), null_mut(), 0u64);
    // SAFETY: all places are valid.
    unsafe {
        assert_eq!(cuMemAlloc_v2(&raw mut address, 16), 3);
        assert_eq!(cuInit(0), 0);
        assert_eq!(cuDevicePrimaryCtxRetain(&raw mut context, 0), 0);
        assert_eq!(cuMemAlloc_v2(&raw mut address, 16), 201);
        assert_eq!(cuCtxSetCurrent(context), 0);
        assert_eq!(cuMemAlloc_v2(&raw mut address, 1 << 40), 2);
        assert_eq!(cuMemAlloc_v2(&raw mut address, 16), 0);
        assert_eq!(cuModuleLoadData(&raw mut module, text.as_ptr().cast()), 0);
        assert_eq!(cuModuleGetFunction(&raw mut function, module, c"none".as_ptr()), 500);
        assert_eq!(cuModuleGetFunction(&raw mut function, module, c"k".as_ptr()), 0);
        let parameters: [*const c_void; 1] = [(&raw const address).cast()];
        let code = cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, null_mut(), parameters.as_ptr(), null());
        assert_eq!(code, 700);
        assert_eq!(cuMemFree_v2(address), 700);
        assert_eq!(cuCtxSynchronize(), 700);
    }
}
