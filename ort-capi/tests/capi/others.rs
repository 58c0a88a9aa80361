//! Providers of vendors, environments, logs, profiles and assignments.

use std::ffi::{c_char, c_void};
use std::ptr::{null, null_mut};
use std::sync::Mutex;

use ort_sys::{
    OrtEnvCreationOptions, OrtEpAssignedNode, OrtEpAssignedSubgraph, OrtLoggingLevel, OrtRunOptions,
    OrtSessionOptions, OrtThreadingOptions,
};

use crate::library::{
    bytes_of, c, call, data, env, json, make, raw, refusal, run, session, session_with, string, tensor,
};

type Refused = Option<(i32, String)>;

fn cases() -> Vec<(&'static str, Refused)> {
    let (env, options): (_, *mut OrtSessionOptions) = (env(), make!(CreateSessionOptions()));
    let threads: *mut OrtThreadingOptions = make!(CreateThreadingOptions());
    let (mut devices, mut count) = (null(), 0);
    call!(GetEpDevices(env, &mut devices, &mut count));
    // SAFETY: there is one device, that of the CPU.
    let device = unsafe { *devices };
    let (mut made, mut id, session) = (null_mut::<c_void>(), 0, session("add"));
    let (mut subgraphs, mut number) = (null(), 0);
    let long = c(&"x".repeat(5000));
    vec![
        ("opaque type", {
            let out = (&raw mut made).cast();
            refusal(raw!(CreateOpaqueValue(c"d".as_ptr(), c"t".as_ptr(), c"data".as_ptr().cast(), 4, out)))
        }),
        ("set GPU", refusal(raw!(SetCurrentGpuDeviceId(0)))),
        ("get GPU", refusal(raw!(GetCurrentGpuDeviceId(&mut id)))),
        ("CANN options", refusal(raw!(CreateCANNProviderOptions((&raw mut made).cast())))),
        ("oneDNN options", refusal(raw!(CreateDnnlProviderOptions((&raw mut made).cast())))),
        ("ROCM options", refusal(raw!(CreateROCMProviderOptions((&raw mut made).cast())))),
        ("empty affinity", refusal(raw!(SetGlobalIntraOpThreadAffinity(threads, c"".as_ptr())))),
        ("long affinity", refusal(raw!(SetGlobalIntraOpThreadAffinity(threads, long.as_ptr())))),
        ("null affinity", refusal(raw!(SetGlobalIntraOpThreadAffinity(threads, null())))),
        ("absent library", {
            let path = c"/nonexistent.so".as_ptr();
            refusal(raw!(RegisterExecutionProviderLibrary(env, c"x".as_ptr(), path)))
        }),
        ("unknown library", refusal(raw!(UnregisterExecutionProviderLibrary(env, c"x".as_ptr())))),
        ("stream of the CPU", {
            refusal(raw!(CreateSyncStreamForEpDevice(device, null(), (&raw mut made).cast())))
        }),
        ("no recorded assignment", {
            refusal(raw!(Session_GetEpGraphAssignmentInfo(session, &mut subgraphs, &mut number)))
        }),
        ("null weightless model", {
            refusal(raw!(SessionOptionsSetWeightlessSourceModelBuffer(options, null(), 0)))
        }),
        ("null environment options", {
            let mut env = null_mut();
            refusal(raw!(CreateEnvWithOptions(null(), &mut env)))
        }),
    ]
}

/// ONNX Runtime's texts have places of its source before ours.
#[test]
fn refusals_are_those_of_onnx_runtime() {
    let recorded = json("others.json");
    let cases = cases();
    for (name, refused) in &cases {
        let expected = recorded.get(name).unwrap_or_else(|| panic!("'{name}' is not recorded"));
        let (code, text) = refused.as_ref().unwrap_or_else(|| panic!("'{name}' is not refused"));
        assert_eq!(i64::from(*code), expected["code"].as_i64().unwrap(), "{name}: {text}");
        let words = expected["text"].as_str().unwrap().trim_end();
        let is_ours = words.contains(text.trim_end()) || text.starts_with(words);
        assert!(is_ours, "{name}: '{text}' is not in '{words}'");
    }
    assert_eq!(cases.len(), recorded.as_object().unwrap().len(), "each recorded case is tested");
}

#[test]
fn a_library_without_a_provider_is_refused() {
    let path = c(crate::library::path().to_str().unwrap());
    let refused = refusal(raw!(RegisterExecutionProviderLibrary(env(), c"x".as_ptr(), path.as_ptr())));
    let (code, text) = refused.unwrap();
    assert!(code == 1 && text.starts_with("Failed to get symbol CreateEpFactories"), "{code} {text}");
}

/// The lines that a session's function got: severity, id and text.
static LINES: Mutex<Vec<(i32, String, String)>> = Mutex::new(Vec::new());

unsafe extern "system" fn log(
    parameter: *mut c_void,
    severity: OrtLoggingLevel,
    _: *const c_char,
    id: *const c_char,
    _: *const c_char,
    message: *const c_char,
) {
    assert_eq!(parameter as usize, 77);
    LINES.lock().unwrap().push((severity as i32, string(id), string(message)));
}

#[test]
fn a_session_logs_with_its_own_function_and_level() {
    let options: *mut OrtSessionOptions = make!(CreateSessionOptions());
    call!(SetUserLoggingFunction(options, log, 77 as *mut c_void));
    call!(SetSessionLogId(options, c"my session".as_ptr()));
    call!(SetSessionLogSeverityLevel(options, 0));
    let session = session_with("add", options);
    let lines = std::mem::take(&mut *LINES.lock().unwrap());
    assert!(!lines.is_empty(), "a session that is built logs at level 0");
    assert!(lines.iter().all(|(_, id, _)| id == "my session"), "{lines:?}");
    // Another session has the environment's function, and level.
    raw!(ReleaseSession(crate::library::session("add")));
    call!(SetSessionLogSeverityLevel(options, 4));
    raw!(ReleaseSession(session_with("add", options)));
    assert!(LINES.lock().unwrap().is_empty());
    raw!(ReleaseSession(session));
}

#[test]
fn a_session_says_which_provider_runs_its_nodes_if_it_is_asked_to() {
    let options: *mut OrtSessionOptions = make!(CreateSessionOptions());
    let key = c"session.record_ep_graph_assignment_info".as_ptr();
    call!(AddSessionConfigEntry(options, key, c"1".as_ptr()));
    let session = session_with("add", options);
    let (mut subgraphs, mut count): (*const *const OrtEpAssignedSubgraph, usize) = (null(), 0);
    call!(Session_GetEpGraphAssignmentInfo(session, &mut subgraphs, &mut count));
    assert_eq!(count, 1);
    // SAFETY: there is one.
    let subgraph = unsafe { *subgraphs };
    assert_eq!(string(make!(EpAssignedSubgraph_GetEpName(subgraph))), "CPUExecutionProvider");
    let (mut nodes, mut count): (*const *const OrtEpAssignedNode, usize) = (null(), 0);
    call!(EpAssignedSubgraph_GetNodes(subgraph, &mut nodes, &mut count));
    assert_eq!(count, 1);
    // SAFETY: there is one.
    let node = unsafe { *nodes };
    assert_eq!(string(make!(EpAssignedNode_GetDomain(node))), "");
    assert_eq!(string(make!(EpAssignedNode_GetOperatorType(node))), "Add");
    raw!(ReleaseSession(session));
}

#[test]
fn a_run_writes_its_own_profile() {
    let folder = tempfile::tempdir().unwrap();
    let options: *mut OrtRunOptions = make!(CreateRunOptions());
    let prefix = c(folder.path().join("run").to_str().unwrap());
    call!(RunOptionsEnableProfiling(options, prefix.as_ptr()));
    let mut x = [0u8; 24];
    let (session, x) = (session("add"), tensor(&mut x, &[2, 3], 1));
    let files =
        || std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path()).collect::<Vec<_>>();
    let run = || {
        let (names, values, outputs) = ([c"x".as_ptr()], [x.cast_const()], [c"y".as_ptr()]);
        let mut output = null_mut();
        call!(Run(session, options, names.as_ptr(), values.as_ptr(), 1, outputs.as_ptr(), 1, &mut output));
    };
    run();
    let written = files();
    assert_eq!(written.len(), 1);
    let events: serde_json::Value = serde_json::from_slice(&std::fs::read(&written[0]).unwrap()).unwrap();
    assert!(events.as_array().unwrap().iter().any(|event| event["args"]["op_name"] == "Add"), "{events}");
    call!(RunOptionsDisableProfiling(options));
    std::fs::remove_file(&written[0]).unwrap();
    run();
    assert!(files().is_empty());
}

#[test]
fn the_experimental_function_is_found_by_its_name() {
    type Test = unsafe extern "system" fn(*mut i64) -> ort_sys::OrtStatusPtr;
    let found = raw!(GetExperimentalFunction(c"OrtApi_ExperimentalApiTest_SinceV28".as_ptr()));
    // SAFETY: the function of this name has this type.
    let test: Option<Test> = unsafe { std::mem::transmute_copy(&found) };
    let mut result = 0;
    // SAFETY: the argument is a place for the result.
    assert_eq!(refusal(unsafe { test.unwrap()(&mut result) }), None);
    assert_eq!(result, 12345);
    for unknown in [c"NonExistentFunction".as_ptr(), c"".as_ptr(), std::ptr::null()] {
        assert!(raw!(GetExperimentalFunction(unknown)).is_null());
    }
    assert!(string(raw!(GetBuildInfoString())).starts_with("ORT Build Info: ort-runtime "));
}

#[test]
fn an_environment_is_made_with_options() {
    let options = OrtEnvCreationOptions {
        version: 31,
        logging_severity_level: 3,
        log_id: c"test".as_ptr(),
        custom_logging_function: None,
        custom_logging_param: null_mut(),
        threading_options: null(),
        config_entries: null(),
    };
    let made: *mut ort_sys::OrtEnv = make!(CreateEnvWithOptions(&options));
    assert_eq!(made, env());
    let mut out = null_mut();
    let wrong = [
        OrtEnvCreationOptions { version: 23, ..options },
        OrtEnvCreationOptions { logging_severity_level: 5, ..options },
        OrtEnvCreationOptions { log_id: null(), ..options },
    ];
    for options in &wrong {
        assert_eq!(refusal(raw!(CreateEnvWithOptions(options, &mut out))).map(|(code, _)| code), Some(2));
    }
}

#[test]
fn tensors_are_copied_and_models_say_what_they_were_compiled_for() {
    let (mut from, mut to) = ([7u8; 24], [0u8; 24]);
    let (from, to) = (tensor(&mut from, &[2, 3], 1), tensor(&mut to, &[2, 3], 1));
    call!(CopyTensors(env(), [from.cast_const()].as_ptr(), [to.cast_const()].as_mut_ptr(), null_mut(), 1));
    assert_eq!(bytes_of(to), [7u8; 24]);
    let allocator = make!(GetAllocatorWithDefaultOptions());
    let path = c(data("models/add.onnx").to_str().unwrap());
    let provider = c"CPUExecutionProvider".as_ptr();
    let info: *mut c_char = make!(GetCompatibilityInfoFromModel(path.as_ptr(), provider, allocator));
    assert!(info.is_null());
    let pairs: *mut ort_sys::OrtKeyValuePairs = make!(AllocatorGetStats(allocator));
    raw!(ReleaseKeyValuePairs(pairs));
    let _ = run(session("add"), &[("x", from.cast_const())], &["y"], &mut [null_mut()]);
}

#[test]
fn an_allocator_of_a_session_counts_what_it_gives() {
    let session = session("add");
    let allocator: *mut ort_sys::OrtAllocator =
        make!(CreateAllocator(session, crate::library::memory_info().cast_const()));
    let stat = |key: &std::ffi::CStr| {
        let pairs: *mut ort_sys::OrtKeyValuePairs = make!(AllocatorGetStats(allocator));
        let value = string(raw!(GetKeyValue(pairs, key.as_ptr())));
        raw!(ReleaseKeyValuePairs(pairs));
        value
    };
    let (one, two) = (make!(AllocatorAlloc(allocator, 100)), make!(AllocatorAlloc(allocator, 28)));
    assert_eq!([stat(c"InUse"), stat(c"NumAllocs"), stat(c"MaxAllocSize")], ["128", "2", "100"]);
    call!(AllocatorFree(allocator, one));
    call!(AllocatorFree(allocator, two));
    assert_eq!([stat(c"InUse"), stat(c"MaxInUse"), stat(c"Limit")], ["0", "128", "-1"]);
    raw!(ReleaseAllocator(allocator));
}
