//! The handle of cuBLASLt on a device, with its cache of algorithms.

use std::ffi::c_int;
use std::ptr;
use std::sync::Arc;

use ort_core::Result;
use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use super::super::load::Loaded;
use super::functions::{AlgorithmCode, Handle, LtFunctions};
use super::matmul::Matmul;
use crate::driver::Context;

/// An algorithm for a GEMM.
#[derive(Clone, Debug)]
pub(super) struct LtAlgorithm {
    pub(super) algorithm: AlgorithmCode,
    pub(super) workspace: usize,
    pub(super) name: String,
}

/// The library, opened on a device.
pub(crate) struct Lt {
    pub(super) loaded: Arc<Loaded<LtFunctions>>,
    pub(super) handle: Handle,
    pub(super) context: Arc<Context>,
    /// The algorithms of each GEMM, fastest first.
    pub(super) known: Mutex<FxHashMap<Matmul, Arc<[LtAlgorithm]>>>,
}

// SAFETY: several threads may use a handle at the same time (cuBLAS, "cublasLtHandle_t").
unsafe impl Send for Lt {}
// SAFETY: as above.
unsafe impl Sync for Lt {}

impl Lt {
    pub(in crate::libraries) fn open(
        loaded: Arc<Loaded<LtFunctions>>,
        context: &Arc<Context>,
    ) -> std::result::Result<Lt, String> {
        context.enter().map_err(|problem| problem.to_string())?;
        let mut handle = ptr::null_mut();
        // SAFETY: the device's context is current. The library writes one handle, which `Drop`
        // destroys.
        let status = unsafe { (loaded.functions.cublasLtCreate)(&mut handle) };
        if status != 0 {
            return Err(format!("cublasLtCreate: {}", loaded.functions.describe(status)));
        }
        Ok(Lt { loaded, handle, context: context.clone(), known: Mutex::default() })
    }

    pub(super) fn check(&self, status: c_int, what: &str) -> Result<()> {
        self.loaded.functions.check(status, what)
    }
}

impl Drop for Lt {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: the handle is live. Each descriptor holds an `Arc` of this, so none refers to
            // it. The library waits for the device.
            let _ = unsafe { (self.loaded.functions.cublasLtDestroy)(self.handle) };
        }
    }
}
