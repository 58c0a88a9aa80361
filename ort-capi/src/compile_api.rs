//! `OrtCompileApi`: writes a model with its rewrites applied.
//!
//! No provider of this library puts compiled code into ONNX models. So the result is an ONNX model,
//! as ONNX Runtime's own CPU provider writes it, and any runtime loads it.

use std::ffi::c_void;
use std::path::Path;

use ort_runtime::rewrite::Level;

use crate::abi::{Signature, slot};
use crate::allocator::Allocator;
use crate::compile_model::compile;
use crate::compile_options::{CompileOptions, Input, LocationFunction, Output, Storage, WriteFunction};
use crate::entry::{Array, In, InMut, Object, Out, PathText, Released, entries};
use crate::env::Env;
use crate::graph_objects::EditedModel;
use crate::session_options::{SessionOptions, set_level};
use crate::status::{Failure, Outcome, code, invalid};

/// The table, which has more functions than `ort_sys` knows.
#[repr(C)]
#[allow(non_snake_case, reason = "the names of the header")]
struct CompileApi {
    ReleaseModelCompilationOptions: extern "system" fn(*mut c_void),
    functions: [extern "system" fn() -> ort_sys::OrtStatusPtr; 15],
}

/// A function of the table. The caller passes the arguments that the header has for its place.
const fn entry<F: Signature>(function: F) -> extern "system" fn() -> ort_sys::OrtStatusPtr {
    const { assert!(size_of::<F>() == size_of::<extern "system" fn()>()) };
    // SAFETY: both are function pointers; callers use the type of the header.
    unsafe { std::mem::transmute_copy::<F, extern "system" fn() -> ort_sys::OrtStatusPtr>(&function) }
}

static TABLE: CompileApi = CompileApi {
    ReleaseModelCompilationOptions: slot(ReleaseModelCompilationOptions),
    functions: [
        entry(CreateModelCompilationOptionsFromSessionOptions),
        entry(ModelCompilationOptions_SetInputModelPath),
        entry(ModelCompilationOptions_SetInputModelFromBuffer),
        entry(ModelCompilationOptions_SetOutputModelPath),
        entry(ModelCompilationOptions_SetOutputModelExternalInitializersFile),
        entry(ModelCompilationOptions_SetOutputModelBuffer),
        entry(ModelCompilationOptions_SetEpContextEmbedMode),
        entry(CompileModel),
        entry(ModelCompilationOptions_SetFlags),
        entry(ModelCompilationOptions_SetEpContextBinaryInformation),
        entry(ModelCompilationOptions_SetGraphOptimizationLevel),
        entry(ModelCompilationOptions_SetOutputModelWriteFunc),
        entry(ModelCompilationOptions_SetOutputModelGetInitializerLocationFunc),
        entry(ModelCompilationOptions_SetInputModel),
        entry(ModelCompilationOptions_SetEpContextDataWriteFunc),
    ],
};

const CONTEXT_FILE: &str = "ep.context_file_path";

/// A path that may not be empty.
fn path(text: &PathText, empty: &str) -> Outcome<std::path::PathBuf> {
    let path = text.get("the path")?;
    if path.as_os_str().is_empty() { invalid(empty) } else { Ok(path) }
}

/// Keeps a setting for providers that read it. What is too long for one is left out.
fn keep(options: &mut SessionOptions, key: &str, value: &Path) {
    let value = value.to_string_lossy();
    if crate::session_options::check_entry(key, &value).is_ok() {
        options.entries.insert(key.to_owned(), value.into_owned());
    }
}

entries! {
    fn ReleaseModelCompilationOptions(options: Released<CompileOptions>) -> (), else (), {
        options.release();
    }

    fn CreateModelCompilationOptionsFromSessionOptions(env: In<Env>, session: In<SessionOptions>, out: Out<*mut Object<CompileOptions>>) {
        let out = out.place()?;
        env.get()?;
        let mut session = session.get()?.clone();
        session.entries.insert("ep.context_enable".to_owned(), "1".to_owned());
        // As in ONNX Runtime: nothing is rewritten unless the caller sets a level.
        session.engine.graph_optimization_level = Level::Disabled;
        out.put(Object::give(CompileOptions { session, input: None, output: None, storage: None, flags: 0 }));
        Ok(())
    }

    fn ModelCompilationOptions_SetInputModelPath(options: InMut<CompileOptions>, file: PathText) {
        let options = options.get()?;
        options.input = Some(Input::File(path(&file, "Invalid input model: path string is empty")?));
        Ok(())
    }

    fn ModelCompilationOptions_SetInputModelFromBuffer(options: InMut<CompileOptions>, data: *const c_void, len: usize) {
        let options = options.get()?;
        if data.is_null() {
            return invalid("Invalid input model: data pointer is null");
        }
        if len == 0 {
            return invalid("Invalid input model: data size is 0");
        }
        Array::<u8>::of(data.cast()).get(len, "the input model")?;
        options.input = Some(Input::Memory { data: data.cast(), len });
        Ok(())
    }

    fn ModelCompilationOptions_SetInputModel(options: InMut<CompileOptions>, model: In<EditedModel>) {
        let options = options.get()?;
        if model.is_null() {
            return invalid("Invalid input model: OrtModel pointer is null");
        }
        model.get()?;
        options.input = Some(Input::Model(model));
        Ok(())
    }

    fn ModelCompilationOptions_SetOutputModelPath(options: InMut<CompileOptions>, file: PathText) {
        let options = options.get()?;
        let path = path(&file, "Invalid output model path: path is empty")?;
        keep(&mut options.session, CONTEXT_FILE, &path);
        options.output = Some(Output::File(path));
        Ok(())
    }

    fn ModelCompilationOptions_SetOutputModelExternalInitializersFile(options: InMut<CompileOptions>, file: PathText, least: usize) {
        let options = options.get()?;
        let path = path(&file, "Invalid external initializer file: path is empty")?;
        options.storage = Some(Storage::File { path, least });
        Ok(())
    }

    fn ModelCompilationOptions_SetOutputModelBuffer(options: InMut<CompileOptions>, allocator: Allocator, data: *mut *mut c_void, len: *mut usize) {
        let options = options.get()?;
        if data.is_null() {
            return invalid("Invalid output model buffer: data pointer is null");
        }
        if len.is_null() {
            return invalid("Invalid output model buffer: size pointer is null");
        }
        if allocator.is_null() {
            return invalid("Invalid allocator for output model buffer: allocator pointer is null");
        }
        options.output = Some(Output::Memory { allocator, data, len });
        Ok(())
    }

    fn ModelCompilationOptions_SetEpContextEmbedMode(options: InMut<CompileOptions>, is_embedded: bool) {
        let options = options.get()?;
        let value = if is_embedded { "1" } else { "0" };
        options.session.entries.insert("ep.context_embed_mode".to_owned(), value.to_owned());
        Ok(())
    }

    fn CompileModel(env: In<Env>, options: In<CompileOptions>) {
        env.get()?;
        compile(options.get()?)
    }

    fn ModelCompilationOptions_SetFlags(options: InMut<CompileOptions>, flags: u32) {
        options.get()?.flags = flags;
        Ok(())
    }

    fn ModelCompilationOptions_SetEpContextBinaryInformation(options: InMut<CompileOptions>, folder: PathText, name: PathText) {
        let options = options.get()?;
        let folder = path(&folder, "Invalid output directory: path is empty")?;
        let name = path(&name, "Invalid model name: string is empty")?;
        let ends_in_separator = folder.to_string_lossy().ends_with(std::path::is_separator);
        if !ends_in_separator && folder.extension().is_none() {
            return invalid("output_dir is not a valid directory.");
        }
        keep(&mut options.session, CONTEXT_FILE, &folder.join(name));
        Ok(())
    }

    fn ModelCompilationOptions_SetGraphOptimizationLevel(options: InMut<CompileOptions>, level: i32) {
        let options = options.get()?;
        set_level(&mut options.session, level).map_err(|_| {
            Failure::new(
                code::INVALID_ARGUMENT,
                format!(
                    "graph_optimization_level with value {level} is invalid. Valid values are: ORT_DISABLE_ALL (0), \
                     ORT_ENABLE_BASIC (1), ORT_ENABLE_EXTENDED (2), ORT_ENABLE_LAYOUT (3), and ORT_ENABLE_ALL (99)."
                ),
            )
        })
    }

    fn ModelCompilationOptions_SetOutputModelWriteFunc(options: InMut<CompileOptions>, write: Option<WriteFunction>, state: *mut c_void) {
        let options = options.get()?;
        let Some(write) = write else { return invalid("OrtWriteBufferFunc function for output model is null") };
        options.output = Some(Output::Function { write, state });
        Ok(())
    }

    fn ModelCompilationOptions_SetOutputModelGetInitializerLocationFunc(options: InMut<CompileOptions>, locate: Option<LocationFunction>, state: *mut c_void) {
        let options = options.get()?;
        let Some(locate) = locate else {
            return invalid("OrtGetInitializerLocationFunc function for output model is null");
        };
        options.storage = Some(Storage::Function { locate, state });
        Ok(())
    }

    /// No provider of this library writes data of its own, so the function is never called.
    fn ModelCompilationOptions_SetEpContextDataWriteFunc(options: InMut<CompileOptions>, _write: *const c_void, _state: *mut c_void) {
        options.get().map(drop)
    }

    /// 294
    fn GetCompileApi() -> *const c_void, else std::ptr::null(), {
        (&raw const TABLE).cast()
    }
}
