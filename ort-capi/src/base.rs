//! What the library exports: `OrtGetApiBase`, and two old functions.
#![allow(unreachable_pub, reason = "C calls these functions")]

use std::ffi::{CStr, c_char};

use ort_runtime::onnxruntime::INTERFACE_VERSION;
use ort_sys::{ORT_API_VERSION, OrtApi, OrtApiBase, OrtStatusPtr};

use crate::entry::{InMut, guarded, guarded_value};
use crate::providers::cuda;
use crate::session_options::SessionOptions;
use crate::table::API;

/// The version, three numbers and no more: clients parse it.
const VERSION: &CStr = c"1.31.1";

extern "system" fn get_version_string() -> *const c_char {
    VERSION.as_ptr()
}

/// Functions are only ever added at the end, so one table serves all versions.
extern "system" fn get_api(version: u32) -> *const OrtApi {
    if (1..=ORT_API_VERSION).contains(&version) {
        return &raw const API;
    }
    let line = format!(
        "The requested API version [{version}] is not available, only API versions [1, {ORT_API_VERSION}] are \
         supported in this build. Current ORT Version is: {INTERFACE_VERSION}"
    );
    guarded_value(|| eprintln!("{line}"), ());
    std::ptr::null()
}

static BASE: OrtApiBase = OrtApiBase { GetApi: get_api, GetVersionString: get_version_string };

/// Returns the functions by which clients get all others.
// SAFETY: no other function of the process has this name, unless ONNX Runtime is loaded, too: then
// the loader binds each client to the one that it asked for.
#[unsafe(no_mangle)]
pub extern "system" fn OrtGetApiBase() -> *const OrtApiBase {
    &raw const BASE
}

/// Accepts the CPU provider, which every session has. GStreamer calls it.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub extern "system" fn OrtSessionOptionsAppendExecutionProvider_CPU(
    mut options: InMut<SessionOptions>,
    _use_arena: i32,
) -> OrtStatusPtr {
    guarded("OrtSessionOptionsAppendExecutionProvider_CPU", move || options.get().map(drop))
}

/// Asks for CUDA.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub extern "system" fn OrtSessionOptionsAppendExecutionProvider_CUDA(
    mut options: InMut<SessionOptions>,
    _device_id: i32,
) -> OrtStatusPtr {
    guarded("OrtSessionOptionsAppendExecutionProvider_CUDA", move || cuda(options.get()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_that_of_the_interface() {
        assert_eq!(VERSION.to_str(), Ok(INTERFACE_VERSION));
    }
}
