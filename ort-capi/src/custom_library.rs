//! Libraries of custom operators: `RegisterCustomOpsLibrary` and its relatives.

use std::ffi::c_void;
use std::path::Path;
use std::sync::Arc;

use ort_sys::{OrtApiBase, OrtStatusPtr};

use crate::base::OrtGetApiBase;
use crate::entry::{InMut, Object, Out, PathText, Text, entries};
use crate::session_options::SessionOptions;
use crate::status::{Failure, Outcome, code, fail, invalid, of_client};

/// A library that stays loaded while options and sessions use it.
pub(crate) struct Library(#[allow(dead_code, reason = "it is held")] libloading::Library);

/// The function that a library exports, and that adds its domains to options.
type Register = unsafe extern "system" fn(*mut Object<SessionOptions>, *const OrtApiBase) -> OrtStatusPtr;

const NAME: &str = "RegisterCustomOps";

/// Loads a library, whose initialisers run.
pub(crate) fn load_library(path: &Path) -> Outcome<libloading::Library> {
    // SAFETY: the caller asks for the code of the library to run.
    unsafe { libloading::Library::new(path) }.map_err(|problem| {
        let text = format!("Failed to load library {} with error: {problem}", path.display());
        Failure::new(code::FAIL, text)
    })
}

fn function_of(library: &libloading::Library, path: &Path) -> Outcome<Register> {
    // SAFETY: the header says that the function of this name has this type.
    let function = unsafe { library.get::<Register>(NAME.as_bytes()) };
    function.map(|function| *function).map_err(|problem| {
        let path = path.display();
        let text = format!("Failed to get symbol {NAME} with error: {problem}; the library is {path}");
        Failure::new(code::FAIL, text)
    })
}

/// Lets a library add its domains. Its function changes the options through their pointer, so that
/// no reference to them may be held meanwhile.
fn register(options: &InMut<SessionOptions>, function: Register) -> Outcome {
    // SAFETY: the options are valid, and the function is the library's, which the header describes.
    of_client(unsafe { function(options.pointer(), OrtGetApiBase()) })
}

entries! {
    /// 29. The caller closes the library.
    fn RegisterCustomOpsLibrary(options: InMut<SessionOptions>, path: Text, handle: Out<*mut c_void>) {
        let handle = handle.place()?;
        options.get()?;
        let path = Path::new(path.get("the path of the library")?);
        let library = load_library(path)?;
        let function = function_of(&library, path)?;
        // Before the call, whose domains may lie in the library.
        handle.put(raw_handle(library));
        register(&options, function)
    }

    /// 228. The options and sessions keep the library loaded.
    fn RegisterCustomOpsLibrary_V2(options: InMut<SessionOptions>, path: PathText) {
        options.get()?;
        let path = path.get("the path of the library")?;
        let library = load_library(&path)?;
        let function = function_of(&library, &path)?;
        options.get()?.libraries.push(Arc::new(Library(library)));
        register(&options, function)
    }

    /// 229
    fn RegisterCustomOpsUsingFunction(options: InMut<SessionOptions>, name: Text) {
        options.get()?;
        let name = name.or_empty("the name of the function")?;
        if name.is_empty() {
            return invalid("RegisterCustomOpsUsingFunction: Registration function name must be specified.");
        }
        let Some(function) = in_process(name) else {
            return invalid("RegisterCustomOpsUsingFunction: Registration function was not found");
        };
        register(&options, function)
    }

    /// 175. The operators of onnxruntime-extensions are in a library of their own.
    fn EnableOrtCustomOps(options: InMut<SessionOptions>) {
        options.get()?;
        let text = "EnableOrtCustomOps: Custom operators in onnxruntime-extensions are not enabled; register \
                    their library";
        fail(code::FAIL, text.to_owned())
    }
}

/// Finds a function of the program or of a library that it has loaded for all.
#[cfg(unix)]
fn in_process(name: &str) -> Option<Register> {
    let library = libloading::os::unix::Library::this();
    // SAFETY: the caller says that the function has this type.
    unsafe { library.get::<Register>(name.as_bytes()) }.ok().map(|function| *function)
}

#[cfg(windows)]
fn in_process(name: &str) -> Option<Register> {
    let library = libloading::os::windows::Library::this().ok()?;
    // SAFETY: as above.
    unsafe { library.get::<Register>(name.as_bytes()) }.ok().map(|function| *function)
}

/// The system's handle of a library, which stays loaded until the caller closes it.
#[cfg(unix)]
fn raw_handle(library: libloading::Library) -> *mut c_void {
    libloading::os::unix::Library::from(library).into_raw()
}

#[cfg(windows)]
fn raw_handle(library: libloading::Library) -> *mut c_void {
    libloading::os::windows::Library::from(library).into_raw() as *mut c_void
}
