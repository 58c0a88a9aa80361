//! The compile API: models written to files, to memory and to functions.

use std::ffi::{CStr, CString, c_char, c_void};
use std::path::Path;
use std::ptr::{null, null_mut};

use ort_sys::{OrtExternalInitializerInfo, OrtStatusPtr, OrtValue};

use crate::library::{bytes_of, c, data, env, json, make, raw, refusal, run_one, tensor};

type Refused = Option<(i32, String)>;

/// The functions of the table, in its order. `ort_sys` has the first nine only.
const NAMES: [&str; 16] = [
    "ReleaseModelCompilationOptions",
    "CreateModelCompilationOptionsFromSessionOptions",
    "SetInputModelPath",
    "SetInputModelFromBuffer",
    "SetOutputModelPath",
    "SetOutputModelExternalInitializersFile",
    "SetOutputModelBuffer",
    "SetEpContextEmbedMode",
    "CompileModel",
    "SetFlags",
    "SetEpContextBinaryInformation",
    "SetGraphOptimizationLevel",
    "SetOutputModelWriteFunc",
    "SetOutputModelGetInitializerLocationFunc",
    "SetInputModel",
    "SetEpContextDataWriteFunc",
];

/// Calls a function of the table. In the calling conventions of the systems that we test on,
/// arguments that a function does not have are ignored.
fn compile(name: &str, arguments: &[usize]) -> Refused {
    type Any = extern "C" fn(usize, usize, usize, usize, usize) -> OrtStatusPtr;
    let index = NAMES.iter().position(|known| *known == name).unwrap();
    let table: *const Any = raw!(GetCompileApi()).cast();
    // SAFETY: the table has as many functions as there are names.
    let function = unsafe { *table.add(index) };
    let argument = |at: usize| arguments.get(at).copied().unwrap_or(0);
    refusal(function(argument(0), argument(1), argument(2), argument(3), argument(4)))
}

fn done(refused: Refused) {
    assert_eq!(refused, None);
}

fn text(text: &CStr) -> usize {
    text.as_ptr() as usize
}

fn path(path: &Path) -> CString {
    c(path.to_str().unwrap())
}

/// Options, and what they read and write.
struct Compilation {
    options: usize,
    env: usize,
    model: Vec<u8>,
    memory: *mut c_void,
    len: usize,
}

impl Compilation {
    fn new() -> Box<Compilation> {
        let (env, mut options) = (env() as usize, 0usize);
        let session: *mut ort_sys::OrtSessionOptions = make!(CreateSessionOptions());
        let made = [env, session as usize, &raw mut options as usize];
        done(compile("CreateModelCompilationOptionsFromSessionOptions", &made));
        let model = std::fs::read(data("models/two.onnx")).unwrap();
        let made = Compilation { options, env, model, memory: null_mut(), len: 0 };
        Box::new(made)
    }

    fn set(&self, name: &str, arguments: &[usize]) -> Refused {
        compile(name, &[&[self.options], arguments].concat())
    }

    fn of_model() -> Box<Compilation> {
        let made = Compilation::new();
        done(made.set("SetInputModelFromBuffer", &[made.model.as_ptr() as usize, made.model.len()]));
        made
    }

    fn write_to_memory(&mut self) {
        let allocator: *mut ort_sys::OrtAllocator = make!(GetAllocatorWithDefaultOptions());
        let places = [allocator as usize, &raw mut self.memory as usize, &raw mut self.len as usize];
        done(self.set("SetOutputModelBuffer", &places));
    }

    fn run(&self) -> Refused {
        compile("CompileModel", &[self.env, self.options])
    }

    fn made(&self) -> Vec<u8> {
        assert!(!self.memory.is_null());
        // SAFETY: the library wrote the memory and its length.
        unsafe { std::slice::from_raw_parts(self.memory.cast::<u8>(), self.len) }.to_vec()
    }
}

impl Drop for Compilation {
    fn drop(&mut self) {
        done(compile_release(self.options));
    }
}

/// Releasing has no status.
fn compile_release(options: usize) -> Refused {
    type Release = extern "C" fn(usize);
    let table: *const Release = raw!(GetCompileApi()).cast();
    // SAFETY: the first function of the table releases options.
    let release = unsafe { *table };
    release(options);
    None
}

fn hex(text: &serde_json::Value) -> Vec<u8> {
    let text = text.as_str().unwrap();
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}

/// Checks that a session computes what ONNX Runtime computes with the model that was compiled.
fn check(session: *mut ort_sys::OrtSession) {
    let recorded = &json("results.json")["two"];
    let mut input = hex(&recorded["inputs"]["x"]);
    let output = run_one(session, &[("x", tensor(&mut input, &[2, 2, 2], 1).cast_const())], "scaled");
    assert_eq!(bytes_of(output), hex(&recorded["outputs"][0]));
    raw!(ReleaseSession(session));
}

fn check_bytes(model: &[u8]) {
    check(make!(CreateSessionFromArray(env(), model.as_ptr().cast(), model.len(), null())));
}

fn check_file(model: &Path) {
    check(make!(CreateSession(env(), path(model).as_ptr(), null())));
}

#[test]
fn a_model_is_compiled_to_memory_at_each_level() {
    for level in [0, 1, 2, 3, 99] {
        let mut compilation = Compilation::of_model();
        compilation.write_to_memory();
        done(compilation.set("SetGraphOptimizationLevel", &[level]));
        done(compilation.set("SetEpContextEmbedMode", &[1]));
        done(compilation.run());
        check_bytes(&compilation.made());
    }
}

#[test]
fn a_model_is_compiled_to_a_file_and_beside_its_input() {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (folder.path().join("in.onnx"), folder.path().join("out.onnx"));
    let compilation = Compilation::new();
    std::fs::write(&input, &compilation.model).unwrap();
    done(compilation.set("SetInputModelPath", &[text(&path(&input))]));
    done(compilation.run());
    check_file(&folder.path().join("in_ctx.onnx"));
    done(compilation.set("SetOutputModelPath", &[text(&path(&output))]));
    done(compilation.set("SetOutputModelExternalInitializersFile", &[text(c"weights.bin"), 1]));
    done(compilation.run());
    check_file(&output);
    assert!(folder.path().join("weights.bin").metadata().unwrap().len() >= 8);
}

extern "C" fn write(state: *mut c_void, bytes: *const c_void, len: usize) -> OrtStatusPtr {
    // SAFETY: the test passes its vector, and the library its bytes.
    unsafe {
        (*state.cast::<Vec<u8>>()).extend_from_slice(std::slice::from_raw_parts(bytes.cast::<u8>(), len));
    }
    OrtStatusPtr::default()
}

extern "C" fn refuse(_: *mut c_void, _: *const c_void, _: usize) -> OrtStatusPtr {
    raw!(CreateStatus(ort_sys::OrtErrorCode::ORT_NOT_FOUND, c"not today".as_ptr()))
}

#[test]
fn a_model_is_compiled_to_a_function_and_its_failure_is_that_of_the_call() {
    let mut got: Vec<u8> = Vec::new();
    let compilation = Compilation::of_model();
    let state = &raw mut got as usize;
    done(compilation.set("SetOutputModelWriteFunc", &[write as *const () as usize, state]));
    done(compilation.run());
    check_bytes(&got);
    done(compilation.set("SetOutputModelWriteFunc", &[refuse as *const () as usize, 0]));
    assert_eq!(compilation.run(), Some((14, "not today".to_owned())));
}

/// What a handler of initializers was asked, and the file that it writes.
struct Handler {
    asked: Vec<String>,
    file: std::path::PathBuf,
}

extern "C" fn locate(
    state: *mut c_void,
    name: *const c_char,
    value: *const OrtValue,
    _: *const OrtExternalInitializerInfo,
    out: *mut *mut OrtExternalInitializerInfo,
) -> OrtStatusPtr {
    // SAFETY: the test passes its handler.
    let handler = unsafe { &mut *state.cast::<Handler>() };
    handler.asked.push(crate::library::string(name));
    let bytes = bytes_of(value);
    std::fs::write(&handler.file, [vec![0; 16], bytes.clone()].concat()).unwrap();
    raw!(CreateExternalInitializerInfo(c"own.bin".as_ptr(), 16, bytes.len(), out))
}

#[test]
fn a_handler_says_where_initializers_go() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("out.onnx");
    let mut handler = Handler { asked: Vec::new(), file: folder.path().join("own.bin") };
    let compilation = Compilation::of_model();
    done(compilation.set("SetOutputModelPath", &[text(&path(&output))]));
    let state = &raw mut handler as usize;
    done(compilation.set("SetOutputModelGetInitializerLocationFunc", &[locate as *const () as usize, state]));
    done(compilation.run());
    assert_eq!(handler.asked, ["scale"]);
    check_file(&output);
    let info: *mut OrtExternalInitializerInfo =
        make!(CreateExternalInitializerInfo(c"own.bin".as_ptr(), 16, 8));
    assert_eq!(crate::library::string(raw!(ExternalInitializerInfo_GetFilePath(info))), "own.bin");
    assert_eq!(raw!(ExternalInitializerInfo_GetFileOffset(info)), 16);
    assert_eq!(raw!(ExternalInitializerInfo_GetByteSize(info)), 8);
    raw!(ReleaseExternalInitializerInfo(info));
}

fn cases() -> Vec<(&'static str, Refused)> {
    let empty = Compilation::new();
    let mut model = Compilation::of_model();
    let folder = tempfile::tempdir().unwrap();
    let (known, nowhere) = (folder.path().join("known.onnx"), folder.path().join("none/out.onnx"));
    std::fs::write(&known, "").unwrap();
    let (known, nowhere) = (path(&known), path(&nowhere));
    let allocator: *mut ort_sys::OrtAllocator = make!(GetAllocatorWithDefaultOptions());
    let (mut memory, mut len) = (0usize, 0usize);
    let (allocator, memory, len) = (allocator as usize, &raw mut memory as usize, &raw mut len as usize);
    let mut cases = vec![
        ("no input", empty.run()),
        ("empty input path", empty.set("SetInputModelPath", &[text(c"")])),
        ("null input", empty.set("SetInputModelFromBuffer", &[0, 0])),
        ("input of no bytes", empty.set("SetInputModelFromBuffer", &[text(c"x"), 0])),
        ("null model", empty.set("SetInputModel", &[0])),
        ("empty output path", empty.set("SetOutputModelPath", &[text(c"")])),
        ("null output memory", empty.set("SetOutputModelBuffer", &[allocator, 0, len])),
        ("null output size", empty.set("SetOutputModelBuffer", &[allocator, memory, 0])),
        ("null allocator", empty.set("SetOutputModelBuffer", &[0, memory, len])),
        ("empty initializers path", empty.set("SetOutputModelExternalInitializersFile", &[text(c""), 1])),
        ("null write function", empty.set("SetOutputModelWriteFunc", &[0, 0])),
        ("null location function", empty.set("SetOutputModelGetInitializerLocationFunc", &[0, 0])),
        ("level 55", empty.set("SetGraphOptimizationLevel", &[55])),
        ("empty folder", empty.set("SetEpContextBinaryInformation", &[text(c""), text(c"x")])),
        ("empty name", empty.set("SetEpContextBinaryInformation", &[text(c"/folder/"), text(c"")])),
        ("folder without end", empty.set("SetEpContextBinaryInformation", &[text(c"/folder"), text(c"x")])),
        ("no output", model.run()),
    ];
    done(empty.set("SetInputModelPath", &[text(c"/nonexistent.onnx")]));
    cases.push(("absent input", empty.run()));
    done(model.set("SetOutputModelPath", &[text(&nowhere)]));
    cases.push(("absent folder", model.run()));
    done(model.set("SetOutputModelPath", &[text(&known)]));
    done(model.set("SetFlags", &[2]));
    cases.push(("known file", model.run()));
    done(model.set("SetFlags", &[1]));
    cases.push(("nothing compiled", model.run()));
    done(model.set("SetFlags", &[0]));
    model.write_to_memory();
    let garbage = b"garbage!";
    done(model.set("SetInputModelFromBuffer", &[garbage.as_ptr() as usize, garbage.len()]));
    cases.push(("garbage", model.run()));
    cases
}

/// Our text begins with ONNX Runtime's. Paths are those of each run.
#[test]
fn refusals_are_those_of_onnx_runtime() {
    let recorded = &json("compile.json");
    let cases = cases();
    for (name, refused) in &cases {
        let expected = recorded.get(name).unwrap_or_else(|| panic!("'{name}' is not recorded"));
        let (code, text) = refused.as_ref().unwrap_or_else(|| panic!("'{name}' is not refused"));
        assert_eq!(i64::from(*code), expected["code"].as_i64().unwrap(), "{name}: {text}");
        let words = expected["text"].as_str().unwrap();
        let words = words.split_once("\"FOLDER").map_or(words, |(words, _)| words);
        assert!(text.starts_with(words), "{name}: '{text}' does not begin with '{words}'");
    }
    assert_eq!(cases.len(), recorded.as_object().unwrap().len(), "each recorded case is tested");
}
