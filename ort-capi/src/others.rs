//! Functions without a status for objects that this library does not make, and the other tables.

use std::ffi::{c_char, c_void};
use std::ptr::null;

use ort_sys::OrtStatusPtr;

use crate::entry::{Text, entries};
use crate::status::not_implemented;

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

absent_table!(MODEL_EDITOR, 20, "the model editor API");
absent_table!(COMPILE, 16, "the compile API");
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
    ReleaseTensorRTProviderOptions ReleaseCUDAProviderOptions ReleaseCANNProviderOptions ReleaseDnnlProviderOptions ReleaseROCMProviderOptions
    ReleaseLoraAdapter ReleaseValueInfo ReleaseNode ReleaseGraph ReleaseModel ReleaseExternalInitializerInfo
    ReleaseSyncStream ReleaseDeviceEpIncompatibilityDetails
}

entries! {
    /// 219. Null says that this build cannot train.
    fn GetTrainingApi(_version: u32) -> *const c_void, else null(), {
        null()
    }

    /// 291
    fn GetModelEditorApi() -> *const c_void, else null(), {
        MODEL_EDITOR.as_ptr().cast()
    }

    /// 294
    fn GetCompileApi() -> *const c_void, else null(), {
        COMPILE.as_ptr().cast()
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

    /// 422. There are none.
    fn GetExperimentalFunction(_name: Text) -> *const c_void, else null(), {
        null()
    }

    /// 370
    fn ExternalInitializerInfo_GetFilePath(_info: *const c_void) -> *const c_char, else null(), {
        null()
    }

    /// 371
    fn ExternalInitializerInfo_GetFileOffset(_info: *const c_void) -> i64, else 0, {
        0
    }

    /// 372
    fn ExternalInitializerInfo_GetByteSize(_info: *const c_void) -> usize, else 0, {
        0
    }

    /// 384
    fn SyncStream_GetHandle(_stream: *mut c_void) -> *mut c_void, else std::ptr::null_mut(), {
        std::ptr::null_mut()
    }

    /// 413. There are no streams.
    fn RunOptionsSetSyncStream(_options: *mut c_void, _stream: *mut c_void) -> (), else (), {}
}
