//! The loaded library, and calls that tests share.

use std::ffi::{CStr, CString, c_char, c_void};
use std::path::PathBuf;
use std::ptr::{null, null_mut};
use std::sync::OnceLock;

use ort_sys::{
    ONNXTensorElementDataType, OrtApi, OrtApiBase, OrtEnv, OrtLoggingLevel, OrtMemoryInfo, OrtSession,
    OrtSessionOptions, OrtStatusPtr, OrtValue,
};

/// Calls a function of the table, and returns what it returns.
macro_rules! raw {
    ($name:ident($($argument:expr),* $(,)?)) => {{
        // The arguments may be unsafe calls themselves, so they are computed outside.
        #[allow(unused_unsafe, clippy::macro_metavars_in_unsafe, reason = "the arguments are pointers and numbers")]
        // SAFETY: the arguments are those that the header demands, or null.
        unsafe { ($crate::library::api().$name)($($argument),*) }
    }};
}

/// Calls a function of the table that has to succeed.
macro_rules! call {
    ($name:ident($($argument:expr),* $(,)?)) => {
        if let Some((code, text)) = $crate::library::refusal($crate::library::raw!($name($($argument),*))) {
            panic!("{}: {code} {text}", stringify!($name));
        }
    };
}

/// Calls a function whose last argument is the result, and returns that.
macro_rules! make {
    ($name:ident($($argument:expr),* $(,)?)) => {{
        let mut made = std::mem::MaybeUninit::zeroed();
        $crate::library::call!($name($($argument,)* made.as_mut_ptr()));
        // SAFETY: the function succeeded, and so wrote the result.
        unsafe { made.assume_init() }
    }};
}

pub(crate) use {call, make, raw};

/// The folder of the recorded data.
pub(crate) fn data(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

/// Recorded JSON.
pub(crate) fn json(name: &str) -> serde_json::Value {
    serde_json::from_slice(&std::fs::read(data(name)).unwrap()).unwrap()
}

/// The path of the library. Cargo builds it beside the test; the environment may name another one.
pub(crate) fn path() -> PathBuf {
    if let Some(path) = std::env::var_os("ORT_CAPI_LIBRARY") {
        return PathBuf::from(path);
    }
    let test = std::env::current_exe().unwrap();
    test.with_file_name(libloading::library_filename("onnxruntime"))
}

/// The functions by which clients get all others.
pub(crate) fn base() -> &'static OrtApiBase {
    static BASE: OnceLock<&OrtApiBase> = OnceLock::new();
    BASE.get_or_init(|| {
        // SAFETY: the library has no initialisers that depend on anything.
        let library = Box::leak(Box::new(unsafe { libloading::Library::new(path()) }.unwrap()));
        // SAFETY: the function has this type.
        let get = unsafe { library.get::<extern "system" fn() -> *const OrtApiBase>(b"OrtGetApiBase") };
        // SAFETY: it returns a table of the library, which is never unloaded.
        unsafe { &*get.unwrap()() }
    })
}

/// The table of all functions.
pub(crate) fn api() -> &'static OrtApi {
    // SAFETY: the function takes any number.
    let api = unsafe { (base().GetApi)(31) };
    // SAFETY: it returns a table of the library, or null.
    unsafe { api.as_ref() }.unwrap()
}

/// The code and the text of a status, which is released.
pub(crate) fn refusal(status: OrtStatusPtr) -> Option<(i32, String)> {
    if status.0.is_null() {
        return None;
    }
    let code = raw!(GetErrorCode(status.0)) as i32;
    let text = string(raw!(GetErrorMessage(status.0)));
    raw!(ReleaseStatus(status.0));
    Some((code, text))
}

/// A text of the library.
pub(crate) fn string(text: *const c_char) -> String {
    assert!(!text.is_null());
    // SAFETY: the library returns texts that end with a zero.
    unsafe { CStr::from_ptr(text) }.to_str().unwrap().to_owned()
}

pub(crate) fn c(text: &str) -> CString {
    CString::new(text).unwrap()
}

pub(crate) fn env() -> *mut OrtEnv {
    let level = OrtLoggingLevel::ORT_LOGGING_LEVEL_ERROR;
    make!(CreateEnv(level, c"test".as_ptr()))
}

/// A session on a recorded model, from its bytes.
pub(crate) fn session(name: &str) -> *mut OrtSession {
    session_with(name, null())
}

pub(crate) fn session_with(name: &str, options: *const OrtSessionOptions) -> *mut OrtSession {
    let bytes = std::fs::read(data(&format!("models/{name}.onnx"))).unwrap();
    make!(CreateSessionFromArray(env(), bytes.as_ptr().cast::<c_void>(), bytes.len(), options))
}

/// An element type by its number, which the enumeration has.
pub(crate) fn element_type(number: i32) -> ONNXTensorElementDataType {
    assert!((0..=26).contains(&number));
    // SAFETY: the enumeration has all numbers from 0 to 26.
    unsafe { std::mem::transmute::<i32, ONNXTensorElementDataType>(number) }
}

pub(crate) fn memory_info() -> *mut OrtMemoryInfo {
    make!(CreateCpuMemoryInfo(
        ort_sys::OrtAllocatorType::OrtDeviceAllocator,
        ort_sys::OrtMemType::OrtMemTypeDefault
    ))
}

/// A tensor that borrows bytes.
pub(crate) fn tensor(bytes: &mut [u8], dims: &[i64], number: i32) -> *mut OrtValue {
    let info = memory_info();
    let data = bytes.as_mut_ptr().cast::<c_void>();
    let kind = element_type(number);
    let value =
        make!(CreateTensorWithDataAsOrtValue(info, data, bytes.len(), dims.as_ptr(), dims.len(), kind));
    raw!(ReleaseMemoryInfo(info));
    value
}

/// The bytes of a tensor that the library owns.
pub(crate) fn bytes_of(value: *const OrtValue) -> Vec<u8> {
    let data: *const c_void = make!(GetTensorData(value));
    let len: usize = make!(GetTensorSizeInBytes(value));
    if len == 0 {
        return Vec::new();
    }
    // SAFETY: the tensor has these bytes.
    unsafe { std::slice::from_raw_parts(data.cast::<u8>(), len) }.to_vec()
}

/// Runs a session. Null outputs become values of the library.
pub(crate) fn run(
    session: *mut OrtSession,
    inputs: &[(&str, *const OrtValue)],
    names: &[&str],
    outputs: &mut [*mut OrtValue],
) -> Option<(i32, String)> {
    let input_names: Vec<CString> = inputs.iter().map(|(name, _)| c(name)).collect();
    let input_names: Vec<_> = input_names.iter().map(|name| name.as_ptr()).collect();
    let values: Vec<_> = inputs.iter().map(|(_, value)| *value).collect();
    let names: Vec<CString> = names.iter().map(|name| c(name)).collect();
    let names: Vec<_> = names.iter().map(|name| name.as_ptr()).collect();
    refusal(raw!(Run(
        session,
        null(),
        input_names.as_ptr(),
        values.as_ptr(),
        values.len(),
        names.as_ptr(),
        names.len(),
        outputs.as_mut_ptr()
    )))
}

/// Runs a session whose only output the library makes.
pub(crate) fn run_one(
    session: *mut OrtSession,
    inputs: &[(&str, *const OrtValue)],
    name: &str,
) -> *mut OrtValue {
    let mut outputs = [null_mut()];
    assert_eq!(run(session, inputs, &[name], &mut outputs), None);
    outputs[0]
}
