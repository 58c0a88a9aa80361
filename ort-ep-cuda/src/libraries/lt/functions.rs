//! Foreign functions of cuBLASLt, and the names of its statuses and algorithms.

use std::ffi::{CStr, c_char, c_int, c_void};

use ort_core::{Result, error};

use super::super::load::functions;
use crate::driver::RawStream;

/// A handle or descriptor of the library.
pub(super) type Handle = *mut c_void;

functions! {
    /// The functions of cuBLASLt that we call.
    LtFunctions, cublasLtGetVersion,
    fn cublasLtGetVersion() -> usize;
    fn cublasLtGetStatusString(status: c_int) -> *const c_char;
    fn cublasLtCreate(handle: *mut Handle) -> c_int;
    fn cublasLtDestroy(handle: Handle) -> c_int;
    fn cublasLtMatrixLayoutCreate(layout: *mut Handle, ty: c_int, rows: u64, columns: u64, leading: i64) -> c_int;
    fn cublasLtMatrixLayoutDestroy(layout: Handle) -> c_int;
    fn cublasLtMatrixLayoutSetAttribute(layout: Handle, attribute: c_int, value: *const c_void, bytes: usize) -> c_int;
    fn cublasLtMatmulDescCreate(operation: *mut Handle, compute: c_int, scale: c_int) -> c_int;
    fn cublasLtMatmulDescDestroy(operation: Handle) -> c_int;
    fn cublasLtMatmulDescSetAttribute(operation: Handle, attribute: c_int, value: *const c_void, bytes: usize) -> c_int;
    fn cublasLtMatmulPreferenceCreate(preference: *mut Handle) -> c_int;
    fn cublasLtMatmulPreferenceDestroy(preference: Handle) -> c_int;
    fn cublasLtMatmulPreferenceSetAttribute(preference: Handle, attribute: c_int, value: *const c_void, bytes: usize) -> c_int;
    fn cublasLtMatmulAlgoGetHeuristic(
        handle: Handle, operation: Handle, a: Handle, b: Handle, c: Handle, d: Handle, preference: Handle, requested: c_int,
        found: *mut HeuristicResult, count: *mut c_int,
    ) -> c_int;
    fn cublasLtMatmulAlgoConfigGetAttribute(
        algorithm: *const AlgorithmCode, attribute: c_int, value: *mut c_void, bytes: usize, written: *mut usize,
    ) -> c_int;
    fn cublasLtMatmul(
        handle: Handle, operation: Handle, alpha: *const c_void, a: *const c_void, a_layout: Handle, b: *const c_void,
        b_layout: Handle, beta: *const c_void, c: *const c_void, c_layout: Handle, d: *mut c_void, d_layout: Handle,
        algorithm: *const AlgorithmCode, workspace: *mut c_void, workspace_bytes: usize, stream: RawStream,
    ) -> c_int;
}

/// `cublasLtMatmulAlgo_t`.
pub(in crate::libraries) type AlgorithmCode = [u64; 8];

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(in crate::libraries) struct HeuristicResult {
    pub(super) algorithm: AlgorithmCode,
    pub(super) workspace: usize,
    pub(super) state: c_int,
    pub(super) waves: f32,
    pub(super) reserved: [c_int; 4],
}

// Numbers of attributes, from cuBLASLt's header.
const CONFIG_ID: c_int = 0;
const CONFIG_TILE_ID: c_int = 1;

impl LtFunctions {
    /// Returns the library's own text for a status.
    pub(super) fn describe(&self, status: c_int) -> String {
        // SAFETY: the library returns a string that lives as long as it does, or null.
        let text = unsafe { (self.cublasLtGetStatusString)(status) };
        if text.is_null() {
            return format!("status {status}");
        }
        // SAFETY: the pointer is not null (checked above), and the library's strings are
        // NUL-terminated.
        format!("status {status} ({})", unsafe { CStr::from_ptr(text) }.to_string_lossy())
    }

    pub(super) fn check(&self, status: c_int, what: &str) -> Result<()> {
        match status {
            0 => Ok(()),
            _ => Err(error!(EpFail, "{what}: {}", self.describe(status))
                .help("set use_cublas to 0: the provider's own kernels need no library")),
        }
    }

    /// Returns an algorithm's name for profiles.
    pub(super) fn name(&self, algorithm: &AlgorithmCode, workspace: usize) -> String {
        let number = |attribute| {
            let (mut value, mut written) = (0u32, 0);
            // SAFETY: the library returned this algorithm; it writes a 32-bit number to `value`.
            let status = unsafe {
                (self.cublasLtMatmulAlgoConfigGetAttribute)(
                    algorithm,
                    attribute,
                    (&raw mut value).cast(),
                    size_of::<u32>(),
                    &mut written,
                )
            };
            if status == 0 { value.to_string() } else { "?".to_owned() }
        };
        let (id, tile) = (number(CONFIG_ID), number(CONFIG_TILE_ID));
        format!("cuBLASLt {id} tile {tile}, {workspace} bytes")
    }
}
