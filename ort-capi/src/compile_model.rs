//! Compiling a model: load, rewrite, and write to a file, to memory or to a function.

use std::ffi::{CString, c_void};
use std::io::Write;
use std::path::{Path, PathBuf};

use ort_runtime::files::{Complete, NewFile};
use ort_runtime::onnx::proto::{ModelProto, TensorProto};
use ort_runtime::onnx::{ExternalData, Weights, refer_to, tensor_from_proto, to_proto};
use ort_runtime::{Model, SessionBuilder};
use prost::Message;

use crate::compile_options::{CompileOptions, Input, LocationFunction, Output, Storage, flag};
use crate::entry::{Array, Object, Owned, Released};
use crate::external_info::ExternalInfo;
use crate::model_proto::DeclaredModel;
use crate::session::{builder, copy, load_named, open};
use crate::session_edit::declared_source;
use crate::status::{Failure, Outcome, code, fail, invalid, of_client};
use crate::value::Value;

/// Data in a file begins at multiples of this, as in the files that sessions save.
const ALIGNMENT: u64 = 64;

/// Compiles a model.
pub(crate) fn compile(options: &CompileOptions) -> Outcome {
    check_input(options)?;
    let derived = derived_path(options);
    let target = match (&options.output, &derived) {
        (Some(Output::File(path)), _) | (None, Some(path)) => Some(path.as_path()),
        _ => None,
    };
    if target.is_none() && options.output.is_none() {
        return fail(code::FAIL, no_output(options).to_owned());
    }
    if let Some(path) = target {
        check_file(options, path)?;
    }
    if options.flags & flag::ERROR_IF_NO_NODES_COMPILED != 0 {
        let text = "Unable to compile any nodes. Check that the session EPs support compilation and can execute at \
                    least one subgraph in the model.";
        return fail(code::FAIL, text.to_owned());
    }
    let model = load(options)?;
    let builder = builder(&options.session, &model)?;
    match target {
        Some(path) => write_file(options, builder, &model, path),
        None => write_out(options, encoded(options, builder, &model)?),
    }
}

/// Refuses what can be no input.
fn check_input(options: &CompileOptions) -> Outcome {
    match &options.input {
        None => invalid("Input model to compile must be specified via file path, memory buffer, or OrtModel"),
        Some(Input::File(path)) if !path.exists() => {
            invalid(format!("Input model path does not exist: {path:?}"))
        }
        Some(Input::Model(model)) => match &model.get()?.graph {
            None => invalid("OrtModel has no graph. Call AddGraphToModel before compilation."),
            Some(graph) if graph.outputs().is_empty() => {
                invalid("OrtModel graph must have at least one output defined.")
            }
            Some(_) => Ok(()),
        },
        Some(_) => Ok(()),
    }
}

/// The file that the options or the input name, if the caller names no output.
fn derived_path(options: &CompileOptions) -> Option<PathBuf> {
    let named = options.session.entry("ep.context_file_path").filter(|path| !path.is_empty());
    match (&options.output, named, &options.input) {
        (Some(_), ..) => None,
        (None, Some(path), _) => Some(PathBuf::from(path)),
        (None, None, Some(Input::File(path))) => {
            let mut name = path.file_stem().unwrap_or_default().to_owned();
            name.push("_ctx.onnx");
            Some(path.with_file_name(name))
        }
        _ => None,
    }
}

fn no_output(options: &CompileOptions) -> &'static str {
    match options.input {
        Some(Input::Model(_)) => {
            "OrtModel has no model_path set and no valid output location was specified for EPContext model generation. \
             SetOutputModelPath/SetOutputModelBuffer, or set the model_path on the OrtGraph before adding it to OrtModel."
        }
        _ => {
            "Inference session with a model loaded from bytes was configured with EPContext model generation enabled \
             but without a valid location (e.g., file or buffer) for the output model. Please specify a valid \
             ep.context_file_path via SessionOption configs or use the OrtCompileApi to compile a model to a file or \
             buffer."
        }
    }
}

/// Refuses a file that cannot be written, or that the caller does not want replaced.
fn check_file(options: &CompileOptions, path: &Path) -> Outcome {
    if options.flags & flag::ERROR_IF_OUTPUT_FILE_EXISTS != 0 && path.exists() {
        return fail(
            code::FAIL,
            format!(
                "Failed to generate EP context model since the file '{path:?}' exists already. Please remove the EP \
                 context model if you want to re-generate it."
            ),
        );
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    match folder {
        Some(folder) if !folder.is_dir() => {
            invalid(format!("open file {path:?} failed: No such file or directory"))
        }
        _ => Ok(()),
    }
}

fn load(options: &CompileOptions) -> Outcome<Model> {
    let session = &options.session;
    match &options.input {
        Some(Input::File(path)) => load_named(session, open(Some(session), path)?),
        Some(Input::Memory { data, len }) => {
            let bytes = Array::of(*data);
            load_named(session, copy(Some(session), bytes.get(*len, "the input model")?)?)
        }
        Some(Input::Model(model)) => {
            let (session, source) = declared_source(Some(session), &DeclaredModel::of(model.get()?)?)?;
            load_named(&session, source)
        }
        None => invalid("there is no input model"),
    }
}

fn write_file(options: &CompileOptions, builder: SessionBuilder, model: &Model, path: &Path) -> Outcome {
    let weights = match &options.storage {
        None => Weights::Inside,
        Some(Storage::File { path, least }) => {
            Weights::Named { name: path.to_string_lossy().into_owned(), least: *least }
        }
        Some(Storage::Function { .. }) => {
            let bytes = encoded(options, builder, model)?;
            let written = NewFile::create(path).and_then(|mut file| {
                file.write_all(&bytes)?;
                file.complete()?.publish()
            });
            return written.map_err(|problem| cannot_write(path, &problem));
        }
    };
    builder.save_optimized(path, &weights)?;
    Ok(())
}

fn cannot_write(path: &Path, problem: &std::io::Error) -> Failure {
    Failure::new(code::FAIL, format!("cannot write {path:?}: {problem}"))
}

/// The model as bytes, with its initializers where the caller wants them.
fn encoded(options: &CompileOptions, builder: SessionBuilder, model: &Model) -> Outcome<Vec<u8>> {
    let (graph, _) = builder.optimized()?;
    let mut proto = to_proto(&graph, model.info())?;
    match &options.storage {
        None => {}
        Some(Storage::File { path, least }) => move_to_file(&mut proto, path, *least)?,
        Some(Storage::Function { locate, state }) => {
            for tensor in proto.graph.iter_mut().flat_map(|graph| &mut graph.initializer) {
                move_to_location(tensor, *locate, *state)?;
            }
        }
    }
    Ok(proto.encode_to_vec())
}

/// Moves the initializers of some size to a file beside the model, which is read from the working
/// directory.
fn move_to_file(proto: &mut ModelProto, path: &Path, least: usize) -> Outcome {
    if path.is_absolute() {
        return fail(
            code::FAIL,
            format!("the file of external initializers is {path:?}; a model in memory takes a relative path"),
        );
    }
    let failed = |problem: std::io::Error| cannot_write(path, &problem);
    let location = path.to_string_lossy();
    let mut file = NewFile::create(path).map_err(failed)?;
    let mut end = 0u64;
    for tensor in proto.graph.iter_mut().flat_map(|graph| &mut graph.initializer) {
        let Some(raw) = tensor.raw_data.take_if(|raw| raw.len() >= least.max(1)) else { continue };
        let offset = end.next_multiple_of(ALIGNMENT);
        let padding = usize::try_from(offset - end).unwrap_or(0);
        file.write_all(&vec![0; padding]).and_then(|()| file.write_all(&raw)).map_err(failed)?;
        end = offset + raw.len() as u64;
        refer_to(tensor, &location, offset, raw.len() as u64);
    }
    file.complete().and_then(Complete::publish).map_err(failed)
}

/// Asks the caller where an initializer goes. The caller stores it there itself.
fn move_to_location(tensor: &mut TensorProto, locate: LocationFunction, state: *mut c_void) -> Outcome {
    // Strings and lists of numbers stay in the model: external data are bytes.
    if tensor.raw_data.is_none() {
        return Ok(());
    }
    let content = tensor_from_proto(tensor.clone(), &mut ExternalData::unavailable())?;
    let value = Owned::new(Value::of_constant(&content)?);
    let name = CString::new(tensor.name()).unwrap_or_default();
    let mut info: *mut Object<ExternalInfo> = std::ptr::null_mut();
    // SAFETY: the function gets its state, a text and a value that live longer than the call, and a
    // place for its answer.
    let status = unsafe { locate(state, name.as_ptr(), value.address(), std::ptr::null(), &mut info) };
    of_client(status)?;
    if info.is_null() {
        return Ok(());
    }
    let info = Released::of(info).take()?;
    tensor.raw_data = None;
    let (location, offset) = (info.path().to_string_lossy().into_owned(), info.offset());
    refer_to(tensor, &location, u64::try_from(offset).unwrap_or(0), info.len() as u64);
    Ok(())
}

/// Gives the bytes of the model to the caller.
fn write_out(options: &CompileOptions, bytes: Vec<u8>) -> Outcome {
    match &options.output {
        Some(Output::Memory { allocator, data, len }) => {
            let memory = allocator.array(&bytes)?;
            // SAFETY: the setter refused null; the caller keeps both places until the model is
            // compiled.
            unsafe {
                data.write_unaligned(memory.cast());
                len.write_unaligned(bytes.len());
            }
            Ok(())
        }
        Some(Output::Function { write, state }) => {
            // SAFETY: the function gets its state, and bytes that live longer than the call.
            let status = unsafe { write(*state, bytes.as_ptr().cast(), bytes.len()) };
            of_client(status)
        }
        _ => Ok(()),
    }
}
