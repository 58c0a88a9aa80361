//! `OrtModelCompilationOptions`: what is compiled, and where the result goes.

use std::ffi::{c_char, c_void};
use std::path::PathBuf;

use ort_sys::OrtStatusPtr;

use crate::allocator::Allocator;
use crate::entry::{In, Object, kinds};
use crate::external_info::ExternalInfo;
use crate::graph_objects::EditedModel;
use crate::session_options::SessionOptions;
use crate::value::Value;

/// A function that takes the bytes of a model.
pub(crate) type WriteFunction = unsafe extern "C" fn(*mut c_void, *const c_void, usize) -> OrtStatusPtr;

/// A function that says where an initializer is stored. It gets the name, the value, and where the
/// value lies in the input model if that is a file.
pub(crate) type LocationFunction = unsafe extern "C" fn(
    *mut c_void,
    *const c_char,
    *const Object<Value>,
    *const Object<ExternalInfo>,
    *mut *mut Object<ExternalInfo>,
) -> OrtStatusPtr;

/// The flags of `OrtCompileApiFlags`.
pub(crate) mod flag {
    pub(crate) const ERROR_IF_NO_NODES_COMPILED: u32 = 1;
    pub(crate) const ERROR_IF_OUTPUT_FILE_EXISTS: u32 = 2;
}

/// The model to compile. Memory and models are the caller's until the call.
pub(crate) enum Input {
    File(PathBuf),
    Memory { data: *const u8, len: usize },
    Model(In<EditedModel>),
}

/// Where the compiled model goes.
pub(crate) enum Output {
    File(PathBuf),
    Memory { allocator: Allocator, data: *mut *mut c_void, len: *mut usize },
    Function { write: WriteFunction, state: *mut c_void },
}

/// Where the initializers of the compiled model go, if not into it.
pub(crate) enum Storage {
    File { path: PathBuf, least: usize },
    Function { locate: LocationFunction, state: *mut c_void },
}

/// The options.
pub(crate) struct CompileOptions {
    pub(crate) session: SessionOptions,
    pub(crate) input: Option<Input>,
    pub(crate) output: Option<Output>,
    pub(crate) storage: Option<Storage>,
    pub(crate) flags: u32,
}

// SAFETY: pointers and functions of the caller may be used from any thread, as the header says.
unsafe impl Send for CompileOptions {}
// SAFETY: as above.
unsafe impl Sync for CompileOptions {}

kinds! {
    CompileOptions => "OrtModelCompilationOptions", b"OrtMoCom";
}
