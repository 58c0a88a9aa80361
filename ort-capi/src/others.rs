//! Functions without a status for objects that this library does not make, and the other tables.

use std::ffi::c_void;
use std::ptr::null;

use ort_sys::OrtStatusPtr;

use crate::entry::{In, Out, Text, entries};
use crate::session::Session;
use crate::status::{code, fail, not_implemented};

const NO_OPAQUE: &str =
    "Specified domain and type names combination does not refer to a registered opaque type";

/// A function that is not there: it ignores its arguments. In the calling conventions of the
/// 64-bit systems that we support the caller removes them.
type Absent = extern "system" fn() -> OrtStatusPtr;

macro_rules! absent_table {
    ($name:ident, $len:literal, $text:literal) => {
        static $name: [Absent; $len] = {
            extern "system" fn absent() -> OrtStatusPtr {
                not_implemented($text)
            }
            [absent; $len]
        };
    };
}

absent_table!(EP, 74, "the API of plug-in providers");
absent_table!(INTEROP, 13, "the interop API");
absent_table!(MODEL_PACKAGE, 16, "the model package API");

/// Functions that free what this library never makes.
macro_rules! ignored {
    ($($name:ident)*) => {
        entries! {
            $(fn $name(_object: *mut c_void) -> (), else (), {})*
        }
    };
}

ignored! {
    ReleaseTensorRTProviderOptions ReleaseCUDAProviderOptions
    ReleaseCANNProviderOptions ReleaseDnnlProviderOptions ReleaseROCMProviderOptions
    ReleaseSyncStream ReleaseDeviceEpIncompatibilityDetails
}

entries! {
    /// 219. Null says that this build cannot train.
    fn GetTrainingApi(_version: u32) -> *const c_void, else null(), {
        null()
    }

    /// 317
    fn GetEpApi() -> *const c_void, else null(), {
        EP.as_ptr().cast()
    }

    /// 395
    fn GetInteropApi() -> *const c_void, else null(), {
        INTEROP.as_ptr().cast()
    }

    /// 427
    fn GetModelPackageApi() -> *const c_void, else null(), {
        MODEL_PACKAGE.as_ptr().cast()
    }

    /// 83
    fn CreateOpaqueValue(_domain: Text, _name: Text, _data: *const c_void, _len: usize, _out: *mut c_void) {
        fail(code::FAIL, NO_OPAQUE.to_owned())
    }

    /// 84
    fn GetOpaqueValue(_domain: Text, _name: Text, _value: *const c_void, _data: *mut c_void, _len: usize) {
        fail(code::FAIL, NO_OPAQUE.to_owned())
    }

    /// 421. Sessions capture no graphs.
    fn SessionReleaseCapturedGraph(session: In<Session>, _id: i32) {
        session.get().map(drop)
    }

    /// 422. The one function of ONNX Runtime 1.31 by which clients try the mechanism.
    fn GetExperimentalFunction(name: Text) -> *const c_void, else null(), {
        match name.bytes("the name") {
            Ok(b"OrtApi_ExperimentalApiTest_SinceV28") => ExperimentalApiTest as *const c_void,
            _ => null(),
        }
    }

    fn ExperimentalApiTest(out: Out<i64>) {
        out.place()?.put(12345);
        Ok(())
    }

    /// 384
    fn SyncStream_GetHandle(_stream: *mut c_void) -> *mut c_void, else std::ptr::null_mut(), {
        std::ptr::null_mut()
    }

    /// 413. There are no streams.
    fn RunOptionsSetSyncStream(_options: *mut c_void, _stream: *mut c_void) -> (), else (), {}
}
