//! Options of execution providers of vendors, none of which is in this build.

use std::ffi::c_void;

use crate::entry::{InMut, Out, entries};
use crate::session_options::SessionOptions;
use crate::status::{Outcome, code, fail};

fn absent(name: &str) -> Outcome {
    fail(code::FAIL, format!("{name} execution provider is not enabled in this build."))
}

/// Functions on options that this build does not make, by the name of their provider.
macro_rules! absent {
    ($($name:ident($($argument:ident: $ty:ty),*) $provider:literal)*) => {
        entries! {
            $(fn $name($($argument: $ty),*) {
                absent($provider)
            })*
        }
    };
}

/// Functions that append a provider.
macro_rules! appended {
    ($($name:ident($($argument:ident: $ty:ty),*) $text:literal)*) => {
        entries! {
            $(fn $name(options: InMut<SessionOptions>, $($argument: $ty),*) {
                options.get()?;
                fail(code::FAIL, $text.to_owned())
            })*
        }
    };
}

absent! {
    UpdateTensorRTProviderOptions(_options: *mut c_void, _keys: *const c_void, _values: *const c_void, _count: usize) "TensorRT"
    GetTensorRTProviderOptionsAsString(_options: *const c_void, _allocator: *mut c_void, _out: Out<*mut c_void>) "TensorRT"
    UpdateTensorRTProviderOptionsWithValue(_options: *mut c_void, _key: *const c_void, _value: *mut c_void) "TensorRT"
    GetTensorRTProviderOptionsByName(_options: *const c_void, _key: *const c_void, _out: Out<*mut c_void>) "TensorRT"
    UpdateCUDAProviderOptions(_options: *mut c_void, _keys: *const c_void, _values: *const c_void, _count: usize) "CUDA"
    GetCUDAProviderOptionsAsString(_options: *const c_void, _allocator: *mut c_void, _out: Out<*mut c_void>) "CUDA"
    UpdateCUDAProviderOptionsWithValue(_options: *mut c_void, _key: *const c_void, _value: *mut c_void) "CUDA"
    GetCUDAProviderOptionsByName(_options: *const c_void, _key: *const c_void, _out: Out<*mut c_void>) "CUDA"
    CreateCANNProviderOptions(_out: Out<*mut c_void>) "CANN"
    UpdateCANNProviderOptions(_options: *mut c_void, _keys: *const c_void, _values: *const c_void, _count: usize) "CANN"
    GetCANNProviderOptionsAsString(_options: *const c_void, _allocator: *mut c_void, _out: Out<*mut c_void>) "CANN"
    CreateDnnlProviderOptions(_out: Out<*mut c_void>) "oneDNN"
    UpdateDnnlProviderOptions(_options: *mut c_void, _keys: *const c_void, _values: *const c_void, _count: usize) "oneDNN"
    GetDnnlProviderOptionsAsString(_options: *const c_void, _allocator: *mut c_void, _out: Out<*mut c_void>) "oneDNN"
    CreateROCMProviderOptions(_out: Out<*mut c_void>) "ROCM"
    UpdateROCMProviderOptions(_options: *mut c_void, _keys: *const c_void, _values: *const c_void, _count: usize) "ROCM"
    GetROCMProviderOptionsAsString(_options: *const c_void, _allocator: *mut c_void, _out: Out<*mut c_void>) "ROCM"
}

appended! {
    SessionOptionsAppendExecutionProvider_TensorRT_V2(_settings: *const c_void) "OrtSessionOptionsAppendExecutionProvider_TensorRT: Failed to load shared library"
    SessionOptionsAppendExecutionProvider_MIGraphX(_settings: *const c_void) "MIGraphX execution provider is not enabled in this build."
    SessionOptionsAppendExecutionProvider_CANN(_settings: *const c_void) "CANN execution provider is not enabled in this build."
    SessionOptionsAppendExecutionProvider_Dnnl(_settings: *const c_void) "oneDNN execution provider is not enabled in this build."
    SessionOptionsAppendExecutionProvider_VitisAI(_keys: *const c_void, _values: *const c_void, _count: usize) "SessionOptionsAppendExecutionProvider_VitisAI: Failed to load shared library"
}

/// What functions that ask for the GPU of CUDA answer without it.
const NO_CUDA: &str = "CUDA execution provider is either not enabled or not available.";

entries! {
    /// 160
    fn SetCurrentGpuDeviceId(_id: i32) {
        fail(code::FAIL, NO_CUDA.to_owned())
    }

    /// 161
    fn GetCurrentGpuDeviceId(_out: Out<i32>) {
        fail(code::FAIL, NO_CUDA.to_owned())
    }
}
