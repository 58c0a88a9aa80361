//! Refusals: codes and texts of ONNX Runtime, which programs match.

use std::ffi::{c_char, c_void};
use std::ptr::{null, null_mut};

use ort_sys::{OrtIoBinding, OrtMemoryInfo, OrtSessionOptions, OrtStatusPtr, OrtValue};

use crate::library::{
    c, call, element_type, env, json, make, memory_info, raw, refusal, run, session, tensor,
};

/// What a case was refused with.
type Refused = Option<(i32, String)>;

/// Calls a function with a number that its enumeration may not have.
fn with_number(function: usize, options: *mut OrtSessionOptions, number: i32) -> Refused {
    // SAFETY: an enumeration of C is an `i32`, and the library takes any number.
    let function = unsafe {
        std::mem::transmute::<usize, extern "system" fn(*mut OrtSessionOptions, i32) -> OrtStatusPtr>(
            function,
        )
    };
    refusal(function(options, number))
}

fn with_data(bytes: &mut [u8], dims: &[i64], number: i32) -> Refused {
    type Create = unsafe extern "system" fn(
        *const OrtMemoryInfo,
        *mut c_void,
        usize,
        *const i64,
        usize,
        i32,
        *mut *mut OrtValue,
    ) -> OrtStatusPtr;
    let function = crate::library::api().CreateTensorWithDataAsOrtValue as usize;
    // SAFETY: an enumeration of C is an `i32`, and the library takes any number.
    let create = unsafe { std::mem::transmute::<usize, Create>(function) };
    let info = memory_info();
    let mut value = null_mut();
    // SAFETY: the arguments are those that the header demands.
    refusal(unsafe {
        create(info, bytes.as_mut_ptr().cast(), bytes.len(), dims.as_ptr(), dims.len(), number, &mut value)
    })
}

fn entry(options: *mut OrtSessionOptions, key: &str, value: &str) -> Refused {
    refusal(raw!(AddSessionConfigEntry(options, c(key).as_ptr(), c(value).as_ptr())))
}

fn value_of(values: &[*mut OrtValue], kind: i32) -> Refused {
    type Create =
        unsafe extern "system" fn(*const *mut OrtValue, usize, i32, *mut *mut OrtValue) -> OrtStatusPtr;
    let function = crate::library::api().CreateValue as usize;
    // SAFETY: an enumeration of C is an `i32`, and the library takes any number.
    let create = unsafe { std::mem::transmute::<usize, Create>(function) };
    let mut value = null_mut();
    // SAFETY: the arguments are those that the header demands.
    refusal(unsafe { create(values.as_ptr(), values.len(), kind, &mut value) })
}

/// The cases of runs.
fn runs() -> Vec<(&'static str, Refused)> {
    let session = session("add");
    let mut memory = [vec![0u8; 24], vec![0u8; 48], vec![0u8; 12], vec![0u8; 32]];
    let [right, double, rank, size] = &mut memory;
    let (right, double) = (tensor(right, &[2, 3], 1), tensor(double, &[2, 3], 11));
    let (rank, size) = (tensor(rank, &[3], 1), tensor(size, &[2, 4], 1));
    let with = |name: &str, value: *mut OrtValue, outputs: &[&str], given: *mut OrtValue| {
        run(session, &[(name, value.cast_const())], outputs, &mut [given])
    };
    vec![
        ("unknown input", with("nope", right, &["y"], null_mut())),
        ("null input", with("x", null_mut(), &["y"], null_mut())),
        ("unknown output", with("x", right, &["nope"], null_mut())),
        ("no outputs", with("x", right, &[], null_mut())),
        ("input of wrong type", with("x", double, &["y"], null_mut())),
        ("input of wrong rank", with("x", rank, &["y"], null_mut())),
        ("input of wrong size", with("x", size, &["y"], null_mut())),
        ("output of wrong type", with("x", right, &["y"], double)),
        ("output of wrong rank", with("x", right, &["y"], rank)),
        ("output of wrong size", with("x", right, &["y"], size)),
        ("bound input", {
            let binding: *mut OrtIoBinding = make!(CreateIoBinding(session));
            refusal(raw!(BindInput(binding, c"nope".as_ptr(), right)))
        }),
        ("index of an input", {
            let (allocator, mut name) = (make!(GetAllocatorWithDefaultOptions()), null_mut());
            refusal(raw!(SessionGetInputName(session, 7, allocator, &mut name)))
        }),
    ]
}

/// The cases of sessions and their options.
fn sessions() -> Vec<(&'static str, Refused)> {
    let (env, mut session) = (env(), null_mut());
    let options: *mut OrtSessionOptions = make!(CreateSessionOptions());
    let table = crate::library::api();
    let absent = c"/nonexistent/model.onnx".as_ptr();
    let bytes = |bytes: &[u8], session: &mut *mut _| {
        refusal(raw!(CreateSessionFromArray(env, bytes.as_ptr().cast(), bytes.len(), options, session)))
    };
    vec![
        ("no such file", refusal(raw!(CreateSession(env, absent, options, &mut session)))),
        ("garbage bytes", bytes(b"not a model", &mut session)),
        ("no bytes", bytes(b"", &mut session)),
        ("level 55", with_number(table.SetSessionGraphOptimizationLevel as usize, options, 55)),
        ("mode 7", with_number(table.SetSessionExecutionMode as usize, options, 7)),
        ("empty key", entry(options, "", "1")),
        ("long key", entry(options, &"k".repeat(1025), "1")),
        ("long value", entry(options, "k", &"v".repeat(8193))),
        ("number of a key", entry(options, "session.intra_op_num_threads", "x")),
        ("flag of a key", entry(options, "session.enable_mem_pattern", "x")),
        ("absent provider", {
            let name = c"QNN".as_ptr();
            refusal(raw!(SessionOptionsAppendExecutionProvider(options, name, null(), null(), 0)))
        }),
        ("CUDA options", refusal(raw!(CreateCUDAProviderOptions(&mut null_mut())))),
        ("TensorRT options", refusal(raw!(CreateTensorRTProviderOptions(&mut null_mut())))),
        ("unregister", refusal(raw!(UnregisterAllocator(env, memory_info())))),
        ("arena key", {
            let (key, value) = (c"nope".as_ptr(), 1usize);
            refusal(raw!(CreateArenaCfgV2(&key, &value, 1, &mut null_mut())))
        }),
        ("memory info", {
            let kind = ort_sys::OrtAllocatorType::OrtDeviceAllocator;
            let memory = ort_sys::OrtMemType::OrtMemTypeDefault;
            refusal(raw!(CreateMemoryInfo(c"Nope".as_ptr(), kind, 0, memory, &mut null_mut())))
        }),
    ]
}

/// The cases of values.
fn values() -> Vec<(&'static str, Refused)> {
    let mut memory = [vec![0u8; 24], vec![0u8; 48], vec![0u8; 12], vec![0u8; 24]];
    let [right, double, rank, bytes] = &mut memory;
    let right = tensor(right, &[2, 3], 1);
    let (double, rank) = (tensor(double, &[2, 3], 11), tensor(rank, &[3], 1));
    let allocator = make!(GetAllocatorWithDefaultOptions());
    let strings: *mut OrtValue = make!(CreateTensorAsOrtValue(allocator, &2i64, 1, element_type(8)));
    let texts = [c"a", c"bb", c"ccc"].map(|text| text.as_ptr());
    let too_many = refusal(raw!(FillStringTensor(strings, texts.as_ptr(), 3)));
    call!(FillStringTensor(strings, texts.as_ptr(), 2));
    let (mut buffer, mut offsets, mut len) = ([0u8; 8], [0usize; 2], 0usize);
    let mut content = |bytes: usize, count: usize| {
        let buffer = buffer.as_mut_ptr().cast::<c_void>();
        refusal(raw!(GetStringTensorContent(strings, buffer, bytes, offsets.as_mut_ptr(), count)))
    };
    let place = [5i64, 0];
    vec![
        ("buffer too small", with_data(bytes, &[4, 3], 1)),
        ("negative size", with_data(bytes, &[-1, 3], 1)),
        ("element type 16777215", with_data(bytes, &[2, 3], 16_777_215)),
        ("too many strings", too_many),
        ("string buffer", content(2, 2)),
        ("string offsets", content(3, 1)),
        ("string index", refusal(raw!(GetStringTensorElementLength(strings, 9, &mut len)))),
        ("string element", {
            let buffer = buffer.as_mut_ptr().cast::<c_void>();
            refusal(raw!(GetStringTensorElement(strings, 1, 1, buffer)))
        }),
        ("location", refusal(raw!(TensorAt(right, place.as_ptr(), 2, &mut null_mut())))),
        ("rank of a location", refusal(raw!(TensorAt(right, place.as_ptr(), 1, &mut null_mut())))),
        ("value of no elements", value_of(&[], 2)),
        ("value of two types", value_of(&[right, double], 2)),
        ("value of one value", value_of(&[right], 3)),
        ("value of float keys", value_of(&[rank, rank], 3)),
        ("value of matrices", value_of(&[right, right], 3)),
        ("value of kind 9", value_of(&[right], 9)),
        ("count of a tensor", refusal(raw!(GetValueCount(right, &mut len)))),
        ("element of a tensor", refusal(raw!(GetValue(right, 0, allocator, &mut null_mut())))),
    ]
}

/// Our text begins with ONNX Runtime's, and may go on with the numbers of the case.
#[test]
fn refusals_are_those_of_onnx_runtime() {
    let recorded = json("errors.json");
    let cases: Vec<_> = runs().into_iter().chain(sessions()).chain(values()).collect();
    for (name, refused) in &cases {
        let expected = recorded.get(name).unwrap_or_else(|| panic!("'{name}' is not recorded"));
        let (code, text) = refused.as_ref().unwrap_or_else(|| panic!("'{name}' is not refused"));
        assert_eq!(i64::from(*code), expected["code"].as_i64().unwrap(), "{name}: {text}");
        let words = expected["text"].as_str().unwrap().trim_end_matches('.');
        assert!(text.starts_with(words), "{name}: '{text}' does not begin with '{words}'");
    }
    assert_eq!(cases.len(), recorded.as_object().unwrap().len(), "each recorded case is tested");
}

/// ONNX Runtime fails in the first node that reads the input, after the earlier ones have run.
#[test]
fn a_missing_input_is_refused_before_the_run() {
    let session = session("add");
    let refused = run(session, &[], &["y"], &mut [null_mut()]);
    assert_eq!(refused, Some((2, "Missing Input: x".to_owned())));
}

#[test]
fn a_status_keeps_its_code_and_text() {
    let code = ort_sys::OrtErrorCode::ORT_NO_SUCHFILE;
    let status = raw!(CreateStatus(code, c"a text".as_ptr() as *const c_char));
    assert_eq!(refusal(status), Some((3, "a text".to_owned())));
    let status = raw!(CreateStatus(code, c("x".repeat(5000).as_str()).as_ptr()));
    assert_eq!(refusal(status), Some((3, "x".repeat(4096))));
    raw!(ReleaseStatus(null_mut()));
}
